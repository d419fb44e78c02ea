"""Recognise products of two tensors: matrix products, a broadcast multiplication and a sum, and other joins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..record.ops import Op, Recording, TensorRef
from .axis import Dim, setting, wide
from .dimensions import Dimensions
from .rules import reduced_places


@dataclass(frozen=True)
class Product:
    """`batch rows inner, batch inner columns -> batch rows columns`, each of any number of dimensions."""

    op: Op
    """The operation that gives the result."""
    multiply: Op
    """The operation that reads the factors; different from `op` if the sum is a separate operation."""
    left: TensorRef
    right: TensorRef

    is_dot: ClassVar[bool] = True
    """Whether the products of features are summed."""

    @property
    def name(self) -> str:
        """The names of its operations: `bmm`, `mul and sum`."""
        return " and ".join(dict.fromkeys((self.multiply.base_name, self.op.base_name)))

    @property
    def flops(self) -> int:
        """2 · batch · rows · inner · columns, as `torch.utils.flop_counter` counts; half without a sum; Joint: 0."""
        if self.multiply.does("product"):
            return 2 * self.op.output.numel * self.left.shape[-1]
        return self.is_dot * (1 + (self.op is not self.multiply)) * self.multiply.output.numel

    def axes(self, dimensions: Dimensions) -> ProductAxes:
        """Return the role of each dimension of the factors and of the result."""
        result = dimensions.of(self.op.output)
        if self.multiply.does("product"):
            left, right = dimensions.of(self.left), dimensions.of(self.right)
            if len(right) < 2:  # mv, dot
                rows = result[0] if result else ()
                return ProductAxes((), rows, (), rows, left[-1], right[-1], ())
            batch = tuple([atom for dim in result[:-2] for atom in dim])
            return ProductAxes(batch, result[-2], result[-1], left[-2], left[-1], right[-2], right[-1])
        result_atoms = [atom for dim in result for atom in dim]
        sides = [*sides_of(dimensions, self.multiply)]
        axes: dict[str, Dim] = defaultdict(tuple)
        for whole, first, second in sides:
            if not second:
                axes["rows"] += whole
                axes["left_rows"] += first
            elif not first:
                axes["columns"] += whole
                axes["right_columns"] += second
            elif whole and set(whole) <= set(result_atoms):
                axes["batch"] += whole
            else:
                axes["left_inner"] += first
                axes["right_inner"] += second
        # The reduction of the features may give several scores, one for each head.
        known = {atom for whole, _, _ in sides for atom in whole}
        axes["batch"] += tuple(atom for atom in wide(result_atoms) if atom not in known)
        return ProductAxes(**axes)


@dataclass(frozen=True)
class ProductAxes:
    """The axes of a product by role. The axes of a factor may differ from the axes of the result."""

    batch: Dim = ()
    rows: Dim = ()
    columns: Dim = ()
    left_rows: Dim = ()
    left_inner: Dim = ()
    right_inner: Dim = ()
    right_columns: Dim = ()


@dataclass(frozen=True)
class Joint(Product):
    """Scores of two factors that are broadcast and added, subtracted or concatenated.

    `multiply` is the operation that joins the factors, `op` the operation that reduces the result to scores.
    """

    between: tuple[Op, ...] = ()
    """The operations from `multiply` to `op`, in order; `op` is the last."""

    is_dot: ClassVar[bool] = False

    @property
    def meeting(self) -> str:
        """The name of the join of queries and keys."""
        name = self.multiply.base_name.rstrip("_")
        return {"add": "a sum", "cat": "concatenated features"}.get(name, "a difference")


class ProductPath(NamedTuple):
    """A product, and the operations between it and the softmax in the order of the run."""

    product: Product
    path: tuple[Op, ...]
    tensor: TensorRef
    """For the scores the result of the product; for the values the factor that is the weights."""

    @property
    def values_first(self) -> bool:
        """Whether the values are the left factor of the product with the weights."""
        return self.product.right.id == self.tensor.id

    @property
    def values(self) -> TensorRef:
        """The factor that is not the weights."""
        return self.product.left if self.values_first else self.product.right

    def averaged(self, dimensions: Dimensions) -> Dim:
        """Return the axes of the weights that the product with the values sums over."""
        axes = self.product.axes(dimensions)
        return axes.right_inner if self.values_first else axes.left_inner


def product_of(recording: Recording, op: Op) -> Product | None:
    """Return the product that this operation completes: a matrix product, or a sum over a multiplication; else None."""
    if op.does("product"):
        return Product(op, op, *op.inputs[-2:]) if len(op.inputs) >= 2 else None
    multiply = recording.producer(op.inputs[0]) if op.base_name == "sum" and op.outputs else None
    if multiply is None or multiply.base_name != "mul" or len(multiply.inputs) != 2 or not multiply.output.shape:
        return None
    left, right = multiply.inputs
    rank = len(multiply.output.shape)
    summed = reduced_places(op)
    wide_places = [tuple(is_wide(tensor, rank, place) for place in range(rank)) for tensor in (left, right)]
    # Both factors have every summed dimension, and their other dimensions differ: otherwise it is e.g. a norm.
    whole = all(places[place] for place in summed for places in wide_places)
    return Product(op, multiply, left, right) if summed and whole and wide_places[0] != wide_places[1] else None


def sides_of(dimensions: Dimensions, op: Op) -> Iterator[tuple[Dim, Dim, Dim]]:
    """Yield each axis of the result of a join, with its axis in the left and in the right factor.

    An axis is empty in a factor that is broadcast or repeated along it. Concatenated features are no axis of the
    result.
    """
    left, right = (dimensions.of(factor) for factor in op.inputs)
    whole = dimensions.of(op.output)
    if op.does("distances"):
        batch = zip(whole[:-2], left[:-2], right[:-2], strict=False)
        yield from (*batch, (whole[-2], left[-2], ()), (whole[-1], (), right[-2]), ((), left[-1], right[-1]))
        return
    rank = len(whole)
    joined = setting(op, 1, "dim", 0) % rank if op.base_name == "cat" else None
    left, right = (((),) * (rank - len(dims)) + dims for dims in (left, right))
    for place, dim in enumerate(whole):
        first, second = (
            wide(dims[place]) if place == joined or is_wide(factor, rank, place) else ()
            for dims, factor in zip((left, right), op.inputs, strict=True)
        )
        out = wide(dim)
        if place == joined:
            yield (), first, second
        elif not out:
            yield dim, dim, dim
        elif any(len(side) != len(out) for side in (first, second) if side):
            yield out, first, second
        else:
            for at, atom in enumerate(out):
                a, b = (side[at : at + 1] if side and not side[at].repeats else () for side in (first, second))
                yield (atom,), a, b


def is_wide(tensor: TensorRef, rank: int, place: int) -> bool:
    """Return whether a factor has more than one element along a dimension of the broadcast or expanded result."""
    at = place - (rank - len(tensor.shape))
    return at >= 0 and tensor.shape[at] > 1 and tensor.stride[at] != 0

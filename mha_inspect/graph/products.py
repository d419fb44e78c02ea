"""Recognise products of two tensors: matrix products, a broadcast multiplication and a sum, and other joins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, NamedTuple

from ..record.ops import Op, Recording, TensorRef
from .axis import Axis, Dim, plain_name, setting, wide
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
        if not self.is_dot:
            return 0
        multiplied = self.multiply.output.numel
        return multiplied if self.op is self.multiply else 2 * multiplied

    def axes(self, dimensions: Dimensions) -> ProductAxes:
        """Return the role of each dimension of the factors and of the result."""
        if self.multiply.does("product"):
            return self._axes_of_matrices(dimensions)
        result_atoms = list(chain.from_iterable(dimensions.of(self.op.output)))
        in_result = set(result_atoms)
        axes: dict[str, Dim] = defaultdict(tuple)
        multiplied: set[Axis] = set()
        for whole, first, second in sides_of(dimensions, self.multiply):
            multiplied.update(whole)
            if not second:
                axes["rows"] += whole
                axes["left_rows"] += first
            elif not first:
                axes["columns"] += whole
                axes["right_columns"] += second
            elif whole and in_result.issuperset(whole):
                axes["batch"] += whole
            else:
                axes["left_inner"] += first
                axes["right_inner"] += second
        # The reduction of the features may give several scores, one for each head.
        axes["batch"] += tuple([atom for atom in wide(result_atoms) if atom not in multiplied])
        return ProductAxes(**axes)

    def _axes_of_matrices(self, dimensions: Dimensions) -> ProductAxes:
        """Return the role of each dimension in a product of matrices, or of a matrix and a vector."""
        result = dimensions.of(self.op.output)
        left = dimensions.of(self.left)
        right = dimensions.of(self.right)
        if len(right) < 2:  # mv, dot
            rows = result[0] if result else ()
            return ProductAxes(rows=rows, left_rows=rows, left_inner=left[-1], right_inner=right[-1])
        return ProductAxes(
            batch=tuple(chain.from_iterable(result[:-2])),
            rows=result[-2],
            columns=result[-1],
            left_rows=left[-2],
            left_inner=left[-1],
            right_inner=right[-2],
            right_columns=right[-1],
        )


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
class KernelScores(Product):
    """The product of queries and keys in a fused attention kernel, which does not transpose the keys for it."""

    def axes(self, dimensions: Dimensions) -> ProductAxes:
        """Return the role of each dimension of the factors and of the result."""
        axes = self._axes_of_matrices(dimensions)
        return replace(axes, right_inner=axes.right_columns, right_columns=axes.right_inner)


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
        name = plain_name(self.multiply)
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
    """Return the product that this operation completes: a matrix product, or a sum over a multiplication; else None.

    Those of fused attention kernels are read by `kernels`.
    """
    if op.does("product"):
        if len(op.inputs) < 2 or op.is_step:
            return None
        left, right = op.inputs[-2:]
        return Product(op, op, left, right)
    if op.base_name != "sum" or not op.outputs:
        return None
    multiply = recording.producer(op.inputs[0])
    if multiply is None or multiply.base_name != "mul" or len(multiply.inputs) != 2:
        return None
    left, right = multiply.inputs
    rank = len(multiply.output.shape)
    if not rank:
        return None
    summed = set(reduced_places(op))
    of_left, of_right = wide_places(left, rank), wide_places(right, rank)
    # Both factors have every summed dimension, and their other dimensions differ: otherwise it is e.g. a norm.
    have_summed = summed <= of_left & of_right
    if not summed or not have_summed or of_left == of_right:
        return None
    return Product(op, multiply, left, right)


class Side(NamedTuple):
    """One axis of the result of a join, and of its factors; empty in a factor that is repeated along it."""

    whole: Dim
    left: Dim
    right: Dim


def sides_of(dimensions: Dimensions, op: Op) -> Iterator[Side]:
    """Yield each axis of the result of a join, with its axis in the left and in the right factor.

    An axis is empty in a factor that is broadcast or repeated along it. Concatenated features are no axis of the
    result.
    """
    if op.does("distances"):
        yield from _sides_of_distance(dimensions, op)
        return
    whole = dimensions.of(op.output)
    rank = len(whole)
    joined = setting(op, 1, "dim", 0) % rank if op.base_name == "cat" else None
    left, right = (_factor_sides(dimensions, factor, rank, joined) for factor in op.inputs)
    for place, dim in enumerate(whole):
        first, second = left[place], right[place]
        out = wide(dim)
        if place == joined:
            yield Side((), first, second)
        elif not out:
            yield Side(dim, dim, dim)
        elif not {len(first), len(second)} <= {0, len(out)}:
            yield Side(out, first, second)
        else:
            for at, atom in enumerate(out):
                yield Side((atom,), _unrepeated(first, at), _unrepeated(second, at))


def _sides_of_distance(dimensions: Dimensions, op: Op) -> Iterator[Side]:
    """Yield the axes of distances: `batch rows features, batch columns features -> batch rows columns`."""
    left, right = map(dimensions.of, op.inputs)
    whole = dimensions.of(op.output)
    *_, left_rows, left_features = left
    *_, right_columns, right_features = right
    *batch, rows, columns = whole
    for dim, first, second in zip(batch, left[:-2], right[:-2], strict=False):
        yield Side(dim, first, second)
    yield Side(rows, left_rows, ())
    yield Side(columns, (), right_columns)
    yield Side((), left_features, right_features)


def _factor_sides(
    dimensions: Dimensions,
    factor: TensorRef,
    rank: int,
    joined: int | None,
) -> list[Dim]:
    """Return the axes of a factor by the dimension of the result; empty where it is broadcast or repeated."""
    dims = dimensions.of(factor)
    missing = rank - len(dims)
    sides: list[Dim] = []
    for place in range(rank):
        has_place = place == joined or is_wide(factor, rank, place)
        is_there = has_place and place >= missing
        sides.append(wide(dims[place - missing]) if is_there else ())
    return sides


def _unrepeated(side: Dim, place: int) -> Dim:
    """Return one axis of a factor; empty if the factor is repeated along it."""
    if not side or side[place].repeats:
        return ()
    return side[place : place + 1]


def is_wide(tensor: TensorRef, rank: int, place: int) -> bool:
    """Return whether a factor has more than one element along a dimension of the broadcast or expanded result."""
    at = place - (rank - len(tensor.shape))
    if at < 0:
        return False
    return tensor.shape[at] > 1 and tensor.stride[at] != 0


def wide_places(tensor: TensorRef, rank: int) -> set[int]:
    """Return the dimensions of a result of `rank` dimensions along which a factor has more than one element."""
    return {place for place in range(rank) if is_wide(tensor, rank, place)}

"""Products of two tensors, as a matrix product or written out as a broadcasting multiplication and a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..record.ops import Op, Recording, TensorRef
from .dimensions import Dim, Dimensions
from .rules import reduced_places


@dataclass(frozen=True)
class Product:
    """`batch rows inner, batch inner columns -> batch rows columns`, each of them any number of dimensions."""

    op: Op
    """The operation that gives the result."""
    multiply: Op
    """The operation that reads the factors: another one where a sum is written out."""
    left: TensorRef
    right: TensorRef

    @property
    def is_dot(self) -> bool:
        """Whether it sums up what features multiply to."""
        return True

    @property
    def name(self) -> str:
        """The operations that it is: `bmm`, `mul and sum`."""
        return " and ".join(dict.fromkeys((self.multiply.base_name, self.op.base_name)))

    @property
    def flops(self) -> int:
        """2 · batch · rows · inner · columns, as `torch.utils.flop_counter` counts; without a sum, half of it."""
        if self.multiply.does("product"):
            return 2 * self.op.output.numel * self.left.shape[-1]
        return (1 + (self.op is not self.multiply)) * self.multiply.output.numel

    def axes(self, dimensions: Dimensions) -> ProductAxes:
        """Return what the dimensions of the factors and of the result are to the product."""
        if self.multiply.does("product"):
            return _of_matrices(*map(dimensions.of, (self.left, self.right, self.op.output)))
        return self._of_broadcast(dimensions)

    def _of_broadcast(self, dimensions: Dimensions) -> ProductAxes:
        whole = self.multiply.output
        summed = reduced_places(self.op) if self.op is not self.multiply else ()
        rank = len(whole.shape)
        left, right, out = (((),) * (rank - len(t.shape)) + dimensions.of(t) for t in (self.left, self.right, whole))
        axes: dict[str, Dim] = defaultdict(tuple)
        for place in range(rank):
            in_left, in_right = (is_wide(tensor, rank, place) for tensor in (self.left, self.right))
            if place in summed:
                axes["left_inner"] += left[place]
                axes["right_inner"] += right[place]
            elif in_left == in_right:
                axes["batch"] += out[place]
            elif in_left:
                axes["left_rows"] += left[place]
                axes["rows"] += out[place]
            else:
                axes["right_columns"] += right[place]
                axes["columns"] += out[place]
        return ProductAxes(**axes)


@dataclass(frozen=True)
class ProductAxes:
    """The axes of a product by what they are to it. Those of the factors are seen as before, and after, they met."""

    batch: Dim = ()
    rows: Dim = ()
    columns: Dim = ()
    left_rows: Dim = ()
    left_inner: Dim = ()
    right_inner: Dim = ()
    right_columns: Dim = ()


def product_of(recording: Recording, op: Op) -> Product | None:
    """Return the product that this operation gives: a matrix product, or the sum over a broadcasting multiplication."""
    if op.does("product"):
        return Product(op, op, *op.inputs[-2:]) if len(op.inputs) >= 2 else None
    if op.base_name != "sum" or not op.outputs:
        return None
    multiply = recording.producer(op.inputs[0])
    if multiply is None or multiply.base_name != "mul" or len(multiply.inputs) != 2 or not op.inputs[0].shape:
        return None
    left, right = multiply.inputs
    rank = len(multiply.output.shape)
    summed = reduced_places(op)
    wide = [tuple(is_wide(tensor, rank, place) for place in range(rank)) for tensor in (left, right)]
    # Each has all that is summed over, and one has what the other has not: else it is no product but a norm, say.
    whole = all(all(places[place] for place in summed) for places in wide)
    return Product(op, multiply, left, right) if summed and whole and wide[0] != wide[1] else None


def outer_product_of(op: Op) -> Product | None:
    """Return a multiplication in which each factor is repeated along what the other has: a product without a sum."""
    if op.base_name != "mul" or len(op.inputs) != 2:
        return None
    left, right = op.inputs
    rank = len(op.output.shape)
    pairs = {tuple(is_wide(tensor, rank, place) for tensor in (left, right)) for place in range(rank)}
    return Product(op, op, left, right) if {(True, False), (False, True)} <= pairs else None


def _of_matrices(left: tuple[Dim, ...], right: tuple[Dim, ...], out: tuple[Dim, ...]) -> ProductAxes:
    if len(right) < 2:  # mv, dot
        rows = out[0] if out else ()
        return ProductAxes((), rows, (), rows, left[-1], right[-1], ())
    return ProductAxes(_flat(out[:-2]), out[-2], out[-1], left[-2], left[-1], right[-2], right[-1])


def _flat(dims: Iterable[Dim]) -> Dim:
    return tuple(atom for dim in dims for atom in dim)


def is_wide(tensor: TensorRef, rank: int, place: int) -> bool:
    """Return whether a factor has more than one element along a dimension of what it is broadcast or expanded to."""
    at = place - (rank - len(tensor.shape))
    return at >= 0 and tensor.shape[at] > 1 and tensor.stride[at] != 0

"""Recognise a softmax: torch's own, and a softmax written as exp and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..record.ops import Op, Recording, TensorRef
from .axis import plain_name
from .products import ProductPath, product_of
from .rules import reduced_places

_SMALL = 0.01
"""The largest guard against a zero sum. With more, as in `exp(x) / (1 + sum)`, the weights are no softmax."""
_MANY = 6
"""The most operations, mainly masks, between exponentials and their sum."""


class Softmax(NamedTuple):
    """A softmax of scores, or other operations that compute weights from scores."""

    op: Op
    """The operation that gives the weights; or the exponentials, if the values product comes before the division."""
    masked: TensorRef
    """The input of the softmax."""
    dim: int
    masks: tuple[Op, ...] = ()
    """The operations that set exponentials to zero before the sum."""
    divided: Op | None = None
    """The operation that divides the values product by the sum, if the weights are never computed; otherwise None."""
    values_product: ProductPath | None = None
    """The product of such exponentials with the values; None if the weights are computed."""
    ops: tuple[Op, ...] = ()
    """The operations that compute weights without a softmax, in order; `op` is the last."""
    beside: tuple[int, ...] = ()
    """The other dimensions that the softmax runs over, e.g. the rows of an image beside its columns."""


def softmax_of(recording: Recording, op: Op) -> Softmax | None:
    """Return the softmax that this operation completes; None if it completes no softmax.

    A softmax of several operations is found by its last: `exp(x - max) / sum`, `exp(x) * (1 / sum)`,
    `exp(x - logsumexp(x))`, `exp(log_softmax(x))`, `(exp(x) · v) / sum`, with or without a mask on the exponentials.
    """
    if op.does("softmax"):
        rank = len(op.output.shape)
        dim = int(op.args[1]) % max(rank, 1)
        return Softmax(op, op.inputs[0], dim)
    if plain_name(op) == "exp":
        return _of_logarithm(recording, op)
    if not op.does("scales"):
        return None
    for above, total in _divisions(recording, op):
        softmax = _of_division(recording, op, above, total)
        if softmax is not None:
            return softmax
    return None


def _of_division(
    recording: Recording,
    op: Op,
    above: TensorRef,
    total: Op,
) -> Softmax | None:
    """Return the softmax that divides exponentials, or their product with values, by their sum; None for others."""
    exponential, masks = _exponential(recording, total.inputs[0])
    if exponential is None:
        return None
    *beside, dim = reduced_places(total)
    shift = recording.producer(exponential.inputs[0])
    is_shifted = shift is not None and is_shift(recording, shift)
    masked = shift.inputs[0] if shift is not None and is_shifted else exponential.inputs[0]
    is_whole = above.numel >= total.output.numel and len(above.shape) > dim
    if is_whole and _exponential(recording, above)[0] is exponential:
        return Softmax(op, masked, dim, masks, beside=tuple(beside))
    if beside:
        return None
    values_product = _product_with(recording, above, exponential)
    return None if values_product is None else Softmax(exponential, masked, dim, masks, op, values_product)


def _product_with(
    recording: Recording,
    tensor: TensorRef,
    exponential: Op,
) -> ProductPath | None:
    """Return the product of these exponentials and values that a tensor is moved from; None for anything else."""
    maker = _maker(recording, tensor)
    product = None if maker is None else product_of(recording, maker)
    if product is None:
        return None
    for factor in (product.left, product.right):
        if _exponential(recording, factor)[0] is exponential:
            return ProductPath(product, (), factor)
    return None


def _moves(op: Op) -> bool:
    return op.kind in ("view", "copy")


def _maker(
    recording: Recording,
    tensor: TensorRef,
    passes: Callable[[Op], bool] = _moves,
) -> Op | None:
    """Return the operation behind a tensor, before the operations that pass; None for an input or a parameter."""
    op = recording.producer(tensor)
    while op is not None and op.inputs and passes(op):
        op = recording.producer(op.inputs[0])
    return op


def _divisions(recording: Recording, op: Op) -> Iterator[tuple[TensorRef, Op]]:
    """Yield the tensor that an operation divides by a sum, and the sum.

    A product with the reciprocal of the sum counts too. The sum may be guarded against zero.
    """
    if len(op.inputs) != 2:
        return
    left, right = op.inputs
    if plain_name(op) == "mul":
        pairs = [(left, _inverted(recording, right)), (right, _inverted(recording, left))]
    else:
        pairs = [(left, _maker(recording, right, _keeps_sum))]
    for above, total in pairs:
        if total is not None and total.base_name == "sum" and reduced_places(total):
            yield above, total


def _inverted(recording: Recording, factor: TensorRef) -> Op | None:
    """Return the operation whose result a factor is the reciprocal of; None for other factors."""
    inverse = _maker(recording, factor, _keeps_sum)
    if inverse is None or plain_name(inverse) != "reciprocal":
        return None
    return _maker(recording, inverse.inputs[0], _keeps_sum)


def _keeps_sum(op: Op) -> bool:
    """Return whether this only moves a sum, guards it against zero, or multiplies by 1, as torch does in `1 / x`."""
    if not op.does("guards"):
        is_one = op.base_name == "mul" and len(op.inputs) == 1 and op.args[1] == 1
        return is_one or _moves(op)
    if plain_name(op) != "add":
        return True
    number = op.args[1] if len(op.args) > 1 else 0
    return len(op.inputs) == 1 and abs(float(number)) <= _SMALL


def _exponential(recording: Recording, tensor: TensorRef) -> tuple[Op | None, tuple[Op, ...]]:
    """Return the `exp` behind a tensor, and the masks after it in order; None and no masks if there is no `exp`."""
    masks: tuple[Op, ...] = ()
    op = recording.producer(tensor)
    for _ in range(_MANY):
        if op is None or not op.inputs:
            return None, masks
        if plain_name(op) == "exp":
            return op, masks
        if not op.does("masks") and not _moves(op):
            break
        if op.does("fills_where") or len(op.inputs) == 2:
            masks = (op, *masks)
        op = _masked_by(recording, op)
    return None, ()


def _masked_by(recording: Recording, op: Op) -> Op | None:
    """Return the operation that made the operand of a mask that has the exponentials: an `exp`, or else the first."""
    makers = []
    for tensor in op.inputs:
        maker = recording.producer(tensor)
        if maker is not None and tensor.dtype != "bool":
            makers.append(maker)
    for maker in makers:
        if plain_name(maker) == "exp":
            return maker
    return makers[0] if makers else None


def is_shift(recording: Recording, op: Op) -> bool:
    """Return whether this subtracts the largest score from all scores, to avoid overflow."""
    if plain_name(op) != "sub" or len(op.inputs) != 2 or not op.outputs:
        return False
    if op.inputs[1].numel >= op.output.numel:
        return False
    subtracted = _maker(recording, op.inputs[1])
    return subtracted is not None and subtracted.base_name in ("amax", "max", "logsumexp")


def _of_logarithm(recording: Recording, op: Op) -> Softmax | None:
    """Return the softmax in `exp(log_softmax(x))` and `exp(x - logsumexp(x))`; None for any other `exp`."""
    maker = recording.producer(op.inputs[0])
    total = maker
    if maker is not None and plain_name(maker) == "sub":
        total = _maker(recording, maker.inputs[-1])
    if maker is None or total is None or total.base_name not in ("_log_softmax", "logsumexp"):
        return None
    *beside, dim = reduced_places(total)
    return Softmax(op, maker.inputs[0], dim, beside=tuple(beside))

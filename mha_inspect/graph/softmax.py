"""Recognise a softmax: torch's own, and a softmax written as exp and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..record.ops import Op, Recording, TensorRef
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
        return Softmax(op, op.inputs[0], int(op.args[1]) % max(len(op.output.shape), 1))
    if op.base_name.rstrip("_") == "exp":
        return _of_logarithm(recording, op)
    for above, total in _divisions(recording, op) if op.does("scales") else ():
        *beside, dim = reduced_places(total)
        exponential, masks = _exponential(recording, total.inputs[0])
        if exponential is None:
            continue
        shift = recording.producer(exponential.inputs[0])
        masked = shift.inputs[0] if shift is not None and is_shift(recording, shift) else exponential.inputs[0]
        whole = above.numel >= total.output.numel and len(above.shape) > dim
        if whole and _exponential(recording, above)[0] is exponential:
            return Softmax(op, masked, dim, masks, beside=tuple(beside))
        maker = _maker(recording, above)
        values_product = None if maker is None else product_of(recording, maker)
        if values_product is not None and not beside:
            for factor in (values_product.left, values_product.right):
                if _exponential(recording, factor)[0] is exponential:
                    return Softmax(exponential, masked, dim, masks, op, ProductPath(values_product, (), factor))
    return None


def _moves(op: Op) -> bool:
    return op.kind in ("view", "copy")


def _maker(recording: Recording, tensor: TensorRef, passes: Callable[[Op], bool] = _moves) -> Op | None:
    """Return the operation behind a tensor, before the operations that pass; None for an input or a parameter."""
    op = recording.producer(tensor)
    while op is not None and op.inputs and passes(op):
        op = recording.producer(op.inputs[0])
    return op


def _divisions(recording: Recording, op: Op) -> Iterator[tuple[TensorRef, Op]]:
    """Yield the tensor that an operation divides by a sum, and the sum.

    A product with the reciprocal of the sum counts too. The sum may be guarded against zero.
    """
    name = op.base_name.rstrip("_")
    for above, below in (op.inputs, op.inputs[::-1])[: 1 + (name == "mul")] if len(op.inputs) == 2 else ():
        total = _maker(recording, below, _keeps_sum)
        if name == "mul" and total is not None:
            inverse = total.base_name.rstrip("_") == "reciprocal"
            total = _maker(recording, total.inputs[0], _keeps_sum) if inverse else None
        if total is not None and total.base_name == "sum" and reduced_places(total):
            yield above, total


def _keeps_sum(op: Op) -> bool:
    """Return whether this only moves a sum, guards it against zero, or multiplies by 1, as torch does in `1 / x`."""
    if not op.does("guards"):
        return _moves(op) or (op.base_name == "mul" and len(op.inputs) == 1 and op.args[1] == 1)
    number = op.args[1] if len(op.args) > 1 else 0
    return op.base_name.rstrip("_") != "add" or (len(op.inputs) == 1 and abs(float(number)) <= _SMALL)


def _exponential(recording: Recording, tensor: TensorRef) -> tuple[Op | None, tuple[Op, ...]]:
    """Return the `exp` behind a tensor, and the masks after it in order; None and no masks if there is no `exp`."""
    masks: tuple[Op, ...] = ()
    op = recording.producer(tensor)
    for _ in range(_MANY):
        if op is None or not op.inputs or op.base_name.rstrip("_") == "exp":
            return (op if op is not None and op.inputs else None), masks
        if not op.does("masks") and not _moves(op):
            break
        if op.does("fills_where") or len(op.inputs) == 2:
            masks = (op, *masks)
        # The operand of a mask that an `exp` computed directly has the exponentials.
        makers = [maker for t in op.inputs if t.dtype != "bool" and (maker := recording.producer(t)) is not None]
        op = next((maker for maker in makers if maker.base_name.rstrip("_") == "exp"), makers[0] if makers else None)
    return None, ()


def is_shift(recording: Recording, op: Op) -> bool:
    """Return whether this subtracts the largest score from all scores, to avoid overflow."""
    if op.base_name.rstrip("_") != "sub" or len(op.inputs) != 2 or not op.outputs:
        return False
    subtracted = _maker(recording, op.inputs[1]) if op.inputs[1].numel < op.output.numel else None
    return subtracted is not None and subtracted.base_name in ("amax", "max", "logsumexp")


def _of_logarithm(recording: Recording, op: Op) -> Softmax | None:
    """Return the softmax in `exp(log_softmax(x))` and `exp(x - logsumexp(x))`; None for any other `exp`."""
    maker = recording.producer(op.inputs[0])
    total = maker
    if maker is not None and maker.base_name.rstrip("_") == "sub":
        total = _maker(recording, maker.inputs[-1])
    if maker is None or total is None or total.base_name not in ("_log_softmax", "logsumexp"):
        return None
    *beside, dim = reduced_places(total)
    return Softmax(op, maker.inputs[0], dim, beside=tuple(beside))

"""Recognise a softmax: torch's own, and one that was written by hand with exp and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..record.ops import Op, Recording, TensorRef
from .products import Product, product_of

_SMALL = 0.01
"""The most that a guard may add: with more, as in `exp(x) / (1 + sum)`, weights are no softmax."""
_MANY = 6
"""Operations, masks above all, that may stand between exponentials and what they are followed from."""


def softmax_of(recording: Recording, op: Op) -> tuple[TensorRef, int] | None:
    """Return what this operation takes the softmax of, and over which dimension; None where it takes none.

    Written by hand it is the last operation that counts: `exp(x - max) / sum`, `exp(x) * (1 / sum)`,
    `exp(x - logsumexp(x))`, `exp(log_softmax(x))`, with a mask on the exponentials or without.
    """
    if op.does("softmax"):
        return op.inputs[0], int(op.args[1]) % max(len(op.output.shape), 1)
    if op.base_name.rstrip("_") == "exp":
        return _of_logarithm(recording, op)
    for above, total, dim in _divisions(recording, op) if op.does("scales") else ():
        exponential = _exponential(recording, above) if above.numel >= total.output.numel else None
        summed = total.inputs[0]
        if exponential is not None and (summed.id == above.id or _exponential(recording, summed) is exponential):
            return _unshifted(recording, exponential.inputs[0]), dim
    return None


def masks_on_exponentials(recording: Recording, op: Op) -> tuple[Op, ...]:
    """Return what sets exponentials to zero before they are summed, where this softmax was written by hand."""
    if op.does("softmax") or not op.inputs:
        return ()
    masks: list[Op] = []
    behind = recording.producer(op.inputs[0])
    for _ in range(_MANY):
        if behind is None or not behind.inputs or behind.base_name.rstrip("_") == "exp":
            return tuple(reversed(masks))
        if behind.does("fills_where") or len(behind.inputs) == 2:
            masks.append(behind)
        behind = recording.producer(behind.inputs[0])
    return ()


@dataclass(frozen=True)
class LateSoftmax:
    """A softmax whose weights are never formed: exponentials meet the values, and their sum divides what comes out."""

    divided: Op
    """The operation that divides by the sum."""
    exponential: Op
    total: Op
    """The sum."""
    product: Product
    """The exponentials with the values."""
    carried: TensorRef
    """The factor of the product that is the exponentials."""
    masked: TensorRef
    dim: int


def late_softmax_of(recording: Recording, op: Op) -> LateSoftmax | None:
    """Return the softmax in `(exp(x) · v) / sum(exp(x))`, where this operation divides; None for any other."""
    for above, total, dim in _divisions(recording, op) if op.does("scales") else ():
        exponential = _exponential(recording, total.inputs[0])
        behind = _maker(recording, above)
        product = None if behind is None or exponential is None else product_of(recording, behind)
        for factor in () if product is None else (product.left, product.right):
            if exponential is not None and product is not None and _exponential(recording, factor) is exponential:
                masked = _unshifted(recording, exponential.inputs[0])
                return LateSoftmax(op, exponential, total, product, factor, masked, dim)
    return None


def _moves(op: Op) -> bool:
    return op.kind in ("view", "copy")


def _maker(recording: Recording, tensor: TensorRef, passes: Callable[[Op], bool] = _moves) -> Op | None:
    """Return the operation that made a tensor, before those that pass; None where it came from outside."""
    op = recording.producer(tensor)
    while op is not None and op.inputs and passes(op):
        op = recording.producer(op.inputs[0])
    return op


def _divisions(recording: Recording, op: Op) -> Iterator[tuple[TensorRef, Op, int]]:
    """Yield what an operation divides by a sum, the sum and the one dimension that it runs over.

    So does a product with one over the sum; and the sum may be kept from zero before.
    """
    name = op.base_name.rstrip("_")
    if name not in ("div", "mul") or len(op.inputs) != 2:
        return

    def passes(made: Op) -> bool:
        return _moves(made) or _is_guard(made) or _multiplies_by_one(made)

    for above, below in (op.inputs,) if name == "div" else (op.inputs, op.inputs[::-1]):
        total = _maker(recording, below, passes)
        if name == "mul" and total is not None:
            inverse = total.base_name.rstrip("_") == "reciprocal"
            total = _maker(recording, total.inputs[0], passes) if inverse else None
        if total is None or total.base_name != "sum" or len(total.args) < 2:
            continue
        dims = total.args[1] if isinstance(total.args[1], tuple) else (total.args[1],)
        if len(dims) == 1:
            yield above, total, int(dims[0]) % max(len(total.inputs[0].shape), 1)


def _is_guard(op: Op) -> bool:
    """Return whether this only keeps a sum from being zero."""
    if not op.does("guards"):
        return False
    number = op.args[1] if len(op.args) > 1 else 0
    return not (op.base_name.rstrip("_") == "add" and (len(op.inputs) > 1 or abs(float(number)) > _SMALL))


def _multiplies_by_one(op: Op) -> bool:
    """Return whether this multiplies by one: torch writes `1 / x` as the reciprocal, times one."""
    return op.base_name == "mul" and len(op.inputs) == 1 and op.args[1] == 1


def _exponential(recording: Recording, tensor: TensorRef) -> Op | None:
    """Return the `exp` behind a tensor, through masks; None where there is none."""
    op = recording.producer(tensor)
    for _ in range(_MANY):
        if op is None or not op.inputs:
            return None
        if op.base_name.rstrip("_") == "exp":
            return op
        if not op.does("masks") and not _moves(op):
            return None
        # Of the operands of a mask, the exponentials are those that were made by an `exp` next.
        behind = [made for t in op.inputs if (made := recording.producer(t)) is not None and t.dtype != "bool"]
        op = next((made for made in behind if made.base_name.rstrip("_") == "exp"), behind[0] if behind else None)
    return None


def _unshifted(recording: Recording, tensor: TensorRef) -> TensorRef:
    """Return scores before the largest of them was taken off, which changes no weight."""
    op = recording.producer(tensor)
    return op.inputs[0] if op is not None and is_shift(recording, op) else tensor


def is_shift(recording: Recording, op: Op) -> bool:
    """Return whether this takes the largest score off all: it is there for rounding alone."""
    if op.base_name.rstrip("_") != "sub" or len(op.inputs) != 2 or not op.outputs:
        return False
    taken = _maker(recording, op.inputs[1]) if op.inputs[1].numel < op.output.numel else None
    return taken is not None and taken.base_name in ("amax", "max", "logsumexp")


def _of_logarithm(recording: Recording, op: Op) -> tuple[TensorRef, int] | None:
    """Return what `exp(log_softmax(x))`, and `exp(x - logsumexp(x))`, take the softmax of, and its dimension."""
    behind = recording.producer(op.inputs[0])
    if behind is None or not behind.inputs:
        return None
    total: Op | None = behind
    if behind.base_name.rstrip("_") == "sub":
        total = _maker(recording, behind.inputs[-1])
    if total is None or total.base_name not in ("_log_softmax", "logsumexp"):
        return None
    dim = total.args[1][0] if isinstance(total.args[1], tuple) else total.args[1]
    return behind.inputs[0], int(dim) % max(len(op.output.shape), 1)

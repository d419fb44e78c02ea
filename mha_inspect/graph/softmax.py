"""Recognise a softmax: torch's own, and one that was written by hand with exp and sum."""

from __future__ import annotations

from dataclasses import dataclass

from ..record.ops import Op, Recording, TensorRef
from .products import Product, product_of

_SMALL = 0.01
"""The most that a guard may add: with more, as in `exp(x) / (1 + sum)`, weights are no softmax."""
_MANY = 6


def softmax_of(recording: Recording, op: Op) -> tuple[TensorRef, int] | None:
    """What this operation takes the softmax of, and over which dimension; None where it takes none.

    Written by hand it is the last operation that counts: `exp(x - max) / sum`, `exp(x) * (1 / sum)`,
    `exp(x - logsumexp(x))`, `exp(log_softmax(x))`, with a mask on the exponentials or without.
    """
    name = op.base_name.rstrip("_")
    if op.does("softmax"):
        return op.inputs[0], int(op.args[1]) % max(len(op.output.shape), 1)
    if name == "exp":
        return _of_logarithm(recording, op)
    if name not in ("div", "mul") or len(op.inputs) != 2:
        return None
    pairs = [(op.inputs[0], op.inputs[1])] if name == "div" else [(op.inputs[0], op.inputs[1]), op.inputs[::-1]]
    for above, below in pairs:
        found = _over_sum(recording, above, below, inverse=name == "mul")
        if found is not None:
            return found
    return None


def masks_on_exponentials(recording: Recording, op: Op) -> tuple[Op, ...]:
    """The operations that set exponentials to zero before they are summed, where this softmax was written by hand."""
    if op.does("softmax") or not op.inputs:
        return ()
    found: list[Op] = []
    behind = recording.producer(op.inputs[0])
    for _ in range(_MANY):
        if behind is None or not behind.inputs or behind.base_name.rstrip("_") == "exp":
            return tuple(reversed(found))
        if behind.does("fills_where") or len(behind.inputs) == 2:
            found.append(behind)
        behind = recording.producer(behind.inputs[0])
    return ()


def maker_of(recording: Recording, tensor: TensorRef) -> Op | None:
    """The operation that made the elements of a tensor, moved since at most; None where they came from outside."""
    op = recording.producer(tensor)
    while op is not None and op.kind in ("view", "copy") and op.inputs:
        op = recording.producer(op.inputs[0])
    return op


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
    """`(exp(x) · v) / sum(exp(x))`, where this operation is the division, or multiplies by one over the sum."""
    name = op.base_name.rstrip("_")
    if name not in ("div", "mul") or len(op.inputs) != 2:
        return None
    for above, below in (op.inputs,) if name == "div" else (op.inputs, op.inputs[::-1]):
        total = _total(recording, below, inverse=name == "mul")
        exponential = None if total is None else _exponential(recording, total[0].inputs[0])
        if total is None or exponential is None:
            continue
        behind = maker_of(recording, above)
        product = None if behind is None else product_of(recording, behind)
        for factor in () if product is None else (product.left, product.right):
            if product is not None and _exponential(recording, factor) is exponential:
                masked = _unshifted(recording, exponential.inputs[0])
                return LateSoftmax(op, exponential, total[0], product, factor, masked, total[1])
    return None


def _over_sum(
    recording: Recording, above: TensorRef, below: TensorRef, *, inverse: bool
) -> tuple[TensorRef, int] | None:
    """`exp(x) / sum`; with `inverse` it is multiplied by one over the sum."""
    if above.numel < below.numel:
        return None
    exponential = _exponential(recording, above)
    total = None if exponential is None else _total(recording, below, inverse=inverse)
    if exponential is None or total is None:
        return None
    summed = total[0].inputs[0]
    if summed.id != above.id and _exponential(recording, summed) is not exponential:
        return None
    return _unshifted(recording, exponential.inputs[0]), total[1]


def _total(recording: Recording, below: TensorRef, *, inverse: bool) -> tuple[Op, int] | None:
    """The sum over one dimension that a tensor is, guarded and moved at most; with `inverse` one over it."""
    total = recording.producer(below)
    for _ in range(_MANY):
        if total is None or not total.inputs:
            return None
        name = total.base_name.rstrip("_")
        if name == "reciprocal" and inverse:
            inverse = False
        elif total.kind not in ("view", "copy") and not is_guard(total) and not _by_one(total):
            break
        total = recording.producer(total.inputs[0])
    if total is None or inverse or total.base_name != "sum" or len(total.args) < 2:
        return None
    dims = total.args[1] if isinstance(total.args[1], tuple) else (total.args[1],)
    return (total, int(dims[0]) % max(len(total.inputs[0].shape), 1)) if len(dims) == 1 else None


def is_guard(op: Op) -> bool:
    """Whether this only keeps a sum from being zero."""
    if not op.does("guards"):
        return False
    number = op.args[1] if len(op.args) > 1 else 0
    return not (op.base_name.rstrip("_") == "add" and (len(op.inputs) > 1 or abs(float(number)) > _SMALL))


def _by_one(op: Op) -> bool:
    """Whether this multiplies by one: torch writes `1 / x` as the reciprocal, times one."""
    return op.base_name == "mul" and len(op.inputs) == 1 and op.args[1] == 1


def _exponential(recording: Recording, tensor: TensorRef) -> Op | None:
    """The `exp` behind a tensor, through masks."""
    op = recording.producer(tensor)
    for _ in range(_MANY):
        if op is None or not op.inputs:
            return None
        if op.base_name.rstrip("_") == "exp":
            return op
        if not op.does("masks") and op.kind not in ("view", "copy"):
            return None
        # Of the operands of a mask, the exponentials are those that were made by an `exp` next.
        behind = [made for t in op.inputs if (made := recording.producer(t)) is not None and t.dtype != "bool"]
        op = next((made for made in behind if made.base_name.rstrip("_") == "exp"), behind[0] if behind else None)
    return None


def _unshifted(recording: Recording, tensor: TensorRef) -> TensorRef:
    """Before the largest score was taken off, which changes no weight."""
    op = recording.producer(tensor)
    return op.inputs[0] if op is not None and is_shift(recording, op) else tensor


def is_shift(recording: Recording, op: Op) -> bool:
    """Whether this takes the largest score off all: it is there for rounding alone."""
    if op.base_name.rstrip("_") != "sub" or len(op.inputs) != 2 or not op.outputs:
        return False
    return op.inputs[1].numel < op.output.numel and _is_of(recording, op.inputs[1], ("amax", "max", "logsumexp"))


def _is_of(recording: Recording, tensor: TensorRef, names: tuple[str, ...]) -> bool:
    """Whether a tensor comes from one of these operations, moved at most."""
    op = maker_of(recording, tensor)
    return op is not None and op.base_name in names


def _of_logarithm(recording: Recording, op: Op) -> tuple[TensorRef, int] | None:
    behind = recording.producer(op.inputs[0])
    if behind is None or not behind.inputs:
        return None
    rank = max(len(op.output.shape), 1)
    if behind.base_name == "_log_softmax":
        return behind.inputs[0], int(behind.args[1]) % rank
    if behind.base_name.rstrip("_") != "sub" or not _is_of(recording, behind.inputs[-1], ("logsumexp",)):
        return None
    total = recording.producer(behind.inputs[-1])
    while total is not None and total.base_name != "logsumexp":
        total = recording.producer(total.inputs[0])
    dims = total.args[1] if total is not None else ()
    dim = dims[0] if isinstance(dims, tuple) else dims
    return behind.inputs[0], int(dim) % rank

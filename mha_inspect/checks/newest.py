"""Check that the newest token of a call has a key, and that the cache that the call returns has it too.

    k, v = torch.cat((past_k, k), 2)[:, :, :-1], torch.cat((past_v, v), 2)[:, :, :-1]      # the newest is dropped

A cache may drop its oldest tokens: they are outside a window. Nothing drops the newest on purpose, but it may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..compare.replay import Factor, LostError, factors_of
from ..graph.attention import Attention
from ..graph.rerun import between
from ..naming.axes import AxisNames
from ..naming.canonical import content_of
from ..record.arguments import tensors_in
from ..record.ops import Op, TensorRef
from ..reports.check import Finding
from ..text import plural, spans
from .each_kind import of_each_kind
from .evidence import Evidence
from .slots import tokens_of_keys

_FIX = "Keep the newest token: a cache that is too long drops its oldest."


@partial(of_each_kind, "")
def without_newest(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a suspicion if the newest tokens of a call have no key, or are missing in the cache that it returns."""
    if not evidence.sources or names.within_tokens or names.over_features:
        return
    finding = _cut_from_joined(evidence, attention)
    if finding is None:
        finding = _in_no_row(evidence, attention, names)
    if finding is None:
        finding = _not_returned(evidence, attention, names)
    if finding is not None:
        yield finding


def _in_no_row(evidence: Evidence, attention: Attention, names: AxisNames) -> Finding | None:
    """Return the suspicion if every token of the call but the newest is a key, each in a row of its own, in order."""
    try:
        key = Factor(evidence, attention, names, "key")
        if key.changed(key.token(prod(key.tokens) - 1)):
            return None
        tokens = tokens_of_keys(evidence, key)
    except LostError:
        return None
    count = evidence.source.length
    missing = [token for token in range(count) if token not in tokens.values()]
    shifts = {row - token for row, token in tokens.items()}
    if not missing or len(shifts) != 1:
        return None
    if missing != list(range(missing[0], count)):
        return None
    shift = shifts.pop()
    if shift + missing[0] != names.lengths[1]:
        return None  # the rows behind them have other keys
    if shift and not _has_given_keys(evidence, key):
        return None  # e.g. keys that are moved by one on purpose, behind a key of zeros
    return _finding(attention, missing, plural(names.lengths[1], "key"))


def _has_given_keys(evidence: Evidence, key: Factor) -> bool:
    """Return whether an argument beside the tokens reaches the keys, e.g. a cache."""
    recording = evidence.run.recording
    for named in recording.inputs:
        if named.name in evidence.source.names:
            continue
        if named.tensor == key.target or between(recording, {named.tensor.id}, key.target):
            return True
    return False


def _finding(attention: Attention, missing: list[int], keys: str) -> Finding:
    tokens = f"tokens {spans(missing)} of the call have no key"
    if len(missing) == 1:
        tokens = f"token {missing[0]} of the call has no key"
    return Finding(
        "cache",
        f"The newest {tokens}: it is projected, and cut off before the scores.",
        f"The call has {keys}. Changing another token changes its key; changing the newest changes none.",
        sure=False,
        source=attention.score_product.op.source,
        fix=_FIX,
    )


def _cut_from_joined(evidence: Evidence, attention: Attention) -> Finding | None:
    """Return the suspicion if keys are joined with new ones of this call, and then cut to those before the new ones."""
    cut = _cut_of(evidence, factors_of(attention)["key"])
    axis = None if cut is None else _axis_of_join(cut.join)
    if cut is None or axis is None:
        return None
    *earlier, last = cut.join.inputs
    if not _is_of_call(evidence, last):
        return None
    if any(_is_of_call(evidence, tensor) for tensor in earlier):
        return None
    rows = last.shape[axis]
    before = cut.join.output.shape[axis] - rows
    if before <= 0 or not _is_start(evidence, cut, axis, before):
        return None
    return _finding(attention, list(range(rows)), f"{plural(before, 'key')} of earlier calls, and none of its own")


@dataclass(frozen=True)
class _CutOfJoined:
    """An operation that joins keys, and the part of its result that the scores read."""

    join: Op
    part: TensorRef


def _cut_of(evidence: Evidence, factor: TensorRef) -> _CutOfJoined | None:
    """Return the operation that joined what the keys are a part of, with that part; None if they are no part."""
    recording = evidence.run.recording
    tensor = factor
    part = None
    while True:
        op = recording.producer(tensor)
        if op is None or not op.inputs:
            return None
        if op.does("joins"):
            return None if part is None else _CutOfJoined(op, part)
        if op.kind not in ("view", "copy"):
            return None
        if tensor.numel < op.inputs[0].numel:
            part = tensor
        tensor = op.inputs[0]


def _is_start(evidence: Evidence, cut: _CutOfJoined, axis: int, before: int) -> bool:
    """Return whether a part of a joined tensor is its first places along an axis, number by number."""
    part = evidence.content(cut.part)
    whole = evidence.content(cut.join.output)
    if part is None or whole is None:
        return False
    if part.dim() != whole.dim() or part.shape[axis] != before:
        return False
    return torch.equal(part, whole.narrow(axis, 0, before))


def _axis_of_join(op: Op) -> int | None:
    """Return the axis along which an operation joins its inputs; None if they are not equal in all others."""
    rank = len(op.output.shape)
    if any(len(tensor.shape) != rank for tensor in op.inputs):
        return None
    longer = []
    for axis, size in enumerate(op.output.shape):
        sizes = [tensor.shape[axis] for tensor in op.inputs]
        if size == sum(sizes) and size != sizes[0]:
            longer.append(axis)
    return longer[0] if len(longer) == 1 else None


def _is_of_call(evidence: Evidence, tensor: TensorRef) -> bool:
    """Return whether a tensor is computed from the tokens of the call."""
    recording = evidence.run.recording
    names = evidence.sources[0].names if evidence.sources else ()
    ids = {named.tensor.id for named in recording.inputs if named.name in names}
    queue = [tensor]
    seen = set[int]()
    while queue:
        operand = queue.pop()
        if operand.id in ids:
            return True
        op = recording.producer(operand)
        if op is not None and op.index not in seen:
            seen.add(op.index)
            queue += op.inputs
    return False


def _not_returned(evidence: Evidence, attention: Attention, names: AxisNames) -> Finding | None:
    """Return the suspicion if the call returns the rows of its keys and of its values, all but the newest."""
    count = _count_lost(evidence, attention, names, "key")
    if count is None or count != _count_lost(evidence, attention, names, "value"):
        return None
    length = names.lengths[1]
    newest = f"key {length - 1}"
    if count > 1:
        newest = f"keys {spans(range(length - count, length))}"
    return Finding(
        "cache",
        f"The cache that the call returns lacks the newest token: it has all of its keys but {newest}.",
        f"The first {plural(length - count, 'row')} of the keys and of the values are returned unchanged.",
        sure=False,
        source=attention.score_product.op.source,
        fix=_FIX,
    )


def _count_lost(evidence: Evidence, attention: Attention, names: AxisNames, side: str) -> int | None:
    """Return how many of the newest keys, or values, the call does not return; None if it returns all or no rows."""
    heads = content_of(evidence.run, attention, names, f"{side[0]}_heads")
    if heads is None or heads.shape[2] < 2:
        return None
    rows = _most_rows_returned(evidence, heads)
    if rows is None or rows == heads.shape[2]:
        return None
    if not _is_last(evidence, attention, names, side):
        return None  # e.g. a learned key, or empty slots, are behind the newest token
    return int(heads.shape[2]) - rows


def _most_rows_returned(evidence: Evidence, heads: Tensor) -> int | None:
    """Return the largest number of first rows of `batch kv_heads row feature` that the call returns; None if none."""
    most = None
    for _, tensor in tensors_in(evidence.run.returned):
        rows = _rows_returned(heads, tensor)
        if rows is not None and (most is None or rows > most):
            most = rows
    return most


def _is_last(evidence: Evidence, attention: Attention, names: AxisNames, side: str) -> bool:
    """Return whether the newest token of the call is the last key, or the last value."""
    try:
        factor = Factor(evidence, attention, names, side)
        place = min(evidence.source.positions or 0, len(factor.tokens) - 1)
        if factor.tokens[place] != evidence.source.length:
            return False  # other tokens are projected with those of the call
        newest = factor.token(prod(factor.tokens) - 1)
        return factor.rows_of(newest) == {names.lengths[1] - 1}
    except LostError:
        return False


def _rows_returned(heads: Tensor, returned: Tensor) -> int | None:
    """Return how many first rows of `batch kv_heads row feature` are a returned tensor; None if it is not that."""
    if returned.dim() != 4 or returned.dtype != heads.dtype or returned.device != heads.device:
        return None
    if returned.shape[:2] != heads.shape[:2] or returned.shape[3] != heads.shape[3]:
        return None
    rows = returned.shape[2]
    if not 0 < rows <= heads.shape[2]:
        return None
    return rows if bool((returned == heads[:, :, :rows]).all()) else None

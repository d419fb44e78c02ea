"""Find the line that mixes batch items: one item is changed, and every operation is compared with the first run.

heads.view(batch, length, -1)       # heads: heads batch position head_dim, and the heads come first
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..record.ops import Recording
from .evidence import Evidence, RaisedError

_ROUNDING = 100.0
"""Changes up to this many times the rounding of a dtype are none."""


def line_of_mixed_items(evidence: Evidence, place: int) -> str:
    """Return the line from which on every result has an item changed by token `place` of another one; else empty.

    Results with as many rows as the batch has items are compared. A dimension of keys and values may have as many, but
    later results do not have it.
    """
    source = evidence.source
    if source.batch != 0 or source.rows < 2:
        return ""
    try:
        changed, _ = evidence.recorded(source.others(place))
    except RaisedError:
        return ""
    if not _have_same_ops(evidence.run.recording, changed.recording):
        return ""
    line = ""
    for pair in _results_by_item(evidence.run.recording, changed.recording, source.rows):
        if not _has_changed(pair.before[1:], pair.after[1:]):
            line = ""
        elif not line:
            line = pair.line
    return line


def _have_same_ops(first: Recording, second: Recording) -> bool:
    """Return whether two runs have the same operations in the same order."""
    return [op.name for op in first.ops] == [op.name for op in second.ops]


@dataclass(frozen=True, eq=False)
class _Pair:
    """The results of one operation in two runs."""

    before: Tensor
    after: Tensor
    line: str


def _results_by_item(first: Recording, second: Recording, rows: int) -> Iterator[_Pair]:
    """Yield the results that have an entry for each of `rows` batch items, in order."""
    for op, repeated in zip(first.ops, second.ops, strict=True):
        if not op.outputs or not repeated.outputs:
            continue
        before = first.values.get(op.output.id)
        after = second.values.get(repeated.output.id)
        if before is None or after is None:
            continue
        if _is_by_item(before, after, rows):
            yield _Pair(before, after, op.source)


def _is_by_item(before: Tensor, after: Tensor, rows: int) -> bool:
    """Return whether a result is `batch ...` numbers in both runs. Nested tensors have no sizes to compare."""
    if before.is_nested or after.is_nested:
        return False
    if not before.is_floating_point() or before.dim() < 2:
        return False
    return before.shape == after.shape and len(before) == rows


def _has_changed(before: Tensor, after: Tensor) -> bool:
    """Return whether two results differ by more than rounding; numbers that are not finite do not count."""
    if not before.numel():
        return False
    apart = (before.double() - after.double()).abs().nan_to_num(0.0)
    finite = before.double().nan_to_num(0.0, 0.0, 0.0)
    largest = max(float(finite.abs().max()), 1e-6)
    rounding = torch.finfo(before.dtype).eps * largest
    return float(apart.max()) > _ROUNDING * rounding

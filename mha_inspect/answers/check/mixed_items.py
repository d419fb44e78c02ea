"""Find the line that mixes batch items: one item is changed, and every operation is compared with the first run.

heads.view(batch, length, -1)       # heads: heads batch position head_dim, and the heads come first
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    first, second = evidence.run.recording, changed.recording
    if [op.name for op in first.ops] != [op.name for op in second.ops]:
        return ""
    line = ""
    for op, repeated in zip(first.ops, second.ops, strict=True):
        if not op.outputs or not repeated.outputs:
            continue
        before, after = first.values.get(op.output.id), second.values.get(repeated.output.id)
        if before is None or after is None or not _is_by_item(before, after, source.rows):
            continue
        if not _has_changed(before[1:], after[1:]):
            line = ""
        elif not line:
            line = op.source
    return line


def _is_by_item(before: Tensor, after: Tensor, rows: int) -> bool:
    """Return whether a result is `batch ...` numbers in both runs. Nested tensors have no sizes to compare."""
    if before.is_nested or after.is_nested:
        return False
    return before.is_floating_point() and before.dim() > 1 and before.shape == after.shape and len(before) == rows


def _has_changed(before: Tensor, after: Tensor) -> bool:
    """Return whether two results differ by more than rounding; numbers that are not finite do not count."""
    if not before.numel():
        return False
    apart = (before.double() - after.double()).abs().nan_to_num(0.0)
    finite = before.double().nan_to_num(0.0, 0.0, 0.0)
    largest = max(float(finite.abs().max()), 1e-6)
    return float(apart.max()) > _ROUNDING * torch.finfo(before.dtype).eps * largest

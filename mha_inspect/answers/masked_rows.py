"""Queries whose every key is masked: where NaN, or nothing but zeros, comes out of them, and on which path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..naming.canonical import NamedAxes, canonical, canonical_stage, sizes_of
from ..record.rounding import first_tensor
from ..record.subject import Forward, Run
from ..reports.trace import MaskedRow

Content = Literal["nan", "zero", "finite"]
_LOOKED_AT = ("scores", "masked_scores", "weights", "context", "concat", "output")


def masked_rows(forward: Forward, seen: Run, axes: NamedAxes, rows: Sequence[tuple[int, int]]) -> tuple[MaskedRow, ...]:
    """What becomes of each fully masked row. The run must have been recorded with its tensors kept."""
    if len(seen.attentions) != 1:
        return ()
    (found, _), patterns, sizes = seen.attentions[0], axes.stages[0], sizes_of(forward)
    stages = {
        stage: value
        for stage in _LOOKED_AT
        if stage in found.stages and (value := canonical_stage(seen, found, stage, patterns[stage], sizes)) is not None
    }
    zero_output = _output_of_zero(seen)
    outputs = canonical(first_tensor(seen.returned).detach(), "output", axes.returned[0], sizes)
    result = []
    for batch, query in rows:
        contents = {stage: _content(_row(value, stage, batch, query)) for stage, value in stages.items()}
        first = next((stage for stage, content in contents.items() if content != "finite"), "")
        output = None if outputs is None else outputs[batch, query]
        at_end: Content = "finite" if output is None else _content(output)
        if output is not None and at_end == "finite" and zero_output is not None and torch.equal(output, zero_output):
            at_end = "zero"
        # All heads side by side: of a layer that loops over them, context is the first head's.
        result.append(MaskedRow(batch, query, first, contents.get("concat", contents.get("context", "finite")), at_end))
    return tuple(result)


def _row(value: torch.Tensor, stage: str, batch: int, query: int) -> torch.Tensor:
    """What belongs to one query: of `batch heads query ...`, or of `batch query ...`."""
    return value[batch, :, query] if stage in ("scores", "masked_scores", "weights", "context") else value[batch, query]


def _content(row: torch.Tensor) -> Content:
    if bool(row.isnan().any()):
        return "nan"
    return "zero" if not bool(row.any()) else "finite"


def _output_of_zero(seen: Run) -> torch.Tensor | None:
    """The output of a context of zeros: W_o's bias, or nothing where there is none."""
    found = seen.attentions[0][0]
    op = found.projections.get("output")
    if op is None:
        return None
    made = seen.recording.producer(seen.graph.after_call(op))
    for candidate in (op, made):
        for tensor in candidate.inputs if candidate is not None else ():
            if len(tensor.shape) == 1 and seen.graph.is_weight(tensor):
                bias: torch.Tensor = seen.recording.values[tensor.id]
                return bias
    return None

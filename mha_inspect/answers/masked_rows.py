"""Where NaN first appears, and queries whose every key is masked: what comes out of them, and on which path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..graph.attention import Attention
from ..graph.evaluate import Replay
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, contents_of, is_by_turn, returned_content, sizes_in
from ..naming.kind import barred_by
from ..naming.sizes import POSITIONS
from ..naming.subject import Run, State, Subject
from ..record.arguments import first_tensor, tensors_in
from ..reports.trace import MaskedRow

Content = Literal["nan", "zero", "finite"]
Rows = tuple[tuple[int, int], ...]
"""(batch, query) of each."""
_LOOKED_AT = ("scores", "masked_scores", "weights", "context", "concat", "output")


def fully_masked_rows(seen: Run, replay: Replay) -> tuple[Rows, ...]:
    """Return for each attention the queries to which no key is left, in at least one head.

    One such head is enough: W_o mixes its context into the whole row of the output. The content of the masks is
    computed again. Where it cannot be, and on meta, there are none.
    """
    known: dict[tuple[object, ...], Rows] = {}
    rows = []
    for found, names in seen.attentions:
        # The layers of a model read the same masks.
        reads = {t.id for one in found.branches or (found,) for op in one.masks for t in op.inputs if t.dtype == "bool"}
        shape = found.stages["weights"].shape if "weights" in found.stages else None
        sign = (frozenset(reads), shape) if reads else (found.score_product.op.index,)
        if sign not in known:
            known[sign] = _rows_of(seen, found, names, replay)
        rows.append(known[sign])
    return tuple(rows)


def _rows_of(seen: Run, found: Attention, names: AxisNames, replay: Replay) -> Rows:
    if "masked_scores" not in found.stages:
        return ()
    axes, sizes = names.of_stage("masked_scores"), sizes_in(found, names, "masked_scores")
    turns = found.branches if found.branches and is_by_turn(found, names, "masked_scores") else (found,)
    every = [barred for turn in turns if (barred := _barred(seen, turn, replay)) is not None]
    contents = [canonical(barred, "masked_scores", axes, sizes) for barred in every]
    rows = [content.all(dim=-1).any(dim=1).nonzero().tolist() for content in contents if content is not None]
    return tuple(sorted({(batch, query) for own in rows for batch, query in own}))


def _barred(seen: Run, found: Attention, replay: Replay) -> torch.Tensor | None:
    """Return where the masks of an attention together leave no weight, as its masked scores are laid out.

    None where no mask is known.
    """
    shape, whole = found.stages["masked_scores"].shape, None
    for op in found.masks:
        barred = barred_by(seen, found, op, replay)
        if barred is None or barred.is_meta:
            continue
        try:
            barred = barred.expand(op.output.shape).reshape(shape)
        except RuntimeError:  # a mask of other axes than those of the scores
            continue
        whole = barred if whole is None else whole | barred
    return whole


def masked_rows(rows: Sequence[Rows], seen: Run) -> tuple[MaskedRow, ...]:
    """Return what becomes of each fully masked row, in the first attention that has it.

    The run must have been recorded with its tensors kept.
    """
    outputs = returned_content(seen, first_tensor(seen.returned).detach())
    zero = _output_of_zero(seen) if len(seen.attentions) == 1 else None
    made: dict[tuple[int, int], MaskedRow] = {}
    for (found, names), own in zip(seen.attentions, rows, strict=True):
        contents = contents_of(seen, found, names) if own else {}
        told = (stage for stage in _LOOKED_AT if stage in contents)
        stages = {stage: contents[stage] for stage in told if POSITIONS not in names.of_stage(stage)}
        for batch, query in set(own) - made.keys():
            content = {stage: row_content(_row(value, stage, batch, query)) for stage, value in stages.items()}
            first = next((stage for stage, found_in in content.items() if found_in != "finite"), "")
            inside = outputs is not None and batch < outputs.shape[0] and query < outputs.shape[1]
            at_end: Content = "finite"
            if inside and outputs is not None:
                at_end = row_content(outputs[batch, query])
                if at_end == "finite" and zero is not None and torch.equal(outputs[batch, query], zero):
                    at_end = "zero"
            context = content.get("concat", content.get("context", "finite"))
            made[batch, query] = MaskedRow(batch, query, first, context, at_end)
    return tuple(made[row] for row in sorted(made))


def _row(value: torch.Tensor, stage: str, batch: int, query: int) -> torch.Tensor:
    """Return what belongs to one query: of `batch heads query ...`, or of `batch query ...`."""
    return value[batch, :, query] if stage in ("scores", "masked_scores", "weights", "context") else value[batch, query]


def row_content(row: torch.Tensor) -> Content:
    """Return what a row holds: NaN, nothing but zeros, or numbers."""
    if bool(row.isnan().any()):
        return "nan"
    return "zero" if not bool(row.any()) else "finite"


def _output_of_zero(seen: Run) -> torch.Tensor | None:
    """Return the output of a context of zeros: W_o's bias, or nothing where there is none."""
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


def nans_in(own: Subject, before: State, seen: Run, *, kept: bool) -> tuple[str, ...]:
    """Return a line that says where the NaN of what a run returned begins; one more run keeps what is made on the way.

    Args:
        own: what was run.
        before: the state that it was run from.
        seen: the run.
        kept: whether its tensors were kept.
    """
    if not any(_has_nan(tensor) for _, tensor in tensors_in(seen.returned)):
        return ()
    if any(_has_nan(tensor) for _, tensor in tensors_in((own.args, own.kwargs))):
        return ("What is returned has NaN, and so has what came in.",)
    if any(_has_nan(tensor) for tensor in (*own.module.parameters(), *own.module.buffers())):
        return ("What is returned has NaN, and so have parameters or buffers.",)
    again = seen if kept else once_more(own, before)
    if again is None:
        return ("What is returned has NaN; where it begins is not seen, for the module does not run a second time.",)
    return (f"What is returned has NaN: {_beginning(again)}.",)


def once_more(own: Subject, before: State) -> Run | None:
    """Run it again from an earlier state, its tensors kept; None where it does not run a second time."""
    try:
        with own.replaying(before):
            return own.recorded(keep=True)
    except Exception:  # whatever somebody's forward may raise that counts its calls, or keeps what came in
        return None


def _beginning(seen: Run) -> str:
    several = len(seen.attentions) > 1
    stages = {
        tensor.id: f"the stage {stage}" + (f" of attention {number}" if several else "")
        for number, (found, _) in reversed([*enumerate(seen.attentions, 1)])
        for stage, tensor in found.stages.items()
    }
    values = seen.recording.values
    made = ((op, tensor.id) for op in seen.recording.ops for tensor in op.outputs if tensor.id in values)
    for op, number in made:
        if _has_nan(values[number]):
            place = f" ({op.source})" if op.source else ""
            return f"it first appears in {stages.get(number, f'what {seen.recording.name_of(op)} gives')}{place}"
    return "where it begins is not seen"


def _has_nan(tensor: torch.Tensor) -> bool:
    known = tensor.is_floating_point() and not tensor.is_meta and tensor.layout == torch.strided
    return known and not tensor.is_nested and bool(torch.isnan(tensor).any())

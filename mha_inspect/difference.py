"""diff: two layers, or one under two settings, with the same weights and the same input, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from .device import resolve
from .errors import DeviceError, WeightsError
from .fit import SAFE, need_of, rough_need
from .layers.weights import read_weights
from .memory import free_memory, largest, require_memory
from .reports.common import Verdict
from .reports.diff import (
    DiffReport,
    MaskedRowPair,
    NoiseSource,
    OtherWay,
    OutputDifference,
    RowContent,
    SharedWeights,
    SideName,
    StageRow,
)
from .sides.parameter_pairs import parameter_pairs
from .sides.run import Rows, SideRun, without
from .sides.settings import Side, make_sides
from .sides.shared_weights import draw, finer_dtype
from .sides.words import Blocked, Measured, answer, notes, stage_note
from .spec import AttentionSpec, InputSpec, RunSpec
from .stage_difference import BLOCKED_BELOW, compare_stage
from .stages import CANONICAL_AXES, STAGES


def diff_spec(
    left: str,
    right: str,
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    *,
    left_set: Mapping[str, Any] | None = None,
    right_set: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare two layers built from the same spec, each with settings of its own where there are any.

    Both get the same weights as far as each has a place for them, and the same input. Stages are compared in canonical
    axes; the outputs are those of the plain forwards, as PyTorch runs them. What a difference means is judged by the
    rounding error of the coarser of the two, measured against float64 in this run.

    Args:
        left: name in the registry of layers.
        right: likewise; the same name for one layer under two settings.
        spec: what both have, but for the settings below and those that a layer has no use for.
        inputs: likewise.
        run: likewise.
        left_set: fields of the three specs, by name, that the left side has for itself.
        right_set: likewise.

    Raises:
        SpecError: a layer or a setting is unknown, or the sizes of the two cannot agree.
        InputError: a file or a mask does not fit.
        WeightsError: the weights of the one cannot be carried into the other.
        DeviceError: the device is not there, cannot run the dtype, or has no numbers (meta).
        DoesNotFitError: the runs would need more memory than is free.
    """
    sides = make_sides(left, right, spec, inputs, run, left_set or {}, right_set or {})
    for side in sides:
        if resolve(side.run.device, side.spec.dtype).type == "meta":
            raise DeviceError(
                "device meta has shapes and no numbers, and diff compares numbers. Try --device cpu, or "
                "`mha-inspect trace --device meta` for the shapes."
            )
    _require_fit(*sides)
    weights = draw(*sides)
    ours, theirs = (SideRun(side, part, finer_dtype(*sides)) for side, part in zip(sides, weights, strict=True))
    rows = _fully_masked(ours, theirs)
    stages = tuple(_stage_row(stage, ours, theirs, rows) for stage in STAGES if _either_has(stage, ours, theirs))
    differing = [row.name for row in stages if row.verdict == "differs"]
    output = _outputs(ours, theirs, rows)
    some = bool(rows) and ours.rows_of_output() and len(rows) < ours.output.shape[0] * ours.output.shape[1]
    elsewhere = _outputs(ours, theirs, rows, leave_out=True) if some else None
    pairs = parameter_pairs(*sides, (ours.forward.module, theirs.forward.module))
    report = DiffReport(
        left=ours.report(rows),
        right=theirs.report(rows),
        weights=_shared_weights(ours, theirs, rows),
        noise=_noise_source(*sides),
        stages=stages,
        first_differing_stage=differing[0] if differing else None,
        output=output,
        verdict=output.verdict,
        parameters=pairs,
        masked_rows=tuple(_masked_row(ours, theirs, *row) for row in rows),
        elsewhere=elsewhere,
        notes=(),
        answer=(),
    )
    measured = Measured(report, *sides, blocked=_blocked(ours, theirs, rows))
    return replace(report, notes=notes(measured), answer=answer(measured))


def _require_fit(left: Side, right: Side) -> None:
    """Raise `DoesNotFitError` where both sides, opened and in float64 and all kept, need more memory than is free."""
    free = free_memory(left.run.device)
    rough = sum(rough_need(side.spec, side.inputs) for side in (left, right))
    if free is None or 2 * SAFE * rough < free:
        return

    def need(seq_len: int | None = None) -> int:
        total = 0
        for side in (left, right):
            asked = side.inputs if seq_len is None else replace(side.inputs, seq_len=seq_len, padding=())
            for spec in (side.spec, replace(side.spec, dtype="float64")):
                total += need_of(spec, asked, side.run, side.kind.name, keep=True)
        return total

    whole = need()
    if whole <= free:
        return
    fixed = any(side.inputs.input or side.inputs.attn_mask for side in (left, right))
    best = 0 if fixed else largest(lambda seq_len: need(seq_len) <= free, left.inputs.seq_len)
    way_out = f"The largest seq_len that fits is {best}." if best else "Try a smaller batch or embed_dim."
    asked = f"embed_dim {left.spec.embed_dim}, batch {left.inputs.batch}, seq_len {left.inputs.seq_len}, on two sides"
    require_memory(whole, left.run.device, asked, way_out)


def _either_has(stage: str, left: SideRun, right: SideRun) -> bool:
    return stage in left.opened.stages or stage in right.opened.stages


def _stage_row(stage: str, left: SideRun, right: SideRun, rows: Rows) -> StageRow:
    ours, theirs = left.opened.get(stage), right.opened.get(stage)
    note = ""
    if stage in ("k_proj", "v_proj") and ours is not None and theirs is not None:
        ours, theirs, note = _repeated(left, right, ours, theirs)

    def floor() -> float:
        assert ours is not None
        assert theirs is not None
        return max(left.stage_floor(stage, theirs, rows), right.stage_floor(stage, ours, rows))

    found = compare_stage(stage, ours, theirs, floor)
    if found.verdict is None:
        note = stage_note(stage, *_having(stage, left), *_having(stage, right))
    elif rows and found.verdict == "differs" and ours is not None and theirs is not None:
        rest = compare_stage(stage, without(stage, ours, rows), without(stage, theirs, rows), floor)
        note = f"without the fully masked queries: {rest.verdict}" if rest.verdict != "differs" else note
    if found.compared != CANONICAL_AXES[stage]:
        note = f"compared by {found.compared}"
    return StageRow(
        name=stage,
        left=left.stage(stage),
        right=right.stage(stage),
        compared=found.compared,
        max_abs_difference=found.max_abs_difference,
        relative_difference=found.relative_difference,
        noise_floor=found.noise_floor,
        times_noise=found.times_noise,
        verdict=found.verdict,
        note=note or found.note,
    )


def _having(stage: str, side: SideRun) -> tuple[str, frozenset[str]]:
    return side.side.label, frozenset(side.opened.stages)


def _repeated(left: SideRun, right: SideRun, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, str]:
    """`batch key (kv_heads head_dim)` of both with as many key/value heads, those that are shared repeated."""
    counts = left.side.spec.kv_heads, right.side.spec.kv_heads
    if counts[0] == counts[1] or left.side.spec.num_heads != right.side.spec.num_heads:
        return ours, theirs, ""
    heads = left.side.spec.num_heads
    pattern = "batch key (kv_heads head_dim) -> batch key (kv_heads group head_dim)"
    both = [
        repeat(content, pattern, kv_heads=count, group=heads // count)
        for content, count in zip((ours, theirs), counts, strict=True)
    ]
    shared = [
        f"each key/value head on the {name}, of {count}, stands for {heads // count}"
        for name, count in zip(("left", "right"), counts, strict=True)
        if count != heads
    ]
    return both[0], both[1], " and ".join(shared)


def _outputs(left: SideRun, right: SideRun, rows: Rows, *, leave_out: bool = False) -> OutputDifference:
    """The outputs of the plain forwards, judged by the rounding of the step by step computation.

    With `leave_out` the rows are not looked at.
    """
    ours, theirs = left.output, right.output
    if ours.shape != theirs.shape:
        return OutputDifference(None, None, None, None, "differs")
    if leave_out:
        ours, theirs = (without("output", side, rows) for side in (ours, theirs))
    found = compare_stage("output", ours, theirs, lambda: max(left.output_floor(rows), right.output_floor(rows)))
    verdict: Verdict = found.verdict or "differs"
    return OutputDifference(
        found.max_abs_difference, found.relative_difference, found.noise_floor, found.times_noise, verdict
    )


def _noise_source(left: Side, right: Side) -> NoiseSource:
    eps = {side.name: torch.finfo(getattr(torch, side.spec.dtype)).eps for side in (left, right)}
    names: tuple[SideName, ...] = tuple(side.name for side in (left, right) if eps[side.name] == max(eps.values()))
    return NoiseSource((left if "left" in names else right).spec.dtype, names)


def _shared_weights(left: SideRun, right: SideRun, rows: Rows) -> SharedWeights:
    reasons = (*left.left_out, *right.left_out)
    if not reasons:
        return SharedWeights(True, "every number of the one is in the other.", (), None)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    return SharedWeights(False, sentence, tuple(dict.fromkeys(reasons)), _other_way(left, right, rows))


def _other_way(left: SideRun, right: SideRun, rows: Rows) -> OtherWay | None:
    """The weights of the side that left something out, in the one that has a place for all."""
    if bool(left.left_out) == bool(right.left_out):
        return None
    poorer, richer = (left, right) if left.left_out else (right, left)
    try:
        weights = read_weights(poorer.forward.module)
        if weights.num_heads != richer.side.spec.num_heads:
            weights = weights.with_heads(richer.side.spec.num_heads)
        again = SideRun(richer.side, weights, finer_dtype(left.side, right.side))
    except WeightsError:
        return None
    if again.left_out:
        return None
    found = _outputs(poorer, again, rows, leave_out=poorer.rows_of_output())
    if found.max_abs_difference is None or found.times_noise is None:
        return None
    return OtherWay(
        source=poorer.side.name,
        max_abs_difference=found.max_abs_difference,
        times_noise=found.times_noise,
        verdict=found.verdict,
        sentence=f"with the numbers of {poorer.side.label} in {richer.side.label}, both outputs are {found.verdict}",
    )


def _fully_masked(left: SideRun, right: SideRun) -> list[tuple[int, int]]:
    """(batch, query) of every row that has no key to look at, on either side."""
    rows = [row for side in (left, right) for row in side.forward.inputs.fully_masked_rows(side.side.spec.num_heads)]
    return sorted(set(rows))


def _masked_row(left: SideRun, right: SideRun, batch: int, query: int) -> MaskedRowPair:
    def weights(side: SideRun) -> RowContent:
        content = side.opened.get("weights")
        return "finite" if content is None else _content(content[batch, :, query])

    def output(side: SideRun) -> RowContent:
        kind = _content(side.output[batch, query]) if side.rows_of_output() else "finite"
        return "finite" if kind == "uniform" else kind

    return MaskedRowPair(batch, query, weights(left), weights(right), output(left), output(right))


def _content(row: Tensor) -> RowContent:
    if bool(row.isnan().any()):
        return "nan"
    if not bool(row.any()):
        return "zero"
    low, high = row.double().aminmax()
    return "uniform" if float(high - low) <= 1e-2 * float(high) else "finite"


def _blocked(left: SideRun, right: SideRun, rows: Rows) -> Blocked | None:
    """What a mask puts in the place of a score on each side; None where there is no mask on a side."""
    scores = [side.opened.get("masked_scores") for side in (left, right)]
    weights = [side.opened.get("weights") for side in (left, right)]
    if scores[0] is None or scores[1] is None or weights[0] is None or weights[1] is None:
        return None
    if len({tensor.shape for tensor in (*scores, *weights) if tensor is not None}) != 1:
        return None
    places = (scores[0] < BLOCKED_BELOW).cpu() & (scores[1] < BLOCKED_BELOW).cpu()
    for batch, query in rows:
        places[batch, :, query] = False
    if not bool(places.any()):
        return None
    words = [_written(tensor.cpu()[places]) for tensor in scores if tensor is not None]
    zero = all(not bool(tensor.cpu()[places].any()) for tensor in weights if tensor is not None)
    return Blocked(words[0], words[1], int(places.sum()), zero)


def _written(blocked: Tensor) -> str:
    lowest = float(blocked.double().min())
    return "−inf" if lowest == float("-inf") else f"about {lowest:.2g}".replace("-", "−").replace("e+", "e")

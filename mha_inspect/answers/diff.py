"""diff: two layers, or one under two settings, with the same weights and the same input, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from einops import repeat
from torch import Tensor

from ..errors import DeviceError, WeightsError
from ..layers.weights import read_weights
from ..naming.stages import STAGES
from ..reports.diff import (
    DiffReport,
    OtherWay,
    SharedWeights,
    StageRow,
)
from ..targets.device import resolve
from ..targets.load import plan_layer
from ..targets.room import Room
from ..targets.spec import AttentionSpec, InputSpec, RunSpec
from .sides.compared import (
    Rows,
    blocked,
    compare_elsewhere,
    compare_outputs,
    masked_row,
    noise_source,
    other_way,
    stage_row,
)
from .sides.parameter_pairs import parameter_pairs
from .sides.run import LayerRun
from .sides.settings import Side, make_sides
from .sides.shared_weights import draw, finer_dtype
from .sides.words import Measured, answer, notes, stage_note


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
        left: name in the catalog of layers.
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
    ours, theirs = (LayerRun(side, part, finer_dtype(*sides)) for side, part in zip(sides, weights, strict=True))
    rows = _fully_masked(ours, theirs)
    stages = tuple(_stage_row(stage, ours, theirs, rows) for stage in STAGES if _either_has(stage, ours, theirs))
    differing = [row.name for row in stages if row.verdict == "differs"]
    output = compare_outputs(ours, theirs, rows)
    pairs = parameter_pairs(*sides, (ours.forward.module, theirs.forward.module))
    report = DiffReport(
        left=ours.report(rows),
        right=theirs.report(rows),
        weights=_shared_weights(ours, theirs, rows),
        noise=noise_source(**{side.name: side.spec.dtype for side in sides}),
        stages=stages,
        first_differing_stage=differing[0] if differing else None,
        output=output,
        verdict=output.verdict,
        parameters=pairs,
        masked_rows=tuple(masked_row(row, _both("weights", ours, theirs), (ours, theirs)) for row in rows),
        elsewhere=compare_elsewhere(ours, theirs, rows),
        notes=(),
        answer=(),
    )
    barred = blocked(_both("masked_scores", ours, theirs), _both("weights", ours, theirs), rows)
    measured = Measured(report, *sides, blocked=barred)
    return replace(report, notes=notes(measured), answer=answer(measured))


def _both(stage: str, left: LayerRun, right: LayerRun) -> list[Tensor | None]:
    return [left.opened.get(stage), right.opened.get(stage)]


def _require_fit(left: Side, right: Side) -> None:
    """Raise `DoesNotFitError` where both sides, and each in float64 and all kept, need more memory than is free."""
    room = Room(kept=True, exact=True)
    for side in (left, right):
        room.require(plan_layer(side.spec, side.inputs, side.run, side.kind.name))


def _either_has(stage: str, left: LayerRun, right: LayerRun) -> bool:
    return stage in left.opened.stages or stage in right.opened.stages


def _stage_row(stage: str, left: LayerRun, right: LayerRun, rows: Rows) -> StageRow:
    ours, theirs = left.opened.get(stage), right.opened.get(stage)
    note = ""
    if stage in ("k_proj", "v_proj") and ours is not None and theirs is not None:
        ours, theirs, note = _repeated(left, right, ours, theirs)

    def floor() -> float:
        assert ours is not None
        assert theirs is not None
        return max(left.stage_floor(stage, theirs, rows), right.stage_floor(stage, ours, rows))

    def missing() -> str:
        return stage_note(stage, *_having(stage, left), *_having(stage, right))

    return stage_row(stage, (left.stage(stage), right.stage(stage)), (ours, theirs), rows, floor, missing, note)


def _having(stage: str, side: LayerRun) -> tuple[str, frozenset[str]]:
    return side.side.label, frozenset(side.opened.stages)


def _repeated(left: LayerRun, right: LayerRun, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, str]:
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


def _shared_weights(left: LayerRun, right: LayerRun, rows: Rows) -> SharedWeights:
    reasons = (*left.left_out, *right.left_out)
    if not reasons:
        return SharedWeights(True, "every number of the one is in the other.", (), None)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    return SharedWeights(False, sentence, tuple(dict.fromkeys(reasons)), _other_way(left, right, rows))


def _other_way(left: LayerRun, right: LayerRun, rows: Rows) -> OtherWay | None:
    """The weights of the side that left something out, in the one that has a place for all."""
    if bool(left.left_out) == bool(right.left_out):
        return None
    poorer, richer = (left, right) if left.left_out else (right, left)
    try:
        weights = read_weights(poorer.forward.module)
        if weights.num_heads != richer.side.spec.num_heads:
            weights = weights.with_heads(richer.side.spec.num_heads)
        again = LayerRun(richer.side, weights, finer_dtype(left.side, right.side))
    except WeightsError:
        return None
    if again.left_out:
        return None
    return other_way(poorer, again, rows, poorer.side.name, poorer.side.label, richer.side.label)


def _fully_masked(left: LayerRun, right: LayerRun) -> list[tuple[int, int]]:
    """(batch, query) of every row that has no key to look at, on either side."""
    rows = [row for side in (left, right) for row in side.forward.inputs.fully_masked_rows(side.side.spec.num_heads)]
    return sorted(set(rows))

"""One module of the user's own under several head counts: the same weights, the same input, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

from torch import nn

from ..errors import SpecError
from ..noise import judge
from ..reports.common import Verdict
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadPair
from ..sides.module_run import ModuleRun, ModuleSide
from ..spec import AttentionSpec
from ..stage_difference import compare_stage, distances
from ..stages import STAGES
from .runs import Walk
from .sentences import answer, reason
from .weights import Carried

_GIVEN = ("query", "key", "value")


@dataclass(frozen=True)
class Counted:
    """A module that was built with a number of heads."""

    num_heads: int
    side: ModuleSide


def compare_modules(built: Sequence[Counted], *, pairwise: bool = False) -> CompareHeadsReport:
    """Compare modules that differ in their number of heads, the first being the baseline.

    Every parameter that has the same name and shape gets the baseline's numbers.

    Raises:
        SpecError: no attention was found, or the outputs have other shapes.
        InputError: the baseline cannot be run in float64, which rounding is measured against.
    """
    base, *others = built
    carried = [Carried(True, (), ()), *(_carry(base.side.own.module, one.side.own.module) for one in others)]
    runs = [ModuleRun(one.side) for one in built]
    for one, run in zip(built, runs, strict=True):
        _require_comparable(one, run, runs[0])
    specs = [_spec(one, run) for one, run in zip(built, runs, strict=True)]
    rows = [_row(specs, place, built[place], runs, carried[place]) for place in range(len(built))]
    verdicts = {row.verdict for row in rows[1:]}
    verdict: Verdict = "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"
    first = runs[0].report()
    return CompareHeadsReport(
        environment=first.environment,
        layer=first.layer,
        baseline=base.num_heads,
        counts=tuple(rows),
        verdict=verdict,
        equalities=(),
        answer=answer(rows, carried, all_nan=all(bool(run.output.isnan().all()) for run in runs)),
        pairs=tuple(_pairs(built, runs)) if pairwise else None,
    )


def _carry(baseline: nn.Module, module: nn.Module) -> Carried:
    """Give a module what it can hold of the baseline's state dict."""
    given, own = baseline.state_dict(), module.state_dict()
    fitting = {name: tensor for name, tensor in given.items() if name in own and own[name].shape == tensor.shape}
    module.load_state_dict(fitting, strict=False)
    changes = [
        f"{name} {list(given[name].shape)} becomes {list(tensor.shape)}" if name in given else f"{name} is new"
        for name, tensor in own.items()
        if name not in fitting
    ]
    changes += [f"{name} is gone" for name in given if name not in own]
    return Carried(not changes, tuple(fitting), tuple(changes))


def _require_comparable(one: Counted, run: ModuleRun, base: ModuleRun) -> None:
    if not run.opened.attentions:
        raise SpecError(f"No attention was found in {one.side.label}: there are no heads to compare.")
    if run.output.shape != base.output.shape:
        raise SpecError(
            f"{one.side.label} returns {list(run.output.shape)} with num_heads {one.num_heads} and "
            f"{list(base.output.shape)} with the baseline: outputs of one shape can be compared. Give it the sizes "
            "that do not follow from the number of heads: --set NAME=VALUE."
        )
    found = run.opened.attentions[0][1].num_heads
    if found != one.num_heads:
        raise SpecError(
            f"{one.side.label} was built with num_heads {one.num_heads}, and its attention has {found}: something else "
            "sets it. `mha-inspect trace` shows what it takes."
        )


def _spec(one: Counted, run: ModuleRun) -> AttentionSpec:
    """The sizes that sentences speak of."""
    head_dim = run.opened.attentions[0][1].head_dim
    return AttentionSpec(embed_dim=one.num_heads * head_dim, num_heads=one.num_heads, head_dim=head_dim)


def _row(
    specs: Sequence[AttentionSpec], place: int, one: Counted, runs: Sequence[ModuleRun], carried: Carried
) -> HeadCount:
    base, run = runs[0], runs[place]
    largest, relative = distances(base.output, run.output)
    times, verdict = judge(largest, base.output_floor)
    walk = _walk(base, run) if place else Walk((), None)
    row = HeadCount(
        num_heads=one.num_heads,
        head_dim=int(specs[place].head_dim),
        numel=sum(parameter.numel() for parameter in one.side.own.module.parameters()),
        same_parameters=carried.same,
        output_shape=tuple(run.output.shape),
        max_abs_difference=largest,
        relative_difference=relative,
        noise_floor=base.output_floor,
        times_noise=times,
        verdict=verdict,
        first_differing_stage=walk.first,
        reason="The baseline.",
    )
    if not place:
        return row
    unnamed = _unnamed(base, run)
    if walk.first is None and unnamed:
        named = ", ".join(unnamed)
        why = f"All that can be compared holds the same numbers; not compared, for an axis has no name: {named}."
    else:
        why = reason(specs[0], specs[place], walk, row, carried, "")
    return replace(row, reason=why)


def _unnamed(*runs: ModuleRun) -> tuple[str, ...]:
    """The stages that there are, and that could not be brought into canonical axes on a side."""
    there = [
        (found.stages, contents)
        for run in runs
        for (found, _), contents in zip(run.opened.attentions, run.contents, strict=True)
    ]
    missing = {stage for stages, contents in there for stage in stages if stage not in contents}
    return tuple(stage for stage in STAGES if stage in missing)


def _walk(base: ModuleRun, other: ModuleRun) -> Walk:
    """The stages of both side by side, in the first attention in which one differs."""
    found = Walk((), None)
    for place, (mine, theirs) in enumerate(zip(base.contents, other.contents, strict=False)):
        same: list[str] = []
        first, note, rejoined = None, "", None
        for stage in STAGES:
            if stage in _GIVEN or stage not in mine or stage not in theirs:
                continue
            like = theirs[stage]
            row = compare_stage(stage, mine[stage], like, partial(base.floor, place, stage, like))
            if first is not None:
                rejoined = None if row.verdict == "differs" else rejoined or stage
            elif row.verdict == "differs":
                first = stage
                if row.max_abs_difference is None:
                    note = f"{list(like.shape)} instead of {list(mine[stage].shape)}"
            else:
                same.append(stage)
        found = Walk(tuple(same), first, note, rejoined)
        if first is not None:
            break
    return found


def _pairs(built: Sequence[Counted], runs: Sequence[ModuleRun]) -> list[HeadPair]:
    pairs = []
    for (one, left), (other, right) in combinations(zip(built, runs, strict=True), 2):
        largest, relative = distances(left.output, right.output)
        times, verdict = judge(largest, runs[0].output_floor)
        pairs.append(HeadPair(one.num_heads, other.num_heads, largest, relative, times, verdict))
    return pairs

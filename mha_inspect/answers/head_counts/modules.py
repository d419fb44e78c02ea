"""One module of the user's own under several head counts: the same weights, the same input, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ...errors import SpecError
from ...measure.stage_difference import compare_stage
from ...naming.stages import STAGES
from ...record.subject import Subject
from ...reports.compare_heads import CompareHeadsReport, HeadCount
from ...targets.spec import AttentionSpec
from ..kernels import drops_at_random
from ..sides.module_run import ModuleRun, ModuleSide
from .focus import compare_focus, module_weights
from .gradients import compare_gradients
from .learner import module_learner
from .must_be_equal import Claim, claims, confirmed, masked_note
from .rows import count_row, overall, pair_rows
from .runs import Walk
from .sentences import answer, reason
from .sight import Sight, sight_of_runs
from .training import compare_training
from .weights import Carried

_GIVEN = ("query", "key", "value")


@dataclass(frozen=True)
class Counted:
    """A module that was built with a number of heads."""

    num_heads: int
    side: ModuleSide


def compare_modules(
    built: Sequence[Counted],
    *,
    pairwise: bool = False,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
    see: Callable[[int, Subject], None] | None = None,
) -> CompareHeadsReport:
    """Compare modules that differ in their number of heads, the first being the baseline.

    Every parameter that has the same name and shape gets the baseline's numbers.

    Args:
        built: a module a head count, with the same input.
        pairwise: whether every pair is compared as well.
        gradients: whether the gradient of every parameter is compared.
        steps: how many steps each head count is trained for, to compare what it has learned; 0 for none.
        focus: whether to measure what each head looks at.
        see: is called with each head count and the subject that was compared.

    Raises:
        SpecError: no attention was found, the outputs have other shapes, or weights are dropped at random.
        InputError: the baseline cannot be run in float64, which rounding is measured against; or there is no gradient.
        RecordingError: the weights cannot be told by head, and what heads look at was asked for.
    """
    base, *others = built
    carried = [Carried(True, (), ()), *(_carry(base.side.own.module, one.side.own.module) for one in others)]
    runs = [ModuleRun(one.side) for one in built]
    for one, run in zip(built, runs, strict=True):
        _require_comparable(one, run, runs[0])
    if see is not None:
        for one in built:
            see(one.num_heads, one.side.own)
    specs = [_spec(one, run) for one, run in zip(built, runs, strict=True)]
    sight = sight_of_runs(runs)
    equal = claims(sight) if all(one.same for one in carried) else []
    cause = next((claim.short for claim in equal if bool(claim.rows.all())), "")
    rows = [_row(specs, place, runs, carried[place], cause) for place in range(len(built))]
    outputs = [(one.num_heads, run.output) for one, run in zip(built, runs, strict=True)]
    learners = [module_learner(one.num_heads, one.side, run.output) for one, run in zip(built, runs, strict=True)]
    first = runs[0].report()
    return CompareHeadsReport(
        environment=first.environment,
        layer=first.layer,
        baseline=base.num_heads,
        counts=tuple(rows),
        verdict=overall([row.verdict for row in rows[1:]]),
        equalities=_equalities(equal, sight, runs),
        answer=answer(rows, carried, all_nan=all(bool(run.output.isnan().all()) for run in runs)),
        pairs=pair_rows(outputs, runs[0].output_floor()) if pairwise else None,
        gradients=compare_gradients(learners, cause) if gradients else None,
        training=compare_training(learners, steps, cause) if steps else None,
        focus=compare_focus(look for run in runs for look in module_weights(run)) if focus else None,
    )


def _equalities(equal: Sequence[Claim], sight: Sight | None, runs: Sequence[ModuleRun]) -> tuple[str, ...]:
    """Where outputs must be equal, why, and what was measured there."""
    said = []
    outputs, floor = [run.output for run in runs], runs[0].output_floor()
    for claim in equal:
        own = outputs
        if bool(claim.rows.all()):
            # Whatever the output is laid out like, it is all of it.
            claim = replace(claim, rows=torch.ones(1, 1, dtype=torch.bool))
            own = [output[None, None] for output in outputs]
        if own[0].shape[:2] == claim.rows.shape:
            said.append(confirmed(claim, own, floor, unless=runs[0].side.label))
    masked = [] if sight is None or outputs[0].shape[:2] != sight.rows else (sight.left == 0).nonzero().tolist()
    return (*said, masked_note([(row, query) for row, query in masked], outputs)) if masked else tuple(said)


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
    if drops_at_random(run.opened):
        raise SpecError(
            f"{one.side.label} drops elements at random in training mode, others for every head count: the outputs "
            "would differ whatever the heads do. Take eval mode (--eval, .eval()), or no dropout."
        )
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
    specs: Sequence[AttentionSpec], place: int, runs: Sequence[ModuleRun], carried: Carried, cause: str
) -> HeadCount:
    base, run = runs[0], runs[place]
    row = count_row(specs[place], run.side.own.module, (base.output, run.output), base.output_floor(), carried)
    if not place:
        return row
    walk = _walk(base, run)
    unnamed = _unnamed(base, run)
    if walk.first is None and unnamed:
        named = ", ".join(unnamed)
        why = f"All that can be compared holds the same numbers; not compared, for an axis has no name: {named}."
        why += f" The outputs are the same because {cause}." if cause and row.verdict == "same" else ""
    else:
        why = reason(specs[0], specs[place], walk, row, carried, cause if row.verdict == "same" else "")
    return replace(row, first_differing_stage=walk.first, reason=why)


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

"""What a reference shows: the first stage at which a trusted module computes something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...errors import MhaInspectError
from ...reports.check import Finding
from ...running.subject import Subject
from ..comparable_run import ComparableRun
from ..comparison import ComparedStage, Comparison
from .bench import LOOSE, Bench
from .runner import NotPossibleError, difference


def reference(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage at which a trusted module computes something else, each with the weights that it has.

    Weights are not copied by their part in the attention: that would hide a query that was taken for a key.
    """
    trusted = bench.intent.reference
    if trusted is None:
        raise NotPossibleError("not declared: reference")
    args, kwargs = bench.given.of_call({})
    other = replace(bench.subject, module=trusted, args=args, kwargs=kwargs, without_ones=None)
    with other.replaying(other.state()):
        trusted.eval()
        yield from list(_parting(bench, other))


def _parting(bench: Bench, other: Subject) -> Iterator[Finding]:
    try:
        theirs = bench.output_of(other.plain())
    except NotPossibleError:
        raise
    except Exception as error:  # whatever somebody's code may raise
        raise NotPossibleError(f"the reference raises on these arguments: {type(error).__name__}") from error
    if theirs.shape != bench.output.shape:
        said = f"The output is {list(bench.output.shape)}, and the reference's is {list(theirs.shape)}."
        yield Finding("reference", said, "Both were run on the same arguments.")
        return
    apart = float(difference(bench.output, theirs).max())
    if apart <= LOOSE * bench.limit:
        return
    stage, where, source, module = _first_difference(bench.subject, other), "the output", "", ""
    if stage is not None:
        attention, _ = bench.recorded.attentions[stage.place]
        op = bench.recorded.recording.producer(attention.stages[stage.name])
        where, module = f"{stage.name} of attention {stage.place + 1}", attention.module
        source = "" if op is None else op.source
    yield Finding(
        "reference",
        f"The reference gives something else, by {apart:.3g}: the first that differs is {where}.",
        "Both were run on the same arguments, and their stages compared in canonical axes.",
        source=source,
        module=module,
    )


def _first_difference(mine: Subject, trusted: Subject) -> ComparedStage | None:
    """Return the first stage that differs beyond rounding; None where that cannot be told."""
    left, right = ComparableRun(mine), ComparableRun(trusted)
    try:
        if len(left.attentions) != len(right.attentions):
            return None
        comparison = Comparison(left, right)
        stages = (stage for place in range(len(left.attentions)) for stage in comparison.rows(place))
        return next((s for s in stages if s.difference is not None and s.difference.verdict == "differs"), None)
    except MhaInspectError:  # one cannot be copied, or not run in float64
        return None

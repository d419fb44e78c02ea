"""Check a module: every check in turn, what it found, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from ...errors import InputError
from ...naming.stage_facts import unlike_dot
from ...reports.check import CheckReport, Finding, PassedCheck, SkippedCheck
from ...running.subject import Subject
from ...text import plural
from ..run_report import environment_of, layer_of
from .behaviour import batch, causal, inputs, mixing, repeat, scale, training, window
from .bench import Bench
from .cache import cache
from .facts import facts_of, heads_of, without_heads
from .heads import grouped, heads
from .intent import CHECKS, Intent, chosen_checks
from .numbers import finite
from .padding import padding
from .reference import reference
from .rotary import rotary
from .runner import NotPossibleError, RaisedError, Runner
from .softmax import lone_softmaxes, masking, softmax
from .weights import UnreadFinding, parameters

_RUNS: dict[str, Callable[[Bench], Iterator[Finding | SkippedCheck] | Iterator[Finding]]] = {
    run.__name__: run
    for run in (
        *(inputs, heads, softmax, masking, finite, grouped, rotary, batch, mixing, parameters, repeat),
        *(training, causal, window, padding, cache, scale, reference),
    )
}
"""What makes each check, by its name."""
_NEED_RUNS = ("batch", "mixing", "parameters", "repeat", "training", "padding", "cache")
"""Checks that run the module again."""
_NEED_NO_NUMBERS = ("scale", "parameters")
"""Checks that a run on meta is enough for."""
_ON_META = {"parameters": "every projection is read, once"}
"""What holds where one of them finds nothing there, in the place of what `CHECKS` says."""
_NEED_NUMBERS = ("heads", "softmax", "masking", "finite", "grouped", "rotary", "reference")
"""Checks that read the tensors of the base run: they come before those are let go."""
_FOLLOWS = {
    "mixing": {"heads", "batch", "finite"},
    "parameters": {"masking"},
    "softmax": {"finite"},
    "repeat": {"finite"},
}
"""Checks whose findings follow from those of others."""


def check(
    subject: Subject,
    intent: Intent | None = None,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    evidence_only: bool = False,
    tick: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Run a subject again and again with one thing changed, and report what is wrong with its attention.

    The module is run in eval, from one state, and left as it was. With `evidence_only` it is run once.

    Raises:
        InputError: there is no attention in it, or the intent names no argument of its forward.
        SpecError: there is no check of a name.
    """
    intent = intent or Intent()
    names = chosen_checks(only, skip)
    runner = Runner(subject, tick)
    bench = Bench(runner, runner.subject, intent, once=evidence_only)
    for argument in filter(None, (intent.padding, intent.cache)):
        bench.given.require(argument)
    results: list[Finding | PassedCheck | SkippedCheck] = []
    again = not evidence_only and not bench.on_meta
    with runner.changed_by(nn.Module.eval):
        if not bench.recorded.attentions:
            results += lone_softmaxes(bench)
            if not results:
                raise InputError(_nothing(bench))
            results += [SkippedCheck(name, "no attention is found around this softmax") for name in names]
            names = ()
        for name in (name for name in names if name in _NEED_NUMBERS):
            results += _results(bench, name)
        without = without_heads(bench)
        bench.base.release()
        for name in (name for name in names if name not in _NEED_NUMBERS):
            results += _results(bench, name)
        facts = tuple(facts_of(bench, runs=again))
        hanging = tuple(heads_of(bench, without, runs=again))
    order = list(CHECKS)
    results.sort(key=lambda result: order.index(result.check))
    return CheckReport(
        environment=replace(environment_of(subject), seed=runner.seed),
        layer=layer_of(subject),
        intent=intent.told(),
        findings=_causes([result for result in results if isinstance(result, Finding)]),
        facts=facts,
        heads=hanging,
        held=tuple(result for result in results if isinstance(result, PassedCheck)),
        left_out=tuple(result for result in results if isinstance(result, SkippedCheck)),
        runs=runner.runs,
        notes=(*subject.notes, *unlike_dot(bench.recorded)),
    )


def _results(bench: Bench, name: str) -> list[Finding | PassedCheck | SkippedCheck]:
    """Make one check, and return what it found; else that it held, or why it was left out."""
    if bench.on_meta and name not in _NEED_NO_NUMBERS:
        return [SkippedCheck(name, "the module is on meta, and this needs numbers: use --device cpu")]
    if bench.once and name in _NEED_RUNS:
        return [SkippedCheck(name, "needs more runs than one")]
    bench.runner.tick(name)
    results: list[Finding | PassedCheck | SkippedCheck] = []
    is_made = True
    try:
        for result in _RUNS[name](bench):
            results.append(result)
    except (NotPossibleError, RaisedError) as error:
        raised = "the forward raises under a changed input: " if isinstance(error, RaisedError) else ""
        results.append(SkippedCheck(name, raised + " ".join(str(error).split())))
        is_made = False
    findings = [result for result in results if isinstance(result, Finding)]
    bench.failed |= {finding.check for finding in findings if finding.sure}
    if is_made and not findings:
        results.insert(0, PassedCheck(name, _ON_META.get(name, CHECKS[name]) if bench.on_meta else CHECKS[name]))
    return results


def _causes(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings without those that follow from others, the sure ones first."""
    sure = {finding.check for finding in findings if finding.sure}
    follow = {name for name, causes in _FOLLOWS.items() if causes & sure}
    follow -= {finding.check for finding in findings if isinstance(finding, UnreadFinding)}
    return tuple(sorted((f for f in findings if f.check not in follow), key=lambda finding: not finding.sure))


def _nothing(bench: Bench) -> str:
    """Return why there is nothing to check, with the products that were seen."""
    recording = bench.recorded.recording
    products = [op for op in recording.ops if op.does("product")]
    softmaxes = sum(op.does("softmax") for op in recording.ops)
    lines = ", ".join(dict.fromkeys(f"{op.base_name} {list(op.output.shape)} at {op.source}" for op in products[:4]))
    return (
        f"{type(bench.module).__name__} has no attention to check: looked for a product, a softmax of it, and a "
        f"product of that with values, and saw {plural(len(products), 'product')}"
        + (f" ({lines}{', …' if len(products) > 4 else ''})" if products else "")
        + f" and {softmaxes} softmax{'' if softmaxes == 1 else 'es'}. `mha-inspect trace` shows what it does."
    )

"""Check a module: every check in turn, what it found, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from ...errors import InputError
from ...naming.stage_facts import unlike_dot
from ...naming.subject import Subject
from ...reports.check import CheckReport, Finding, Held, LeftOut
from ...text import plural
from .behaviour import batch, causal, inputs, mixing, repeat, scale, training, window
from .bench import Bench, NotPossibleError, RaisedError
from .cache import cache
from .facts import facts_of, heads_of, without_heads
from .heads import grouped, heads
from .intent import CHECKS, Intent, chosen_checks
from .numbers import finite, kernels
from .padding import padding
from .reference import reference
from .rotary import rotary
from .softmax import lone_softmaxes, masking, softmax
from .weights import parameters

_RUNS: dict[str, Callable[[Bench], Iterator[Finding]]] = {
    run.__name__: run
    for run in (
        *(inputs, heads, softmax, masking, finite, kernels, grouped, rotary, batch, mixing, parameters, repeat),
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
_NEED_NUMBERS = ("heads", "softmax", "masking", "finite", "kernels", "grouped", "rotary", "reference")
"""Checks that read what is held of the base run: they come before it is let go."""


def check(
    own: Subject,
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
    from ..run_report import environment_of, layer_of

    intent = intent or Intent()
    names = chosen_checks(only, skip)
    bench = Bench(own, intent, tick, once=evidence_only)
    for argument in filter(None, (intent.padding, intent.cache)):
        bench.given.require(argument)
    made: list[Finding | Held | LeftOut] = []
    again = not evidence_only and not bench.on_meta
    with bench.changed_by(nn.Module.eval):
        if not bench.seen.attentions:
            made += lone_softmaxes(bench)
            if not made:
                raise InputError(_nothing(bench))
            made += [LeftOut(name, "no attention is found around this softmax") for name in names]
            names = ()
        for name in (name for name in names if name in _NEED_NUMBERS):
            made += _results(bench, name)
        without, _ = without_heads(bench), bench.sights
        bench.release()
        for name in (name for name in names if name not in _NEED_NUMBERS):
            made += _results(bench, name)
        facts = tuple(facts_of(bench, runs=again))
        hanging = tuple(heads_of(bench, without, runs=again))
    order = list(CHECKS)
    made.sort(key=lambda one: order.index(one.check))
    return CheckReport(
        environment=replace(environment_of(own), seed=bench.own.seed),
        layer=layer_of(own),
        intent=intent.told(),
        findings=_by_cause([one for one in made if isinstance(one, Finding)]),
        facts=facts,
        heads=hanging,
        held=tuple(one for one in made if isinstance(one, Held)),
        left_out=tuple(one for one in made if isinstance(one, LeftOut)),
        runs=bench.runs,
        notes=(*own.notes, *unlike_dot(bench.seen)),
    )


def _results(bench: Bench, name: str) -> list[Finding | Held | LeftOut]:
    """Make one check, and return what it found; else that it held, or why it was left out."""
    if bench.on_meta and name not in _NEED_NO_NUMBERS:
        return [LeftOut(name, "the module is on meta, and this needs numbers: use --device cpu")]
    if bench.once and name in _NEED_RUNS:
        return [LeftOut(name, "needs more runs than one")]
    bench.tick(name)
    found: list[Finding] = []
    reasons: list[str] = []
    try:
        for finding in _RUNS[name](bench):
            found.append(finding)
    except NotPossibleError as error:
        reasons.append(" ".join(str(error).split()))
    except RaisedError as error:
        reasons.append(f"the forward raises under a changed input: {' '.join(str(error).split())}")
    bench.found |= {finding.check for finding in found if finding.sure}
    what = _ON_META.get(name, CHECKS[name]) if bench.on_meta else CHECKS[name]
    held = [] if found or reasons else [Held(name, what)]
    return [*found, *held, *(LeftOut(name, reason) for reason in (*reasons, *bench.asides.pop(name, ())))]


def _by_cause(findings: list[Finding]) -> tuple[Finding, ...]:
    """The findings without those that follow from another one, causes first."""
    sure = {finding.check for finding in findings if finding.sure}
    follow: set[str] = set()
    if sure & {"heads", "batch"}:
        follow |= {"mixing"}
    if "masking" in sure:
        follow |= {"parameters"} - {finding.check for finding in findings if "read by nothing" in finding.sentence}
    if "finite" in sure:
        follow |= {"softmax", "repeat", "mixing"}
    kept = [finding for finding in findings if finding.check not in follow]
    return tuple(sorted(kept, key=lambda finding: not finding.sure))


def _nothing(bench: Bench) -> str:
    """Why there is nothing to check, with the products that were seen."""
    recording = bench.seen.recording
    products = [op for op in recording.ops if op.does("product")]
    softmaxes = sum(op.does("softmax") for op in recording.ops)
    lines = ", ".join(dict.fromkeys(f"{op.base_name} {list(op.output.shape)} at {op.source}" for op in products[:4]))
    return (
        f"{type(bench.module).__name__} has no attention to check: looked for a product, a softmax of it, and a "
        f"product of that with values, and saw {plural(len(products), 'product')}"
        + (f" ({lines}{', …' if len(products) > 4 else ''})" if products else "")
        + f" and {softmaxes} softmax{'' if softmaxes == 1 else 'es'}. `mha-inspect trace` shows what it does."
    )

"""Check a module: every check in turn, what it found, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...errors import InputError
from ...naming.subject import Subject
from ...reports.check import CheckReport, Finding, Held, LeftOut
from ...text import plural
from . import behaviour, declared, structure, weights
from .bench import Bench, NotPossibleError, RaisedError
from .facts import WithoutHeads, facts_of, heads_of, without_heads
from .intent import CHECKS, Intent, chosen_checks
from .rotary import rotary
from .sight import sights

_RUNS: dict[str, Callable[[Bench], Iterator[Finding]]] = {
    "inputs": behaviour.inputs,
    "heads": structure.heads,
    "softmax": structure.softmax,
    "masking": structure.masking,
    "finite": structure.finite,
    "kernels": structure.kernels,
    "grouped": structure.grouped,
    "rotary": rotary,
    "batch": behaviour.batch,
    "mixing": behaviour.mixing,
    "parameters": weights.parameters,
    "repeat": behaviour.repeat,
    "training": behaviour.training,
    "causal": behaviour.causal,
    "window": behaviour.window,
    "padding": declared.padding,
    "cache": declared.cache,
    "scale": behaviour.scale,
    "reference": declared.reference,
}
_NEED_RUNS = ("batch", "mixing", "parameters", "repeat", "training", "padding", "cache")
"""Checks that run the module again."""
_NEED_NO_NUMBERS = ("scale", "parameters")
"""Checks that a run on meta is enough for."""
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
    from ..trace import environment_of, layer_of

    intent = intent or Intent()
    names = chosen_checks(only, skip)
    bench = Bench(own, intent, tick, once=evidence_only)
    for argument in filter(None, (intent.padding, intent.cache)):
        bench.require(argument)
    findings: list[Finding] = []
    held: list[Held] = []
    left_out: list[LeftOut] = []
    with bench.as_evaluated():
        if not bench.seen.attentions:
            findings += structure.lone_softmaxes(bench)
            if not findings:
                raise InputError(_nothing(bench))
            left_out += [LeftOut(name, "no attention is found around this softmax") for name in names]
            names = ()
        without: list[WithoutHeads] | None = None
        for name in sorted(names, key=lambda name: name not in _NEED_NUMBERS):
            if name not in _NEED_NUMBERS and without is None:
                sights(bench)
                without = without_heads(bench)
                bench.release()
            if bench.on_meta and name not in _NEED_NO_NUMBERS:
                left_out.append(LeftOut(name, "the module is on meta, and this needs numbers: use --device cpu"))
                continue
            if evidence_only and name in _NEED_RUNS:
                left_out.append(LeftOut(name, "needs more runs than one"))
                continue
            tick(name)
            found: list[Finding] = []
            whole = True
            try:
                for finding in _quiet(bench) if evidence_only and name == "causal" else _RUNS[name](bench):
                    found.append(finding)
            except (NotPossibleError, RaisedError) as error:
                left_out.append(LeftOut(name, _reason(error)))
                whole = False
            left_out += [LeftOut(check, reason) for check, reason in bench.asides if check == name]
            findings += found
            bench.found |= {finding.check for finding in found if finding.sure}
            if whole and not found:
                held.append(Held(name, CHECKS[name]))
        sights(bench)
        without = without_heads(bench) if without is None else without
        again = not evidence_only and not bench.on_meta
        facts = tuple(facts_of(bench, runs=again))
        heads = heads_of(bench, without, runs=again)
    order = list(CHECKS)
    return CheckReport(
        environment=replace(environment_of(own), seed=bench.own.seed),
        layer=layer_of(own),
        intent=intent.told(),
        findings=_by_cause(sorted(findings, key=lambda finding: order.index(finding.check))),
        facts=facts,
        heads=heads,
        held=tuple(sorted(held, key=lambda one: order.index(one.check))),
        left_out=tuple(sorted(left_out, key=lambda one: order.index(one.check))),
        runs=bench.runs,
        notes=own.notes,
    )


def _quiet(bench: Bench) -> Iterator[Finding]:
    """What the recorded scores alone say of who sees whom."""
    bench.__dict__["reach"] = {}
    return behaviour.causal(bench)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"the forward raises under a changed input: {text}" if isinstance(error, RaisedError) else text


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

"""Check a module: run every check in turn, and report findings, passed checks and skipped checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..graph.attention import Attention
from ..measure.run_report import environment_of, layer_of
from ..naming.axes import AxisNames
from ..naming.score_formulas import unlike_dot
from ..naming.stage_facts import StageFacts
from ..naming.visibility import masks_of
from ..record.arguments import tensors_in
from ..record.ops import Op
from ..record.ranks import needs_ranks
from ..reports.check import CheckReport, Fact, Finding, PassedCheck, SkippedCheck
from ..running.subject import Run, State, Subject
from ..text import first_few, plural
from .arguments import Arguments, require_apart
from .evidence import Evidence, evidence_of
from .given import without_effect
from .gradients import without_part
from .intent import CHECKS, Intent, chosen_checks
from .lab import Lab, NotPossibleError, RaisedError
from .ladders import ladder_facts
from .linear_values import facts_of, linear_weights, not_divided_rightly
from .lookalikes import found_instead
from .masked_runs import facts_of_missing, mask_facts
from .registry import Rule, all_rules
from .rules.scale import scale_words
from .rules.softmax import lone_softmaxes
from .same import draws

_Result = Finding | PassedCheck | SkippedCheck


_FEW = 2
"""The most attentions of a module whose arguments are tried in a trace."""
_RULES = all_rules()
_OF_ONE_RUN = tuple(name for name, entry in _RULES.items() if not entry.runs and name not in ("inputs", "reference"))
"""The checks of a run that has been made. Whether it wrote into its inputs, copies from before it would show."""


def check(
    subject: Subject,
    intent: Intent | None = None,
    *,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    tick: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Run a subject repeatedly with one thing changed each time, and report what is wrong with its attention.

    Every run is in eval and starts from the same state, which is restored at the end. A module that is spread over
    ranks is run once.

    Raises:
        InputError: the module has no attention, or the intent names an argument that the forward lacks.
        SpecError: a check name is unknown.
        TypeError: an argument of the call belongs into the intent.
    """
    require_apart(subject)
    intent = intent or Intent()
    names = chosen_checks(only, skip)
    if isinstance(subject.module, nn.parallel.DistributedDataParallel):
        subject = replace(subject, module=subject.module.module)  # a forward alone needs no other rank
    lab = Lab(subject, tick)
    for argument in (intent.padding, intent.cache):
        if argument:
            Arguments(subject).require(argument)
    with lab.changed_by(nn.Module.eval):
        evidence = evidence_of(lab, lab.subject, intent, once=False)
        results = _results_of_all(evidence, names)
        facts = tuple(_facts(evidence))
    failed = _failed(results)
    if not failed:
        _require_declared(intent, results)
    findings: list[Finding] = []
    passed: list[PassedCheck] = []
    skipped: list[SkippedCheck] = []
    for result in results:
        if isinstance(result, Finding):
            findings.append(_with_way(result))
        elif isinstance(result, SkippedCheck):
            skipped.append(result)
        elif result.check not in failed:
            passed.append(result)
    return CheckReport(
        environment=replace(environment_of(subject), seed=lab.subject.seed),
        layer=layer_of(subject),
        intent=intent.declared(),
        findings=tuple(_sure_first(findings)),
        facts=facts,
        passed=tuple(passed),
        left_out=tuple(skipped),
        runs=lab.runs,
        notes=(*subject.notes, *unlike_dot(evidence.run), *_instead(evidence), *evidence.notes),
    )


def _results_of_all(evidence: Evidence, names: Sequence[str]) -> list[_Result]:
    """Return the results of these checks in order, a fault that several report once.

    Without attention the laws of outputs are checked alone. Raises `InputError` if none of them can be.
    """
    results: list[_Result] = []
    if not evidence.run.attentions:
        results += _without_attention(evidence)
    for name in names:
        results_of_check = list(_results(evidence, name, _RULES[name]))
        for result in results_of_check:
            # A check may report a fault of another one, which may have reported it already.
            if result.check == name or result.check not in evidence.failed:
                results.append(result)
        evidence.failed.update(_failed(results_of_check))
    if not evidence.run.attentions and all(isinstance(result, SkippedCheck) for result in results):
        raise InputError(_no_attention(evidence))
    return results


def _without_attention(evidence: Evidence) -> Iterator[Finding]:
    """Yield what is wrong with weights where no attention was found."""
    lone = list(lone_softmaxes(evidence))
    yield from lone
    if evidence.on_meta:
        return
    if not evidence.once and not lone:
        with suppress(NotPossibleError):
            yield from without_part(evidence)
    found = linear_weights(evidence)
    if found is not None:
        yield from not_divided_rightly(found)


def _sure_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in the order of the checks, the sure ones first."""
    return sorted(findings, key=lambda finding: (not finding.sure, CHECKS.index(finding.check)))


@dataclass(frozen=True)
class Judgement:
    """What is wrong, or may be, in a run that was made, and what its arguments do."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def judged(subject: Subject, run: Run, state: State) -> Judgement:
    """Judge one run whose tensors were kept; `state` is that before the run.

    The findings are those of the checks that need no other run and no declared intent. What the arguments of a small
    module do is learned from a few runs of its own.
    """
    tensors = [tensor for _, tensor in tensors_in((subject.args, subject.kwargs))]
    on_meta = any(tensor.is_meta for tensor in (*subject.module.parameters(), *tensors))
    lab = Lab(subject, lambda _: None, state)
    evidence = Evidence(
        lab=lab,
        subject=lab.subject,
        intent=Intent(),
        arguments=Arguments(subject),
        run=run,
        arguments_after=(subject.args, subject.kwargs),
        on_meta=on_meta,
        once=True,
        again=None,
    )
    try:
        findings = _findings_of_one_run(evidence)
        notes: tuple[str, ...] = ()
        if not on_meta and 0 < len(run.attentions) <= _FEW and _is_written_by_hand(subject.module):
            before = subject.state()
            tried = replace(evidence, once=False)
            findings += without_effect(tried)
            notes = tuple(_notes_of_arguments(tried))
            before.restore()
        return Judgement(tuple(map(_with_way, _sure_first(findings))), notes)
    finally:
        # Functions of the checks refer to it in circles, which would keep the tensors until the collector runs.
        vars(evidence).clear()


def _is_written_by_hand(module: nn.Module) -> bool:
    """Return whether a module is no layer of a library, whose arguments are documented."""
    return type(module).__module__.partition(".")[0] not in ("torch", "transformers", "mha_inspect")


def _notes_of_arguments(evidence: Evidence) -> Iterator[str]:
    """Yield what optional arguments that stayed None do, and in how many runs it was learned."""
    said = [fact.sentence for fact in facts_of_missing(evidence)]
    if said:
        runs = plural(evidence.lab.runs, "further run")
        yield f"{'. '.join(said)}. Learned from {runs}."


def _findings_of_one_run(evidence: Evidence) -> list[Finding]:
    """Return the findings of the checks that need no other run, the sure ones first."""
    if not evidence.run.attentions:
        return list(_without_attention(evidence))
    findings = list[Finding]()
    for name in _OF_ONE_RUN:
        results = list(_results(evidence, name, _RULES[name]))
        findings += [result for result in results if isinstance(result, Finding)]
        evidence.failed.update(_failed(results))
    return [*findings, *_drops_in_eval(evidence)]


def _drops_in_eval(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first attention whose weights are dropped at random although every module is in eval mode."""
    if any(part.training for part in evidence.subject.module.modules()):
        return
    kernels = evidence.run.recording.kernels
    for attention, _ in evidence.run.attentions:
        softmax = attention.softmax
        in_kernel = softmax.kernel is not None and kernels[softmax.kernel].drops
        if in_kernel or StageFacts(evidence.run.graph, attention, {}).drops():
            yield Finding(
                "repeat",
                "Weights are dropped at random although the module is in eval mode.",
                "This run was in eval mode, and a dropout changed the weights.",
                source=_line_of_dropout(evidence, attention),
                module=attention.module,
                fix="Drop only in training: F.dropout(weights, p, self.training), or dropout_p=p * self.training.",
            )
            return


def _line_of_dropout(evidence: Evidence, attention: Attention) -> str:
    """Return the line that draws which weights are dropped; of a kernel that drops them itself, its own."""
    start, stop = attention.softmax.index, attention.value_product.op.index
    for op in evidence.run.recording.ops[start:stop]:
        if draws(op):
            return op.source
    return attention.value_product.op.source


def _with_way(finding: Finding) -> Finding:
    """Return a finding; one that is not sure names the option of `check` that confirms or dismisses it, if one does."""
    if finding.sure or finding.confirm:
        return finding
    return replace(finding, confirm=_RULES[finding.check].confirm)


def _require_declared(intent: Intent, results: Iterable[object]) -> None:
    """Raise `InputError` if a declared check was skipped: no finding would then look like a pass."""
    for result in results:
        if isinstance(result, SkippedCheck) and result.check in intent.declared() and not result._in_part:
            skip = "Or skip it" if result._give else "Give an input that it can change, or skip it"
            raise InputError(
                f"The check {result.check} was declared and could not run: {result.reason}. "
                f"{skip} with --skip {result.check}."
            )


def _failed(results: Iterable[object]) -> set[str]:
    """Return the names of the checks with a sure finding."""
    return {result.check for result in results if isinstance(result, Finding) and result.sure}


def _results(evidence: Evidence, name: str, entry: Rule) -> Iterator[_Result]:
    """Run one check: yield its findings, or that it passed, or why it was skipped."""
    skipped = _skipped_at_once(evidence, name, entry)
    if skipped is not None:
        yield skipped
        return
    evidence.lab.tick(name)
    passed = True
    try:
        evidence.require_passed(*entry.after)
        for result in entry.find(evidence):
            if isinstance(result, SkippedCheck):
                # A part that could not be judged: on meta, the sentence of what passed leaves it out.
                passed = passed and evidence.on_meta and bool(entry.on_meta)
                yield replace(result, _in_part=True)
            else:
                passed = False
                yield result
    except NotPossibleError as error:
        yield _skipped_by(error, name)
        return
    if passed and entry.by_position and "heads" in evidence.failed:
        yield SkippedCheck(name, "heads are mixed, so a position is not one token", "heads are mixed")
    elif passed:
        yield PassedCheck(name, _claim(evidence, entry))


def _claim(evidence: Evidence, entry: Rule) -> str:
    """Return what is true of a module that passes a check."""
    if evidence.on_meta:
        return entry.on_meta
    return entry.claim if evidence.run.attentions else entry.of_outputs


def _skipped_at_once(evidence: Evidence, name: str, entry: Rule) -> SkippedCheck | None:
    """Return why a check cannot run at all: it needs numbers, or further runs; None if it can."""
    if not evidence.run.attentions and not entry.of_outputs:
        return SkippedCheck(name, "no attention was found", "no attention")
    if evidence.on_meta and not entry.on_meta:
        return SkippedCheck(name, "the module is on meta and this check needs numbers; use --device cpu")
    if not evidence.once or not entry.runs:
        return None
    if needs_ranks(evidence.subject.module, evidence.run.recording):
        return SkippedCheck(name, "needs more than one run, and the module is spread over ranks", "spread over ranks")
    return SkippedCheck(name, "needs more than one run")


def _skipped_by(error: NotPossibleError, name: str) -> SkippedCheck:
    """Return the reason that a check gave while it ran, on one line."""
    reason = " ".join(str(error).split())
    if isinstance(error, RaisedError):
        reason = f"the forward raises when an input is changed: {reason}"
    return SkippedCheck(name, reason, error.brief, error.give)


def _instead(evidence: Evidence) -> list[str]:
    """Return that a module without attention was checked by its outputs, and what it computes instead."""
    if evidence.run.attentions:
        return []
    instead = found_instead(evidence.run)
    said = "No softmax(QKᵀ)V was found, so the outputs alone were checked."
    return [said, instead] if instead else [said]


def _no_attention(evidence: Evidence) -> str:
    """Return why there is nothing to check, with what the module computes instead."""
    ops, name = evidence.run.recording.ops, type(evidence.subject.module).__name__
    instead = found_instead(evidence.run)
    if instead:
        return f"{name} has no attention to check: no softmax(QKᵀ)V was found. {instead}"
    products = [op for op in ops if op.does("product")]
    softmaxes = sum(op.does("softmax") for op in ops)
    return (
        f"{name} has no attention to check: no softmax(QKᵀ)V was found. "
        f"The forward computes {plural(len(products), 'product')}{_lines_of(products)} "
        f"and {softmaxes} softmax{'' if softmaxes == 1 else 'es'}. "
        "Run `mha-inspect trace --ops` to see what it computes."
    )


def _lines_of(products: Sequence[Op]) -> str:
    """Return the first products with their lines, ` (mm [2, 3] at a.py:4, …)`; empty without any."""
    if not products:
        return ""
    lines = ", ".join(dict.fromkeys(f"{op.base_name} {list(op.output.shape)} at {op.source}" for op in products[:4]))
    return f" ({lines}, …)" if len(products) > 4 else f" ({lines})"


def _facts(evidence: Evidence) -> Iterator[Fact]:
    """Yield the properties of each attention that may be intended, each once: scale, who sees whom, mask values."""
    paths_by_fact: dict[Fact, list[str]] = {}
    for fact, module in _facts_of_attentions(evidence):
        paths_by_fact.setdefault(fact, []).append(module)
    counts = Counter(fact.name for fact in paths_by_fact)
    for fact, paths in paths_by_fact.items():
        is_of_some = any(paths) and (counts[fact.name] > 1 or len(paths) < len(evidence.run.attentions))
        where = f" in {first_few(paths, 1)}" if is_of_some else ""
        if fact.sentence:
            yield replace(fact, sentence=fact.sentence + where)
    if not evidence.on_meta and not evidence.run.attentions:
        found = linear_weights(evidence)
        if found is not None:
            yield from facts_of(found)
    if not evidence.on_meta and not evidence.failed & {"heads", "rotary"}:  # otherwise a step is not one position
        yield from ladder_facts(evidence)
    if not evidence.once and not evidence.on_meta:
        yield from mask_facts(evidence)


def _facts_of_attentions(evidence: Evidence) -> Iterator[tuple[Fact, str]]:
    """Yield the facts of each attention with its module, one kind of fact after the other; some are empty."""
    pairs = evidence.run.attentions
    places = {}
    for number, (attention, _) in enumerate(pairs, 1):
        places[id(attention)] = attention.module or (f"attention {number}" if len(pairs) > 1 else "")
    for attention, names in pairs:
        yield Fact("scale", f"{scale_words(attention, names)} (head_dim {names.head_dim})"), places[id(attention)]
    for attention, names in pairs:
        yield Fact("attended over", _over(attention, names)), places[id(attention)]
    for attention, _ in pairs:
        yield Fact("mask", _adds_nothing(evidence, attention)), places[id(attention)]
    if "heads" in evidence.failed:  # a position of a head is not a token
        return
    for sight in evidence.sights:
        drawn = "" if sight.items_agree else f"; {sight.row} 0 is drawn"
        yield Fact("who sees whom", sight.words() + drawn, sight.picture), places[id(sight.attention)]


def _adds_nothing(evidence: Evidence, attention: Attention) -> str:
    """Return that the masks of an attention add 0 to every score in this call; empty if they do not, or if unknown."""
    graph = evidence.run.graph
    added = []
    for op in attention.masks:
        if op.does("fills"):
            return ""
        added += masks_of(graph, attention, op)
    contents = [evidence.content(tensor) for tensor in added]
    if contents and all(map(_is_zero, contents)):
        return "adds 0 to every score in this call, so no key is masked out"
    return ""


def _is_zero(content: Tensor | None) -> bool:
    """Return whether the numbers of a tensor are known, and are all 0; a boolean is not added as it is."""
    if content is None or content.is_meta or content.dtype == torch.bool:
        return False
    return not bool(content.count_nonzero())


def _over(attention: Attention, names: AxisNames) -> str:
    """Return what is attended over if it is not the keys; else empty."""
    if attention.over_queries:
        return "the queries: they compete for each key"
    if names.within_tokens:
        return "the heads of one token, instead of positions"
    return "the features of a head, instead of positions" if names.over_features else ""

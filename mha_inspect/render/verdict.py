"""The verdict of a report: the first line of its page, and `verdict` in its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import text
from ..reports.check import CheckReport, Finding
from ..reports.common import Report
from ..reports.compare_heads import CompareHeadsReport
from ..reports.diff import CheckpointDiffReport, DiffReport
from ..reports.trace import AttentionReport, Failure, Trace
from .page import Paragraph, Tone
from .parts import grouped


@dataclass(frozen=True)
class _Fault:
    """One problem or suspicion."""

    sentence: str
    """Without a period at its end."""
    check: str = ""
    """The name of the check that found it; empty if none did."""
    source: str = ""

    @property
    def whole(self) -> str:
        """The sentence with its line."""
        return self._with_line(self.sentence)

    @property
    def short(self) -> str:
        """The name of the check with the line."""
        return self._with_line(self.check or self.sentence)

    def _with_line(self, words: str) -> str:
        return f"{words} ({self.source})" if self.source else words


def verdict_of(report: Report) -> Paragraph | None:
    """Return the verdict of a report; None for a report that judges nothing, e.g. of parameters."""
    if isinstance(report, Trace):
        return _of_trace(report)
    if isinstance(report, CheckReport):
        return _of_check(report)
    if isinstance(report, (DiffReport, CheckpointDiffReport)):
        tones: dict[str, Tone] = {"same": "good", "differs": "bad"}
        return Paragraph(report.answer[0], tones.get(report.outcome, "warn"))
    if isinstance(report, CompareHeadsReport):
        return Paragraph(report.answer[0], "strong")
    return None


# -- trace ------------------------------------------------------------------------------------------------------------


def _of_trace(trace: Trace) -> Paragraph:
    if trace.failure is not None:
        return Paragraph(_failed(trace.failure), "bad")
    problems = [_problem(finding) for finding in trace.findings if finding.sure]
    if trace.proof.agrees is False:
        kind = "outputs of the ranks" if trace.proof.of == "ranks" else "opened stages"
        other = "whole module" if trace.proof.of == "ranks" else "kernel"
        problems.append(_Fault(f"the {kind} differ from those of the {other}"))
    if trace.decode is not None and trace.decode.verdict == "differs":
        problems.append(_Fault(f"a call differs from one forward over all {trace.decode.tokens} tokens"))
    suspicions = [_problem(finding) for finding in trace.findings if not finding.sure]
    if problems or suspicions:
        return _counted(problems, suspicions)
    if not trace.attentions and trace.path.not_opened:
        return Paragraph("no attention found: a fused kernel of this run was not opened", "warn")
    if not trace.attentions:
        return Paragraph("no attention in this run: nothing here computes softmax(QKᵀ)V", "warn")
    what = _attentions(trace.attentions)
    if trace.decode is not None and trace.decode.verdict == "same":
        return Paragraph(f"every call equals one forward over all {trace.decode.tokens} tokens: {what}", "good")
    if trace.proof.of == "ranks" and trace.proof.agrees:
        return Paragraph(f"the ranks agree with the whole module: {what}", "good")
    if trace.unjudged is not None:
        return Paragraph(f"ran, not judged: {what}; {trace.unjudged}")
    return Paragraph(f"nothing wrong in this run: {what}", "good")


def _failed(failure: Failure) -> str:
    """Return where a forward raised, why, and the fix, e.g. `failed at attention.py:38: … Fix: k.mT`."""
    at = f"failed at {failure.source}" if failure.source else "failed"
    if failure.cause is None:
        own = failure.message.partition(chr(10))[0]
        if failure.error == "AssertionError" and own and failure.clash:
            return f"{at}: {own.rstrip('.')}: {failure.clash}"  # the words of the author come first
        return f"{at}: {failure.clash or own or failure.error}"
    fix = f" Fix: {failure.cause.fix}" if failure.cause.fix else ""
    return f"{at}: {failure.cause.explanation}{fix}"


def _attentions(attentions: Sequence[AttentionReport]) -> str:
    """Return the attentions in short: `12 attentions, 8 heads of 64, causal`."""
    count = text.plural(len(attentions), "attention")
    kinds = grouped(attentions, _sizes)
    return f"{count}, {_sizes(attentions[0])}" if len(kinds) == 1 else f"{count} of {len(kinds)} kinds"


def _sizes(attention: AttentionReport) -> str:
    heads = text.plural(attention.num_heads, "head")
    shared = f" over {attention.num_kv_heads}" if attention.num_kv_heads != attention.num_heads else ""
    causal = ", causal" if "causal" in attention.kind else ""
    window = "" if attention.window is None else f", window {attention.window}"
    return f"{heads}{shared} of {attention.head_dim}{causal}{window}"


# -- check ------------------------------------------------------------------------------------------------------------


def _of_check(report: CheckReport) -> Paragraph:
    problems = [_problem(finding) for finding in report.findings if finding.sure]
    suspicions = [_problem(finding) for finding in report.findings if not finding.sure]
    if problems or suspicions:
        return _counted(problems, suspicions)
    passed = f"{text.plural(len(report.held), 'check')} passed, {len(report.left_out)} skipped"
    if not report.held:
        return Paragraph(f"not judged: {passed}", "warn")
    return Paragraph(f"nothing wrong in {text.plural(report.runs, 'run')}: {passed}", "good")


def _problem(finding: Finding) -> _Fault:
    return _Fault(finding.sentence.removesuffix("."), finding.check, finding.source)


def _counted(problems: Sequence[_Fault], suspicions: Sequence[_Fault]) -> Paragraph:
    """Return how many problems and suspicions there are, the first in words, and the others by name.

    E.g. `2 problems, 1 suspicion: The softmax runs over the queries (model.py:8); also heads (model.py:9), scale`.
    """
    counts = [text.plural(len(problems), "problem")] if problems else []
    counts += [text.plural(len(suspicions), "suspicion")] if suspicions else []
    first, *others = [*problems, *suspicions]
    also = f"; also {', '.join(other.short for other in others)}" if others else ""
    return Paragraph(f"{', '.join(counts)}: {first.whole}{also}", "bad" if problems else "warn")

"""The verdict of a report: the first line of its page, and `verdict` in its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import text
from ..reports.check import CheckReport, Finding
from ..reports.common import Report
from ..reports.compare_heads import CompareHeadsReport
from ..reports.diff import CheckpointDiffReport, DiffReport
from ..reports.fix import FixReport
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

    @classmethod
    def of(cls, finding: Finding) -> _Fault:
        """Return the problem or suspicion of a finding."""
        return cls(
            sentence=finding.sentence.removesuffix("."),
            check=finding.check,
            source=finding.source,
        )

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


_TONE_OF_OUTCOME: dict[str, Tone] = {"same": "good", "differs": "bad"}


def verdict_of(report: Report) -> Paragraph | None:
    """Return the verdict of a report; None for a report that judges nothing, e.g. of parameters."""
    if isinstance(report, Trace):
        return _of_trace(report)
    if isinstance(report, CheckReport):
        return _of_check(report)
    if isinstance(report, FixReport):
        return _of_fix(report)
    if isinstance(report, (DiffReport, CheckpointDiffReport)):
        return Paragraph(report.answer[0], _TONE_OF_OUTCOME.get(report.outcome, "warn"))
    if isinstance(report, CompareHeadsReport):
        return Paragraph(report.answer[0], "strong")
    return None


# -- trace ------------------------------------------------------------------------------------------------------------


def _of_trace(trace: Trace) -> Paragraph:
    if trace.failure is not None:
        return Paragraph(_failed(trace.failure), "bad")
    problems = [*_problems(trace.findings), *_disagreements(trace)]
    suspicions = _suspicions(trace.findings)
    if problems or suspicions:
        return _counted(problems, suspicions)
    if trace.attentions:
        return _of_right_trace(trace)
    if trace.path.not_opened:
        return Paragraph("no attention found: a fused kernel of this run was not opened", "warn")
    return Paragraph("no attention in this run: nothing here computes softmax(QKᵀ)V", "warn")


def _disagreements(trace: Trace) -> Iterator[_Fault]:
    """Yield the two comparisons of a trace with another run that may fail: the proof, and a cache against none."""
    if trace.proof.agrees is False:
        if trace.proof.of == "ranks":
            yield _Fault("the outputs of the ranks differ from those of the whole module")
        else:
            yield _Fault("the opened stages differ from those of the kernel")
    if trace.decode is not None and trace.decode.verdict == "differs":
        yield _Fault(f"a call differs from one forward over all {trace.decode.tokens} tokens")


def _of_right_trace(trace: Trace) -> Paragraph:
    """Return the strongest statement on a run in which nothing is wrong."""
    attentions = _attentions(trace.attentions)
    if trace.decode is not None and trace.decode.verdict == "same":
        return Paragraph(f"every call equals one forward over all {trace.decode.tokens} tokens: {attentions}", "good")
    if trace.proof.of == "ranks" and trace.proof.agrees:
        return Paragraph(f"the ranks agree with the whole module: {attentions}", "good")
    if trace.unjudged is not None:
        return Paragraph(f"ran, not judged: {attentions}; {trace.unjudged}")
    return Paragraph(f"nothing wrong in this run: {attentions}", "good")


def _failed(failure: Failure) -> str:
    """Return where a forward raised, why, and the fix, e.g. `failed at attention.py:38: … Fix: k.mT`."""
    place = f"failed at {failure.source}" if failure.source else "failed"
    if failure.cause is None:
        return f"{place}: {_reason(failure)}"
    if failure.cause.fix:
        return f"{place}: {failure.cause.explanation} Fix: {failure.cause.fix}"
    return f"{place}: {failure.cause.explanation}"


def _reason(failure: Failure) -> str:
    """Return why a forward without a cause raised: the shapes that clash, else the first line of its error."""
    message, _, _ = failure.message.partition("\n")
    if failure.clash:
        # In an assert, the words of the author come first.
        is_assert = failure.error == "AssertionError"
        return f"{message.rstrip('.')}: {failure.clash}" if is_assert and message else failure.clash
    return message or failure.error


def _attentions(attentions: Sequence[AttentionReport]) -> str:
    """Return the attentions in short: `12 attentions, 8 heads of 64, causal`."""
    count = text.plural(len(attentions), "attention")
    kinds = grouped(attentions, _sizes)
    if len(kinds) > 1:
        return f"{count} of {len(kinds)} kinds"
    return f"{count}, {_sizes(attentions[0])}"


def _sizes(attention: AttentionReport) -> str:
    """Return the sizes of an attention: `8 heads over 2 of 64, causal, window 4`."""
    heads = text.plural(attention.num_heads, "head")
    if attention.num_kv_heads != attention.num_heads:
        heads += f" over {attention.num_kv_heads}"
    sizes = [f"{heads} of {attention.head_dim}"]
    if "causal" in attention.kind:
        sizes.append("causal")
    if attention.window is not None:
        sizes.append(f"window {attention.window}")
    return ", ".join(sizes)


# -- check ------------------------------------------------------------------------------------------------------------


def _of_check(report: CheckReport) -> Paragraph:
    if report.findings:
        return counted_findings(report.findings)
    passed = f"{text.plural(len(report.passed), 'check')} passed, {len(report.left_out)} skipped"
    if not report.passed:
        return Paragraph(f"not judged: {passed}", "warn")
    return Paragraph(f"nothing wrong in {text.plural(report.runs, 'run')}: {passed}", "good")


def _of_fix(report: FixReport) -> Paragraph:
    if not report.problems:
        return Paragraph("nothing to fix: no check failed", "good")
    was = text.plural(len(report.problems), "problem")
    if not report.patch:
        return Paragraph(f"{was}, no patch: {report.problems[0].sentence}", "bad")
    return Paragraph(f"was {was}, now none; outputs of the rest unchanged", "good")


def counted_findings(findings: Sequence[Finding]) -> Paragraph:
    """Return how many problems and suspicions there are, with the first in words."""
    return _counted(_problems(findings), _suspicions(findings))


def _problems(findings: Sequence[Finding]) -> list[_Fault]:
    return [_Fault.of(finding) for finding in findings if finding.sure]


def _suspicions(findings: Sequence[Finding]) -> list[_Fault]:
    return [_Fault.of(finding) for finding in findings if not finding.sure]


def _counted(problems: Sequence[_Fault], suspicions: Sequence[_Fault]) -> Paragraph:
    """Return how many problems and suspicions there are, the first in words, and the others by name.

    E.g. `2 problems, 1 suspicion: The softmax runs over the queries (model.py:8); also heads (model.py:9), scale`.
    """
    counts = []
    if problems:
        counts.append(text.plural(len(problems), "problem"))
    if suspicions:
        counts.append(text.plural(len(suspicions), "suspicion"))
    first, *rest = [*problems, *suspicions]
    sentence = f"{', '.join(counts)}: {first.whole}"
    if rest:
        sentence += f"; also {', '.join(fault.short for fault in rest)}"
    return Paragraph(sentence, "bad" if problems else "warn")

"""What is said of a case, as a page: words are here, and asserted nowhere else; truth is asserted by the properties.

Numbers with a point are left out: they differ in their last digits from one processor to another. So are the numbers of
lines: a case that is put before others changes no page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import mha_inspect
from mha_inspect.errors import ForwardError
from mha_inspect.layers.spec import Show
from mha_inspect.questions.decode import decoded
from mha_inspect.render.formats import to_text
from mha_inspect.running.subject import Subject

from .every import ENTRIES
from .every_mistake import CASES, Case
from .failing import FAILING
from .pairs import PAIRS, Pair
from .test_failing import called
from .test_pairs import compared
from .test_planted import report_of

TRACED = """Base Fused FusedCausal Einsum EinsumWeights FoldBatchHeads KeyFirst Image Pooled LearnedQuery NanoGpt
    KeepMask Fairseq Llama Cross SlidingWindow Blocks Vit TorchBlock PerHead LanguageModel StaticCache Slots FewerKeys
    Near Mixing PackedConvolution OverFeatures Lowered UnitHeads OneQueryAtATime Additive SideBySide Memory GivenPast
    LatentQueries Streams Absorbed GivenMean DifferentialMaps UnlikeScales EverySecondCausal Sampled Rolled
    ExponentialFeatures""".split()  # noqa: SIM905
"""Entries of every kind: plain, fused, folded, masked, windowed, rotated, cached, packed, looped, and without any."""
TRACED += [name for name in ENTRIES if name.startswith(("none: ", "scored: "))]
PARAMETERS = """Base NanoGpt Llama Cross PerHead PackedConvolution FoldedHeads EdgeKeys PickedKeys PackedKeys
    GroupedPieces ProjectedTwice Mixing SpectralNorm MergedLora LowRankQuery RowsReversed Adapted HeadsBackwards
    WideValues HeadsPicked BesideFeedForward TransposedConvolution Absorbed Streams Memory LatentQueries
    OutputOfEachHead GivenMean SharedKeysAndValues Interleaved Conv1D EinsumWeights GroupedSliced Grouped NormedHeads
    LowRank Loop RelativeBias Sinks Pooled Packed NormOfHeads NormOfAll GateOfFeatures GateOfHeads GateOfValues
    GatePacked""".split()  # noqa: SIM905
RIGHT = "Base NanoGpt KeepMask Llama SlidingWindow TorchBlock Slots".split()  # noqa: SIM905


def page(report: Any) -> str:
    """Return a report as plain text, without what differs from one machine to another."""
    return steady(to_text(report, "plain"))


def steady(text: str) -> str:
    text = re.sub(r"torch \d[\w.+]*", "torch #", text)
    text = re.sub(r"\.py:\d+", ".py:#", text)
    text = re.sub(r"-?\d+(\.\d+)?e[-+]?\d+|-?\d+\.\d+", "#", text)
    text = re.sub("10[⁰¹²³⁴-⁹]+", "10ⁿ", text)  # noise is as large as the machine rounds
    return re.sub(r"(?<=\S) {2,}", "  ", text)  # columns are as wide as their numbers


def first_of_each(cases: Iterable[Any], kind: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the first case of each kind."""
    seen = set()
    for case in cases:
        if kind(case) not in seen:
            seen.add(kind(case))
            yield case


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("name", [name for name in TRACED if name in ENTRIES])
def test_trace(name: str, snapshot: SnapshotAssertion) -> None:
    args, kwargs = ENTRIES[name].arguments()
    with torch.no_grad():
        assert page(mha_inspect.trace(ENTRIES[name].made(), *args, **kwargs)) == snapshot


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name in ENTRIES])
def test_params(name: str, snapshot: SnapshotAssertion) -> None:
    args, kwargs = ENTRIES[name].arguments()
    with torch.no_grad():
        assert page(mha_inspect.params(ENTRIES[name].made(), *args, per_head=True, **kwargs)) == snapshot


@pytest.mark.parametrize("name", [name for name in RIGHT if name in ENTRIES])
def test_check_of_what_is_right(name: str, snapshot: SnapshotAssertion) -> None:
    args, kwargs = ENTRIES[name].arguments()
    report = mha_inspect.check(ENTRIES[name].made(), *args, intent=ENTRIES[name].intent, **kwargs)
    assert page(report) == snapshot


@pytest.mark.parametrize("case", [case for case in CASES if case.wrong is not None], ids=lambda case: case.name)
def test_findings(case: Case, snapshot: SnapshotAssertion) -> None:
    """What is found in each mistake: the page of a check without the list of what passed."""
    report = report_of(case, wrong=True)
    lines = list[str]()
    for finding in report.findings:
        sure = "" if finding.sure else f" (possible; {finding.confirm})"
        lines.append(f"{finding.check}{sure}: {finding.sentence}")
        lines += [f"  {word}: {text}" for word, text in (("seen", finding.evidence), ("fix", finding.fix)) if text]
    for fact in report.facts:
        lines.append(f"{fact.name}: {fact.sentence}")
    assert steady("\n".join(lines)) == snapshot


WHOLE = [*first_of_each((case for case in CASES if case.wrong is not None), lambda case: case.check)]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_check_of_a_mistake(case: Case, snapshot: SnapshotAssertion) -> None:
    """The whole page, for one mistake of each check."""
    assert page(report_of(case, wrong=True)) == snapshot


TOLD = ("NaNOfBlindQuery", "NaNReplacedAfterAddition", "NeverTransposed", "PaddingAddedAsOnes", "SumOverQueries")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in TOLD], ids=lambda case: case.name)
def test_trace_of_a_mistake(case: Case, snapshot: SnapshotAssertion) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        assert page(mha_inspect.trace(case.make(True).eval(), **case.inputs())) == snapshot


DECODED = ("BiasFromZero", "RotationRestarts", "OwnKeyTooLate", "AnglesByLength")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in DECODED], ids=lambda case: case.name)
def test_decode(case: Case, snapshot: SnapshotAssertion) -> None:
    """Two steps with a cache that is wrong, and with that of its twin."""
    for wrong in (True, False):
        torch.manual_seed(3)
        subject = Subject(case.make(wrong).eval(), (), case.inputs(), seed=0, grad=False)
        assert page(decoded(subject, Show(), 2)[0]) == snapshot


@pytest.mark.parametrize("name", FAILING)
def test_failure(name: str, snapshot: SnapshotAssertion) -> None:
    """What is said of a call that raises; the whole page, for one of each cause."""
    case = FAILING[name]
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(called(case), *case.given(), **case.masks())
    trace = caught.value.trace
    first = next(first for first in FAILING.values() if first.cause == case.cause)
    if first is case:
        assert page(trace) == snapshot
        return
    failure = trace.failure
    assert failure is not None
    parts = [failure.clash, *(() if failure.cause is None else (failure.cause.explanation, failure.cause.fix))]
    assert steady("\n".join(parts)) == snapshot


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_diff(pair: Pair, snapshot: SnapshotAssertion) -> None:
    assert page(compared(pair.name)[0]) == snapshot

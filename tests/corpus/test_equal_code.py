"""Attentions with equal code are judged once, and the verdict does not depend on which layer is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mha_inspect
from mha_inspect.checks.alike import groups_of
from mha_inspect.layers.spec import Show
from mha_inspect.questions.trace import traced
from mha_inspect.reports.check import Finding
from mha_inspect.running.subject import Subject

from .judged import Layer, Stack, masked, masked_throughout, over_queries, rotary, rotary_offset, weakly_masked
from .planted import E, N


def findings_of(*layers: Layer) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    return mha_inspect.trace(Stack(*layers).eval(), torch.randn(2, N, E)).findings


@pytest.mark.parametrize(
    ("good", "bad", "begins", "place"),
    [
        (Layer, over_queries, "The softmax runs over the queries", 0),
        (rotary, rotary_offset, "The query and key of one token are rotated by different positions", 0),
        (masked, weakly_masked, "The mask fills in 1e-09", 2),
        (masked, masked_throughout, "The mask masks out every key", 1),
    ],
)
def test_the_verdict_does_not_depend_on_which_layer_is_wrong(
    good: Callable[[], Layer], bad: Callable[[], Layer], begins: str, place: int
) -> None:
    layers = [good() for _ in range(3)]
    layers[place] = bad()
    (finding,) = findings_of(*layers)
    assert finding.sentence.startswith(begins)
    assert finding.module == f"layers.{place}"
    assert "attentions share" not in finding.evidence


def test_layers_with_the_same_fault_are_counted() -> None:
    (finding,) = findings_of(over_queries(), Layer(), over_queries(), over_queries())
    assert finding.evidence.endswith(" 3 attentions share this code.")


def test_a_fault_of_layers_with_other_code_is_one_finding() -> None:
    layers = [Layer(dim=-2, hidden=torch.ones(N, N).triu(diagonal).bool()) for diagonal in (2, 3)]
    (finding,) = [finding for finding in findings_of(*layers) if finding.check == "softmax"]
    assert finding.evidence.endswith(" 2 attentions have this fault.")


@pytest.mark.parametrize(
    ("make", "is_biased", "count"), [(Layer, True, 2), (rotary, False, 3), (masked, False, 2), (masked, True, 12)]
)
def test_equal_layers_are_judged_once(make: Callable[[], Layer], is_biased: bool, count: int) -> None:
    layers = [make() for _ in range(count)]
    subject = Subject(Stack(*layers, is_biased=is_biased).eval(), (torch.randn(2, N, E),), {})
    _, run = traced(subject, Show(), keep=True)
    leaves = subject.leaves(run.recording)
    groups = groups_of(run, lambda tensor: run.recording.values.get(tensor.id, leaves.get(tensor.id)))
    assert list(map(len, groups)) == [count]

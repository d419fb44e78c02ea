"""Verdicts of several faults: the first in words, the others by name, suspicions after problems."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha_inspect.render.verdict import verdict_of
from mha_inspect.reports.check import Finding

from .samples import trace

HEADS = Finding("heads", "The heads are merged without transpose.", "", source="model.py:9")
SOFTMAX = Finding("softmax", "The softmax runs over the queries.", "", source="model.py:8")
SCALE = Finding("scale", "The scores are not scaled.", "", sure=False)
TWO = "2 problems, 1 suspicion: The softmax runs over the queries (model.py:8); also heads (model.py:9), scale"
CLOSED = ("aten._scaled_dot_product_flash_attention: no room",)


@pytest.mark.parametrize(
    ("changes", "closed", "tone", "text"),
    [
        ({"findings": (SOFTMAX, HEADS, SCALE)}, (), "bad", TWO),
        ({"findings": (SCALE,)}, (), "warn", "1 suspicion: The scores are not scaled"),
        ({}, (), "good", "nothing wrong in this run"),
        ({"unjudged": "device meta has no numbers"}, (), "", "ran, not judged"),
        ({"attentions": ()}, (), "warn", "no attention in this run"),
        ({"attentions": ()}, CLOSED, "warn", "no attention found: a fused kernel of this run was not opened"),
    ],
)
def test_a_trace_is_told_in_words_and_in_a_tone(changes, closed, tone, text) -> None:
    report = trace()
    said = verdict_of(replace(report, **changes, path=replace(report.path, not_opened=closed)))
    assert said is not None
    assert said.tone == tone
    assert said.text.startswith(text)

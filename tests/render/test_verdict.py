"""Verdicts of several faults: the first in words, the others by name, suspicions after problems."""

from __future__ import annotations

from dataclasses import replace

from mha_inspect.render.verdict import verdict_of
from mha_inspect.reports.check import Finding

from .trace_samples import TRACE

HEADS = Finding("heads", "The heads are merged without transpose.", "", source="model.py:9")
SOFTMAX = Finding("softmax", "The softmax runs over the queries.", "", source="model.py:8")
SCALE = Finding("scale", "The scores are not scaled.", "", sure=False)


def test_the_first_is_told_in_words_and_the_others_by_name() -> None:
    said = verdict_of(replace(TRACE, findings=(SOFTMAX, HEADS, SCALE)))
    assert said is not None
    assert said.text == (
        "2 problems, 1 suspicion: The softmax runs over the queries (model.py:8); also heads (model.py:9), scale"
    )
    assert said.tone == "bad"


def test_a_suspicion_alone_is_no_problem_and_not_green() -> None:
    said = verdict_of(replace(TRACE, findings=(SCALE,)))
    assert said is not None
    assert (said.text, said.tone) == ("1 suspicion: The scores are not scaled", "warn")


def test_a_trace_without_findings_is_green_only_if_it_was_judged() -> None:
    judged, unjudged = verdict_of(TRACE), verdict_of(replace(TRACE, unjudged="device meta has no numbers"))
    assert judged is not None
    assert unjudged is not None
    assert (judged.tone, judged.text.partition(":")[0]) == ("good", "nothing wrong in this run")
    assert (unjudged.tone, unjudged.text.partition(":")[0]) == ("", "ran, not judged")
    assert verdict_of(replace(TRACE, attentions=())).text.startswith("no attention in this run")


def test_a_kernel_that_was_not_opened_may_be_an_attention() -> None:
    closed = replace(TRACE.path, not_opened=("aten._scaled_dot_product_flash_attention: no room",))
    said = verdict_of(replace(TRACE, attentions=(), path=closed))
    assert said is not None
    assert said.text == "no attention found: a fused kernel of this run was not opened"

"""What a trace says of an entry is its truth: attentions, heads, scale, kind, positions, axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .entry import E, Entry, Truth
from .every import ENTRIES, entries
from .runs import axes_of, parameters, shown, sizes_of, traced

FACTS = ("kind", "window", "position", "qk_norm", "cache", "bias")
NOT_YET: set[str] = set()
"""Entries of which the program finds another number of attentions: one that it learns to find is taken off."""
NOT_NAMED = {"KeyFirstOfOneHead"}
"""Entries with axes that have no name, or another."""
NOT_OF_ONE_TOKEN = {
    "OneQueryAtATime",
    "Broadcast",
    "BroadcastBeforeHeads",
    "BroadcastCausal",
    "BroadcastKeyFirst",
    "ByHandMasked",
    "ByHandShifted",
    "LearnedQuery",
}
"""The same of entries that are given a single token."""


@pytest.mark.parametrize("name", ENTRIES)
def test_attentions_are_found_once_each(name: str) -> None:
    count = len(traced(name).attentions)
    assert (count == len(ENTRIES[name].attentions)) == (name not in NOT_YET), count


ATTENDING = [name for name in entries() if name not in NOT_YET]


@pytest.mark.parametrize("name", ATTENDING)
def test_facts(name: str) -> None:
    for attention, truth in shown(name):
        expected = {"num_heads": truth.heads, "num_kv_heads": truth.true_kv_heads, "head_dim": truth.head_dim}
        expected |= {fact: getattr(truth, fact) for fact in FACTS}
        assert {fact: getattr(attention, fact) for fact in expected} == expected
        stages = {stage.name: stage.formula for stage in attention.stages}
        assert {stage: stages[stage] for stage in truth.formulas} == truth.formulas
        assert len(attention.notes) == len(truth.says), attention.notes
        assert all(part in note for part, note in zip(truth.says, attention.notes, strict=True)), attention.notes
        if truth.true_scale is None:
            assert math.isnan(attention.scale)
        else:
            assert attention.scale == pytest.approx(truth.true_scale, rel=1e-5)


@pytest.mark.parametrize("name", ATTENDING)
def test_calls_of_one_module_are_counted(name: str) -> None:
    calls = dict[str, list[int | None]]()
    for attention in traced(name).attentions:
        calls.setdefault(attention.module, []).append(attention.call)
    for numbers in calls.values():
        assert numbers == ([*range(1, len(numbers) + 1)] if len(numbers) > 1 else [None])


@pytest.mark.parametrize("name", ATTENDING)
def test_axes(name: str) -> None:
    for attention, truth in shown(name):
        assert (axes_of(attention) == truth.stages()) == (name not in NOT_NAMED)
        assert sizes(attention, truth, *ENTRIES[name].sizes[0]) <= {1}


def sizes(attention: Any, truth: Truth, batch: int, length: int) -> set[int]:
    """Return the sizes of names that have not the size which the arguments or the truth give them."""
    expected: dict[str, int | None] = {"batch": batch, "query": length, "key": length, **truth.lengths}
    by_name = sizes_of(attention, truth)
    assert len(by_name.get("embed", {E})) == 1
    return {size for name, length in expected.items() for size in by_name.get(name, ()) if length not in (size, None)}


def first_of_each(names: Iterable[str], kind: Callable[[Entry], Any]) -> list[str]:
    """Return the first entry of each kind: the others would run the same."""
    firsts: dict[Any, str] = {}
    for name in names:
        firsts.setdefault(str(kind(ENTRIES[name])), name)
    return list(firsts.values())


def layout(entry: Entry) -> list[str]:
    """Return in which orders an entry has its axes."""
    return [truth.split + truth.pairs + truth.projected for truth in entry.attentions]


@pytest.mark.parametrize("name", first_of_each((name for name in ATTENDING if len(ENTRIES[name].sizes) > 1), layout))
def test_axes_are_the_same_at_another_size(name: str) -> None:
    assert axes_at(name, *ENTRIES[name].sizes[1]) == [axes_of(attention) for attention, _ in shown(name)]


ONES = first_of_each((name for name in ATTENDING if ENTRIES[name].ones), layout)


@pytest.mark.parametrize("name", sorted({*ONES, *NOT_OF_ONE_TOKEN}))
def test_sizes_of_one_are_no_obstacle(name: str) -> None:
    expected = [axes_of(attention) for attention, _ in shown(name)]
    assert (axes_at(name, 1, 1) == expected) == (name not in NOT_OF_ONE_TOKEN)
    if name in NOT_OF_ONE_TOKEN:
        assert axes_at(name, 1, 12) == expected


def axes_at(name: str, batch: int, length: int) -> list[dict[str, str]]:
    return [axes_of(attention) for attention in traced(name, batch, length).attentions]


@pytest.mark.parametrize("name", entries(attending=False))
def test_nothing_is_a_projection_where_nothing_attends(name: str) -> None:
    assert not [row.name for row in parameters(name).parameters if "W_" in row.role]


@pytest.mark.parametrize("name", ENTRIES)
def test_nobody_is_accused_who_is_right(name: str) -> None:
    accused = {finding.check for finding in traced(name).findings if finding.sure}
    assert accused <= ENTRIES[name].findings

"""Every pattern that is printed is one that einops takes, and does what the implementation did; a name has one size."""

from __future__ import annotations

import re
from typing import Any

import einops
import pytest
import torch

from mha_inspect.naming.pattern import one_size_a_name, rearrangement

from ..corpus.every import ENTRIES, entries
from ..corpus.runs import Numbers, shown
from ..corpus.test_truth import NOT_YET

SOURCES = {
    "q_heads": ("q_proj", "query"),
    "k_heads": ("k_proj", "key"),
    "v_heads": ("v_proj", "value"),
    "concat": ("context",),
}
PATTERN = re.compile(
    r"(?P<pattern>[^,]* -> [^,]*)(, (each head repeated (?P<times>\d+) times|plus (?P<more>\d+) .*|(?P<part>.*)))?"
)


def run(pattern: str, tensor: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    # einops takes the size of an axis that it can work out as well, and complains of one that there is not.
    inside = set(re.findall(r"\w+", " ".join(re.findall(r"\([^)]*\)", pattern.split(" -> ")[0]))))
    return einops.rearrange(tensor, pattern, **{name: sizes[name] for name in sizes if name in inside})


WRONG = {"PickedKeys"} | {name for name in entries() if name.startswith("nothing: keys")}
"""Entries whose formula says that each key head is repeated, where all are put side by side again, or adds keys."""

WRITTEN_OUT = {"OneQueryAtATime"}
"""Entries whose stages are computed beside the run, which rounds otherwise."""


@pytest.mark.parametrize("name", [name for name in entries() if name not in NOT_YET | WRONG])
def test_the_patterns_of_a_style_do_what_it_does(name: str) -> None:
    for attention, truth in shown(name):
        sizes = {"batch": ENTRIES[name].sizes[0][0], "qkv": 3, "query_1": 3} | Numbers(attention, truth).sizes
        stages = {stage.name: stage for stage in attention.stages}
        for stage in attention.stages:
            if " -> " not in stage.formula:
                continue
            source = next(stages[s] for s in SOURCES[stage.name] if s in stages)
            words = PATTERN.fullmatch(stage.formula)
            assert words is not None, stage.formula
            rearranged = run(words["pattern"], source.tensor, sizes)
            if words["times"]:
                rearranged = rearranged.repeat_interleave(int(words["times"]), dim=1)
            if words["part"]:
                parts = rearranged if words["part"].startswith("one of") else rearranged.split(stage.shape[-1], dim=-1)
                assert any(torch.equal(part, stage.tensor) for part in parts if part.shape == stage.shape) or (
                    name == "LowRank"  # a part, and behind it what is rotated
                )
            elif name in WRITTEN_OUT:
                torch.testing.assert_close(rearranged, stage.tensor, rtol=0, atol=1e-6)
            else:
                assert torch.equal(rearranged, stage.tensor), stage.formula


@pytest.mark.parametrize(
    ("left", "right", "shapes", "expected"),
    [
        ("query batch (heads d)", "heads query d", ((5, 1, 6), (3, 5, 2)), "query 1 (heads d) -> heads query d"),
        ("query batch (heads d)", "heads query d", ((5, 7, 6), (3, 5, 2)), None),
        ("batch 3 query", "batch query 3", ((7, 3, 5), (7, 5, 3)), None),
        ("batch key (heads d)", "batch heads key d", ((7, 5, 6), (7, 3, 4, 2)), None),
        ("batch 3 query query", "batch query query 3", ((7, 3, 5, 5), (7, 5, 5, 3)), None),
        ("batch query query", "(batch query) query", ((7, 5, 5), (35, 5)), None),
        ("a (b c)", "(a b) c", ((7, 6), (21, 2)), "a (b c) -> (a b) c"),
    ],
)
def test_what_no_pattern_says_has_none(left: str, right: str, shapes: Any, expected: str | None) -> None:
    assert rearrangement(left, right, shapes) == expected


@pytest.mark.parametrize(
    ("stages", "shapes", "said"),
    [
        # Padded from 13 to four windows of 4: the sequence and the windows cannot both be "query".
        (
            {"query": "batch query embed", "weights": "batch windows heads query key"},
            {"query": (2, 13, 30), "weights": (2, 4, 3, 4, 12)},
            {"query": "batch positions embed"},
        ),
        ({"query": "batch (windows query) embed", "weights": "batch windows query key"}, {}, {}),
        # Keys of the layer's own, or of a cache.
        ({"key": "batch key embed", "weights": "batch query key"}, {"key": (2, 5, 30), "weights": (2, 7, 6)}, {}),
        ({"weights": "batch key key"}, {"weights": (2, 5, 5)}, {"weights": "batch key 5"}),
        ({"weights": "(batch key) query key"}, {"weights": (10, 7, 5)}, {"weights": "(batch key) query 5"}),
    ],
)
def test_a_name_stands_for_one_axis_of_one_size(stages, shapes, said):
    known = shapes or {"query": (2, 12, 30), "weights": (2, 3, 4, 5)}
    assert one_size_a_name(stages, known) == {**stages, **said}

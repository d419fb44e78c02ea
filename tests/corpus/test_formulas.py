"""What a formula says of a stage is what the stage holds, and FLOPs are those that torch counts."""

from __future__ import annotations

import math
import re

import einops
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from .entry import Entry
from .every import ENTRIES, entries
from .runs import Numbers, shown, traced
from .test_numbers import assert_close
from .test_truth import NOT_YET

ATTENDING = [name for name in entries() if name not in NOT_YET]
SOURCES = {
    "q_heads": ("q_proj", "query"),
    "k_heads": ("k_proj", "key"),
    "v_heads": ("v_proj", "value"),
    "concat": ("context",),
}
PATTERN = re.compile(
    r"(?P<pattern>[^,]* -> [^,]*)(, (each head repeated (?P<times>\d+) times|plus (?P<more>\d+) .*|(?P<part>.*)))?"
)
OTHERWISE = {"PickedKeys", "GlobalTokens", "WrittenNow", "FurtherKeys: before", "FurtherKeys: after", "LowRank"}
OTHERWISE |= {name for name in entries() if name.startswith("nothing: keys")}
"""Entries whose formula says that each key head is repeated, where all are put side by side again, or adds keys."""
WRITTEN_OUT = {"OneQueryAtATime"}
"""Entries whose stages are computed beside the run, which rounds otherwise."""


def rearranged(pattern: str, tensor: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    # einops takes the size of an axis that it can work out as well, and complains of one that there is not.
    inside = set(re.findall(r"\w+", " ".join(re.findall(r"\([^)]*\)", pattern.split(" -> ")[0]))))
    return einops.rearrange(tensor, pattern, **{name: sizes[name] for name in sizes if name in inside})


@pytest.mark.parametrize("name", [name for name in ATTENDING if name not in OTHERWISE])
def test_a_pattern_is_one_that_einops_takes_and_gives_the_stage(name: str) -> None:
    for attention, truth in shown(name):
        sizes = {"batch": ENTRIES[name].sizes[0][0], "qkv": 3, "kv": 2, "query_1": 3} | Numbers(attention, truth).sizes
        stages = {stage.name: stage for stage in attention.stages}
        for stage in attention.stages:
            if " -> " not in stage.formula:
                continue
            source = next(stages[s] for s in SOURCES[stage.name] if s in stages)
            words = PATTERN.fullmatch(stage.formula)
            assert words is not None, stage.formula
            made = rearranged(words["pattern"], source.tensor, sizes)
            if words["times"]:
                made = made.repeat_interleave(int(words["times"]), dim=1)
            if words["part"]:
                parts = made if words["part"].startswith("one of") else made.split(stage.shape[-1], dim=-1)
                assert any(torch.equal(part, stage.tensor) for part in parts if part.shape == stage.shape)
            elif name in WRITTEN_OUT:
                torch.testing.assert_close(made, stage.tensor, rtol=0, atol=1e-6)
            else:
                assert torch.equal(made, stage.tensor), stage.formula


@pytest.mark.parametrize("name", ATTENDING)
def test_a_product_is_what_its_formula_says(name: str) -> None:
    for attention, truth in shown(name):
        numbers = Numbers(attention, truth)
        for stage in attention.stages:
            scaled = re.fullmatch(r"q_heads · k_headsᵀ(?: / √(\d+)| · (-?[\d.]+))?", stage.formula)
            if scaled and "(heads maps)" not in stage.axes:
                factor = 1 / math.sqrt(int(scaled[1])) if scaled[1] else float(scaled[2] or 1)
                assert_close(numbers.products() * factor, numbers.of(stage.name), rtol=1e-3)
            elif stage.formula in ("softmax(scores)", "softmax(masked_scores)") and "(heads maps)" not in stage.axes:
                assert_close(numbers.of(stage.formula[8:-1]).softmax(-1), numbers.of("weights"))
            elif stage.formula == "weights · v_heads":
                assert_close(numbers.average(), numbers.of("context"))


def is_counted(entry: Entry) -> bool:
    """Whether all products of an entry are those of its attention, and torch counts them: kernels it does not."""
    if len(entry.attentions) > 1 or not entry.attentions[0].is_textbook or entry.attentions[0].says:
        return False
    is_other = entry.name.startswith(
        ("Fused", "Broadcast", "KeepNumbers", "Kernel", "One", "SharedKeys", "LastToken", "Bert", "Torch")
    )
    return bool(entry.rows) and not entry.partly and entry.reads_arguments and not is_other


@pytest.mark.parametrize("name", [name for name in ATTENDING if is_counted(ENTRIES[name])])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    entry = ENTRIES[name]
    (args, kwargs), module = entry.arguments(), entry.made()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*args, **kwargs)
    told = sum(stage.flops or 0 for attention in traced(name).attentions for stage in attention.stages)
    assert told == counter.get_total_flops()

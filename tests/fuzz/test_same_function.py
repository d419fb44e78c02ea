"""`diff` of one function in two styles, with the same weights: the same at every stage; with a fault, the first stage.

The truth is the choices themselves, and the outputs of the two modules.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import mha_inspect

from .test_styles import PAST, SPLITS, Composed, Faulty, Style, styles

FAULTS = {"values moved": "v_heads", "key left alone": "k_heads", "scaled twice": "scores"}
MASKS = ("fill", "lowest", "add", "where")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Style, Style]:
    """Draw two styles of one function."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    style = draw(styles())
    plain = style.softmax != "sink" or style.scale == "kernel"  # a fused kernel has no sink
    return style, replace(
        style,
        split=one_of(*SPLITS),
        share=one_of("repeat", "expand", "group"),
        scale=one_of("query", "scores", "both", *["kernel"] * plain),
        softmax=one_of("function", "float32", "by hand") if plain else "sink",
        mask=one_of(*MASKS) if style.mask in MASKS else style.mask,
        cache=one_of("joined", "in place") if style.cache else "",
        merge=style.merge if style.merge == "by head" else one_of("reshape", "einops"),
    )


def made(left_style: Style, right_style: Style, fault: str = "") -> tuple[Composed, Composed, Tensor]:
    """Return both modules with the same weights and cached keys, and an input."""
    torch.manual_seed(0)
    left, right = Composed(left_style).eval(), Faulty(right_style).eval()
    right.fault = fault
    with torch.no_grad():
        for name, tensor in right.state_dict().items():
            given = left.state_dict()[name]
            if name in ("keys", "values"):
                tensor.zero_()[:, :, :PAST] = given[:, :, :PAST]
            else:
                tensor.copy_(given)
    return left, right, torch.randn(left_style.batch, left_style.new, left_style.embed)


def test_one_function_in_two_styles_is_the_same_at_every_stage(try_all: Callable[..., None]) -> None:
    def check(pair: tuple[Style, Style]) -> None:
        left, right, x = made(*pair)
        assert torch.allclose(deepcopy(left)(x), deepcopy(right)(x), atol=1e-4)
        report = mha_inspect.diff(left, right, x, same_weights=False)
        assert (report.outcome, report.first_differing_stage) == ("same", None)
        # Keys and values side by side are split with the heads: there is no projection of one of them alone.
        packed = {"k_proj", "v_proj"} if "beside" in (pair[0].project, pair[1].project) else set()
        both = [stage for stage in report.stages if stage.left is not None and stage.right is not None]
        compared = {stage.verdict for stage in both if stage.verdict or stage.name not in packed}
        assert compared == {"same"}, [(stage.name, stage.verdict, stage.note) for stage in report.stages]

    try_all(check, pairs(), 10)


def test_a_fault_is_told_by_the_first_stage_that_differs(try_all: Callable[..., None]) -> None:
    def check(case: tuple[tuple[Style, Style], str]) -> None:
        styles, fault = case
        assume(fault != "key left alone" or styles[0].rotated)
        left, right, x = made(*styles, fault)
        assume((deepcopy(left)(x) - deepcopy(right)(x)).abs().max() > 1e-4)
        report = mha_inspect.diff(left, right, x, same_weights=False)
        assert (report.outcome, report.first_differing_stage) == ("differs", FAULTS[fault])

    try_all(check, st.tuples(pairs(), st.sampled_from(sorted(FAULTS))), 9)

"""Whatever the layout, a stage's content in the canonical axes is the same; and axes say the sizes of this run."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

from mha_inspect.naming.canonical import canonical
from mha_inspect.naming.pattern import CANONICAL_AXES

SIZES = {"batch": 3, "heads": 10, "kv_heads": 5, "group": 2, "head_dim": 7, "query": 11, "key": 13, "embed": 17}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("stage", "layout"),
    [
        ("query", "query batch embed"),
        ("q_proj", "query batch (heads head_dim)"),
        ("k_proj", "(key batch) (kv_heads head_dim)"),
        ("q_heads", "(batch heads) query head_dim"),
        ("q_heads", "heads batch query head_dim"),
        ("weights", "batch (heads query) key"),
        ("context", "batch query heads head_dim"),
        ("concat", "(query batch) (heads head_dim)"),
        ("output", "query batch embed"),
    ],
)
def test_a_layout_goes_back_to_the_canonical_one(stage: str, layout: str) -> None:
    axes = CANONICAL_AXES[stage]
    names = axes.replace("(", "").replace(")", "").split()
    whole = rearrange(drawn(*(SIZES[name] for name in names)), f"{' '.join(names)} -> {axes}")
    sizes = {name: SIZES[name] for name in names}
    laid_out = rearrange(whole, f"{axes} -> {layout}", **sizes)
    result = canonical(laid_out, stage, layout, SIZES)
    assert result is not None
    assert torch.equal(result, whole)


def test_axes_that_an_implementation_does_not_have_are_of_size_one() -> None:
    x = drawn(11, 7)
    result = canonical(x, "q_heads", "query head_dim", SIZES)
    assert result is not None
    assert torch.equal(result, x[None, None])


def test_shared_heads_and_other_widths_stand_in_for_the_names_of_the_canonical_axes() -> None:
    x = drawn(3, 5, 2, 13, 7)
    grouped = canonical(x, "k_heads", "batch kv_heads group key head_dim", SIZES)
    assert grouped is not None
    assert torch.equal(grouped, x.flatten(1, 2))
    side = canonical(drawn(3, 11, 70), "q_proj", "batch query (kv_heads group head_dim)", SIZES)
    assert side is not None
    assert torch.equal(side, drawn(3, 11, 70))
    key = canonical(drawn(13, 3, 19), "key", "key batch kdim", {**SIZES, "kdim": 19})
    assert key is not None
    assert key.shape == (3, 13, 19)


@pytest.mark.parametrize("layout", ["batch 11 embed", "batch query 17", "batch query vocabulary"])
def test_what_has_no_name_has_no_canonical_form(layout: str) -> None:
    assert canonical(drawn(3, 11, 17), "query", layout, SIZES) is None


def test_names_that_do_not_fit_their_sizes_are_none():
    assert canonical(drawn(3, 5, 7), "concat", "batch query (heads head_dim)", {"heads": 2, "head_dim": 3}) is None
    assert canonical(drawn(3, 5, 7), "output", "batch query query", {"batch": 3}) is None
    context = canonical(drawn(3, 5, 1, 7), "context", "batch query 1 head_dim", {})
    assert context is not None
    assert context.shape == (3, 1, 5, 7)

"""Orders of rows are named as einops gives them, and nothing else is named."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mha_inspect.measure.reorder import Reordering, explain

WIDTH, EMBED = 8, 24


def drawn(rows: int, columns: int = EMBED, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from pairs to halves: `heads half two` to `heads two half`."""
    return rearrange(weight, "(heads half two) e -> (heads two half) e", heads=heads, two=2)


def explained(left: Tensor, right: Tensor, **sizes: int) -> Reordering:
    reordering = explain(left, right, {"head_dim": WIDTH, **sizes})
    assert reordering is not None
    return reordering


PATTERNS = [
    ("(qkv heads head_dim)", "(heads qkv head_dim)", 3),
    ("(qkv heads head_dim)", "(heads head_dim qkv)", 3),
    ("(heads half two)", "(heads two half)", 1),
    ("(heads head_dim)", "(head_dim heads)", 1),
]


@pytest.mark.parametrize(("before", "after", "parts"), PATTERNS)
@pytest.mark.parametrize("heads", [3, 8])
def test_the_name_of_an_order_is_the_pattern_that_gives_it(before: str, after: str, parts: int, heads: int) -> None:
    sizes = {"qkv": 3, "heads": heads, "head_dim": WIDTH, "two": 2, "half": WIDTH // 2}
    lengths = {axis: size for axis, size in sizes.items() if axis in before}
    left = drawn(heads * WIDTH * parts)
    right = rearrange(left, f"{before} e -> {after} e", **lengths)
    reordering = explained(left, right, heads=heads, kv_heads=heads, parts=parts)
    assert reordering.is_exact
    # An order that is its own inverse, as of 3 heads and q, k, v, has one name for both ways.
    pattern, inverse = f"{before} -> {after}", f"{after} -> {before}"
    (named,) = [named for named in reordering.names if named.pattern in (pattern, inverse)]
    assert named.pattern == pattern or "on one side" in named.meaning
    # The line that is printed runs, and gives the right side.
    line = named.line("w", reordering.axis)
    assert torch.equal(eval(line, {"rearrange": rearrange, "w": left}), right)


def test_columns_and_transposed_matrices_are_rows_too() -> None:
    heads = 4
    left = drawn(3 * heads * WIDTH)
    right = rearrange(left, "(qkv heads head_dim) e -> (heads qkv head_dim) e", qkv=3, heads=heads)
    columns = explained(left.T.contiguous(), right.T.contiguous(), heads=heads, kv_heads=heads)
    turned = explained(left, right.T.contiguous(), heads=heads, kv_heads=heads)
    assert (columns.axis, columns.transposed, turned.transposed) == ("columns", False, True)
    assert columns.names[0].pattern == turned.names[0].pattern == "(qkv heads head_dim) -> (heads qkv head_dim)"


def test_keys_permuted_with_the_number_of_query_heads_are_told() -> None:
    heads, kv_heads = 4, 2
    weight = drawn(kv_heads * WIDTH)
    right, wrong = halves(weight, kv_heads), halves(weight, heads)
    reordering = explained(right, wrong, heads=heads, kv_heads=kv_heads, parts=1)
    assert "rotary halves as if of 4 heads, not 2" in reordering.names[0].meaning


def test_pruned_heads_are_named() -> None:
    weight = drawn(4 * WIDTH)
    kept = weight.view(4, WIDTH, EMBED)[[0, 1, 3]].reshape(-1, EMBED)
    reordering = explained(weight, kept, heads=4, kv_heads=4, parts=1)
    assert (reordering.names[0].pattern, reordering.names[0].meaning) == (
        "heads 0–1, 3 of 4",
        "without head 2 (pruned)",
    )


@pytest.mark.parametrize("repeat", ["repeat_interleave", "repeat"])
def test_shared_heads_may_be_repeated(repeat: str) -> None:
    weight = drawn(2 * WIDTH)
    heads = weight.view(2, WIDTH, EMBED)
    whole = heads.repeat_interleave(3, 0) if repeat == "repeat_interleave" else heads.repeat(3, 1, 1)
    reordering = explained(weight, whole.reshape(-1, EMBED), heads=6, kv_heads=2, parts=1)
    assert reordering.names[0].pattern == f"{repeat}(3)"


@pytest.mark.parametrize(
    "right",
    [
        drawn(32, seed=1),
        drawn(32) * 0.5,
        drawn(32) + 0.05 * drawn(32, seed=2),
        drawn(32),
        torch.cat([drawn(8, seed=3), drawn(32)[8:]]),
        torch.zeros(32, EMBED),
    ],
    ids=["other", "scaled", "trained", "equal", "one head trained", "zeros"],
)
def test_what_is_not_the_same_rows_is_not_explained(right: Tensor) -> None:
    assert explain(drawn(32), right, {"heads": 4, "kv_heads": 4, "head_dim": WIDTH}) is None


def test_equal_rows_have_no_order() -> None:
    left, right = drawn(1).expand(32, EMBED).contiguous(), drawn(1, seed=1).expand(32, EMBED).contiguous()
    assert explain(left, right, {"heads": 4, "kv_heads": 4, "head_dim": WIDTH}) is None
    two = drawn(2)
    assert explain(two.repeat(16, 1), two.repeat_interleave(16, 0), {"heads": 4, "head_dim": WIDTH}) is None


@given(seed=st.integers(0, 10**6), rows=st.sampled_from([6, 8, 24, 32]), columns=st.sampled_from([1, 3, 8, 32]))
@settings(max_examples=100, deadline=None)
def test_two_drawn_matrices_are_never_explained(seed: int, rows: int, columns: int) -> None:
    left, right = drawn(rows, columns, seed), drawn(rows, columns, seed + 10**7)
    assert explain(left, right, {"heads": 4, "kv_heads": 2, "head_dim": rows // 4 or 1}) is None


@given(order=st.permutations(range(16)))
@settings(max_examples=60, deadline=None)
def test_any_order_is_found_as_it_is(order: list[int]) -> None:
    left = drawn(16)
    reordering = explain(left, left[order], {"heads": 2, "kv_heads": 2, "head_dim": WIDTH})
    assert (reordering is None) == (order == [*range(16)])
    if reordering is not None:
        assert list(reordering.order) == order
        for named in reordering.names:
            line = named.line("w", "rows")
            assert not line or torch.equal(eval(line, {"rearrange": rearrange, "w": left}), left[order])

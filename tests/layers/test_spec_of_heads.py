"""Head sizes of a spec: which are given, which follow, and that `replace` keeps the two apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha_inspect.errors import SpecError
from mha_inspect.layers.spec import AttentionSpec


def test_a_derived_head_dim_follows_a_new_head_count():
    spec = AttentionSpec(embed_dim=30, num_heads=5)
    assert spec.head_dim == 6
    assert replace(spec, num_heads=3).head_dim == 10
    assert not spec.head_dim_given


def test_a_given_head_dim_stays_under_a_new_head_count():
    spec = AttentionSpec(embed_dim=30, num_heads=5, head_dim=7)
    assert replace(spec, num_heads=3).head_dim == 7
    assert spec.head_dim_given


def test_a_new_head_count_is_checked_again():
    with pytest.raises(SpecError, match=r"embed_dim 30 is not divisible by num_heads 4.*1, 2, 3, 5, 6, 10, 15, 30"):
        replace(AttentionSpec(embed_dim=30, num_heads=5), num_heads=4)


def test_a_given_head_dim_needs_no_division():
    assert AttentionSpec(embed_dim=10, num_heads=3, head_dim=7).head_dim == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 8.*divisors of 8: 1, 2, 4, 8"),
        ({"num_heads": 2, "num_kv_heads": 4}, "num_kv_heads 4 does not divide num_heads 2.*divisors of 2: 1, 2"),
        ({"num_kv_heads": 0}, "num_kv_heads 0 is too small"),
        ({"head_dim": 0}, "head_dim 0 is too small"),
        ({"embed_dim": 15, "num_heads": 3, "rope": True}, "head_dim 5.*must be even.*head_dim 6"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(SpecError, match=f"(?i){message}"):
        AttentionSpec(**settings)

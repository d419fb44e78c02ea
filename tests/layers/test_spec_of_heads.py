"""Head sizes of a spec: which are given, which follow, and that `replace` keeps the two apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mha_inspect.errors import SpecError
from mha_inspect.layers.spec import AttentionSpec


def test_a_derived_head_dim_follows_a_new_head_count_and_a_given_one_stays() -> None:
    derived, given = (AttentionSpec(embed_dim=30, num_heads=5, head_dim=size) for size in (None, 7))
    assert (derived.head_dim, replace(derived, num_heads=3).head_dim, derived.head_dim_given) == (6, 10, False)
    assert (replace(given, num_heads=3).head_dim, given.head_dim_given) == (7, True)
    assert AttentionSpec(embed_dim=10, num_heads=3, head_dim=7).head_dim == 7  # it needs no division
    with pytest.raises(SpecError, match=r"embed_dim 30 is not divisible by num_heads 4.*1, 2, 3, 5, 6, 10, 15, 30"):
        replace(derived, num_heads=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 8.*divisors of 8: 1, 2, 4, 8"),
        ({"head_dim": 0}, "head_dim 0 is too small"),
        ({"embed_dim": 15, "num_heads": 3, "rope": True}, "head_dim 5.*must be even.*head_dim 6"),
    ],
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(SpecError, match=f"(?i){message}"):
        AttentionSpec(**settings)

"""Products of factors with different numbers of heads: the counts are said, and how query heads may share keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Cause, Failure

from ...built import trace_module

HEAD_DIM, WIDTH = 4, 24


class Projected(nn.Module):
    """Queries `batch query heads head_dim`, keys and values with their own number of heads."""

    def __init__(self, heads: int, kv_heads: int, weigh: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, count * HEAD_DIM) for count in (heads, kv_heads, kv_heads))
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(*(side(x).unflatten(-1, (-1, HEAD_DIM)) for side in (self.q, self.k, self.v)))


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2).flatten(0, 1) for side in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def repeated_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return (q @ k.mT).softmax(-1) @ v


def grouped_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.unflatten(2, (2, 3)).permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)
    return (q @ k.mT).softmax(-1) @ v


def wrong_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.unflatten(2, (-1, size)).permute(0, 2, 3, 1, 4) for side, size in ((q, 2), (k, 1), (v, 1)))
    return (q @ k.mT).softmax(-1) @ v


def only_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (side.transpose(1, 2) for side in (q, k, v))
    return (q @ k.repeat_interleave(3, dim=1).mT).softmax(-1) @ v


KINDS: list[tuple[Any, int, int, str, str, str]] = [
    (by_matmul, 6, 4, "heads_differ", "has 6 heads and k.transpose(-2, -1) has 4.", "6 key heads"),
    (
        by_einsum,
        6,
        2,
        "heads_not_repeated",
        "has 6 heads and k has 2, each shared by 3",
        "k.repeat_interleave(3, dim=2)",
    ),
    (folded, 6, 2, "heads_not_repeated", "each shared by 3 query heads", "k.repeat_interleave(3, dim=0)"),
    (repeated_twice, 6, 2, "heads_not_repeated", "has 4: 2 heads repeated 2 times", "3 of each of the 2 heads"),
    (grouped_queries, 6, 2, "heads_not_repeated", "no dimension for the group", "k.unsqueeze(2)"),
    (wrong_groups, 6, 2, "heads_differ", "6 heads in 2 dimensions (3 and 2)", "2 groups of 3"),
    (only_keys, 6, 2, "heads_not_repeated", "weights has 6 heads and v has 2", "v.repeat_interleave(3, dim=1)"),
]


def failure_of(module: nn.Module, length: int = 7) -> Failure:
    with pytest.raises(ForwardError) as caught:
        trace_module(module, torch.randn(2, length, WIDTH))
    failure = caught.value.trace.failure
    assert failure is not None
    return failure


def cause_of(module: nn.Module, length: int = 7) -> Cause:
    cause = failure_of(module, length).cause
    assert cause is not None
    return cause


@pytest.mark.parametrize(("weigh", "heads", "kv_heads", "name", "what", "fix"), KINDS)
def test_numbers_of_heads_that_clash(weigh: Any, heads: int, kv_heads: int, name: str, what: str, fix: str) -> None:
    cause = cause_of(Projected(heads, kv_heads, weigh))
    assert cause.name == name
    assert what in cause.explanation
    assert fix in cause.fix


def test_an_equation_with_heads_behind_positions_is_not_accused_of_its_order() -> None:
    """`bqhd,bkhd->bhqk` runs as it is with as many key heads as query heads."""
    Projected(6, 6, by_einsum)(torch.randn(2, 7, WIDTH))
    assert cause_of(Projected(6, 4, by_einsum)).name != "heads_not_transposed"


def test_other_clashes_are_not_of_heads() -> None:
    def other_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_matmul(q, torch.cat([k, k[:1]]), torch.cat([v, v[:1]]))

    cause = failure_of(Projected(6, 6, other_batch)).cause
    assert cause is None or "heads" not in cause.name


# -- the sequence is repeated in the place of the heads ---------------------------------------------------------------


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Return heads repeated, of `batch heads sequence head_dim`."""
    batch, kv_heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, kv_heads, times, length, head_dim).reshape(batch, -1, length, head_dim)


def repeated_before_transpose(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, repeat_kv(k, 3), repeat_kv(v, 3))))


def repeated_along_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q @ k.repeat(1, 1, 3, 1).mT).softmax(-1) @ v.repeat(1, 1, 3, 1)


@pytest.mark.parametrize(
    ("weigh", "way"),
    [
        (repeated_before_transpose, "Use .transpose(1, 2) on keys and values before the repeat"),
        (repeated_along_2, "Repeat the heads, not the sequence, of keys and values"),
    ],
)
def test_the_sequence_is_repeated_in_the_place_of_the_heads(weigh: Callable[..., Tensor], way: str) -> None:
    """6 query heads share 2 key heads; 5 tokens become 15, and the heads stay 2."""
    cause = cause_of(Projected(6, 2, weigh), length=5)
    assert "each of 5 keys occurs 3 times" in cause.explanation
    assert "The sequence was repeated 3 times instead of the heads." in cause.explanation
    assert cause.fix.startswith(way)

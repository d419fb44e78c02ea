"""Rotations of one token, other matrices, and steps of a loop with a cache: the other inner steps are in the corpus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import AttentionReport, Cache

from ..corpus.inside import KV, Attend, B, D, E, H, Pair, T, X, angles, both, halves, matrices, rotary, with_method


def attention_of(module: nn.Module, *args: Tensor) -> AttentionReport:
    with torch.no_grad():
        (attention,) = mha_inspect.trace(module, *(args or (X,))).attentions
    return attention


def test_rotation_of_one_key_expanded_to_all_heads() -> None:
    """Its memory has one head, where torch cannot write eight."""

    def positions(self: Attend, q: Tensor, k: Tensor) -> Pair:
        return halves(q, angles()), halves(k[:, :1].expand(-1, KV, -1, -1), angles())

    assert attention_of(with_method(positions=positions)).position == rotary("half")


def by_another_matrix(x: Tensor, angle: Tensor) -> Tensor:
    others = torch.linspace(0, 9, T * D * D).sin().view(T, D, D)
    return torch.einsum("bhnd,ned->bhne", x, matrices(angle) + others)


def half_written(x: Tensor, angle: Tensor) -> Tensor:
    turned = x.clone()
    turned[..., ::2] = x[..., ::2] * angle.cos() - x[..., 1::2] * angle.sin()
    return turned


@pytest.mark.parametrize("turn", [by_another_matrix, half_written])
def test_other_matrices_and_writes_are_no_rotation(turn: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert attention_of(with_method(positions=both(turn))).position is None


def test_a_matrix_that_mixes_all_features_gives_no_rows_to_a_head() -> None:
    mixed = torch.linspace(0, 5, E * E).sin().view(E, E)

    def heads(self: Attend, x: Tensor) -> Tensor:
        return (x @ mixed[: x.shape[-1], : x.shape[-1]]).unflatten(-1, (-1, D)).transpose(1, 2)

    module = with_method(heads=heads)
    roles = {row.name: row.role for row in mha_inspect.params(module, X).parameters}
    assert "rows" not in roles["q.weight"]


@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize(
    "table",
    [
        lambda at: angles(at, 1),
        lambda at: angles(0, at + 1)[None, -1:] if at else angles(0, 1),
    ],
)
def test_rotation_of_one_token(table: Any, start: int) -> None:
    single = with_method(positions=lambda self, q, k: tuple(halves(x, table(start)) for x in (q, k)))
    assert attention_of(single, X[:, :1]).position == rotary("half", query=start, key=start)


# -- caches -----------------------------------------------------------------------------------------------------------


class Cached(Attend):
    """Attention that keeps its keys, in steps."""

    slots = 12

    def __init__(self) -> None:
        super().__init__()
        self.past = 0
        self.old: list[Tensor] = []
        self.kept = [torch.zeros(B, KV, self.slots, D) for _ in range(2)]

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        start, self.past = self.past, self.past + k.shape[2]
        keys, values = self.write(k, v, slice(start, self.past))
        return keys, values, torch.arange(keys.shape[2]) <= torch.arange(start, self.past)[:, None]

    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        raise NotImplementedError


class Concatenated(Cached):
    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        self.old = [torch.cat((old, x), 2) for old, x in zip(self.old, (k, v), strict=True)] if self.old else [k, v]
        return self.old


class IndexCopied(Cached):
    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        places = torch.arange(new.start, new.stop)
        return [kept.index_copy_(2, places, x) for kept, x in zip(self.kept, (k, v), strict=True)]


class Paged(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.pools = [torch.zeros(2 * self.slots, KV, D) for _ in range(2)]
        self.pages = torch.randperm(2 * self.slots).view(B, self.slots)

    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        for pool, x in zip(self.pools, (k, v), strict=True):
            pool[self.pages[:, new]] = x.transpose(1, 2)
        return [pool[self.pages[:, : new.stop]].transpose(1, 2) for pool in self.pools]


WAYS = {
    Concatenated: ("concatenated", 0),
    IndexCopied: ("in place", 12),
    Paged: ("paged", 0),
}


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("alone", [True, False])
def test_steps_of_a_loop_with_a_cache(kind: type[Cached], alone: bool) -> None:
    way, slots = WAYS[kind]
    torch.manual_seed(0)
    module, steps = kind().eval(), (X, X[:, :1] * 2, X[:, :1] * 3)
    with torch.no_grad():
        if alone:
            attentions = [attention_of(module, step) for step in steps]
        else:
            with mha_inspect.recording() as recording:
                for step in steps:
                    module(step)
            attentions = [*recording.trace.attentions]
    assert [(a.num_heads, a.num_kv_heads, a.head_dim) for a in attentions] == [(H, KV, D)] * 3
    assert [attention.kind for attention in attentions] == [("self", "causal", "grouped"), *[("self", "grouped")] * 2]
    caches = [Cache(past, new, max(slots - past - new, 0), way) for past, new in ((0, T), (T, 1), (T + 1, 1))]
    assert [attention.cache for attention in attentions] == [caches[0] if slots else None, *caches[1:]]
    empty = " + empty (4)" if slots else ""
    formulas = {stage.name: stage.formula for stage in attentions[2].stages}
    for letter in "kv":
        expected = f"cache (7) + {letter}_proj in heads (1){empty}, each head repeated 2 times"
        assert formulas[f"{letter}_heads"] == expected

"""Keys that were there before the call are a cache; those of other tokens of the same call are none.

The truth is how each module is written, and the number of keys that it gets from before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import Cache

H, D = 3, 8
E = H * D
B, N, M, PAST = 2, 8, 4, 5


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, D)).transpose(1, 2)


class Projections(nn.Module):
    """Projections of the tokens, others for other tokens, and a way to attend."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.other_k, self.other_v = nn.Linear(E, E), nn.Linear(E, E)
        self.learned = nn.Parameter(torch.randn(1, M, E))
        self.register_buffer("constant", torch.randn(B, M, E))

    def sides(self, x: Tensor) -> list[Tensor]:
        return [split(project(x)) for project in (self.q, self.k, self.v)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def attend_with(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, *of_tokens = self.sides(x)
        return self.attend(q, *(torch.cat(pair, 2) for pair in zip((k, v), of_tokens, strict=True)))


# -- no cache ---------------------------------------------------------------------------------------------------------


class GlobalTokens(Projections):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return self.attend_with(x, *self.sides(more)[1:])


class FirstTokens(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend_with(x[:, M:], *self.sides(x[:, :M])[1:])


class LearnedTokens(Projections):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend_with(x, *self.sides(self.learned.expand(len(x), -1, -1))[1:])


class Blocks(Projections):
    """Pegasus-X: the tokens of a block see one another, and global tokens."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        q, k, v = (side.unflatten(2, (-1, 4)) for side in self.sides(x))
        others = (side[:, :, None].expand(-1, -1, q.shape[2], -1, -1) for side in self.sides(more)[1:])
        k, v = (torch.cat(pair, 3) for pair in zip(others, (k, v), strict=True))
        weights = torch.einsum("bhnqd,bhnkd->bhnqk", q, k).softmax(-1)
        context = torch.einsum("bhnqk,bhnkd->bhnqd", weights, v)
        return self.o(context.flatten(2, 3).transpose(1, 2).flatten(2))


class WrittenIntoABuffer(Projections):
    """The memory was there before, and its content was not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(2, B, H, M + N, D))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        q, *of_tokens = self.sides(x)
        others = split(self.other_k(more)), split(self.other_v(more))
        for side in range(2):
            self.room[side, :, :, :M] = others[side]
            self.room[side, :, :, M:] = of_tokens[side]
        return self.attend(q, *self.room)


class GivenByTheCaller(nn.Module):
    """The model projects global tokens with the layer's matrices, and gives the keys to the layer."""

    class Layer(Projections):
        def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
            return self.attend_with(x, *past)

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.Layer()

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        return self.layer(x, (split(self.layer.k(more)), split(self.layer.v(more))))


TOKENS = [FirstTokens, LearnedTokens]
WITH_OTHERS = [GlobalTokens, Blocks, WrittenIntoABuffer, GivenByTheCaller]


@pytest.mark.parametrize("kind", [*TOKENS, *WITH_OTHERS])
def test_keys_of_other_tokens_of_the_same_call_are_no_cache(kind: Any) -> None:
    torch.manual_seed(0)
    args = torch.randn(B, N, E), torch.randn(B, M, E)
    trace = mha_inspect.trace(kind().eval(), *args[: 1 + (kind in WITH_OTHERS)])
    assert trace.attentions
    for attention in trace.attentions:
        assert attention.cache is None
        assert not any("cache" in stage.formula for stage in attention.stages)


# -- caches -----------------------------------------------------------------------------------------------------------


class Past(Projections):
    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        return self.attend_with(x, *past)


class Buffers(Projections):
    """Keys and values are written into one buffer, the values first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(2, B, H, 20, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        end = PAST + x.shape[1]
        self.kept[1, :, :, PAST:end] = v
        self.kept[0, :, :, PAST:end] = k
        return self.attend(q, *self.kept[:, :, :, :end])


class LayersSideBySide(nn.Module):
    """One buffer has the keys and values of both layers, next to each other for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(E, 3 * E) for _ in range(2))
        self.register_buffer("kept", torch.randn(B, 20, 2, 2, H, D))

    def forward(self, x: Tensor) -> Tensor:
        end = PAST + x.shape[1]
        for place, layer in enumerate(self.layers):
            q, *of_tokens = (side.unflatten(-1, (H, D)) for side in layer(x).chunk(3, -1))
            for side, mine in enumerate(of_tokens):
                self.kept[:, PAST:end, place, side] = mine
            k, v = self.kept[:, :end, place].unbind(2)
            heads = (side.transpose(1, 2) for side in (q, k, v))
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x


class BesideGlobalTokens(Projections):
    """A cache, and projected global tokens in another attention of the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cached, self.of_tokens = Past(), GlobalTokens()

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        return self.cached(self.of_tokens(x, self.constant), past)


class PastAndGlobal(Projections):
    """The past, two global tokens that are projected in each call, and the new tokens, in one concatenation."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> Tensor:
        q, *new = self.sides(x)
        _, *further = self.sides(self.constant[:, :2].expand(len(x), -1, -1))
        sides = zip(past, further, new, strict=True)
        return self.attend(q, *(torch.cat(side, dim=2) for side in sides))


@pytest.mark.parametrize("new", [1, N])
def test_a_cache_is_found_beside_further_keys_of_the_call(new: int) -> None:
    torch.manual_seed(0)
    (attention,) = mha_inspect.trace(PastAndGlobal().eval(), torch.randn(B, new, E), given_past()).attentions
    assert attention.cache == Cache(PAST, new + 2, 0, "concatenated")
    formulas = {stage.name: stage.formula for stage in attention.stages}
    assert formulas["k_heads"] == f"cache ({PAST}) + (k_proj in heads, plus 2 further keys) ({new + 2})"


def given_past() -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, PAST, D), torch.randn(B, H, PAST, D)


CACHES: list[tuple[Any, Any, str]] = [
    (Past, lambda: (given_past(),), "concatenated"),
    (Buffers, lambda: (), "in place"),
    (LayersSideBySide, lambda: (), "in place"),
    (BesideGlobalTokens, lambda: (given_past(),), "concatenated"),
]


@pytest.mark.parametrize("new", [1, N])
@pytest.mark.parametrize(("kind", "given", "way"), CACHES)
def test_keys_from_before_the_call_are_a_cache(kind: Any, given: Any, way: str, new: int) -> None:
    torch.manual_seed(0)
    trace = mha_inspect.trace(kind().eval(), torch.randn(B, new, E), *given())
    cached = trace.attentions[1:] if kind is BesideGlobalTokens else trace.attentions
    assert cached
    assert [attention.cache for attention in cached] == [Cache(PAST, new, 0, way)] * len(cached)
    if kind is BesideGlobalTokens:
        assert trace.attentions[0].cache is None


def test_a_script_without_modules_has_a_cache_from_the_attention_before_and_no_other() -> None:
    torch.manual_seed(0)
    parts, x, more = Projections().eval(), torch.randn(B, N, E), torch.randn(B, M, E)
    with torch.no_grad(), mha_inspect.recording() as recording:
        _, other_k, other_v = parts.sides(more)
        q, k, v = parts.sides(x)
        k, v = torch.cat([other_k, k], 2), torch.cat([other_v, v], 2)
        parts.attend(q, k, v)
        parts.attend_with(x[:, :1], k, v)
    assert [attention.cache for attention in recording.trace.attentions] == [None, Cache(M + N, 1, 0, "concatenated")]

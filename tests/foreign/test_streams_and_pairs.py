"""Attention of two streams, of graphs, of tables of pairs, of a mean and of overlapping windows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import check, params, trace

H, D = 4, 8
E = H * D


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, D)).transpose(-3, -2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


class Streams(nn.Module):
    """Stable Diffusion 3: the tokens of both streams, one of them scaled by a condition, attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(E, 3 * E), nn.Linear(E, 3 * E)
        self.of_condition = nn.Linear(E, 2 * E)
        self.o, self.text_o = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, text: Tensor, image: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        packed = self.text(text)
        shift, scale = self.of_condition(condition)[:, None].chunk(2, -1)
        both = packed, self.image(image * (1 + scale) + shift)
        sides = [side.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4) for side in both]
        q, k, v = torch.cat(sides, 3)
        q, k = (F.rms_norm(side, (D,)) for side in (q, k))
        context = merged(F.scaled_dot_product_attention(q, k, v))
        return self.text_o(context[:, : text.shape[1]]), self.o(context[:, text.shape[1] :])


@pytest.mark.parametrize(("text", "image"), [(3, 6), (5, 5)])
def test_streams_are_named_whatever_their_lengths(text: int, image: int) -> None:
    args = torch.randn(2, text, E), torch.randn(2, image, E), torch.randn(2, E)
    (attention,) = trace(Streams(), *args).attentions
    stages = {stage.name: stage for stage in attention.stages}
    assert stages["q_proj"].axes == "batch positions (qkv heads head_dim)"
    assert stages["q_heads"].formula == "rms_norm(q_proj in heads), joined with those of another projection"
    roles = {row.name: row.role for row in params(Streams(), *args).parameters}
    assert roles["image.bias"].startswith("b_q, b_k, b_v")
    assert (
        roles["image.weight"] == "W_q, W_k, W_v stacked: rows 0–31, 32–63, 64–95; for other tokens than those in query"
    )
    assert roles["of_condition.bias"] == roles["of_condition.weight"]
    assert roles["of_condition.bias"].startswith("another projection used for the queries")


class Graph(nn.Module):
    """Graph attention: scores and values are made of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(12, D)), nn.Parameter(torch.randn(2 * D, 1))

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        x = x @ self.w
        scores = F.leaky_relu(x @ self.a[:D] + (x @ self.a[D:]).T, 0.2)
        return scores.masked_fill(~near, -9e15).softmax(1) @ x


def test_values_that_scores_are_made_of_have_their_projection() -> None:
    near = torch.eye(7, dtype=torch.bool) | (torch.arange(49).view(7, 7) % 3 > 0)
    roles = {row.name: row.role for row in params(Graph(), torch.randn(7, 12), near).parameters}
    assert roles["w"].startswith("W_v: ")


class Pairs(nn.Module):
    """AlphaFold: the rows of a table of pairs, with a bias that is made of the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias, self.o = nn.Linear(E, 3 * E), nn.Linear(E, H), nn.Linear(E, E)

    def forward(self, pairs: Tensor) -> Tensor:
        q, k, v = map(split, self.qkv(pairs).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(D) + self.bias(pairs).movedim(-1, -3).unsqueeze(-4)
        return self.o(merged(scores.softmax(-1) @ v))


class BesidePairs(Pairs):
    """The bias is made of a table beside the tokens."""

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(D) + self.bias(pairs).permute(2, 0, 1)
        return self.o(merged(scores.softmax(-1) @ v))


class Mean(nn.Module):
    """One query, the mean of the tokens; a gate gives each token its part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, E), nn.Linear(E, D), nn.Linear(E, D)
        self.gate, self.o = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x.mean(1)).unflatten(-1, (H, D)) / math.sqrt(D)
        read = (q @ self.k(x).mT).softmax(-1) @ self.v(x)
        return self.o((read[:, None] * self.gate(x).sigmoid().unflatten(-1, (H, D))).flatten(2))


@pytest.mark.parametrize(
    ("module", "shapes"),
    [(Pairs(), [(6, 6, E)]), (BesidePairs(), [(3, 6, E), (6, 6, E)]), (Mean(), [(3, 6, E)])],
)
def test_no_fault_is_sure_in_tables_of_pairs_and_in_means(module: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    assert not [finding for finding in check(module, *map(torch.randn, shapes)).findings if finding.sure]


def test_numbers_that_are_nan_before_a_mask_are_not_said_to_be_masked() -> None:
    class Broken(Pairs):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = map(split, self.qkv(x).chunk(3, -1))
            q = torch.cat((q[:, :, :1].abs(), q[:, :, 1:]), 2)  # -inf for all keys of the first query
            return self.o(merged(F.scaled_dot_product_attention(q * 1e25, -k.abs() * 1e25, v)))

    torch.manual_seed(0)
    module = Broken()
    (finding,) = (finding for finding in check(module, torch.randn(2, 6, E)).findings if finding.check == "finite")
    assert "first stage that is not finite" in finding.sentence


class Slots(nn.Module):
    """A step of Gemma: keys and values are written into slots that the caller has filled before."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, freqs: Tensor, slots: Tensor, kv_cache: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (H, D)) for of in (self.q, self.k, self.v))
        q, k = self.turned(q, freqs), self.turned(k, freqs)
        keys, values = (cache.index_copy_(1, slots, new) for cache, new in zip(kv_cache, (k, v), strict=True))
        scores = q.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(D)
        return self.o(merged((scores + mask).softmax(-1) @ values.transpose(1, 2)))

    def turned(self, x: Tensor, freqs: Tensor) -> Tensor:
        as_complex = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(as_complex * freqs[:, None]).flatten(-2)


def test_a_single_query_is_not_said_to_be_unrotated() -> None:
    torch.manual_seed(0)
    module = Slots().requires_grad_(False)
    freqs = torch.polar(torch.ones(()), torch.outer(torch.arange(10.0), torch.tensor([1.0, 0.3, 0.1, 0.03])))
    cache = torch.zeros(2, 10, H, D), torch.zeros(2, 10, H, D)
    module(torch.randn(2, 7, E), freqs[:7], torch.arange(7), cache, torch.zeros(7, 10))
    mask = torch.tensor([0.0] * 8 + [-1e9] * 2)
    assert check(module, torch.randn(2, 1, E), freqs[7:8], torch.tensor([7]), cache, mask).findings == ()

"""Attention as published code writes it: caches written by index, heads in other orders, forwards called directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import params, recording, trace
from mha_inspect.naming.canonical import content_of
from mha_inspect.running.subject import Subject

from .truth import cut

B, N, SLOTS = 2, 7, 11
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 5
WIDTH = HEADS * HEAD_DIM


class Grouped(nn.Module):
    """Query head h uses key head h % KV_HEADS: the key heads are repeated as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.split(project(x)).repeat(1, HEADS // KV_HEADS, 1, 1) for project in (self.k, self.v))
        weights = (self.split(self.q(x)) @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class GroupFirst(Grouped):
    """The same, with a dimension for the group before that of the key heads."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, KV_HEADS, HEAD_DIM))
        k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.k, self.v))
        weights = (torch.einsum("bngkd,bskd->bgkns", q, k) / HEAD_DIM**0.5).softmax(-1)
        return self.o(torch.einsum("bgkns,bskd->bngkd", weights, v).flatten(2))


class Neighbours(Grouped):
    """Neighbouring query heads share a key head, and the scores count the group first."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (KV_HEADS, -1, HEAD_DIM)).permute(0, 3, 2, 1, 4)
        k, v = (self.split(project(x)) for project in (self.k, self.v))
        weights = (torch.einsum("bghnd,bhsd->bghns", q, k) / HEAD_DIM**0.5).softmax(-1)
        return self.o(torch.einsum("bghns,bhsd->bnhgd", weights, v).flatten(2))


class Cached(Grouped):
    """A cache written by index, of which empty slots are masked, and read as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, KV_HEADS, SLOTS, HEAD_DIM))
        self.register_buffer("values", torch.zeros(B, KV_HEADS, SLOTS, HEAD_DIM))

    def write(self, cache: Tensor, at: Tensor, content: Tensor) -> None:
        cache[:, :, at] = content

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for project, cache in ((self.k, self.keys), (self.v, self.values)):
            self.write(cache, at, self.split(project(x)))
        k, v = (cache.repeat_interleave(HEADS // KV_HEADS, 1) for cache in (self.keys, self.values))
        scores = self.split(self.q(x)) @ k.mT / HEAD_DIM**0.5
        weights = scores.masked_fill(torch.arange(SLOTS) > at[:, None], -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Copied(Cached):
    def write(self, cache: Tensor, at: Tensor, content: Tensor) -> None:
        cache.index_copy_(2, at, content)


class Scattered(Cached):
    def write(self, cache: Tensor, at: Tensor, content: Tensor) -> None:
        cache.scatter_(2, at.view(1, 1, -1, 1).expand_as(content), content)


class Layers(nn.Module):
    """Layers whose forward is called instead of the layer, and logits without a dimension for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grouped() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.forward(x)
        return x.view(-1, WIDTH)


class Forwards(Grouped):
    """An attention that calls the forward of its projections."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project.forward(x)) for project in (self.q, self.k, self.v))
        k, v = (heads.repeat_interleave(HEADS // KV_HEADS, 1) for heads in (k, v))
        return self.o.forward(((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Memories(nn.Module):
    """A memory network: one query for each batch item, and neither heads nor projections."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.queries = (nn.Embedding(13, WIDTH) for _ in range(3))

    def forward(self, story: Tensor, question: Tensor) -> Tensor:
        query = self.queries(question).sum(1)
        weights = (query[:, None] * self.keys(story).sum(2)).sum(-1).softmax(-1)
        return query + (weights[..., None] * self.values(story).sum(2)).sum(1)


def content(module: nn.Module, *args: Tensor) -> dict[str, Tensor | None]:
    """Return every stage in canonical axes."""
    with torch.no_grad():
        run = Subject(module, args, {}).recorded(keep=True)
    ((attention, names),) = run.attentions
    return {stage: content_of(run, attention, names, stage) for stage in attention.stages}


def rows_of(module: nn.Module, part: str, *args: Tensor) -> list[Tensor]:
    """Return the rows of each head, as the table of parameters has them."""
    parameters = dict(module.named_parameters())
    report = params(module, *args, per_head=True)
    return [cut(parameters[row.name], piece) for row in report.parameters for piece in row.heads if piece.part == part]


@pytest.mark.parametrize("kind", [Grouped, GroupFirst, Neighbours])
def test_heads_are_numbered_as_the_rows_of_the_queries(kind: type[Grouped]) -> None:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(B, N, WIDTH)
    stages, by_head = content(module, x), module.q.weight.view(HEADS, HEAD_DIM, WIDTH)
    torch.testing.assert_close(stages["q_heads"], module.split(module.q(x)))
    assert all(map(torch.equal, rows_of(module, "W_q", x), by_head))
    assert all(map(torch.equal, rows_of(module, "W_o", x), module.o.weight.split(HEAD_DIM, 1)))
    group = HEADS // KV_HEADS
    k = module.split(module.k(x))
    k = k.repeat_interleave(group, 1) if kind is Neighbours else k.repeat(1, group, 1, 1)
    torch.testing.assert_close(stages["scores"], module.split(module.q(x)) @ k.mT / HEAD_DIM**0.5)


@pytest.mark.parametrize("kind", [Cached, Copied, Scattered])
def test_a_cache_written_by_index_has_the_heads_of_its_projections(kind: type[Cached]) -> None:
    torch.manual_seed(0)
    given: tuple[Any, ...] = (torch.randn(B, N, WIDTH), torch.arange(N))
    module = kind()
    (one,) = trace(module, *given).attentions
    assert (one.kind, one.num_heads, one.num_kv_heads) == (("self", "causal", "grouped"), HEADS, KV_HEADS)
    for letter in "qkv":
        weight = getattr(module, letter).weight
        assert all(map(torch.equal, rows_of(module, f"W_{letter}", *given), weight.split(HEAD_DIM)))


@pytest.mark.parametrize("kind", [Grouped, Forwards])
@pytest.mark.parametrize("batch", [1, B])
def test_a_module_is_known_where_its_forward_is_called(kind: type[Grouped], batch: int) -> None:
    module, x = Layers(), torch.randn(batch, N, WIDTH)
    for layer in module.layers:
        layer.__class__ = kind
    with recording() as recorded:
        module.forward(x)
    for attentions in (trace(module, x).attentions, recorded.trace.attentions):
        assert [one.module for one in attentions] == ["layers.0", "layers.1"]
        shapes = {stage.name: (stage.shape, stage.axes) for stage in attentions[0].stages}
        assert shapes["scores"] == ((batch, HEADS, N, N), "batch heads query key")


def test_single_queries_are_a_batch() -> None:
    (one,) = trace(Memories(), torch.randint(13, (4, N, 5)), torch.randint(13, (4, 5))).attentions
    stages = {stage.name: stage.axes for stage in one.stages}
    assert (one.num_heads, stages["weights"]) == (1, "batch key")


class Biased(nn.Module):
    """BEiT and Swin v2: one bias, joined from that of the queries, zeros for the keys, and that of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        packed = nn.functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        return self.o(((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_bias_that_is_joined_belongs_to_the_side_that_its_elements_reach() -> None:
    module, x = Biased(), torch.randn(B, N, WIDTH)
    roles = {parameter.name: parameter.role for parameter in params(module, x).parameters}
    assert (roles["q_bias"], roles["v_bias"]) == ("b_q", "b_v")
    for letter in "qv":
        assert all(map(torch.equal, rows_of(module, f"b_{letter}", x), getattr(module, f"{letter}_bias").split(5)))


class FewAtATime(Grouped):
    """Stable Diffusion's attention for little memory: a few of the folded heads at a time, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)).flatten(0, 1) for project in (self.q, self.k, self.v))
        context = torch.zeros_like(q)
        for at in range(0, len(q), KV_HEADS):
            some = slice(at, at + KV_HEADS)
            scores = torch.einsum("bid,bjd->bij", q[some], k[some]) * HEAD_DIM**-0.5
            context[some] = torch.einsum("bij,bjd->bid", scores.softmax(-1), v[some])
        return self.o(context.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


def test_a_few_heads_at_a_time_have_keys_of_their_own() -> None:
    attentions = trace(FewAtATime(), torch.randn(B, N, WIDTH)).attentions
    assert [(one.num_heads, one.num_kv_heads) for one in attentions] == [(KV_HEADS, KV_HEADS)] * 4


class Latent(Grouped):
    """Multi-query attention whose keys are also its values, as in attention with absorbed projections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, HEAD_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.down(x)
        weights = torch.einsum("bhnd,bsd->bhns", self.split(self.q(x)), latent).softmax(-1)
        return self.o(torch.einsum("bhns,bsd->bnhd", weights, latent).flatten(2))


def test_keys_that_are_also_the_values_are_one_matrix() -> None:
    module, x = Latent(), torch.randn(B, N, WIDTH)
    (row,) = (row for row in params(module, x).parameters if row.name == "down.weight")
    role = f"W_k, W_v: rows are the heads stacked, {HEAD_DIM} each, each for {HEADS} query heads"
    assert (row.axes, row.role) == ("(kv_heads head_dim) embed", role)

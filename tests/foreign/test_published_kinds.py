"""Attention as published code writes it: caches written by index, heads in other orders, forwards called directly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check, params, recording, trace
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.naming.canonical import content_of
from mha_inspect.reports.trace import Position
from mha_inspect.running.subject import Subject
from tests.corpus.test_parameters import cut

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


@pytest.mark.parametrize("kind", [Cached, Scattered])
def test_a_cache_written_by_index_has_the_heads_of_its_projections(kind: type[Cached]) -> None:
    torch.manual_seed(0)
    given: tuple[Any, ...] = (torch.randn(B, N, WIDTH), torch.arange(N))
    module = kind()
    (attention,) = trace(module, *given).attentions
    assert (attention.kind, attention.num_heads, attention.num_kv_heads) == (
        ("self", "causal", "grouped"),
        HEADS,
        KV_HEADS,
    )
    for letter in "qkv":
        weight = getattr(module, letter).weight
        assert all(map(torch.equal, rows_of(module, f"W_{letter}", *given), weight.split(HEAD_DIM)))


@pytest.mark.parametrize(("kind", "batch"), [(Grouped, 1), (Forwards, B)])
def test_a_module_is_known_where_its_forward_is_called(kind: type[Grouped], batch: int) -> None:
    module, x = Layers(), torch.randn(batch, N, WIDTH)
    for layer in module.layers:
        layer.__class__ = kind
    with recording() as recorded:
        module.forward(x)
    for attentions in (trace(module, x).attentions, recorded.trace.attentions):
        assert [attention.module for attention in attentions] == ["layers.0", "layers.1"]
        shapes = {stage.name: (stage.shape, stage.axes) for stage in attentions[0].stages}
        assert shapes["scores"] == ((batch, HEADS, N, N), "batch heads query key")


def test_single_queries_are_a_batch() -> None:
    (attention,) = trace(Memories(), torch.randint(13, (4, N, 5)), torch.randint(13, (4, 5))).attentions
    stages = {stage.name: stage.axes for stage in attention.stages}
    assert (attention.num_heads, stages["weights"]) == (1, "batch key")


PIECE = 4


class Whole(Grouped):
    """Attention that a subclass computes by pieces of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def scores(self, q: Tensor, k: Tensor, at: int) -> Tensor:
        return q @ k.mT / HEAD_DIM**0.5

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scores(q, k, 0).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Rescaled(Whole):
    """Online softmax: a running maximum, sum and result, and one division."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        highest, total, result = torch.full((*q.shape[:-1], 1), -torch.inf), torch.zeros(*q.shape[:-1], 1), 0 * q
        for at in range(0, k.shape[2], PIECE):
            scores = self.scores(q, k[:, :, at : at + PIECE], at)
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, factor = torch.exp(scores - new), torch.exp(highest - new)
            total, result = (
                factor * total + weights.sum(-1, keepdim=True),
                factor * result + weights @ v[:, :, at : at + PIECE],
            )
            highest = new
        return result / total


class RescaledCausal(Rescaled):
    def scores(self, q: Tensor, k: Tensor, at: int) -> Tensor:
        later = torch.arange(at, at + k.shape[2]) > torch.arange(q.shape[2])[:, None]
        return super().scores(q, k, at).masked_fill(later, -torch.inf)


class RescaledPadded(Rescaled):
    """Only the last piece has a key that is masked out."""

    def scores(self, q: Tensor, k: Tensor, at: int) -> Tensor:
        scores = super().scores(q, k, at)
        return scores if at + k.shape[2] < N else scores.masked_fill(torch.arange(at, N) == N - 1, -torch.inf)


class RescaledInPlace(Whole):
    """The same, written in place, without a dimension for the sums, and with a product with the inverse."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        highest, total, result = q.new_full(q.shape[:-1], -1e30), q.new_zeros(q.shape[:-1]), torch.zeros_like(q)
        start = 0
        while start < k.shape[2]:
            scores = self.scores(q, k[:, :, start : start + PIECE], start)
            new = torch.max(highest, scores.max(-1).values)
            weights, factor = (scores - new[..., None]).exp_(), (highest - new).exp_()
            total.mul_(factor).add_(weights.sum(-1))
            result.mul_(factor[..., None]).add_(
                torch.einsum("bhij,bhjd->bhid", weights, v[:, :, start : start + PIECE])
            )
            highest.copy_(new)
            start += PIECE
        return result * total.reciprocal()[..., None]


@pytest.mark.parametrize(
    ("kind", "piece"),  # a last piece of a single key, and of three
    [(RescaledCausal, 4), (RescaledPadded, 3), (RescaledInPlace, 3)],
)
def test_pieces_of_the_keys_with_one_softmax_are_one_attention(
    kind: type[Whole], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PIECE", piece)
    torch.manual_seed(0)
    module, x = kind(), torch.randn(B, N, WIDTH)
    q, k, v = (module.split(project(x)) for project in (module.q, module.k, module.v))
    scores = module.scores(q, k, 0)
    expected = module.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected)
    (attention,) = trace(module, x).attentions
    causal = kind is RescaledCausal
    assert (attention.kind, attention.num_heads, attention.num_kv_heads) == (
        ("self", "causal") if causal else ("self",),
        HEADS,
        HEADS,
    )
    assert any(f"in {-(-N // piece)} pieces along key" in note for note in attention.notes)
    stages = content(module, x)
    torch.testing.assert_close(stages["scores"], q @ k.mT / HEAD_DIM**0.5)
    torch.testing.assert_close(stages.get("masked_scores", stages["scores"]), scores)
    torch.testing.assert_close(stages["context"], scores.softmax(-1) @ v)
    torch.testing.assert_close(stages["k_heads"], k)
    for letter in "qkv":
        assert all(map(torch.equal, rows_of(module, f"W_{letter}", x), getattr(module, letter).weight.split(HEAD_DIM)))
    assert all(map(torch.equal, rows_of(module, "W_o", x), module.o.weight.split(HEAD_DIM, 1)))


class Picking(Rescaled):
    """The keys of each piece are picked by index."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        highest, total, result = torch.full((*q.shape[:-1], 1), -torch.inf), torch.zeros(*q.shape[:-1], 1), 0 * q
        for at in torch.randperm(N)[: N - 1].split(3):
            scores = self.scores(q, k[:, :, at], 0)
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, factor = torch.exp(scores - new), torch.exp(highest - new)
            total, highest = factor * total + weights.sum(-1, keepdim=True), new
            result = factor * result + weights @ v[:, :, at]
        return result / total


def test_pieces_of_keys_that_are_no_slices_are_not_taken_for_all_keys() -> None:
    (attention,) = trace(Picking(), torch.randn(B, N, WIDTH)).attentions
    assert "This attention is computed in 2 pieces of its keys; the stages show the first." in attention.notes
    assert attention.scores.shape == (B, HEADS, N, 3)


class PiecesOfQueries(Rescaled):
    """Blocks of queries too, all in one memory that is divided in place."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = torch.zeros_like(q)
        for at in range(0, N, 4):
            rows = slice(at, at + 4)
            total, highest = (
                torch.zeros(*q[:, :, rows].shape[:-1], 1),
                torch.full((*q[:, :, rows].shape[:-1], 1), -1e30),
            )
            for start in range(0, N, PIECE):
                scores = self.scores(q[:, :, rows], k[:, :, start : start + PIECE], start)
                new = torch.maximum(highest, scores.amax(-1, keepdim=True))
                weights, factor = torch.exp(scores - new), torch.exp(highest - new)
                total, highest = factor * total + weights.sum(-1, keepdim=True), new
                result[:, :, rows].mul_(factor).add_(weights @ v[:, :, start : start + PIECE])
            result[:, :, rows].div_(total)
        return result


def test_blocks_of_queries_in_one_memory_are_one_attention() -> None:
    torch.manual_seed(0)
    module, x = PiecesOfQueries(), torch.randn(B, N, WIDTH)
    q, k, v = (module.split(project(x)) for project in (module.q, module.k, module.v))
    with torch.no_grad():
        run = Subject(module, (x,), {}).recorded(keep=True)
    ((attention, names),) = run.attentions
    scores = q @ k.mT / HEAD_DIM**0.5
    torch.testing.assert_close(content_of(run, attention, names, "scores"), scores)
    torch.testing.assert_close(content_of(run, attention, names, "context"), scores.softmax(-1) @ v)


class LinearByFeatures(Whole):
    """Linear attention: exponentials of features that the input gives are summed over the keys, and no scores are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        directions = v.mean(2)[..., None] * torch.linspace(-1, 1, 4)
        q, k = ((x @ directions - (x @ directions).amax(-1, keepdim=True)).exp() for x in (q, k))
        return q @ (k.mT @ v) / (q @ k.sum(2)[..., None])


class NeverDivided(Whole):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.scores(q, k, 0)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights @ v * weights.sum(-1, keepdim=True).log()


@pytest.mark.parametrize("kind", [LinearByFeatures, NeverDivided])
def test_exponentials_that_average_no_values_by_scores_are_no_attention(kind: type[Whole]) -> None:
    assert not trace(kind(), torch.randn(B, N, WIDTH)).attentions


class Keeper:
    """A cache of a user's class, which a forward changes and does not return."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Keeping(Grouped):
    """Keys and values joined to those of earlier calls: in the module, or in an argument, counted in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.seen = 0

    def forward(self, x: Tensor, keeper: Keeper | None = None) -> Tensor:
        owner = self if keeper is None else keeper
        new = [self.split(project(x)) for project in (self.k, self.v)]
        owner.kept = [torch.cat(pair, 2) for pair in zip(owner.kept, new, strict=True)] if owner.kept else new
        self.seen += x.shape[1]
        k, v = (heads.repeat_interleave(HEADS // KV_HEADS, 1) for heads in owner.kept)
        future = torch.ones(self.seen, self.seen, dtype=torch.bool).triu(1)[self.seen - x.shape[1] :]
        scores = self.split(self.q(x)).float() @ k.float().mT / HEAD_DIM**0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Leaking(Keeping):
    """The same cache, and a call starts from the last output of the call before."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor, keeper: Keeper | None = None) -> Tensor:
        output = super().forward(x + self.last, keeper)
        self.last = output[:, -1:].detach()
        return output


def test_a_module_that_continues_from_its_cache_is_right_to_change_the_next_run() -> None:
    torch.manual_seed(0)
    report = check(Keeping(), torch.randn(B, N, WIDTH))
    assert not report.findings
    assert "repeat" in {skipped.check for skipped in report.left_out}
    assert [finding.check for finding in check(Leaking(), torch.randn(B, N, WIDTH)).findings] == ["repeat"]


def test_decoding_with_a_cache_that_no_call_returns_is_proved() -> None:
    """The forward computes in float32, so the run in float64 ends in the middle, with a cache of its own."""
    torch.manual_seed(0)
    subject = Subject(Keeping(), (torch.randn(B, N, WIDTH), Keeper()), {}, seed=0, grad=False)
    report, _ = decoded(subject, Show(), 2)
    assert report.decode is not None
    assert report.decode.verdict == "same"
    assert [(step.past, step.new) for step in report.steps or ()] == [(0, N - 2), (N - 2, 1), (N - 1, 1)]


NOPE, ROPE, V_DIM, LATENT = 6, 4, 5, 14


class Absorbed(nn.Module):
    """DeepSeek-V2 and V3: the up-projection of the latents is multiplied into the queries and the context."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.norm = nn.RMSNorm(LATENT)
        self.wkv_b = nn.Linear(LATENT, HEADS * (NOPE + V_DIM), bias=False)
        self.wo = nn.Linear(HEADS * V_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        nope, rope = self.wq(x).unflatten(-1, (HEADS, -1)).split((NOPE, ROPE), -1)
        latent, rope_key = self.wkv_a(x).split((LATENT, ROPE), -1)
        latent, up = self.norm(latent), self.wkv_b.weight.view(HEADS, -1, LATENT)
        return self.end(self.attend(torch.einsum("bqhd,hdc->bqhc", nope, up[:, :NOPE]), rope, latent, rope_key), up)

    def attend(self, q: Tensor, rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        scores = torch.einsum("bqhc,bkc->bqhk", q, latent) + torch.einsum("bqhr,bkr->bqhk", rope, rope_key)
        return torch.einsum("bqhk,bkc->bqhc", (scores / (NOPE + ROPE) ** 0.5).softmax(-1), latent)

    def end(self, context: Tensor, up: Tensor) -> Tensor:
        return self.wo(torch.einsum("bqhc,hdc->bqhd", context, up[:, -V_DIM:]).flatten(2))


class AbsorbedStep(Absorbed):
    """Latents and rotated keys are written into a cache each."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.latents, self.keys = 0, torch.zeros(B, N, LATENT), torch.zeros(B, N, ROPE)

    def attend(self, q: Tensor, rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        now = slice(self.at, self.at + q.shape[1])
        angles = torch.arange(N)[now, None] / 10.0 ** torch.arange(ROPE // 2)
        turn = torch.polar(torch.ones_like(angles), angles)
        rope, rope_key = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in (rope, rope_key))
        rope, rope_key = (torch.view_as_real(x).flatten(-2) for x in (rope * turn[:, None], rope_key * turn))
        self.latents[:, now], self.keys[:, now], self.at = latent, rope_key, now.stop
        return super().attend(q, rope, self.latents[:, : now.stop], self.keys[:, : now.stop])


def test_keys_that_are_rotated_beside_cached_latents_are_not_accused() -> None:
    torch.manual_seed(0)
    module, x = AbsorbedStep().eval(), torch.randn(B, N, WIDTH)
    with torch.no_grad():
        module(x[:, :-1])
    (attention,) = trace(copy.deepcopy(module), x[:, -1:]).attentions
    assert attention.position is not None
    assert (attention.position.query_offset, attention.position.key_offset) == (N - 1, N - 1)
    assert not [finding for finding in check(module, x[:, -1:]).findings if finding.sure]


def turned(x: Tensor) -> Tensor:
    """Turn `batch position heads feature` by position, in neighbouring pairs."""
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


class AbsorbedTurned(Absorbed):
    def attend(self, q: Tensor, rope: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        return super().attend(q, turned(rope), latent, turned(rope_key[:, :, None])[:, :, 0])


def test_a_second_product_of_queries_and_keys_is_no_bias() -> None:
    torch.manual_seed(0)
    module, x = AbsorbedTurned(), torch.randn(B, 17, WIDTH)  # more positions than features of a head
    (attention,) = trace(module, x).attentions
    formula = {stage.name: stage.formula for stage in attention.stages}["masked_scores"]
    assert (attention.bias, formula) == (False, "(scores + rotary(q) · rotary(k)ᵀ) / √10")
    assert attention.position == Position("rotary", "interleaved", ROPE, 0, 0)
    nope, rope = module.wq(x).unflatten(-1, (HEADS, -1)).split((NOPE, ROPE), -1)
    latent, rope_key = module.wkv_a(x).split((LATENT, ROPE), -1)
    k, _ = module.wkv_b(module.norm(latent)).unflatten(-1, (HEADS, -1)).split((NOPE, V_DIM), -1)
    rope_keys = turned(rope_key[:, :, None]).expand(-1, -1, HEADS, -1)
    q, k = torch.cat((nope, turned(rope)), -1), torch.cat((k, rope_keys), -1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (NOPE + ROPE) ** 0.5
    torch.testing.assert_close(content(module, x)["masked_scores"], scores)


class AbsorbedAlone(Absorbed):
    """The heads are returned side by side: W_o is elsewhere."""

    def end(self, context: Tensor, up: Tensor) -> Tensor:
        return torch.einsum("bqhc,hdc->bqhd", context, up[:, -V_DIM:]).flatten(2)


def test_heads_that_are_returned_side_by_side_are_no_features_of_an_output() -> None:
    report = trace(AbsorbedAlone(), torch.randn(B, N, WIDTH))
    assert not any(stage.name == "output" for stage in report.attentions[0].stages)
    assert report.returns[0].axes == f"batch query (heads {V_DIM})"


class OfEachHead(Whole):
    """A matrix for each head, after the average and before the sum over heads, and a layer after both."""

    def __init__(self) -> None:
        super().__init__()
        self.by_head = nn.Parameter(torch.randn(HEADS, HEAD_DIM, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        return self.o((self.attend(q, k, v) @ self.by_head).sum(1))


class QueriesOfEachHead(Whole):
    """A matrix for each head gives the queries, after a layer that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.by_head = nn.Parameter(torch.randn(HEADS, WIDTH, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x)[:, None] @ self.by_head, self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("kind", "role"), [(OfEachHead, "W_o"), (QueriesOfEachHead, "W_q")])
def test_a_matrix_for_each_head_is_a_projection_itself(kind: type[Whole], role: str) -> None:
    roles = {row.name: row.role for row in params(kind(), torch.randn(B, N, WIDTH)).parameters}
    assert roles["by_head"] == f"{role}: one matrix per head"


class GivenCache(Cached):
    """The slots are an argument, which the forward fills."""

    def forward(self, x: Tensor, at: Tensor, slots: tuple[Tensor, Tensor] | None = None) -> Tensor:
        assert slots is not None
        self.keys, self.values = slots
        return super().forward(x, at)


class TwoInPlace(nn.Module):
    """Each layer adds its result to the argument in place: the next reads keys from what a projection changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grouped() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x += layer(x)
        return x


def test_a_given_cache_may_be_filled_and_a_given_input_may_not_be_changed() -> None:
    torch.manual_seed(0)
    slots = tuple(torch.zeros(B, KV_HEADS, SLOTS, HEAD_DIM) for _ in range(2))
    report = check(GivenCache(), torch.randn(B, N, WIDTH), torch.arange(N), slots)
    assert "inputs" in {passed.check for passed in report.passed}
    findings = check(TwoInPlace(), torch.randn(B, N, WIDTH)).findings
    assert "inputs" in {finding.check for finding in findings}


class LatentsKept(Whole):
    """Latents of earlier calls are joined to those of this one, and then keys and values are made of all."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.kept = torch.zeros(B, 0, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.cat((self.kept, self.down(x)), 1)
        q, k, v = self.split(self.q(x)), self.split(self.k(self.kept)), self.split(self.v(self.kept))
        future = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).triu(1)[-x.shape[1] :]
        weights = self.scores(q, k, 0).masked_fill(future, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_cached_latents_are_projected_with_the_new_ones() -> None:
    torch.manual_seed(0)
    report, _ = decoded(Subject(LatentsKept(), (torch.randn(B, N, WIDTH),), {}, seed=0, grad=False), Show(), 2)
    assert report.decode is not None
    assert report.decode.verdict == "same"
    formulas = {stage.name: stage.formula for stage in report.attentions[0].stages}
    assert formulas["k_proj"] == f"(cache ({N - 1}) + key, through 1 down-projection (1)) · W_kᵀ + b_k"
    assert formulas["k_heads"] == "k_proj in heads"


class WrittenBack(Whole):
    """A bias of pairs of positions that is added to a slice of the scores, which is written back over them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(HEADS, N, N))

    def scores(self, q: Tensor, k: Tensor, at: int) -> Tensor:
        scores = super().scores(q, k, at)
        inner = scores[:, :, 0:, 0:]
        scores[:, :, 0:, 0:] = (inner.flatten(2) + self.bias.flatten(1)).view_as(inner)
        return scores


def test_a_bias_that_is_written_back_is_no_mask() -> None:
    (attention,) = trace(WrittenBack(), torch.randn(B, N, WIDTH)).attentions
    assert (attention.bias, attention.masked_scores.formula) == (True, "scores + bias")

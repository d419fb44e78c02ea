"""What three projections become is called an attention where it is one, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.graph import written_out
from mha_inspect.graph.dataflow import Graph
from mha_inspect.graph.rerun import Constants
from mha_inspect.graph.whole import WholeAttention, whole_attention
from mha_inspect.running.subject import Subject

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 5, 3, 4
WIDTH = HEADS * HEAD_DIM
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


class Mixed(nn.Module):
    """Three projections, what is made of them head by head, and a fourth projection."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2) for side in (self.q, self.k, self.v))
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))


def measured(mix: Mix, batch: int = BATCH, tokens: int = TOKENS) -> WholeAttention | None:
    torch.manual_seed(0)
    run = Subject(Mixed(mix).eval(), (torch.randn(batch, tokens, WIDTH),), {}, grad=False).recorded()
    graph = Graph(run.recorded)
    last = next(op for op in reversed(graph.recording.ops) if graph.is_projection(op))
    context = graph.before_call(last, graph.projected(last))
    with torch.no_grad():
        return whole_attention(graph, context, Constants(graph, {}, kept=False))


def softmax_by_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No product: the average is summed key by key."""
    weights = ((q[..., :, None, :] * k[..., None, :, :]).sum(-1) * 0.3).softmax(-1)
    return sum(weights[..., key, None] * v[:, :, key, None] for key in range(k.shape[2]))


def in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: each query with the keys so far."""
    contexts = []
    for token in range(q.shape[2]):
        weights = (q[:, :, token : token + 1] @ k[:, :, : token + 1].mT * 0.3).softmax(-1)
        contexts.append(weights @ v[:, :, : token + 1])
    return torch.cat(contexts, 2)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 2), (3, 8)])
def test_an_attention_is_measured_at_any_size(batch: int, tokens: int) -> None:
    whole = measured(softmax_by_key, batch, tokens)
    assert whole is not None
    assert (whole.heads, whole.key_heads, whole.unit, whole.seen, whole.bias) == (HEADS, HEADS, False, None, None)
    assert whole.scale == pytest.approx(0.3)


@pytest.mark.parametrize("tokens", [3, 8])
def test_a_causal_loop_is_one_causal_attention(tokens: int) -> None:
    whole = measured(in_turn, tokens=tokens)
    assert whole is not None
    assert whole.scale == pytest.approx(0.3)
    assert whole.seen is not None
    assert torch.equal(whole.seen, torch.ones(tokens, tokens, dtype=torch.bool).tril())


def test_the_bias_is_that_of_the_formula() -> None:
    bias = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(7))

    def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = (q @ k.mT).exp() * bias.exp()
        return torch.stack([(e[:, h] @ v[:, h]) / e[:, h].sum(-1, keepdim=True) for h in range(HEADS)], 1)

    whole = measured(with_bias)
    assert whole is not None
    assert whole.bias is not None
    expected = bias.double() - bias.double().mean(-1, keepdim=True)
    torch.testing.assert_close(whole.bias, expected, rtol=1e-5, atol=1e-6)


NO_ATTENTION: dict[str, Mix] = {
    "gates": lambda q, k, v: torch.sigmoid(q) * k.tanh() * v,
    "relu": lambda q, k, v: (q @ k.mT).relu() @ v / TOKENS,
    "sigmoid, divided": lambda q, k, v: F.normalize(torch.sigmoid(q @ k.mT), p=1, dim=-1) @ v,
    "linear attention": lambda q, k, v: (F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v),
    "over features": lambda q, k, v: v @ (q.mT @ k).softmax(-1),
    "another temperature for each query": lambda q, k, v: (q @ k.mT * q.norm(dim=-1, keepdim=True)).softmax(-1) @ v,
    "the largest keys": lambda q, k, v: (
        (lambda s: s.masked_fill(s < s.amax(-1, keepdim=True) - 0.5, -1e9))(q @ k.mT).softmax(-1) @ v
    ),
    "weights twice": lambda q, k, v: (lambda w: w @ (w @ v))((q @ k.mT).softmax(-1)),
    "a bias of the values": lambda q, k, v: (q @ k.mT + v.sum(-1)[..., None, :]).softmax(-1) @ v,
    "distances": lambda q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v,
    "a residual": lambda q, k, v: (q @ k.mT).softmax(-1) @ v + v,
    "the last of the keys left out of the sum": lambda q, k, v: (lambda e: e @ v / e[..., :-1].sum(-1, keepdim=True))(
        (q @ k.mT).exp()
    ),
    "one query for all": lambda q, k, v: ((q[:, :, :1] @ k.mT).softmax(-1) @ v).expand_as(v),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_none_is_not_called_one(name: str) -> None:
    assert measured(NO_ATTENTION[name]) is None


@torch.no_grad()
def test_the_stages_that_are_written_out_have_the_numbers_of_the_run() -> None:
    torch.manual_seed(0)
    module, x = Mixed(in_turn).eval(), torch.randn(BATCH, TOKENS, WIDTH)
    trace = mha_inspect.trace(module, x, keep=True)
    (attention,) = trace.attentions
    stages = {stage.name: stage.tensor for stage in attention.stages}
    q, k, v = (
        side(x.double()).view(BATCH, TOKENS, HEADS, HEAD_DIM).transpose(1, 2)
        for side in (module.double().q, module.k, module.v)
    )
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 0.3).masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(stages["weights"].double(), weights, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stages["context"].double(), weights @ v, rtol=1e-4, atol=1e-6)
    assert (attention.kind, attention.num_heads, attention.head_dim) == (("self", "causal"), HEADS, HEAD_DIM)
    assert any("written in" in note for note in trace.notes)
    assert (trace.proof.agrees, trace.path.plain.partition(" ")[0]) == (True, "handwritten")
    assert trace.proof.max_abs_difference < 1e-6


def test_what_is_dropped_is_not_written_out() -> None:
    """In training the steps would have other numbers than the run."""

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(in_turn(q, k, v), 0.5)

    assert measured(dropped) is None
    assert measured(in_turn) is not None


@torch.no_grad()
def test_steps_with_other_numbers_than_the_run_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = Mixed(in_turn).eval(), torch.randn(BATCH, TOKENS, WIDTH)
    measure = written_out.whole_attention

    def with_another_scale(*args: Any) -> WholeAttention | None:
        whole = measure(*args)
        return None if whole is None else replace(whole, scale=whole.scale * 1.01)

    monkeypatch.setattr(written_out, "whole_attention", with_another_scale)
    run = Subject(module, (x,), {}, grad=False).recorded(keep=True)
    assert run.recording is run.recorded


def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads of queries and keys are folded into the batch for their distances, and those of values are not."""
    folded = (1.5 * side.flatten(0, 1) for side in (q, k))
    distances = torch.cdist(*folded).pow(2).view(*q.shape[:3], -1)
    return (-distances / HEAD_DIM**0.5).softmax(-1) @ v


def by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention of positive features of fixed directions, as Performer has it."""
    directions = torch.linspace(-1, 1, 10 * HEAD_DIM).cos().view(10, HEAD_DIM)
    q, k = (torch.einsum("...id,jd->...ij", side * HEAD_DIM**-0.25, directions) for side in (q, k))
    q, k = F.relu(q) + 1e-3, F.relu(k) + 1e-3
    share = 1 / torch.einsum("...nd,...d->...n", q, k.sum(-2))
    return torch.einsum("...de,...nd,...n->...ne", torch.einsum("...nd,...ne->...de", k, v), q, share)


def by_distance_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same distances from broadcast differences, summed key by key."""
    weights = -(q.flatten(0, 1)[:, :, None] - k.flatten(0, 1)[:, None]).pow(2).sum(-1)
    weights = weights.softmax(-1).view(*q.shape[:3], -1)
    return sum(weights[..., key, None] * v[:, :, key, None] for key in range(k.shape[2]))


def by_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys in the order of their lengths: a result that hangs on numbers in steps."""
    order = k.norm(dim=-1).argsort(-1)
    sorted_values = v.gather(2, order[..., None].expand_as(v))
    return (q.norm(dim=-1, keepdim=True) > 1) * sorted_values.cumsum(2)


@pytest.mark.parametrize("mix", [by_distance, by_features, by_distance_of_pairs, by_rank])
@pytest.mark.parametrize("sizes", [(3, 7), (1, 7), (3, 3), (1, 1)])
def test_what_a_measurement_did_not_expect_ends_no_trace(mix: Mix, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    trace = mha_inspect.trace(Mixed(mix).eval(), torch.randn(*sizes, WIDTH))
    assert trace.failure is None
    assert not [finding for finding in trace.findings if finding.sure]


def test_a_mistake_of_our_own_ends_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door of a measurement lets pass what is no matter of numbers and shapes."""

    def mistaken(*_: object) -> None:
        raise AttributeError("a wrong name")

    monkeypatch.setattr("mha_inspect.graph.whole._Measurement", mistaken)
    with pytest.raises(AttributeError, match="a wrong name"):
        mha_inspect.trace(Mixed(by_features).eval(), torch.randn(BATCH, TOKENS, WIDTH))

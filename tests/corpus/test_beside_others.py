"""Kinds of attention beside others: mixed by head, pooled afterwards, bent, or asked again and again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from .base import Base
from .claims import WIDTH, Nan
from .entry import D, E, H
from .every import ENTRIES
from .near import PoolAtABentTime, PoolAtATime
from .runs import Numbers, shown, traced
from .separate import Broadcast
from .weighing import Talking

B, N = 7, 11


def by_hand(module: Base, x: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Weights `batch heads query key` and context `batch heads query head_dim`, in float64."""
    width = module.q.out_features // H
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (H, width)).transpose(1, 2)
        for p in (module.q, module.k, module.v)
    )
    scores = q @ k.mT / math.sqrt(width)
    before, after = (m.double() for m in module.matrices()) if isinstance(module, Talking) else (None, None)
    if before is not None:
        scores = torch.einsum("gh,bhqk->bgqk", before, scores)
    if causal:
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    mixed = weights if after is None else torch.einsum("gh,bhqk->bgqk", after, weights)
    return weights, mixed @ v


@pytest.mark.parametrize("name", [name for name in ENTRIES if name.startswith("Talking")])
def test_matrices_mix_the_heads_of_scores_and_weights(name: str) -> None:
    ((attention, truth),), module = shown(name), ENTRIES[name].made().eval()
    numbers, (x,) = Numbers(attention, truth), ENTRIES[name].arguments()[0]
    with torch.no_grad():
        weights, context = by_hand(module, x, causal="causal" in truth.kind)
    torch.testing.assert_close(numbers.of("weights"), weights, rtol=2e-4, atol=2e-4)
    if not ENTRIES[name].training:
        torch.testing.assert_close(numbers.of("context"), context, rtol=2e-4, atol=2e-4)


def test_a_loop_over_queries_weighs_the_keys_so_far() -> None:
    """Each query is an attention of its own as long as the loop is not found to be one."""
    attentions = traced("OneQueryAtATime").attentions
    with torch.no_grad():
        weights, context = by_hand(ENTRIES["Base"].made(), ENTRIES["Base"].arguments()[0][0], causal=True)
    for t, attention in enumerate(attentions if len(attentions) > 1 else ()):
        stages = {stage.name: stage.tensor for stage in attention.stages}
        torch.testing.assert_close(stages["weights"].double(), weights[:, :, t : t + 1, : t + 1], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(stages["context"].double(), context[:, :, t : t + 1], rtol=2e-4, atol=2e-4)
    module = ENTRIES["OneQueryAtATime"].made()
    report = mha_inspect.diff(module, ENTRIES["OneQueryAtATime"].made(), *ENTRIES["Base"].arguments(2, 4)[0])
    assert (report.outcome, {stage.verdict for stage in report.stages}) == ("same", {"same"})


def test_a_fused_kernel_without_a_batch() -> None:
    (attention,) = mha_inspect.trace(ENTRIES["Fused"].made(), torch.randn(N, E)).attentions
    axes = {stage.name: stage.axes for stage in attention.stages}
    # torch 2.15 gives its fused kernel a batch of one.
    assert axes["scores"] in ("heads query key", "batch heads query key")
    assert (attention.num_heads, axes["output"]) == (H, "query embed")


class AttendThenPool(nn.Module):
    """A softmax over the positions of what a matrix makes of an attention's result: the matrix mixes no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.score = Broadcast(), nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        for y in (self.attend(x), x + self.attend(x), self.attend.attend(x[:, None], x[:, None], x[:, None])[:, 0]):
            pooled = self.score(y).softmax(1).mT @ y
        return pooled


def test_pooling_over_positions_is_no_attention_with_talking_heads() -> None:
    attentions = mha_inspect.trace(AttendThenPool(), torch.randn(B, N, E)).attentions
    shapes = [stage.shape[-2:] for attention in attentions for stage in attention.stages if stage.name == "scores"]
    assert shapes == [(N, N)] * 3
    assert not [note for attention in attentions for note in attention.notes]


class TwoValues(Base):
    """The same queries and keys, cut from their slots and repeated anew, for two values that lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(2 * H * D, E)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, contexts = nn.functional.pad(k[:, :1], (0, 0, 0, 2)), []
        for value in (v, v[:, :1].expand_as(v)):
            keys = slots[:, :, : k.shape[2]].expand_as(k).clone()
            contexts.append(nn.functional.scaled_dot_product_attention(q, keys, value))
        return torch.cat(contexts, -1)


def test_two_kernels_with_the_same_scores_are_no_loop_over_heads() -> None:
    attentions = mha_inspect.trace(TwoValues(), torch.randn(B, N, E)).attentions
    assert [attention.num_heads for attention in attentions] == [H, H]
    assert not [note for attention in attentions for note in attention.notes if "loop" in note]


class Retrieval(nn.Module):
    """A modern Hopfield network: the state of each step asks the same patterns, which are keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.patterns = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        state, patterns = self.state(x), self.patterns(x)
        for _ in range(3):
            state = (state @ patterns.mT / E**0.5).softmax(-1) @ patterns
        return state


def test_queries_that_are_averages_of_the_values_are_queries_where_the_first_are_given() -> None:
    assert len(mha_inspect.trace(Retrieval().eval(), torch.randn(B, N, E)).attentions) == 3


def test_a_bend_makes_the_difference() -> None:
    """With it the weights hang on what is added, and without it they do not: in float64."""
    torch.manual_seed(0)
    for module, hangs in ((PoolAtATime().eval(), False), (PoolAtABentTime().eval(), True)):
        x = torch.randn(B, N, E)
        assert bool(mha_inspect.trace(module, x).attentions) == hangs
        module.double()
        before = module.score(module.hidden(x.double())).softmax(1)
        with torch.no_grad():
            module.b.bias += 1
        apart = (module.score(module.hidden(x.double())).softmax(1) - before).abs().max()
        assert (float(apart) > 1e-6) == hangs


@pytest.mark.parametrize("of", ["forward", "input", "parameters"])
def test_the_place_where_nan_begins_is_said(of: str) -> None:
    module, x = Nan().eval(), torch.randn(2, 7, WIDTH)
    if of != "forward":
        x = x.abs()
    if of == "input":
        x[1, 2, 3] = torch.nan
    if of == "parameters":
        module.q.bias.data[4] = torch.nan
    begins = {"forward": "first appears in the stage query", "input": "so has the input", "parameters": "so have param"}
    assert begins[of] in " ".join(mha_inspect.trace(module, x).notes)


class Beside(nn.Module):
    """Two attentions by one function, side by side: which queries go to which keys is a row of a table."""

    def __init__(self, table: list[str]) -> None:
        super().__init__()
        self.table = table
        self.projections = nn.ModuleList(nn.Linear(E, D) for _ in range(3 * len(table)))
        self.o = nn.Linear(len(table) * D, E)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        given = {"x": first, "y": second}
        contexts = []
        for turn, (query, key) in enumerate(self.table):
            of_q, of_k, of_v = self.projections[3 * turn : 3 * turn + 3]
            scores = of_q(given[query]) @ of_k(given[key]).mT / math.sqrt(D)
            contexts.append(scores.softmax(-1) @ of_v(given[key]))
        return self.o(torch.cat(contexts, -1))


@pytest.mark.parametrize(
    ("table", "heads"),
    [
        (["xx", "xx"], [2]),
        (["xy", "xy"], [2]),
        (["xx", "xy"], [1, 1]),
        (["xx", "yy"], [1, 1]),
        (["xy", "yx"], [1, 1]),
        (["xx", "yx"], [1, 1]),
    ],
)
def test_heads_of_one_attention_read_the_same_queries_keys_and_values(table: list[str], heads: list[int]) -> None:
    given = [torch.randn(B, N, E, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    trace = mha_inspect.trace(Beside(table).eval(), *given)
    assert [attention.num_heads for attention in trace.attentions] == heads

"""Attention in a loop over queries, or over items of the batch, and loops that must stay several attentions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import check, diff, params, trace
from mha_inspect.answers.trace import traced
from mha_inspect.layers.spec import Show
from mha_inspect.naming.canonical import content_of
from mha_inspect.running.subject import Subject
from tests.corpus.test_parameters import cut

B, N, HEADS, HEAD_DIM = 4, 11, 3, 6
WIDTH = HEADS * HEAD_DIM


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.mT / HEAD_DIM**0.5
    return (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1) @ v


class Heads(nn.Module):
    """Projections around an attention of heads, `batch heads position head_dim`."""

    def __init__(self, of_heads: Callable[[Tensor, Tensor, Tensor], Tensor] = attend) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_heads = of_heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        context = self.of_heads(*(self.split(project(x)) for project in (self.q, self.k, self.v)))
        return self.o(context.transpose(1, 2).flatten(2))


class Projected(Heads):
    """Each piece of the queries is projected, and its result too."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.split(self.k(x)), self.split(self.v(x))
        pieces = (attend(self.split(self.q(piece)), k, v) for piece in x.split(4, 1))
        return torch.cat([self.o(piece.transpose(1, 2).flatten(2)) for piece in pieces], 1)


def future(start: int = 0, stop: int = N) -> Tensor:
    return torch.arange(N) > torch.arange(start, stop)[:, None]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    starts = range(0, N, 4)
    return torch.cat([attend(q[:, :, at : at + 4], k, v, future(at, min(at + 4, N))) for at in starts], 2)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result = torch.empty_like(q)
    for at in range(0, N, 4):
        result[:, :, at : at + 4] = F.scaled_dot_product_attention(q[:, :, at : at + 4], k, v)
    return result


def halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    result, mask = torch.empty_like(q), future()
    for at in (0, B // 2):
        half = slice(at, at + B // 2)
        result[half] = attend(q[half], k[half], v[half], mask)
    return result


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head of one item at a time, of heads that are folded into the batch, as attention slicing does."""
    q, k, v = (side.flatten(0, 1) for side in (q, k, v))
    result = torch.zeros(q.shape, dtype=q.dtype)
    for at in range(len(q)):
        item = slice(at, at + 1)
        result[item] = attend(q[item], k[item], v[item])
    return result.unflatten(0, (-1, HEADS))


WAYS = {causal: "query", in_place: "query", halves: "batch"}


def assert_heads_are_rows(module: Heads, x: Tensor) -> None:
    """Each head has its rows of W_q, W_k and W_v, and its columns of W_o."""
    rows = {row.name: row.heads for row in params(module, x, per_head=True).parameters}
    for letter in "qkv":
        weight = getattr(module, letter).weight
        assert all(map(torch.equal, (cut(weight, piece) for piece in rows[f"{letter}.weight"]), weight.split(HEAD_DIM)))
    columns = (cut(module.o.weight, piece) for piece in rows["o.weight"])
    assert all(map(torch.equal, columns, module.o.weight.split(HEAD_DIM, 1)))


def assert_stages_are_whole(stages: dict[str, Any]) -> None:
    """Shapes, axes and FLOPs are those of the attention and not of a piece."""
    assert (stages["scores"].shape, stages["scores"].axes) == ((B, HEADS, N, N), "batch heads query key")
    assert (stages["query"].axes, stages["output"].axes) == ("batch query embed",) * 2
    assert stages["scores"].flops == stages["context"].flops == 2 * B * HEADS * N * N * HEAD_DIM
    assert stages["q_proj"].flops == stages["output"].flops == 2 * B * N * WIDTH * WIDTH


@pytest.mark.parametrize("way", [*WAYS, None])
def test_pieces_are_one_attention(way: Callable[..., Tensor] | None) -> None:
    torch.manual_seed(0)
    module, x = (Projected() if way is None else Heads(way)).double().eval(), torch.randn(B, N, WIDTH).double()
    masked = future() if way in (causal, halves) else None
    q, k, v = (module.split(project(x)) for project in (module.q, module.k, module.v))
    scores = q @ k.mT / HEAD_DIM**0.5
    weights = (scores if masked is None else scores.masked_fill(masked, -torch.inf)).softmax(-1)
    report, run = traced(Subject(module, (x,), {}), Show(), keep=True)
    (shown,), ((attention, names),) = report.attentions, run.attentions
    assert (shown.kind, shown.num_heads) == (("self",) if masked is None else ("self", "causal"), HEADS)
    expected = {"q_heads": q, "k_heads": k, "v_heads": v, "scores": scores, "weights": weights, "context": weights @ v}
    for stage, value in expected.items():
        torch.testing.assert_close(content_of(run, attention, names, stage), value)
    assert_stages_are_whole({stage.name: stage for stage in shown.stages})
    assert any(f"pieces along {WAYS.get(way, 'query')}" in note for note in shown.notes)
    plain = Heads(lambda *heads: attend(*heads, masked)).double().eval()
    assert diff(module, plain, x, same_weights=True).outcome == "same"
    assert not check(module, x).findings
    assert_heads_are_rows(module, x)


def test_pieces_of_one_head_each_are_one_attention() -> None:
    module, x = Heads(folded).eval(), torch.randn(B, N, WIDTH)
    report, run = traced(Subject(module, (x,), {}), Show(), keep=True)
    (shown,), ((attention, names),) = report.attentions, run.attentions
    assert (shown.kind, shown.num_heads, shown.num_kv_heads) == (("self",), HEADS, HEADS)
    axes = {stage.name: stage.axes for stage in shown.stages}
    assert axes["k_heads"] == axes["v_heads"] == "(batch heads) key head_dim"
    assert (axes["concat"], axes["output"]) == ("batch query (heads head_dim)", "batch query embed")
    for side in "qkv":
        torch.testing.assert_close(
            content_of(run, attention, names, f"{side}_heads"), module.split(getattr(module, side)(x))
        )
    assert_heads_are_rows(module, x)
    assert not check(module, x).findings


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of equally many queries and keys, with the sums of Rabe and Staats."""
    results = []
    for queries in q.split(4, 2):
        scores = [queries @ keys.mT / HEAD_DIM**0.5 for keys in k.split(4, 2)]
        weights = [(part - part.amax(-1, keepdim=True)).exp() for part in scores]
        factors = torch.stack([part.amax(-1, keepdim=True) for part in scores])
        factors = (factors - factors.amax(0)).exp()
        sums = torch.stack([part.sum(-1, keepdim=True) for part in weights])
        values = torch.stack([part @ value for part, value in zip(weights, v.split(4, 2), strict=True)])
        results.append((values * factors).sum(0) / (sums * factors).sum(0))
    return torch.cat(results, 2)


def test_blocks_of_queries_and_keys_are_one_attention() -> None:
    """With 12 positions, queries and keys of a block are equal pieces of one axis."""
    torch.manual_seed(0)
    module, x = Heads(in_blocks).double().eval(), torch.randn(B, 12, WIDTH).double()
    q, k, v = (module.split(project(x)) for project in (module.q, module.k, module.v))
    _, run = traced(Subject(module, (x,), {}), Show(), keep=True)
    ((attention, names),) = run.attentions
    scores = q @ k.mT / HEAD_DIM**0.5
    expected = {"k_heads": k, "v_heads": v, "scores": scores, "context": scores.softmax(-1) @ v}
    for stage, value in expected.items():
        torch.testing.assert_close(content_of(run, attention, names, stage), value)


# -- loops over several attentions ------------------------------------------------------------------------------------


def in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries of a step are made of the result of the step before."""
    results = [attend(q[:, :, :4], k, v)]
    for at in (4, 8):
        results.append(attend(q[:, :, at : at + 4] + results[-1].mean(2, keepdim=True), k, v))
    return torch.cat(results, 2)


def test_queries_made_of_the_results_before_stay_several() -> None:
    torch.manual_seed(0)
    assert len(trace(Heads(in_turn).eval(), torch.randn(B, N, WIDTH)).attentions) == 3

"""Attention whose scores are no dot products: found and told right, against float64, and not where there is none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.errors import InputError
from tests.corpus.entry import D, E, H

from .truth import assert_close, attentions

B, N, M, A, V = 7, 11, 13, 19, 17
SAID = "The scores are additive, not dot products:"


class Additive(nn.Module):
    """Bahdanau's: `v · tanh(W q + U k)`, and a matrix for the values."""

    bend = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.score = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(E, V), nn.Linear(A, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score(torch.tanh(q[:, :, None] + k[:, None])).squeeze(-1)

    def mask(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.mask(self.scores(self.q(x), self.k(y))).softmax(-1) @ self.v(y)

    def by_hand(self, q: Tensor, k: Tensor) -> Tensor:
        """`batch query key`: one pair at a time, in float64."""
        pairs = [[self.of_pair(q[:, i], k[:, j]) for j in range(k.shape[1])] for i in range(q.shape[1])]
        return torch.stack([torch.stack(row, -1) for row in pairs], -2)

    def of_pair(self, q: Tensor, k: Tensor) -> Tensor:
        return (q + k).tanh() @ self.score.weight[0].double() + self.score.bias.double()


class Causal(Additive):
    def mask(self, scores: Tensor) -> Tensor:
        return scores + torch.full(scores.shape[-2:], -math.inf).triu(1)


class KeyFirst(Additive):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score((k[:, :, None] + q[:, None]).tanh()).squeeze(-1).mT


class SideBySide(Additive):
    """Luong's concat."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(2 * A, 23)
        self.score = nn.Linear(23, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n, m = q.shape[1], k.shape[1]
        pairs = torch.cat([q[:, :, None].expand(-1, -1, m, -1), k[:, None].expand(-1, n, -1, -1)], -1)
        return self.score(self.both(pairs).tanh()).squeeze(-1)

    def of_pair(self, q: Tensor, k: Tensor) -> Tensor:
        both = torch.cat([q, k], -1) @ self.both.weight.double().T + self.both.bias.double()
        return both.tanh() @ self.score.weight[0].double() + self.score.bias.double()


class Distance(Additive):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -((q[:, :, None] - k[:, None]) ** 2).sum(-1)

    def of_pair(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q - k).square().sum(-1)


MEETING = {SideBySide: "concatenated features", Distance: "a difference"}
FORMULAS = {
    KeyFirst: "W · tanh(k_heads + q_heads)",
    SideBySide: "W · tanh(W · [q_heads, k_heads])",
    Distance: "Σ pow(q_heads - k_heads)",
}


def projected(layer: nn.Linear, x: Tensor) -> Tensor:
    return x.double() @ layer.weight.double().T + layer.bias.double()


@pytest.mark.parametrize(
    ("style", "two"),
    [(Additive, True), (Causal, False), (KeyFirst, True), (SideBySide, False), (Distance, True)],
)
def test_additive_attention_is_one_with_its_stages(style: type[Additive], two: bool) -> None:
    torch.manual_seed(0)
    module, given = style().eval(), (torch.randn(B, N, E), *([torch.randn(B, M, E)] if two else []))
    (attention,) = attentions(module, *given)
    x, y = given[0], given[-1]
    q, k, v = (projected(layer, t) for layer, t in ((module.q, x), (module.k, y), (module.v, y)))
    scores = module.mask(module.by_hand(q, k).detach())
    assert (attention.names.num_heads, attention.names.num_kv_heads, attention.names.head_dim) == (1, 1, A)
    assert_close(attention.canonical("q_heads", "batch query head_dim"), q)
    assert_close(attention.canonical("k_heads", "batch key head_dim"), k)
    last = "masked_scores" if "masked_scores" in attention.found.stages else "scores"
    assert_close(attention.canonical(last, "batch query key"), scores)
    assert_close(attention.canonical("weights", "batch query key"), scores.softmax(-1))
    assert_close(attention.canonical("context", "batch query v_head_dim"), scores.softmax(-1) @ v)
    (told,) = mha_inspect.trace(module, *given).attentions
    assert told.kind == (("cross",) if two else ("self", "causal") if style is Causal else ("self",))
    assert math.isnan(told.scale)
    assert told.scores.formula == FORMULAS.get(style, "W · tanh(q_heads + k_heads)")
    assert f"{SAID} {MEETING.get(style, 'a sum')}" in told.notes[0]


class Located(nn.Module):
    """Tacotron 2: a term of the keys' locations, from earlier weights, is added before or after the keys."""

    def __init__(self, location_first: bool) -> None:
        super().__init__()
        self.location_first, self.q, self.k, self.score = (
            location_first,
            nn.Linear(E, A),
            nn.Linear(V, A),
            nn.Linear(A, 1),
        )
        self.locate, self.location = nn.Conv1d(2, 6, 5, padding=2, bias=False), nn.Linear(6, A, bias=False)

    def forward(self, step: Tensor, memory: Tensor, weights: Tensor) -> Tensor:
        k, location = self.k(memory), self.location(self.locate(weights).mT)
        terms = (location, k) if self.location_first else (k, location)
        scores = self.score((self.q(step)[:, None] + terms[0] + terms[1]).tanh()).squeeze(-1)
        return (scores.softmax(-1)[:, None] @ memory).squeeze(1)


@pytest.mark.parametrize("location_first", [True, False])
def test_keys_are_the_term_that_the_values_are_made_of(location_first: bool) -> None:
    torch.manual_seed(0)
    module, memory = Located(location_first), torch.randn(B, M, V)
    given = torch.randn(B, E), memory, torch.rand(B, 2, M)
    (attention,) = attentions(module, *given)
    assert_close(attention.canonical("k_heads", "batch key head_dim"), projected(module.k, memory))
    (told,) = mha_inspect.trace(module, *given).attentions
    assert told.scores.formula == "W · tanh(q_heads + k_heads + another term)"
    roles = {row.name: row.role for row in mha_inspect.params(module, *given).parameters}
    assert roles["k.weight"].startswith("W_k")
    assert {roles["locate.weight"], roles["location.weight"]} == {"used in the scores"}


def test_every_command_says_that_no_scale_is_due() -> None:
    torch.manual_seed(0)
    x = torch.randn(B, N, E)
    module = Additive().eval()
    reports = [
        mha_inspect.trace(module, x),
        mha_inspect.params(module, x),
        mha_inspect.check(module, x),
        mha_inspect.diff(module, Additive().eval(), x, same_weights=True),
    ]
    assert [str(report).count(SAID) for report in reports] == [1, 1, 1, 2]
    assert not reports[2].findings
    assert reports[3].outcome == "same"

    def heads(number: int) -> nn.Module:
        torch.manual_seed(0)
        return Heads(number).eval()

    compared = mha_inspect.compare_heads((1, 3), heads, x)
    assert str(compared).count(SAID) == 1


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(E, H * D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return ((q[:, :, :, None] + k[:, :, None]).tanh().sum(-1).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_a_declared_scale_is_not_missed() -> None:
    torch.manual_seed(0)
    intent = mha_inspect.Intent(scale="sqrt_head_dim")
    with pytest.raises(InputError, match="scale was declared and could not run: the scores are additive"):
        mha_inspect.check(Additive().eval(), torch.randn(B, N, E), intent=intent)

"""Loops over heads that differ, pieces that differ, and sums that do not belong to what they divide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import trace
from mha_inspect.answers.trace import traced
from mha_inspect.layers.spec import Show
from mha_inspect.naming.canonical import content_of
from mha_inspect.running.subject import Subject

from .test_pieces import HEAD_DIM, HEADS, WIDTH, B, Heads, N, future

SCALE = HEAD_DIM**-0.5


def found_in(module: nn.Module) -> list:
    torch.manual_seed(0)
    return list(trace(module.eval(), torch.randn(B, N, WIDTH)).attentions)


# -- heads in a loop --------------------------------------------------------------------------------------------------


def in_turn(weights_of: Callable[[int, Tensor], Tensor]) -> Heads:
    """Heads one after another, `batch query key` each, with weights that may depend on the number of the head."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = range(HEADS)
        return torch.stack([weights_of(at, q[:, at] @ k[:, at].mT * SCALE) @ v[:, at] for at in heads], 1)

    return Heads(attend)


def apart() -> Tensor:
    return (torch.arange(N)[:, None] - torch.arange(N)).abs()


UNLIKE = {
    "dim": lambda at, scores: scores.softmax(-2 if at == 1 else -1),
    "scale": lambda at, scores: (scores * (at + 1)).softmax(-1),
    "caps": lambda at, scores: ((5 + at) * torch.tanh(scores / (5 + at))).softmax(-1),
    "dropped": lambda at, scores: scores.softmax(-1).tril() if at == 2 else scores.softmax(-1),
    "bias": lambda at, scores: (
        scores + (apart() * 0.3 if at else torch.zeros(N, N).masked_fill(future(), -torch.inf))
    ).softmax(-1),
}


@pytest.mark.parametrize("weights_of", UNLIKE.values(), ids=UNLIKE)
def test_heads_that_differ_stay_several(weights_of: Callable[[int, Tensor], Tensor]) -> None:
    attentions = found_in(in_turn(weights_of))
    assert [attention.num_heads for attention in attentions] == [1] * HEADS


class Uneven(nn.Module):
    """Heads of 3, 3, 4 and 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(*(project(x).split((3, 3, 4, 8), -1) for project in (self.q, self.k, self.v)), strict=True)
        return self.o(torch.cat([(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v for q, k, v in parts], -1))


class EverySecondCausal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(*(project(x).chunk(HEADS, -1) for project in (self.q, self.k, self.v)), strict=True)
        heads = [F.scaled_dot_product_attention(*part, is_causal=at % 2 == 0) for at, part in enumerate(parts)]
        return self.o(torch.cat(heads, -1))


def test_heads_of_unequal_sizes_have_sizes_of_their_own() -> None:
    assert [attention.head_dim for attention in found_in(Uneven())] == [3, 3, 4, 8]


def test_a_mask_in_every_second_head_is_told_of_these() -> None:
    kinds = [attention.kind for attention in found_in(EverySecondCausal())]
    assert kinds == [("self", "causal"), ("self",), ("self", "causal")]


@pytest.mark.parametrize("kind", [Uneven, EverySecondCausal])
def test_stages_of_heads_that_differ_have_content(kind: type[nn.Module]) -> None:
    _, run = traced(Subject(kind().eval(), (torch.randn(B, N, WIDTH),), {}), Show(), keep=True)
    for attention, names in run.attentions:
        contents = {stage: content_of(run, attention, names, stage) for stage in attention.stages}
        assert all(contents[stage] is not None for stage in ("q_heads", "k_heads", "v_heads", "scores", "context"))


class OneHead(nn.Module):
    def __init__(self, scale: float, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEAD_DIM, bias=bias) for _ in range(3))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT * self.scale).softmax(-1) @ self.v(x)


class Modules(nn.Module):
    def __init__(self, scales: tuple[float, ...], biases: tuple[bool, ...]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead(*settings) for settings in zip(scales, biases, strict=True))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([head(x) for head in self.heads], -1))


def test_heads_that_are_modules_are_compared_too() -> None:
    same, unbiased = (SCALE,) * HEADS, (False,) * HEADS
    assert [attention.num_heads for attention in found_in(Modules(same, unbiased))] == [HEADS]
    assert [attention.num_heads for attention in found_in(Modules((SCALE, SCALE, 0.7), unbiased))] == [1] * HEADS
    assert [attention.num_heads for attention in found_in(Modules(same, (False, True, False)))] == [1] * HEADS


# -- pieces -----------------------------------------------------------------------------------------------------------


def online(
    scale: Callable[[int], float] = lambda _: SCALE,
    cap: Callable[[int, Tensor], Tensor] = lambda _, scores: scores,
    mask: Callable[[int, Tensor], Tensor] = lambda _, numbers: numbers,
    forget: str = "",
) -> Heads:
    """Flash attention over pieces of four keys, which may forget to rescale what came before."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top, total, result = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1]), torch.zeros_like(q)
        for at, (keys, values) in enumerate(zip(k.split(4, 2), v.split(4, 2), strict=True)):
            scores = cap(at, q @ keys.mT * scale(at))
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            numbers, factor = mask(at, (scores - new).exp()), (top - new).exp()
            total = (total if forget == "total" else total * factor) + numbers.sum(-1, keepdim=True)
            result = (result if forget == "result" else result * factor) + numbers @ values
            top = new
        return result / total

    return Heads(attend)


def test_one_piece_with_a_cap_is_not_told_by_the_others() -> None:
    assert not found_in(online(cap=lambda at, scores: 2 * torch.tanh(scores / 2) if at else scores))


def test_one_piece_of_the_queries_with_a_cap_stays_apart() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = [piece @ k.mT * SCALE for piece in q.split(4, 2)]
        capped = [torch.tanh(piece) if at == 1 else piece for at, piece in enumerate(scores)]
        return torch.cat([piece.softmax(-1) @ v for piece in capped], 2)

    assert len(found_in(Heads(attend))) == 3


# -- division after the product with the values -----------------------------------------------------------------------


def assert_sum_does_not_fit(module: nn.Module) -> None:
    torch.manual_seed(0)
    report = trace(module.eval(), torch.randn(B, N, WIDTH))
    (attention,) = report.attentions
    assert attention.context.formula.endswith(" / …")
    assert any("do not sum to 1" in note for note in attention.notes)
    assert not any("sum to 1" in note and "not sum" not in note for note in attention.notes)
    assert [finding.check for finding in report.findings if "do not sum to 1" in finding.sentence] == ["softmax"]


@pytest.mark.parametrize("forget", ["result", "total"])
def test_pieces_that_are_not_rescaled_are_no_softmax(forget: str) -> None:
    assert_sum_does_not_fit(online(forget=forget))


def late(change: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor] | None = None) -> Heads:
    """Exponentials that are changed, multiplied by the values, and divided by a sum: of the changed ones by default."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = (q @ k.mT * SCALE).exp()
        changed = change(numbers)
        return changed @ v / (changed.sum(-1, keepdim=True) if total is None else total(numbers))

    return Heads(attend)


def allowed() -> Tensor:
    return (~future()).float()


WRONG = {
    "masked numerator": late(lambda numbers: numbers * allowed(), lambda numbers: numbers.sum(-1, keepdim=True)),
    "sum over queries": late(lambda numbers: numbers, lambda numbers: numbers.sum(-2).unsqueeze(-1)),
    "half": late(lambda numbers: numbers * 0.5, lambda numbers: numbers.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("module", WRONG.values(), ids=WRONG)
def test_a_sum_that_does_not_fit_is_no_softmax(module: nn.Module) -> None:
    assert_sum_does_not_fit(module)


def test_exponentials_that_decay_have_a_bias() -> None:
    (attention,) = found_in(late(lambda numbers: numbers * 0.8 ** apart()))
    assert (attention.kind, attention.bias) == (("self",), True)

"""Kinds of attention in published libraries that are right, and that were accused, told as another kind or not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

H, D, N, B = 3, 4, 8, 2
E = H * D


class Plain(nn.Module):
    """Heads, scores and weights as in a textbook, kept in `seen`; what follows changes a step of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.seen: Tensor | None = None

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D)).transpose(-2, -3)

    def weigh(self, scores: Tensor) -> Tensor:
        self.seen = scores.softmax(-1)
        return self.seen

    def attend(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(y)), self.heads(self.v(y))
        return self.o((self.weigh(q @ k.mT / D**0.5) @ v).transpose(-2, -3).flatten(-2))


class SharedQueriesAndKeys(Plain):
    """Reformer's: a token's query is its key, so each token attends to itself only if there is no other."""

    def __init__(self) -> None:
        super().__init__()
        del self.k
        self.causal = True

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.heads(self.q(x)), self.heads(self.v(x))
        k = nn.functional.normalize(q, dim=-1)
        scores = (q @ k.mT / D**0.5).masked_fill(torch.eye(N, dtype=torch.bool), -5e4)
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), torch.finfo(q.dtype).min)
        return self.o((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


class AlongColumns(Plain):
    """A table of aligned sequences, `row column batch embed`: a row attends to the rows of its column."""

    def forward(self, table: Tensor) -> Tensor:
        return self.attend(table.movedim(0, 2), table.movedim(0, 2)).movedim(2, 0)


class ProjectedTwice(nn.Module):
    """YOLO's: projections before a module that has projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E, bias=False) for _ in range(3))
        self.ma = nn.MultiheadAttention(E, H, batch_first=True)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, self.seen = self.ma(self.q(x), self.k(x), self.v(x), average_attn_weights=False)
        return out + x


class PackedPictures(Plain):
    """NaViT's: pictures are packed into one sequence, and each is pooled by a query that sees its own patches."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Parameter(torch.randn(1, 2, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(self.pool).expand(len(x), -1, -1)), self.heads(self.k(x)), self.heads(self.v(x))
        outside = torch.tensor([[False] * 5 + [True] * 3, [True] * 5 + [False] * 3])
        weights = self.weigh((q @ k.mT / D**0.5).masked_fill(outside, float("-inf")))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def given(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape) for shape in shapes)


X = (B, N, E)
CASES: list[tuple[Any, tuple[tuple[int, ...], ...], str]] = [
    (SharedQueriesAndKeys, (X,), "self"),
    (AlongColumns, ((4, 5, B, E),), "self"),
    (ProjectedTwice, (X,), "self"),
    (PackedPictures, (X,), "cross"),
]


@pytest.mark.parametrize(("make", "shapes", "kind"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_it_is_told_and_not_accused(make: Any, shapes: tuple[tuple[int, ...], ...], kind: str) -> None:
    torch.manual_seed(0)
    module, inputs = make().eval(), given(*shapes)
    *_, attention = mha_inspect.trace(module, *inputs, keep=True).attentions
    assert attention.kind == (kind,)
    weights, truth = attention.weights.tensor.flatten(0, -3), module.seen.flatten(0, -3)
    order = torch.stack([(row - weights).abs().amax((1, 2)).argmin() for row in truth])
    torch.testing.assert_close(weights[order], truth)
    report = mha_inspect.check(module, *inputs)
    assert [finding.sentence for finding in report.findings if finding.sure] == []


class MaskAfterTheBend(Plain):
    """FLASH's and ReBased's: squares of scores, which a mask sets to zero afterwards."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask = mask

    def weigh(self, scores: Tensor) -> Tensor:
        self.seen = self.mask((scores**2).relu(), torch.ones(N, N, dtype=torch.bool).tril())
        return self.seen

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


@pytest.mark.parametrize(
    "mask",
    [
        lambda weights, past: weights.masked_fill_(~past, 0),
        lambda weights, past: weights * past,
        lambda weights, past: weights.tril(),
    ],
)
def test_weights_are_masked_after_the_bend(mask: Any) -> None:
    torch.manual_seed(0)
    module, (x,) = MaskAfterTheBend(mask).eval(), given(X)
    (attention,) = mha_inspect.trace(module, x, keep=True).attentions
    assert attention.kind == ("self", "causal")
    assert attention.weights.formula == "mask(relu(pow(scores)))"
    assert attention.notes == ("The weights come from the scores without a softmax.",)
    torch.testing.assert_close(attention.weights.tensor, module.seen)
    assert mha_inspect.check(module, x).ok


class MaybeCausalAttention(Plain):
    """Cosmos': causal in time and open in space; convolutions pad by repeating the first frame, here not at all."""

    def forward(self, x: Tensor, *, in_time: bool) -> Tensor:
        q, k, v = (self.heads(p(torch.cat([x[:, :1].repeat(1, 0, 1), x], 1))) for p in (self.q, self.k, self.v))
        scores = q @ k.mT / D**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf")) if in_time else scores
        return x + self.o((self.weigh(scores) @ v).transpose(1, 2).flatten(2))


class Video(nn.Module):
    """Frames of `(batch frames) embed height width`: space attends by frame, time across frames."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = MaybeCausalAttention(), MaybeCausalAttention()

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        shape = x.shape
        x = self.space(x.flatten(2).mT, in_time=False)
        x = x.unflatten(0, (-1, num_frames)).transpose(1, 2).flatten(0, 1)
        x = self.time(x, in_time=True).unflatten(0, (-1, shape[-1] * shape[-2])).transpose(1, 2).flatten(0, 1)
        return x.mT.reshape(shape)


def test_frames_in_the_batch_and_one_class_with_and_without_a_mask() -> None:
    torch.manual_seed(0)
    module, (x,) = Video().eval(), given((4, E, 2, 3))
    space, time = mha_inspect.trace(module, x, num_frames=4, keep=True).attentions
    assert (space.kind, time.kind) == (("self",), ("self", "causal"))
    torch.testing.assert_close(time.weights.tensor.flatten(0, 1), module.time.seen.flatten(0, 1))
    report = mha_inspect.check(module, x, num_frames=4)
    assert [finding.sentence for finding in report.findings if finding.sure] == []

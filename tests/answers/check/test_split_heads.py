"""Heads that are split in a wrong way are one finding, with the consequence that they really have."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport, Finding


class Split(nn.Module):
    """Attention whose heads are split by a function for each of query, key and value, on three lines."""

    def __init__(self, dim: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        """Return `batch heads seq head_dim`, or what is wrong."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k = self.split(self.k(x))
        v = self.split(self.v(x))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o(self.merge(weights @ v))


class Never(Split):
    """Heads that were never transposed: `batch seq heads head_dim`."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))

    def merge(self, y: Tensor) -> Tensor:
        return y.flatten(2)


class NeverButMerged(Never):
    """The same, merged as if they had been transposed."""

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(len(y), -1, y.shape[-1] * self.heads)


class NeverFused(Never):
    """The same in a fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x))
        k = self.split(self.k(x))
        v = self.split(self.v(x))
        return self.o(self.merge(nn.functional.scaled_dot_product_attention(q, k, v)))


class NeverPacked(nn.Module):
    """The same from one packed projection, by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).unbind(2)
        weights = (torch.einsum("bthd,btgd->bthg", q, k) / 8**0.5).softmax(-1)
        return self.o(torch.einsum("bthg,btgd->bthd", weights, v).flatten(2))


class ByView(Split):
    """A view straight to `batch heads seq head_dim`."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.heads, x.shape[1], -1)

    def merge(self, y: Tensor) -> Tensor:
        return y.reshape(len(y), y.shape[2], -1)


class ByViewOnThreeLines(ByView):
    """The same, each on its own line."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), self.heads, x.shape[1], -1)
        k = self.k(x).view(len(x), self.heads, x.shape[1], -1)
        v = self.v(x).view(len(x), self.heads, x.shape[1], -1)
        return self.o(self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v))


class QueryByView(Split):
    """Only the query is split by a view."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), self.heads, x.shape[1], -1)
        k, v = self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v))


def checked(module: nn.Module, *shape: int) -> CheckReport:
    return mha_inspect.check(module.eval(), torch.randn(*shape, generator=torch.Generator().manual_seed(0)))


def only(report: CheckReport) -> Finding:
    assert [finding.check for finding in report.findings] == ["heads"]
    return report.findings[0]


def sees(module: nn.Module, length: int) -> int:
    """Return how many tokens move the output of token 1 in front of the merge: counted with gradients."""
    seen: list[Tensor] = []
    x = torch.randn(1, length, 24, requires_grad=True)
    merge = module.merge  # type: ignore[operator]
    module.merge = lambda y: seen.append(y) or merge(y)  # type: ignore[func-returns-value,assignment]
    module(x)
    (gradient,) = torch.autograd.grad(seen[0][0, 1].sum(), x)
    return int((gradient[0] != 0).any(-1).sum())


@pytest.mark.parametrize("make", [Never, NeverButMerged, NeverFused, NeverPacked], ids=lambda make: make.__name__)
@pytest.mark.parametrize("shape", [(2, 7, 24), (1, 7, 24), (2, 3, 24)], ids=str)
def test_heads_that_were_never_transposed_attend_within_tokens(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    if make is not NeverPacked:
        assert sees(make(), shape[1]) == 1
    report = checked(make(), *shape)
    sentence = only(report).sentence
    assert "attention runs over the heads within each token, and no token attends to another" in sentence
    assert "few tokens" not in sentence
    assert not any(fact.name == "who sees whom" for fact in report.facts)
    trace = mha_inspect.trace(make(), torch.randn(*shape))
    (attention,) = trace.attentions
    assert attention.kind == ("self", "over the heads within each token")
    assert attention.num_heads == attention.num_kv_heads == 3
    assert any("no token attends to another" in finding.sentence for finding in trace.findings)


@pytest.mark.parametrize("length", [6, 9, 12])
def test_a_view_lets_each_head_see_the_tokens_that_are_counted(length: int) -> None:
    finding = only(checked(ByView(), 2, length, 24))
    assert finding.sentence.startswith("The heads of the query, key and value are split without transpose.")
    assert finding.sentence.endswith(f"each head sees only {sees(ByView(), length)} tokens.")
    assert only(checked(ByViewOnThreeLines(), 2, length, 24)).sentence == finding.sentence


def test_each_line_is_named() -> None:
    finding = only(checked(ByViewOnThreeLines(), 2, 9, 24))
    lines = [int(number) for number in re.findall(r"test_split_heads.py:(\d+)", f"{finding.source} {finding.evidence}")]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 2]


def test_a_view_of_as_many_tokens_as_heads_attends_within_tokens() -> None:
    assert sees(ByView(), 3) == 1
    assert "within each token" in only(checked(ByView(), 2, 3, 24)).sentence


def test_a_query_that_is_split_alone_lets_each_head_see_all_tokens() -> None:
    sentence = only(checked(QueryByView(), 2, 9, 24)).sentence
    assert "sees only" not in sentence
    assert sentence.endswith("the query at a position of a head is not of the token at this position.")


@pytest.mark.parametrize("shape", [(2, 7, 24), (2, 3, 24), (1, 1, 24), (3, 1, 24)], ids=str)
def test_right_heads_are_not_accused(shape: tuple[int, ...]) -> None:
    assert checked(Split(), *shape).ok
    (attention,) = mha_inspect.trace(Split(), torch.randn(*shape)).attentions
    assert attention.kind == ("self",)


class MergedByView(Split):
    """Heads that are merged without a transpose."""

    def merge(self, y: Tensor) -> Tensor:
        return y.reshape(len(y), y.shape[2], -1)


@pytest.mark.parametrize("tokens", [3, 5])
def test_one_run_shows_heads_that_are_merged_without_a_transpose(tokens: int) -> None:
    """Also with as many tokens as heads: a row is then one head of all tokens."""
    torch.manual_seed(0)
    trace = mha_inspect.trace(MergedByView().eval(), torch.randn(2, tokens, 24))
    (finding,) = trace.findings
    assert finding.sentence.startswith("The heads are merged in a wrong order")
    assert mha_inspect.trace(Split().eval(), torch.randn(2, tokens, 24)).findings == ()

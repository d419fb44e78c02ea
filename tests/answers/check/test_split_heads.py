"""Heads that are split in a wrong way are one finding, with the consequence that they really have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport, Finding

from ...corpus.planted import D, E, H, Right, fused


class Never(Right):
    """Heads that were never transposed: `batch seq heads head_dim`."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(2)


class NeverFused(Never):
    """The same in a fused kernel."""

    def __init__(self) -> None:
        super().__init__(**fused())


class MergedByView(Right):
    """Heads that are merged without a transpose."""

    def join(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, E)


class ByView(MergedByView):
    """A view straight to `batch heads seq head_dim`."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), H, x.shape[1], D)


class QueryByView(Right):
    """Only the query is split by a view."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, k, v = super().heads(x)
        return self.q(x).view(len(x), H, x.shape[1], D), k, v


def checked(module: nn.Module, batch: int, length: int) -> CheckReport:
    x = torch.randn(batch, length, E, generator=torch.Generator().manual_seed(0))
    return mha_inspect.check(module.eval(), x)


def only(report: CheckReport) -> Finding:
    assert [finding.check for finding in report.findings] == ["heads"]
    return report.findings[0]


def sees(module: Right, length: int) -> int:
    """Return how many tokens move the output of token 1 in front of the merge: counted with gradients."""
    x = torch.randn(1, length, E, requires_grad=True)
    context = module.attend(*module.heads(x))
    (gradient,) = torch.autograd.grad(context[0, 1].sum(), x)
    return int((gradient[0] != 0).any(-1).sum())


@pytest.mark.parametrize(("kind", "batch", "length"), [(Never, 1, 7), (NeverFused, 2, H)])
def test_heads_that_were_never_transposed_attend_within_tokens(kind: type[Never], batch: int, length: int) -> None:
    module = kind()
    assert sees(module, length) == 1
    report = checked(module, batch, length)
    sentence = only(report).sentence
    assert "attention runs over the heads within each token, and no token attends to another" in sentence
    assert "few tokens" not in sentence
    assert "who sees whom" not in {fact.name for fact in report.facts}
    trace = mha_inspect.trace(module, torch.randn(batch, length, E))
    (attention,) = trace.attentions
    assert attention.kind == ("self", "over the heads within each token")
    assert attention.num_heads == attention.num_kv_heads == H
    assert any("no token attends to another" in finding.sentence for finding in trace.findings)


@pytest.mark.parametrize("length", [8, 12])
def test_a_view_lets_each_head_see_the_tokens_that_are_counted(length: int) -> None:
    sentence = only(checked(ByView(), 2, length)).sentence
    assert sentence.startswith("The heads of the query, key and value are split without transpose.")
    assert sentence.endswith(f"each head sees only {sees(ByView(), length)} tokens.")


def test_a_query_that_is_split_alone_lets_each_head_see_all_tokens() -> None:
    sentence = only(checked(QueryByView(), 2, 9)).sentence
    assert "sees only" not in sentence
    assert sentence.endswith("the query at a position of a head is not of the token at this position.")


@pytest.mark.parametrize(("batch", "length"), [(2, H), (3, 1)])
def test_right_heads_are_not_accused(batch: int, length: int) -> None:
    assert checked(Right(), batch, length).ok
    (attention,) = mha_inspect.trace(Right(), torch.randn(batch, length, E)).attentions
    assert attention.kind == ("self",)


@pytest.mark.parametrize("tokens", [H, 5])
def test_one_run_shows_heads_that_are_merged_without_a_transpose(tokens: int) -> None:
    """Also with as many tokens as heads: a row is then one head of all tokens."""
    trace = mha_inspect.trace(MergedByView().eval(), torch.randn(2, tokens, E))
    (finding,) = trace.findings
    assert finding.sentence.startswith("The heads are merged in a wrong order")
    assert mha_inspect.trace(Right().eval(), torch.randn(2, tokens, E)).findings == ()

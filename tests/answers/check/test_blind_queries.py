"""Queries that see no key: their rows are left out, their heads are named, and gradients of NaN are told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport

from ...corpus.planted import B, E, H, N, Right


def fact(report: CheckReport, name: str = "who sees whom") -> str:
    return " ".join(fact.sentence for fact in report.facts if fact.name == name)


def findings(report: CheckReport, check: str) -> list[str]:
    return [f"{finding.sentence} {finding.evidence}" for finding in report.findings if finding.check == check]


def passes(report: CheckReport) -> bool:
    return "parameters" in {passed.check for passed in report.passed}


class Scored(nn.Module):
    """torch's layer under any mask, a score for each token, and only the scores of real tokens."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mha, self.score = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 1)
        self.mask = mask

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        y = self.mha(x, x, x, key_padding_mask=pad, attn_mask=self.mask)[0]
        return self.score(y)[..., 0][~pad]


class Blind(Right):
    """Attention by hand; `finish` says how it is masked, and whether NaN in the weights is replaced."""

    def __init__(self, hidden: Tensor, finish: str = "") -> None:
        super().__init__()
        self.hidden, self.finish = hidden, finish

    def mask(self, scores: Tensor) -> Tensor:
        if self.finish == "added":
            return scores + torch.zeros(self.hidden.shape).masked_fill(self.hidden, -math.inf)
        return scores.masked_fill(self.hidden, -1e9 if self.finish == "finite" else -math.inf)

    def weigh(self, scores: Tensor) -> Tensor:
        weights = super().weigh(scores)
        return weights.nan_to_num(0.0) if self.finish in ("zeros", "added") else weights


def hiding(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bool)


def third_query() -> Tensor:
    mask = hiding(N, N)
    mask[2] = True
    return mask


def nan_gradients(module: nn.Module, *given: Tensor) -> set[str]:
    """Return the parameters with NaN gradients of the sum of the output."""
    module.eval()
    module(*given).sum().backward()
    names = set()
    for name, weight in module.named_parameters():
        if weight.grad is not None and weight.grad.isnan().any():
            names.add(name)
    module.zero_grad()
    return names


PAD = hiding(2, 6)
PAD[0, 4:] = True


def test_rows_of_nan_are_left_out_and_not_the_mask() -> None:
    x = torch.randn(2, 6, 16)
    module = Scored(torch.ones(6, 6, dtype=torch.bool).tril(-1))
    report = mha_inspect.check(module.eval(), x, PAD)
    assert fact(report).startswith("causal, reversed: each query sees itself and later tokens")
    wrong = nan_gradients(module, x, PAD)
    assert {"mha.in_proj_weight", "mha.out_proj.weight"} <= wrong
    (said,) = findings(report, "parameters")
    assert {name for name, _ in module.named_parameters() if f"{name}," in said.replace(" get", ",")} <= wrong
    assert "NaN gradients, although the output is finite" in said
    assert "every key masked out" in said
    assert "Backward" in said
    assert not passes(report)


def test_a_right_mask_with_the_same_padding_is_not_accused() -> None:
    x, module = torch.randn(2, 6, 16), Scored(torch.ones(6, 6, dtype=torch.bool).triu(1))
    report = mha_inspect.check(module.eval(), x, PAD)
    assert nan_gradients(module, x, PAD) == set()
    assert report.ok
    assert passes(report)


@pytest.mark.parametrize("finish", ["zeros", "added", "finite"])
def test_gradients_of_replaced_weights(finish: str) -> None:
    x, module = torch.randn(B, N, E), Blind(third_query(), finish)
    report = mha_inspect.check(module.eval(), x)
    is_wrong = bool(nan_gradients(module, x))
    assert is_wrong == (finish == "added")  # masked_fill gives what it filled a gradient of 0
    assert bool(findings(report, "parameters")) == is_wrong
    assert passes(report) != is_wrong


class Norm(nn.Module):
    """Attention of features that are divided by their length: at 0, its derivative is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(12, 36, bias=False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q / (q.square().sum(-1, keepdim=True).sqrt() + 1e-6)
        return self.o((q @ k.mT / 12**0.5).softmax(-1) @ v)


def test_other_gradients_of_nan_are_told_with_the_function_that_gives_them() -> None:
    x = torch.randn(2, 5, 12)
    x[0, 3] = 0.0
    assert nan_gradients(Norm(), x) == {"qkv.weight"}
    (said,) = findings(mha_inspect.check(Norm().eval(), x), "parameters")
    assert said.startswith("qkv.weight gets NaN gradients, although the output is finite.")
    assert "every key masked out" not in said
    assert "Backward0" in said


@pytest.mark.parametrize(
    ("blind", "names", "sees"), [((2,), "head 2", "sees"), ((0, 1), "heads 0 and 1", "see")], ids=str
)
def test_the_heads_that_see_no_key_are_named(blind: tuple[int, ...], names: str, sees: str) -> None:
    mask = hiding(H, N, N)
    mask[list(blind)] = True
    x, layer = torch.randn(1, N, E), nn.MultiheadAttention(E, H, batch_first=True).eval()
    report = mha_inspect.check(layer, x, x, x, attn_mask=mask)
    assert fact(report) == f"{names} {sees} no key; in the other heads, every query sees every key"
    assert f"every key masked out in {names};" in findings(report, "finite")[0]
    assert not passes(report)
    said = f"{N} queries have every key masked out in {names} (first: query 0 of batch item 0)"
    assert said in " ".join(mha_inspect.trace(layer, x, x, x, attn_mask=mask).notes)


def test_queries_that_are_blind_in_some_heads_or_in_all() -> None:
    x, mask = torch.randn(2, N, E), hiding(H, N, N)
    mask[0, 1], mask[2, 3] = True, True
    notes = " ".join(mha_inspect.trace(Blind(mask).eval(), x).notes)
    assert "4 queries have every key masked out in at least one head (first: query 1 of batch item 0)" in notes
    notes = " ".join(mha_inspect.trace(Blind(third_query()).eval(), x).notes)
    assert "2 queries have every key masked out (first: query 2 of batch item 0)" in notes
    mask[0, 1], mask[2, 3], mask[1] = False, False, torch.ones(N, N, dtype=torch.bool).triu(1)
    seen = fact(mha_inspect.check(Blind(mask).eval(), x))
    assert seen == "every query sees every key, in at least one head: the masks of the heads differ"

"""Queries that see no key: their rows are left out, their heads are named, and gradients of NaN are told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport


def fact(report: CheckReport, name: str = "who sees whom") -> str:
    return " ".join(each.sentence for each in report.facts if each.name == name)


def findings(report: CheckReport, check: str) -> list[str]:
    return [f"{each.sentence} {each.evidence}" for each in report.findings if each.check == check]


class Scored(nn.Module):
    """torch's layer under any mask, a score for each token, and only the scores of real tokens."""

    def __init__(self, mask: Tensor, heads: int = 4) -> None:
        super().__init__()
        self.mha, self.score = nn.MultiheadAttention(16, heads, batch_first=True), nn.Linear(16, 1)
        self.mask = mask

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        y = self.mha(x, x, x, key_padding_mask=pad, attn_mask=self.mask)[0]
        return self.score(y)[..., 0][~pad]


class Own(nn.Module):
    """Attention by hand; `finish` says how it is masked, and whether NaN in the weights is replaced."""

    def __init__(self, mask: Tensor, finish: str = "") -> None:
        super().__init__()
        self.qkv, self.o, self.mask, self.finish = nn.Linear(12, 36), nn.Linear(12, 12), mask, finish

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        low = -1e9 if self.finish == "finite" else -math.inf
        scores = q @ k.mT / 2
        added = torch.zeros(self.mask.shape).masked_fill(self.mask, low)
        scores = scores + added if self.finish == "added" else scores.masked_fill(self.mask, low)
        weights = scores.softmax(-1)
        weights = weights.nan_to_num(0.0) if self.finish in ("zeros", "added") else weights
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def nan_gradients(module: nn.Module, *given: Tensor) -> set[str]:
    """Return the parameters with NaN gradients of the sum of the output."""
    module.eval()
    module(*given).sum().backward()
    names = {
        name for name, weight in module.named_parameters() if weight.grad is not None and weight.grad.isnan().any()
    }
    module.zero_grad()
    return names


PAD = torch.zeros(2, 6, dtype=torch.bool)
PAD[0, 4:] = True


def test_rows_of_nan_are_left_out_and_not_the_mask() -> None:
    x = torch.randn(2, 6, 16)
    module = Scored(torch.ones(6, 6, dtype=torch.bool).tril(-1))
    report = mha_inspect.check(module.eval(), x, PAD)
    assert fact(report) == "causal, reversed: each query sees itself and later tokens"
    wrong = nan_gradients(module, x, PAD)
    assert {"mha.in_proj_weight", "mha.out_proj.weight"} <= wrong
    (said,) = findings(report, "parameters")
    assert {name for name, _ in module.named_parameters() if f"{name}," in f"{said.replace(' get', ',')}"} <= wrong
    assert "NaN gradients, although the output is finite" in said
    assert "every key masked out" in said
    assert "Backward" in said
    assert not any(each.check == "parameters" for each in report.held)


def test_a_right_mask_with_the_same_padding_is_not_accused() -> None:
    x, module = torch.randn(2, 6, 16), Scored(torch.ones(6, 6, dtype=torch.bool).triu(1))
    report = mha_inspect.check(module.eval(), x, PAD)
    assert nan_gradients(module, x, PAD) == set()
    assert report.ok
    assert any(each.check == "parameters" for each in report.held)


@pytest.mark.parametrize("finish", ["zeros", "added", "finite"])
def test_gradients_of_replaced_weights(finish: str) -> None:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    x, module = torch.randn(2, 5, 12), Own(mask, finish)
    report = mha_inspect.check(module.eval(), x)
    wrong = nan_gradients(module, x)
    assert bool(wrong) == (finish == "added")  # masked_fill gives what it filled a gradient of 0
    assert bool(findings(report, "parameters")) == bool(wrong)
    assert any(each.check == "parameters" for each in report.held) == (not wrong)


def test_gradients_of_an_output_with_nan_are_not_judged() -> None:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    report = mha_inspect.check(Own(mask).eval(), torch.randn(2, 5, 12))
    assert [finding.check for finding in report.findings] == ["finite"]
    assert not any(each.check == "parameters" for each in report.held)


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


@pytest.mark.parametrize("blind", [(2,), (0, 1), (0,)], ids=str)
@pytest.mark.parametrize("make", ["torch", "own"])
def test_the_heads_that_see_no_key_are_named(make: str, blind: tuple[int, ...]) -> None:
    mask = torch.zeros(3, 1, 1, dtype=torch.bool)
    mask[list(blind)] = True
    mask = mask.expand(3, 5, 5)
    x = torch.randn(1, 5, 12)
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    call = (layer, x, x, x) if make == "torch" else (Own(mask).eval(), x)
    given = {"attn_mask": mask} if make == "torch" else {}
    report = mha_inspect.check(*call, **given)
    names = f"head {blind[0]}" if len(blind) == 1 else f"heads {blind[0]} and {blind[1]}"
    sees = "sees" if len(blind) == 1 else "see"
    assert fact(report) == f"{names} {sees} no key; in the other heads, every query sees every key"
    assert f"every key masked out in {names};" in findings(report, "finite")[0]
    assert not any(each.check == "parameters" for each in report.held)
    notes = " ".join(mha_inspect.trace(*call, **given).notes)
    assert f"5 queries have every key masked out in {names} (first: query 0 of batch item 0)" in notes


def test_heads_with_different_masks_are_not_told_as_one() -> None:
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[1] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    report = mha_inspect.check(Own(mask).eval(), torch.randn(2, 5, 12))
    assert fact(report) == "every query sees every key, in at least one head: the masks of the heads differ"


def test_queries_that_are_blind_in_different_heads() -> None:
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[0, 1], mask[2, 3] = True, True
    x = torch.randn(2, 5, 12)
    notes = " ".join(mha_inspect.trace(Own(mask).eval(), x).notes)
    assert "4 queries have every key masked out in at least one head (first: query 1 of batch item 0)" in notes


def test_nothing_is_added_where_every_head_is_blind() -> None:
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    notes = " ".join(mha_inspect.trace(Own(mask).eval(), torch.randn(2, 5, 12)).notes)
    assert "2 queries have every key masked out (first: query 2 of batch item 0)" in notes

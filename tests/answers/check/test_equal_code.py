"""Attentions with equal code are judged once, and the verdict does not depend on which layer is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.check.alike import kinds_of
from mha_inspect.answers.trace import traced
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import Finding
from mha_inspect.running.subject import Subject

E, H, N = 16, 4, 7
TRIANGLE = torch.ones(N, N).triu(1).bool()


class Layer(nn.Module):
    """Attention of a block; the options are right or wrong, on the same lines."""

    def __init__(
        self,
        dim: int = -1,
        mask: Tensor | None = None,
        query_offset: int | None = None,
        fill: float = -torch.inf,
    ) -> None:
        super().__init__()
        self.dim, self.query_offset, self.fill = dim, query_offset, fill
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.norm, self.scale = nn.LayerNorm(E), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mask", mask)

    def turned(self, x: Tensor, offset: int) -> Tensor:
        angles = (torch.arange(x.shape[-2])[:, None] + offset) * 100.0 ** (-torch.arange(0, 4, 2) / 4)
        angles = torch.cat([angles, angles], -1)
        halves = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return x * angles.cos() + halves * angles.sin()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        q, k, v = (linear(y).unflatten(-1, (H, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.query_offset is not None:
            q, k = self.turned(q, self.query_offset), self.turned(k, 0)
        scores = q @ k.mT * self.scale
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, self.fill)
        if bias is not None:
            scores = scores + bias
        return x + self.o((scores.softmax(self.dim) @ v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """Layers in a row, which share a bias that is computed once."""

    def __init__(self, *layers: Layer, biased: bool = False) -> None:
        super().__init__()
        self.layers, self.biased = nn.ModuleList(layers), biased

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        if self.biased:
            bias = -(torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]).abs().float()
        for layer in self.layers:
            x = layer(x, bias)
        return x


def findings_of(module: nn.Module) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    return mha_inspect.trace(module.eval(), torch.randn(2, N, E)).findings


def right() -> Layer:
    return Layer()


def over_queries() -> Layer:
    return Layer(dim=-2)


def rotary() -> Layer:
    return Layer(query_offset=0)


def rotary_offset() -> Layer:
    return Layer(query_offset=1)


def masked() -> Layer:
    return Layer(mask=TRIANGLE.clone())


def masked_throughout() -> Layer:
    return Layer(mask=torch.ones(N, N).bool(), fill=-1e9)


def weakly_masked() -> Layer:
    return Layer(mask=TRIANGLE.clone(), fill=1e-9)


@pytest.mark.parametrize(
    ("good", "bad", "begins"),
    [
        (right, over_queries, "The softmax runs over the queries"),
        (rotary, rotary_offset, "The query and key of one token are rotated by different positions"),
        (masked, weakly_masked, "The mask fills in 1e-09"),
        (masked, masked_throughout, "The mask masks out every key"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 4])
def test_the_verdict_does_not_depend_on_which_layer_is_wrong(
    good: Callable[[], Layer], bad: Callable[[], Layer], begins: str, place: int
) -> None:
    layers = [good() for _ in range(5)]
    layers[place] = bad()
    (finding,) = findings_of(Stack(*layers))
    assert finding.sentence.startswith(begins)
    assert finding.module == f"layers.{place}"
    assert "attentions share" not in finding.evidence


def test_layers_with_the_same_fault_are_counted() -> None:
    (finding,) = findings_of(Stack(over_queries(), right(), over_queries(), over_queries()))
    assert finding.evidence.endswith(" 3 attentions share this code.")


def test_a_fault_of_layers_with_other_code_is_one_finding() -> None:
    layers = [Layer(dim=-2, mask=torch.ones(N, N).triu(diagonal).bool()) for diagonal in (2, 3)]
    findings = [each for each in findings_of(Stack(*layers)) if each.check == "softmax"]
    assert [each.evidence.endswith(" 2 attentions have this fault.") for each in findings] == [True]


@pytest.mark.parametrize("make", [right, rotary, masked])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_equal_layers_are_judged_once(make: Callable[[], Layer], biased: bool, count: int) -> None:
    subject = Subject(Stack(*(make() for _ in range(count)), biased=biased).eval(), (torch.randn(2, N, E),), {})
    _, run = traced(subject, Show(), keep=True)
    leaves = subject.leaves(run.recording)
    kinds = kinds_of(run, lambda tensor: run.recording.values.get(tensor.id, leaves.get(tensor.id)))
    assert [number for *_, number in kinds] == [count]

"""One of equal layers that is scaled, masked or rotated otherwise is suspected; what is declared or repeats is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check
from mha_inspect.reports.check import Finding

from ...corpus.planted import D, E, Right

N, LAYERS = 9, 4


class Layer(Right):
    """A causal attention with rotations, which its number in a stack and a fault make unlike the others."""

    def __init__(self, number: int, fault: str = "") -> None:
        super().__init__()
        self.number, self.fault = number, fault
        if fault == "declared window":
            self.is_local = number == 2

    def scale(self) -> float:
        is_unscaled = (self.fault == "no scale" and self.number == 2) or (
            self.fault == "half not scaled" and self.number > 1
        )
        if is_unscaled:
            return 1.0
        return 1 / math.sqrt(D) / (self.number + 1 if self.fault == "inverse number" else 1)

    def hidden(self) -> Tensor:
        rows, keys = torch.arange(N)[:, None], torch.arange(N)
        is_local = (self.fault in ("window", "declared window") and self.number == 2) or (
            self.fault == "alternates" and self.number % 2 == 1
        )
        late = int(self.fault == "sees the future" and self.number == 2)
        return (keys > rows + late) | (is_local & (rows - keys > 3))

    def turned(self, x: Tensor) -> Tensor:
        base = 50.0 if self.fault == "base" and self.number == 2 else 100.0
        angles = torch.outer(torch.arange(N).float(), base ** (-torch.arange(D // 2) / (D // 2)))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.turned(q) @ self.turned(k).mT * self.scale()
        return scores.masked_fill(self.hidden(), -torch.inf).softmax(-1) @ v

    def leave(self, x: Tensor) -> Tensor:
        return x + self.o(x)


def stack(fault: str, layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(*(Layer(number, fault) for number in range(layers)))


def findings(module: nn.Module) -> tuple[Finding, ...]:
    return check(module, torch.randn(2, N, E, generator=torch.Generator().manual_seed(0))).findings


EXPECTED = {
    "no scale": ("scale", "2 is scaled by 1, the others by 0.408: 1 of 4 equal layers."),
    "half not scaled": ("scale", "2, 3 are scaled by 1, the others by 0.408: 2 of 4 equal layers."),
    "window": ("masking", "2 is masked differently: "),
    "sees the future": ("masking", "2 is masked differently: "),
    "base": ("rotary", "2 is rotated by "),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_layer_unlike_its_equals_is_suspected(fault: str) -> None:
    name, said = EXPECTED[fault]
    suspicions = [finding for finding in findings(stack(fault)) if finding.check == name]
    assert [said in finding.sentence for finding in suspicions].count(True) == 1, suspicions
    assert not any(finding.sure for finding in suspicions)


@pytest.mark.parametrize(
    ("fault", "layers"),
    [("", LAYERS), ("", 2), ("declared window", LAYERS), ("alternates", LAYERS), ("inverse number", LAYERS)],
)
def test_layers_that_are_equal_or_differ_on_purpose_are_not(fault: str, layers: int) -> None:
    assert not findings(stack(fault, layers))


def test_a_model_that_declares_unequal_layers_is_not_suspected() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=40, hidden_size=32, num_layers=3, num_heads=4, attention_types=[[["global"], 2], [["local"], 1]]
    )
    config.window_size = 4
    report = check(transformers.GPTNeoModel(config).eval(), torch.randint(3, 40, (2, 12)))
    assert not [finding for finding in report.findings if "equal layers" in finding.sentence]


class Masked(Right):
    """An attention that adds the mask that it is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.given = mask
        return x + super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.given


class Model(nn.Module):
    """The model says which layers are local, and the layers do not."""

    def __init__(self, kinds: str, *, says: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in kinds)
        self.says = says
        future = torch.full((N, N), -math.inf).triu(1)
        self.masks = {"l": future + torch.full((N, N), -math.inf).tril(-3), "g": future}
        self.order = {"all": kinds}

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.order["all"], self.layers, strict=True):
            x = layer(x, self.masks[kind])
        return x


@pytest.mark.parametrize("says", ["lllg", ["l", "l", "l", "g"], (3,), {3}])
def test_a_list_of_the_model_says_which_layers_differ(says: object) -> None:
    assert not findings(Model("lllg", says=says))


@pytest.mark.parametrize("says", [None, "glll", [0]])
def test_a_list_that_says_otherwise_excuses_nothing(says: object) -> None:
    (finding,) = findings(Model("lllg", says=says))
    assert finding.sentence.startswith("layers.3 is masked differently")


class Normed(Right):
    """Queries and keys are normalized, which need no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.norm(q) @ self.norm(k).mT).softmax(-1) @ v


def test_layers_with_a_norm_are_not_equal_to_layers_without() -> None:
    assert not findings(nn.Sequential(Right(), Right(), Right(), Normed()))

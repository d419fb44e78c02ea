"""One of equal layers that is scaled, masked or rotated otherwise is suspected; what is declared or repeats is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check
from mha_inspect.reports.check import Finding

WIDTH, H, D, N, LAYERS = 32, 4, 8, 9, 4


class Attention(nn.Module):
    """A causal attention; a stack gives each layer its number."""

    def __init__(self, number: int, fault: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.number, self.fault = number, fault
        if fault == "declared window":
            self.is_local = number == 2

    def scale(self) -> float:
        if self.fault == "no scale" and self.number == 2:
            return 1.0
        if self.fault == "half not scaled" and self.number > 1:
            return 1.0
        by_number = self.fault == "inverse number"
        return 1 / math.sqrt(D) / (self.number + 1 if by_number else 1)

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

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.turned(q) @ self.turned(k).mT * self.scale()
        weights = scores.masked_fill(self.hidden(), -torch.inf).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, fault: str = "", layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(number, fault) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def findings(module: nn.Module) -> tuple[Finding, ...]:
    return check(module, torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(0))).findings


EXPECTED = {
    "no scale": ("scale", "layers.2 is scaled by 1, the others by 0.354: 1 of 4 equal layers."),
    "half not scaled": ("scale", "layers.2, layers.3 are scaled by 1, the others by 0.354: 2 of 4 equal layers."),
    "window": ("masking", "layers.2 is masked differently: "),
    "sees the future": ("masking", "layers.2 is masked differently: "),
    "base": ("rotary", "layers.2 is rotated by "),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_a_layer_unlike_its_equals_is_suspected(fault: str) -> None:
    name, said = EXPECTED[fault]
    found = [finding for finding in findings(Stack(fault)) if finding.check == name]
    assert [said in finding.sentence for finding in found].count(True) == 1, found
    assert not any(finding.sure for finding in found)


@pytest.mark.parametrize("fault", ["", "declared window", "alternates", "inverse number"])
@pytest.mark.parametrize("layers", [2, LAYERS])
def test_layers_that_are_equal_or_differ_on_purpose_are_not(fault: str, layers: int) -> None:
    assert not findings(Stack(fault, layers))


def models() -> dict[str, Any]:
    import transformers as hf

    small: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    neo = hf.GPTNeoConfig(
        vocab_size=40, hidden_size=32, num_layers=3, num_heads=4, attention_types=[[["global"], 2], [["local"], 1]]
    )
    neo.window_size = 4
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    gemma = hf.Gemma3TextConfig(
        **small, num_hidden_layers=3, num_key_value_heads=2, head_dim=8, sliding_window=4, layer_types=types
    )
    scaled = hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=4, n_head=4, scale_attn_by_inverse_layer_idx=True)
    bert = hf.ModernBertConfig(
        **small, num_hidden_layers=4, local_attention=4, global_attn_every_n_layers=4, pad_token_id=0
    )
    return {
        "GPTNeo": hf.GPTNeoModel(neo),
        "Gemma3": hf.Gemma3TextModel(gemma),
        "GPT2": hf.GPT2Model(scaled),
        "ModernBert": hf.ModernBertModel(bert),
    }


@pytest.mark.parametrize("name", ["GPTNeo", "Gemma3", "GPT2", "ModernBert"])
def test_models_with_unequal_layers_on_purpose_are_not_suspected(name: str) -> None:
    torch.manual_seed(0)
    model = models()[name].eval()
    found = check(model, torch.randint(3, 40, (2, 12))).findings
    assert not [finding for finding in found if "equal layers" in finding.sentence], found

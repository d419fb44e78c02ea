"""Weights without values, and linear attention: what is there is said, and nothing that is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import check, trace
from mha_inspect.errors import InputError

WIDTH, H, D = 32, 4, 8


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return q, k, v

    def merged(self, context: Tensor) -> Tensor:
        return self.out(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Weights(Projected):
    """Without softmax by name: exponentials, divided by their sum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.split(x)
        exponentials = (q @ k.mT).exp()
        return exponentials / exponentials.sum(-1, keepdim=True)


class Linear(Projected):
    """Linear attention of Katharopoulos et al.: elu + 1, no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.merged(q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT))


class Efficient(Projected):
    """Efficient attention of Shen et al.: queries and keys are normalised, each by itself."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merged(q.softmax(-1) @ (k.softmax(-2).mT @ v))


class Perceptron(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x).relu()).softmax(-1)  # type: ignore[no-any-return]


CASES = {
    Weights: "weights without values",
    Linear: "two products of activations in a row",
    Efficient: "two products of activations in a row",
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_there_instead_is_said(kind: type[Projected]) -> None:
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    traced = trace(kind(), x)
    assert not traced.attentions
    assert any(note.startswith(f"Found instead: {CASES[kind]}") for note in traced.notes)
    with pytest.raises(InputError, match=CASES[kind]):
        check(kind(), x)


def test_a_perceptron_has_nothing_of_an_attention() -> None:
    x = torch.randn(2, 7, WIDTH)
    assert not [note for note in trace(Perceptron(), x).notes if "instead" in note]
    with pytest.raises(InputError, match="1 softmax"):
        check(Perceptron(), x)

"""A copy of a module, also of one that holds on to tensors with the graph that they came of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import InputError
from mha_inspect.record.arguments import copy_module
from mha_inspect.running.subject import Subject

from ..call.styles import Attention


class Holding(Attention):
    """Keeps its scores, as many do that are plotted afterwards: in an attribute, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__(30, 2)
        self.seen: list[torch.Tensor] = []
        self.by_name: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def held(scores: torch.Tensor) -> torch.Tensor:
            self.scores = self.by_name["last"] = scores
            self.seen.append(scores)
            return scores

        return self.attended(x, held)


def test_held_tensors_are_copied_by_their_content():
    module, x = Holding(), torch.randn(3, 7, 30)
    module(x)
    copied = copy_module(module)
    assert copied.scores is copied.seen[0] is copied.by_name["last"]
    assert copied.scores is not module.scores
    assert torch.equal(copied.scores, module.scores)
    assert copied.scores.is_leaf
    assert module.scores.requires_grad
    assert copied.qkv.weight is not module.qkv.weight
    assert copied.qkv.weight.requires_grad
    assert torch.equal(copied(x), module(x))


def test_tied_parameters_stay_tied_and_what_stands_in_is_taken():
    module = Holding()
    module.tied = nn.Linear(30, 90)
    module.tied.weight = module.qkv.weight
    stand_in = nn.Parameter(torch.empty_like(module.out.weight, device="meta"))
    copied = copy_module(module, {id(module.out.weight): stand_in})
    assert copied.tied.weight is copied.qkv.weight
    assert copied.out.weight is stand_in


class Uncopied(Holding):
    """Holds what refuses to be copied."""

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        raise TypeError("a lock has no copy")


def test_what_cannot_be_copied_is_said():
    module, x = Uncopied(), torch.randn(3, 7, 30)
    assert mha_inspect.trace(module, x).attentions
    assert mha_inspect.diff(module, module, x, same_weights=False).outcome == "same"
    with pytest.raises(InputError, match=r"Uncopied cannot be copied.*a lock has no copy.*same_weights=False"):
        mha_inspect.diff(module, module, x)


class Turning(Holding):
    """Rotates by a table of complex numbers, as Llama's own code does."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(7.0), torch.arange(1, 16) / 16)
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return super().forward(torch.view_as_real(pairs * self.table).flatten(2))


def test_a_copy_in_another_dtype_keeps_what_is_imaginary(recwarn: pytest.WarningsRecorder) -> None:
    module, x = Turning(), torch.randn(3, 7, 30)
    exact = Subject(module, (x,), {}).copied(torch.float64).plain()
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact.float(), module(x))
    assert not recwarn.list

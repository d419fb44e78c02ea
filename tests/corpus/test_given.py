"""What is given inside of a container is traced, compared and converted as it is alone."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect


@dataclass
class Batch:
    x: Tensor
    name: str = "first"


@dataclass(frozen=True)
class Frozen:
    x: Tensor


Pair = namedtuple("Pair", "x name")

ALONE: Callable[[Tensor], Any] = lambda x: x  # noqa: E731
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"x": x, "name": "first"}, lambda given: given["x"]),
    "list": (lambda x: [x], lambda given: given[0]),
    "tuple": (lambda x: (x, 1), lambda given: given[0]),
    "named tuple": (lambda x: Pair(x, "first"), lambda given: given.x),
    "dataclass": (Batch, lambda given: given.x),
    "frozen dataclass": (Frozen, lambda given: given.x),
    "dict of a list": (lambda x: {"x": [x]}, lambda given: given["x"][0]),
}


class Within(nn.Module):
    """torch's layer of what it takes out of its argument."""

    def __init__(self, take: Callable[[Any], Tensor], heads: int) -> None:
        super().__init__()
        self.layer, self._take = nn.MultiheadAttention(24, heads, batch_first=True), take

    def forward(self, given: Any) -> Tensor:
        x = self._take(given)
        return self.layer(x, x, x)[0]


def made(take: Callable[[Any], Tensor], heads: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Within(take, heads).eval()


X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))


def numbers(report: Any) -> list[Any]:
    return [(s.name, s.verdict, s.max_abs_difference, s.noise_floor) for s in report.stages]


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_is_that_of_the_tensor_alone(form: str) -> None:
    give, take = FORMS[form]
    alone, within = mha_inspect.trace(made(ALONE), X), mha_inspect.trace(made(take), give(X))
    stages = [[(s.name, s.axes, s.shape) for s in trace.attentions[0].stages] for trace in (alone, within)]
    assert stages[0] == stages[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_difference_is_that_of_the_tensor_alone(form: str) -> None:
    """The noise floor is measured in float64, so that tensors are converted wherever they are given."""
    give, take = FORMS[form]
    alone = mha_inspect.diff(made(ALONE), made(ALONE, heads=4), X, same_weights=True)
    given = give(X)
    within = mha_inspect.diff(made(take), made(take, heads=4), given, same_weights=True)
    assert within.outcome == alone.outcome == "differs"
    assert numbers(within) == numbers(alone)
    assert take(given) is X


@pytest.mark.parametrize("form", FORMS)
def test_check_says_what_it_says_of_the_tensor_alone(form: str) -> None:
    give, take = FORMS[form]
    reports = mha_inspect.check(made(ALONE), X), mha_inspect.check(made(take), give(X))
    found = [[(finding.check, finding.sure) for finding in report.findings] for report in reports]
    assert found[0] == found[1]

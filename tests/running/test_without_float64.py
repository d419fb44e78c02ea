"""Modules of which no copy runs in float64: their rounding is measured with every number off by half a last digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.errors import InputError
from mha_inspect.running.subject import Subject

from ..call.styles import Attention


class InFloat32(Attention):
    """Does a part of it in float32, whatever it is in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x.float())


class Uncopied(Attention):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a lock has no copy")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


def seeded(kind: type[Attention], num_heads: int = 3) -> Attention:
    torch.manual_seed(1)
    return kind(12, num_heads).eval()


@pytest.mark.parametrize("kind", [InFloat32, Uncopied])
def test_rounding_is_measured_all_the_same(kind: type[Attention], x: Tensor) -> None:
    if kind is Uncopied:
        with pytest.raises(InputError, match=r"cannot be copied .* own weights: same_weights=False\.$"):
            mha_inspect.diff(seeded(Attention), seeded(kind), x)
    report = mha_inspect.diff(seeded(Attention), seeded(kind), x, same_weights=False)
    assert report.left.measured_against == "float64"
    assert report.right.measured_against == "half a digit"
    assert report.outcome == "same"
    # One and the same computation: the two ways to measure its rounding come to numbers of one size.
    assert 0.25 < report.right.rounding_error / report.left.rounding_error < 4
    changed = seeded(kind)
    with torch.no_grad():
        changed.out.weight[0, 0] += 1e-4
    assert mha_inspect.diff(seeded(Attention), changed, x, same_weights=False).outcome == "differs"


def test_head_counts_are_compared_and_gradients_refused(x: Tensor) -> None:
    def make(num_heads: int) -> nn.Module:
        return seeded(InFloat32, num_heads)

    report = mha_inspect.compare_heads((1, 3), make, x)
    assert report.measured_against == "half a digit"
    assert report.outcome == "differs"
    assert "by half a digit, since no copy of it runs in float64" in " ".join(str(report).split())
    with pytest.raises(InputError, match="InFloat32 cannot be run in float64, and measuring rounding needs that"):
        mha_inspect.compare_heads((1, 3), make, x, steps=1)


def test_a_subject_that_is_shaken_stays_as_it_is(x: Tensor) -> None:
    module = seeded(Uncopied)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        plain, shaken = module(x), Subject(module, (x,), {}).shaken().plain()
    assert not torch.equal(plain, shaken)
    torch.testing.assert_close(plain, shaken, rtol=0, atol=1e-6)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())

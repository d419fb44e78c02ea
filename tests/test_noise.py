"""Rounding errors are measured, and differences are judged beside them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mha_inspect.errors import InputError
from mha_inspect.record.rounding import first_tensor, float64_output, judge, max_difference, noise_floor, rounding_error


@pytest.mark.parametrize(
    ("difference", "floor", "expected"),
    [
        (0.0, 0.0, (0.0, "same")),
        (0.0, 1.0, (0.0, "same")),
        (1.0, 0.0, (math.inf, "differs")),
        (2.0, 1.0, (2.0, "same")),
        (2.5, 1.0, (2.5, "inconclusive")),
        (10.0, 1.0, (10.0, "inconclusive")),
        (10.5, 1.0, (10.5, "differs")),
        (math.inf, 1.0, (math.inf, "differs")),
    ],
)
def test_judge(difference: float, floor: float, expected: tuple[float, str]) -> None:
    assert judge(difference, floor) == expected


def test_a_difference_that_is_no_number_differs() -> None:
    assert judge(math.nan, 1.0)[1] == "differs"


def test_max_difference_by_hand() -> None:
    left = torch.tensor([1.0, math.nan, math.inf, -math.inf, 5.0])
    assert max_difference(left, torch.tensor([1.5, math.nan, math.inf, -math.inf, 4.75])) == 0.5
    assert max_difference(left[:1], torch.tensor([math.nan])) == math.inf
    assert max_difference(left[2:3], left[3:4]) == math.inf
    assert max_difference(left[:0], left[:0]) == 0.0


def linear(dtype: torch.dtype) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(101, 7).to(dtype), torch.randn(5, 101).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_is_the_distance_to_the_float64_product(dtype: torch.dtype) -> None:
    layer, x = linear(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    expected = float((layer(x).double() - exact).abs().max().detach())
    assert noise_floor(layer, (x,), {}) == pytest.approx(expected, rel=1e-6)
    assert noise_floor(layer, (), {"input": x}, float64_output(layer, (x,), {})) == pytest.approx(expected, rel=1e-6)
    assert layer.weight.dtype == dtype


def test_float64_is_measured_in_float32_and_scaled() -> None:
    layer, x = linear(torch.float64)
    floor = noise_floor(layer, (x,), {})
    assert torch.finfo(torch.float64).eps / 8 < floor < torch.finfo(torch.float64).eps * 8


def test_dropout_and_the_generator_are_left_out_of_it() -> None:
    layer = nn.Sequential(nn.Linear(11, 7), nn.Dropout(0.5)).train()
    state = torch.get_rng_state()
    x = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    floor = noise_floor(layer, (x,), {})
    assert layer.training
    assert torch.equal(torch.get_rng_state(), state)
    assert floor == noise_floor(layer.eval(), (x,), {})


def test_one_tensor_given_three_times_stays_one() -> None:
    seen = []

    class Spy(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            seen.append(query is key and key is value)
            return query

    x = torch.randn(3)
    float64_output(Spy(), (x, x), {"value": x})
    assert seen == [True]


def test_rows_that_are_not_finite_are_left_out() -> None:
    exact = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64)
    assert rounding_error(torch.tensor([1.25, 0.0, math.inf]), exact) == 0.25


def test_first_tensor() -> None:
    x = torch.zeros(1)
    assert first_tensor(x) is first_tensor((x, None)) is first_tensor({"a": None, "b": [x]}) is x
    with pytest.raises(InputError):
        first_tensor((None, 3))

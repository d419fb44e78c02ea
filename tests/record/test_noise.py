"""Rounding errors are measured, and differences are judged beside them."""

from __future__ import annotations

import math

import pytest
import torch

from mha_inspect.errors import InputError
from mha_inspect.record.arguments import cast_tensors, first_tensor
from mha_inspect.record.rounding import judge, max_difference


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


def test_one_tensor_given_three_times_stays_one() -> None:
    x = torch.randn(3)
    args, kwargs = cast_tensors(((x, [x]), {"value": x, "name": "x"}), torch.float64)
    assert args[0] is args[1][0] is kwargs["value"]
    assert (args[0].dtype, kwargs["name"]) == (torch.float64, "x")


def test_first_tensor() -> None:
    x = torch.zeros(1)
    assert first_tensor(x) is first_tensor((x, None)) is first_tensor({"a": None, "b": [x]}) is x
    with pytest.raises(InputError):
        first_tensor((None, 3))

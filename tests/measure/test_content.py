"""Statistics against torch's own, and values as torch prints them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mha_inspect.layers.spec import Show
from mha_inspect.measure.content import stats_of, values_of
from mha_inspect.reports.common import Stats, to_data


def test_stats_are_torchs_over_the_finite_elements() -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) + 1000
    tensor[0, 0], tensor[1, 1], tensor[2] = math.nan, math.inf, -math.inf
    finite = tensor[tensor.isfinite()].double()
    stats = stats_of(tensor)
    assert stats is not None
    assert stats.mean == pytest.approx(float(finite.mean()), rel=1e-12)
    assert stats.std == pytest.approx(float(finite.std()), rel=1e-9)
    assert (stats.min, stats.max) == (float(finite.min()), float(finite.max()))
    assert (stats.nan, stats.inf, stats.masked) == (1, 8, 0)


def test_what_a_mask_put_there_is_no_alarm() -> None:
    mask = torch.tensor([[False, True], [False, False]])
    scores = torch.tensor([[[1.0, -math.inf], [-math.inf, 3.0]], [[1.0, 2.0], [3.0, math.inf]]])
    stats = stats_of(scores, mask)
    assert stats is not None
    assert (stats.masked, stats.inf) == (1, 2)


def test_one_element_and_none() -> None:
    assert stats_of(torch.tensor(3)) == Stats(mean=3.0, std=0.0, min=3.0, max=3.0, nan=0, inf=0, masked=0)
    empty = stats_of(torch.full((2,), math.nan))
    assert empty is not None
    assert math.isnan(empty.mean)
    assert math.isnan(empty.min)
    assert empty.nan == 2


def test_torchs_print_options_are_not_read_and_not_changed() -> None:
    torch.set_printoptions(precision=7, threshold=5, linewidth=200, sci_mode=True)
    try:
        before = repr(torch.linspace(1, 2, 2000))
        values = values_of(torch.linspace(1, 2, 2001), Show())
        assert repr(torch.linspace(1, 2, 2000)) == before
    finally:
        torch.set_printoptions(profile="default")
    assert values is not None
    assert values.text == "tensor([1.0000, 1.0005, 1.0010,  ..., 1.9990, 1.9995, 2.0000])"


def test_all_numbers_are_written_as_python_writes_them() -> None:
    numbers = torch.randn(2, 3, 20_000, generator=torch.Generator().manual_seed(0))
    numbers[0, 1, 17_000], numbers[1, 2, 0], numbers[1, 2, 1] = math.inf, math.nan, -math.inf
    plain = json.loads(json.dumps(numbers.tolist()), parse_constant={"Infinity": "Infinity", "NaN": "NaN"}.get)
    plain[1][2][1] = "-Infinity"
    tensors = [numbers, numbers[0, 0].long(), numbers[0, :2, :3] > 0, torch.zeros(0), torch.tensor(3)]
    wanted = [plain, *(tensor.tolist() for tensor in tensors[1:4]), [3]]
    values = [values_of(tensor, Show(full_values=True)) for tensor in tensors]
    written = json.dumps(to_data([value.data for value in values if value]), allow_nan=False)
    assert written == json.dumps(wanted)

"""Numbers as people read them, against cases worked by hand."""

from __future__ import annotations

import math

import pytest

from mha_inspect.render import numbers
from mha_inspect.render.clean import cells
from mha_inspect.render.wrapping import pieces


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (24576, "24.0 KiB"),
        (102_348, "99.9 KiB"),
        (102_400, "100 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (35184372088832, "32.0 TiB"),
        (5000 * 1024**5, "5,000 PiB"),
    ],
)
def test_sizes(nbytes, text):
    assert numbers.size(nbytes) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, ""), (999, "999 FLOP"), (6291456, "6.3 MFLOP"), (147456, "147 kFLOP"), (10**15, "1.0 PFLOP")],
)
def test_flops(flops, text):
    assert numbers.flops(flops) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (1.19e-7, "1.2e-07"), (0.31415, "0.314"), (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf")],
)
def test_differences(number, text):
    assert numbers.small(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.083333, "0.0833"), (-3.2109, "-3.2109"), (2.7e-5, "2.700e-05"), (3e9, "3.000e+09"), (0.0, "0")],
)
def test_statistics(number, text):
    assert numbers.statistic(number) == text


def test_multiples():
    assert [numbers.times(n) for n in (0.04, 17.25, 1302118.4)] == ["0.0", "17.2", "1,302,118"]


def test_bounds_include_both_ends():
    assert [numbers.span(b) for b in ((0, 256), (3, 4), (5, 5))] == ["0–255", "3", "none"]
    assert numbers.spans([7, 0, 1, 2, 3, 9, 2]) == "0–3, 7, 9"


def test_shapes_and_counts():
    assert numbers.shape((2, 12, 256)) == "[2, 12, 256]"
    assert numbers.shape(()) == "[]"
    assert numbers.count(1050624) == "1,050,624"
    assert numbers.plural(1, "head") == "1 head"


def test_lines_break_between_words_and_not_inside_a_shape():
    assert pieces("%4 [1536], %2 [12, 512]", 15) == ["%4 [1536],", "%2 [12, 512]"]
    assert pieces("into [12, 512]", 11) == ["into", "[12, 512]"]
    assert pieces("torch/nn/functional.py:5904", 22) == ["torch/nn/", "functional.py:5904"]
    assert pieces("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert pieces("漢字漢字", 5) == ["漢字", "漢字"]
    assert pieces("", 5) == []
    assert cells("漢字 e\u0301") == 6

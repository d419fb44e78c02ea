"""Text as people read it, against cases worked by hand, and the time that long names take."""

from __future__ import annotations

import math

import pytest

from mha_inspect import text

SIZES = {0: "0 B", 1024: "1.0 KiB", 102_348: "99.9 KiB", 1024**2 - 1: "1.0 MiB", 2**71: "2,048 EiB"}
FLOPS = {0: "", 999: "999 FLOP", 6291456: "6.3 MFLOP", 147456: "147 kFLOP", 10**15: "1.0 PFLOP"}
STATISTICS = {0.083333: "0.0833", -3.2109: "-3.2109", 2.7e-5: "2.700e-05", 3e9: "3.000e+09", 0.0: "0"}
DIFFERENCES = {0.0: "0", 1.19e-7: "1.2e-07", 0.31415: "0.314", math.inf: "inf", -math.inf: "-inf"}
MULTIPLES = {0.04: "0.0", 17.25: "17", 1302118.4: "1,300,000"}


@pytest.mark.parametrize(
    ("write", "cases"),
    [
        (text.byte_size, SIZES),
        (text.flops, FLOPS),
        (text.statistic, STATISTICS),
        (text.small, DIFFERENCES),
        (text.times, MULTIPLES),
    ],
)
def test_numbers(write, cases):
    assert {number: write(number) for number in cases} == cases
    assert text.small(math.nan) == "NaN"


@pytest.mark.parametrize(
    ("number", "said", "in_sentence"),
    [
        (0.0, "0", "0"),
        (99.9, "10", "about 10"),
        (100.0, "10²", "about 10²"),
        (1_400_000.0, "10⁶", "about 10⁶"),
        (3e16, "10¹⁶", "about 10¹⁶"),
        (float("nan"), "NaN", "NaN"),
        (float("inf"), "inf", "infinitely many"),
    ],
)
def test_a_multiple_of_a_rounding_error_is_an_order_of_magnitude(number, said, in_sentence):
    """It differed by a factor of 1.8 between two machines."""
    assert text.magnitude(number) == said
    assert text.multiple(number) == in_sentence


def test_bounds_include_both_ends():
    assert [text.span(b) for b in ((0, 256), (3, 4), (5, 5))] == ["0–255", "3", "none"]
    assert text.spans([7, 0, 1, 2, 3, 9, 2]) == "0–3, 7, 9"


def test_shapes_and_counts():
    assert text.shape((2, 12, 256)) == "[2, 12, 256]"
    assert text.shape(()) == "[]"
    assert text.plural(1, "head") == "1 head"


def test_wide_characters_take_two_columns_and_combining_ones_none():
    assert text.cells("漢字 e\u0301") == 6


def test_words_that_are_listed_and_multiples_in_a_sentence():
    assert [text.listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert [text.multiple(n) for n in (None, math.inf, 7.25)] == ["infinitely many", "infinitely many", "7.2"]
    assert [text.percent(share) for share in (0.749, 0.0, 1.2e-5)] == ["74.9 %", "0.0 %", "0.001 %"]


def test_a_long_name_keeps_both_ends():
    assert text.printable("encoder.layers.0.weight", 12) == "encode…eight"
    assert text.printable("encoder", 7) == "encoder"
    assert text.shown("\x1b" * 100) == r"\x1b" * 7 + r"\x" + "…" + "b" + r"\x1b" * 7


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("trcae", ["trace", "params"], "trace"),
        ("--embed-dmi", ["--embed-dim", "--head-dim"], "--embed-dim"),
        ("fp16", ["float64", "float32", "float16"], "float16"),
        ("--heads", ["--rope", "--num-heads"], "--num-heads"),
        ("--verbose", ["--rope", "--version", "--no-bias", "--json"], ""),
        ("num_layer", ["vocab_size", "num_hidden_layers"], "num_hidden_layers"),
        ("e", ["embed_dim"], ""),
        ("xyz", [], ""),
    ],
)
def test_only_what_is_near_is_suggested(typed, known, meant):
    assert text.did_you_mean(typed, known) == (f" Did you mean {meant}?" if meant else "")


def test_a_pile_of_combining_marks_is_escaped_and_four_are_not():
    assert text.printable("e\u0301\u0302\u0303\u0304x") == "e\u0301\u0302\u0303\u0304x"
    assert text.printable("e" + "\u0301" * 6) == "e" + "\u0301" * 4 + r"\u0301\u0301"


@pytest.mark.parametrize(
    ("factor", "head_dim", "said"),
    [(0.5, 4, "0.5 = 1/√4"), (1.0, 4, "1 (not scaled)"), (1.0, 1, "1 = 1/√1"), (0.5, 16, "0.5 = 2 × 1/√16")],
)
def test_a_scale_is_told_beside_the_root_of_head_dim(factor, head_dim, said):
    assert text.scale(factor, head_dim) == said

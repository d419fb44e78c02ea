"""A picture of the terminal is read back: each cell gives the number that it was drawn for, within a step."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mha_inspect.pictures.grid import Picture, PictureAxis, codes, hex_table
from mha_inspect.pictures.terminal import draw

from .read_back import INF, MASKED, NAN, panels

AXES = PictureAxis("query"), PictureAxis("key")


def picture(heads: int, rows: int, columns: int, *, causal: bool = False, signed: bool = False, **settings) -> Picture:
    numbers = np.random.default_rng(heads * rows * columns).normal(size=(heads, rows, columns)).astype(np.float32)
    numbers = numbers if signed else np.abs(numbers)
    if causal:
        numbers[:, np.triu(np.ones((rows, columns), bool), 1)] = -np.inf
    names = tuple(f"head {head}" for head in range(heads))
    return Picture(settings.pop("title", "weights"), names, numbers, *AXES, signed, **settings)


def assert_within_a_step(read_panels, drawn: Picture, count: int, scale: tuple[float, float] | None = None) -> None:
    """Whoever knows the legend reads the number off, but for a step."""
    low, high = scale or drawn.scale
    step = (high - low) / count  # two steps of viridis look like the one before
    assert len(read_panels) == len(drawn.values)
    for head, panel in enumerate(read_panels):
        assert len(panel) == drawn.values.shape[1]
        for row, line in enumerate(panel):
            for column, read in enumerate(line):
                number = drawn.values[head, row, column]
                if not np.isfinite(number):
                    assert read == (NAN if np.isnan(number) else INF if number > 0 else MASKED)
                else:
                    assert read >= 0, (head, row, column)
                    assert abs(low + (read + 0.5) * step - number) <= 1.51 * step


@pytest.mark.parametrize(("depth", "width", "signed"), [("true", 60, False), ("256", 140, True)])
def test_each_cell_is_its_number(depth, width, signed):
    drawn = picture(5, 21, 19, causal=True, signed=signed)
    table = codes(signed, depth)
    assert_within_a_step(panels(draw(drawn, width=width, depth=depth), table, 19, 21), drawn, len(table))


@given(heads=st.integers(1, 7), rows=st.integers(1, 40), columns=st.integers(1, 40), width=st.integers(40, 150))
def test_no_line_is_wider_than_the_page(heads, rows, columns, width):
    for depth in ("none", "true"):
        text = re.sub(r"\x1b\[[\d;]*m", "", draw(picture(heads, rows, columns), width=width, depth=depth))
        assert max(map(len, text.split("\n"))) <= width


def test_what_is_no_number_is_told_apart():
    drawn = picture(2, 21, 21)
    drawn.values[0, 0, 0], drawn.values[0, 3, 1] = 0, np.nan
    drawn.values[1, 20, 20], drawn.values[1, 5] = np.inf, -np.inf
    text = draw(drawn, width=80, depth="true")
    read_panels = panels(text, codes(False, "true"), 21, 21)
    assert [read_panels[0][0][0], read_panels[0][3][1], read_panels[1][20][20], *read_panels[1][5]] == [
        0,
        NAN,
        INF,
        *[MASKED] * 21,
    ]
    assert "magenta: NaN, 1 element" in text
    assert "white: inf, 1 element" in text
    plain = draw(drawn, width=80)
    assert "blank: masked   ?: NaN, 1 element\n!: inf, 1 element" in plain


def test_longer_than_fits_is_reduced_by_maximum_and_says_so():
    drawn = picture(1, 500, 500, causal=True)
    text = draw(drawn, width=80, depth="true")
    said = re.search(r"Each cell is the largest of (\d+) × (\d+) elements \(query × key\): 500 × 500 do not", text)
    size = int(said[1])
    cells = -(-500 // size)
    padded = np.full((cells * size, cells * size), -np.inf, np.float32)
    padded[:500, :500] = drawn.values[0]
    largest = padded.reshape(1, cells, size, cells, size).max(axis=(2, 4))
    small = Picture("weights", ("head 0",), largest, *AXES)
    assert_within_a_step(panels(text, codes(False, "true"), cells, cells), small, 256, drawn.scale)


def test_ticks_stand_where_they_count():
    drawn = picture(1, 40, 40)
    lines = draw(drawn, width=80, depth="true").split("\n")
    numbers = [(int(m[0]), m.start() - 8) for m in re.finditer(r"\d+", next(line for line in lines if "key →" in line))]
    assert len(numbers) > 5
    assert all(number == column for number, column in numbers)
    rows = [
        (number, re.match(r" *(\d+) ", re.sub(r"\x1b\[[\d;]*m", "", line))) for number, line in enumerate(lines[1:])
    ]
    assert [(int(m[1]), 2 * line) for line, m in rows if m] == [(n, n) for n in range(0, 40, 8)]


def test_maps_are_those_of_matplotlib():
    colormaps = pytest.importorskip("matplotlib").colormaps
    for signed, name in ((False, "viridis"), (True, "coolwarm")):
        theirs = (colormaps[name](np.arange(256))[:, :3] * 255).round().astype(int)
        assert hex_table(signed) == tuple(bytes(row.tolist()).hex() for row in theirs)


def test_256_colours_are_near_those_of_the_map_and_in_its_order():
    levels = (0, 95, 135, 175, 215, 255)
    palette = {16 + 36 * r + 6 * g + b: (levels[r], levels[g], levels[b]) for r, g, b in np.ndindex(6, 6, 6)}
    palette |= {232 + n: (8 + 10 * n,) * 3 for n in range(24)}
    for signed in (False, True):
        table = np.array([list(bytes.fromhex(colour)) for colour in hex_table(signed)])
        shown = [palette[int(code.removeprefix("5;"))] for code in codes(signed, "256")]
        nearest = [np.abs(table - colour).max(axis=1) for colour in shown]
        assert max(away.min() for away in nearest) <= 50
        places = [int(away.argmin()) for away in nearest]
        assert places == sorted(places)

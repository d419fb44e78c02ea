"""Read a picture of the terminal back: from its characters and colours to the steps that they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mha_inspect.pictures.grid import RAMP

PART = re.compile(r"\x1b\[([\d;]*)m|(.)")
COLOUR = re.compile(r"(38|48);(2;\d+;\d+;\d+|5;\d+)")
MASKED, NAN, INF = -1, -2, -3
INKLESS = {" ": MASKED, "?": NAN, "!": INF} | {sign: step for step, sign in enumerate(RAMP)}

Shown = tuple[str, str, str]
"""A character, its ink and its ground, the colours as xterm is told of them: `2;68;1;84`."""


def screen(text: str) -> list[list[Shown]]:
    """Each line as what it shows."""
    lines = []
    for line in text.split("\n"):
        colours = {"38": "", "48": ""}
        shown = []
        for codes, character in PART.findall(line):
            if character:
                shown.append((character, colours["38"], colours["48"]))
            else:
                colours |= {"38": "", "48": ""} if codes.split(";")[0] == "0" else {}
                colours |= dict(COLOUR.findall(codes))
        lines.append(shown)
    return lines


def panels(text: str, table: tuple[str, ...], columns: int, rows: int, zoom: int = 1) -> list[list[list[int]]]:
    """The steps of every panel; `table` are the colours of the steps."""
    special = {"": MASKED, "2;255;0;255": NAN, "5;201": NAN, "2;255;255;255": INF, "5;231": INF}

    def halves(shown: Shown) -> tuple[int, ...]:
        character, ink, ground = shown
        both = {"▀": (ink, ground), "▄": (ground, ink), "×": (ground, ground), "+": (ground, ground)}
        colours = both.get(character, ("", ""))
        steps = tuple(special[colour] if colour in special else table.index(colour) for colour in colours)
        return steps if zoom == 1 else steps[:1]

    return list(_read(text, columns, rows, zoom, halves))


def inkless(text: str, columns: int, rows: int, zoom: int) -> list[list[list[int]]]:
    """The same of a picture without colour."""
    return list(_read(text, columns, rows, zoom, lambda shown: (INKLESS[shown[0]],)))


def _read(
    text: str, columns: int, rows: int, zoom: int, steps: Callable[[Shown], Sequence[int]]
) -> Iterator[list[list[int]]]:
    """Yield each panel, found by the line of titles above it; `steps` are those of a character, one below the other."""
    lines = screen(text)
    for place, line in enumerate(lines):
        titles = re.search("↓(.*)", "".join(shown[0] for shown in line))
        for title in re.finditer(r"(?<=[ ])[^ ]+( \d+)?", titles[1] if titles else ""):
            start = titles.start(1) + title.start()
            panel: list[list[int]] = []
            for below in lines[place + 1 :]:
                shown = [*below[start:], *[(" ", "", "")] * columns * zoom][: columns * zoom : zoom]
                panel += map(list, zip(*map(steps, shown), strict=True)) if len(panel) < rows else []
            yield panel[:rows]

"""Read a picture of the terminal back: from its characters and colours to the steps that they stand for."""

from __future__ import annotations

import re

from mha_inspect.pictures.grid import RAMP

PART = re.compile(r"\x1b\[([\d;]*)m|(.)")
MASKED, NAN, INF = -1, -2, -3


def screen(text: str) -> list[list[tuple[str, str, str]]]:
    """Each line as (character, ink, ground), the colours as xterm is told of them: `2;68;1;84`."""
    lines = []
    for line in text.split("\n"):
        ink = ground = ""
        cells = []
        for codes, character in PART.findall(line):
            if character:
                cells.append((character, ink, ground))
                continue
            words = codes.split(";")
            while words:
                word = words.pop(0)
                if word == "0":
                    ink = ground = ""
                else:
                    assert word in ("38", "48")
                    length = 4 if words[0] == "2" else 2
                    colour = ";".join(words[:length])
                    del words[:length]
                    ink, ground = (colour, ground) if word == "38" else (ink, colour)
        lines.append(cells)
    return lines


def halves(cell: tuple[str, str, str]) -> tuple[str, str]:
    """The colours of the upper and the lower half of a character; empty where it has none."""
    character, ink, ground = cell
    both = (ground, ground)
    return {"▀": (ink, ground), "▄": (ground, ink), "×": both, "+": both}.get(character, ("", ""))


def panels(text: str, table: tuple[str, ...], columns: int, rows: int, zoom: int = 1) -> list[list[list[int]]]:
    """The steps of every panel, found by the line of titles above it; `table` are the colours of the steps."""
    found = []
    lines = screen(text)
    for place, line in enumerate(lines):
        plain = "".join(cell[0] for cell in line)
        if "↓" not in plain:
            continue
        for title in re.finditer(r"(?<=[ ])[^ ↓]+( \d+)?", plain[plain.index("↓") + 1 :]):
            at = plain.index("↓") + 1 + title.start()
            panel: list[list[int]] = []
            for below in lines[place + 1 : place + 1 + (rows if zoom > 1 else -(-rows // 2))]:
                shown = [*below[at : at + columns * zoom], *[(" ", "", "")] * columns * zoom][: columns * zoom : zoom]
                pairs = [halves(cell) for cell in shown]
                panel.append([_step(upper, table) for upper, _ in pairs])
                if zoom == 1:
                    panel.append([_step(lower, table) for _, lower in pairs])
            found.append(panel[:rows])
    return found


def inkless(text: str, columns: int, rows: int, zoom: int) -> list[list[list[int]]]:
    """The same of a picture without colour."""
    found = []
    lines = text.split("\n")
    for place, plain in enumerate(lines):
        for title in re.finditer(r"head \d+", plain):
            shown = [
                line[title.start() :].ljust(columns * zoom)[: columns * zoom : zoom] for line in lines[place + 1 :]
            ]
            found.append(
                [[{" ": MASKED, "?": NAN, "!": INF}.get(c, RAMP.find(c)) for c in row] for row in shown[:rows]]
            )
    return found


def _step(colour: str, table: tuple[str, ...]) -> int:
    if colour in ("2;255;0;255", "5;201"):
        return NAN
    if colour in ("2;255;255;255", "5;231"):
        return INF
    return table.index(colour) if colour else MASKED

"""Make the picture of a page: each attention from input to output, its heads, and every element of a head.

Elements are stored as integers of 16 bits, or of 8 bits if there are many. If there are more than a file should have,
only the maximum of each block is stored. The page says both.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..render.html import Drawn
from ..text import printable
from .grid import Floats, Picture, Range, hex_table, range_of, reduced
from .terminal import number

ROOM = 12_000_000
"""Bytes of elements in a page before base64, which needs a third more."""


class SizeOfStage(NamedTuple):
    """How much there is of a stage in all attentions."""

    elements: int
    panels: int


class Storage(NamedTuple):
    """The storage format of a stage's elements."""

    bits: int
    cells: int | None
    """The most cells along each side of a panel; None if every element is stored."""


def storages(sizes: Mapping[str, SizeOfStage]) -> dict[str, Storage]:
    """Return the storage of each stage, given its numbers of elements and panels in all attentions.

    If the elements exceed `ROOM`, half of the room is for the weights.
    """
    total = sum(size.elements for size in sizes.values())
    if total <= ROOM:
        every_element = Storage(_bits(total, ROOM), cells=None)
        return dict.fromkeys(sizes, every_element)
    shares = dict.fromkeys(sizes, 1)
    if "weights" in sizes and len(sizes) > 1:
        shares["weights"] = len(sizes) - 1
    all_shares = sum(shares.values())
    stored = {}
    for name, size in sizes.items():
        room = ROOM * shares[name] // all_shares
        cells = _cells_along_side(size.panels, room) if size.elements > room else None
        stored[name] = Storage(_bits(size.elements, room), cells)
    return stored


def _bits(elements: int, room: int) -> int:
    """Return the bits of an element: 16 if so many fit in these bytes, else 8."""
    bytes_of_16_bits = 2 * elements
    return 16 if bytes_of_16_bits <= room else 8


def _cells_along_side(panels: int, room: int) -> int:
    """Return the cells along each side of square panels that fit in these bytes: 10 for 4 panels in 400."""
    room_of_panel = room / max(panels, 1)
    return max(int(room_of_panel**0.5), 1)


def encoded(picture: Picture, how: Storage) -> dict[str, Any]:
    """Return a picture in the viewer's format.

    Code 0 is masked, the two highest codes are +inf and NaN, and the codes between them are the numbers of one panel
    from `low` to `high` in equal steps.
    """
    _, rows, columns = picture.shape
    if how.cells is None:
        values, block = reduced(picture.values, rows, columns)
    else:
        values, block = reduced(picture.values, how.cells, how.cells)
    ranges = [range_of(panel) for panel in values]
    low = [panel.least for panel in ranges]
    high = [panel.most for panel in ranges]
    data = base64.b64encode(_codes(values, low, high, how.bits))
    _, cells_down, cells_across = values.shape
    return {
        "stage": picture.title,
        "axes": [picture.rows.name, picture.columns.name],
        "size": [rows, columns],
        "cells": [cells_down, cells_across],
        "block": list(block),
        "bits": how.bits,
        "signed": picture.signed,
        "scale": list(picture.scale),
        "heads": list(picture.panels),
        "low": low,
        "high": high,
        "signs": _signs(picture.range),
        "notes": [*_notes(picture, ranges, block, how.bits), *picture.notes],
        "data": data.decode(),
    }


def _codes(values: Floats, low: Sequence[float], high: Sequence[float], bits: int) -> bytes:
    """Return the codes of all elements, `panel row column`; each panel has the range from its low to its high."""
    most = _most(bits)
    start = _for_each_panel(low)
    width = _for_each_panel(high) - start
    width[width <= 0] = 1
    with np.errstate(invalid="ignore"):
        parts = (values - start) / width
        places = np.round(parts * (most - 1)) + 1
    finite = np.nan_to_num(places, nan=0, posinf=0, neginf=0)
    codes = finite.astype("<u2" if bits == 16 else "u1")
    codes[values == np.inf] = most + 1
    codes[np.isnan(values)] = most + 2
    return codes.tobytes()


def _for_each_panel(numbers: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return a number for each panel as `panel 1 1`, against which `panel row column` is broadcast."""
    return np.array(numbers, np.float64).reshape(-1, 1, 1)


def _most(bits: int) -> int:
    """Return the highest code of a finite number."""
    return int(2**bits - 3)


def _notes(picture: Picture, ranges: Iterable[Range], block: tuple[int, int], bits: int) -> Iterator[str]:
    """Yield how the elements are stored: the range of all, the size of a block, the largest rounding error."""
    whole = picture.range
    if whole.least < whole.most:
        yield f"All heads together: from {number(whole.least)} to {number(whole.most)}."
    height, width = block
    if height > 1 or width > 1:
        _, rows, columns = picture.shape
        yield (
            f"Each cell is the largest of {height} × {width} elements ({picture.rows.name} × "
            f"{picture.columns.name}). All {rows:,} × {columns:,} for each head would make the page too large."
        )
    widest = max(panel.most - panel.least for panel in ranges)
    step = widest / (_most(bits) - 1)
    yield f"Stored in {bits} bits, rounded by at most {number(step / 2)}."


def _signs(span: Range) -> list[list[str]]:
    """Return the signs of elements that are no finite numbers, each with its meaning."""
    signs = []
    if span.masked:
        signs.append(["masked", "masked"])
    if span.nan:
        signs.append(["nan", f"NaN ({span.nan:,})"])
    if span.infinite:
        signs.append(["inf", f"inf ({span.infinite:,})"])
    return signs


@dataclass(frozen=True)
class Shown:
    """An attention of the viewer."""

    name: str
    pictures: Sequence[Picture]
    """A picture for each stage with numbers, titled with the stage."""
    flow: Mapping[str, Any] | None = None
    """Its stages as `flow_of` returns them; None to show the heat maps alone."""
    count: int | None = None
    """The number of heads that was asked for, if several are compared."""


def viewer_data(attentions: Iterable[Shown], how: Mapping[str, Storage], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the viewer.

    `first` is the attention, stage and head that is shown first. Each attention is freed before the next is requested.
    """
    tokens: dict[str, list[str]] = {}
    shown = []
    for attention in attentions:
        stages = []
        for picture in attention.pictures:
            stages.append(encoded(picture, how[picture.title]))
            for axis in (picture.rows, picture.columns):
                if axis.labels:
                    tokens[axis.name] = list(axis.labels)
        if stages or attention.flow:
            name = printable(attention.name)
            shown.append({"name": name, "count": attention.count, "stages": stages, "flow": attention.flow})
    of_positive, of_signed = hex_table(False), hex_table(True)
    return {
        "attentions": shown,
        "tokens": tokens,
        "colours": ["".join(of_positive), "".join(of_signed)],
        "first": dict(first),
    }


def fragment(data: Mapping[str, Any]) -> str:
    """Return the viewer as an HTML fragment."""
    # Characters that could end the element or start another one are written as JSON escapes.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        escape = f"\\u{ord(character):04x}"
        text = text.replace(character, escape)
    return (
        f"<style>{_file('viewer.css')}</style>\n{_file('viewer.html')}"
        f'<script type="application/json" id="mha-viewer-data">{text}</script>\n<script>{_file("viewer.js")}</script>\n'
    )


def policy() -> str:
    """Return the content security policy of the page: the viewer's own script and styles, and no other resources."""
    digest = hashlib.sha256(_file("viewer.js").encode()).digest()
    script = base64.b64encode(digest).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{allowed}; form-action \'none\'">\n'


def drawn_page(data: Mapping[str, Any]) -> Drawn:
    """Return the viewer as the picture of a whole page."""
    return Drawn(fragment(data), policy())


def frame(data: Mapping[str, Any]) -> str:
    """Return the viewer as an iframe for a page with other content, e.g. a notebook."""
    page = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="UTF-8">{policy()}<title>mha-inspect</title></head>'
        f'<body style="margin: 0">{fragment(data)}</body></html>'
    )
    return (
        f'<iframe title="The attention from input to output" sandbox="allow-scripts" '
        f'style="width: 100%; height: 43rem; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    )


@cache
def _file(name: str) -> str:
    file = files(__package__).joinpath(name)
    return file.read_text(encoding="utf-8")

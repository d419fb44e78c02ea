"""Make the viewer of a page: every attention, stage and head, with all elements in the page itself.

Elements are stored as integers of 16 bits, or of 8 bits if there are many. If there are more than a file should have,
only the maximum of each block is stored. The page says both.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from ..text import printable
from .grid import Floats, Picture, Range, hex_table, range_of, reduced
from .terminal import number

ROOM = 12_000_000
"""Bytes of elements in a page before base64, which needs a third more."""


class Storage(NamedTuple):
    """The storage format of a stage's elements."""

    bits: int
    cells: int | None
    """The most cells along each side of a panel; None if every element is stored."""


def storages(sizes: Mapping[str, tuple[int, int]]) -> dict[str, Storage]:
    """Return the storage of each stage, given its numbers of elements and panels in all attentions.

    If the elements exceed `ROOM`, half of the room is for the weights.
    """
    total = sum(elements for elements, _ in sizes.values())
    if total <= ROOM:
        return dict.fromkeys(sizes, Storage(16 if 2 * total <= ROOM else 8, None))
    shares = dict.fromkeys(sizes, 1)
    if "weights" in sizes and len(sizes) > 1:
        shares["weights"] = len(sizes) - 1
    stored = {}
    for name, (elements, panels) in sizes.items():
        room = ROOM * shares[name] // sum(shares.values())
        cells = None
        if elements > room:
            cells = max(int((room / max(panels, 1)) ** 0.5), 1)
        stored[name] = Storage(16 if 2 * elements <= room else 8, cells)
    return stored


def encoded(picture: Picture, how: Storage) -> dict[str, Any]:
    """Return a picture in the viewer's format.

    Code 0 is masked, the two highest codes are +inf and NaN, and the codes between them are the numbers of one panel
    from `low` to `high` in equal steps.
    """
    _, rows, columns = picture.shape
    values, block = reduced(picture.values, how.cells or rows, how.cells or columns)
    ranges = [range_of(panel) for panel in values]
    low, high = [panel.least for panel in ranges], [panel.most for panel in ranges]
    return {
        "stage": picture.title,
        "axes": [picture.rows.name, picture.columns.name],
        "size": [rows, columns],
        "cells": [values.shape[1], values.shape[2]],
        "block": list(block),
        "bits": how.bits,
        "signed": picture.signed,
        "scale": list(picture.scale),
        "heads": list(picture.panels),
        "low": low,
        "high": high,
        "signs": _signs(picture.range),
        "notes": [*_notes(picture, ranges, block, how.bits), *picture.notes],
        "data": base64.b64encode(_codes(values, low, high, how.bits)).decode(),
    }


def _codes(values: Floats, low: Sequence[float], high: Sequence[float], bits: int) -> bytes:
    """Return the codes of all elements, `panel row column`; each panel has the range from its low to its high."""
    most = _most(bits)
    start = np.array(low, np.float64)[:, None, None]
    width = np.array(high, np.float64)[:, None, None] - start
    with np.errstate(invalid="ignore"):
        parts = (values - start) / np.where(width > 0, width, 1)
        places = np.round(parts * (most - 1)) + 1
    finite = np.nan_to_num(places, nan=0, posinf=0, neginf=0)
    codes = finite.astype("<u2" if bits == 16 else "u1")
    codes[values == np.inf] = most + 1
    codes[np.isnan(values)] = most + 2
    return codes.tobytes()


def _most(bits: int) -> int:
    """Return the highest code of a finite number."""
    return int(2**bits - 3)


def _notes(picture: Picture, ranges: Iterable[Range], block: tuple[int, int], bits: int) -> Iterator[str]:
    """Yield how the elements are stored: the range of all, the size of a block, the largest rounding error."""
    whole = picture.range
    if whole.least < whole.most:
        yield f"All heads together: from {number(whole.least)} to {number(whole.most)}."
    if block != (1, 1):
        _, rows, columns = picture.shape
        yield (
            f"Each cell is the largest of {block[0]} × {block[1]} elements ({picture.rows.name} × "
            f"{picture.columns.name}). All {rows:,} × {columns:,} for each head would make the page too large."
        )
    widest = max(panel.most - panel.least for panel in ranges)
    yield f"Stored in {bits} bits, rounded by at most {number(widest / (_most(bits) - 1) / 2)}."


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


def viewer_data(
    attentions: Iterable[tuple[str, Sequence[Picture]]], how: Mapping[str, Storage], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data of the viewer: the name of each attention, and a picture for each stage, titled with the stage.

    `first` is the attention, stage and head that is shown first. Each attention is freed before the next is requested.
    """
    tokens: dict[str, list[str]] = {}
    shown = []
    for name, pictures in attentions:
        stages = []
        for picture in pictures:
            stages.append(encoded(picture, how[picture.title]))
            for axis in (picture.rows, picture.columns):
                if axis.labels:
                    tokens[axis.name] = list(axis.labels)
        if stages:
            shown.append({"name": printable(name), "stages": stages})
    colours = ["".join(hex_table(signed)) for signed in (False, True)]
    return {"attentions": shown, "tokens": tokens, "colours": colours, "first": dict(first)}


def fragment(data: Mapping[str, Any]) -> str:
    """Return the viewer as an HTML fragment."""
    # Characters that could end the element or start another one are written as JSON escapes.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return (
        f"<style>{_file('viewer.css')}</style>\n{_file('viewer.html')}"
        f'<script type="application/json" id="mha-viewer-data">{text}</script>\n<script>{_file("viewer.js")}</script>\n'
    )


def policy() -> str:
    """Return the content security policy of the page: the viewer's own script and styles, and no other resources."""
    script = base64.b64encode(hashlib.sha256(_file("viewer.js").encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{allowed}; form-action \'none\'">\n'


def with_viewer(page: str, data: Mapping[str, Any]) -> str:
    """Return a whole page with the viewer at its end."""
    head, _, rest = page.partition('<meta name="viewport"')
    body, _, end = rest.rpartition("</body>")
    body = body.replace("<body>", '<body>\n<p><a href="#mha-viewer-title">What the heads attend to</a></p>', 1)
    return f'{head}{policy()}<meta name="viewport"{body}{fragment(data)}</body>{end}'


def frame(data: Mapping[str, Any]) -> str:
    """Return the viewer as an iframe for a page with other content, e.g. a notebook."""
    page = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="UTF-8">{policy()}<title>mha-inspect</title></head>'
        f"<body>{fragment(data)}</body></html>"
    )
    return (
        f'<iframe title="What the heads attend to" sandbox="allow-scripts" '
        f'style="width: 100%; height: 52rem; border: 0" srcdoc="{html.escape(page)}"></iframe>'
    )


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

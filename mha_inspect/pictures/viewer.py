"""The viewer in a page: every attention, stage and head, with the elements in the page itself and nothing fetched.

Elements are stored as whole numbers of 16 bits, or of 8 where there are many, and the largest of a block stands for it
where there are more than a file should hold. The page says both.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from ..text import printable
from .grid import Picture, hex_table, range_of, reduced
from .terminal import number

ROOM = 12_000_000
"""Bytes of elements in a page, before they are written as text, which takes a third more."""


class Storage(NamedTuple):
    """How the elements of a stage are stored."""

    bits: int
    cells: int | None
    """How many cells a panel has along each side, at most; None where every element is stored."""


def storages(sizes: Mapping[str, tuple[int, int]]) -> dict[str, Storage]:
    """Return how each stage is stored, of which the elements and the panels of all attentions are given.

    Where there is not room for all of them whole, half of it is for the weights.
    """
    total = sum(elements for elements, _ in sizes.values())
    if total <= ROOM:
        return dict.fromkeys(sizes, Storage(16 if 2 * total <= ROOM else 8, None))
    parts = {name: max(len(sizes) - 1, 1) if name == "weights" else 1 for name in sizes}
    stored = {}
    for name, (elements, panels) in sizes.items():
        room = ROOM * parts[name] // sum(parts.values())
        cells = None if elements <= room else max(int((room / max(panels, 1)) ** 0.5), 1)
        stored[name] = Storage(16 if 2 * elements <= room else 8, cells)
    return stored


def encoded(picture: Picture, how: Storage) -> dict[str, Any]:
    """Return a picture as the viewer reads it.

    Code 0 is masked, the two highest are +inf and NaN, and those between are the numbers of one panel from `low` to
    `high` in equal steps.
    """
    _, rows, columns = picture.shape
    values, block = reduced(picture.values, how.cells or rows, how.cells or columns)
    most = 2**how.bits - 3
    ranges = [range_of(panel) for panel in values]
    low = np.array([panel.least for panel in ranges], np.float64)[:, None, None]
    width = np.array([panel.most - panel.least for panel in ranges], np.float64)[:, None, None]
    with np.errstate(invalid="ignore"):
        place = np.round((values - low) / np.where(width > 0, width, 1) * (most - 1)) + 1
    codes = np.nan_to_num(place, nan=0, posinf=0, neginf=0).astype("<u2" if how.bits == 16 else "u1")
    codes[values == np.inf] = most + 1
    codes[np.isnan(values)] = most + 2
    whole = picture.range
    notes = []
    if whole.least < whole.most:
        notes.append(f"All heads together: from {number(whole.least)} to {number(whole.most)}.")
    if block != (1, 1):
        notes.append(
            f"Each cell is the largest of {block[0]} × {block[1]} elements ({picture.rows.name} × "
            f"{picture.columns.name}): with {rows:,} × {columns:,} for each head the page would be too large."
        )
    notes.append(f"Stored in {how.bits} bits: within {number(float(width.max()) / (most - 1) / 2)} of the number.")
    signs = [["masked", "masked"]] if whole.masked else []
    signs += [["nan", f"NaN ({whole.nan:,})"]] if whole.nan else []
    signs += [["inf", f"inf ({whole.infinite:,})"]] if whole.infinite else []
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
        "low": [panel.least for panel in ranges],
        "high": [panel.most for panel in ranges],
        "signs": signs,
        "notes": [*notes, *picture.notes],
        "data": base64.b64encode(codes.tobytes()).decode(),
    }


def viewer_data(
    attentions: Iterable[tuple[str, Sequence[Picture]]], how: Mapping[str, Storage], first: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that the viewer shows: of each attention the name, and a picture a stage, entitled with it.

    `first` says which attention, stage and head it begins with. Each attention is let go before the next is asked for.
    """
    tokens: dict[str, list[str]] = {}
    shown = []
    for name, pictures in attentions:
        axes = [axis for picture in pictures for axis in (picture.rows, picture.columns)]
        tokens |= {axis.name: list(axis.labels) for axis in axes if axis.labels}
        stages = [encoded(picture, how[picture.title]) for picture in pictures]
        shown += [{"name": printable(name), "stages": stages}] if stages else []
    colours = ["".join(hex_table(signed)) for signed in (False, True)]
    return {"attentions": shown, "tokens": tokens, "colours": colours, "first": dict(first)}


def fragment(data: Mapping[str, Any]) -> str:
    """Return the viewer as a piece of a page."""
    # What could end the element, or begin another, is written as the escapes of JSON.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return (
        f"<style>{_file('viewer.css')}</style>\n{_file('viewer.html')}"
        f'<script type="application/json" id="mha-viewer-data">{text}</script>\n<script>{_file("viewer.js")}</script>\n'
    )


def policy() -> str:
    """Return what a browser is to allow in the page: the viewer's own script, styles, and nothing from anywhere."""
    script = base64.b64encode(hashlib.sha256(_file("viewer.js").encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'"
    return f'<meta http-equiv="Content-Security-Policy" content="{allowed}; form-action \'none\'">\n'


def with_viewer(page: str, data: Mapping[str, Any]) -> str:
    """Return a whole page with the viewer in it, below what it has."""
    head, _, rest = page.partition('<meta name="viewport"')
    body, _, end = rest.rpartition("</body>")
    body = body.replace("<body>", '<body>\n<p><a href="#mha-viewer-title">What the heads look at</a></p>', 1)
    return f'{head}{policy()}<meta name="viewport"{body}{fragment(data)}</body>{end}'


def frame(data: Mapping[str, Any]) -> str:
    """Return the viewer as a frame of its own for a page that holds other things, such as a notebook."""
    page = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="UTF-8">{policy()}<title>mha-inspect</title></head>'
        f"<body>{fragment(data)}</body></html>"
    )
    return (
        f'<iframe title="What the heads look at" sandbox="allow-scripts" style="width: 100%; height: 52rem; border: 0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

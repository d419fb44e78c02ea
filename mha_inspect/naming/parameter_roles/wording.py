"""How the parts of a parameter lie in it, in words and as the rows and columns of each head."""

from __future__ import annotations

from collections.abc import Iterable

from ...layers.roles import Bounds
from ...reports.params import HeadSlice
from .naming import Part, in_blocks


def by_head(parts: list[Part], dim: int, size: int, unit: str) -> str:
    """Parts that lie head by head, or group by group where several query heads share a key and a value."""
    fewest = min(len(part.touches) for part in parts)
    if not in_blocks(parts, dim, size):
        return f"in one, their {unit} between one another: --per-head says which"
    widths: list[str] = []
    for part in parts:
        number, width = len(part.touches) // fewest, len(part.touches[0].places[dim])
        rows = "" if widths else f" {unit}"
        widths.append(f"{f'{number}·' if number > 1 else ''}{width}{rows} of {part.letter}")
    grouped = any(len(part.touches) != fewest for part in parts)
    return f"{'group by group' if grouped else 'head by head'}: {', '.join(widths)} each"


def listed(kind: str, letters: list[str]) -> str:
    """`W_q, W_k, W_v`."""
    return ", ".join(f"{kind}_{letter}" for letter in letters)


def runs_of(indices: Iterable[int]) -> list[Bounds]:
    """Indices as runs, the start included, the stop not."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return [(start, stop) for start, stop in runs]


def slices_of(kind: str, parts: list[Part], shape: tuple[int, ...]) -> tuple[HeadSlice, ...]:
    """The rows and columns of each head, where they are all of its elements."""
    large = [dim for dim, size in enumerate(shape) if size > 1] or [0]
    if kind == "W" and len(shape) == 2:
        large = [0, 1]
    if len(large) > 2:
        return ()
    found = []
    for part in parts:
        if part.owned.shared or (part.letter == "o" and kind == "b"):
            continue
        name = {"appended": "bias", "norm": "norm"}.get(kind, kind) + f"_{part.letter}"
        for head, touch in part.owned.heads.items():
            if not touch.is_box:
                return ()
            rows = runs_of(touch.places[large[0]])
            columns = runs_of(touch.places[large[1]]) if len(large) > 1 else [None]
            found += [HeadSlice(head, name, row, column) for row in rows for column in columns]
    return tuple(found)

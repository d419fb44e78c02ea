"""Which columns of a table a page has room for, how wide each is, and where text breaks. No format is known here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..text import cells, fitting
from .page import Table

_WORD = re.compile(r"(?:%\d+ )?(?:\[[\d, ]*\]|[^ ])+ *")
"""A run without spaces; a shape counts as one, and so does an operand with its shape: `%3 [2, 12, 256],`."""

GAP = 2
"""Spaces between columns."""


@dataclass(frozen=True)
class ShownColumn:
    """A column that is shown."""

    index: int
    """Its place in the table."""
    width: int
    below: tuple[int, ...]
    """Places of columns whose text is put under the text of this one."""


@dataclass(frozen=True)
class Layout:
    """A table, or a part of it, that fits."""

    columns: tuple[ShownColumn, ...]
    dropped: tuple[str, ...] = ()
    """Titles of columns that there was no room for."""


class _Fitting:
    """One table on its way to a width. Columns are moved under others, then dropped, then squeezed."""

    def __init__(self, table: Table, indices: list[int], width: int) -> None:
        self.columns = table.columns
        self.width = width
        self.shown = list(indices)
        self.below: dict[int, list[int]] = {}
        self.dropped: list[str] = []
        texts = {i: [row[i].full for row in table.rows] for i in range(len(table.columns))}
        self.body = {i: max(map(cells, column), default=0) for i, column in texts.items()}
        self.body_word = {i: max(map(longest_word, column), default=0) for i, column in texts.items()}

    def room(self, widths: dict[int, int]) -> int:
        """Return the columns that are left of the page."""
        return self.width - GAP * (len(self.shown) - 1) - sum(widths.values())

    def fit(self) -> Layout:
        """Return the first layout that has room, with as little moved and dropped as that takes."""
        while True:
            widths = self.widths(wrapped_titles=False) or self.widths(wrapped_titles=True)
            if widths is not None:
                return self.layout(self.unwrapped_titles(widths))
            if not (self.move() or self.drop()):
                return self.layout(self.squeezed())

    def widths(self, *, wrapped_titles: bool) -> dict[int, int] | None:
        """Return widths at which every column keeps to the lines that it is meant to have, or None."""
        widths, floors = {}, {}
        for i in self.shown:
            column = self.columns[i]
            title = longest_word(column.title) if wrapped_titles else cells(column.title)
            least = max(title, self.words_below(i))
            widths[i] = floors[i] = max(self.body[i], least)
            if column.wrap:
                floors[i] = max(min(column.wrap, self.body[i]), self.body_word[i], least)
        return widths if self.narrow(widths, floors) else None

    def words_below(self, host: int) -> int:
        """Return the width that the columns moved under this one need so that no word of theirs is broken."""
        return max((2 + self.body_word[guest] for guest in self.below.get(host, ())), default=0)

    def unwrapped_titles(self, widths: dict[int, int]) -> dict[int, int]:
        """Give what room is left to titles that are whole with little of it."""
        missing = {i: cells(self.columns[i].title) - widths[i] for i in self.shown}
        for i in sorted(self.shown, key=lambda i: missing[i]):
            if 0 < missing[i] <= self.room(widths):
                widths[i] += missing[i]
        return widths

    def narrow(self, widths: dict[int, int], floors: dict[int, int]) -> bool:
        """Take from the widest that has something to give, until all fit."""
        while self.room(widths) < 0:
            givers = [i for i in self.shown if widths[i] > floors[i]]
            if not givers:
                return False
            widths[max(givers, key=lambda i: widths[i])] -= 1
        return True

    def move(self) -> bool:
        """Put a column under the one that it may go under."""
        hosts = {self.columns[i].title: i for i in self.shown}
        guest = next((i for i in self.shown if self.columns[i].into in hosts), None)
        if guest is not None:
            self.shown.remove(guest)
            self.below.setdefault(hosts[self.columns[guest].into], []).append(guest)
        return guest is not None

    def drop(self) -> bool:
        """Leave out the column that will be missed least."""
        last = max(self.shown, key=lambda i: self.columns[i].drop)
        if self.columns[last].drop:
            self.shown.remove(last)
            self.dropped.insert(0, self.columns[last].title)
        return bool(self.columns[last].drop)

    def squeezed(self) -> dict[int, int]:
        """Return widths for a page that is narrower than the table was made for: between words first, then anywhere."""
        least = {i: max(longest_word(self.columns[i].title), self.words_below(i)) for i in self.shown}
        widths = {i: max(self.body[i], least[i]) for i in self.shown}
        if not self.narrow(widths, {i: max(self.body_word[i], least[i]) for i in self.shown}):
            self.narrow(widths, dict.fromkeys(self.shown, 1))
        return widths

    def layout(self, widths: dict[int, int]) -> Layout:
        """Return the layout; what room is left goes to columns that have others below them."""
        for host, guests in self.below.items():
            wanted = sum(self.body[guest] + 2 for guest in guests) - widths[host]
            widths[host] += max(min(wanted, self.room(widths)), 0)
        columns = (ShownColumn(i, max(widths[i], 1), tuple(self.below.get(i, ()))) for i in self.shown)
        return Layout(tuple(columns), tuple(self.dropped))


def layouts(table: Table, width: int) -> tuple[Layout, ...]:
    """Return how to show the table in `width` columns: one layout, or several for a table that may be split."""
    if not table.columns:
        return ()
    indices = list(range(len(table.columns)))
    if not table.split:
        return (_Fitting(table, indices, width).fit(),)
    parts: list[list[int]] = [[]]
    for i in indices[1:]:
        if parts[-1] and _Fitting(table, [0, *parts[-1], i], width).widths(wrapped_titles=True) is None:
            parts.append([])
        parts[-1].append(i)
    return tuple(_Fitting(table, [0, *part], width).fit() for part in parts)


def longest_word(text: str) -> int:
    """Return the width of the longest part that is not to be broken."""
    return max((cells(word.rstrip(" ")) for word in _WORD.findall(text)), default=0)


def breaks(text: str, width: int) -> list[int]:
    """Return where new lines begin, so that no line is wider than `width`.

    A word that is wider is broken behind a slash, so that paths can be read, or anywhere where it has none.
    """
    starts: list[int] = []
    room = max(width, 1)
    if cells(text) <= room:
        return starts
    used = 0
    for match in _WORD.finditer(text):
        word, place = match[0].rstrip(" "), match.start()
        if used and used + cells(word) > room:
            starts.append(place)
            used = 0
        while fitting(word, room - used) < len(word) and len(word) > 1:
            place += (taken := _fitting(word, room))
            word = word[taken:]
            starts.append(place)
        used += cells(match[0][place - match.start() :])
    return starts


def _fitting(word: str, room: int) -> int:
    """Return how many characters of a word that is too wide go on this line: one at least."""
    fits = fitting(word, room)
    return word.rfind("/", 0, fits) + 1 or max(fits, 1)


def pieces(text: str, width: int) -> list[str]:
    """Return the lines of the text; none for an empty one."""
    starts = breaks(text, width)
    return [text[i:j].rstrip(" ") for i, j in zip([0, *starts], [*starts, len(text)], strict=True) if j > i]

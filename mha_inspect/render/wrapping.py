"""Where a text may be broken into lines: between words, and never inside a shape."""

from __future__ import annotations

import re

from ..text import cells, fitting

_WORD = re.compile(r"(?:%\d+ )?(?:\[[\d, ]*\]|[^ ])+ *")
"""A run without spaces; a shape counts as one, and so does an operand with its shape: `%3 [2, 12, 256],`."""


def longest_word(text: str) -> int:
    """Width of the longest part that is not to be broken."""
    return max((cells(word.rstrip(" ")) for word in _WORD.findall(text)), default=0)


def breaks(text: str, width: int) -> list[int]:
    """Where new lines begin, so that no line is wider than `width`.

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
    """How many characters of a word that is too wide go on this line: one at least."""
    fits = fitting(word, room)
    return word.rfind("/", 0, fits) + 1 or max(fits, 1)


def pieces(text: str, width: int) -> list[str]:
    """The lines of the text; none for an empty one."""
    starts = breaks(text, width)
    return [text[i:j].rstrip(" ") for i, j in zip([0, *starts], [*starts, len(text)], strict=True) if j > i]

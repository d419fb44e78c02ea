"""Which operations came out of one call, where a loop makes the same call turn after turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def tell_turns_apart(calls: Sequence[int], names: Sequence[str], whole: frozenset[int] | set[int]) -> list[int]:
    """Return the number of the call of each operation, those of each turn of `for w in ws: x = w @ x` their own.

    A call is told by where Python stands, and there it stands in every turn. What gives the turns away is that the same
    operations come over and over. Calls in `whole` are known to be one.
    """
    free = max(calls, default=-1) + 1
    told = list(calls)
    for call, group in groupby(range(len(calls)), key=calls.__getitem__):
        together = list(group)
        if len(together) == 1 or call in whole:
            continue
        size = _period([names[place] for place in together])
        for start in range(size, len(together), size):
            told[together[start] : together[start] + size] = [free] * size
            free += 1
    return told


def _period(names: Sequence[str]) -> int:
    """Return the length of what is repeated from the first to the last name; all of it where nothing is."""
    whole = len(names)
    lengths = (size for size in range(1, whole // 2 + 1) if whole % size == 0)
    return next((size for size in lengths if names[size:] == names[:-size]), whole)

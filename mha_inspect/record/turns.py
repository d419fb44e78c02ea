"""Which operations came out of one call, where a loop makes the same call turn after turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from .ops import Op


def tell_turns_apart(ops: Sequence[Op]) -> Iterator[Op]:
    """The operations, those of each turn of `for w in ws: x = w @ x` with a call number of their own.

    A call is told by where Python stands, and there it stands in every turn. What gives the turns away is that the same
    operations come over and over.
    """
    free = ops[-1].call + 1 if ops else 0
    for _, group in groupby(ops, key=attrgetter("call")):
        together = list(group)
        if len(together) == 1:
            yield together[0]
            continue
        size = _period([op.name for op in together])
        yield from together[:size]
        for start in range(size, len(together), size):
            yield from (replace(op, call=free) for op in together[start : start + size])
            free += 1


def _period(names: Sequence[str]) -> int:
    """The length of what is repeated from the first to the last name; all of it where nothing is."""
    whole = len(names)
    lengths = (size for size in range(1, whole // 2 + 1) if whole % size == 0)
    return next((size for size in lengths if names[size:] == names[:-size]), whole)

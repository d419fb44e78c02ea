"""Causes in a table or a cache: ids and positions that it lacks, and more tokens than it has room for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .dtypes import has_integers
from .facts import BROADCASTS, Facts, Operand, first_clash
from .suspect import Shape, Suspect
from .tried import Fix, resized

_OUT_OF_BOUNDS = r"out of bounds for dimension \d+ with size (\d+)"


@dataclass(frozen=True, eq=False)
class _Lookup:
    """Rows of a table that are read by number."""

    table: Operand
    ids: Operand
    """The numbers of the rows."""
    size: int
    """The number of rows: from 0 to `size - 1` are in range."""


@dataclass(frozen=True, eq=False)
class _Room:
    """A part of a cache or table that another tensor is written into, or added to."""

    cache: Operand
    shape: Shape
    """The shape of the part: `batch heads key head_dim` of `cache[:, :, start:]`."""
    incoming: Operand


def index_out_of_range(facts: Facts) -> Suspect | None:
    """Judge ids and positions that a table lacks."""
    lookup = _lookup_of(facts)
    if lookup is None:
        return None
    table, ids, size = lookup.table, lookup.ids, lookup.size
    first, last = (int(bound) for bound in ids.given.value.aminmax())
    if first >= 0 and last < size:
        return None
    what = f"{ids.name} has numbers from {first} to {last}; {table.is_shape}: 0 to {size - 1} are in range."
    return Suspect("index_out_of_range", what, (_in_range(lookup, first, last),))


def _lookup_of(facts: Facts) -> _Lookup | None:
    """Return the rows that a failing call reads; None if their numbers are unknown."""
    is_embedding = facts.base == "embedding"
    table = facts.given("weight") if is_embedding else next(iter(facts.operands), None)
    ids = next((o for o in facts.operands if has_integers(o) and o is not table), None)
    if table is None or ids is None or not ids.given.value.numel() or ids.given.value.is_meta:
        return None
    said = re.search(_OUT_OF_BOUNDS, facts.message)
    if is_embedding:
        size = table.shape[0]
    elif said is not None:
        size = int(said[1])
    else:
        return None
    return _Lookup(table, ids, size) if size else None


def _in_range(lookup: _Lookup, first: int, last: int) -> Fix:
    """Return the fix for numbers from `first` to `last`, of which some are below 0 or too large."""
    ids, size = lookup.ids, lookup.size
    if first < 0 and last < size:
        way = "replace ids below 0, e.g. by the padding id: .clamp(min=0)"
        return Fix(way, [(ids, lambda tensor: tensor.clamp(min=0))])
    way = f"use numbers below {size}, or make {lookup.table.name} for {last + 1}"
    if first < 0:
        way = f"use numbers from 0 to {size - 1}"
    return Fix(way, [(ids, lambda tensor: tensor.clamp(0, size - 1))])


def no_room(facts: Facts) -> Suspect | None:
    """Judge more tokens than a cache or a table has room for."""
    for room in _rooms(facts):
        cache, incoming = room.cache, room.incoming
        place = first_clash(room.shape, incoming.shape)
        if place is None or room.shape[place] >= incoming.shape[place]:
            continue
        needs = cache.shape[place] - room.shape[place] + incoming.shape[place]
        where = len(cache.shape) + place
        what = f"{incoming.is_shape}; {cache.is_shape}, with room for {room.shape[place]} in dimension {where}."
        way = f"make dimension {where} of {cache.name} {needs} or more, or pass less"
        return Suspect("no_room", what, (Fix(way, [(cache, resized(where, needs))]),))
    return None


def _rooms(facts: Facts) -> Iterator[_Room]:
    """Yield the part of a cache that is written, and tables that the other operand is added to."""
    if len(facts.operands) != 2 or any(o.from_scores for o in facts.operands):
        return
    left, right = facts.operands
    if facts.base == "setitem" and facts.call.args[2] is right.given.value:
        try:
            part = left.given.value[facts.call.args[1]]
        except (IndexError, TypeError):  # the index itself may be wrong
            return
        yield _Room(left, tuple(part.shape), right)
    elif facts.base in BROADCASTS:
        for table, incoming in ((left, right), (right, left)):
            if table.is_table and not incoming.is_table and table.shape[-1:] == incoming.shape[-1:]:
                yield _Room(table, table.shape, incoming)

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
    ids = lookup.ids
    lowest, highest = ids.given.value.aminmax()
    first = int(lowest)
    last = int(highest)
    if first >= 0 and last < lookup.size:
        return None
    numbers = f"{ids.name} has numbers from {first} to {last}"
    return Suspect(
        "index_out_of_range",
        f"{numbers}; {lookup.table.is_shape}: 0 to {lookup.size - 1} are in range.",
        (_in_range(lookup, first, last),),
    )


def _lookup_of(facts: Facts) -> _Lookup | None:
    """Return the rows that a failing call reads; None if their numbers are unknown."""
    table = _table_of(facts)
    if table is None:
        return None
    ids = _ids_beside(facts, table)
    if ids is None or ids.given.value.is_meta:
        return None
    if not ids.given.value.numel():
        return None
    size = _rows_of(facts, table)
    if not size:
        return None
    return _Lookup(table, ids, size)


def _table_of(facts: Facts) -> Operand | None:
    """Return the weight of an embedding, or the first operand of another call."""
    if facts.base == "embedding":
        return facts.given("weight")
    if not facts.operands:
        return None
    return facts.operands[0]


def _ids_beside(facts: Facts, table: Operand) -> Operand | None:
    """Return the first operand with whole numbers that is not the table; None without one."""
    for operand in facts.operands:
        if operand is not table and has_integers(operand):
            return operand
    return None


def _rows_of(facts: Facts, table: Operand) -> int:
    """Return the number of rows of an embedding, or the size that the message names; 0 if it is unknown."""
    if facts.base == "embedding":
        return table.shape[0]
    size_in_message = re.search(_OUT_OF_BOUNDS, facts.message)
    if size_in_message is None:
        return 0
    return int(size_in_message[1])


def _in_range(lookup: _Lookup, first: int, last: int) -> Fix:
    """Return the fix for numbers from `first` to `last`, of which some are below 0 or too large."""
    ids = lookup.ids
    size = lookup.size
    if first < 0 and last < size:
        return Fix.editing(
            ids,
            lambda tensor: tensor.clamp(min=0),
            "replace ids below 0, e.g. by the padding id: .clamp(min=0)",
        )
    way = f"use numbers below {size}, or make {lookup.table.name} for {last + 1}"
    if first < 0:
        way = f"use numbers from 0 to {size - 1}"
    return Fix.editing(
        ids,
        lambda tensor: tensor.clamp(0, size - 1),
        way,
    )


def no_room(facts: Facts) -> Suspect | None:
    """Judge more tokens than a cache or a table has room for."""
    for room in _rooms(facts):
        place = first_clash(room.shape, room.incoming.shape)
        if place is None:
            continue
        if room.shape[place] < room.incoming.shape[place]:
            return _too_small(room, place)
    return None


def _too_small(room: _Room, place: int) -> Suspect:
    """Return the cause of a cache that has too few positions in a dimension, counted from -1."""
    cache = room.cache
    incoming = room.incoming
    size = room.shape[place]
    before = cache.shape[place] - size
    needs = before + incoming.shape[place]
    dimension = len(cache.shape) + place
    fix = Fix.editing(
        cache,
        resized(dimension, needs),
        f"make dimension {dimension} of {cache.name} {needs} or more, or pass less",
    )
    return Suspect(
        "no_room",
        f"{incoming.is_shape}; {cache.is_shape}, with room for {size} in dimension {dimension}.",
        (fix,),
    )


def _rooms(facts: Facts) -> Iterator[_Room]:
    """Yield the part of a cache that is written, and tables that the other operand is added to."""
    if len(facts.operands) != 2:
        return
    left, right = facts.operands
    if left.from_scores or right.from_scores:
        return
    if facts.base == "setitem" and facts.call.args[2] is right.given.value:
        try:
            part = left.given.value[facts.call.args[1]]
        except (IndexError, TypeError):  # the index itself may be wrong
            return
        yield _Room(left, tuple(part.shape), right)
    elif facts.base in BROADCASTS:
        for table, incoming in ((left, right), (right, left)):
            if not table.is_table or incoming.is_table:
                continue
            if table.shape[-1:] == incoming.shape[-1:]:
                yield _Room(table, table.shape, incoming)

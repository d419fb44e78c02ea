"""Causes in the sequences that a layer of torch is given: batch sizes and lengths of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from .facts import Facts, Operand
from .reached import ATTENTION, LAYERS
from .suspect import SAME_BATCH, SAME_SEQUENCE, Suspect, shared_item
from .tried import Edit, Fix, of_shape, transposed


@dataclass(frozen=True)
class Extent:
    """The sizes of `batch sequence embed` as a layer reads them."""

    batch: int
    """0 if the input has no batch."""
    length: int


def extent_of(facts: Facts, given: Operand) -> Extent:
    """Return batch and length of an input as the layer reads them."""
    if not given.shape:
        return Extent(batch=0, length=0)
    if len(given.shape) != 3:
        return Extent(batch=0, length=given.shape[0])
    first, second, _ = given.shape
    if facts.call.batch_first:
        return Extent(batch=first, length=second)
    return Extent(batch=second, length=first)


@dataclass(frozen=True, eq=False)
class _Sequences:
    """The queries and keys of a layer, with a batch each."""

    query: Operand
    key: Operand
    of_query: Extent
    of_key: Extent
    reading: str
    """Which dimension the layer takes as the batch."""


def _sequences(facts: Facts) -> _Sequences | None:
    """Return the queries and keys of a layer of torch; None without a batch, or for other calls."""
    if facts.base not in LAYERS:
        return None
    query = facts.given("query", "tgt")
    key = facts.given("key", "src")
    if query is None or key is None:
        return None
    of_query = extent_of(facts, query)
    of_key = extent_of(facts, key)
    if not of_query.batch or not of_key.batch:
        return None
    return _Sequences(query, key, of_query, of_key, _reading(facts))


def _reading(facts: Facts) -> str:
    """Return as what a layer takes dimension 0: `batch_first=True takes dimension 0 as the batch`."""
    if facts.call.batch_first:
        return "batch_first=True takes dimension 0 as the batch"
    return "batch_first=False takes dimension 0 as the sequence"


def batch_and_sequence_swapped(facts: Facts) -> Suspect | None:
    """Judge inputs that fit each other with batch and sequence swapped."""
    given = _sequences(facts)
    if given is None:
        return None
    why = _why_swapped(facts, given)
    if not why:
        return None
    way = "create the layer with batch_first=True or pass x.transpose(0, 1), if the batch is dimension 0"
    if facts.call.batch_first:
        way = "pass x.transpose(0, 1) to make the sequence dimension 1, or create the layer with batch_first=False"
    return Suspect("batch_and_sequence_swapped", f"{given.reading}: {why}", (Fix(way, swapped(facts)),))


def _why_swapped(facts: Facts, given: _Sequences) -> str:
    """Return what shows that batch and sequence are swapped; empty if nothing does."""
    batch = given.of_query.batch
    length = given.of_query.length
    key_batch = given.of_key.batch
    if batch != key_batch:
        if length != given.of_key.length:
            return ""
        agree = f"{given.query.name} and {given.key.name} agree in the other dimension"
        return f"batch {batch} does not match batch {key_batch}, but {agree}."
    mask = facts.given("attn_mask")
    if mask is None or length == batch or mask.shape != (batch, batch):
        return ""
    dimension = 1
    if facts.call.batch_first:
        dimension = 0
    return f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {dimension}."


def padding_mask_swapped(facts: Facts) -> Suspect | None:
    """Judge a padding mask that is `key batch` as the layer reads its keys."""
    given = _sequences(facts)
    padding = facts.given("key_padding_mask")
    if given is None or padding is None:
        return None
    batch = given.of_key.batch
    length = given.of_key.length
    if length == batch or padding.shape != (length, batch):
        return None
    way = "batch_first=True"
    if facts.call.batch_first:
        way = "x.transpose(0, 1)"
    turned_mask = Fix.editing(
        padding,
        transposed(0, 1),
        f"use {padding.name}.T if {given.key.name} is right",
    )
    swapped_keys = Fix(
        f"use {way} for {given.key.name} if the mask is right",
        edits=swapped(facts),
    )
    return Suspect(
        "batch_and_sequence_swapped",
        f"{given.reading}: batch {batch}, key {length}. {padding.is_shape}; with either batch_first, "
        f"key_padding_mask must be batch key, [{batch}, {length}].",
        (turned_mask, swapped_keys),
    )


def batch_differs(facts: Facts) -> Suspect | None:
    """Judge queries and keys of different batch sizes."""
    given = _sequences(facts)
    if given is None:
        return None
    batch = given.of_query.batch
    key_batch = given.of_key.batch
    if batch == key_batch:
        return None
    names = f"{given.query.name} has batch {batch} and {given.key.name} has batch {key_batch}"
    dimension = 1
    if facts.call.batch_first:
        dimension = 0
    if batch < key_batch:
        fixes = shared_item(given.query, dimension, key_batch)
    else:
        fixes = shared_item(given.key, dimension, batch)
    return Suspect(
        "batch_differs",
        f"{given.reading}: {names}. {SAME_BATCH}",
        fixes,
    )


def lengths_differ(facts: Facts) -> Suspect | None:
    """Judge keys and values of nn.MultiheadAttention with different batch sizes or lengths."""
    if facts.base != ATTENTION or facts.given("query") is None:
        return None
    key = facts.given("key")
    value = facts.given("value")
    if key is None or value is None:
        return None
    if len(key.shape) != 3 or len(value.shape) != 3:
        return None
    if extent_of(facts, key) == extent_of(facts, value):
        return None
    right_shape = (*key.shape[:2], value.shape[-1])
    return Suspect(
        "lengths_differ",
        f"Keys and values differ: {key.is_shape}, {value.is_shape}.",
        (Fix.editing(value, of_shape(right_shape), SAME_SEQUENCE),),
    )


def is_mask_of_keys(facts: Facts, mask: Operand) -> bool:
    """Return whether a mask is `batch key`, and could not be `query key`."""
    query = facts.given("query")
    key = facts.given("key")
    if facts.attention is None or query is None or key is None:
        return False
    of_query = extent_of(facts, query)
    of_key = extent_of(facts, key)
    if of_query.batch == of_query.length:
        return False
    return mask.shape == (of_query.batch, of_key.length)


def swapped(facts: Facts) -> list[tuple[Operand, Edit]]:
    """Return the edits that swap batch and sequence of what a layer is given."""
    edits = []
    for operand in facts.operands:
        is_sequence = operand.role in ("query", "key", "value", "src", "tgt")
        if is_sequence and len(operand.shape) == 3:
            edits.append((operand, transposed(0, 1)))
    return edits

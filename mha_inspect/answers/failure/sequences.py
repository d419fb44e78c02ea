"""Causes in the sequences that a layer of torch is given: batch sizes and lengths of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from .facts import Facts, Operand
from .reached import ATTENTION, LAYERS
from .suspect import SAME_BATCH, SAME_SEQUENCE, Suspect, shared_item
from .tried import Edit, Fix, of_shape


@dataclass(frozen=True)
class Extent:
    """The sizes of `batch sequence embed` as a layer reads them."""

    batch: int
    """0 if the input has no batch."""
    length: int


def extent_of(facts: Facts, given: Operand) -> Extent:
    """Return batch and length of an input as the layer reads them."""
    if len(given.shape) != 3:
        return Extent(0, given.shape[0] if given.shape else 0)
    first, second, _ = given.shape
    return Extent(first, second) if facts.call.batch_first else Extent(second, first)


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
    query, key = facts.given("query", "tgt"), facts.given("key", "src")
    if query is None or key is None or facts.base not in LAYERS:
        return None
    of_query, of_key = extent_of(facts, query), extent_of(facts, key)
    if not of_query.batch or not of_key.batch:
        return None
    batch_first = facts.call.batch_first
    reading = f"batch_first={batch_first} takes dimension 0 as the {'batch' if batch_first else 'sequence'}"
    return _Sequences(query, key, of_query, of_key, reading)


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
    batch, length = given.of_query.batch, given.of_query.length
    key_batch, key_length = given.of_key.batch, given.of_key.length
    if batch != key_batch and length == key_length:
        agree = f"{given.query.name} and {given.key.name} agree in the other dimension"
        return f"batch {batch} does not match batch {key_batch}, but {agree}."
    mask = facts.given("attn_mask")
    if mask is not None and mask.shape == (batch, batch) and batch == key_batch != length:
        return (
            f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {0 if facts.call.batch_first else 1}."
        )
    return ""


def padding_mask_swapped(facts: Facts) -> Suspect | None:
    """Judge a padding mask that is `key batch` as the layer reads its keys."""
    given, padding = _sequences(facts), facts.given("key_padding_mask")
    if given is None or padding is None:
        return None
    batch, length = given.of_key.batch, given.of_key.length
    if padding.shape != (length, batch) or length == batch:
        return None
    way = "x.transpose(0, 1)" if facts.call.batch_first else "batch_first=True"
    return Suspect(
        "batch_and_sequence_swapped",
        f"{given.reading}: batch {batch}, key {length}. {padding.is_shape}; with either batch_first, "
        f"key_padding_mask must be batch key, [{batch}, {length}].",
        (
            Fix(f"use {padding.name}.T if {given.key.name} is right", [(padding, lambda tensor: tensor.T)]),
            Fix(f"use {way} for {given.key.name} if the mask is right", swapped(facts)),
        ),
    )


def batch_differs(facts: Facts) -> Suspect | None:
    """Judge queries and keys of different batch sizes."""
    given = _sequences(facts)
    if given is None or given.of_query.batch == given.of_key.batch:
        return None
    batch, key_batch = given.of_query.batch, given.of_key.batch
    names = f"{given.query.name} has batch {batch} and {given.key.name} has batch {key_batch}"
    dimension = 0 if facts.call.batch_first else 1
    if batch < key_batch:
        fixes = shared_item(given.query, dimension, key_batch)
    else:
        fixes = shared_item(given.key, dimension, batch)
    return Suspect("batch_differs", f"{given.reading}: {names}. {SAME_BATCH}", fixes)


def lengths_differ(facts: Facts) -> Suspect | None:
    """Judge keys and values of nn.MultiheadAttention with different batch sizes or lengths."""
    query, key, value = facts.given("query"), facts.given("key"), facts.given("value")
    if facts.base != ATTENTION or query is None or key is None or value is None:
        return None
    if len(key.shape) != 3 or len(value.shape) != 3 or extent_of(facts, key) == extent_of(facts, value):
        return None
    what = f"Keys and values differ: {key.is_shape}, {value.is_shape}."
    shape = (*key.shape[:2], value.shape[-1])
    return Suspect("lengths_differ", what, (Fix(SAME_SEQUENCE, [(value, of_shape(shape))]),))


def is_mask_of_keys(facts: Facts, mask: Operand) -> bool:
    """Return whether a mask is `batch key`, and could not be `query key`."""
    query, key = facts.given("query"), facts.given("key")
    if facts.attention is None or query is None or key is None:
        return False
    batch, length = extent_of(facts, query).batch, extent_of(facts, query).length
    key_length = extent_of(facts, key).length
    return mask.shape == (batch, key_length) != (length, key_length)


def swapped(facts: Facts) -> list[tuple[Operand, Edit]]:
    """Return the edits that swap batch and sequence of what a layer is given."""
    given = [o for o in facts.operands if o.role in ("query", "key", "value", "src", "tgt") and len(o.shape) == 3]
    return [(o, lambda tensor: tensor.transpose(0, 1)) for o in given]

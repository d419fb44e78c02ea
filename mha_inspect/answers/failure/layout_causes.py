"""Common mistakes in the layout of what an attention takes: batch and sequence, and the mask over the scores."""

from __future__ import annotations

from collections.abc import Iterator

from ... import text
from ...reports.trace import Cause
from .facts import HEADS, Facts, Operand, first_clash
from .reached import ATTENTION, LAYERS, SDPA

Shape = tuple[int, ...]

SAME_EXAMPLES = "Both must have the same batch size; use .expand on the batch dimension to share one item."
SAME_SEQUENCE = "Keys and values must come from the same sequence."


def _lengths(facts: Facts, given: Operand) -> tuple[int, int]:
    """Return batch and length as the layer reads them; batch 0 means that the input has no batch."""
    if len(given.shape) != 3:
        return 0, given.shape[0] if given.shape else 0
    first, second, _ = given.shape
    return (first, second) if facts.call.batch_first else (second, first)


def sequences(facts: Facts) -> Iterator[Cause]:
    """Judge batch sizes and lengths; first whether swapping the two would make them fit."""
    query, key, value = facts.given("query", "tgt"), facts.given("key", "src"), facts.given("value")
    if query is None or key is None or facts.base not in LAYERS:
        return
    (batch, length), (key_batch, key_length) = _lengths(facts, query), _lengths(facts, key)
    mask, padding, batch_first = facts.given("attn_mask"), facts.given("key_padding_mask"), facts.call.batch_first
    reading = f"batch_first={batch_first} takes dimension 0 as the {'batch' if batch_first else 'sequence'}"
    both, why = bool(batch and key_batch), ""
    if both and batch != key_batch and length == key_length:
        agree = f"{query.name} and {key.name} agree in the other dimension"
        why = f"batch {batch} does not match batch {key_batch}, but {agree}."
    elif both and mask is not None and length != batch == key_batch and mask.shape == (batch, batch):
        why = f"length {length}, batch {batch}; {mask.is_shape} and fits dimension {0 if batch_first else 1}."
    elif both and padding is not None and padding.shape == (key_length, key_batch) and key_length != key_batch:
        way = "x.transpose(0, 1)" if batch_first else "batch_first=True"
        yield Cause(
            "batch_and_sequence_swapped",
            f"{reading}: batch {key_batch}, key {key_length}. {padding.is_shape}; with either batch_first, "
            f"key_padding_mask must be batch key, [{key_batch}, {key_length}].",
            f"If {key.name} is right, use {padding.name}.T. If the mask is right, use {way} for {key.name}.",
        )
    if why:
        way = "If the batch is dimension 0, create the layer with batch_first=True or pass x.transpose(0, 1)."
        if batch_first:
            way = "Pass x.transpose(0, 1) to make the sequence dimension 1, or create the layer with batch_first=False."
        yield Cause("batch_and_sequence_swapped", f"{reading}: {why}", way)
    if both and batch != key_batch:
        what = f"{reading}: {query.name} has batch {batch} and {key.name} has batch {key_batch}."
        yield Cause("batch_differs", what, SAME_EXAMPLES)
    whole = facts.base == ATTENTION and value is not None and len(key.shape) == len(value.shape) == 3
    if whole and value is not None and _lengths(facts, key) != _lengths(facts, value):
        yield Cause("lengths_differ", f"Keys and values differ: {key.is_shape}, {value.is_shape}.", SAME_SEQUENCE)


def masks(facts: Facts) -> Iterator[Cause]:
    """Judge a mask that does not fit the scores."""
    under = facts.mask_and_scores[1] if facts.mask_and_scores is not None else None
    if under is not None and len(under.shape) == 4 and all(dim[0] in HEADS for dim in under.dims[-2:]):
        yield Cause(
            "heads_not_transposed",
            f"{under.text}: heads are multiplied with heads; queries and keys were split but not transposed.",
            "Use .transpose(1, 2) on q, k and v after the view that splits them: heads must come before the sequence.",
        )
    mask, scores, by_shape = _laid_mask(facts)
    padding, key_given = facts.given("key_padding_mask"), facts.given("key")
    if facts.attention is not None and padding is not None and key_given is not None:
        batch, length = _lengths(facts, key_given)
        expected = (batch, length) if batch else (length,)
        if padding.shape != expected:
            what = f"{padding.is_shape}; expected batch key, {text.shape(expected)}, for key_padding_mask."
            yield Cause("mask_size", what, f"Build the mask for batch {batch} and key {length}.")
    fits = mask is None or (first_clash(mask.shape, scores) is None and len(mask.shape) <= len(scores))
    if mask is None or fits or not mask.shape or not 2 <= len(scores) <= 4:
        return
    (query, key), over = scores[-2:], f"and the scores are {text.shape(scores)}"
    if mask.shape in by_shape:
        yield Cause("mask_rank", f"{mask.is_shape}{by_shape[mask.shape][0]}", by_shape[mask.shape][1])
    if mask.shape[-2:] == (key, query) and key != query:
        what = f"{mask.is_shape}, with key {key} before query {query}, {over}."
        yield Cause("mask_transposed", what, f"{mask.name}.transpose(-2, -1).")
    if len(scores) >= 3 and mask.shape == (scores[0], scores[0]) and scores[0] not in (query, key):
        yield Cause(
            "batch_and_sequence_swapped",
            f"{mask.is_shape}, {over}: it fits dimension 0, which is taken as the batch.",
            "The input and the layer disagree on whether batch or sequence comes first. "
            "Use x.transpose(0, 1), or change batch_first.",
        )
    rows, columns = (1, *mask.shape)[-2:]
    if rows not in (1, query) or columns not in (1, key):
        covers = f"{columns} keys" if rows == 1 else f"query {rows}, key {columns}"
        way = f"Build the mask for query {query} and key {key}, or pass fewer positions."
        if (rows == 1 or rows >= query) and columns >= key:
            way = f"Cut the mask to the lengths of this call: {mask.name}[..., :{query}, :{key}]."
        what = f"{mask.name} covers {covers}; expected query {query}, key {key} for scores {text.shape(scores)}."
        yield Cause("mask_size", what, way)


def _laid_mask(facts: Facts) -> tuple[Operand | None, Shape, dict[Shape, tuple[str, str]]]:
    """Return a mask, the shape of its scores, and for masks of a wrong rank their explanation and fix."""
    mask, query, key = facts.given("attn_mask"), facts.given("query"), facts.given("key")
    scores: Shape = ()
    if facts.attention is not None and query is not None and key is not None and mask is not None:
        (batch, length), (_, key_length) = _lengths(facts, query), _lengths(facts, key)
        heads, pairs = facts.attention.num_heads, (length, key_length)
        scores = (max(batch, 1) * heads, *pairs)
        wanted = f"{text.shape(pairs)} or {text.shape(scores)}, batch·heads first"
        expand = "" if mask.shape[1:2] == (heads,) else f".expand(-1, {heads}, -1, -1)"
        split = f"; the layer expects {wanted}.", f"{mask.name}{expand}.flatten(0, 1)."
        repeated = f"{mask.name}.repeat_interleave({heads}, dim=0)."
        of_keys = f", batch key; expected attn_mask {wanted}.", f"Pass it as key_padding_mask={mask.name}."
        return (
            mask,
            scores,
            {
                (batch, key_length): of_keys,
                (batch, *pairs): (f", one for each batch item; the layer expects {wanted}.", repeated),
                (batch, 1, *pairs): split,
                (batch, heads, *pairs): split,
            },
        )
    if facts.base == SDPA and query is not None and key is not None:
        scores = (*query.shape[:-1], key.shape[-2]) if min(len(query.shape), len(key.shape)) > 1 else ()
    elif facts.mask_and_scores is not None:
        mask, scores = facts.mask_and_scores[0], facts.mask_and_scores[1].shape
    rows: list[tuple[Shape, str, str]] = []
    if len(scores) == 4:
        batch, heads, length, key_length = scores
        view = f".view({batch}, {heads}, {length}, {key_length}): give the heads their own dimension."
        rows = [
            ((key_length, batch), "key batch", ".T[:, None, None, :]: batch first, then heads and queries."),
            ((batch, key_length), "batch key", "[:, None, None, :]: add dimensions for heads and queries."),
            ((batch, length, key_length), "batch query key", "[:, None]: add a dimension for the heads."),
            ((batch, 1, key_length), "batch 1 key", "[:, None]: add a dimension for the heads."),
            ((batch * heads, length, key_length), "(batch heads) query key", view),
        ]
    elif len(scores) == 3:
        rows = [((scores[0], scores[2]), "batch key", "[:, None, :]: add a dimension for the queries.")]
    name, over = "" if mask is None else mask.name, f"and the scores are {text.shape(scores)}"
    return mask, scores, {shape: (f", {what}, {over}.", name + way) for shape, what, way in rows}

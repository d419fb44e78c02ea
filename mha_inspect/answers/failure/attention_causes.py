"""Common mistakes in what an attention is given, in the mask over its scores, and in the factors of its products."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ... import text
from ...record.ops import TensorRef
from ...reports.trace import Cause
from .facts import HEADS, SEQUENCES, Facts, Operand, first_clash
from .reached import ATTENTION, LAYERS, SDPA

Shape = tuple[int, ...]

_SAME_EXAMPLES = "Both must have the same batch size; use .expand on the batch dimension to share one item."
_SAME_SEQUENCE = "Keys and values must come from the same sequence."


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
        yield Cause("batch_differs", what, _SAME_EXAMPLES)
    whole = facts.base == ATTENTION and value is not None and len(key.shape) == len(value.shape) == 3
    if whole and value is not None and _lengths(facts, key) != _lengths(facts, value):
        yield Cause("lengths_differ", f"Keys and values differ: {key.is_shape}, {value.is_shape}.", _SAME_SEQUENCE)


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


def products(facts: Facts) -> Iterator[Cause]:
    """Judge the factors of a product of queries and keys, or of weights and values: first their layouts."""
    yield from _unsplit(facts)
    if not facts.sizes_clash:
        return
    if facts.pair is not None and facts.pair[1].part == "key":
        yield from _keys(facts, *facts.pair)
    if bad := [o for o in facts.factors if o.heads_are_behind]:
        yield _heads_behind(facts, bad)
    left = next((o for o in facts.operands if o.part in ("query", "weights")), None)
    right = next((o for o in facts.operands if o.part in ("key", "value")), None)
    if left is not None and right is not None:
        yield from _two_sizes(left, right)


def _unsplit(facts: Facts) -> Iterator[Cause]:
    split = next((o for o in facts.factors if o.place(*HEADS) is not None), None)
    odd = next((o for o in facts.factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or odd is None or len(split.shape) < 4:
        return
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if heads and heads * head_dim in odd.shape[1:]:
        yield Cause(
            "heads_not_split",
            f"{split.name} is split into {heads} heads; {odd.name} is not.",
            f"Split {odd.variable} too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2).",
        )


def _keys(facts: Facts, query: Operand, key: Operand) -> Iterator[Cause]:
    """Judge keys whose features and positions are not transposed for the product."""
    cause, name = "key_not_transposed", key.variable
    if min(len(query.shape), len(key.shape)) < 2:
        return
    if len(key.shape) > 2 and key.dims[-1] == ["batch"]:
        what = f"{key.is_shape} {key.axes}: all dimensions are reversed, as by .T."
        yield Cause(cause, what, f"Swap only the last two: {name}.transpose(-2, -1) or {name}.mT.")
    if key.place("key", "sequence") == len(key.shape) - 2 and query.shape[-1] == key.shape[-1] != key.shape[-2]:
        what = f"{key.name} ends in {key.axis(-2)} and {key.axis(-1)}; q·kᵀ needs {key.axis(-1)} before {key.axis(-2)}."
        yield Cause(cause, what, f"Multiply by {name}.transpose(-2, -1).")
    if key.heads_are_behind and _was_right_before(facts, key.given.tensor):
        what = f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped."
        yield Cause(cause, what, "Swap the last two dimensions: .transpose(-2, -1).")


def _heads_behind(facts: Facts, bad: list[Operand]) -> Cause:
    """Return the cause of heads after the sequence, where the product expects them before."""
    names = list(dict.fromkeys(o.variable for o in bad))
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in bad))
    steps = [op for _, op in facts.reached.steps_back(bad[0].given.tensor) if op is not None]
    if all(_was_right_before(facts, o.given.tensor) for o in bad):
        state, origin = "transposed back", steps[0].source if steps else ""
        way = "Remove that transpose: the heads already came before the sequence."
    else:
        splits = [op for op in steps if op.base_name in ("view", "_unsafe_view")]
        origins = (op.source for op in splits if len(op.output.shape) > len(op.inputs[0].shape))
        state, origin = "split but not transposed", next(origins, "")
        way = f"Use {names[0]}.transpose(1, 2) after the view that splits the heads."
    where = f" ({origin})" if origin else ""
    were = f"{' and '.join(names)} {'was' if len(bad) == 1 else 'were'}"
    return Cause("heads_not_transposed", f"{were} {state}{where}. Heads must come before {sequence}.", way)


def _was_right_before(facts: Facts, tensor: TensorRef) -> bool:
    """Return whether an earlier step had the heads before the sequence."""
    for earlier, _ in list(facts.reached.steps_back(tensor))[1:]:
        names = [name for name in re.findall(r"\w+", facts.reached.of(earlier)) if name in (*HEADS, *SEQUENCES)]
        if len(earlier.shape) >= 4 and names and names[0] in HEADS and not set(SEQUENCES).isdisjoint(names):
            return True
    return False


def _two_sizes(left: Operand, right: Operand) -> Iterator[Cause]:
    """Judge two factors of the same layout (queries or weights, keys or values) whose sizes differ."""
    heads, kv_heads = left.size("heads"), right.size(*HEADS)
    if heads != kv_heads and kv_heads and heads % kv_heads == 0 < heads and len(left.shape) == len(right.shape) == 4:
        each = heads // kv_heads
        yield Cause(
            "heads_not_repeated",
            f"{left.name} has {heads} heads and {right.name} has {kv_heads}, each shared by {each} query heads.",
            f"Use {right.variable}.repeat_interleave({each}, dim=1) on keys and values before the product; "
            "for scaled_dot_product_attention, enable_gqa=True.",
        )
    same = "Split queries and keys into heads of the same width: the product sums over their features."
    for axis, name, way in (("batch", "batch_differs", _SAME_EXAMPLES), ("head_dim", "head_dim_differs", same)):
        sizes = left.size(axis), right.size(axis)
        if 0 not in sizes and sizes[0] != sizes[1] and (axis == "batch" or left.part == "query"):
            yield Cause(name, f"{left.name} has {axis} {sizes[0]} and {right.name} has {axis} {sizes[1]}.", way)
    has = right.size("key", "sequence")
    if left.part == "weights" and has and left.shape[-1] != has:
        what = f"{left.name} has weights for {left.shape[-1]} keys and {right.name} has {has} values."
        yield Cause("lengths_differ", what, _SAME_SEQUENCE)

"""Causes in the factors of a product of queries and keys, or of weights and values: their layouts, then their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from ... import text
from ...record.ops import Op, TensorRef
from .facts import HEADS, SEQUENCES, Facts, Operand
from .head_counts import heads_clash
from .suspect import SAME_BATCH, SAME_SEQUENCE, Suspect
from .tried import Edit, Fix, resized


def heads_not_split(facts: Facts) -> Suspect | None:
    """Judge a factor `batch sequence (heads head_dim)` beside one that is split into heads."""
    split = next((o for o in facts.factors if o.place(*HEADS) is not None), None)
    whole = next((o for o in facts.factors if o.place(*HEADS) is None and len(o.shape) == 3), None)
    if split is None or whole is None or len(split.shape) < 4:
        return None
    heads, head_dim = split.size(*HEADS), split.size("head_dim")
    if not heads or heads * head_dim not in whole.shape[1:]:
        return None
    is_turned = whole.shape[-1] != heads * head_dim

    def edit(tensor: Tensor) -> Tensor:
        rows = tensor.mT if is_turned else tensor
        parts = rows.reshape(*rows.shape[:-1], heads, head_dim).transpose(1, 2)
        return parts.mT if is_turned else parts

    way = f"split {whole.variable} too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2)"
    what = f"{split.name} is split into {heads} heads; {whole.name} is not."
    return Suspect("heads_not_split", what, (Fix(way, [(whole, edit)]),))


# -- keys whose features and positions are not transposed -------------------------------------------------------------


def key_reversed(facts: Facts) -> Suspect | None:
    """Judge keys with all dimensions reversed, as by .T."""
    factors = _query_and_key(facts)
    if factors is None:
        return None
    _, key = factors
    if len(key.shape) < 3 or key.dims[-1] != ["batch"]:
        return None
    what = f"{key.is_shape} {key.axes}: all dimensions are reversed, as by .T."
    way = f"swap only the last two: {key.variable}.transpose(-2, -1) or {key.variable}.mT"
    return Suspect("key_not_transposed", what, (Fix(way, [(key, _unreversed)]),))


def key_not_transposed(facts: Facts) -> Suspect | None:
    """Judge keys `batch heads key head_dim` in the place of `batch heads head_dim key`."""
    factors = _query_and_key(facts)
    if factors is None:
        return None
    query, key = factors
    keys_are_rows = key.place("key", "sequence") == len(key.shape) - 2
    if not keys_are_rows or query.shape[-1] != key.shape[-1] or key.shape[-1] == key.shape[-2]:
        return None
    what = f"{key.name} ends in {key.axis(-2)} and {key.axis(-1)}; q·kᵀ needs {key.axis(-1)} before {key.axis(-2)}."
    turned = [(key, lambda tensor: tensor.transpose(-2, -1))]
    return Suspect("key_not_transposed", what, (Fix(f"multiply by {key.name}.transpose(-2, -1)", turned),))


def key_with_heads_swapped(facts: Facts) -> Suspect | None:
    """Judge keys whose heads and positions were swapped, in the place of positions and features."""
    factors = _query_and_key(facts)
    if factors is None:
        return None
    _, key = factors
    if not key.heads_are_behind or not _was_right_before(facts, key.given.tensor):
        return None
    heads, sequence = key.place(*HEADS), key.place(*SEQUENCES)
    assert heads is not None
    assert sequence is not None
    what = f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped."
    turned = [(key, lambda tensor: tensor.transpose(sequence, heads).transpose(-2, -1))]
    return Suspect(
        "key_not_transposed", what, (Fix("swap the last two dimensions instead: .transpose(-2, -1)", turned),)
    )


def _query_and_key(facts: Facts) -> tuple[Operand, Operand] | None:
    """Return the factors of a product with keys whose sizes clash; None for other calls."""
    if not facts.sizes_clash or facts.pair is None:
        return None
    query, key = facts.pair
    if key.part != "key" or len(query.shape) < 2 or len(key.shape) < 2:
        return None
    return query, key


def _unreversed(key: Tensor) -> Tensor:
    """Return keys whose dimensions were all reversed, with only the last two swapped."""
    return key.permute(*reversed(range(key.dim()))).transpose(-2, -1)


# -- heads behind the sequence ----------------------------------------------------------------------------------------


def heads_not_transposed(facts: Facts) -> Suspect | None:
    """Judge factors with the heads after the sequence, where the product expects them before."""
    behind = [o for o in facts.factors if o.heads_are_behind]
    if not facts.sizes_clash or not behind:
        return None
    names = list(dict.fromkeys(o.variable for o in behind))
    sequence = " and ".join(dict.fromkeys("query" if o.part == "query" else "key" for o in behind))
    steps = [op for _, op in facts.reached.steps_back(behind[0].given.tensor) if op is not None]
    if all(_was_right_before(facts, o.given.tensor) for o in behind):
        state, origin = "transposed back", steps[0].source if steps else ""
        way = "remove that transpose: the heads already came before the sequence"
    else:
        state, origin = "split but not transposed", _source_of_split(steps)
        turned = text.listed([f"{name}.transpose(1, 2)" for name in names])
        way = f"use {turned} after the view that splits the heads"
    where = f" ({origin})" if origin else ""
    were = "was" if len(behind) == 1 else "were"
    what = f"{' and '.join(names)} {were} {state}{where}. Heads must come before {sequence}."
    return Suspect("heads_not_transposed", what, (Fix(way, [(o, _heads_first(o)) for o in behind]),))


def _source_of_split(steps: Sequence[Op]) -> str:
    """Return the line of the last view that splits a dimension, as far as it is recorded."""
    for op in steps:
        if op.base_name in ("view", "_unsafe_view") and len(op.output.shape) > len(op.inputs[0].shape):
            return op.source
    return ""


def _heads_first(operand: Operand) -> Edit:
    """Return an edit that moves the heads before the sequence.

    The operand is `batch sequence heads head_dim`, or has its last two swapped.
    """
    is_turned = operand.place(*HEADS) == len(operand.shape) - 1

    def edit(tensor: Tensor) -> Tensor:
        if is_turned:
            return tensor.transpose(-2, -1).transpose(1, 2).transpose(-2, -1)
        return tensor.transpose(1, 2)

    return edit


def _was_right_before(facts: Facts, tensor: TensorRef) -> bool:
    """Return whether an earlier step had the heads before the sequence: `batch heads sequence head_dim`."""
    for earlier, _ in list(facts.reached.steps_back(tensor))[1:]:
        axes = re.findall(r"\w+", facts.reached.of(earlier))
        names = [name for name in axes if name in (*HEADS, *SEQUENCES)]
        if len(earlier.shape) < 4 or not names or names[0] not in HEADS:
            continue
        if not set(SEQUENCES).isdisjoint(names):
            return True
    return False


# -- two factors of one layout and different sizes --------------------------------------------------------------------


def _two_factors(facts: Facts) -> tuple[Operand, Operand] | None:
    """Return queries or weights, and keys or values, whose sizes clash; None for other calls."""
    if not facts.sizes_clash:
        return None
    left = next((o for o in facts.operands if o.part in ("query", "weights")), None)
    right = next((o for o in facts.operands if o.part in ("key", "value")), None)
    return None if left is None or right is None else (left, right)


def heads_of_equation(facts: Facts) -> Suspect | None:
    """Judge the numbers of heads of an einsum before its layouts: an equation may put the heads anywhere."""
    return heads_of_factors(facts) if facts.base == "einsum" else None


def heads_of_factors(facts: Facts) -> Suspect | None:
    """Judge two factors with different numbers of heads."""
    factors = _two_factors(facts)
    return None if factors is None else heads_clash(facts, *factors)


def batch_differs(facts: Facts) -> Suspect | None:
    """Judge two factors with different batch sizes."""
    factors = _two_factors(facts)
    if factors is None:
        return None
    left, right = factors
    batch, other_batch = left.size("batch"), right.size("batch")
    if not batch or not other_batch or batch == other_batch:
        return None
    what = f"{left.name} has batch {batch} and {right.name} has batch {other_batch}. {SAME_BATCH}"
    return Suspect("batch_differs", what)


def head_dim_differs(facts: Facts) -> Suspect | None:
    """Judge queries and keys whose heads have different widths."""
    factors = _two_factors(facts)
    if factors is None:
        return None
    query, key = factors
    width, key_width = query.size("head_dim"), key.size("head_dim")
    if query.part != "query" or not width or not key_width or width == key_width:
        return None
    place = key.place("head_dim")
    assert place is not None
    way = "split queries and keys into heads of the same width: the product sums over their features"
    what = f"{query.name} has head_dim {width} and {key.name} has head_dim {key_width}."
    return Suspect("head_dim_differs", what, (Fix(way, [(key, resized(place, width))]),))


def lengths_differ(facts: Facts) -> Suspect | None:
    """Judge weights for other numbers of keys than there are values."""
    factors = _two_factors(facts)
    if factors is None or factors[0].part != "weights":
        return None
    weights, value = factors
    keys, length = weights.shape[-1], value.size("key", "sequence")
    if not length or keys == length:
        return None
    place = value.place("key", "sequence")
    assert place is not None
    what = f"{weights.name} has weights for {keys} keys and {value.name} has {length} values."
    return Suspect("lengths_differ", what, (Fix(SAME_SEQUENCE, [(value, resized(place, keys))]),))

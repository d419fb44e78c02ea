"""Common mistakes in the factors of a product: queries with keys, weights with values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...record.ops import TensorRef
from ...reports.trace import Cause
from .facts import HEADS, SEQUENCES, Facts, Operand
from .layout_causes import SAME_EXAMPLES, SAME_SEQUENCE


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
    for axis, name, way in (("batch", "batch_differs", SAME_EXAMPLES), ("head_dim", "head_dim_differs", same)):
        sizes = left.size(axis), right.size(axis)
        if 0 not in sizes and sizes[0] != sizes[1] and (axis == "batch" or left.part == "query"):
            yield Cause(name, f"{left.name} has {axis} {sizes[0]} and {right.name} has {axis} {sizes[1]}.", way)
    has = right.size("key", "sequence")
    if left.part == "weights" and has and left.shape[-1] != has:
        what = f"{left.name} has weights for {left.shape[-1]} keys and {right.name} has {has} values."
        yield Cause("lengths_differ", what, SAME_SEQUENCE)

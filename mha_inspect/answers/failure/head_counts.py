"""Explain a product whose factors have different numbers of heads: `batch heads query head_dim` times another count.

Query heads may share a key head: 6 query heads have 1, 2, 3 or 6 key heads. The key heads are then repeated, or the
query heads are split into groups, `batch kv_heads group query head_dim`, and the keys get a dimension of 1 for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from ... import text
from ...measure.repeats import row_of_each
from ...naming.pattern import dims_of
from .facts import HEADS, SEQUENCES, Facts, Operand, first_clash
from .reached import PRODUCTS, SDPA
from .tried import Fix


@dataclass(frozen=True)
class HeadsClash:
    """Two factors with different numbers of heads."""

    name: str
    explanation: str
    fixes: tuple[Fix, ...] = ()


def heads_clash(facts: Facts, left: Operand, right: Operand) -> HeadsClash | None:
    """Return why the heads of queries or weights do not fit those of keys or values; None if another axis clashes."""
    places = _clashing(facts, left, right)
    if places is None:
        return None
    place, other = places
    if _are_folded(left, place) and left.dims[place][:1] == right.dims[other][:1] == ["batch"]:
        return _not_repeated(facts, left, right, (place, other))
    if not _is_of_heads(left, place) or not _is_of_heads(right, other):
        return None
    kv_heads = right.shape[other]
    lacks_group = facts.base != "einsum" and len(left.shape) == len(right.shape) + 1
    if lacks_group and _heads_of(left) % kv_heads == 0:
        return _without_group(left, right)
    if len(left.shape) == len(right.shape) and left.shape[place] == _heads_of(left):
        heads, once = left.shape[place], _before_repeats(right, other)
        if heads % kv_heads == 0:
            return _not_repeated(facts, left, right, (place, other))
        if once and heads % once == 0:
            return _repeated_otherwise(left, right, once, other)
    return _no_multiple(left, right, kv_heads)


def _not_repeated(facts: Facts, left: Operand, right: Operand, places: tuple[int, int]) -> HeadsClash | None:
    place, other = places
    heads, kv_heads = left.shape[place], right.shape[other]
    each, rest = divmod(heads, kv_heads)
    if rest:
        return None
    names = right.dims[other]
    shared = [o for o in facts.factors if names in o.dims and o.shape[o.dims.index(names)] == kv_heads]
    shared = [o for o in shared if len(o.shape) == len(right.shape)] or [right]
    sequence_repeated = _sequence_repeated(facts, left, right, each, other)
    if sequence_repeated is not None:
        return sequence_repeated
    repeated = [(o, lambda tensor: tensor.repeat_interleave(each, dim=other)) for o in shared]
    way = f"use {right.variable}.repeat_interleave({each}, dim={other}) on keys and values before the product"
    fixes = [Fix(way, repeated)]
    if facts.base == SDPA:
        fixes.append(Fix("enable_gqa=True", settings={"enable_gqa": True}))
    if _are_folded(left, place):
        what = f"{left.name} has {heads} heads of all batch items and {right.name} has {kv_heads}"
    else:
        what = f"{left.name} has {heads} heads and {right.name} has {kv_heads}"
    return HeadsClash("heads_not_repeated", f"{what}, each shared by {each} query heads.", tuple(fixes))


def _sequence_repeated(facts: Facts, left: Operand, right: Operand, times: int, heads: int) -> HeadsClash | None:
    """Return the clash of heads whose tokens were repeated in their place, `batch kv_heads (key 4) head_dim`.

    None if the tokens of keys or values are not there as often as each head is missing.
    """
    place = right.place(*SEQUENCES)
    rows = None if place is None else row_of_each(right.given.value, place, times)
    if place is None or rows is None:
        return None
    kind = "values" if right.part == "value" else "keys"
    counts = f"{left.name} has {left.shape[heads]} heads and {right.name} has {right.shape[heads]}"
    what = (
        f"{counts}, with {right.shape[place]} {kind}: each of {rows.shape[place]} {kind} occurs {times} times. "
        f"The sequence was repeated {times} times instead of the heads."
    )

    def edit(tensor: Tensor) -> Tensor:
        """Return each token once, and each head as often as there are query heads for it."""
        sequence = place if row_of_each(tensor, place, times) is not None else tensor.dim() - 2
        once = row_of_each(tensor, sequence, times)
        return (tensor if once is None else once).repeat_interleave(times, dim=heads)

    way = _right_repeat(facts, right, heads, place)
    shared = [
        o for o in facts.factors if o.part != "query" and o.shape[heads : heads + 1] == right.shape[heads : heads + 1]
    ]
    return HeadsClash("heads_not_repeated", what, (Fix(way, [(o, edit) for o in shared or [right]]),))


def _right_repeat(facts: Facts, right: Operand, heads: int, sequence: int) -> str:
    """Return how to repeat heads where the sequence was repeated: transpose first, or name another dimension."""
    steps = [op for _, op in facts.reached.steps_back(right.given.tensor) if op is not None and op.inputs]
    repeat = next((op for op in steps if op.output.numel > op.inputs[0].numel), None)
    where = f" at {repeat.source}" if repeat is not None and repeat.source else ""
    dims = dims_of(facts.reached.of(repeat.inputs[0])) if repeat is not None else []
    of_heads, of_sequence = (
        next((at for at, dim in enumerate(dims) if not set(dim).isdisjoint(names)), None)
        for names in (HEADS, SEQUENCES)
    )
    is_sequence_first = of_heads is not None and of_sequence is not None and of_sequence < of_heads
    if is_sequence_first and heads < sequence:
        return f"use .transpose(1, 2) on keys and values before the repeat{where}, so that dimension 1 is the heads"
    return f"repeat the heads, not the sequence, of keys and values{where}"


def _repeated_otherwise(left: Operand, right: Operand, once: int, other: int) -> HeadsClash:
    heads, kv_heads = _heads_of(left), right.shape[other]
    times = kv_heads // once
    what = f"{left.name} has {heads} heads and {right.name} has {kv_heads}: {once} heads repeated {times} times."
    way = f"make {heads // once} of each of the {once} heads of keys and values"
    return HeadsClash("heads_not_repeated", what, (Fix(way),))


def _without_group(left: Operand, right: Operand) -> HeadsClash | None:
    """Explain queries `batch kv_heads group query head_dim` with keys that have no dimension for the group."""
    place = right.place(*HEADS)
    if place is None:
        return None
    groups, heads = text.shape(left.shape), text.shape(right.shape)
    what = f"{left.name} has groups of query heads, {groups}; {right.name} has no dimension for the group, {heads}."
    way = f"use {right.variable}.unsqueeze({place + 1}) on keys and values: one key head for each group of query heads"
    return HeadsClash("heads_not_repeated", what, (Fix(way, [(right, lambda tensor: tensor.unsqueeze(place + 1))]),))


def _no_multiple(left: Operand, right: Operand, kv_heads: int) -> HeadsClash:
    heads = _heads_of(left)
    sizes = [size for place, size in enumerate(left.shape) if _is_of_heads(left, place) and size > 1]
    split = f" in {len(sizes)} dimensions ({' and '.join(map(str, sizes))})" if len(sizes) > 1 else ""
    what = f"{left.name} has {heads} heads{split} and {right.name} has {kv_heads}."
    if heads % kv_heads == 0:
        way = f"split the {heads} query heads into {kv_heads} groups of {heads // kv_heads}"
    else:
        what += f" {heads} is no multiple of {kv_heads}, so query heads cannot share key heads."
        way = f"use {heads} key heads, or a number that divides {heads}"
    return HeadsClash("heads_differ", what, (Fix(way),))


def _clashing(facts: Facts, left: Operand, right: Operand) -> tuple[int, int] | None:
    """Return the dimensions of both factors that clash, outside the matrices; None if there are none."""
    if facts.base == "einsum":
        return _clashing_letters(facts, left, right)
    if (facts.base != SDPA and facts.base not in PRODUCTS) or min(len(left.shape), len(right.shape)) < 3:
        return None
    back = first_clash(left.shape[:-2], right.shape[:-2])
    return None if back is None else (len(left.shape) - 2 + back, len(right.shape) - 2 + back)


def _clashing_letters(facts: Facts, left: Operand, right: Operand) -> tuple[int, int] | None:
    """Return the dimensions of `bqhd` and `bkhd` with one letter and different sizes; None if there are none."""
    equation = facts.call.args[0] if facts.call.args else ""
    if not isinstance(equation, str) or "." in equation:
        return None
    terms = [term.strip() for term in equation.partition("->")[0].split(",")]
    sides = [term for term, operand in zip(terms, facts.operands, strict=False) if operand in (left, right)]
    if len(terms) != 2 or len(sides) != 2:
        return None
    first, second = sides if facts.operands.index(left) < facts.operands.index(right) else sides[::-1]
    if (len(first), len(second)) != (len(left.shape), len(right.shape)):
        return None
    for place, letter in enumerate(first):
        other = second.find(letter)
        if other >= 0 and left.shape[place] != right.shape[other]:
            return place, other
    return None


def _is_of_heads(operand: Operand, place: int) -> bool:
    """Return whether a dimension counts heads, or a part of them that has no name yet: a size."""
    if not any(_names_heads(name) for dim in operand.dims for name in dim):
        return False
    return all(_names_heads(name) or name.isdigit() for name in operand.dims[place])


def _names_heads(name: str) -> bool:
    """Return whether a name is one of heads: `heads`, `kv_heads`, or `heads_1` and `heads_2` of groups."""
    return name == "group" or name.rstrip("_0123456789") in HEADS


def _heads_of(operand: Operand) -> int:
    """Return the number of heads: `batch kv_heads group query head_dim` has kv_heads · group."""
    return prod(size for place, size in enumerate(operand.shape) if _is_of_heads(operand, place))


def _are_folded(operand: Operand, place: int) -> bool:
    """Return whether a dimension is `(batch heads)`."""
    names = operand.dims[place]
    return len(names) == 2 and names[0] == "batch" and names[1] in HEADS


def _before_repeats(operand: Operand, place: int) -> int:
    """Return the number of heads before each was repeated, `(heads 2)`; 0 without a repeat."""
    names = operand.dims[place]
    if len(names) == 2 and names[0] in HEADS and names[1].isdigit():
        return operand.shape[place] // int(names[1])
    return 0

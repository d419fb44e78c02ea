"""Explain a product whose factors have different numbers of heads: `batch heads query head_dim` times another count.

Query heads may share a key head: 6 query heads have 1, 2, 3 or 6 key heads. The key heads are then repeated, or the
query heads are split into groups, `batch kv_heads group query head_dim`, and the keys get a dimension of 1 for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ... import text
from ...measure.repeats import row_of_each
from ...naming.pattern import dims_of
from .facts import HEADS, SEQUENCES, Facts, Operand, first_clash
from .reached import PRODUCTS, SDPA
from .suspect import Suspect
from .tried import Fix


@dataclass(frozen=True)
class _Pair:
    """The dimensions of both factors that clash: 1 and 1 for `batch heads query head_dim`."""

    left: Operand
    right: Operand
    left_place: int
    right_place: int

    @property
    def heads(self) -> int:
        """The size of the left dimension."""
        return self.left.shape[self.left_place]

    @property
    def kv_heads(self) -> int:
        """The size of the right dimension."""
        return self.right.shape[self.right_place]


def heads_clash(facts: Facts, left: Operand, right: Operand) -> Suspect | None:
    """Return why the heads of queries or weights do not fit those of keys or values; None if another axis clashes."""
    pair = _clashing(facts, left, right)
    if pair is None:
        return None
    if _are_folded(left, pair.left_place) and right.dims[pair.right_place][:1] == ["batch"]:
        return _not_repeated(facts, pair)
    if not _is_of_heads(left, pair.left_place) or not _is_of_heads(right, pair.right_place):
        return None
    heads = _heads_of(left)
    if facts.base != "einsum" and len(left.shape) == len(right.shape) + 1 and heads % pair.kv_heads == 0:
        return _without_group(left, right)
    if len(left.shape) == len(right.shape) and pair.heads == heads:
        if heads % pair.kv_heads == 0:
            return _not_repeated(facts, pair)
        once = _before_repeats(right, pair.right_place)
        if once and heads % once == 0:
            return _repeated_otherwise(pair, once)
    return _no_multiple(left, right, pair.kv_heads)


def _not_repeated(facts: Facts, pair: _Pair) -> Suspect | None:
    """Explain fewer key heads than query heads: each is for as many query heads."""
    left, right, place = pair.left, pair.right, pair.right_place
    times, rest = divmod(pair.heads, pair.kv_heads)
    if rest:
        return None
    sequence_repeated = _sequence_repeated(facts, pair, times)
    if sequence_repeated is not None:
        return sequence_repeated
    edits = [(o, lambda tensor: tensor.repeat_interleave(times, dim=place)) for o in _with_same_heads(facts, pair)]
    way = f"use {right.variable}.repeat_interleave({times}, dim={place}) on keys and values before the product"
    fixes = [Fix(way, edits)]
    if facts.base == SDPA:
        fixes.append(Fix("enable_gqa=True", settings={"enable_gqa": True}))
    folded = " of all batch items" if _are_folded(left, pair.left_place) else ""
    what = f"{left.name} has {pair.heads} heads{folded} and {right.name} has {pair.kv_heads}"
    return Suspect("heads_not_repeated", f"{what}, each shared by {times} query heads.", tuple(fixes))


def _with_same_heads(facts: Facts, pair: _Pair) -> list[Operand]:
    """Return the factors that have as many heads as the right one, in its layout: keys and values."""
    names, shape = pair.right.dims[pair.right_place], pair.right.shape
    alike = []
    for operand in facts.factors:
        if len(operand.shape) != len(shape) or names not in operand.dims:
            continue
        if operand.shape[operand.dims.index(names)] == pair.kv_heads:
            alike.append(operand)
    return alike or [pair.right]


def _sequence_repeated(facts: Facts, pair: _Pair, times: int) -> Suspect | None:
    """Return the clash of heads whose tokens were repeated in their place, `batch kv_heads (key 4) head_dim`.

    None if the tokens of keys or values are not there as often as each head is missing.
    """
    left, right, heads = pair.left, pair.right, pair.right_place
    place = right.place(*SEQUENCES)
    rows = None if place is None else row_of_each(right.given.value, place, times)
    if place is None or rows is None:
        return None
    kind = "values" if right.part == "value" else "keys"
    # Both factors have their heads in the same dimension.
    counts = f"{left.name} has {left.shape[heads]} heads and {right.name} has {pair.kv_heads}"
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
    shared = [o for o in facts.factors if o.part != "query" and o.shape[heads : heads + 1] == (pair.kv_heads,)]
    return Suspect("heads_not_repeated", what, (Fix(way, [(o, edit) for o in shared or [right]]),))


def _right_repeat(facts: Facts, right: Operand, heads: int, sequence: int) -> str:
    """Return how to repeat heads where the sequence was repeated: transpose first, or name another dimension."""
    steps = [op for _, op in facts.reached.steps_back(right.given.tensor) if op is not None and op.inputs]
    repeat = next((op for op in steps if op.output.numel > op.inputs[0].numel), None)
    if repeat is None:
        return "repeat the heads, not the sequence, of keys and values"
    where = f" at {repeat.source}" if repeat.source else ""
    dims = dims_of(facts.reached.of(repeat.inputs[0]))
    of_heads, of_sequence = _first_with(dims, HEADS), _first_with(dims, SEQUENCES)
    is_sequence_first = of_heads is not None and of_sequence is not None and of_sequence < of_heads
    if is_sequence_first and heads < sequence:
        return f"use .transpose(1, 2) on keys and values before the repeat{where}, so that dimension 1 is the heads"
    return f"repeat the heads, not the sequence, of keys and values{where}"


def _first_with(dims: Sequence[Sequence[str]], names: Collection[str]) -> int | None:
    """Return the first dimension that has one of these axes; None if there is none."""
    for place, dim in enumerate(dims):
        if not set(dim).isdisjoint(names):
            return place
    return None


def _repeated_otherwise(pair: _Pair, once: int) -> Suspect:
    """Explain key heads that were repeated, but to another number than that of the query heads."""
    times = pair.kv_heads // once
    counts = f"{pair.left.name} has {pair.heads} heads and {pair.right.name} has {pair.kv_heads}"
    way = f"make {pair.heads // once} of each of the {once} heads of keys and values"
    return Suspect("heads_not_repeated", f"{counts}: {once} heads repeated {times} times.", (Fix(way),))


def _without_group(left: Operand, right: Operand) -> Suspect | None:
    """Explain queries `batch kv_heads group query head_dim` with keys that have no dimension for the group."""
    place = right.place(*HEADS)
    if place is None:
        return None
    groups, heads = text.shape(left.shape), text.shape(right.shape)
    what = f"{left.name} has groups of query heads, {groups}; {right.name} has no dimension for the group, {heads}."
    way = f"use {right.variable}.unsqueeze({place + 1}) on keys and values: one key head for each group of query heads"
    return Suspect("heads_not_repeated", what, (Fix(way, [(right, lambda tensor: tensor.unsqueeze(place + 1))]),))


def _no_multiple(left: Operand, right: Operand, kv_heads: int) -> Suspect:
    """Explain two numbers of heads of which none is made of the other by a repeat in the code."""
    heads = _heads_of(left)
    sizes = [str(size) for size in _sizes_of_heads(left) if size > 1]
    split = f" in {len(sizes)} dimensions ({' and '.join(sizes)})" if len(sizes) > 1 else ""
    what = f"{left.name} has {heads} heads{split} and {right.name} has {kv_heads}."
    if heads % kv_heads == 0:
        way = f"split the {heads} query heads into {kv_heads} groups of {heads // kv_heads}"
    else:
        what += f" {heads} is no multiple of {kv_heads}, so query heads cannot share key heads."
        way = f"use {heads} key heads, or a number that divides {heads}"
    return Suspect("heads_differ", what, (Fix(way),))


def _clashing(facts: Facts, left: Operand, right: Operand) -> _Pair | None:
    """Return the dimensions of both factors that clash, outside the matrices; None if there are none."""
    if facts.base == "einsum":
        return _clashing_letters(facts, left, right)
    if facts.base != SDPA and facts.base not in PRODUCTS:
        return None
    if len(left.shape) < 3 or len(right.shape) < 3:
        return None
    back = first_clash(left.shape[:-2], right.shape[:-2])
    if back is None:
        return None
    return _Pair(left, right, len(left.shape) - 2 + back, len(right.shape) - 2 + back)


def _clashing_letters(facts: Facts, left: Operand, right: Operand) -> _Pair | None:
    """Return the dimensions of `bqhd` and `bkhd` with one letter and different sizes; None if there are none."""
    equation = facts.call.args[0] if facts.call.args else ""
    if not isinstance(equation, str) or "." in equation:
        return None
    terms = [term.strip() for term in equation.partition("->")[0].split(",")]
    factors = [o for o in facts.operands if o in (left, right)]
    if len(terms) != 2 or facts.operands[:2] != tuple(factors):
        return None
    term_of = dict(zip(factors, terms, strict=True))
    if len(term_of[left]) != len(left.shape) or len(term_of[right]) != len(right.shape):
        return None
    for place, letter in enumerate(term_of[left]):
        right_place = term_of[right].find(letter)
        if right_place >= 0 and left.shape[place] != right.shape[right_place]:
            return _Pair(left, right, place, right_place)
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
    return prod(_sizes_of_heads(operand))


def _sizes_of_heads(operand: Operand) -> list[int]:
    """Return the sizes of the dimensions that count heads: kv_heads and group of grouped queries."""
    return [size for place, size in enumerate(operand.shape) if _is_of_heads(operand, place)]


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

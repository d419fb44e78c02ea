"""Explain a product whose factors have different numbers of heads: `batch heads query head_dim` times another count.

Query heads may share a key head: 6 query heads have 1, 2, 3 or 6 key heads. The key heads are then repeated, or the
query heads are split into groups, `batch kv_heads group query head_dim`, and the keys get a dimension of 1 for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from torch import Tensor

from .. import text
from ..measure.repeats import row_of_each
from ..naming.pattern import dims_of
from ..record.ops import Op
from .facts import HEADS, SEQUENCES, Facts, Operand, first_clash
from .reached import PRODUCTS, SDPA
from .suspect import Suspect
from .tried import Fix, widened


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
    is_folded = _are_folded(left, pair.left_place)
    if is_folded and right.dims[pair.right_place][:1] == ["batch"]:
        return _not_repeated(facts, pair)
    if not _is_of_heads(left, pair.left_place):
        return None
    if not _is_of_heads(right, pair.right_place):
        return None
    heads = _heads_of(left)
    is_multiple = heads % pair.kv_heads == 0
    if is_multiple and facts.base != "einsum" and len(left.shape) == len(right.shape) + 1:
        return _without_group(left, right)
    if len(left.shape) != len(right.shape) or pair.heads != heads:
        return _no_multiple(left, right, pair.kv_heads)
    if is_multiple:
        return _not_repeated(facts, pair)
    once = _before_repeats(right, pair.right_place)
    if once and heads % once == 0:
        return _repeated_otherwise(pair, once)
    return _no_multiple(left, right, pair.kv_heads)


def _not_repeated(facts: Facts, pair: _Pair) -> Suspect | None:
    """Explain fewer key heads than query heads: each is for as many query heads."""
    left = pair.left
    right = pair.right
    place = pair.right_place
    times, rest = divmod(pair.heads, pair.kv_heads)
    if rest:
        return None
    sequence_repeated = _sequence_repeated(facts, pair, times)
    if sequence_repeated is not None:
        return sequence_repeated

    def repeated(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(times, dim=place)

    repeat = Fix(
        f"use {right.variable}.repeat_interleave({times}, dim={place}) on keys and values before the product",
        edits=[(operand, repeated) for operand in _with_same_heads(facts, pair)],
    )
    fixes = [repeat]
    if facts.base == SDPA:
        fixes.append(Fix("enable_gqa=True", settings={"enable_gqa": True}))
    folded = ""
    if _are_folded(left, pair.left_place):
        folded = " of all batch items"
    counts = f"{left.name} has {pair.heads} heads{folded} and {right.name} has {pair.kv_heads}"
    return Suspect(
        "heads_not_repeated",
        f"{counts}, each shared by {times} query heads.",
        tuple(fixes),
    )


def _with_same_heads(facts: Facts, pair: _Pair) -> list[Operand]:
    """Return the factors that have as many heads as the right one, in its layout: keys and values."""
    right = pair.right
    names = right.dims[pair.right_place]
    alike = []
    for operand in facts.factors:
        if len(operand.shape) != len(right.shape):
            continue
        if names not in operand.dims:
            continue
        place = operand.dims.index(names)
        if operand.shape[place] == pair.kv_heads:
            alike.append(operand)
    return alike or [right]


def _sequence_repeated(facts: Facts, pair: _Pair, times: int) -> Suspect | None:
    """Return the clash of heads whose tokens were repeated in their place, `batch kv_heads (key 4) head_dim`.

    None if the tokens of keys or values are not there as often as each head is missing.
    """
    left = pair.left
    right = pair.right
    heads = pair.right_place
    place = right.place(*SEQUENCES)
    if place is None:
        return None
    rows = row_of_each(right.given.value, place, times)
    if rows is None:
        return None
    kind = "keys"
    if right.part == "value":
        kind = "values"
    # Both factors have their heads in the same dimension.
    counts = f"{left.name} has {left.shape[heads]} heads and {right.name} has {pair.kv_heads}"
    what = (
        f"{counts}, with {right.shape[place]} {kind}: each of {rows.shape[place]} {kind} occurs {times} times. "
        f"The sequence was repeated {times} times instead of the heads."
    )

    def repaired(tensor: Tensor) -> Tensor:
        """Return each token once, and each head as often as there are query heads for it."""
        tokens = row_of_each(tensor, place, times)
        if tokens is None:
            tokens = row_of_each(tensor, tensor.dim() - 2, times)
        if tokens is None:
            tokens = tensor
        return tokens.repeat_interleave(times, dim=heads)

    fix = Fix(
        _right_repeat(facts, right, heads, place),
        edits=[(operand, repaired) for operand in _keys_and_values(facts, pair)],
    )
    return Suspect("heads_not_repeated", what, (fix,))


def _keys_and_values(facts: Facts, pair: _Pair) -> list[Operand]:
    """Return the factors besides the queries that have as many heads as the right one in its dimension."""
    place = pair.right_place
    shared = []
    for operand in facts.factors:
        if operand.part == "query" or len(operand.shape) <= place:
            continue
        if operand.shape[place] == pair.kv_heads:
            shared.append(operand)
    return shared or [pair.right]


def _right_repeat(facts: Facts, right: Operand, heads: int, sequence: int) -> str:
    """Return how to repeat heads where the sequence was repeated: transpose first, or name another dimension."""
    repeat = _last_repeat(facts, right)
    if repeat is None:
        return "repeat the heads, not the sequence, of keys and values"
    where = ""
    if repeat.source:
        where = f" at {repeat.source}"
    dims = dims_of(facts.reached.of(repeat.inputs[0]))
    if heads < sequence and _has_sequence_first(dims):
        return f"use .transpose(1, 2) on keys and values before the repeat{where}, so that dimension 1 is the heads"
    return f"repeat the heads, not the sequence, of keys and values{where}"


def _last_repeat(facts: Facts, operand: Operand) -> Op | None:
    """Return the last operation on the way to an operand that made more elements; None without one."""
    for _, op in facts.reached.steps_back(operand.given.tensor):
        if op is None or not op.inputs:
            continue
        if op.output.numel > op.inputs[0].numel:
            return op
    return None


def _has_sequence_first(dims: Sequence[Sequence[str]]) -> bool:
    """Return whether the sequence comes before the heads: `batch key kv_heads head_dim`."""
    heads = _first_with(dims, HEADS)
    sequence = _first_with(dims, SEQUENCES)
    if heads is None or sequence is None:
        return False
    return sequence < heads


def _first_with(dims: Sequence[Sequence[str]], names: Collection[str]) -> int | None:
    """Return the first dimension that has one of these axes; None if there is none."""
    for place, dim in enumerate(dims):
        if not set(dim).isdisjoint(names):
            return place
    return None


def _repeated_otherwise(pair: _Pair, once: int) -> Suspect:
    """Explain key heads that were repeated, but to another number than that of the query heads."""
    times = pair.kv_heads // once
    wanted = pair.heads // once
    counts = f"{pair.left.name} has {pair.heads} heads and {pair.right.name} has {pair.kv_heads}"
    fix = Fix(f"make {wanted} of each of the {once} heads of keys and values")
    return Suspect(
        "heads_not_repeated",
        f"{counts}: {once} heads repeated {times} times.",
        (fix,),
    )


def _without_group(left: Operand, right: Operand) -> Suspect | None:
    """Explain queries `batch kv_heads group query head_dim` with keys that have no dimension for the group."""
    heads = right.place(*HEADS)
    if heads is None:
        return None
    group = heads + 1
    shape = text.shape(left.shape)
    key_shape = text.shape(right.shape)
    fix = Fix.editing(
        right,
        widened(group),
        f"use {right.variable}.unsqueeze({group}) on keys and values: one key head for each group of query heads",
    )
    return Suspect(
        "heads_not_repeated",
        f"{left.name} has groups of query heads, {shape}; {right.name} has no dimension for the group, {key_shape}.",
        (fix,),
    )


def _no_multiple(left: Operand, right: Operand, kv_heads: int) -> Suspect:
    """Explain two numbers of heads of which none is made of the other by a repeat in the code."""
    heads = _heads_of(left)
    what = f"{left.name} has {heads} heads{_split_words(left)} and {right.name} has {kv_heads}."
    if heads % kv_heads == 0:
        size = heads // kv_heads
        way = f"split the {heads} query heads into {kv_heads} groups of {size}"
    else:
        what += f" {heads} is no multiple of {kv_heads}, so query heads cannot share key heads."
        way = f"use {heads} key heads, or a number that divides {heads}"
    return Suspect("heads_differ", what, (Fix(way),))


def _split_words(operand: Operand) -> str:
    """Return over which dimensions the heads are split: ` in 2 dimensions (2 and 4)`; empty if in one."""
    sizes = [str(size) for size in _sizes_of_heads(operand) if size > 1]
    if len(sizes) < 2:
        return ""
    return f" in {len(sizes)} dimensions ({' and '.join(sizes)})"


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
    return _Pair(
        left,
        right,
        left_place=len(left.shape) - 2 + back,
        right_place=len(right.shape) - 2 + back,
    )


def _clashing_letters(facts: Facts, left: Operand, right: Operand) -> _Pair | None:
    """Return the dimensions of `bqhd` and `bkhd` with one letter and different sizes; None if there are none."""
    terms = _terms(facts)
    if len(terms) != 2:
        return None
    first, second = facts.operands[:2]
    if (first, second) == (left, right):
        letters, right_letters = terms
    elif (first, second) == (right, left):
        right_letters, letters = terms
    else:
        return None
    if len(letters) != len(left.shape) or len(right_letters) != len(right.shape):
        return None
    for place, letter in enumerate(letters):
        right_place = right_letters.find(letter)
        if right_place < 0:
            continue
        if left.shape[place] != right.shape[right_place]:
            return _Pair(left, right, place, right_place)
    return None


def _terms(facts: Facts) -> list[str]:
    """Return the terms of the operands of an einsum: `bqhd` and `bkhd`; none if its equation is unknown."""
    if not facts.call.args or len(facts.operands) < 2:
        return []
    equation = facts.call.args[0]
    if not isinstance(equation, str) or "." in equation:
        return []
    operands, _, _ = equation.partition("->")
    return [term.strip() for term in operands.split(",")]


def _is_of_heads(operand: Operand, place: int) -> bool:
    """Return whether a dimension counts heads, or a part of them that has no name yet: a size."""
    if not _has_heads(operand):
        return False
    return all(_names_heads(name) or name.isdigit() for name in operand.dims[place])


def _has_heads(operand: Operand) -> bool:
    """Return whether any axis of an operand counts heads."""
    names = chain.from_iterable(operand.dims)
    return any(map(_names_heads, names))


def _names_heads(name: str) -> bool:
    """Return whether a name is one of heads: `heads`, `kv_heads`, or `heads_1` and `heads_2` of groups."""
    return name == "group" or name.rstrip("_0123456789") in HEADS


def _heads_of(operand: Operand) -> int:
    """Return the number of heads: `batch kv_heads group query head_dim` has kv_heads · group."""
    return prod(_sizes_of_heads(operand))


def _sizes_of_heads(operand: Operand) -> list[int]:
    """Return the sizes of the dimensions that count heads: kv_heads and group of grouped queries."""
    sizes = []
    for place, size in enumerate(operand.shape):
        if _is_of_heads(operand, place):
            sizes.append(size)
    return sizes


def _are_folded(operand: Operand, place: int) -> bool:
    """Return whether a dimension is `(batch heads)`."""
    names = operand.dims[place]
    if len(names) != 2:
        return False
    first, second = names
    return first == "batch" and second in HEADS


def _before_repeats(operand: Operand, place: int) -> int:
    """Return the number of heads before each was repeated, `(heads 2)`; 0 without a repeat."""
    names = operand.dims[place]
    if len(names) != 2:
        return 0
    name, times = names
    if name not in HEADS or not times.isdigit():
        return 0
    return operand.shape[place] // int(times)

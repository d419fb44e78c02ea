"""Causes in the factors of a product of queries and keys, or of weights and values: their layouts, then their sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from .. import text
from ..record.ops import Op, TensorRef
from .facts import HEADS, SEQUENCES, Facts, Operand
from .head_counts import heads_clash
from .suspect import SAME_BATCH, SAME_SEQUENCE, Suspect
from .tried import Fix, resized, transposed


def heads_not_split(facts: Facts) -> Suspect | None:
    """Judge a factor `batch sequence (heads head_dim)` beside one that is split into heads."""
    split = _split_factor(facts)
    whole = _whole_factor(facts)
    if split is None or whole is None:
        return None
    if len(split.shape) < 4:
        return None
    heads = split.size(*HEADS)
    head_dim = split.size("head_dim")
    width = heads * head_dim
    if not heads or width not in whole.shape[1:]:
        return None
    is_turned = whole.shape[-1] != width

    def split_and_transposed(tensor: Tensor) -> Tensor:
        """Return `batch heads sequence head_dim` of `batch sequence (heads head_dim)`."""
        sizes = (*tensor.shape[:-1], heads, head_dim)
        return tensor.reshape(sizes).transpose(1, 2)

    def split_and_transposed_columns(tensor: Tensor) -> Tensor:
        """Return `batch heads head_dim sequence` of `batch (heads head_dim) sequence`."""
        return split_and_transposed(tensor.mT).mT

    fix = Fix.editing(
        whole,
        split_and_transposed_columns if is_turned else split_and_transposed,
        f"split {whole.variable} too: .view(batch, length, {heads}, {head_dim}).transpose(1, 2)",
    )
    return Suspect(
        "heads_not_split",
        f"{split.name} is split into {heads} heads; {whole.name} is not.",
        (fix,),
    )


def _split_factor(facts: Facts) -> Operand | None:
    """Return the first factor with an axis for heads; None without one."""
    for operand in facts.factors:
        if operand.place(*HEADS) is not None:
            return operand
    return None


def _whole_factor(facts: Facts) -> Operand | None:
    """Return the first factor of three dimensions without an axis for heads; None without one."""
    for operand in facts.factors:
        if len(operand.shape) == 3 and operand.place(*HEADS) is None:
            return operand
    return None


@dataclass(frozen=True, eq=False)
class _Scoring:
    """The factors of a product with keys whose sizes clash."""

    query: Operand
    key: Operand


# -- keys whose features and positions are not transposed -------------------------------------------------------------


def key_reversed(facts: Facts) -> Suspect | None:
    """Judge keys with all dimensions reversed, as by .T."""
    scoring = _scoring_of(facts)
    if scoring is None:
        return None
    key = scoring.key
    if len(key.shape) < 3 or key.dims[-1] != ["batch"]:
        return None
    fix = Fix.editing(
        key,
        _unreversed,
        f"swap only the last two: {key.variable}.transpose(-2, -1) or {key.variable}.mT",
    )
    return Suspect(
        "key_not_transposed",
        f"{key.is_shape} {key.axes}: all dimensions are reversed, as by .T.",
        (fix,),
    )


def key_not_transposed(facts: Facts) -> Suspect | None:
    """Judge keys `batch heads key head_dim` in the place of `batch heads head_dim key`."""
    scoring = _scoring_of(facts)
    if scoring is None:
        return None
    query = scoring.query
    key = scoring.key
    if key.place("key", "sequence") != len(key.shape) - 2:
        return None
    rows, columns = key.shape[-2:]
    if rows == columns or query.shape[-1] != columns:
        return None
    before_last = key.axis(-2)
    last = key.axis(-1)
    return Suspect(
        "key_not_transposed",
        f"{key.name} ends in {before_last} and {last}; q·kᵀ needs {last} before {before_last}.",
        (Fix.editing(key, transposed(-2, -1), f"multiply by {key.name}.transpose(-2, -1)"),),
    )


def key_with_heads_swapped(facts: Facts) -> Suspect | None:
    """Judge keys whose heads and positions were swapped, in the place of positions and features."""
    scoring = _scoring_of(facts)
    if scoring is None:
        return None
    key = scoring.key
    if not key.heads_are_behind:
        return None
    if not _was_right_before(facts, key.given.tensor):
        return None
    heads = key.place(*HEADS)
    sequence = key.place(*SEQUENCES)
    assert heads is not None
    assert sequence is not None

    def unswapped(tensor: Tensor) -> Tensor:
        """Return `batch heads head_dim key` of keys."""
        rows_are_keys = tensor.transpose(sequence, heads)
        return rows_are_keys.transpose(-2, -1)

    return Suspect(
        "key_not_transposed",
        f"{key.name} swaps heads and key; q·kᵀ needs key and head_dim swapped.",
        (Fix.editing(key, unswapped, "swap the last two dimensions instead: .transpose(-2, -1)"),),
    )


def _scoring_of(facts: Facts) -> _Scoring | None:
    """Return the factors of a product with keys whose sizes clash; None for other calls."""
    if facts.pair is None or not facts.sizes_clash:
        return None
    query, key = facts.pair
    if key.part != "key":
        return None
    if len(query.shape) < 2 or len(key.shape) < 2:
        return None
    return _Scoring(query, key)


def _unreversed(key: Tensor) -> Tensor:
    """Return keys whose dimensions were all reversed, with only the last two swapped."""
    places = reversed(range(key.dim()))
    return key.permute(*places).transpose(-2, -1)


# -- heads behind the sequence ----------------------------------------------------------------------------------------


def heads_not_transposed(facts: Facts) -> Suspect | None:
    """Judge factors with the heads after the sequence, where the product expects them before."""
    if not facts.sizes_clash:
        return None
    factors = [operand for operand in facts.factors if operand.heads_are_behind]
    if not factors:
        return None
    steps = _steps_to(facts, factors[0])
    if all(_was_right_before(facts, factor.given.tensor) for factor in factors):
        return _transposed_back(factors, steps)
    return _not_transposed(factors, steps)


def _steps_to(facts: Facts, operand: Operand) -> list[Op]:
    """Return the operations that reshaped and scaled an operand, the last first."""
    steps = []
    for _, op in facts.reached.steps_back(operand.given.tensor):
        if op is not None:
            steps.append(op)
    return steps


def _transposed_back(factors: Sequence[Operand], steps: Sequence[Op]) -> Suspect:
    """Return the cause of heads that were before the sequence, and were moved behind it again."""
    where = ""
    if steps and steps[0].source:
        where = f" ({steps[0].source})"
    return Suspect(
        "heads_not_transposed",
        f"{_subject(factors)} transposed back{where}. {_right_order(factors)}",
        (_heads_first(factors, "remove that transpose: the heads already came before the sequence"),),
    )


def _not_transposed(factors: Sequence[Operand], steps: Sequence[Op]) -> Suspect:
    """Return the cause of heads that stayed behind the sequence after the view that splits them."""
    source = _source_of_split(steps)
    where = ""
    if source:
        where = f" ({source})"
    calls = text.listed([f"{name}.transpose(1, 2)" for name in _variables(factors)])
    return Suspect(
        "heads_not_transposed",
        f"{_subject(factors)} split but not transposed{where}. {_right_order(factors)}",
        (_heads_first(factors, f"use {calls} after the view that splits the heads"),),
    )


def _variables(factors: Sequence[Operand]) -> list[str]:
    """Return the variables of factors, without repeats."""
    variables = dict.fromkeys(factor.variable for factor in factors)
    return list(variables)


def _subject(factors: Sequence[Operand]) -> str:
    """Return the beginning of a sentence about factors: `q was`, `q and k were`."""
    names = " and ".join(_variables(factors))
    if len(factors) == 1:
        return f"{names} was"
    return f"{names} were"


def _right_order(factors: Sequence[Operand]) -> str:
    """Return the sentence on the order that a product expects: `Heads must come before query and key.`"""
    sequences: dict[str, None] = {}
    for factor in factors:
        if factor.part == "query":
            sequences["query"] = None
        else:
            sequences["key"] = None
    return f"Heads must come before {' and '.join(sequences)}."


def _source_of_split(steps: Sequence[Op]) -> str:
    """Return the line of the last view that splits a dimension, as far as it is recorded."""
    for op in steps:
        if op.base_name not in ("view", "_unsafe_view"):
            continue
        if len(op.output.shape) > len(op.inputs[0].shape):
            return op.source
    return ""


def _heads_first(factors: Sequence[Operand], way: str) -> Fix:
    """Return the fix that moves the heads of factors before the sequence."""
    edits = []
    for factor in factors:
        heads_are_last = factor.place(*HEADS) == len(factor.shape) - 1
        if heads_are_last:
            edits.append((factor, _heads_first_of_columns))
        else:
            edits.append((factor, _heads_first_of_rows))
    return Fix(way, edits)


def _heads_first_of_rows(tensor: Tensor) -> Tensor:
    """Return `batch heads sequence head_dim` of `batch sequence heads head_dim`."""
    return tensor.transpose(1, 2)


def _heads_first_of_columns(tensor: Tensor) -> Tensor:
    """Return `batch heads head_dim sequence` of `batch sequence head_dim heads`."""
    return _heads_first_of_rows(tensor.mT).mT


def _was_right_before(facts: Facts, tensor: TensorRef) -> bool:
    """Return whether an earlier step had the heads before the sequence: `batch heads sequence head_dim`."""
    steps = facts.reached.steps_back(tensor)
    for earlier, _ in islice(steps, 1, None):
        if len(earlier.shape) >= 4 and _has_heads_first(facts.reached.of(earlier)):
            return True
    return False


def _has_heads_first(pattern: str) -> bool:
    """Return whether heads come before the sequence in a pattern of axes, and both occur."""
    names = re.findall(r"\w+", pattern)
    places_of_heads = [place for place, name in enumerate(names) if name in HEADS]
    places_of_sequence = [place for place, name in enumerate(names) if name in SEQUENCES]
    if not places_of_heads or not places_of_sequence:
        return False
    return places_of_heads[0] < places_of_sequence[0]


@dataclass(frozen=True, eq=False)
class _Factors:
    """The factors of a product whose sizes clash."""

    left: Operand
    """Queries or weights."""
    right: Operand
    """Keys or values."""


# -- two factors of one layout and different sizes --------------------------------------------------------------------


def _two_factors(facts: Facts) -> _Factors | None:
    """Return queries or weights, and keys or values, whose sizes clash; None for other calls."""
    if not facts.sizes_clash:
        return None
    left = facts.of_part("query", "weights")
    right = facts.of_part("key", "value")
    if left is None or right is None:
        return None
    return _Factors(left, right)


def heads_of_equation(facts: Facts) -> Suspect | None:
    """Judge the numbers of heads of an einsum before its layouts: an equation may put the heads anywhere."""
    if facts.base != "einsum":
        return None
    return heads_of_factors(facts)


def heads_of_factors(facts: Facts) -> Suspect | None:
    """Judge two factors with different numbers of heads."""
    factors = _two_factors(facts)
    if factors is None:
        return None
    return heads_clash(facts, factors.left, factors.right)


def batch_differs(facts: Facts) -> Suspect | None:
    """Judge two factors with different batch sizes."""
    factors = _two_factors(facts)
    if factors is None:
        return None
    left_batch = factors.left.size("batch")
    right_batch = factors.right.size("batch")
    if not left_batch or not right_batch:
        return None
    if left_batch == right_batch:
        return None
    batches = f"{factors.left.name} has batch {left_batch} and {factors.right.name} has batch {right_batch}"
    return Suspect("batch_differs", f"{batches}. {SAME_BATCH}")


def head_dim_differs(facts: Facts) -> Suspect | None:
    """Judge queries and keys whose heads have different widths."""
    factors = _two_factors(facts)
    if factors is None or factors.left.part != "query":
        return None
    query = factors.left
    key = factors.right
    width = query.size("head_dim")
    key_width = key.size("head_dim")
    if not width or not key_width:
        return None
    if width == key_width:
        return None
    place = key.place("head_dim")
    assert place is not None
    fix = Fix.editing(
        key,
        resized(place, width),
        "split queries and keys into heads of the same width: the product sums over their features",
    )
    return Suspect(
        "head_dim_differs",
        f"{query.name} has head_dim {width} and {key.name} has head_dim {key_width}.",
        (fix,),
    )


def lengths_differ(facts: Facts) -> Suspect | None:
    """Judge weights for other numbers of keys than there are values."""
    factors = _two_factors(facts)
    if factors is None or factors.left.part != "weights":
        return None
    weights = factors.left
    value = factors.right
    keys = weights.shape[-1]
    length = value.size("key", "sequence")
    if not length or keys == length:
        return None
    place = value.place("key", "sequence")
    assert place is not None
    return Suspect(
        "lengths_differ",
        f"{weights.name} has weights for {keys} keys and {value.name} has {length} values.",
        (Fix.editing(value, resized(place, keys), SAME_SEQUENCE),),
    )

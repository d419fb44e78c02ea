"""Edit one operand of a failing call so that it runs, where no known mistake explains it.

    scores = q.unflatten(1, (2, 4)) @ k[:, :, None].mT      # batch kv_heads group query key
    scores.masked_fill(~mask, -1e9)                         # mask: batch 1 query key

The mask lacks an axis. Every place for it is tried; what gives the shape of the scores is a fix. Only edits that need
no knowledge of the code are tried: an axis, a cut, sizes of a view, parts of a projection, rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ... import text
from ...record.ops import Op
from .facts import BROADCASTS, VIEWS, Facts, Operand, first_clash
from .tried import Edit, Fix, of_shape

_LOGICAL = {"and", "or", "xor", "iand", "ior", "logical_and", "logical_or"}
"""Calls that combine masks."""
_TAKES_FEATURES = ("linear", "layer_norm", "rms_norm")
"""Calls with a weight for a number of features."""
_NEAR = 8
"""Operations between a cut of a projection and the call that fails."""


@dataclass(frozen=True, eq=False)
class Mismatch:
    """What does not fit in a call, and edits with which it may run."""

    name: str
    """One of `causes.CAUSES`."""
    explanation: str
    fixes: tuple[Fix, ...]


def mismatches(facts: Facts) -> Iterator[Mismatch]:
    """Yield what does not fit in the failing call; nothing if no edit is known."""
    if facts.base in BROADCASTS | _LOGICAL and len(facts.operands) == 2:
        left, right = facts.operands
        yield from _lacking_axis(facts, left, right)
        yield from _longer(facts, left, right)
    if facts.base in VIEWS and facts.operands:
        yield from _sizes_of_view(facts)
    yield from _parts_of_projection(facts)
    yield from _rows_of_output(facts)


# -- axes and sizes of two operands -----------------------------------------------------------------------------------


def _lacking_axis(facts: Facts, left: Operand, right: Operand) -> Iterator[Mismatch]:
    """Judge an operand of fewer dimensions that fits the other one with an axis of size one."""
    if len(left.shape) == len(right.shape):
        return
    fewer, more = (left, right) if len(left.shape) < len(right.shape) else (right, left)
    if first_clash(fewer.shape, more.shape) is None:
        return
    for place in range(1, len(fewer.shape)):
        widened = (*fewer.shape[:place], 1, *fewer.shape[place:])
        if len(widened) != len(more.shape) or first_clash(widened, more.shape) is not None:
            continue
        index = ", ".join([":"] * place + ["None"])
        axis = more.axis(place)
        fix = Fix(
            f"{_called(fewer)}[{index}], which gives {text.shape(more.shape)}",
            [(fewer, _widened(place))],
            more.shape,
        )
        what = (
            f"{fewer.is_shape}, {text.plural(len(fewer.shape), 'dimension')}; {more.text} has {len(more.shape)}: "
            f"{_called(fewer)} lacks one for {axis}."
        )
        yield Mismatch("lacks_an_axis", what, (fix,))
        return


def _widened(place: int) -> Edit:
    return lambda tensor: tensor.unsqueeze(place)


def _reshaped(shape: Sequence[int]) -> Callable[..., Tensor]:
    """Return a view of its first argument in this shape, whatever else it is called with."""
    return lambda tensor, *_, **__: tensor.reshape(tuple(shape))


def _called(operand: Operand) -> str:
    """Return the variable that an operand is made of, to be edited in its place."""
    return operand.variable or operand.name


def _longer(facts: Facts, left: Operand, right: Operand) -> Iterator[Mismatch]:
    """Judge two operands that differ in the size of one dimension: a mask of all keys, or a table for all features."""
    place = first_clash(left.shape, right.shape)
    if place is None:
        return
    longer, shorter = (left, right) if left.shape[place] > right.shape[place] else (right, left)
    has, wanted = longer.shape[place], shorter.shape[place]
    if longer.from_scores or place < -2:
        return
    if longer.dtype == "bool" and not shorter.from_scores and facts.base not in _LOGICAL:
        return  # which keys a mask is for is known from the scores alone
    is_of_keys = facts.base in _LOGICAL or shorter.from_scores
    if not is_of_keys and not (place == -1 and len(longer.shape) < len(shorter.shape)):
        return
    behind = ", :" * (-1 - place)
    first = _cut(longer, place, wanted, f"[..., :{wanted}{behind}]", from_start=True)
    what = f"{longer.is_shape}, and {shorter.is_shape}: {has} and {wanted} in their last dimension."
    if place != -1:
        what = f"{longer.is_shape}, and {shorter.is_shape}: {has} and {wanted} in dimension {place}."
    if is_of_keys:
        last = _cut(longer, place, wanted, f"[..., -{wanted}:{behind}]", from_start=False)
        keys = "keys" if place == -1 else "queries"
        what += f" One covers {has} {keys}, the other {wanted}."
        last_ones = Fix(f"{last.text} for the last {wanted} {keys}, as in a cache of the latest keys", last.edits)
        yield Mismatch("mask_size", what, (last_ones, Fix(f"{first.text} for the first {wanted}", first.edits)))
        return
    fixes = (Fix(f"make {_called(longer)} for {wanted} features, or take {first.text}", first.edits),)
    yield Mismatch("table_size", f"{what} The table is for {has} features.", fixes)


def _cut(operand: Operand, place: int, size: int, index: str, *, from_start: bool) -> Fix:
    """Return the fix to take the first or the last of a dimension."""
    start = 0 if from_start else operand.shape[place] - size
    return Fix(f"{operand.name}{index}", [(operand, lambda tensor: tensor.narrow(place, start, size))])


# -- views ------------------------------------------------------------------------------------------------------------


def _sizes_of_view(facts: Facts) -> Iterator[Mismatch]:
    """Judge a view that takes one size of its operand twice, and another not at all."""
    operand, sizes = facts.operands[0], facts.sizes_of_view
    if -1 in sizes or not sizes or prod(sizes) == prod(operand.shape):
        return
    kept = tuple(size for size in operand.shape if size != 1)
    for place, size in enumerate(sizes):
        others = prod(sizes[:place] + sizes[place + 1 :])
        right, rest = divmod(prod(operand.shape), others) if others else (0, 1)
        asked = (*sizes[:place], right, *sizes[place + 1 :])
        if rest or sizes.count(size) < 2 or tuple(size for size in asked if size != 1) != kept:
            continue
        way = f"{operand.name}.reshape({', '.join(map(str, asked))})"
        yield Mismatch(
            "view_sizes",
            f"{operand.is_shape}; {text.shape(sizes)} takes {size} twice.",
            (Fix(way, [(operand, of_shape(asked))], function=_reshaped(asked)),),
        )
        return


# -- parts of a projection --------------------------------------------------------------------------------------------


def _parts_of_projection(facts: Facts) -> Iterator[Mismatch]:
    """Judge equal parts of a packed projection whose parts are not equal: few keys and values for many queries."""
    operand, wanted = _features_wanted(facts)
    if operand is None or not operand.shape or operand.shape[-1] == wanted:
        return
    has = operand.shape[-1]
    whole = _cut_from(facts, operand)
    rest = whole - wanted
    if whole != 3 * has or rest <= 0 or rest % 2 or wanted % (rest // 2):
        return
    each = rest // 2
    way = f"split([{wanted}, {each}, {each}], -1) instead of three equal parts"
    yield Mismatch(
        "unequal_parts",
        f"{operand.name} has {has} features, a third of {whole}; {wanted} are expected. With fewer key heads than "
        f"query heads, {whole} are {wanted} of q, {each} of k and {each} of v.",
        (Fix(way, [(operand, of_shape((*operand.shape[:-1], wanted)))]),),
    )


def _features_wanted(facts: Facts) -> tuple[Operand | None, int]:
    """Return the input of a call and the features that it takes: those of its weight, or of the heads of a view."""
    if not facts.operands:
        return None, 0
    operand = facts.operands[0]
    if facts.base in _TAKES_FEATURES and len(facts.operands) > 1:
        return operand, facts.operands[1].shape[-1] if facts.operands[1].shape else 0
    sizes = facts.sizes_of_view if facts.base in VIEWS else ()
    if len(sizes) == len(operand.shape) + 1 and sizes[:-2] == operand.shape[:-1] and min(sizes[-2:]) > 0:
        return operand, sizes[-1] * sizes[-2]
    return None, 0


def _cut_from(facts: Facts, operand: Operand) -> int:
    """Return the features of the tensor that an operand was cut from along its last dimension; 0 if it was not cut."""
    recording = facts.reached.graph.recording
    tensor = operand.given.tensor
    for _ in range(_NEAR):
        op: Op | None = recording.producer(tensor)
        if op is None or not op.inputs:
            return 0
        source = op.inputs[0]
        if op.does("cuts") and source.shape[:-1] == tensor.shape[:-1]:
            return source.shape[-1]
        if source.numel != tensor.numel:
            return 0
        tensor = source
    return 0


# -- the rows of W_o --------------------------------------------------------------------------------------------------


def _rows_of_output(facts: Facts) -> Iterator[Mismatch]:
    """Judge an output projection made for the width of the keys, where the values have another."""
    heads = {name: facts.reached.stages.get(f"{name}_heads") for name in "qv"}
    if facts.pair is None or heads["q"] is None or heads["v"] is None:
        return
    operand, weight = facts.pair
    if len(weight.shape) != 2 or not operand.shape or operand.shape[-1] == weight.shape[0]:
        return
    count = _count_of_heads(operand.shape[-1], heads["v"].shape)
    if not count or weight.shape[0] != count * heads["q"].shape[-1]:
        return
    (asked, width), of_values = (weight.shape, heads["v"].shape[-1])
    right = (count * of_values, width)
    yield Mismatch(
        "output_rows",
        f"{weight.name} has {asked} rows, {count} heads of {heads['q'].shape[-1]} features as the keys have; the "
        f"context has {count} heads of {of_values}, as the values have.",
        (Fix(f"make {weight.name} {text.shape(right)}", [(weight, of_shape(right))]),),
    )


def _count_of_heads(width: int, heads: Sequence[int]) -> int:
    """Return how many heads of `batch heads token head_dim` are side by side in a width; 0 if they are not."""
    count, rest = divmod(width, heads[-1])
    return count if not rest and count in heads[:-1] else 0

"""Edit one operand of a failing call so that it runs, where no known mistake explains it.

    scores = q.unflatten(1, (2, 4)) @ k[:, :, None].mT      # batch kv_heads group query key
    scores.masked_fill(~mask, -1e9)                         # mask: batch 1 query key

The mask lacks an axis. Every place for it is tried; what gives the shape of the scores is a fix. Only edits that need
no knowledge of the code are tried: an axis, a cut, sizes of a view, parts of a projection, rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from torch import Tensor

from ... import text
from ...record.ops import Op
from .facts import BROADCASTS, VIEWS, Facts, Operand, first_clash
from .suspect import Shape, Suspect
from .tried import Edit, Fix, of_shape, runs

_LOGICAL = {"and", "or", "xor", "iand", "ior", "logical_and", "logical_or"}
"""Calls that combine masks."""
_TAKES_FEATURES = ("linear", "layer_norm", "rms_norm")
"""Calls with a weight for a number of features."""
_NEAR = 8
"""Operations between a cut of a projection and the call that fails."""


def mismatch_with_edit(facts: Facts) -> Suspect | None:
    """Return what does not fit in the failing call, where it runs with an edit; else None."""
    for suspect in _mismatches(facts):
        if any(runs(facts.call, fix) for fix in suspect.fixes):
            return suspect
    return None


def _mismatches(facts: Facts) -> Iterator[Suspect]:
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


def _lacking_axis(facts: Facts, left: Operand, right: Operand) -> Iterator[Suspect]:
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
        yield Suspect("lacks_an_axis", what, (fix,))
        return


def _widened(place: int) -> Edit:
    return lambda tensor: tensor.unsqueeze(place)


def _reshaped(shape: Sequence[int]) -> Callable[..., Tensor]:
    """Return a view of its first argument in this shape, whatever else it is called with."""
    return lambda tensor, *_, **__: tensor.reshape(tuple(shape))


def _called(operand: Operand) -> str:
    """Return the variable that an operand is made of, to be edited in its place."""
    return operand.variable or operand.name


def _longer(facts: Facts, left: Operand, right: Operand) -> Iterator[Suspect]:
    """Judge two operands that differ in the size of one dimension: a mask of all keys, or a table for all features."""
    place = first_clash(left.shape, right.shape)
    if place is None or place < -2:
        return
    longer, shorter = (left, right) if left.shape[place] > right.shape[place] else (right, left)
    if longer.from_scores:
        return
    combines_masks = facts.base in _LOGICAL
    if longer.dtype == "bool" and not shorter.from_scores and not combines_masks:
        return  # which keys a mask is for is known from the scores alone
    where = "their last dimension" if place == -1 else f"dimension {place}"
    what = f"{longer.is_shape}, and {shorter.is_shape}: {longer.shape[place]} and {shorter.shape[place]} in {where}."
    if combines_masks or shorter.from_scores:
        yield _longer_mask(longer, place, shorter.shape[place], what)
    elif place == -1 and len(longer.shape) < len(shorter.shape):
        yield _wider_table(longer, shorter.shape[place], what)


def _longer_mask(mask: Operand, place: int, wanted: int, what: str) -> Suspect:
    """Return the cause of a mask for more keys, or for more queries in dimension -2; `what` says the sizes."""
    unit = "keys" if place == -1 else "queries"
    behind = "" if place == -1 else ", :"
    first = f"{mask.name}[..., :{wanted}{behind}] for the first {wanted}"
    last = f"{mask.name}[..., -{wanted}:{behind}] for the last {wanted} {unit}, as in a cache of the latest keys"
    start = mask.shape[place] - wanted
    return Suspect(
        "mask_size",
        f"{what} One covers {mask.shape[place]} {unit}, the other {wanted}.",
        (
            Fix(last, [(mask, lambda tensor: tensor.narrow(place, start, wanted))]),
            Fix(first, [(mask, lambda tensor: tensor.narrow(place, 0, wanted))]),
        ),
    )


def _wider_table(table: Operand, wanted: int, what: str) -> Suspect:
    """Return the cause of a table for more features than the other operand has; `what` says the sizes."""
    way = f"make {_called(table)} for {wanted} features, or take {table.name}[..., :{wanted}]"
    cut = [(table, lambda tensor: tensor.narrow(-1, 0, wanted))]
    return Suspect("table_size", f"{what} The table is for {table.shape[-1]} features.", (Fix(way, cut),))


# -- views ------------------------------------------------------------------------------------------------------------


def _sizes_of_view(facts: Facts) -> Iterator[Suspect]:
    """Judge a view that takes one size of its operand twice, and another not at all."""
    operand, sizes = facts.operands[0], facts.sizes_of_view
    if -1 in sizes or not sizes or prod(sizes) == prod(operand.shape):
        return
    for place, size in enumerate(sizes):
        right_sizes = _with_right_size(operand, sizes, place)
        if right_sizes is None or sizes.count(size) < 2 or not _are_alike(right_sizes, operand.shape):
            continue
        way = f"{operand.name}.reshape({', '.join(map(str, right_sizes))})"
        yield Suspect(
            "view_sizes",
            f"{operand.is_shape}; {text.shape(sizes)} takes {size} twice.",
            (Fix(way, [(operand, of_shape(right_sizes))], function=_reshaped(right_sizes)),),
        )
        return


def _with_right_size(operand: Operand, sizes: Shape, place: int) -> Shape | None:
    """Return the sizes of a view with the one at a place that the others leave; None if they do not divide it."""
    rest_of_sizes = prod(sizes[:place] + sizes[place + 1 :])
    if not rest_of_sizes or prod(operand.shape) % rest_of_sizes:
        return None
    return (*sizes[:place], prod(operand.shape) // rest_of_sizes, *sizes[place + 1 :])


def _are_alike(sizes: Shape, shape: Shape) -> bool:
    """Return whether sizes are those of a shape in the same order, except for ones."""
    return [size for size in sizes if size != 1] == [size for size in shape if size != 1]


# -- parts of a projection --------------------------------------------------------------------------------------------


def _parts_of_projection(facts: Facts) -> Iterator[Suspect]:
    """Judge equal parts of a packed projection whose parts are not equal: few keys and values for many queries."""
    operand, wanted = _features_wanted(facts)
    if operand is None or operand.shape[-1] == wanted:
        return
    has, whole = operand.shape[-1], _cut_from(facts, operand)
    # The features of k and v together.
    rest = whole - wanted
    if whole != 3 * has or rest <= 0 or rest % 2 or wanted % (rest // 2):
        return
    kv_width = rest // 2
    way = f"split([{wanted}, {kv_width}, {kv_width}], -1) instead of three equal parts"
    yield Suspect(
        "unequal_parts",
        f"{operand.name} has {has} features, a third of {whole}; {wanted} are expected. With fewer key heads than "
        f"query heads, {whole} are {wanted} of q, {kv_width} of k and {kv_width} of v.",
        (Fix(way, [(operand, of_shape((*operand.shape[:-1], wanted)))]),),
    )


def _features_wanted(facts: Facts) -> tuple[Operand | None, int]:
    """Return the input of a call and the features that it takes: those of its weight, or of the heads of a view."""
    if not facts.operands or not facts.operands[0].shape:
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


def _rows_of_output(facts: Facts) -> Iterator[Suspect]:
    """Judge an output projection made for the width of the keys, where the values have another."""
    q_heads, v_heads = (facts.reached.stages.get(stage) for stage in ("q_heads", "v_heads"))
    if facts.pair is None or q_heads is None or v_heads is None:
        return
    context, weight = facts.pair
    if len(weight.shape) != 2 or not context.shape or context.shape[-1] == weight.shape[0]:
        return
    (rows, columns), key_width, value_width = weight.shape, q_heads.shape[-1], v_heads.shape[-1]
    count = _count_of_heads(context.shape[-1], v_heads.shape)
    if not count or rows != count * key_width:
        return
    right_shape = (count * value_width, columns)
    yield Suspect(
        "output_rows",
        f"{weight.name} has {rows} rows, {count} heads of {key_width} features as the keys have; the "
        f"context has {count} heads of {value_width}, as the values have.",
        (Fix(f"make {weight.name} {text.shape(right_shape)}", [(weight, of_shape(right_shape))]),),
    )


def _count_of_heads(width: int, heads: Sequence[int]) -> int:
    """Return how many heads of `batch heads token head_dim` are side by side in a width; 0 if they are not."""
    count, rest = divmod(width, heads[-1])
    return count if not rest and count in heads[:-1] else 0

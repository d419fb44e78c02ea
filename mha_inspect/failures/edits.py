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

from .. import text
from ..record.ops import Op
from .facts import BROADCASTS, VIEWS, Facts, Operand, first_clash
from .suspect import Shape, Suspect
from .tried import Fix, cut, of_shape, runs, widened

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
    combines = facts.base in BROADCASTS or facts.base in _LOGICAL
    if combines and len(facts.operands) == 2:
        left, right = facts.operands
        yield from _lacking_axis(left, right)
        yield from _longer(facts, left, right)
    if facts.base in VIEWS and facts.operands:
        yield from _sizes_of_view(facts)
    yield from _parts_of_projection(facts)
    yield from _rows_of_output(facts)


# -- axes and sizes of two operands -----------------------------------------------------------------------------------


def _lacking_axis(left: Operand, right: Operand) -> Iterator[Suspect]:
    """Judge an operand of fewer dimensions that fits the other one with an axis of size one."""
    if len(left.shape) == len(right.shape):
        return
    fewer, more = right, left
    if len(left.shape) < len(right.shape):
        fewer, more = left, right
    if first_clash(fewer.shape, more.shape) is None:
        return
    for place in range(1, len(fewer.shape)):
        if _fits_with_axis(fewer.shape, more.shape, place):
            yield _without_axis(fewer, more, place)
            return


def _fits_with_axis(fewer: Shape, more: Shape, place: int) -> bool:
    """Return whether `batch query key` fits `batch heads query key` with an axis of size one at a place."""
    with_axis = (*fewer[:place], 1, *fewer[place:])
    if len(with_axis) != len(more):
        return False
    return first_clash(with_axis, more) is None


def _without_axis(fewer: Operand, more: Operand, place: int) -> Suspect:
    """Return the cause of an operand that lacks the axis at a place."""
    name = _called(fewer)
    dimensions = text.plural(len(fewer.shape), "dimension")
    index = ", ".join([":"] * place + ["None"])
    fix = Fix.editing(
        fewer,
        widened(place),
        f"{name}[{index}], which gives {text.shape(more.shape)}",
        shape=more.shape,
    )
    return Suspect(
        "lacks_an_axis",
        f"{fewer.is_shape}, {dimensions}; {more.text} has {len(more.shape)}: {name} lacks one for {more.axis(place)}.",
        (fix,),
    )


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
    longer, shorter = right, left
    if left.shape[place] > right.shape[place]:
        longer, shorter = left, right
    if longer.from_scores:
        return
    what = f"{longer.is_shape}, and {shorter.is_shape}: {_sizes_in(longer, shorter, place)}."
    if shorter.from_scores or facts.base in _LOGICAL:
        yield _longer_mask(longer, place, shorter.shape[place], what)
        return
    if longer.dtype == "bool":
        return  # which keys a mask is for is known from the scores alone
    if place == -1 and len(longer.shape) < len(shorter.shape):
        yield _wider_table(longer, shorter.shape[place], what)


def _sizes_in(longer: Operand, shorter: Operand, place: int) -> str:
    """Return the sizes of two operands in a dimension: `12 and 7 in their last dimension`."""
    sizes = f"{longer.shape[place]} and {shorter.shape[place]}"
    if place == -1:
        return f"{sizes} in their last dimension"
    return f"{sizes} in dimension {place}"


def _longer_mask(mask: Operand, place: int, wanted: int, what: str) -> Suspect:
    """Return the cause of a mask for more keys, or for more queries in dimension -2; `what` says the sizes."""
    size = mask.shape[place]
    if place == -1:
        unit = "keys"
        first = f"[..., :{wanted}]"
        last = f"[..., -{wanted}:]"
    else:
        unit = "queries"
        first = f"[..., :{wanted}, :]"
        last = f"[..., -{wanted}:, :]"
    last_entries = Fix.editing(
        mask,
        cut(place, size - wanted, wanted),
        f"{mask.name}{last} for the last {wanted} {unit}, as in a cache of the latest keys",
    )
    first_entries = Fix.editing(
        mask,
        cut(place, 0, wanted),
        f"{mask.name}{first} for the first {wanted}",
    )
    return Suspect(
        "mask_size",
        f"{what} One covers {size} {unit}, the other {wanted}.",
        (last_entries, first_entries),
    )


def _wider_table(table: Operand, wanted: int, what: str) -> Suspect:
    """Return the cause of a table for more features than the other operand has; `what` says the sizes."""
    fix = Fix.editing(
        table,
        cut(-1, 0, wanted),
        f"make {_called(table)} for {wanted} features, or take {table.name}[..., :{wanted}]",
    )
    return Suspect(
        "table_size",
        f"{what} The table is for {table.shape[-1]} features.",
        (fix,),
    )


# -- views ------------------------------------------------------------------------------------------------------------


def _sizes_of_view(facts: Facts) -> Iterator[Suspect]:
    """Judge a view that takes one size of its operand twice, and another not at all."""
    operand = facts.operands[0]
    sizes = facts.sizes_of_view
    if not sizes or -1 in sizes:
        return
    if prod(sizes) == prod(operand.shape):
        return
    for place, size in enumerate(sizes):
        if sizes.count(size) < 2:
            continue
        right_sizes = _with_right_size(operand, sizes, place)
        if right_sizes is not None and _are_alike(right_sizes, operand.shape):
            yield _size_twice(operand, sizes, size, right_sizes)
            return


def _size_twice(operand: Operand, sizes: Shape, size: int, right_sizes: Shape) -> Suspect:
    """Return the cause of a view that takes a size twice."""
    arguments = ", ".join(map(str, right_sizes))
    fix = Fix(
        f"{operand.name}.reshape({arguments})",
        edits=[(operand, of_shape(right_sizes))],
        function=_reshaped(right_sizes),
    )
    return Suspect(
        "view_sizes",
        f"{operand.is_shape}; {text.shape(sizes)} takes {size} twice.",
        (fix,),
    )


def _with_right_size(operand: Operand, sizes: Shape, place: int) -> Shape | None:
    """Return the sizes of a view with the one at a place that the others leave; None if they do not divide it."""
    before = sizes[:place]
    behind = sizes[place + 1 :]
    rest_of_sizes = prod(before) * prod(behind)
    if not rest_of_sizes:
        return None
    size, remainder = divmod(prod(operand.shape), rest_of_sizes)
    if remainder:
        return None
    return (*before, size, *behind)


def _are_alike(sizes: Shape, shape: Shape) -> bool:
    """Return whether sizes are those of a shape in the same order, except for ones."""
    return _without_ones(sizes) == _without_ones(shape)


def _without_ones(sizes: Shape) -> list[int]:
    return [size for size in sizes if size != 1]


@dataclass(frozen=True, eq=False)
class _FeaturesWanted:
    """The input of a call, and the features that the call takes."""

    operand: Operand
    number: int


# -- parts of a projection --------------------------------------------------------------------------------------------


def _parts_of_projection(facts: Facts) -> Iterator[Suspect]:
    """Judge equal parts of a packed projection whose parts are not equal: few keys and values for many queries."""
    features = _features_wanted(facts)
    if features is None:
        return
    operand = features.operand
    wanted = features.number
    part = operand.shape[-1]
    whole = _cut_from(facts, operand)
    if part == wanted or whole != 3 * part:
        return
    kv_width = _kv_width(whole, wanted)
    if not kv_width:
        return
    right_shape = (*operand.shape[:-1], wanted)
    yield Suspect(
        "unequal_parts",
        f"{operand.name} has {part} features, a third of {whole}; {wanted} are expected. With fewer key heads than "
        f"query heads, {whole} are {wanted} of q, {kv_width} of k and {kv_width} of v.",
        (
            Fix.editing(
                operand,
                of_shape(right_shape),
                f"split([{wanted}, {kv_width}, {kv_width}], -1) instead of three equal parts",
            ),
        ),
    )


def _kv_width(whole: int, query_width: int) -> int:
    """Return the features of keys in a packed projection of queries, keys and values; 0 if they cannot be equal.

    Query heads share key heads, so the features of the queries are a multiple of those of the keys.
    """
    of_keys_and_values = whole - query_width
    if of_keys_and_values <= 0 or of_keys_and_values % 2:
        return 0
    kv_width = of_keys_and_values // 2
    if query_width % kv_width:
        return 0
    return kv_width


def _features_wanted(facts: Facts) -> _FeaturesWanted | None:
    """Return the input of a call and the features that it takes: those of its weight, or of the heads of a view."""
    if not facts.operands:
        return None
    operand = facts.operands[0]
    if not operand.shape:
        return None
    if facts.base in _TAKES_FEATURES and len(facts.operands) > 1:
        weight = facts.operands[1]
        return _FeaturesWanted(operand, weight.shape[-1] if weight.shape else 0)
    if facts.base in VIEWS:
        return _features_of_heads(operand, facts.sizes_of_view)
    return None


def _features_of_heads(operand: Operand, sizes: Shape) -> _FeaturesWanted | None:
    """Return the features that a view takes which splits the last dimension in two; None for other views."""
    if len(sizes) != len(operand.shape) + 1:
        return None
    if sizes[:-2] != operand.shape[:-1]:
        return None
    heads, head_dim = sizes[-2:]
    if heads <= 0 or head_dim <= 0:
        return None
    return _FeaturesWanted(operand, heads * head_dim)


def _cut_from(facts: Facts, operand: Operand) -> int:
    """Return the features of the tensor that an operand was cut from along its last dimension; 0 if it was not cut."""
    recording = facts.reached.graph.recording
    tensor = operand.given.tensor
    for _ in range(_NEAR):
        op: Op | None = recording.producer(tensor)
        if op is None or not op.inputs:
            return 0
        source = op.inputs[0]
        keeps_rows = source.shape[:-1] == tensor.shape[:-1]
        if keeps_rows and op.does("cuts"):
            return source.shape[-1]
        if source.numel != tensor.numel:
            return 0
        tensor = source
    return 0


# -- the rows of W_o --------------------------------------------------------------------------------------------------


def _rows_of_output(facts: Facts) -> Iterator[Suspect]:
    """Judge an output projection made for the width of the keys, where the values have another."""
    if facts.pair is None:
        return
    context, weight = facts.pair
    q_heads = facts.reached.stages.get("q_heads")
    v_heads = facts.reached.stages.get("v_heads")
    if q_heads is None or v_heads is None:
        return
    if len(weight.shape) != 2 or not context.shape:
        return
    rows, columns = weight.shape
    width = context.shape[-1]
    if width == rows:
        return
    key_width = q_heads.shape[-1]
    value_width = v_heads.shape[-1]
    count = _count_of_heads(width, v_heads.shape)
    if not count or rows != count * key_width:
        return
    right_shape = (count * value_width, columns)
    fix = Fix.editing(
        weight,
        of_shape(right_shape),
        f"make {weight.name} {text.shape(right_shape)}",
    )
    yield Suspect(
        "output_rows",
        f"{weight.name} has {rows} rows, {count} heads of {key_width} features as the keys have; the "
        f"context has {count} heads of {value_width}, as the values have.",
        (fix,),
    )


def _count_of_heads(width: int, heads: Sequence[int]) -> int:
    """Return how many heads of `batch heads token head_dim` are side by side in a width; 0 if they are not."""
    *sizes, head_dim = heads
    count, remainder = divmod(width, head_dim)
    if remainder or count not in sizes:
        return 0
    return count

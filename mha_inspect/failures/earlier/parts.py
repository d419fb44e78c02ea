"""A projection of which the failing call has a part of another size than it takes."""

from __future__ import annotations

from ...record.ops import Op
from ..edit import Change, Edit
from ..facts import NORMS, VIEWS, Facts, Operand

_NEAR = 8
"""Operations between a cut of a projection and the call that fails."""


def equal_parts(facts: Facts) -> Edit | None:
    """Judge equal parts of a packed projection whose parts are not equal: few keys and values for many queries."""
    if not facts.operands or not facts.operands[0].shape:
        return None
    operand = facts.operands[0]
    part, wanted = operand.shape[-1], _features_wanted(facts)
    whole = _cut_from(facts, operand)
    rest = whole - wanted
    # Query heads share key heads, so the features of the queries are a multiple of those of the keys.
    if not wanted or part == wanted or whole != 3 * part or rest <= 0 or rest % 2 or wanted % (rest // 2):
        return None
    kv_width = rest // 2
    what = (
        f"{operand.name} has {part} features, a third of {whole}; {wanted} are expected. With fewer key heads than "
        f"query heads, {whole} are {wanted} of q, {kv_width} of k and {kv_width} of v."
    )
    change = Change(operand, (("new_zeros", (*operand.shape[:-1], wanted)),))
    way = f"use split([{wanted}, {kv_width}, {kv_width}], -1) instead of three equal parts"
    return Edit("unequal_parts", what, (change,), way)


def _features_wanted(facts: Facts) -> int:
    """Return the features that a call takes: those of its weight, or of the heads of a view; 0 if they are unknown."""
    if facts.base in ("linear", *NORMS) and len(facts.operands) > 1:
        return facts.operands[1].shape[-1] if facts.operands[1].shape else 0
    split = split_of(facts)
    if split is None or min(split) <= 0:
        return 0
    return split[0] * split[1]


def split_of(facts: Facts) -> tuple[int, int] | None:
    """Return the two sizes in which a view splits the last dimension; None if it changes others too."""
    if facts.base not in VIEWS or not facts.operands or not facts.operands[0].shape:
        return None
    shape, sizes = facts.operands[0].shape, facts.sizes_of_view
    if len(sizes) != len(shape) + 1 or sizes[:-2] != shape[:-1]:
        return None
    heads, head_dim = sizes[-2:]
    return heads, head_dim


def _cut_from(facts: Facts, operand: Operand) -> int:
    """Return the features of the tensor that an operand was cut from along its last dimension; 0 if it was not cut."""
    tensor = operand.given.tensor
    for _ in range(_NEAR):
        op: Op | None = facts.reached.graph.recording.producer(tensor)
        if op is None or not op.inputs:
            return 0
        source = op.inputs[0]
        if source.shape[:-1] == tensor.shape[:-1] and op.does("cuts"):
            return source.shape[-1]
        if source.numel != tensor.numel:
            return 0
        tensor = source
    return 0


def cut_over_ranks(facts: Facts) -> Edit | None:
    """Judge a view for all heads of a projection of which this rank has a part."""
    split = split_of(facts)
    if split is None:
        return None
    x, (_, head_dim) = facts.operands[0], split
    width = x.shape[-1]
    whole = facts.cut.get(width, 0)
    if not whole or (head_dim > 0 and whole % head_dim):
        return None
    way, inside = "divide the number of heads by the number of ranks, or give -1", ""
    if head_dim > 0 and width % head_dim:
        way = f"shard it at whole heads, over {whole // head_dim} ranks or fewer, or keep it whole on every rank"
        inside = f", which cuts through a head of {head_dim}"
    what = f"{x.name} has {width} of {whole} features: its layer is sharded over ranks{inside}."
    return Edit("cut_over_ranks", what, way=way)


def rows_of_output(facts: Facts) -> Edit | None:
    """Judge an output projection made for the width of the keys, where the values have another."""
    q_heads, v_heads = facts.reached.stages.get("q_heads"), facts.reached.stages.get("v_heads")
    if facts.pair is None or q_heads is None or v_heads is None:
        return None
    context, weight = facts.pair
    if len(weight.shape) != 2 or not context.shape:
        return None
    key_width, value_width = q_heads.shape[-1], v_heads.shape[-1]
    count, rest = divmod(context.shape[-1], value_width)
    rows, columns = weight.shape
    if rest or count not in v_heads.shape[:-1] or rows != count * key_width or key_width == value_width:
        return None
    what = (
        f"{weight.name} has {rows} rows, {count} heads of {key_width} features as the keys have; the context has "
        f"{count} heads of {value_width}, as the values have."
    )
    shape = (count * value_width, columns)
    return Edit("output_rows", what, (Change(weight, (("new_zeros", shape),)),), f"make {weight.spelled} {list(shape)}")

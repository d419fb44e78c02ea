"""Check that queries and keys are rotated by their positions, and in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from .each_kind import of_each_kind
from .evidence import Evidence
from .ladders import frequencies_off
from .replay import SIDES, Factor, LostError, NotHereError, again, content_of, first_key

_NEAR = 1e-3
"""Relative differences below this count as equal."""
_SAME = 1e-6
"""Relative differences below this are of rounding alone, where the same numbers are computed in several places."""
_CUTS = ("index", "index_select", "gather", "embedding", "cat", "stack", "repeat", "_to_copy")
"""Operations whose result has numbers of their first tensor alone, or of tensors like it."""
_MOST_TOKENS = 64
"""The largest number of tokens of each axis to follow."""


@partial(of_each_kind, "no rotary embedding was found")
def rotary(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if queries and keys of one position are rotated differently, or values are rotated."""
    first = first_key(evidence, attention, names)
    shifted = list(_of_offsets(evidence, attention, names, first))
    try:
        found = list(_of_rows(evidence, attention, names)) or shifted
        yield from found or frequencies_off(evidence, attention, names)
    except LostError:
        if not shifted:
            raise
        yield from shifted


def _finding(op: Op, sentence: str, evidence: str, fix: str) -> Finding:
    return Finding("rotary", sentence, evidence, source=op.source, fix=fix)


# -- rows of equal tokens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RotatedSide:
    """The query, the key or the value, and its rows when all of its tokens are equal."""

    side: str
    factor: Factor
    op: Op | None
    """The operation that rotates it; None without one."""
    rows: Tensor
    """`group row feature`, in float64, of tokens of this call alone."""
    other_rows: Tensor
    """The same for another token."""

    @property
    def varies(self) -> bool:
        """Whether equal tokens have other rows at other positions."""
        return _vary(self.rows)

    @property
    def is_rotated(self) -> bool:
        """Whether its rows differ by position; at a single position, whether it is multiplied by cosines and sines."""
        return self.varies if self.rows.shape[1] > 1 else self.op is not None


def _of_rows(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield faults in the rows of equal tokens at all positions."""
    factors = {side: Factor(evidence, attention, names, side, from_first=True) for side in SIDES}
    ops = {side: _turning(evidence, factor) for side, factor in factors.items()}
    if not any(ops.values()):
        yield from _at_position_zero(evidence, factors, names)
        return
    sides = _rotated_sides(factors, ops, names)
    yield from _of_scores(evidence, sides["query"], sides["key"])
    value = sides["value"]
    keeps_norms = not _vary(value.rows.norm(dim=-1, keepdim=True))
    if value.op is None or not value.varies or not keeps_norms or _is_rotated_back(evidence, attention):
        return
    yield _finding(
        value.op,
        "The values are rotated too, so the output depends on absolute positions. The scores depend on distances.",
        "Equal tokens at all positions give rotated values, and the context is not rotated back.",
        "Rotate only the query and the key.",
    )


def _rotated_sides(
    factors: Mapping[str, Factor], ops: Mapping[str, Op | None], names: AxisNames
) -> dict[str, _RotatedSide]:
    """Return the rows of each side for two tokens. Raise `LostError` if the sides have different numbers of them."""
    drawn = {}
    for side, factor in factors.items():
        first, second = (_of_equal_tokens(factor, seed=seed) for seed in (1, 2))
        if side == "query":
            first, second = _once(first, names.lengths[0]), _once(second, names.lengths[0])
        drawn[side] = first, second
    # Other rows are of a cache, of tokens that are joined, or of zeros that pad a sequence to whole windows.
    of_tokens = {side: (first != second).flatten(2).any(-1).any(0) for side, (first, second) in drawn.items()}
    if len({marks.shape for marks in of_tokens.values()}) == 1:
        in_all = torch.stack([*of_tokens.values()]).all(0)
        of_tokens = dict.fromkeys(of_tokens, in_all)
    if len({int(marks.sum()) for marks in of_tokens.values()}) != 1:
        raise LostError
    sides = {}
    for side, (first, second) in drawn.items():
        marks = of_tokens[side]
        sides[side] = _RotatedSide(side, factors[side], ops[side], first[:, marks], second[:, marks])
    return sides


def _once(rows: Tensor, length: int) -> Tensor:
    """Return the rows of each position once, where those of heads that share a key are beside each other, and equal."""
    for shape, place in (((-1, length), 1), ((length, -1), 2)):
        heads = rows[None]
        if rows.shape[1] % length == 0:
            heads = rows.reshape(len(rows), *shape, rows.shape[-1]).movedim(place, 0)
        if bool(((heads - heads[0]).abs() <= _NEAR * heads.abs().max()).all()):
            return heads[0]
    return rows


def _is_rotated_back(evidence: Evidence, attention: Attention) -> bool:
    """Return whether the context is rotated: with equal contexts at all positions, outputs differ by position."""
    end = attention.stages.get("output") or attention.stages.get("concat")
    if end is None:
        return False
    context = attention.value_product.op.output
    outputs = again(evidence, context, torch.ones_like(content_of(evidence, context)), end)
    return _vary(outputs.flatten(0, -2)[None])


def _of_scores(evidence: Evidence, query: _RotatedSide, key: _RotatedSide) -> Iterator[Finding]:
    """Yield the first fault in the rotation of queries and keys."""
    if key.rows.shape[1] <= 1 and (key.is_rotated or not query.is_rotated):
        raise LostError  # at one position, the cosines of one pair of features are one number
    if query.is_rotated and not key.is_rotated:
        yield from _one_sided(query, key)
    elif key.is_rotated and not query.is_rotated:
        yield from _one_sided(key, query)
    elif query.op is not None and key.op is not None and not query.is_rotated:
        yield from _not_by_position(evidence, query, key)
    elif query.op is not None and key.op is not None and query.rows.shape[1:] == key.rows.shape[1:]:
        yield from _unlike_rotations(query, key)


def _one_sided(rotated: _RotatedSide, other: _RotatedSide) -> Iterator[Finding]:
    """Yield the fault that the query is rotated and the key is not, or the key alone."""
    if rotated.op is None:
        return
    if other.rows.shape[1] > 1:
        proof = f"Equal tokens at all positions give equal {other.side} heads and rotated {rotated.side} heads."
    else:
        proof = f"The {rotated.side} is multiplied by cosines and sines, but the {other.side} is not."
    yield _finding(
        rotated.op,
        f"The {rotated.side} is rotated and the {other.side} is not, so the scores depend on absolute positions.",
        proof,
        f"Rotate the {other.side} too.",
    )


def _unlike_rotations(query: _RotatedSide, key: _RotatedSide) -> Iterator[Finding]:
    """Yield the fault that the score of a position with itself depends on the position."""
    groups = min(len(query.rows), len(key.rows))
    q, k = query.rows[:groups], key.other_rows[:groups]
    products, size = (q * k).sum(-1), q.norm(dim=-1) * k.norm(dim=-1)
    angle = products / size.clamp(min=1e-12)
    # An opened kernel computes in float32 what was rotated in another dtype.
    precisions = [torch.finfo(getattr(torch, end.dtype)).eps for end in (query.factor.source, query.factor.target)]
    near = max(_NEAR, 8 * max(precisions))
    # Scores that are scaled by position (e.g. for long sequences) keep their angle.
    if query.op is None or _spread(products) <= near * float(size.max()) or _spread(angle) <= near:
        return
    yield _finding(
        query.op,
        "Scores depend on absolute positions: queries and keys are rotated differently, or a pair's features are "
        "scaled differently. Typical causes: one rotates halves and the other pairs, or a sign is flipped.",
        "With the same query and key at all positions, the score of a position with itself varies by "
        f"{_spread(products):.3g}; the largest possible score is {float(size.max()):.3g}.",
        "Rotate both with the same function: x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).",
    )


def _not_by_position(evidence: Evidence, query: _RotatedSide, key: _RotatedSide) -> Iterator[Finding]:
    """Yield a fault if equal tokens have equal rows at all positions, although an operation rotates them."""
    if query.op is None:
        return
    q, k = query.rows, key.rows
    if _vary(q.transpose(0, 1)) and _vary(k.transpose(0, 1)):
        axis = _turned_by(key.factor, k)
        if axis:
            yield _finding(
                query.op,
                f"The rotation depends on the {axis} instead of the position.",
                f"Equal tokens give equal queries at all positions, and rotated queries in other {axis}s.",
                "Rotate along the position axis.",
            )
        return
    largest = max(_spread(q) / float(q.abs().max()), _spread(k) / float(k.abs().max()))
    if largest >= _SAME:
        return
    is_given = any(evidence.run.graph.inputs_of(table.tensor) for table in _tables(evidence, key.factor))
    finding = _finding(
        query.op,
        "All positions are rotated by the same angles, so the rotation has no effect on the scores.",
        "Equal tokens give equal queries and equal keys at all positions.",
        "",
    )
    yield replace(finding, sure=not is_given)


def _turned_by(key: Factor, rows: Tensor) -> str:
    """Return whether rows, `group row feature`, differ by `head` or by `batch item`; empty if it is unknown."""
    items = _groups_of_items(key)
    if sum(map(len, items)) != len({group for groups in items for group in groups}):
        return ""  # one token is in the groups of several
    if any(_vary(rows[sorted(groups)].transpose(0, 1)) for groups in items):
        return "head"
    return "batch item" if len(items) > 1 else ""


def _groups_of_items(factor: Factor) -> set[frozenset[int]]:
    """Return for each batch item the groups of the product that have its tokens."""
    first = factor.token(0)
    tokens = [first]
    for axis, size in enumerate(factor.tokens):
        for place in range(1, min(size, _MOST_TOKENS)):
            tokens.append((*first[:axis], place, *first[axis + 1 :]))
    return {frozenset(group for group, _ in factor.changed(token)) for token in tokens}


def _spread(rows: Tensor) -> float:
    """Return the largest difference of rows from the first row: `group row ...`."""
    return float((rows - rows[:, :1]).abs().max())


def _vary(rows: Tensor) -> bool:
    return _spread(rows) > _NEAR * float(rows.abs().max().clamp(min=1e-12))


def _one_token(factor: Factor, *, seed: int) -> Tensor:
    """Return random features of one token, repeated for each head if the heads are side by side."""
    features, drawn = factor.source.shape[factor.features], torch.Generator().manual_seed(seed)
    width = features if features % factor.width else factor.width
    return torch.randn(width, generator=drawn).repeat(features // width)


def _of_equal_tokens(factor: Factor, *, seed: int) -> Tensor:
    """Return the rows of a factor when all of its tokens are equal: `group row feature`, in float64."""
    value = content_of(factor.evidence, factor.source)
    tokens = value.clone()
    tokens.movedim(factor.features, -1)[:] = _one_token(factor, seed=seed).to(value)
    rows = again(factor.evidence, factor.source, tokens, factor.target).double()
    rows = rows if factor.rows == -2 else rows.transpose(-1, -2)
    return rows.reshape(-1, *rows.shape[-2:])


# -- positions of one token -------------------------------------------------------------------------------------------


def _of_offsets(evidence: Evidence, attention: Attention, names: AxisNames, first: int | None) -> Iterator[Finding]:
    """Yield a fault if the query and the key of one token are rotated by the angles of different positions.

    Keys that are rotated behind the cache, each call anew, may count their slots: the first query is at key `first`.
    """
    steps = evidence.inner.of(attention, names)
    place = steps.position
    if place is None or place.kind != "rotary" or not _is_one_sequence(attention, names, steps.cache):
        return
    query, key = place.query_offset, place.key_offset
    if query is None or key is None:
        return
    step_names = steps.operands["k_heads"].names if "k_heads" in steps.operands else {}
    rotation = _rotation_in(step_names)
    if rotation is None:
        if steps.cache is not None:
            return  # features of another product are rotated, before or behind a cache of their own
        rotation = attention.score_product.op.index
    counted = ""
    if _joins_cache_before(step_names, rotation):
        if first is None:
            return
        query -= first
        counted = ", counted from the first slot of the cache"
    if query == key:
        return
    yield _finding(
        evidence.run.recording.ops[rotation],
        "The query and key of one token are rotated by different positions: their distance is not 0.",
        f"The first token has position {query} as a query and {key} as a key{counted}.",
        "Rotate both by the same positions.",
    )


def _rotation_in(step_names: Mapping[int, str]) -> int | None:
    """Return the first operation that rotates the keys, from the names of their steps; None if none has that name."""
    rotations = [index for index, name in step_names.items() if name == "rotary"]
    return min(rotations) if rotations else None


def _joins_cache_before(step_names: Mapping[int, str], rotation: int) -> bool:
    """Return whether keys join the cache before they are rotated: that step has no name."""
    return any(name == "" and index < rotation for index, name in step_names.items())


def _is_one_sequence(attention: Attention, names: AxisNames, cache: object) -> bool:
    """Return whether queries and keys are the same tokens, behind a cache or not."""
    has_more_keys = names.lengths[0] < names.lengths[1] and cache is None  # e.g. those of the window before
    shapes = {attention.stages[side].shape for side in ("query", "key") if side in attention.stages}
    return not has_more_keys and names.num_windows <= 1 and len(shapes) == 1


# -- cosines and sines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """A tensor that does not come from the tokens and multiplies them."""

    op: Op
    """The multiplication."""
    tensor: TensorRef
    value: Tensor


def _at_position_zero(evidence: Evidence, factors: Mapping[str, Factor], names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if cosines of 1 and sines of 0 are applied to several positions. Raise `NotHereError` if not."""
    op = _turning_by_nothing(evidence, factors["query"]) or _turning_by_nothing(evidence, factors["key"])
    if op is None or min(names.lengths) < 2:
        raise NotHereError
    yield _finding(
        op,
        "Cosines and sines are applied, all of position 0: nothing is rotated.",
        f"Every cosine is 1 and every sine is 0, at each of {names.lengths[1]} positions.",
        "Index the cosines and sines by position.",
    )


def _tables(evidence: Evidence, factor: Factor) -> list[_Table]:
    """Return the tensors that do not come from the tokens and multiply them, in order."""
    path = between(evidence.run.recording, {factor.source.id}, factor.target)
    reached = {factor.source.id}
    for op in path:
        reached.update(tensor.id for tensor in op.outputs)
    tables = []
    for op in path:
        if op.base_name.rstrip("_") not in ("mul", "addcmul"):
            continue
        for tensor in op.inputs:
            value = evidence.content(tensor) if tensor.id not in reached else None
            if value is not None and value.numel() > 1:
                tables.append(_Table(op, tensor, value))
    return tables


def _turning(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that rotates tokens by cosines and sines, rightly or not; None without one."""
    tables = _tables(evidence, factor)
    for table in tables:
        is_complex = table.value.is_complex()
        if is_complex and bool((table.value.imag.abs() > _NEAR).any()):  # scaled by position too, as in xPos
            return table.op
    for cos, sin in combinations(tables, 2):
        if _are_cos_and_sin(cos.value, sin.value):
            return cos.op
    return None


def _turning_by_nothing(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that multiplies tokens by cosines of 1 beside sines of 0; None without one.

    That they are cosines and sines is known from the operations that made them, from the numbers of a larger table that
    they are cut from, or from complex numbers.
    """
    tables = [table for table in _tables(evidence, factor) if not _is_learned(evidence, table.tensor)]
    zeros = [table for table in tables if not table.value.is_complex() and bool((table.value == 0).all())]
    for table in tables:
        if not bool((table.value == 1).all()):
            continue
        if table.value.is_complex():
            return table.op
        if any(_were_cos_and_sin(evidence, table.tensor, zero.tensor) for zero in zeros):
            return table.op
    return None


def _is_learned(evidence: Evidence, tensor: TensorRef) -> bool:
    """Return whether a table is computed from a parameter: its numbers may change in training."""
    recording = evidence.run.recording
    steps = evidence.run.graph.back(tensor, lambda _: True)
    return any(step.tensor.storage in recording.parameter_storages for step in steps)


def _were_cos_and_sin(evidence: Evidence, cos: TensorRef, sin: TensorRef) -> bool:
    """Return whether two tensors were made by cos and sin, or are cut from tables of cosines and sines."""
    cos, sin = _before_cuts(evidence, cos), _before_cuts(evidence, sin)
    if _is_made_by(evidence, cos, "cos") and _is_made_by(evidence, sin, "sin"):
        return True
    cosines, sines = evidence.content(cos), evidence.content(sin)
    return cosines is not None and sines is not None and _are_cos_and_sin(cosines, sines)


def _is_made_by(evidence: Evidence, tensor: TensorRef, name: str) -> bool:
    """Return whether an operation of this name made a tensor."""
    op = evidence.run.recording.producer(tensor)
    return op is not None and op.base_name.rstrip("_") == name


def _before_cuts(evidence: Evidence, tensor: TensorRef) -> TensorRef:
    """Return the table that a tensor is cut or picked from, or repeated of."""
    while True:
        op = evidence.run.recording.producer(tensor)
        if op is None or not op.inputs:
            return tensor
        if op.kind not in ("view", "copy") and op.base_name not in _CUTS:
            return tensor
        tensor = op.inputs[0]


def _are_cos_and_sin(cos: Tensor, sin: Tensor) -> bool:
    if cos.shape != sin.shape or not cos.is_floating_point() or not bool((sin.abs() > _NEAR).any()):
        return False
    near = max(_NEAR, 8 * torch.finfo(cos.dtype).eps)
    squares = cos.double() ** 2 + sin.double() ** 2  # another constant than 1 where both are scaled, as in YaRN
    return bool(((squares / squares.max() - 1).abs() < near).all()) and float(cos.max() - cos.min()) > _NEAR

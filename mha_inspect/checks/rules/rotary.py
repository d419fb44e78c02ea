"""Check that queries and keys are rotated by their positions, and in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from ...compare.replay import SIDES, Factor, LostError, NotHereError, again, content_of, first_key
from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..ladders import frequencies_off
from ..registry import rule

_NEAR = 1e-3
"""Relative differences below this count as equal."""
_SAME = 1e-6
"""Relative differences below this are of rounding alone, where the same numbers are computed in several places."""
_CUTS = ("index", "index_select", "gather", "embedding", "cat", "stack", "repeat", "_to_copy")
"""Operations whose result has numbers of their first tensor alone, or of tensors like it."""
_MOST_TOKENS = 64
"""The largest number of tokens of each axis to follow."""


@rule(by_position=True)
@partial(of_each_kind, "no rotary embedding was found")
def rotary(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Queries and keys are rotated by the same rule.

    All positions get the same token, and the rotated queries and keys of each position are compared.
    Queries and keys must be rotated by the same angle, so that a score depends on the distance between
    two tokens alone. Otherwise the model depends on absolute positions, and fails on longer sequences
    and on loaded weights.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    import torch
    from torch import nn


    def rotate(x):
        angle = torch.outer(torch.arange(x.shape[2]), 10.0 ** -torch.arange(4))
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (rotate(q) @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        weights = (rotate(q) @ k.mT / 8**0.5).softmax(-1)
    +        weights = (rotate(q) @ rotate(k).mT / 8**0.5).softmax(-1)
    ```
    """
    first = first_key(evidence, attention, names)
    of_offsets = list(_of_offsets(evidence, attention, names, first))
    try:
        findings = list(_of_rows(evidence, attention, names)) or of_offsets
        if not findings:
            findings = list(frequencies_off(evidence, attention, names))
        yield from findings
    except LostError:
        if not of_offsets:
            raise
        yield from of_offsets


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
    def count(self) -> int:
        """The number of positions."""
        return self.rows.shape[1]

    @property
    def is_rotated(self) -> bool:
        """Whether its rows differ by position; at a single position, whether it is multiplied by cosines and sines."""
        return self.varies if self.count > 1 else self.op is not None


def _of_rows(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield faults in the rows of equal tokens at all positions."""
    factors = {side: Factor(evidence, attention, names, side, from_first=True) for side in SIDES}
    ops = {side: _turning(evidence, factor) for side, factor in factors.items()}
    if not any(ops.values()):
        yield from _at_position_zero(evidence, factors, names)
        return
    sides = _rotated_sides(factors, ops, names)
    yield from _of_scores(evidence, sides["query"], sides["key"])
    yield from _of_values(evidence, attention, sides["value"])


def _of_values(evidence: Evidence, attention: Attention, value: _RotatedSide) -> Iterator[Finding]:
    """Yield the fault that the values are rotated, and the context is not rotated back."""
    if value.op is None or not value.varies:
        return
    has_equal_norms = not _vary(value.rows.norm(dim=-1, keepdim=True))
    if not has_equal_norms or _is_rotated_back(evidence, attention):
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
    drawn: dict[str, _RotatedSide] = {}
    for side, factor in factors.items():
        first = _of_equal_tokens(factor, seed=1)
        second = _of_equal_tokens(factor, seed=2)
        if side == "query":
            first = _once(first, names.lengths[0])
            second = _once(second, names.lengths[0])
        drawn[side] = _RotatedSide(side, factor, ops[side], first, second)
    of_tokens = _rows_of_tokens(drawn)
    if len({int(marks.sum()) for marks in of_tokens.values()}) != 1:
        raise LostError
    sides = {}
    for side, rotated in drawn.items():
        marks = of_tokens[side]
        sides[side] = replace(rotated, rows=rotated.rows[:, marks], other_rows=rotated.other_rows[:, marks])
    return sides


def _rows_of_tokens(sides: Mapping[str, _RotatedSide]) -> dict[str, Tensor]:
    """Return for each side which rows differ between two tokens; if there are as many, which differ in all sides.

    Other rows are of a cache, of tokens that are joined, or of zeros that pad a sequence to whole windows.
    """
    of_tokens = {}
    for side, rotated in sides.items():
        differ = rotated.rows != rotated.other_rows  # group row ...
        of_tokens[side] = differ.flatten(2).any(-1).any(0)
    if len({marks.shape for marks in of_tokens.values()}) > 1:
        return of_tokens
    in_all = torch.stack([*of_tokens.values()]).all(0)
    return dict.fromkeys(of_tokens, in_all)


def _once(rows: Tensor, length: int) -> Tensor:
    """Return the rows of each position once, where those of heads that share a key are beside each other, and equal."""
    for heads in (_heads_first(rows, length), _heads_last(rows, length)):
        largest = heads.abs().max()
        apart = (heads - heads[0]).abs()
        if bool((apart <= _NEAR * largest).all()):
            return heads[0]
    return rows


def _heads_first(rows: Tensor, length: int) -> Tensor:
    """Return `head group row feature` from `group (head row) feature`; one head if the rows do not divide."""
    if rows.shape[1] % length:
        return rows[None]
    return rows.reshape(len(rows), -1, length, rows.shape[-1]).movedim(1, 0)


def _heads_last(rows: Tensor, length: int) -> Tensor:
    """Return `head group row feature` from `group (row head) feature`; one head if the rows do not divide."""
    if rows.shape[1] % length:
        return rows[None]
    return rows.reshape(len(rows), length, -1, rows.shape[-1]).movedim(2, 0)


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
    if key.count <= 1 and (key.is_rotated or not query.is_rotated):
        raise LostError  # at one position, the cosines of one pair of features are one number
    if query.is_rotated and not key.is_rotated:
        yield from _one_sided(query, key)
        return
    if key.is_rotated and not query.is_rotated:
        yield from _one_sided(key, query)
        return
    if query.op is None or key.op is None:
        raise LostError("a query or a key is rotated by unknown operations")
    if not query.is_rotated:
        yield from _not_by_position(evidence, query, key)
    elif query.rows.shape[1:] != key.rows.shape[1:]:
        raise LostError("queries and keys of one position could not be compared")
    else:
        yield from _unlike_rotations(query, key)


def _one_sided(rotated: _RotatedSide, plain: _RotatedSide) -> Iterator[Finding]:
    """Yield the fault that the query is rotated and the key is not, or the key alone."""
    if rotated.op is None:
        return
    if plain.count > 1:
        proof = f"Equal tokens at all positions give equal {plain.side} heads and rotated {rotated.side} heads."
    else:
        proof = f"The {rotated.side} is multiplied by cosines and sines, but the {plain.side} is not."
    yield _finding(
        rotated.op,
        f"The {rotated.side} is rotated and the {plain.side} is not, so the scores depend on absolute positions.",
        proof,
        f"Rotate the {plain.side} too.",
    )


def _unlike_rotations(query: _RotatedSide, key: _RotatedSide) -> Iterator[Finding]:
    """Yield the fault that the score of a position with itself depends on the position."""
    if query.op is None:
        return
    queries, keys = _in_pairs(query.rows, key.other_rows)
    products = (queries * keys).sum(-1)
    sizes = queries.norm(dim=-1) * keys.norm(dim=-1)
    angles = products / sizes.clamp(min=1e-12)
    largest = float(sizes.max())
    near = max(_NEAR, 8 * _rounding_of(query.factor))
    # Scores that are scaled by position (e.g. for long sequences) keep their angle.
    if _spread(products) <= near * largest or _spread(angles) <= near:
        return
    yield _finding(
        query.op,
        "Scores depend on absolute positions: queries and keys are rotated differently, or a pair's features are "
        "scaled differently. Typical causes: one rotates halves and the other pairs, or a sign is flipped.",
        "With the same query and key at all positions, the score of a position with itself varies by "
        f"{_spread(products):.3g}; the largest possible score is {largest:.3g}.",
        "Rotate both with the same function: x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).",
    )


def _in_pairs(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return `group row feature` of queries and keys with as many groups: neighbours share a key head.

    Raises `LostError` if the groups do not divide.
    """
    times, rest = divmod(len(queries), len(keys))
    if times and not rest:
        return queries, keys.repeat_interleave(times, 0)
    times, rest = divmod(len(keys), len(queries))
    if rest:
        raise LostError("queries and keys of one position could not be compared")
    return queries.repeat_interleave(times, 0), keys


def _rounding_of(factor: Factor) -> float:
    """Return the rounding of a factor: an opened kernel computes in float32 what was rotated in another dtype."""
    source = torch.finfo(getattr(torch, factor.source.dtype))
    target = torch.finfo(getattr(torch, factor.target.dtype))
    return max(source.eps, target.eps)


def _not_by_position(evidence: Evidence, query: _RotatedSide, key: _RotatedSide) -> Iterator[Finding]:
    """Yield a fault if equal tokens have equal rows at all positions, although an operation rotates them."""
    if query.op is None:
        return
    if _vary(query.rows.transpose(0, 1)) and _vary(key.rows.transpose(0, 1)):
        axis = _turned_by(key.factor, key.rows)
        if axis:
            yield _by_axis(query.op, axis)
        return
    if _relative_spread(query.rows) >= _SAME or _relative_spread(key.rows) >= _SAME:
        return
    tables = _tables(evidence, key.factor)
    is_given = any(evidence.run.graph.inputs_of(table.tensor) for table in tables)
    finding = _finding(
        query.op,
        "All positions are rotated by the same angles, so the rotation has no effect on the scores.",
        "Equal tokens give equal queries and equal keys at all positions.",
        "",
    )
    yield replace(finding, sure=not is_given)


def _by_axis(op: Op, axis: str) -> Finding:
    return _finding(
        op,
        f"The rotation depends on the {axis} instead of the position.",
        f"Equal tokens give equal queries at all positions, and rotated queries in other {axis}s.",
        "Rotate along the position axis.",
    )


def _turned_by(key: Factor, rows: Tensor) -> str:
    """Return whether rows, `group row feature`, differ by `head` or by `batch item`; empty if it is unknown."""
    items = _groups_of_items(key)
    counted = Counter[int]()
    for groups in items:
        counted.update(groups)
    if any(count > 1 for count in counted.values()):
        return ""  # one token is in the groups of several
    for groups in items:
        of_item = rows[sorted(groups)]
        if _vary(of_item.transpose(0, 1)):
            return "head"
    return "batch item" if len(items) > 1 else ""


def _groups_of_items(factor: Factor) -> set[frozenset[int]]:
    """Return for each batch item the groups of the product that have its tokens."""
    items = set()
    for token in _tokens_along_axes(factor):
        groups = frozenset(group for group, _ in factor.changed(token))
        items.add(groups)
    return items


def _tokens_along_axes(factor: Factor) -> Iterator[tuple[int, ...]]:
    """Yield the first token, and the first tokens that differ from it in one place: `0 0`, `1 0`, `0 1`, `0 2`."""
    first = factor.token(0)
    yield first
    for axis, size in enumerate(factor.tokens):
        for place in range(1, min(size, _MOST_TOKENS)):
            yield (*first[:axis], place, *first[axis + 1 :])


def _spread(rows: Tensor) -> float:
    """Return the largest difference of rows from the first row: `group row ...`."""
    return float((rows - rows[:, :1]).abs().max())


def _relative_spread(rows: Tensor) -> float:
    """Return the largest difference of rows from the first row, as a part of the largest number."""
    return _spread(rows) / float(rows.abs().max())


def _vary(rows: Tensor) -> bool:
    return _spread(rows) > _NEAR * float(rows.abs().max().clamp(min=1e-12))


def _one_token(factor: Factor, *, seed: int) -> Tensor:
    """Return random features of one token, repeated for each head if the heads are side by side."""
    features = factor.source.shape[factor.features]
    width = features if features % factor.width else factor.width
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(width, generator=draw).repeat(features // width)


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
    steps = evidence.inner_of(attention, names)
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
    if names.lengths[0] < names.lengths[1] and cache is None:
        return False  # e.g. the keys of the window before are there too
    if names.num_windows > 1:
        return False
    query, key = attention.stages.get("query"), attention.stages.get("key")
    if query is None or key is None:
        return query is not None or key is not None
    return query.shape == key.shape


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
    op = _turning_by_nothing(evidence, factors["query"])
    if op is None:
        op = _turning_by_nothing(evidence, factors["key"])
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
    of_tokens = {factor.source.id}
    for op in path:
        of_tokens.update(tensor.id for tensor in op.outputs)
    tables = []
    for op in path:
        if op.base_name.rstrip("_") not in ("mul", "addcmul"):
            continue
        for tensor in op.inputs:
            if tensor.id in of_tokens:
                continue
            value = evidence.content(tensor)
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
    ones, zeros = [], []
    for table in _tables(evidence, factor):
        if _is_learned(evidence, table.tensor):
            continue
        if bool((table.value == 1).all()):
            ones.append(table)
        elif not table.value.is_complex() and bool((table.value == 0).all()):
            zeros.append(table)
    for table in ones:
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
    """Return whether two tables are cosines and sines of the same angles, not all of them 0."""
    if cos.shape != sin.shape or not cos.is_floating_point():
        return False
    if not bool((sin.abs() > _NEAR).any()):
        return False
    near = max(_NEAR, 8 * torch.finfo(cos.dtype).eps)
    squares = cos.double() ** 2 + sin.double() ** 2
    # Another constant than 1 where both are scaled, as in YaRN.
    is_constant = (squares / squares.max() - 1).abs() < near
    if not bool(is_constant.all()):
        return False
    return float(cos.max() - cos.min()) > _NEAR

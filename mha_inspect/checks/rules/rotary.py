"""Check that queries and keys are rotated by their positions, and in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from ...compare.replay import LostError, again, content_of
from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..factors import SIDES, Factor, NotHereError, first_key
from ..ladders import frequencies_off
from ..registry import rule

_NEAR = 1e-3
"""Relative differences below this count as equal."""
_SAME = 1e-6
"""Relative differences below this are of rounding alone, where the same numbers are computed in several places."""
_CUTS = ("index", "index_select", "gather", "embedding", "cat", "stack", "repeat", "_to_copy")
"""Operations whose result has numbers of their first tensor alone, or of tensors like it."""


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
    of_offsets = list(_of_offsets(evidence, attention, names))
    findings: list[Finding] = []
    try:
        findings = list(_of_products(evidence, attention, names))
    except LostError:
        if not of_offsets:
            raise
    yield from findings or of_offsets or frequencies_off(evidence, attention, names)


def _finding(op: Op, sentence: str, evidence: str, fix: str = "") -> Finding:
    return Finding("rotary", sentence, evidence, source=op.source, fix=fix)


# -- rows of equal tokens ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """The query, the key or the value, and its rows when all of its tokens are equal."""

    name: str
    factor: Factor
    op: Op | None
    """The operation that multiplies it by cosines and sines; None without one."""
    rows: Tensor
    """`group row feature`, in float64, of tokens of this call alone."""
    other_rows: Tensor
    """The same for another token."""

    @property
    def is_rotated(self) -> bool:
        """Whether its rows differ by position; at a single position, whether it is multiplied by cosines and sines."""
        return _vary(self.rows) if self.rows.shape[1] > 1 else self.op is not None


def _of_products(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield the faults of the product of queries and keys that is rotated: the scores, or one that is added to them.

    Features that are rotated may have a product of their own, beside that of the others.
    """
    parts = evidence.inner_of(attention, names).added.values()
    rotated = [part.product for part in parts if part.product is not None and part.position is not None]
    if not rotated:
        yield from _of_rows(evidence, attention, names)
    for product in rotated:
        yield from _of_rows(evidence, replace(attention, score_product=product), names)


def _of_rows(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield faults in the rows of equal tokens at all positions."""
    factors = {side: Factor(evidence, attention, names, side, from_first=True) for side in SIDES}
    ops = {side: _turning(evidence, factor) for side, factor in factors.items()}
    if not any(ops.values()):
        yield _at_position_zero(evidence, factors, names)
        return
    sides = _sides_of(factors, ops, names)
    yield from _of_scores(evidence, sides["query"], sides["key"])
    value = sides["value"]
    if value.op is None or not _vary(value.rows) or _vary(value.rows.norm(dim=-1, keepdim=True)):
        return
    if not _is_rotated_back(evidence, attention):
        yield _finding(
            value.op,
            "The values are rotated too, so the output depends on absolute positions. The scores depend on distances.",
            "Equal tokens at all positions give rotated values, and the context is not rotated back.",
            "Rotate only the query and the key.",
        )


def _sides_of(factors: Mapping[str, Factor], ops: Mapping[str, Op | None], names: AxisNames) -> dict[str, _Side]:
    """Return the rows of each side for two tokens, of the tokens of this call alone.

    Other rows, which are the same for both, are of a cache, of tokens that are joined, or of zeros. Raises `LostError`
    if the sides have different numbers of rows.
    """
    drawn: dict[str, _Side] = {}
    marks: dict[str, Tensor] = {}
    for name, factor in factors.items():
        rows, others = _of_equal_tokens(factor, seed=1), _of_equal_tokens(factor, seed=2)
        if name == "query":
            rows, others = _once(rows, names.lengths[0]), _once(others, names.lengths[0])
        drawn[name] = _Side(name, factor, ops[name], rows, others)
        marks[name] = (rows != others).flatten(2).any(-1).any(0)
    if len({of_side.shape for of_side in marks.values()}) == 1:
        marks = dict.fromkeys(marks, torch.stack([*marks.values()]).all(0))
    if len({int(of_side.sum()) for of_side in marks.values()}) != 1:
        raise LostError
    sides = {}
    for name, side in drawn.items():
        of_call = marks[name]
        sides[name] = replace(side, rows=side.rows[:, of_call], other_rows=side.other_rows[:, of_call])
    return sides


def _of_equal_tokens(factor: Factor, *, seed: int) -> Tensor:
    """Return the rows of a factor when all of its tokens and heads are equal: `group row feature`, in float64."""
    value = content_of(factor.evidence, factor.source)
    features = value.shape[factor.features]
    width = features if features % factor.width else factor.width
    token = torch.randn(width, generator=torch.Generator().manual_seed(seed)).repeat(features // width)
    tokens = value.clone()
    tokens.movedim(factor.features, -1)[:] = token.to(value)
    rows = again(factor.evidence, factor.source, tokens, factor.target).double()
    rows = rows if factor.rows == -2 else rows.transpose(-1, -2)
    return rows.reshape(-1, *rows.shape[-2:])


def _once(rows: Tensor, length: int) -> Tensor:
    """Return the rows of each position once, where those of heads that share a key are beside each other, and equal."""
    times, rest = divmod(rows.shape[1], length)
    if rest:
        return rows
    groups, _, features = rows.shape
    heads_first = rows.reshape(groups, times, length, features)
    heads_last = rows.reshape(groups, length, times, features).transpose(1, 2)
    for heads in (heads_first, heads_last):  # group head row feature
        if float((heads - heads[:, :1]).abs().max()) <= _NEAR * float(heads.abs().max()):
            return heads[:, 0]
    return rows


def _is_rotated_back(evidence: Evidence, attention: Attention) -> bool:
    """Return whether the context is rotated: with equal contexts at all positions, outputs differ by position."""
    end = attention.stages.get("output") or attention.stages.get("concat")
    if end is None:
        return False
    context = attention.value_product.op.output
    outputs = again(evidence, context, torch.ones_like(content_of(evidence, context)), end)
    return _vary(outputs.flatten(0, -2)[None])


def _spread(rows: Tensor) -> float:
    """Return the largest difference of rows from the first row: `group row ...`."""
    return float((rows - rows[:, :1]).abs().max())


def _vary(rows: Tensor, near: float = _NEAR) -> bool:
    return _spread(rows) > near * float(rows.abs().max().clamp(min=1e-12))


# -- faults in the scores ---------------------------------------------------------------------------------------------


def _of_scores(evidence: Evidence, query: _Side, key: _Side) -> Iterator[Finding]:
    """Yield the first fault in the rotation of queries and keys."""
    if key.rows.shape[1] <= 1 and (key.is_rotated or not query.is_rotated):
        raise LostError  # at one position, the cosines of one pair of features are one number
    if query.is_rotated != key.is_rotated:
        rotated, plain = (query, key) if query.is_rotated else (key, query)
        if rotated.op is not None:
            yield _one_sided(rotated.op, rotated, plain)
        return
    if query.op is None or key.op is None:
        raise LostError("a query or a key is rotated by unknown operations")
    if not query.is_rotated:
        yield from _not_by_position(evidence, query.op, query, key)
    elif query.rows.shape[1:] != key.rows.shape[1:]:
        raise LostError("queries and keys of one position could not be compared")
    else:
        yield from _rotated_differently(query.op, query, key)


def _one_sided(op: Op, rotated: _Side, plain: _Side) -> Finding:
    proof = f"The {rotated.name} is multiplied by cosines and sines, but the {plain.name} is not."
    if plain.rows.shape[1] > 1:
        proof = f"Equal tokens at all positions give equal {plain.name} heads and rotated {rotated.name} heads."
    return _finding(
        op,
        f"The {rotated.name} is rotated and the {plain.name} is not, so the scores depend on absolute positions.",
        proof,
        f"Rotate the {plain.name} too.",
    )


def _rotated_differently(op: Op, query: _Side, key: _Side) -> Iterator[Finding]:
    """Yield the fault that the score of a position with itself depends on the position."""
    queries, keys = query.rows, key.other_rows
    if len(queries) % len(keys) and len(keys) % len(queries):
        raise LostError("queries and keys of one position could not be compared")
    groups = max(len(queries), len(keys))  # neighbours share a key head
    queries = queries.repeat_interleave(groups // len(queries), 0)
    keys = keys.repeat_interleave(groups // len(keys), 0)
    products = (queries * keys).sum(-1)
    sizes = queries.norm(dim=-1) * keys.norm(dim=-1)
    # An opened kernel computes in float32 what was rotated in another dtype.
    dtypes = [getattr(torch, tensor.dtype) for tensor in (query.factor.source, query.factor.target)]
    near = max(_NEAR, *(8 * torch.finfo(dtype).eps for dtype in dtypes))
    largest = float(sizes.max())
    # Scores that are scaled by position (e.g. for long sequences) keep their angle.
    if _spread(products) <= near * largest or _spread(products / sizes.clamp(min=1e-12)) <= near:
        return
    proof = (
        "With the same query and key at all positions, the score of a position with itself varies by "
        f"{_spread(products):.3g}; the largest possible score is {largest:.3g}."
    )
    if query.rows.shape == key.rows.shape and float((query.rows - key.rows).abs().max()) <= near * largest**0.5:
        yield _finding(
            op,
            "Scores depend on absolute positions: queries and keys are turned alike, and not by a rotation of pairs "
            "within a head.",
            f"{proof} Equal tokens are equal queries and keys at each position.",
            "Split the heads before, and compare with x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1). Its "
            "angles are torch.cat((freqs, freqs), -1), and freqs.repeat_interleave(2, -1) for neighbours.",
        )
        return
    yield _finding(
        op,
        "Scores depend on absolute positions: queries and keys are rotated differently, or a pair's features are "
        "scaled differently. Typical causes: one rotates halves and the other pairs, or a sign is flipped.",
        proof,
        "Rotate both with the same function: x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).",
    )


def _not_by_position(evidence: Evidence, op: Op, query: _Side, key: _Side) -> Iterator[Finding]:
    """Yield a fault if equal tokens have equal rows at all positions, although an operation rotates them."""
    if _vary(query.rows.transpose(0, 1)) and _vary(key.rows.transpose(0, 1)):
        groups = sorted({group for group, _ in key.factor.changed(key.factor.token(0))})
        axis = "head" if _vary(key.rows[groups].transpose(0, 1)) else "batch item"
        yield _finding(
            op,
            f"The rotation depends on the {axis} instead of the position.",
            f"Equal tokens give equal queries at all positions, and rotated queries in other {axis}s.",
            "Rotate along the position axis.",
        )
    elif not _vary(query.rows, _SAME) and not _vary(key.rows, _SAME):
        finding = _finding(
            op,
            "All positions are rotated by the same angles, so the rotation has no effect on the scores.",
            "Equal tokens give equal queries and equal keys at all positions.",
        )
        tables = _tables(evidence, key.factor)
        yield replace(finding, sure=not any(evidence.run.graph.inputs_of(table.tensor) for table in tables))


# -- positions of one token -------------------------------------------------------------------------------------------


def _of_offsets(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if the query and the key of one token are rotated by the angles of different positions.

    Keys that are rotated behind the cache, each call anew, may count their slots.
    """
    steps = evidence.inner_of(attention, names)
    place = steps.position
    if place is None or place.kind != "rotary" or not _is_one_sequence(attention, names, steps.cache):
        return
    query, key, counted = place.query_offset, place.key_offset, ""
    step_names = steps.operands["k_heads"].names if "k_heads" in steps.operands else {}
    rotations = [index for index, name in step_names.items() if name == "rotary"]
    if query is None or key is None or (not rotations and steps.cache is not None):
        return  # features of another product are rotated, before or behind a cache of their own
    rotation = min(rotations, default=attention.score_product.op.index)
    if any(name == "" and index < rotation for index, name in step_names.items()):  # they join the cache before
        first = first_key(evidence, attention, names)
        if first is None:
            return
        query -= first
        counted = ", counted from the first slot of the cache"
    if query != key:
        yield _finding(
            evidence.run.recording.ops[rotation],
            "The query and key of one token are rotated by different positions: their distance is not 0.",
            f"The first token has position {query} as a query and {key} as a key{counted}.",
            "Rotate both by the same positions.",
        )


def _is_one_sequence(attention: Attention, names: AxisNames, cache: object) -> bool:
    """Return whether queries and keys are the same tokens, behind a cache or not."""
    if names.num_windows > 1 or (names.lengths[0] < names.lengths[1] and cache is None):
        return False  # e.g. the keys of the window before are there too
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


def _tables(evidence: Evidence, factor: Factor) -> list[_Table]:
    """Return the tensors that do not come from the tokens and multiply them, in order."""
    path = between(evidence.run.recording, {factor.source.id}, factor.target)
    of_tokens = {factor.source.id, *(tensor.id for op in path for tensor in op.outputs)}
    tables = []
    for op in path:
        if op.base_name.rstrip("_") not in ("mul", "addcmul"):
            continue
        for tensor in op.inputs:
            value = None if tensor.id in of_tokens else evidence.content(tensor)
            if value is not None and value.numel() > 1:
                tables.append(_Table(op, tensor, value))
    return tables


def _turning(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that rotates tokens by cosines and sines, rightly or not; None without one."""
    tables = _tables(evidence, factor)
    for table in tables:
        if table.value.is_complex() and bool((table.value.imag.abs() > _NEAR).any()):  # scaled too, as in xPos
            return table.op
    for cos, sin in combinations(tables, 2):
        if _are_cos_and_sin(cos.value, sin.value):
            return cos.op
    return None


def _at_position_zero(evidence: Evidence, factors: Mapping[str, Factor], names: AxisNames) -> Finding:
    """Return the fault of cosines of 1 and sines of 0 at several positions. Raise `NotHereError` if there is none."""
    for side in ("query", "key"):
        op = _turning_by_nothing(evidence, factors[side])
        if op is not None and min(names.lengths) > 1:
            return _finding(
                op,
                "Cosines and sines are applied, all of position 0: nothing is rotated.",
                f"Every cosine is 1 and every sine is 0, at each of {names.lengths[1]} positions.",
                "Index the cosines and sines by position.",
            )
    raise NotHereError


def _turning_by_nothing(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that multiplies tokens by cosines of 1 beside sines of 0; None without one.

    That they are cosines and sines is known from the operations that made them, from the numbers of a larger table that
    they are cut from, or from complex numbers. A table that is learned may change.
    """
    parameters = evidence.run.recording.parameter_storages
    tables = []
    for table in _tables(evidence, factor):
        steps = evidence.run.graph.back(table.tensor, lambda _: True)
        if not any(step.tensor.storage in parameters for step in steps):
            tables.append(table)
    for table in tables:
        if not bool((table.value == 1).all()):
            continue
        if table.value.is_complex():
            return table.op
        for zero in tables:
            if bool((zero.value == 0).all()) and _were_cos_and_sin(evidence, table.tensor, zero.tensor):
                return table.op
    return None


def _were_cos_and_sin(evidence: Evidence, cos: TensorRef, sin: TensorRef) -> bool:
    """Return whether two tensors were made by cos and sin, or are cut from tables of cosines and sines."""
    tables = [_before_cuts(evidence, tensor) for tensor in (cos, sin)]
    makers = [evidence.run.recording.producer(table) for table in tables]
    if [op.base_name.rstrip("_") for op in makers if op is not None] == ["cos", "sin"]:
        return True
    cosines, sines = map(evidence.content, tables)
    return cosines is not None and sines is not None and _are_cos_and_sin(cosines, sines)


def _before_cuts(evidence: Evidence, tensor: TensorRef) -> TensorRef:
    """Return the table that a tensor is cut or picked from, or repeated of."""
    while True:
        op = evidence.run.recording.producer(tensor)
        if op is None or not op.inputs or (op.kind not in ("view", "copy") and op.base_name not in _CUTS):
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

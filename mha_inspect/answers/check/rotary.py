"""Check that queries and keys are rotated by their positions, and in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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


def _of_rows(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield faults in the rows of equal tokens at all positions."""
    factors = {side: Factor(evidence, attention, names, side, from_first=True) for side in SIDES}
    turns = {side: _turning(evidence, factor) for side, factor in factors.items()}
    if not any(turns.values()):
        yield from _at_position_zero(evidence, factors, names)
        return
    drawn = {side: [_of_equal_tokens(factor, seed=seed) for seed in (1, 2)] for side, factor in factors.items()}
    drawn["query"] = [_once(rows, names.lengths[0]) for rows in drawn["query"]]
    # Other rows are of a cache, of tokens that are joined, or of zeros that pad a sequence to whole windows.
    own = {side: (one != other).flatten(2).any(-1).any(0) for side, (one, other) in drawn.items()}
    if len({mark.shape for mark in own.values()}) == 1:
        own = dict.fromkeys(own, torch.stack([*own.values()]).all(0))
    if len({int(mark.sum()) for mark in own.values()}) != 1:
        raise LostError
    rows = {side: one[:, own[side]] for side, (one, _) in drawn.items()}
    other_key, context = drawn["key"][1][:, own["key"]], attention.value_product.op.output
    yield from _of_scores(evidence, factors, rows, turns, other_key)
    end = attention.stages.get("output") or attention.stages.get("concat")
    by_value, values = turns["value"], rows["value"]
    if by_value is None or not _vary(values) or _vary(values.norm(dim=-1, keepdim=True)):
        return
    if end is not None:
        equal = again(evidence, context, torch.ones_like(content_of(evidence, context)), end)
    if end is None or not _vary(equal.flatten(0, -2)[None]):
        yield _finding(
            by_value,
            "The values are rotated too, so the output depends on absolute positions. The scores depend on distances.",
            "Equal tokens at all positions give rotated values, and the context is not rotated back.",
            "Rotate only the query and the key.",
        )


def _of_offsets(evidence: Evidence, attention: Attention, names: AxisNames, first: int | None) -> Iterator[Finding]:
    """Yield a fault if the query and the key of one token are rotated by the angles of different positions.

    Keys that are rotated behind the cache, each call anew, may count their slots: the first query is at key `first`.
    """
    steps = evidence.inner.of(attention, names)
    place, given = steps.position, [attention.stages[side].shape for side in SIDES[:2] if side in attention.stages]
    joined = names.lengths[0] < names.lengths[1] and steps.cache is None  # e.g. the window before
    if place is None or joined or names.num_windows > 1 or len({*given}) != 1:
        return
    query, key = place.query_offset, place.key_offset
    if place.kind != "rotary" or query is None or key is None:
        return
    named = steps.operands["k_heads"].names if "k_heads" in steps.operands else {}
    ends = [index for index, name in named.items() if name == "rotary"]
    if not ends and steps.cache is not None:
        return  # features of another product are rotated, before or behind a cache of their own
    turned = min(ends, default=attention.score_product.op.index)
    late = any(name == "" and index < turned for index, name in named.items())
    if late and first is None:
        return
    query -= (first or 0) if late else 0
    if query != key:
        yield _finding(
            evidence.run.recording.ops[turned],
            "The query and key of one token are rotated by different positions: their distance is not 0.",
            f"The first token has position {query} as a query and {key} as a key"
            + (", counted from the first slot of the cache." if late else "."),
            "Rotate both by the same positions.",
        )


def _finding(op: Op, sentence: str, evidence: str, fix: str) -> Finding:
    return Finding("rotary", sentence, evidence, source=op.source, fix=fix)


def _once(rows: Tensor, length: int) -> Tensor:
    """Return the rows of each position once, where those of heads that share a key are beside each other, and equal."""
    for shape, place in (((-1, length), 1), ((length, -1), 2)):
        heads = rows[None]
        if rows.shape[1] % length == 0:
            heads = rows.reshape(len(rows), *shape, rows.shape[-1]).movedim(place, 0)
        if bool(((heads - heads[0]).abs() <= _NEAR * heads.abs().max()).all()):
            return heads[0]
    return rows


def _of_scores(
    evidence: Evidence,
    factors: dict[str, Factor],
    rows: dict[str, Tensor],
    turns: dict[str, Op | None],
    other_key: Tensor,
) -> Iterator[Finding]:
    """Yield the first fault in the rotation of queries and keys; `other_key` is the rows of another token."""
    q, k = rows["query"], rows["key"]
    by_query, by_key, several = turns["query"], turns["key"], other_key.shape[1] > 1
    turned = [side for side in SIDES[:2] if (_vary(rows[side]) if several else turns[side])]
    if not several and turned != ["query"]:
        raise LostError  # at one position, the cosines of one pair of features are one number
    if len(turned) == 1:
        (rotated,), op = turned, turns[turned[0]]
        other = "key" if rotated == "query" else "query"
        if op is not None:
            yield _finding(
                op,
                f"The {rotated} is rotated and the {other} is not, so the scores depend on absolute positions.",
                f"Equal tokens at all positions give equal {other} heads and rotated {rotated} heads."
                if several
                else f"The {rotated} is multiplied by cosines and sines, and the {other} is not.",
                f"Rotate the {other} too.",
            )
        return
    if by_query is None or by_key is None:
        return
    if not turned:
        yield from _not_by_position(evidence, factors["key"], q, k, by_query)
        return
    if q.shape[1:] != k.shape[1:]:
        return
    groups = min(len(q), len(k))
    q, k, other_key = q[:groups], k[:groups], other_key[:groups]
    query = factors["query"]  # an opened kernel computes in float32 what was rotated in another dtype
    near = max(_NEAR, *(8 * torch.finfo(getattr(torch, end.dtype)).eps for end in (query.source, query.target)))
    products, size = (q * other_key).sum(-1), q.norm(dim=-1) * other_key.norm(dim=-1)
    angle = products / size.clamp(min=1e-12)
    # Scores that are scaled by position (e.g. for long sequences) keep their angle.
    if _spread(products) > near * float(size.max()) and _spread(angle) > near:
        yield _finding(
            by_query,
            "Scores depend on absolute positions: queries and keys are rotated differently, or a pair's features are "
            "scaled differently. Typical causes: one rotates halves and the other pairs, or a sign is flipped.",
            "With the same query and key at all positions, the score of a position with itself varies by "
            f"{_spread(products):.3g}; the largest possible score is {float(size.max()):.3g}.",
            "Rotate both with the same function: x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).",
        )
        return


def _not_by_position(evidence: Evidence, key: Factor, q: Tensor, k: Tensor, op: Op) -> Iterator[Finding]:
    """Yield a fault if equal tokens have equal rows at all positions, although `op` rotates them."""
    if _vary(q.transpose(0, 1)) and _vary(k.transpose(0, 1)):
        by = _turned_by(key, k)
        if by:
            yield _finding(
                op,
                f"The rotation depends on the {by} instead of the position.",
                f"Equal tokens give equal queries at all positions, and rotated queries in other {by}s.",
                "Rotate along the position axis.",
            )
        return
    if max(_spread(q) / float(q.abs().max()), _spread(k) / float(k.abs().max())) < _SAME:
        given = any(evidence.run.graph.inputs_of(tensor) for _, tensor, _ in _tables(evidence, key))
        yield replace(
            _finding(
                op,
                "All positions are rotated by the same angles, so the rotation has no effect on the scores.",
                "Equal tokens give equal queries and equal keys at all positions.",
                "",
            ),
            sure=not given,
        )


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
    tokens = [list(factor.token(0))]
    for axis, size in enumerate(factor.tokens):
        for place in range(1, min(size, _MOST_TOKENS)):
            tokens.append(list(factor.token(0)))
            tokens[-1][axis] = place
    return {frozenset(group for group, _ in factor.changed(tuple(token))) for token in tokens}


def _at_position_zero(evidence: Evidence, factors: dict[str, Factor], names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if cosines of 1 and sines of 0 are applied to several positions. Raise `NotHereError` if not."""
    ops = [op for side in SIDES[:2] if (op := _turning_by_nothing(evidence, factors[side])) is not None]
    if not ops or min(names.lengths) < 2:
        raise NotHereError
    yield _finding(
        ops[0],
        "Cosines and sines are applied, all of position 0: nothing is rotated.",
        f"Every cosine is 1 and every sine is 0, at each of {names.lengths[1]} positions.",
        "Index the cosines and sines by position.",
    )


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


def _tables(evidence: Evidence, factor: Factor) -> list[tuple[Op, TensorRef, Tensor]]:
    """Return the tensors that do not come from the tokens and multiply them, each with its operation and value."""
    path = between(evidence.run.recording, {factor.source.id}, factor.target)
    reached = {factor.source.id, *(tensor.id for op in path for tensor in op.outputs)}
    tables: list[tuple[Op, TensorRef, Tensor]] = []
    for op in path:
        for tensor in op.inputs:
            if tensor.id in reached:
                continue
            value = evidence.content(tensor)
            if op.base_name.rstrip("_") in ("mul", "addcmul") and value is not None and value.numel() > 1:
                tables.append((op, tensor, value))
    return tables


def _turning(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that rotates tokens by cosines and sines, rightly or not; None without one."""
    tables = [(op, value) for op, _, value in _tables(evidence, factor)]
    for op, table in tables:
        if table.is_complex() and bool((table.imag.abs() > _NEAR).any()):  # scaled by position too, as in xPos
            return op
    return next((op for (op, cos), (_, sin) in combinations(tables, 2) if _are_cos_and_sin(cos, sin)), None)


def _turning_by_nothing(evidence: Evidence, factor: Factor) -> Op | None:
    """Return the operation that multiplies tokens by cosines of 1 beside sines of 0; None without one.

    That they are cosines and sines is known from the operations that made them, from the numbers of a larger table that
    they are cut from, or from complex numbers.
    """
    tables = [each for each in _tables(evidence, factor) if not _is_learned(evidence, each[1])]
    ones = [(op, tensor) for op, tensor, value in tables if bool((value == 1).all())]
    zeros = [tensor for _, tensor, value in tables if not value.is_complex() and bool((value == 0).all())]
    for op, tensor in ones:
        if tensor.dtype.startswith("complex"):
            return op
        if any(_were_cos_and_sin(evidence, tensor, sin) for sin in zeros):
            return op
    return None


def _is_learned(evidence: Evidence, tensor: TensorRef) -> bool:
    """Return whether a table is computed from a parameter: its numbers may change in training."""
    recording = evidence.run.recording
    steps = evidence.run.graph.back(tensor, lambda _: True)
    return any(step.tensor.storage in recording.parameter_storages for step in steps)


def _were_cos_and_sin(evidence: Evidence, cos: TensorRef, sin: TensorRef) -> bool:
    """Return whether two tensors were made by cos and sin, or are cut from tables of cosines and sines."""
    whole = [_before_cuts(evidence, tensor) for tensor in (cos, sin)]
    makers = [evidence.run.recording.producer(tensor) for tensor in whole]
    if [maker.base_name.rstrip("_") if maker else "" for maker in makers] == ["cos", "sin"]:
        return True
    values = [evidence.content(tensor) for tensor in whole]
    return values[0] is not None and values[1] is not None and _are_cos_and_sin(values[0], values[1])


def _before_cuts(evidence: Evidence, tensor: TensorRef) -> TensorRef:
    """Return the table that a tensor is cut or picked from, or repeated of."""
    producer = evidence.run.recording.producer
    while (op := producer(tensor)) is not None and op.inputs:
        if op.kind not in ("view", "copy") and op.base_name not in _CUTS:
            break
        tensor = op.inputs[0]
    return tensor


def _are_cos_and_sin(cos: Tensor, sin: Tensor) -> bool:
    if cos.shape != sin.shape or not cos.is_floating_point() or not bool((sin.abs() > _NEAR).any()):
        return False
    near = max(_NEAR, 8 * torch.finfo(cos.dtype).eps)
    squares = cos.double() ** 2 + sin.double() ** 2  # another constant than 1 where both are scaled, as in YaRN
    return bool(((squares / squares.max() - 1).abs() < near).all()) and float(cos.max() - cos.min()) > _NEAR

"""Whether queries and keys are turned by their positions, and alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...record.ops import Op, TensorRef
from ...reports.check import Finding
from .bench import Bench, each_kind
from .tokens import Factor, LostError, Tokens, between

_NEAR = 1e-3
"""What differs by less, beside the largest, does not differ."""


@each_kind("nothing turns queries and keys by their positions")
def rotary(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield where queries and keys of one position are not turned alike, and where values are turned."""
    factors = {name: tokens.factor(name) for name in ("query", "key", "value")}
    turns = {name: _turning(bench, {factor.source.id}, factor.target) for name, factor in factors.items()}
    if not any(turns.values()):
        raise LostError
    content = {name: _of_equal_tokens(factor, seed=1) for name, factor in factors.items()}
    attention = (
        _of_scores(tokens, factors, content, turns),
        _of_values(bench, tokens.attention, content["value"], turns["value"]),
    )
    yield from filter(None, attention)


def _finding(op: Op, sentence: str, evidence: str, fix: str) -> Finding:
    """Return a finding at the operation that turns."""
    return Finding("rotary", sentence, evidence, source=op.source, fix=fix)


def _of_scores(
    tokens: Tokens, factors: dict[str, Factor], content: dict[str, Tensor], turns: dict[str, Op | None]
) -> Finding | None:
    """Judge what turns queries and keys; None where they are turned alike."""
    q, k = content["query"], content["key"]
    turned = {name: turns[name] for name in ("query", "key") if _vary(content[name])}
    if len(turned) == 1:
        ((rotated, op),) = turned.items()
        other = "key" if rotated == "query" else "query"
        if op is None:
            return None
        return _finding(
            op,
            f"The {rotated} is turned by its position and the {other} is not: scores depend on the absolute position.",
            f"Equal tokens at all positions give equal {other} heads and turned {rotated} heads.",
            f"rotate the {other} as well.",
        )
    by_query, by_key = turns["query"], turns["key"]
    if by_query is None or by_key is None:
        return None
    if not turned and _vary(q.transpose(0, 1)) and _vary(k.transpose(0, 1)):
        return _finding(
            by_query,
            "The rotation goes by head, not by position: the heads of one token are turned differently, its positions "
            "alike.",
            "Equal tokens at all positions give equal queries there, and turned ones in other heads.",
            "rotate along the axis of positions.",
        )
    if not turned or q.shape[1:] != k.shape[1:]:
        return None
    groups = min(len(q), len(k))
    q, k, other_key = q[:groups], k[:groups], _of_equal_tokens(factors["key"], seed=2)[:groups]
    near = max(_NEAR, 8 * torch.finfo(getattr(torch, factors["query"].target.dtype)).eps)
    products = (q * other_key).sum(-1)
    size = q.norm(dim=-1) * other_key.norm(dim=-1)
    spread = float((products - products[:, :1]).abs().max())
    angle = products / size.clamp(min=1e-12)
    # Scores that a position scales, as for long sequences, keep their angle.
    if spread > near * float(size.max()) and float((angle - angle[:, :1]).abs().max()) > near:
        return _finding(
            by_query,
            "Queries and keys are turned differently, or by no rotation: two tokens do not score alike wherever they "
            "stand, as with the halves of one layout and the pairs of another, or with a sign turned round.",
            "With one query and one key at all positions, the score of a position with itself varies by "
            f"{spread:.3g} over positions, of at most {float(size.max()):.3g}.",
            "rotate both by the same function: x · cos + rotate_half(x) · sin, rotate_half(x) = (-x2, x1).",
        )
    same = (q * k).sum(-1) / (q.norm(dim=-1) * k.norm(dim=-1)).clamp(min=1e-12)
    plain = all(_keeps_norm(factors[name], content[name], near) for name in ("query", "key"))
    is_self = tokens.attention.stages.get("query") is not None and factors["query"].tokens == factors["key"].tokens
    if plain and is_self and float((same - 1).abs().max()) > near:
        return _finding(
            by_key,
            "A query and a key of one position are turned by different positions: their distance is not 0.",
            f"With the same content everywhere they are parallel unturned, and at an angle of cosine "
            f"{float(same.min()):.3g} turned.",
            "rotate both by the same positions.",
        )
    return None


def _of_values(bench: Bench, attention: Attention, rows: Tensor, turns: Op | None) -> Finding | None:
    """Judge values that are turned, and their context that is not turned back; None where they are not."""
    if turns is None or not _vary(rows) or _vary(rows.norm(dim=-1, keepdim=True)):
        return None
    end = attention.stages.get("output") or attention.stages.get("concat")
    context = attention.value_product.op.output
    if end is not None and _turning(bench, {context.id}, end) is not None:
        return None
    return _finding(
        turns,
        "The values are turned by their positions as well: what comes out depends on the absolute position, though "
        "the scores depend on distances.",
        "Equal tokens at all positions give turned values, and nothing turns the context back.",
        "rotate the query and the key alone.",
    )


def _vary(rows: Tensor) -> bool:
    """Whether rows of equal tokens are not the same; `group row feature`."""
    return float((rows - rows[:, :1]).abs().max()) > _NEAR * float(rows.abs().max().clamp(min=1e-12))


def _keeps_norm(factor: Factor, rows: Tensor, near: float) -> bool:
    """Whether nothing but turning is done on the way to these rows of equal tokens."""
    norm = _one_token(factor, seed=1)[: factor.width].double().norm()
    return bool(((rows.norm(dim=-1) - norm).abs() <= near * norm).all())


def _one_token(factor: Factor, *, seed: int) -> Tensor:
    """Return the features of one token, drawn; its heads are alike, where they are side by side."""
    value = factor.flow.value(factor.source)
    features, drawn = value.shape[-1], torch.Generator().manual_seed(seed)
    if features % factor.width:
        return torch.randn(features, generator=drawn).to(value)
    return torch.randn(factor.width, generator=drawn).to(value).repeat(features // factor.width)


def _of_equal_tokens(factor: Factor, *, seed: int) -> Tensor:
    """Return the rows that a factor has where all of its tokens are one: `group row feature`, in float64."""
    value, token = factor.flow.value(factor.source), _one_token(factor, seed=seed)
    content = factor.flow.again({factor.source.id: token.expand(value.shape).clone()}, factor.target).double()
    content = content if factor.rows == -2 else content.transpose(-1, -2)
    return content.reshape(-1, *content.shape[-2:])


def _turning(bench: Bench, sources: set[int], target: TensorRef) -> Op | None:
    """Return the operation that turns what comes from sources by cosines and sines; None where none does.

    Raises `LostError` where other tokens come in on the way.
    """
    recording = bench.recorded.recording
    path = between(recording, sources, target)
    reached = sources | {tensor.id for op in path for tensor in op.outputs}
    tables: list[tuple[Op, Tensor]] = []
    for op in path:
        for tensor in op.inputs:
            if tensor.id in reached:
                continue
            if op.base_name == "cat" and _hangs_on_weights(bench, tensor):
                raise LostError
            value = recording.values.get(tensor.id)
            if op.base_name.rstrip("_") in ("mul", "addcmul") and value is not None and value.numel() > 1:
                tables.append((op, value))
    for place, (op, table) in enumerate(tables):
        if table.is_complex():
            if bool(((table.abs() - 1).abs() < _NEAR).all()) and bool((table.imag.abs() > _NEAR).any()):
                return op
            continue
        for _, other in tables[place + 1 :]:
            if other.shape != table.shape or not table.is_floating_point() or not bool((other.abs() > _NEAR).any()):
                continue
            near, cos, sin = max(_NEAR, 8 * torch.finfo(table.dtype).eps), table.double(), other.double()
            if bool(((cos**2 + sin**2 - 1).abs() < near).all()) and float(cos.max() - cos.min()) > _NEAR:
                return op
    return None


def _hangs_on_weights(bench: Bench, tensor: TensorRef) -> bool:
    """Whether a matrix of the module is behind a tensor."""
    storages = bench.recorded.recording.parameter_storages
    behind = islice(bench.recorded.graph.back(tensor, lambda _: True), 1, None)
    return any(step.tensor.storage in storages and len(step.tensor.shape) > 1 for step in behind)

"""Check by following one token that heads are split and merged within tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch

from ...compare.replay import LostError, content_of
from ...graph.attention import Attention
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...record.ops import TensorRef
from ...reports.check import Finding
from ...text import listed, plural
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..factors import SIDES, Factor, Row, Way
from ..lab import NotPossibleError
from ..probe import moved_rows
from ..registry import rule

_MOST_TOKENS = 64
"""The largest number of tokens to follow."""
_LARGE = 1 << 18
"""Scores above which fewer tokens are followed."""
Pieces = Mapping[int, set[Row]]
"""The first feature of each slice of a token, as wide as a head, to the rows of the product that contain it."""


@rule()
@partial(of_each_kind, "no heads were found")
def heads(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Heads are split and merged within each token.

    One token of q_proj, k_proj and v_proj is changed at a time, and the positions of each head that
    change are found. All features of a token must be at one position of the heads, and after the merge
    in one token. `view(batch, heads, tokens, head_dim)` gives the right shape and the wrong order. The
    model still trains, only worse, and a causal mask no longer hides the future.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            parts = self.qkv(x).chunk(3, -1)
            q, k, v = (t.reshape(len(x), 2, -1, 8) for t in parts)
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        q, k, v = (t.reshape(len(x), 2, -1, 8) for t in parts)
    +        parts = (t.reshape(len(x), -1, 2, 8) for t in parts)
    +        q, k, v = (t.transpose(1, 2) for t in parts)
    ```
    """
    reaches: dict[str, _Reach] = {}
    for side in SIDES:
        with suppress(LostError):
            reaches[side] = _reach_of(evidence, attention, names, side)
    splits = {}
    for side, reach in reaches.items():
        rows = None if _are_several_rows(reach, reaches, names) else _rows_apart(reach)
        if rows is not None:
            splits[side] = rows
    if splits:
        yield _split_wrongly(evidence, attention, names, reaches, splits)
        return
    try:
        yield from _merged_wrongly(evidence, attention, names)
    except LostError:
        if _has_equal_sizes(attention) and not evidence.once:  # e.g. as many tokens as heads
            with suppress(LostError):
                yield from _merged_wrongly(*_with_fewer_tokens(evidence, attention))
                return
        if not reaches:
            raise
        if "concat" in attention.stages:
            raise LostError("the merge of the heads could not be followed") from None


# -- heads that are split in a wrong way ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reach:
    """A token of the query, the key or the value, and the rows of the product that contain its slices."""

    side: str
    factor: Factor
    token: tuple[int, ...]
    pieces: Pieces


def _reach_of(evidence: Evidence, attention: Attention, names: AxisNames, side: str) -> _Reach:
    """Return where the second token of a side is in the product. Raise `LostError` if it cannot be recomputed."""
    factor = Factor(evidence, attention, names, side)
    token = factor.token(1 if prod(factor.tokens) > 1 else 0)
    return _Reach(side, factor, token, factor.by_piece(token))


def _are_several_rows(reach: _Reach, reaches: Mapping[str, _Reach], names: AxisNames) -> bool:
    """Return whether query heads that share a key head are rows of one product: a token is in several on purpose."""
    if reach.side != "query":
        return False
    key_slices = len(reaches["key"].pieces) if "key" in reaches else 0
    return key_slices < len(reach.pieces) and reach.factor.target.shape[reach.factor.rows] > names.lengths[0]


@dataclass(frozen=True)
class _TwoRows:
    """Two slices of one token that are different rows of one group of a product."""

    group: int
    width: int
    """The features of a slice."""
    starts: tuple[int, int]
    """The first feature of each slice."""
    rows: tuple[int, int]


def _rows_apart(reach: _Reach) -> _TwoRows | None:
    """Return two slices of a token, or features of a slice, that are different rows of one group; None without such.

    Where neighbours are mixed on purpose, e.g. by a convolution, or features are the rows, it is so for every token.
    """
    factor = reach.factor
    for start, rows in reach.pieces.items():
        if _is_spread(rows):  # one slice is in several rows: its features are followed
            features = factor.in_piece(reach.token, start)
            of_last = factor.in_piece(factor.token(prod(factor.tokens) - 1), start)
            return None if _positions(features) == _positions(of_last) else _two_rows(features, 1)
    return _two_rows(reach.pieces, factor.width)


def _two_rows(pieces: Pieces, width: int) -> _TwoRows | None:
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if _is_spread(rows):
            return None
        for group, row in rows:
            first_start, first_row = first.setdefault(group, (start, row))
            if first_row != row:
                return _TwoRows(group, width, (first_start, start), (first_row, row))
    return None


def _is_spread(rows: set[Row]) -> bool:
    """Return whether a slice is in rows of different positions."""
    return len({row for _, row in rows}) > 1


def _positions(pieces: Pieces) -> dict[int, set[int]]:
    return {start: {row for _, row in rows} for start, rows in pieces.items()}


def _split_wrongly(
    evidence: Evidence,
    attention: Attention,
    names: AxisNames,
    reaches: Mapping[str, _Reach],
    splits: Mapping[str, _TwoRows],
) -> Finding:
    """Return one finding for all sides that are split in a wrong way, at the first of their lines."""
    lines = {}
    for side in splits:
        lines[side] = _line_of_split(evidence, reaches[side].factor) or attention.score_product.op.source
    first = next(iter(splits))
    elsewhere = [f"{line} ({side})" for side, line in lines.items() if line != lines[first]]
    more = f" The same at {listed(elsewhere)}." if elsewhere else ""
    order = "positions, heads, head_dim), then transpose(1, 2)"
    if reaches[first].factor.features == 1:  # features come before positions, as in a convolution
        order = "heads, head_dim, positions), then transpose(2, 3)"
    tokens = _tokens_of_group(reaches["key"].factor, splits["key"].group) if "key" in splits else None
    within = {"query", "key"} <= splits.keys() and all(_is_of_one_token(reaches[side], splits[side]) for side in splits)
    return Finding(
        "heads",
        _sentence(list(splits), tokens, names.lengths[1], is_within_tokens=within),
        _proof(reaches[first], splits[first], is_within_tokens=within) + more,
        source=lines[first],
        fix=f"Use view(batch, {order}.",
    )


def _sentence(sides: Sequence[str], tokens: int | None, keys: int, *, is_within_tokens: bool) -> str:
    """Return what is wrong, and what follows for the keys, the values or the queries."""
    sentence = f"The heads of the {listed(sides)} are split without transpose"
    if is_within_tokens:
        return f"{sentence}: attention runs over the heads within each token, and no token attends to another."
    sentence += ". view() puts parts of one token into different positions of a head, so"
    if "key" not in sides:
        return f"{sentence} the {listed(sides)} at a position of a head is not of the token at this position."
    if tokens is None or tokens == keys:
        return f"{sentence} a position of a head is not a token."
    return f"{sentence} each head sees only {plural(tokens, 'token')}."


def _proof(reach: _Reach, apart: _TwoRows, *, is_within_tokens: bool) -> str:
    """Return where two slices of the token end up."""
    here, there = (_features(start, apart.width) for start in apart.starts)
    ends = "ends" if apart.width == 1 else "end"
    moved = f"{reach.side[0]}_proj {here} of token {list(reach.token)} {ends} up at"
    row, other = apart.rows
    if is_within_tokens:
        place = f"row {row} of scores [{apart.group}], {there} at row {other}"
        return f"{moved} {place}: the other rows are of the same token."
    return f"{moved} position {row} of head {apart.group}, {there} at position {other}."


def _features(start: int, width: int) -> str:
    """Return the features of a slice in words: `features 16–23`."""
    return f"features {start}–{start + width - 1}" if width > 1 else f"feature {start}"


def _is_of_one_token(reach: _Reach, apart: _TwoRows) -> bool:
    """Return whether all rows of a group are of one token."""
    rows = {row for places in reach.pieces.values() for group, row in places if group == apart.group}
    is_whole = len(rows) == reach.factor.target.shape[reach.factor.rows]
    return is_whole and _tokens_of_group(reach.factor, apart.group) == 1


def _tokens_of_group(factor: Factor, group: int) -> int | None:
    """Return the number of tokens with a part in a group of the product; None if there are too many to try."""
    total = prod(factor.tokens)
    if total > _MOST_TOKENS:
        return None
    return sum(any(group == other for other, _ in factor.changed(factor.token(number))) for number in range(total))


def _line_of_split(evidence: Evidence, factor: Factor) -> str:
    """Return the line of the view that splits the heads; empty if none was found."""
    tensor, source = factor.target, ""
    while tensor.id != factor.source.id:
        op = evidence.run.recording.producer(tensor)
        if op is None or not op.inputs:
            break
        if op.kind == "view" and len(op.output.shape) > len(op.inputs[0].shape):
            source = op.source
        tensor = op.inputs[0]
    return source


# -- heads that are merged in a wrong way -----------------------------------------------------------------------------


def _merged_wrongly(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if a row of concat mixes tokens, or is of another token. Raise `LostError` if it is unknown."""
    query = Factor(evidence, attention, names, "query")
    concat = attention.stages.get("concat")
    if concat is None or attention.branches or _is_query_of_another(evidence, attention, concat):
        raise LostError
    if _sums(evidence, attention, concat) or _depend_on_others(evidence, attention, names):
        raise LostError
    places = _places_of_concat(attention, names, query, concat)
    scores, context = attention.score_product.op.output, attention.value_product.op.output
    count = prod(query.tokens)
    if prod(scores.shape) < max(count, prod(places)) * names.num_heads * names.lengths[1]:
        raise LostError  # a row of the scores is of several tokens on purpose, e.g. of a column of a table
    ways = Way(evidence, scores, context), Way(evidence, context, concat)
    # Heads in a wrong order move all tokens but the first and the last.
    numbers = {1, count // 2} if scores.numel > _LARGE else {0, 1, count // 2, count - 1}
    for number in sorted(numbers & set(range(count))):
        token = query.token(number)
        reached = _tokens_of_concat(ways, attention, names, query.changed(token))
        if len(reached) > 1:
            sentence = (
                "The heads are merged in a wrong order, e.g. without transpose: the context of one query is spread "
                f"over {len(reached)} tokens of concat, and each of them mixes several queries."
            )
            shown = ", ".join(map(str, reached[:4])) + (", …" if len(reached) > 4 else "")
            proof = f"Changing the context of query {list(token)} in all heads changes concat at {shown}."
        elif query.tokens == places and len(set(places)) == len(places) and reached and reached[0] != [*token]:
            sentence = "The context of a query ends up at another token."
            proof = f"Changing the context of query {list(token)} changes concat at {reached[0]}."
        else:
            continue
        fix = "Merge the heads in the order in which they were split, e.g. transpose(1, 2) before flatten(2)."
        yield Finding("heads", sentence, proof, source=evidence.line_of(concat), fix=fix)
        return


def _sums(evidence: Evidence, attention: Attention, concat: TensorRef) -> bool:
    """Return whether numbers are added up between the context and concat, e.g. a mean of all items is subtracted."""
    context = attention.value_product.op.output
    steps = between(evidence.run.recording, {context.id}, concat)
    return any(op.kind == "compute" and not op.pointwise for op in steps)


def _depend_on_others(evidence: Evidence, attention: Attention, names: AxisNames) -> bool:
    """Return whether a query changes the weights of others, so that a context is not of one query; False if unknown."""
    with suppress(LostError):
        return len(moved_rows(evidence, attention, names).moved) > 1
    return False


def _is_query_of_another(evidence: Evidence, attention: Attention, concat: TensorRef) -> bool:
    """Return whether another attention takes concat as its query, e.g. turned, as columns after rows."""
    graph = evidence.run.graph
    source = graph.before_moves(concat).id
    for other, _ in evidence.run.attentions:
        query = other.stages.get("query")
        if other is not attention and query is not None and graph.before_moves(query).id == source:
            return True
    return False


def _places_of_concat(attention: Attention, names: AxisNames, query: Factor, concat: TensorRef) -> tuple[int, ...]:
    """Return the sizes of concat without its features, e.g. `batch query`.

    Raises `LostError` where heads are not merged yet, or features come before positions, as in a convolution.
    """
    dims, sizes = dims_of(names.of_stage("concat")), list(concat.shape)
    place = attention.feature_place("output", len(sizes)) % len(sizes)
    features = dims.pop(place) if place < len(dims) else []
    del sizes[place]
    # With as many tokens as heads, heads that are merged without a transpose are rows, each of all tokens.
    are_rows_of_tokens = "query" in features and query.tokens == tuple(sizes)
    if ["heads"] in dims and not are_rows_of_tokens:
        raise LostError
    if any("head_dim" in word for dim in dims for word in dim):
        raise LostError
    return tuple(sizes)


def _tokens_of_concat(ways: tuple[Way, Way], attention: Attention, names: AxisNames, rows: set[Row]) -> list[list[int]]:
    """Return the tokens of concat that change when these rows of the scores change, in order.

    `ways` are those from the scores to the context and from the context to concat. Raises `LostError` if a query is in
    several rows on purpose, e.g. in overlapping windows or chunks.
    """
    to_context, to_concat = ways
    marks = torch.zeros(to_context.source.shape, dtype=torch.bool)
    by_row = marks.movedim(-2 if attention.key_first else -1, -1)  # ... query key
    for group, row in rows:
        by_row[*map(int, np.unravel_index(group, by_row.shape[:-2])), row] = (
            True  # torch's own takes a second to import
        )
    device = content_of(to_context.evidence, to_context.source).device
    in_context = to_context.changed_by(marks.to(device))
    in_context = in_context.any(-2 if attention.value_first else -1, keepdim=True)
    if max(len(rows), int(in_context.sum())) > names.num_heads:
        raise LostError
    in_concat = to_concat.changed_by(in_context)
    tokens: list[list[int]] = in_concat.any(attention.feature_place("output", in_concat.dim())).nonzero().tolist()
    return tokens


# -- sizes that coincide ----------------------------------------------------------------------------------------------


def _has_equal_sizes(attention: Attention) -> bool:
    """Return whether two dimensions of the query heads have one size: what one axis does may look like the other."""
    sizes = attention.stages["q_heads"].shape if "q_heads" in attention.stages else ()
    return len(set(sizes)) < len(sizes)


def _with_fewer_tokens(evidence: Evidence, attention: Attention) -> tuple[Evidence, Attention, AxisNames]:
    """Return an attention of another run, with all tokens but the last. Raise `LostError` if there is none."""
    try:
        fewer = evidence.with_arguments(evidence.piece(evidence.source, 0, evidence.source.length - 1))
    except NotPossibleError as error:
        raise LostError from error
    whole = [named[0] for named in evidence.run.attentions]
    if len(fewer.run.attentions) != len(whole):
        raise LostError
    return (fewer, *fewer.run.attentions[[of is attention for of in whole].index(True)])

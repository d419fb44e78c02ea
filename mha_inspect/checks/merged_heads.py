"""Check that the context of a query is merged into the row of its own token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from ..compare.replay import Factor, LostError, Row, Way, content_of
from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..naming.pattern import dims_of
from ..record.ops import TensorRef
from ..reports.check import Finding
from .evidence import Evidence

_LARGE = 1 << 18
"""Scores above which fewer tokens are followed."""


def merged(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if a row of concat mixes tokens, or belongs to another token.

    Raises `LostError` if that cannot be determined.
    """
    factor = Factor(evidence, attention, names, "query")
    concat = attention.stages.get("concat")
    if concat is None or attention.branches:
        raise LostError
    places = _places_of_concat(attention, names, factor, concat)
    _require_row_a_token(attention, names, max(prod(factor.tokens), prod(places)))
    scores, context = attention.score_product.op.output, attention.value_product.op.output
    ways = Way(evidence, scores, context), Way(evidence, context, concat)
    is_comparable = factor.tokens == places and len(set(places)) == len(places)
    for number in _numbers_to_follow(prod(factor.tokens), is_large=scores.numel > _LARGE):
        token = factor.token(number)
        rows = factor.changed(token)
        if len(rows) > names.num_heads:
            raise LostError  # a token is in several rows of a head on purpose, e.g. in overlapping windows
        spread = _tokens_of_concat(ways, attention, names, rows)
        if len(spread) > 1:
            yield _mixes_queries(evidence, concat, token, spread)
            return
        if is_comparable and spread and spread[0] != [*token]:
            yield _is_another_token(evidence, concat, token, spread[0])
            return


def _require_row_a_token(attention: Attention, names: AxisNames, tokens: int) -> None:
    """Raise `LostError` if a row of the scores belongs to several tokens on purpose, e.g. to a column of a table."""
    scores = attention.score_product.op.output
    if prod(scores.shape) < tokens * names.num_heads * names.lengths[1]:
        raise LostError


def _numbers_to_follow(count: int, *, is_large: bool = False) -> list[int]:
    """Return the numbers of a few tokens out of `count`, in order: the first two, the middle and the last.

    With `is_large` only the second and the middle: heads in a wrong order move all tokens but the first and the last.

    >>> _numbers_to_follow(8)
    [0, 1, 4, 7]
    """
    numbers = {1, count // 2} if is_large else {0, 1, count // 2, count - 1}
    return [number for number in sorted(numbers) if 0 <= number < count]


def _places_of_concat(attention: Attention, names: AxisNames, factor: Factor, concat: TensorRef) -> tuple[int, ...]:
    """Return the sizes of concat without its features, e.g. `batch query`.

    Raises `LostError` where heads are not merged yet, or features come before positions, as in a convolution.
    """
    dims = dims_of(names.of_stage("concat"))
    sizes = list(concat.shape)
    place = attention.feature_place("output", len(sizes)) % len(sizes)
    features = dims.pop(place) if place < len(dims) else []
    del sizes[place]
    places = tuple(sizes)
    # With as many tokens as heads, heads that are merged without a transpose are rows, each of all tokens.
    are_rows_of_tokens = "query" in features and factor.tokens == places
    if ["heads"] in dims and not are_rows_of_tokens:
        raise LostError
    for dim in dims:
        if any("head_dim" in word for word in dim):
            raise LostError
    return places


def _tokens_of_concat(
    ways: tuple[Way, Way], attention: Attention, names: AxisNames, rows: Iterable[Row]
) -> list[list[int]]:
    """Return the tokens of concat that change when these rows of the scores change, in order.

    `ways` are those from the scores to the context and from the context to concat.
    """
    to_context, to_concat = ways
    changed = _changed_context(to_context, attention, rows)
    if int(changed.sum()) > names.num_heads:
        raise LostError  # a query is in several rows of the context on purpose, e.g. in overlapping chunks
    feature_axis = attention.feature_place("output", len(to_concat.target.shape))
    in_concat = to_concat.changed_by(changed).any(feature_axis)
    tokens: list[list[int]] = in_concat.nonzero().tolist()
    return tokens


def _changed_context(way: Way, attention: Attention, rows: Iterable[Row]) -> Tensor:
    """Return which rows of the context change when these rows of the scores change; features have size 1."""
    key_axis = -2 if attention.key_first else -1
    feature_axis = -2 if attention.value_first else -1
    sizes = list(way.source.shape)
    del sizes[key_axis]
    device = content_of(way.evidence, way.source).device
    marks = torch.zeros(prod(sizes[:-1]), sizes[-1], dtype=torch.bool, device=device)
    for row in rows:
        marks[row] = True
    of_scores = marks.view(sizes).unsqueeze(key_axis)
    return way.changed_by(of_scores).any(feature_axis, keepdim=True)


def _mixes_queries(evidence: Evidence, concat: TensorRef, token: tuple[int, ...], spread: list[list[int]]) -> Finding:
    shown = ", ".join(str(place) for place in spread[:4])
    more = ", …" if len(spread) > 4 else ""
    return _finding(
        evidence,
        concat,
        "The heads are merged in a wrong order, e.g. without transpose: the context of one query is spread "
        f"over {len(spread)} tokens of concat, and each of them mixes several queries.",
        f"Changing the context of query {list(token)} in all heads changes concat at {shown}{more}.",
    )


def _is_another_token(evidence: Evidence, concat: TensorRef, token: tuple[int, ...], place: list[int]) -> Finding:
    return _finding(
        evidence,
        concat,
        "The context of a query ends up at another token.",
        f"Changing the context of query {list(token)} changes concat at {place}.",
    )


def _finding(evidence: Evidence, concat: TensorRef, sentence: str, proof: str) -> Finding:
    fix = "Merge the heads in the order in which they were split, e.g. transpose(1, 2) before flatten(2)."
    return Finding("heads", sentence, proof, source=evidence.line_of(concat), fix=fix)

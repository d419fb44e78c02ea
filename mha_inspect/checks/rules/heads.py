"""Check by following one token that heads are split and merged within tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod

from ...compare.replay import SIDES, Factor, LostError, Row
from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...reports.check import Finding
from ...text import listed, plural
from ..each_kind import of_each_kind
from ..evidence import Evidence, NotPossibleError
from ..merged_heads import merged
from ..registry import rule

_MOST_TOKENS = 64
"""The largest number of tokens to follow."""


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
    followed = _followed_sides(evidence, attention, names)
    splits = []
    for token in followed.values():
        if _may_be_several_rows(token, followed, names):
            continue
        split = _split_of(evidence, attention, names, token)
        if split is not None:
            splits.append(split)
    if splits:
        yield from _split_findings(splits)
        return
    try:
        yield from merged(evidence, attention, names)
    except LostError:
        if _has_equal_sizes(attention) and not evidence.once:  # e.g. as many tokens as heads
            with suppress(LostError):
                yield from merged(*_with_fewer_tokens(evidence, attention))
                return
        if not followed:
            raise
        if "concat" in attention.stages:
            raise LostError("the merge of the heads could not be followed") from None


# -- one token, from its projection to the product --------------------------------------------------------------------


@dataclass(frozen=True)
class _FollowedToken:
    """A token of the query, the key or the value, and the rows of the product that contain its slices."""

    side: str
    factor: Factor
    token: tuple[int, ...]
    pieces: Mapping[int, set[Row]]
    """The first feature of each slice, to the rows that contain the slice."""


def _followed_sides(evidence: Evidence, attention: Attention, names: AxisNames) -> dict[str, _FollowedToken]:
    """Return a followed token for each side that can be recomputed."""
    followed = {}
    for side in ("key", "value", "query"):
        with suppress(LostError):
            factor = Factor(evidence, attention, names, side)
            token = factor.token(1 if prod(factor.tokens) > 1 else 0)
            followed[side] = _FollowedToken(side, factor, token, factor.by_piece(token))
    return followed


def _may_be_several_rows(token: _FollowedToken, followed: Mapping[str, _FollowedToken], names: AxisNames) -> bool:
    """Return whether query heads that share a key head are rows of one product: a token is in several on purpose."""
    if token.side != "query":
        return False
    key_slices = len(followed["key"].pieces) if "key" in followed else 0
    shares_keys = key_slices < len(token.pieces)
    return shares_keys and token.factor.target.shape[token.factor.rows] > names.lengths[0]


@dataclass(frozen=True)
class _TwoRows:
    """Two slices of one token that are different rows of one group of a product."""

    group: int
    start: int
    """The first feature of one slice."""
    row: int
    other_start: int
    other_row: int


def _rows_apart(pieces: Mapping[int, set[Row]]) -> _TwoRows | None:
    """Return two slices of one token that are different rows of one group; None if there are none, or a slice is.

    >>> _rows_apart({0: {(0, 1)}, 16: {(0, 2)}})
    _TwoRows(group=0, start=0, row=1, other_start=16, other_row=2)
    """
    first: dict[int, tuple[int, int]] = {}
    for start, rows in pieces.items():
        if _is_spread(rows):
            return None
        for group, row in rows:
            first_start, first_row = first.setdefault(group, (start, row))
            if first_row != row:
                return _TwoRows(group, first_start, first_row, start, row)
    return None


def _is_spread(rows: Collection[Row]) -> bool:
    """Return whether a slice is in rows of different positions."""
    return len({row for _, row in rows}) > 1


def _features_apart(factor: Factor, token: tuple[int, ...], start: int) -> _TwoRows | None:
    """Return two features of a slice of one token that are different rows of one group.

    None where neighbours are mixed on purpose, e.g. by a convolution, or where features are the rows: of every token.
    """
    last = factor.token(prod(factor.tokens) - 1)
    features = factor.in_piece(token, start)
    if _positions_by_feature(features) == _positions_by_feature(factor.in_piece(last, start)):
        return None
    return _rows_apart(features)


def _positions_by_feature(features: Mapping[int, set[Row]]) -> dict[int, set[int]]:
    """Return the positions in a group that each feature is at."""
    return {feature: {row for _, row in rows} for feature, rows in features.items()}


# -- heads that are split in a wrong way ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """Heads of one side that were split in a wrong way."""

    side: str
    line: str
    """The line of the view that splits the heads."""
    proof: str
    is_convolved: bool
    """Whether the features come before the positions, as in a convolution."""
    within_token: bool
    """Whether all rows of a product are of one token."""
    tokens: int | None
    """The number of tokens in one head; None if there are too many to count."""
    total: int
    """The number of tokens of the side."""


def _split_of(evidence: Evidence, attention: Attention, names: AxisNames, followed: _FollowedToken) -> _Split | None:
    """Return how the heads of a side are split in a wrong way; None if they are not."""
    factor, pieces = followed.factor, followed.pieces
    width, apart = factor.width, _rows_apart(pieces)
    for start, rows in pieces.items():
        if _is_spread(rows):  # one slice is in several rows: its features are followed
            width, apart = 1, _features_apart(factor, followed.token, start)
            break
    if apart is None:
        return None
    tokens = _tokens_of_group(factor, apart.group)
    rows_of_token = {row for rows in pieces.values() for row in rows}
    within_token = tokens == 1 and _is_whole(factor, apart.group, rows_of_token)
    return _Split(
        side=followed.side,
        line=_line_of_split(evidence, factor) or attention.score_product.op.source,
        proof=_proof(followed, apart, width, within_token=within_token),
        is_convolved=factor.features == 1,
        within_token=within_token,
        tokens=tokens,
        total=names.lengths[0] if followed.side == "query" else names.lengths[1],
    )


def _proof(followed: _FollowedToken, apart: _TwoRows, width: int, *, within_token: bool) -> str:
    """Return where two slices of the token end up."""
    here, there = _features_in_words(apart.start, width), _features_in_words(apart.other_start, width)
    ends = "ends" if width == 1 else "end"
    moved = f"{followed.side[0]}_proj {here} of token {list(followed.token)} {ends} up at"
    if within_token:
        place = f"row {apart.row} of scores [{apart.group}], {there} at row {apart.other_row}"
        return f"{moved} {place}: the other rows are of the same token."
    return f"{moved} position {apart.row} of head {apart.group}, {there} at position {apart.other_row}."


def _features_in_words(start: int, width: int) -> str:
    """Return the features of a slice.

    >>> _features_in_words(16, 8)
    'features 16–23'
    """
    return f"features {start}–{start + width - 1}" if width > 1 else f"feature {start}"


def _is_whole(factor: Factor, group: int, rows: Collection[Row]) -> bool:
    """Return whether these rows are all rows of a group."""
    positions = {row for row_group, row in rows if row_group == group}
    return len(positions) == factor.target.shape[factor.rows]


def _tokens_of_group(factor: Factor, group: int) -> int | None:
    """Return the number of tokens with a part in a group of the product; None if there are too many to try."""
    total = prod(factor.tokens)
    if total > _MOST_TOKENS:
        return None
    count = 0
    for number in range(total):
        groups = {row_group for row_group, _ in factor.changed(factor.token(number))}
        count += group in groups
    return count


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


# -- the finding ------------------------------------------------------------------------------------------------------


def _split_findings(splits: Sequence[_Split]) -> Iterator[Finding]:
    """Yield one finding for the sides that are projected by matrices, and one for those of convolutions."""
    by_kind: dict[bool, list[_Split]] = {}
    for split in splits:
        by_kind.setdefault(split.is_convolved, []).append(split)
    for sides in by_kind.values():
        yield _split_finding(sorted(sides, key=lambda split: SIDES.index(split.side)))


def _split_finding(sides: Sequence[_Split]) -> Finding:
    """Return one finding for all sides that are split in the same wrong way, at the first of their lines."""
    first = sides[0]
    elsewhere = [f"{split.line} ({split.side})" for split in sides if split.line != first.line]
    more = f" The same at {listed(elsewhere)}." if elsewhere else ""
    if first.is_convolved:
        fix = "Use view(batch, heads, head_dim, positions), then transpose(2, 3)."
    else:
        fix = "Use view(batch, positions, heads, head_dim), then transpose(1, 2)."
    return Finding("heads", _split_sentence(sides), first.proof + more, source=first.line, fix=fix)


def _split_sentence(sides: Sequence[_Split]) -> str:
    """Return what is wrong, and what follows for the keys, the values or the queries."""
    splits = {split.side: split for split in sides}
    names = listed([*splits])
    split = f"The heads of the {names} are split without transpose"
    query, key = splits.get("query"), splits.get("key")
    if query is not None and key is not None and query.within_token and key.within_token:
        return f"{split}: attention runs over the heads within each token, and no token attends to another."
    split = f"{split}. view() puts parts of one token into different positions of a head, so"
    if key is None:
        return f"{split} the {names} at a position of a head is not of the token at this position."
    if key.tokens is None or key.tokens == key.total:
        return f"{split} a position of a head is not a token."
    return f"{split} each head sees only {plural(key.tokens, 'token')}."


# -- sizes that coincide ----------------------------------------------------------------------------------------------


def _has_equal_sizes(attention: Attention) -> bool:
    """Return whether two dimensions of the query heads have one size: what one axis does may look like the other."""
    if "q_heads" not in attention.stages:
        return False
    sizes = attention.stages["q_heads"].shape
    return len(set(sizes)) < len(sizes)


def _with_fewer_tokens(evidence: Evidence, attention: Attention) -> tuple[Evidence, Attention, AxisNames]:
    """Return an attention of another run, with all tokens but the last. Raise `LostError` if there is none."""
    try:
        fewer = evidence.with_arguments(evidence.piece(evidence.source, 0, evidence.source.length - 1))
    except NotPossibleError as error:
        raise LostError from error
    if len(fewer.run.attentions) != len(evidence.run.attentions):
        raise LostError
    pairs = zip(evidence.run.attentions, fewer.run.attentions, strict=True)
    for (whole, _), (shorter, names) in pairs:
        if whole is attention:
            return fewer, shorter, names
    raise LostError

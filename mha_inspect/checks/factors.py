"""Follow the tokens of a recorded attention: which rows of a product contain a token.

The result shows it whatever reshapes, norms, rotations and caches are in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compare.replay import LostError, Recorded, again, content_of
from ..graph.attention import Attention, features_place
from ..graph.products import KernelScores, Product
from ..naming.axes import AxisNames
from ..naming.pattern import dims_of
from ..record.ops import TensorRef

Row = tuple[int, int]
"""Index in the batch dimensions of a product (batch items and heads), and row in that batch."""
SIDES = ("query", "key", "value")
_MOST = 64
"""The largest number of slices of a projection to follow."""
_OF_HEADS = frozenset(("heads", "kv_heads", "group"))
"""Names of axes that count heads."""


class NotHereError(LostError):
    """An attention does not have what a check is about."""


@dataclass(frozen=True)
class Way:
    """The steps from one recorded tensor to another, which are run again with changed elements."""

    evidence: Recorded
    source: TensorRef
    target: TensorRef

    @cached_property
    def _before(self) -> Tensor:
        """The target as the steps compute it of what was recorded."""
        return again(self.evidence, self.source, content_of(self.evidence, self.source), self.target)

    def changed_by(self, marks: Tensor, least: float = 0.0) -> Tensor:
        """Return which elements of the target change by more than `least` when the marked ones of the source do."""
        value = content_of(self.evidence, self.source)
        marks = marks.expand(value.shape)
        moved = value.clone()
        marked = value[marks]
        moved[marks] = (marked + 1 + marked.abs()).to(value.dtype)
        before, after = self._before, again(self.evidence, self.source, moved, self.target)
        changed = before != after if least == 0 else (before - after).abs() > least
        # A sum that is NaN before and after says nothing.
        is_nan = after.isnan()
        return changed & ~(before.isnan() & is_nan) if bool(is_nan.any()) else changed


def factors_of(attention: Attention) -> dict[str, TensorRef]:
    """Return the factors of the two products that come from the keys and from the values."""
    return {"key": _factor_of(attention, "key"), "value": _factor_of(attention, "value")}


def _factor_of(attention: Attention, side: str) -> TensorRef:
    """Return the factor of a product that comes from the queries, the keys or the values."""
    product = _product_of(attention, side)
    return product.left if _is_left(attention, side) else product.right


def _product_of(attention: Attention, side: str) -> Product:
    """Return the product that a side is a factor of."""
    return attention.value_product if side == "value" else attention.score_product


def _is_left(attention: Attention, side: str) -> bool:
    """Return whether a side is the left factor of its product."""
    if side == "value":
        return attention.value_first
    if side == "key":
        return attention.key_first
    return not attention.key_first


def _position_axis(product: Product, side: str, *, is_left: bool) -> int:
    """Return the dimension of the positions in a factor of a product.

    The last dimension of the left factor is contracted: in the scores it has features, in the value product positions.
    """
    if isinstance(product, KernelScores):
        return -2
    if side == "value":
        return -1 if is_left else -2
    return -2 if is_left else -1


@dataclass(frozen=True)
class _Start:
    """Where tokens are followed from: the first tensor of a side."""

    source: TensorRef
    features: int
    """The feature dimension."""
    by_head: int | None
    """The dimension that counts heads; None if their features are side by side."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sizes without features and heads, e.g. `batch position`."""
        shape = self.source.shape
        feature_axis = self.features % len(shape)
        sizes = []
        for axis, size in enumerate(shape):
            if axis not in (feature_axis, self.by_head):
                sizes.append(size)
        return tuple(sizes)


def _start_of(evidence: Recorded, attention: Attention, names: AxisNames, side: str, *, from_first: bool) -> _Start:
    """Return where a side begins: after its projection; with `from_first` after the first of successive ones.

    Raise `LostError` without a tensor of tokens and features.
    """
    stage = f"{side[0]}_proj"
    if stage not in attention.stages:
        stage = side
    of_stage = source = attention.stages.get(stage)
    projection = attention.projections.get(side)
    if from_first and attention.earlier.get(side):
        projection = attention.earlier[side][0]
        source = evidence.run.graph.after_projection(projection)
    if source is None or len(source.shape) < 2:
        raise LostError
    features = features_place(projection, len(source.shape))
    if projection is not None and features == 1 and source.shape[1] != projection.output.shape[1]:
        raise LostError  # a view has split the features
    by_head = None
    if source is of_stage:
        by_head = _axis_of_heads(dims_of(names.of_stage(stage))[:-1])
    return _Start(source, features, by_head)


def _axis_of_heads(dims: Sequence[Sequence[str]]) -> int | None:
    """Return the first dimension that counts heads alone; None without one.

    >>> _axis_of_heads([["batch"], ["kv_heads", "group"], ["query"]])
    1
    """
    for axis, words in enumerate(dims):
        if words and _OF_HEADS.issuperset(words):
            return axis
    return None


class Factor:
    """The query, key or value of an attention, from its projection to the product: maps tokens to rows."""

    def __init__(
        self, evidence: Recorded, attention: Attention, names: AxisNames, side: str, *, from_first: bool = False
    ) -> None:
        """Take one side, with `from_first` from the first of several successive projections.

        Raise `LostError` without a projection of tokens or a matrix product.
        """
        if not _product_of(attention, side).multiply.does("product"):
            raise LostError
        start = _start_of(evidence, attention, names, side, from_first=from_first)
        self.evidence = evidence
        self.source = start.source
        self.target = _factor_of(attention, side)
        self.features = start.features
        """The feature dimension of the source."""
        self.by_head = start.by_head
        """The dimension of the source that counts heads; None if their features are side by side."""
        self.tokens = start.tokens
        """The sizes of the source without features and heads."""
        product = _product_of(attention, side)
        is_left = _is_left(attention, side)
        self.rows = _position_axis(product, side, is_left=is_left)
        """The position dimension of the target."""
        self._shared_by = 1
        """How many heads of the product each head of the target serves."""
        if product.op.is_step and not is_left:
            self._shared_by = prod(product.left.shape[:-2]) // max(prod(product.right.shape[:-2]), 1)
        width = names.head_dim
        if side == "value":
            width = self.target.shape[self._features_of_target]
        self._ways: dict[int, Way] = {}
        """The ways to tensors that tokens were followed to, by id."""
        self.width = max(width, 1)
        """The number of features per head."""

    @property
    def _features_of_target(self) -> int:
        """The feature dimension of the target: the last two are positions and features, in either order."""
        return -1 if self.rows == -2 else -2

    def token(self, number: int) -> tuple[int, ...]:
        """Return the index of a token from its flat number."""
        return tuple(int(place) for place in np.unravel_index(number, self.tokens))

    def changed(self, token: tuple[int, ...], start: int = 0, stop: int | None = None) -> set[Row]:
        """Return the rows that change when features of a token change."""
        return self._rows_of(self._changed(token, self.target, start, stop))

    def rows_of(self, token: tuple[int, ...]) -> set[int]:
        """Return the rows that change when a token changes, in any batch item and head."""
        rows = set()
        for _, row in self.changed(token):
            rows.add(row)
        return rows

    def _moved(self, token: tuple[int, ...], start: int, stop: int) -> set[Row]:
        """Return the rows that change when features of a token change places: a norm over all heads stays the same."""
        value = content_of(self.evidence, self.source)
        draw = torch.Generator().manual_seed(0)
        drawn = torch.randn(value.shape, generator=draw).to(value)
        rolled = drawn.clone()
        features = rolled.movedim(self.features, -1)[token][start:stop]
        features.copy_(features.roll(1))
        before = again(self.evidence, self.source, drawn, self.target).double()
        after = again(self.evidence, self.source, rolled, self.target).double()
        rounding = 16 * torch.finfo(value.dtype).eps
        near = max(1e-3, rounding) * float(before.abs().max())
        return self._rows_of((before - after).abs() > near)

    def _rows_of(self, marks: Tensor) -> set[Row]:
        """Return the rows of the target with a marked element."""
        by_row = marks.any(self._features_of_target)
        if self._shared_by > 1:
            by_row = by_row.repeat_interleave(self._shared_by, -2)
        by_group = by_row.reshape(-1, by_row.shape[-1])
        return {(group, row) for group, row in by_group.nonzero().tolist()}

    def _changed(self, token: tuple[int, ...], target: TensorRef, start: int = 0, stop: int | None = None) -> Tensor:
        """Return which elements of a tensor change when features of a token change, or its heads if they are apart."""
        content = content_of(self.evidence, self.source)
        marks = torch.zeros(self.source.shape, dtype=torch.bool)
        features_last = marks.movedim(self.features, -1)
        features_last[self._index_of(token, slice(start, stop))] = True
        if target.id not in self._ways:
            self._ways[target.id] = Way(self.evidence, self.source, target)
        return self._ways[target.id].changed_by(marks.to(content.device))

    def _index_of(self, token: tuple[int, ...], pieces: slice) -> tuple[Any, ...]:
        """Return the index of some features of a token in the source, whose features come last; or of some heads."""
        index: list[Any] = list(token)
        if self.by_head is None:
            index.append(pieces)
        else:
            index.insert(self.by_head, pieces)
        return tuple(index)

    def by_piece(self, token: tuple[int, ...]) -> dict[int, set[Row]]:
        """Return the first feature of each slice of a token that reaches the target, with the rows that contain it.

        A slice is as wide as a head; a packed projection gives the slices of query, key and value. Heads in a dimension
        of their own are counted instead.
        """
        if self.by_head is not None:
            heads = self.source.shape[self.by_head]
            return self._reached(token, range(heads))
        features = self.source.shape[self.features]
        if features > _MOST * self.width:
            return {}
        return self._reached(token, range(0, features, self.width))

    def in_piece(self, token: tuple[int, ...], start: int) -> dict[int, set[Row]]:
        """Return each feature of a slice that begins at `start`, with the rows that contain it."""
        if self.by_head is not None:
            return {}
        count = min(self.width, _MOST)
        return self._reached(token, range(start, start + count))

    def _reached(self, token: tuple[int, ...], starts: range) -> dict[int, set[Row]]:
        """Return the rows that contain each slice of a token that reaches any, by its first feature."""
        reached: dict[int, set[Row]] = {}
        for start in starts:
            rows = self.changed(token, start, start + starts.step)
            if rows:
                reached[start] = rows
        if starts.step == 1 or not _are_alike(reached):
            return reached
        # A norm over all heads mixes the slices: a change that leaves the norm as it is shows them apart.
        return {start: self._moved(token, start, start + starts.step) for start in reached}


def first_key(evidence: Recorded, attention: Attention, names: AxisNames) -> int | None:
    """Return the key that the token of the first query makes, behind those of a cache; None if it is unknown."""
    try:
        key = Factor(evidence, attention, names, "key", from_first=True)
        query = Factor(evidence, attention, names, "query", from_first=True)
        token = _token_of_first_query(attention, key, query)
        if token is None:
            return None
        rows = key.rows_of(key.token(token))
    except LostError:
        return None
    return rows.pop() if len(rows) == 1 else None


def _token_of_first_query(attention: Attention, key: Factor, query: Factor) -> int | None:
    """Return the number of the token that makes the first query; None if it may not be a token of the keys."""
    count = prod(key.tokens)
    if count > prod(query.tokens) > 1:
        return None  # e.g. the last tokens alone are queries
    if count != prod(query.tokens):
        count = 1
    if count == 1 and not _have_same_positions(attention):
        return None  # e.g. a prefix is joined before the projection
    for token in range(count):
        if 0 in query.rows_of(query.token(token)):
            return token
    return 0


def _have_same_positions(attention: Attention) -> bool:
    """Return whether the query and the key that are projected have equal sizes but for features, or one is unknown."""
    query, key = attention.stages.get("query"), attention.stages.get("key")
    if query is None or key is None:
        return True
    return query.shape[:-1] == key.shape[:-1]


def _are_alike(reached: Mapping[int, set[Row]]) -> bool:
    """Return whether several slices reach the same rows."""
    all_rows = list(reached.values())
    return len(all_rows) > 1 and all(rows == all_rows[0] for rows in all_rows)

"""Recompute a stage of a recorded attention after a change in an earlier one.

Only the operations between two stages run, on recorded tensors. The result shows which token each row of a product
contains, whatever reshapes, norms, rotations and caches are in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...graph.attention import Attention, features_place
from ...graph.rerun import between, run_again
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...record.ops import Op, TensorRef
from ...running.subject import Run

Row = tuple[int, int]
"""Index in the batch dimensions of a product (batch items and heads), and row in that batch."""
SIDES = ("query", "key", "value")
_MOST = 64
"""The largest number of slices of a projection to follow."""


class Recorded(Protocol):
    """A run with the values of its tensors."""

    @property
    def run(self) -> Run:
        """The run."""

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a recorded tensor; None if it was not kept."""


@dataclass(frozen=True)
class KeptRun:
    """A run whose operations are replayed."""

    run: Run
    leaves: Mapping[int, Tensor]
    """Values of inputs, parameters and buffers, by tensor id."""

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a recorded tensor; None if it was not kept."""
        value: Tensor | None = self.run.recording.values.get(tensor.id, self.leaves.get(tensor.id))
        return None if value is None else value.detach()


class LostError(Exception):
    """A property of an attention cannot be determined, e.g. because a tensor cannot be recomputed."""


class NotHereError(LostError):
    """An attention does not have what a check is about."""


def content_of(evidence: Recorded, tensor: TensorRef) -> Tensor:
    """Return the value of a recorded tensor. Raise `LostError` if it was not kept."""
    value = evidence.content(tensor)
    if value is None:
        raise LostError
    return value


def again(evidence: Recorded, source: TensorRef, value: Tensor, target: TensorRef) -> Tensor:
    """Return the value of `target` if `source` had this value. Raise `LostError` if it cannot be computed."""
    with torch.no_grad():
        if value.stride() != source.stride and 0 not in source.stride:  # views go by the recorded layout
            laid_out = torch.empty_strided(source.shape, source.stride, dtype=value.dtype, device=value.device)
            value = laid_out.copy_(value)
        return replayed(evidence, {source.id: value}, target)[target.id]


def replayed(evidence: Recorded, values: Mapping[int, Tensor], target: TensorRef) -> dict[int, Tensor]:
    """Return every tensor between these ones and `target`, by id, recomputed; autograd may follow.

    Raise `LostError` if one cannot be computed.
    """
    computed, graph = dict(values), evidence.run.graph
    for op in between(graph.recording, {*values}, target):

        def content(tensor: TensorRef, op: Op = op) -> Tensor:
            value = computed[tensor.id] if tensor.id in computed else content_of(evidence, tensor)
            value = value.clone() if value.is_inference() else value  # autograd rejects one of inference mode
            return _in_memory(evidence, op, value) if op.kind == "write" and tensor is op.inputs[0] else value

        try:
            results = run_again(graph, op, content)
        except Exception as error:  # an operation may raise anything when called directly
            raise LostError from error
        computed.update({number: result for number, result in results.items() if number not in values})
    if target.id not in computed:
        raise LostError
    return computed


def _in_memory(evidence: Recorded, op: Op, value: Tensor) -> Tensor:
    """Return a value as it was in the memory that an operation writes, beside what else is read there afterwards."""
    written = op.inputs[0]
    tensors = [written, *evidence.run.graph.results(op)]
    size = max(map(_end_of, tensors))
    is_laid_out = (value.storage_offset(), value.stride()) == (written.offset, written.stride)
    if is_laid_out and value.untyped_storage().nbytes() >= size * value.itemsize:
        return value
    memory = value.new_zeros(size)
    for tensor in tensors:
        content = evidence.content(tensor)
        if content is not None:
            memory.as_strided(tensor.shape, tensor.stride, tensor.offset).copy_(content)
    in_memory = memory.as_strided(written.shape, written.stride, written.offset)
    in_memory.copy_(value)
    return in_memory


def _end_of(tensor: TensorRef) -> int:
    """Return how many elements of its memory a tensor needs, from the first one on."""
    last = tensor.offset
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (size - 1) * step
    return last + 1


def changed_by(evidence: Recorded, source: TensorRef, marks: Tensor, target: TensorRef) -> Tensor:
    """Return which elements of `target` change when the marked elements of `source` change."""
    value = content_of(evidence, source)
    base = again(evidence, source, value, target)
    moved = again(evidence, source, torch.where(marks, value + 1 + value.abs(), value), target)
    return (base != moved) & ~(base.isnan() & moved.isnan())


def factors_of(attention: Attention) -> dict[str, TensorRef]:
    """Return the factors of the two products that come from the keys and from the values."""
    scores, values = attention.score_product, attention.value_product
    return {
        "key": scores.left if attention.key_first else scores.right,
        "value": values.left if attention.value_first else values.right,
    }


class Factor:
    """The query, key or value of an attention, from its projection to the product: maps tokens to rows."""

    def __init__(
        self, evidence: Recorded, attention: Attention, names: AxisNames, side: str, *, from_first: bool = False
    ) -> None:
        """Take one side, with `from_first` from the first of several successive projections.

        Raise `LostError` without a projection of tokens or a matrix product.
        """
        product = attention.value_product if side == "value" else attention.score_product
        stage = f"{side[0]}_proj" if f"{side[0]}_proj" in attention.stages else side
        source = attention.stages.get(stage)
        projection = attention.projections.get(side)
        if from_first and attention.earlier.get(side):
            projection = attention.earlier[side][0]
            source = evidence.run.graph.after_projection(projection)
        if source is None or not product.multiply.does("product") or len(source.shape) < 2:
            raise LostError
        self.features = features_place(projection, len(source.shape))
        """The feature dimension of the source."""
        if projection is not None and self.features == 1 and source.shape[1] != projection.output.shape[1]:
            raise LostError  # a view has split the features
        left = {"query": not attention.key_first, "key": attention.key_first, "value": attention.value_first}[side]
        self.evidence, self.source, self.target = evidence, source, product.left if left else product.right
        # The contracted dimension is the last of the left factor; in the value product it counts positions.
        self.rows = -2 if left != (side == "value") else -1
        """The position dimension of the target."""
        self.width = max(self.target.shape[-3 - self.rows] if side == "value" else names.head_dim, 1)
        """The number of features per head."""
        axes = dims_of(names.of_stage(stage))[:-1] if source is attention.stages.get(stage) else []
        by_head = (place for place, dim in enumerate(axes) if dim and {*dim} <= {"heads", "kv_heads", "group"})
        self.by_head = next(by_head, None)
        """The dimension of the source that counts heads; None if their features are side by side."""
        apart = (self.features % len(source.shape), self.by_head)
        self.tokens = tuple(size for place, size in enumerate(source.shape) if place not in apart)

    def token(self, number: int) -> tuple[int, ...]:
        """Return the index of a token from its flat number."""
        return tuple(int(place) for place in np.unravel_index(number, self.tokens))

    def changed(self, token: tuple[int, ...], start: int = 0, stop: int | None = None) -> set[Row]:
        """Return the rows that change when features of a token change."""
        return self._rows_of(self._changed(token, self.target, start, stop))

    def _moved(self, token: tuple[int, ...], start: int, stop: int) -> set[Row]:
        """Return the rows that change when features of a token change places: a norm over all heads stays the same."""
        value = content_of(self.evidence, self.source)
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        rolled = drawn.clone()
        features = rolled.movedim(self.features, -1)[token][start:stop]
        features.copy_(features.roll(1))
        base = again(self.evidence, self.source, drawn, self.target).double()
        moved = again(self.evidence, self.source, rolled, self.target).double()
        near = max(1e-3, 16 * torch.finfo(value.dtype).eps) * float(base.abs().max())
        return self._rows_of((base - moved).abs() > near)

    def _rows_of(self, marks: Tensor) -> set[Row]:
        by_row = marks.any(dim=-1 if self.rows == -2 else -2)
        return {(group, row) for group, row in by_row.reshape(-1, by_row.shape[-1]).nonzero().tolist()}

    def changes(self, token: tuple[int, ...], target: TensorRef) -> bool:
        """Return whether a tensor changes with a token."""
        return bool(self._changed(token, target).any())

    def _changed(self, token: tuple[int, ...], target: TensorRef, start: int = 0, stop: int | None = None) -> Tensor:
        marks, index, pieces = torch.zeros(self.source.shape, dtype=torch.bool), list[Any](token), slice(start, stop)
        index.insert(len(index) if self.by_head is None else self.by_head, pieces)
        marks.movedim(self.features, -1)[tuple(index)] = True
        return changed_by(self.evidence, self.source, marks.to(content_of(self.evidence, self.source).device), target)

    def by_piece(self, token: tuple[int, ...]) -> dict[int, set[Row]]:
        """Return the first feature of each slice of a token that reaches the target, with the rows that contain it.

        A slice is as wide as a head; a packed projection gives the slices of query, key and value. Heads in a dimension
        of their own are counted instead.
        """
        if self.by_head is not None:
            return self._reached(token, range(self.source.shape[self.by_head]))
        features = self.source.shape[self.features]
        starts = range(0, features, self.width) if features <= _MOST * self.width else range(0)
        return self._reached(token, starts)

    def in_piece(self, token: tuple[int, ...], start: int) -> dict[int, set[Row]]:
        """Return each feature of a slice that begins at `start`, with the rows that contain it."""
        return self._reached(token, range(start, start + min(self.width, _MOST) * (self.by_head is None)))

    def _reached(self, token: tuple[int, ...], starts: range) -> dict[int, set[Row]]:
        """Return the rows that contain each slice of a token that reaches any, by its first feature."""
        reached: dict[int, set[Row]] = {}
        for start in starts:
            rows = self.changed(token, start, start + starts.step)
            if rows:
                reached[start] = rows
        if starts.step > 1 and len(reached) > 1 and len({*map(frozenset, reached.values())}) == 1:
            return {start: self._moved(token, start, start + starts.step) for start in reached}
        return reached


def first_key(evidence: Recorded, attention: Attention, names: AxisNames) -> int | None:
    """Return the key that the token of the first query makes, behind those of a cache; None if it is unknown."""
    try:
        key = Factor(evidence, attention, names, "key", from_first=True)
        query = Factor(evidence, attention, names, "query", from_first=True)
        token = _token_of_first_query(attention, key, query)
        if token is None:
            return None
        rows = {row for _, row in key.changed(key.token(token))}
    except LostError:
        return None
    return rows.pop() if len(rows) == 1 else None


def _token_of_first_query(attention: Attention, key: Factor, query: Factor) -> int | None:
    """Return the number of the token that makes the first query; None if it may not be a token of the keys."""
    count = prod(key.tokens)
    if count != prod(query.tokens):
        count = 1
    if count == 1:
        shapes = {attention.stages[side].shape[:-1] for side in ("query", "key") if side in attention.stages}
        if len(shapes) > 1:
            return None  # e.g. a prefix is joined before the projection
    for token in range(count):
        if any(row == 0 for _, row in query.changed(query.token(token))):
            return token
    return 0

"""Recompute a stage of a recorded attention after a change in an earlier one.

Only the operations between two stages run, on recorded tensors. The result shows which token each row of a product
contains, whatever reshapes, norms, rotations and caches are in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.rerun import between, results_of
from ...naming.axes import AxisNames
from ...record.ops import Op, Recording, TensorRef
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


class LostError(Exception):
    """A property of an attention cannot be determined, e.g. because a tensor cannot be recomputed."""


def content_of(evidence: Recorded, tensor: TensorRef) -> Tensor:
    """Return the value of a recorded tensor. Raise `LostError` if it was not kept."""
    value = evidence.content(tensor)
    if value is None:
        raise LostError
    return value


def again(evidence: Recorded, source: TensorRef, value: Tensor, target: TensorRef) -> Tensor:
    """Return the value of `target` if `source` had this value. Raise `LostError` if it cannot be computed."""
    with torch.no_grad():
        return replayed(evidence, {source.id: value}, target)[target.id]


def replayed(evidence: Recorded, given: Mapping[int, Tensor], target: TensorRef) -> dict[int, Tensor]:
    """Return every tensor between the given ones and `target`, by id, recomputed; autograd may follow.

    Raise `LostError` if one cannot be computed.
    """
    known = dict(given)
    memory = _Memory(evidence.run.recording)
    for op in between(evidence.run.recording, {*given}, target):

        def content(tensor: TensorRef, op: Op = op) -> Tensor:
            value = known[tensor.id] if tensor.id in known else memory.read(tensor, content_of(evidence, tensor))
            # The recorded tensor must not be overwritten, and autograd rejects one of inference mode.
            return value.clone() if op.kind == "write" or value.is_inference() else value

        try:
            results = zip(op.outputs, results_of(op, content), strict=False)
            known.update({tensor.id: result for tensor, result in results if tensor.id not in given})
            if op.kind == "write":
                memory.write(op, known)
        except Exception as error:  # an operation may raise anything when called directly
            raise LostError from error
    if target.id not in known and not memory.has(target):
        raise LostError
    known.setdefault(target.id, memory.read(target, content_of(evidence, target)))
    return known


class _Memory:
    """What recomputed operations wrote into memory that later tensors read, such as a cache."""

    def __init__(self, recording: Recording) -> None:
        self._producers = recording.producers
        self._writes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Storage to the addresses of each write and the numbers written, in order."""
        self._written: set[int] = set()

    def write(self, op: Op, known: Mapping[int, Tensor]) -> None:
        """Note what a write operation wrote."""
        self._written.add(op.index)
        written = known[op.output.id]
        self._writes.setdefault(op.output.storage, []).append((_addresses(op.output).to(written.device), written))

    def has(self, tensor: TensorRef) -> bool:
        """Return whether a tensor was read from memory after a write operation that was recomputed."""
        return self._producers.get(tensor.id) in self._written

    def read(self, tensor: TensorRef, value: Tensor) -> Tensor:
        """Return the recorded value of a tensor, with what was written into its memory since in its place."""
        if not self.has(tensor):
            return value
        places = _addresses(tensor).to(value.device)
        size = 1 + max(int(at.max()) for at, _ in [*self._writes[tensor.storage], (places, value)])
        flat = value.new_empty(size)
        flat[places] = value
        for at, numbers in self._writes[tensor.storage]:
            flat[at] = numbers.to(flat.dtype)
        return flat[places]


def _addresses(tensor: TensorRef) -> Tensor:
    """Return the position of each element of a tensor in its storage."""
    places = torch.full(tensor.shape, tensor.offset)
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
        places += (torch.arange(size) * step).view(-1, *[1] * (len(tensor.shape) - dim - 1))
    return places


def changed_by(evidence: Recorded, source: TensorRef, marks: Tensor, target: TensorRef) -> Tensor:
    """Return which elements of `target` change when the marked elements of `source` change."""
    value = content_of(evidence, source)
    base = again(evidence, source, value, target)
    other = again(evidence, source, torch.where(marks, value + 1 + value.abs(), value), target)
    return (base != other) & ~(base.isnan() & other.isnan())


class Factor:
    """The query, key or value of an attention, from its projection to the product: maps tokens to rows."""

    def __init__(self, evidence: Recorded, attention: Attention, names: AxisNames, side: str) -> None:
        """Take one side. Raise `LostError` without a projection of tokens or a matrix product."""
        product = attention.value_product if side == "value" else attention.score_product
        source = attention.stages.get(f"{side[0]}_proj") or attention.stages.get(side)
        projection = attention.projections.get(side)
        convolved = projection is not None and projection.base_name == "convolution"
        if source is None or not product.multiply.does("product") or len(source.shape) < 2 or convolved:
            raise LostError
        left = {"query": not attention.key_first, "key": attention.key_first, "value": attention.value_first}[side]
        self.evidence, self.source, self.target = evidence, source, product.left if left else product.right
        # The contracted dimension is the last of the left factor; in the value product it counts positions.
        self.rows = -2 if left != (side == "value") else -1
        """The position dimension of the target."""
        self.width = max(names.head_dim, 1)
        """The number of features per head."""
        self.tokens = source.shape[:-1]

    def token(self, number: int) -> tuple[int, ...]:
        """Return the index of a token from its flat number."""
        return tuple(int(place) for place in np.unravel_index(number, self.tokens))

    def changed(self, token: tuple[int, ...], start: int = 0, stop: int | None = None) -> set[Row]:
        """Return the rows that change when features of a token change."""
        marks = torch.zeros(self.source.shape, dtype=torch.bool)
        marks[token][start:stop] = True
        marks = marks.to(content_of(self.evidence, self.source).device)
        by_row = changed_by(self.evidence, self.source, marks, self.target).any(dim=-1 if self.rows == -2 else -2)
        return {(group, row) for group, row in by_row.reshape(-1, by_row.shape[-1]).nonzero().tolist()}

    def by_piece(self, token: tuple[int, ...]) -> dict[int, set[Row]]:
        """Return the first feature of each slice of a token that reaches the target, with the rows that contain it.

        A slice is as wide as a head; a packed projection gives the slices of query, key and value.
        """
        features = self.source.shape[-1]
        starts = range(0, features, self.width) if features <= _MOST * self.width else ()
        reached = {start: self.changed(token, start, start + self.width) for start in starts}
        return {start: rows for start, rows in reached.items() if rows}


def first_key(evidence: Recorded, attention: Attention, names: AxisNames) -> int | None:
    """Return the key that the first token of a run makes, behind those of a cache; None if it is unknown."""
    try:
        factor = Factor(evidence, attention, names, "key")
        rows = {row for _, row in factor.changed(factor.token(0))}
    except LostError:
        return None
    return rows.pop() if len(rows) == 1 else None

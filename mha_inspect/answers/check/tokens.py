"""Follow one token through the steps of a recorded attention: change it in a stage, and compute what comes of it again.

Nothing is run but the few operations between two stages, on the numbers that the recording kept. So it is known which
token each row of a product holds, whatever moves, norms and rotations stand in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.dataflow import made_of
from ...graph.evaluate import run_again
from ...graph.products import Product
from ...naming.axes import AxisNames
from ...record.ops import Op, Recording, TensorRef
from ...running.run import Run
from ...running.subject import Subject

Row = tuple[int, int]
"""Group (what the product counts as batch: sequences and heads) and row in it."""
_MOST = 64
"""Pieces of a projection that are followed."""


class LostError(Exception):
    """A tensor cannot be computed again."""


class Flow:
    """Computes tensors of a recording again, with others changed."""

    def __init__(self, run: Run, subject: Subject) -> None:
        self.recording = run.recording
        self.values: dict[int, Tensor] = {**subject.leaves(run.recording), **run.recording.values}
        """By the id of a tensor."""

    def value(self, tensor: TensorRef) -> Tensor:
        """Return the content of a tensor. Raises `LostError` where it was not kept."""
        if tensor.id not in self.values:
            raise LostError
        return self.values[tensor.id].detach()

    def again(self, changed: dict[int, Tensor], target: TensorRef) -> Tensor:
        """Return the content of a tensor where others are as given. Raises `LostError` where it cannot be computed."""
        known = dict(changed)
        hangs = between(self.recording, changed, target)
        if not hangs and target.id not in known:
            raise LostError
        for op in hangs:
            if op.makes_result or op.base_name in ("view", "_unsafe_view", "_reshape_alias"):
                # What was changed may lie otherwise in memory than what ran.
                known[op.output.id] = known[op.inputs[0].id].reshape(op.output.shape)
                continue
            try:
                with torch.no_grad():
                    results = run_again(op, self._reading(known, is_written=op.kind == "write"))
            except Exception as error:  # whatever an operation that is called from outside may raise
                raise LostError from error
            known.update({tensor.id: value for tensor, value in results if tensor.id not in changed})
        return known[target.id]

    def _reading(self, known: dict[int, Tensor], *, is_written: bool) -> Callable[[TensorRef], Tensor]:
        """Return what reads a tensor: a copy where it is written into, which happens once, in the run."""

        def content(tensor: TensorRef) -> Tensor:
            value = known[tensor.id] if tensor.id in known else self.value(tensor)
            return value.clone() if is_written else value

        return content


@dataclass(frozen=True)
class Factor:
    """One factor of a product and the stage that it is made of: which token of the one is which row of the other."""

    flow: Flow
    source: TensorRef
    """`... features`: what a projection gave."""
    target: TensorRef
    rows: int
    """The dimension of the target that counts positions, from behind."""
    width: int
    """Features of a head."""

    @cached_property
    def base(self) -> Tensor:
        """The content of the target, computed again from the source as it was."""
        return self.flow.again({self.source.id: self.flow.value(self.source)}, self.target)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The shape of the source without its features."""
        return self.source.shape[:-1]

    def token(self, number: int) -> tuple[int, ...]:
        """Return the index of a token by its number."""
        index = list[int]()
        for size in reversed(self.tokens[1:]):
            number, place = divmod(number, size)
            index.insert(0, place)
        return (number, *index) if self.tokens else ()

    def changed(self, token: tuple[int, ...], start: int = 0, stop: int | None = None) -> set[Row]:
        """Return the rows that move where features of a token are others."""
        source = self.flow.value(self.source).clone()
        piece = source[token][start:stop]
        source[token][start:stop] = piece + 1 + piece.abs()
        content = self.flow.again({self.source.id: source}, self.target)
        by_row = _differing(content, self.base).any(dim=-1 if self.rows == -2 else -2)
        by_row = by_row.reshape(-1, by_row.shape[-1])
        return {(int(group), int(row)) for group, row in by_row.nonzero().tolist()}

    def by_piece(self, token: tuple[int, ...]) -> dict[int, set[Row]]:
        """Return where each piece of a token's features begins that reaches the target, and the rows that it is in.

        A piece is as wide as a head, were those side by side; those of several projections are among them.
        """
        features = self.source.shape[-1]
        starts = range(0, features, self.width) if features <= _MOST * self.width else ()
        reached = {start: self.changed(token, start, start + self.width) for start in starts}
        return {start: rows for start, rows in reached.items() if rows}


class Tokens:
    """The three factors of an attention, and where each token of them is."""

    def __init__(self, flow: Flow, attention: Attention, names: AxisNames) -> None:
        self.flow, self.attention, self.names = flow, attention, names

    def factor(self, name: str) -> Factor:
        """Return the query, key or value from its projection to the product. Raises `LostError` without one."""
        attention = self.attention
        product = attention.value_product if name == "value" else attention.score_product
        source = attention.stages.get(f"{name[0]}_proj") or attention.stages.get(name)
        projection = attention.projections.get(name)
        if source is None or not product.multiply.does("product") or len(source.shape) < 2:
            raise LostError
        if projection is not None and projection.base_name == "convolution":
            raise LostError
        left = {"query": not attention.key_first, "key": attention.key_first, "value": attention.value_first}[name]
        target = product.left if left else product.right
        # The contracted dimension is the last of the left factor: of keys that are averaged over it is the positions.
        rows = (-2 if left else -1) if name != "value" else (-1 if left else -2)
        return Factor(self.flow, source, target, rows, max(self.names.head_dim, 1))

    def weights(self) -> tuple[Tensor, int]:
        """Return the factor that meets the values, and the dimension of it that the product sums over."""
        product: Product = self.attention.value_product
        if not product.multiply.does("product"):
            raise LostError
        left = not self.attention.value_first
        return self.flow.value(product.left if left else product.right), (-1 if left else -2)

    def concat_rows(self, rows: Iterable[Row]) -> set[tuple[int, ...]]:
        """Return the tokens of concat that move where these rows of the context are others."""
        context = self.attention.value_product.op.output
        target = self.attention.stages.get("concat")
        if target is None:
            raise LostError
        value = self.flow.value(context)
        shape = value.shape
        scores = self.attention.score_product.op.output.shape
        queries = (
            scores[-1] if self.attention.key_first else scores[-2],
            shape[-1] if self.attention.value_first else shape[-2],
        )
        if prod(scores[:-2]) != prod(shape[:-2]) or queries[0] != queries[1]:
            raise LostError  # chunks that overlap: a row of the one product is none of the other
        flat = value.reshape(-1, *shape[-2:]).clone()
        for group, row in rows:
            index = (group, row) if not self.attention.value_first else (group, slice(None), row)
            if group >= flat.shape[0]:
                raise LostError
            flat[index] = flat[index] + 1 + flat[index].abs()
        base = self.flow.again({context.id: value}, target)
        changed = self.flow.again({context.id: flat.reshape(shape)}, target)
        return {tuple(index) for index in _differing(changed, base).any(-1).nonzero().tolist()}


def _differing(left: Tensor, right: Tensor) -> Tensor:
    """Whether each number is another one; a NaN is like any other."""
    return (left != right) & ~(left.isnan() & right.isnan())


def between(recording: Recording, sources: Iterable[int], target: TensorRef) -> list[Op]:
    """Return the operations that a tensor hangs on and that hang on one of the sources, in order."""
    needed: dict[int, Op] = {}
    reached = set(sources)
    queue = [target]
    while queue:
        tensor = queue.pop()
        op = recording.producer(tensor)
        if tensor.id in reached or op is None or op.index in needed:
            continue
        needed[op.index] = op
        queue += op.inputs
    ordered = [needed[index] for index in sorted(needed)]
    made_ids = made_of(reached, ordered)
    return [op for op in ordered if any(tensor.id in made_ids for tensor in op.inputs)] if target.id in made_ids else []

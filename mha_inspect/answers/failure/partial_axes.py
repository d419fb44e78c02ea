"""The names of axes in a recording that ends before its attention does.

`naming.axes` starts from the product of the scores, which there may not be yet. The evidence that is left: what a
projection takes in is `batch sequence embed`, the view that divides what it gives is `heads head_dim`, and once a call
says which operand is the query and which the key, the sequence of each has its own name. What a variable is called is
no evidence. `q_proj(x).view(2, 5, 8, 64)` of an x of [2, 5, 512] is `batch sequence heads head_dim`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...graph.axis import Axis, Dim, resolve, size_of
from ...graph.dataflow import Graph
from ...naming.tokens import name_dimension, write_dimension
from ...record.ops import TensorRef

Whose = Literal["", "query", "key", "scores"]
"""Whose sequence a tensor has: unknown, the queries', the keys', or queries in rows and keys in columns."""

_BATCH_FIRST = ("batch", "sequence")


@dataclass(frozen=True)
class PartialAxes:
    """Axes with names, as far as there is evidence."""

    graph: Graph
    groups: Sequence[tuple[str, Dim]]
    """Names, and the axes that have them."""
    query: frozenset[Axis] = frozenset()
    """The sequence of the queries."""
    query_heads: int = 0
    """How many heads the queries have; 0 where that is not known."""

    def of(self, tensor: TensorRef, side: Whose = "") -> str:
        """Return what each dimension is, as an einops pattern."""
        groups = [(self._called(name, group, side), group) for name, group in self.groups]
        dims, sequences = self.graph.dimensions.of(tensor), _named(self.groups, "sequence")
        for axis in {axis for dim in dims for axis in resolve(dim)}:
            if set(resolve(axis.twins)) & sequences:
                groups.append(("key", (axis,)))  # the other sequence of a self-attention
        return " ".join(write_dimension(name_dimension(dim, groups)) for dim in dims)

    def _called(self, name: str, group: Dim, side: Whose) -> str:
        axes = resolve(group)
        if name == "sequence" and side == "scores":
            return "query" if self.query.intersection(axes) else "key"
        if name == "heads" and side == "key" and self.query_heads not in (0, size_of(axes)):
            return "kv_heads"
        return side or name if name == "sequence" else name


def axes_of(
    graph: Graph,
    *,
    batch_first: bool = True,
    first: Iterable[TensorRef] = (),
    factors: Iterable[TensorRef] = (),
    query: TensorRef | None = None,
) -> PartialAxes:
    """Return the axes that there is evidence for.

    Args:
        graph: of the recording.
        batch_first: whether the failing layer takes its batch first.
        first: what the failing layer takes in.
        factors: queries, keys and values with their heads.
        query: the queries among them, where they are known.
    """
    groups = _groups(graph, batch_first, first)
    for factor in factors:
        groups = _in_order(groups, graph.dimensions.of(factor))
    if query is None:
        return PartialAxes(graph, groups)
    axes = {axis for dim in graph.dimensions.of(query) for axis in dim}
    heads = next((dim for name, group in groups if name == "heads" and axes.intersection(dim := resolve(group))), ())
    return PartialAxes(graph, groups, frozenset(axes & _named(groups, "sequence")), size_of(heads) if heads else 0)


def _groups(graph: Graph, batch_first: bool, first: Iterable[TensorRef]) -> list[tuple[str, Dim]]:
    """Name the heads by what divides a projection, then positions and features of what layers take in."""
    claims, dims = _Claims(), graph.dimensions.of
    projections = [op for op in graph.recording.ops if graph.is_projection(op)]
    for op in projections:
        heads, head_dim = _divided(graph, graph.after_call(op))
        claims.add("heads", heads)
        claims.add("head_dim", head_dim)
    for tensor in first:
        claims.add_activation(dims(tensor), _BATCH_FIRST if batch_first else _BATCH_FIRST[::-1])
    for op in projections:
        source = graph.before_call(op, graph.projected(op))
        origin = graph.before_moves(source)
        claims.add_activation(dims(origin if len(origin.shape) == 3 else source), _BATCH_FIRST)
    for op in graph.recording.ops:
        if op.base_name == "embedding":
            claims.add_positions(dims(op.inputs[1]), _BATCH_FIRST)
    return claims.groups


class _Claims:
    """Names for axes, the first claim to an axis holding."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, Dim]] = []
        self._known: set[Axis] = set()

    def add(self, name: str, axes: Iterable[Axis]) -> None:
        """Name axes that have no name. Of those of size one a batch alone is named: a view puts others anywhere."""
        dim = resolve(tuple(axes))
        is_batch = name == "batch" and len(dim) == 1
        if dim and (is_batch or size_of(dim) > 1) and self._known.isdisjoint(dim):
            self.groups.append((name, dim))
            self._known.update(dim)

    def add_activation(self, dims: Sequence[Dim], order: Sequence[str]) -> None:
        """Name the dimensions of what a layer takes in."""
        if 2 <= len(dims) <= 3:
            self.add_positions(dims[:-1], order)
            self.add("embed", dims[-1])

    def add_positions(self, dims: Sequence[Dim], order: Sequence[str]) -> None:
        """Name what stands before the width: batch and sequence, side by side in one dimension or each in its own."""
        axes = [axis for dim in dims for axis in dim]
        if len(dims) == 2:
            known = {name for name, group in self.groups if not set(axes).isdisjoint(resolve(group))}
            for name, dim in zip(order, dims, strict=True):
                if name not in known:
                    self.add(name, dim)
        elif len(dims) == 1 and len(axes) == 2:
            for name, axis in zip(order, axes, strict=True):
                self.add(name, (axis,))
        elif len(axes) == 1:
            self.add("sequence", axes)


def _divided(graph: Graph, projected: TensorRef) -> tuple[Dim, Dim]:
    """Return heads and features of a head, from the first view that divides a width in two; empty without one."""
    dims = graph.dimensions.of
    width = set(dims(projected)[-1]) if projected.shape else set()
    for op, _ in graph.forward(projected, lambda op: op.kind in ("view", "copy") or op.pointwise):
        if op.kind != "view" or op.base_name in ("split", "split_with_sizes") or op.output.id == projected.id:
            continue
        parts, read = (
            [part for dim in dims(tensor) if (part := tuple(axis for axis in dim if axis in width))]
            for tensor in (op.output, op.inputs[0])
        )
        if len(parts) == len(read):
            continue
        sizes = [size_of(part) for part in parts]
        if len(parts) == 3 and sizes[0] in (2, 3):
            parts = parts[1:]
        elif len(parts) == 3 and sizes[1] in (2, 3):
            parts = [parts[0], parts[2]]
        elif len(parts) == 2 and len(parts[1]) > 1 and parts[1][0].size == 3:
            parts[1] = parts[1][1:]  # query, key and value of a head side by side
        if len(parts) == 2:
            return parts[0], parts[1]
    return (), ()


def _in_order(groups: list[tuple[str, Dim]], dims: Sequence[Dim]) -> list[tuple[str, Dim]]:
    """Swap batch and sequence where an operand shows it: the batch stands with the heads, and the sequence does not."""
    before, after = ({axis for dim in part for axis in dim} for part in (dims[:-2], dims[-2:]))
    heads, batch, sequence = (_named(groups, name) for name in ("heads", "batch", "sequence"))
    if not (heads & before and sequence & before and batch & after):
        return groups
    swapped = {"batch": "sequence", "sequence": "batch"}
    return [(swapped.get(name, name), group) for name, group in groups]


def _named(groups: Sequence[tuple[str, Dim]], name: str) -> set[Axis]:
    return {axis for known, group in groups if known == name for axis in resolve(group)}

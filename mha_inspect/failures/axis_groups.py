"""Name axes where an attention failed: `batch sequence embed` of inputs, and `heads head_dim` of split projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ..graph.axis import Axis, Dim, resolve, size_of
from ..graph.dataflow import Graph
from ..record.ops import Op, TensorRef

Groups = list[tuple[str, Dim]]
"""Axis names with their axes."""


def axes_named(groups: Groups, name: str) -> set[Axis]:
    """Return the axes that have a name."""
    axes: set[Axis] = set()
    for title, group in groups:
        if title == name:
            axes.update(resolve(group))
    return axes


def axes_of(dims: Iterable[Dim]) -> set[Axis]:
    """Return the axes of several dimensions."""
    return set(chain.from_iterable(dims))


def groups_of(graph: Graph, layers: Iterable[TensorRef], order: tuple[str, str]) -> Groups:
    """Name heads from the views that split projections, then the positions and features of layer inputs.

    The first name of an axis wins. `order` is the order of batch and sequence in the failing layer.
    """
    named = _NamedAxes(graph)
    projections = [op for op in graph.recording.ops if graph.is_projection(op)]
    for op in projections:
        split = _split_of(graph, graph.after_call(op))
        if split is not None:
            named.add("heads", split.heads)
            named.add("head_dim", split.head_dim)
    for tensor in layers:
        named.add_activation(tensor, order)
    for op in projections:
        named.add_activation(_input_of(graph, op), ("batch", "sequence"))
    return named.groups


def _input_of(graph: Graph, projection: Op) -> TensorRef:
    """Return the input of a projection: the tensor before it was reshaped, if that is `batch sequence embed`."""
    source = graph.before_call(projection, graph.projected(projection))
    origin = graph.before_moves(source)
    if len(origin.shape) == 3:
        return origin
    return source


class _NamedAxes:
    """Names of axes; the first name of an axis wins."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.groups: Groups = []

    def add(self, name: str, dim: Dim) -> None:
        """Name the axes of a dimension, if none of them has a name."""
        axes = resolve(dim)
        if not axes:
            return
        # An axis of size one is named only if it is the batch: a view may put others anywhere.
        is_batch = name == "batch" and len(axes) == 1
        if size_of(axes) <= 1 and not is_batch:
            return
        if not self._names_of(axes):
            self.groups.append((name, axes))

    def _names_of(self, axes: Iterable[Axis]) -> set[str]:
        """Return the names that any of these axes has."""
        names = set()
        for name, group in self.groups:
            if not set(group).isdisjoint(axes):
                names.add(name)
        return names

    def add_activation(self, tensor: TensorRef, order: tuple[str, str]) -> None:
        """Name the axes of `batch sequence embed`, or of `sequence embed`; of other tensors nothing."""
        dims = self._graph.dimensions.of(tensor)
        if len(dims) == 3:
            first, second, width = dims
            self._add_positions(order, (first, second))
            self.add("embed", width)
        elif len(dims) == 2:
            positions, width = dims
            if len(positions) == 1:
                self.add("sequence", positions)
            self.add("embed", width)

    def _add_positions(self, order: tuple[str, str], positions: tuple[Dim, Dim]) -> None:
        """Name batch and sequence in this order, without a name that one of their axes already has."""
        present = self._names_of(axes_of(positions))
        for name, dim in zip(order, positions, strict=True):
            if name not in present:
                self.add(name, dim)


@dataclass(frozen=True)
class _Split:
    """The axes of a width that is split into heads."""

    heads: Dim
    head_dim: Dim


def _split_of(graph: Graph, projected: TensorRef) -> _Split | None:
    """Return the axes of heads and head features from the first view that splits a width; None without one."""
    if not projected.shape:
        return None
    width = set(graph.dimensions.of(projected)[-1])
    for op, _ in graph.forward(projected, _passes_features):
        if op.kind != "view" or op.output.id == projected.id:
            continue
        if op.base_name in ("split", "split_with_sizes"):
            continue
        before = _parts_within(graph.dimensions.of(op.inputs[0]), width)
        after = _parts_within(graph.dimensions.of(op.output), width)
        if len(after) == len(before):
            continue
        parts = _without_pack(after)
        if len(parts) == 2:
            return _Split(*parts)
    return None


def _passes_features(op: Op) -> bool:
    """Return whether an operation keeps the features of its input: a view, a copy, or one element by element."""
    return op.pointwise or op.kind in ("view", "copy")


def _parts_within(dims: Iterable[Dim], width: set[Axis]) -> list[Dim]:
    """Return the axes of a width, by dimension: heads and head_dim of `batch sequence heads head_dim`."""
    parts = []
    for dim in dims:
        part = tuple(axis for axis in dim if axis in width)
        if part:
            parts.append(part)
    return parts


def _without_pack(parts: list[Dim]) -> list[Dim]:
    """Return the parts of a width without the axis of packed projections: heads and head_dim of `3 heads head_dim`."""
    if len(parts) == 3:
        return _without_pack_beside(parts)
    if len(parts) == 2:
        heads, features = parts
        is_packed_by_head = len(features) > 1 and features[0].size == 3
        if is_packed_by_head:
            return [heads, features[1:]]
    return parts


def _without_pack_beside(parts: list[Dim]) -> list[Dim]:
    """Return two of three parts, without query, key and value: packed before the heads, or inside them."""
    first, *rest = parts
    return rest if size_of(first) in (2, 3) else parts


def in_order(groups: Groups, factors: Sequence[Sequence[Dim]]) -> Groups:
    """Swap the names if the last two dimensions of factors contain the batch and not the sequence, and never the other.

    `factors` has the dimensions of each.
    """
    orders = [_is_in_order(groups, dims) for dims in factors]
    if False not in orders or True in orders:
        return groups
    swapped = {"batch": "sequence", "sequence": "batch"}
    return [(swapped.get(name, name), group) for name, group in groups]


def _is_in_order(groups: Groups, dims: Sequence[Dim]) -> bool | None:
    """Return whether the batch stands before the sequence, with the heads; None if not both are found there."""
    outer = axes_of(dims[:-2])
    matrix = axes_of(dims[-2:])
    batch, sequence = axes_named(groups, "batch"), axes_named(groups, "sequence")
    if outer.isdisjoint(axes_named(groups, "heads")):
        return None
    if not outer.isdisjoint(sequence) and not matrix.isdisjoint(batch):
        return False
    if not outer.isdisjoint(batch) and not matrix.isdisjoint(sequence):
        return True
    return None

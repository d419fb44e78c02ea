"""Name axes where an attention failed: `batch sequence embed` of inputs, and `heads head_dim` of split projections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ...graph.axis import Axis, Dim, resolve, size_of
from ...graph.dataflow import Graph
from ...record.ops import Op, TensorRef

Groups = list[tuple[str, Dim]]
"""Axis names with their axes."""


def axes_named(groups: Groups, name: str) -> set[Axis]:
    """Return the axes that have a name."""
    return set(chain.from_iterable(resolve(group) for title, group in groups if title == name))


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
        heads, head_dim = _split_of(graph, graph.after_call(op))
        named.add("heads", heads)
        named.add("head_dim", head_dim)
    for tensor in layers:
        named.add_activation(tensor, order)
    for op in projections:
        named.add_activation(_input_of(graph, op), ("batch", "sequence"))
    return named.groups


def _input_of(graph: Graph, projection: Op) -> TensorRef:
    """Return the input of a projection: the tensor before it was reshaped, if that is `batch sequence embed`."""
    source = graph.before_call(projection, graph.projected(projection))
    origin = graph.before_moves(source)
    return origin if len(origin.shape) == 3 else source


class _NamedAxes:
    """Names of axes; the first name of an axis wins."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.groups: Groups = []

    def add(self, name: str, dim: Dim) -> None:
        """Name the axes of a dimension, if none of them has a name."""
        dim = resolve(dim)
        # An axis of size one is named only if it is the batch: a view may put others anywhere.
        counts = size_of(dim) > 1 or (name == "batch" and len(dim) == 1)
        if dim and counts and not any(set(dim).intersection(group) for _, group in self.groups):
            self.groups.append((name, dim))

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
        axes = axes_of(positions)
        given = {name for name, group in self.groups if axes.intersection(group)}
        for name, dim in zip(order, positions, strict=True):
            if name not in given:
                self.add(name, dim)


def _split_of(graph: Graph, projected: TensorRef) -> tuple[Dim, Dim]:
    """Return the axes of heads and head features from the first view that splits a width; empty without one."""
    dims = graph.dimensions.of
    width = set(dims(projected)[-1]) if projected.shape else set()
    for op, _ in graph.forward(projected, lambda op: op.kind in ("view", "copy") or op.pointwise):
        if op.kind != "view" or op.base_name in ("split", "split_with_sizes") or op.output.id == projected.id:
            continue
        parts = _parts_within(dims(op.output), width)
        if len(parts) == len(_parts_within(dims(op.inputs[0]), width)):
            continue
        parts = _without_pack(parts)
        if len(parts) == 2:
            return parts[0], parts[1]
    return (), ()


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
        # Query, key and value are packed before the heads, or inside them.
        for place in (0, 1):
            if size_of(parts[place]) in (2, 3):
                return [*parts[:place], *parts[place + 1 :]]
    is_packed_by_head = len(parts) == 2 and len(parts[1]) > 1 and parts[1][0].size == 3
    return [parts[0], parts[1][1:]] if is_packed_by_head else parts


def in_order(groups: Groups, dims: Sequence[Dim]) -> Groups:
    """Swap the names if the last two dimensions of an operand contain the batch and not the sequence."""
    before, after = axes_of(dims[:-2]), axes_of(dims[-2:])
    if not axes_named(groups, "heads") & before or not axes_named(groups, "sequence") & before:
        return groups
    if not axes_named(groups, "batch") & after:
        return groups
    swapped = {"batch": "sequence", "sequence": "batch"}
    return [(swapped.get(name, name), group) for name, group in groups]

"""Which way a projection reads its weight: as it is stored, x · W with W of (in, out), or transposed, x · Wᵀ."""

from __future__ import annotations

from ..graph.dataflow import Graph
from ..graph.label import Label
from ..graph.labels import Labels
from ..graph.ways import Walk
from ..record.ops import Op, TensorRef


def reads_as_stored(graph: Graph, op: Op) -> bool:
    """Return whether a projection is x · W; nn.Linear is x · Wᵀ. False too if it is unknown.

    A weight in the memory of its parameter shows it by its strides, a copy by the indices that it is made of.
    """
    weight = graph.weight_of(op)
    summed, features = graph.places_of_weight(op)
    if summed == features:
        return False
    parameters = graph.parameters_in(weight.storage)
    if parameters and all(_is_in_order(named.tensor) for named in parameters):
        return weight.stride[summed] > weight.stride[features]
    labels = Labels(graph)
    labels.follow(Walk(graph, since=0).to(weight).ops)
    label = labels.of(weight)
    dim_of_summed, dim_of_features = _dim_along(label, summed), _dim_along(label, features)
    if dim_of_summed is None or dim_of_features is None:
        return False
    return dim_of_summed < dim_of_features


def _is_in_order(parameter: TensorRef) -> bool:
    """Return whether a parameter lies in memory row by row."""
    steps = list(parameter.stride)
    return steps == sorted(steps, reverse=True)


def _dim_along(label: Label, place: int) -> int | None:
    """Return the last dimension of a parameter that the elements differ in along a dimension; None if in none."""
    dims = []
    for axis, span in label.spans.items():
        if span.varies([place]):
            dims.append(axis.dim)
    return max(dims) if dims else None

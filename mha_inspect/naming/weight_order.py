"""Which way a projection reads its weight: as it is stored, x · W with W of (in, out), or transposed, x · Wᵀ."""

from __future__ import annotations

from ..graph.dataflow import Graph
from ..graph.label import Label
from ..graph.labels import Labels
from ..graph.ways import Walk
from ..record.ops import Op


def reads_as_stored(graph: Graph, op: Op) -> bool:
    """Return whether a projection is x · W; nn.Linear is x · Wᵀ. False too if it is unknown."""
    weight = graph.weight_of(op)
    labels = Labels(graph)
    labels.follow(Walk(graph, since=0).to(weight).ops)
    label = labels.of(weight)
    of_summed, of_features = (_last_dim_along(label, place) for place in graph.places_of_weight(op))
    if of_summed is None or of_features is None:
        return False
    return of_summed < of_features


def _last_dim_along(label: Label, place: int) -> int | None:
    """Return the last dimension of a parameter that the elements differ in along a dimension; None if in none."""
    dims = [axis.dim for axis, span in label.spans.items() if span.varies([place])]
    return max(dims, default=None)

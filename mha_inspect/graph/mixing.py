"""Recognise what mixes heads, as in talking heads: a projection along the heads of scores or weights."""

from __future__ import annotations

from collections.abc import Iterable

from ..record.ops import Op
from .attention import Mixing
from .dataflow import Graph


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """Return a projection as a possible mixing of heads, as in talking heads; None for any other operation.

    Its dimension is the one that is summed: channels of a convolution, the last of `x @ W`, the one before of `W @ x`.
    """
    if not graph.is_projection(op):
        return None
    source = graph.projected(op)
    if op.base_name == "convolution":
        summed = 1
    elif graph.is_weight(op.inputs[-2]) and len(source.shape) > 1:
        summed = -2
    else:
        summed = -1
    return Mixing(op, source, summed)


def mixings_of(graph: Graph, ops: Iterable[Op]) -> list[Mixing]:
    """Return the projections among operations as possible mixings of heads, in order."""
    mixings = []
    for op in ops:
        mixing = mixing_of(graph, op)
        if mixing is not None:
            mixings.append(mixing)
    return mixings

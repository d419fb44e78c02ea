"""Find weights that the forward computes: `weight + B @ A`, `weight[order]`, or a weight divided by its spectral norm.

Learned queries, keys and values are computed from parameters too, but are compared or averaged: their product leads
straight to a softmax, or reads its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ..record.ops import Op, TensorRef

if TYPE_CHECKING:
    from .dataflow import Graph


def computed_weights(graph: Graph, known: Collection[int], from_inputs: Collection[int]) -> set[int]:
    """Return the ids of computed weights, and of all that they are computed from by way of other tensors.

    Args:
        graph: the dataflow; its weights are not known yet.
        known: ids of parameters, and of tensors that are made of these element by element.
        from_inputs: ids of tensors that depend on an input of the run.
    """
    candidates = graph.learned - set(from_inputs) - set(known)
    if not candidates:
        return set()
    found = {read.id for op in graph.recording.ops for read in _applied(graph, op, candidates, from_inputs)}
    for op in reversed(graph.recording.ops):
        if any(output.id in found for output in op.outputs):
            found.update(read.id for read in op.inputs if read.id in candidates)
    return found


def does_more_to_weights(op: Op) -> bool:
    """Return whether an operation mixes elements of a weight, rather than moving or scaling them."""
    if op.does("product", "convolution"):
        return True
    keeps = op.pointwise or op.does("norms", "gathers", "joins", "passes_on", "copies", "fills_where", "pools")
    return op.kind == "compute" and not keeps and op.base_name != "_weight_norm_interface"


def _applied(graph: Graph, op: Op, candidates: set[int], from_inputs: Collection[int]) -> Iterator[TensorRef]:
    """Yield the candidates that an operation applies to an activation as a layer does: its weight and its bias."""
    if op.does("convolution"):
        if op.inputs[0].id in from_inputs:
            yield from (read for read in op.inputs[1:] if read.id in candidates)
        return
    if not op.does("product") or op.does("distances") or len(op.inputs) < 2:
        return
    *added, left, right = op.inputs
    factor, other = (right, left) if right.id in candidates else (left, right)
    if other.id not in from_inputs:
        return
    if factor.id in candidates and (not _is_one_matrix(factor) or _is_compared_or_averaged(graph, op, other)):
        return
    if factor.id in candidates or graph.recording.parameter_names.keys() & {factor.id}:
        yield from (read for read in (*added, factor) if read.id in candidates)


def _is_one_matrix(tensor: TensorRef) -> bool:
    """Return whether this is one matrix, not one for each batch item or head."""
    rank = len(tensor.shape)
    return rank == 2 or (rank == 3 and tensor.shape[0] == 1)


def _is_compared_or_averaged(graph: Graph, op: Op, activation: TensorRef) -> bool:
    """Return whether a product gives the scores of a softmax, or reads the weights that a softmax gives."""
    if any(reader.index in graph.softmaxes for reader, _ in graph.forward(op.output, _sums_nothing)):
        return True
    steps = graph.back(activation, _sums_nothing)
    producers = (graph.recording.producer(step.tensor) for step in steps)
    return any(producer is not None and producer.index in graph.softmaxes for producer in producers)


def _sums_nothing(op: Op) -> bool:
    """Return whether scores or weights pass through this: it is no product, and no sum over features."""
    return not op.does("product", "convolution", "distances") and op.base_name not in ("sum", "mean")

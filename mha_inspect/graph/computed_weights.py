"""Find weights that the forward computes: `weight + B @ A`, `weight[order]`, or a weight divided by its spectral norm.

Learned queries, keys and values are computed from parameters too, but are compared or averaged: their product leads
straight to a softmax, or reads its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from ..record.ops import Op, Recording, TensorRef
from .ids import any_in, ids_of

_Through = Callable[[Op], bool]


class Graph(Protocol):
    """What is read here of a `dataflow.Graph`, which reads its weights from here."""

    recording: Recording

    @property
    def learned(self) -> set[int]:
        """Ids of parameters and of tensors that depend on one."""

    def forward(self, start: TensorRef, through: _Through) -> Iterator[tuple[Op, Any]]:
        """Yield the operations that read results of a tensor."""

    def back(self, start: TensorRef, through: _Through) -> Iterator[Any]:
        """Yield the steps to the tensors that a tensor was computed from."""


def computed_weights(
    graph: Graph,
    learned: Collection[int],
    from_inputs: Collection[int],
) -> set[int]:
    """Return the ids of computed weights, and of all that they are computed from by way of other tensors.

    Args:
        graph: the dataflow; its weights are not known yet.
        learned: ids of parameters, and of tensors that are made of these element by element.
        from_inputs: ids of tensors that depend on an input of the run.
    """
    candidates = graph.learned - set(from_inputs) - set(learned)
    if not candidates:
        return set()
    weights = candidates | set(learned)
    computed: set[int] = set()
    for op in graph.recording.ops:
        weight = _weight_of(graph, op, weights, from_inputs)
        if weight is None:
            continue
        if weight.id in candidates and _is_compared_or_averaged(graph, op, weight):
            continue
        applied = {weight.id, *ids_of(_biases(op, weight))}
        computed |= applied & candidates
    for op in reversed(graph.recording.ops):
        if any_in(op.outputs, computed):
            computed |= ids_of(op.inputs) & candidates
    return computed


def does_more_to_weights(op: Op) -> bool:
    """Return whether an operation mixes elements of a weight, rather than moving or scaling them."""
    if op.does("product", "convolution"):
        return True
    keeps = op.pointwise or op.does("norms", "gathers", "joins", "passes_on", "copies", "fills_where", "pools")
    return op.kind == "compute" and not keeps and op.base_name != "_weight_norm_interface"


def _weight_of(
    graph: Graph,
    op: Op,
    weights: set[int],
    from_inputs: Collection[int],
) -> TensorRef | None:
    """Return the tensor that a product or a convolution applies to an activation as a layer does; None for others."""
    if len(op.inputs) < 2 or op.does("distances"):
        return None
    if op.does("convolution"):
        activation, weight = op.inputs[:2]
    elif op.does("product"):
        left, right = op.inputs[-2:]
        weight, activation = left, right
        if right.id in weights:
            weight, activation = right, left
    else:
        return None
    if weight.id not in weights or activation.id not in from_inputs:
        return None
    return weight if op.does("convolution") or _is_one_matrix(weight) else None


def _biases(op: Op, weight: TensorRef) -> list[TensorRef]:
    """Return what an operation with a weight adds to each position."""
    return [read for read in op.inputs if read is not weight and len(read.shape) == 1]


def _is_one_matrix(tensor: TensorRef) -> bool:
    """Return whether this is one matrix, not one for each batch item or head."""
    rank = len(tensor.shape)
    return rank == 2 or (rank == 3 and tensor.shape[0] == 1)


def _is_compared_or_averaged(graph: Graph, op: Op, factor: TensorRef) -> bool:
    """Return whether a product gives the scores of a softmax, or reads the weights that a softmax gives."""
    if op.does("convolution"):
        return False
    for reader, _ in graph.forward(op.output, _sums_nothing):
        if reader.does("softmax"):
            return True
    others = [read for read in op.inputs[-2:] if read is not factor]
    return any(_is_of_softmax(graph, read) for read in others)


def _is_of_softmax(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor is the weights that a softmax gives, or computed of these element by element."""
    for step in graph.back(tensor, _sums_nothing):
        producer = graph.recording.producer(step.tensor)
        if producer is not None and producer.does("softmax"):
            return True
    return False


def _sums_nothing(op: Op) -> bool:
    """Return whether scores or weights pass through this: it is no product, and no sum over features."""
    return not op.does("product", "convolution", "distances") and op.base_name not in ("sum", "mean")

"""Weights that are made of scores by no softmax: element by element, and by numbers of a query over all of its keys.

`sigmoid(scores)`, `relu(scores) / n`, `exp(scores) / (1 + Σ)`, sparsemax. What bends nothing is linear attention, whose
products can be taken in another order: it has no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..record.ops import Op, TensorRef
from .attention import Attention
from .dataflow import Graph, made_of
from .dimensions import Axis, wide
from .pairing import Meeting, score_product
from .products import Product, is_wide


@dataclass(frozen=True)
class Weighing:
    """How scores become weights, and what these meet."""

    masked: TensorRef
    """The scores, masked or not, that weights are made of."""
    dim: int
    """Which dimension of them is the keys."""
    ops: tuple[Op, ...]
    """What makes weights of them, in order: the last gives the weights."""
    scores: Meeting
    """What made the scores."""
    values: Meeting
    """Where the weights meet the values."""


def find_weighings(graph: Graph, attentions: Iterable[Attention]) -> Iterator[Weighing]:
    """Yield every way from scores to values without a softmax, that no attention has a part in."""
    taken = {op.index for own in attentions for op in (own.score_product.op, own.value_product.op)}
    for product in graph.products.values():
        if product.op.index in taken or not _is_of_activations(graph, product):
            continue
        for carried in (product.left, product.right):
            found = _weighing(graph, product, carried, taken)
            if found is not None:
                yield found


def _weighing(graph: Graph, averaged: Product, carried: TensorRef, taken: set[int]) -> Weighing | None:
    """How one factor of a product was made of scores."""
    axes = averaged.axes(graph.dimensions)
    over = set(wide(axes.left_inner if carried is averaged.left else axes.right_inner))
    made = graph.recording.producer(graph.before_moves(averaged.right if carried is averaged.left else averaged.left))
    if made is not None and graph.is_softmax(made):
        return None  # classes are voted for, or clusters counted: what a softmax gives is no value, but what weighs one
    for step in graph.back(carried, graph.carries) if over else ():
        op = graph.recording.producer(step.tensor)
        if op is None or op.index in {*taken, averaged.multiply.index} or _place_of(graph, op.output, over) is None:
            continue
        if graph.product(op) is None and not graph.reduces(op):
            continue
        path = tuple(reversed(step.path))
        own = _own_part(graph, op.output, path, over)
        if own is None:
            return None
        start, stop = own
        masked = next(tensor for tensor in path[start].inputs if start == 0 or tensor in path[start - 1].outputs)
        dim = _place_of(graph, masked, over)
        behind = None if dim is None else score_product(graph, masked, dim)
        if dim is None or behind is None or behind.product.op.index in taken or not _compares(graph, behind.product):
            return None
        return Weighing(masked, dim, path[start:stop], behind, Meeting(averaged, path[stop:], carried))
    return None


def _own_part(graph: Graph, scores: TensorRef, path: tuple[Op, ...], over: set[Axis]) -> tuple[int, int] | None:
    """Where the part of a path that makes weights of scores begins and ends; None where nothing is bent."""
    since = graph.recording.producers[scores.id] + 1
    made = made_of({scores.id}, graph.recording.ops[since : path[-1].index] if path else ())
    parts = []
    for place, op in enumerate(path):
        others = [tensor for tensor in op.inputs if tensor.id in made and not _is_next(op, tensor, path, place)]
        for other in others:
            if other.numel > 1 and not _repeated(graph, other, op.output) <= over:
                return None  # weights that are set against those of other queries
        if others or graph.bends(op):
            parts.append(place)
    if not any(graph.bends(path[place]) for place in parts) or path[parts[-1]].base_name.rstrip("_") == "exp":
        return None  # exponentials are divided later, piece by piece
    start, stop = parts[0], parts[-1] + 1
    while start and path[start - 1].base_name in ("add", "sub") and len(path[start - 1].inputs) == 1:
        start -= 1  # a number beside the scores
    while stop < len(path) and graph.is_scale(path[stop]):
        stop += 1
    return start, stop


def _repeated(graph: Graph, factor: TensorRef, whole: TensorRef) -> set[Axis]:
    """The axes that a tensor is broadcast along: by their places, as it may have one of them at another."""
    rank = len(whole.shape)
    dims = enumerate(graph.dimensions.of(whole))
    return {axis for place, dim in dims if not is_wide(factor, rank, place) for axis in wide(dim)}


def _is_next(op: Op, tensor: TensorRef, path: tuple[Op, ...], place: int) -> bool:
    """Whether a path comes to an operation by this tensor."""
    return tensor in path[place - 1].outputs if place else tensor == op.inputs[0]


def _place_of(graph: Graph, tensor: TensorRef, over: set[Axis]) -> int | None:
    """The one dimension that has these axes."""
    places = [place for place, dim in enumerate(graph.dimensions.of(tensor)) if over & set(dim)]
    return places[0] if len(places) == 1 else None


def _is_of_activations(graph: Graph, product: Product) -> bool:
    return all(graph.is_activation(tensor) for tensor in (product.left, product.right))


def _compares(graph: Graph, product: Product) -> bool:
    """Whether features are summed up, and what is left are positions: queries are compared with keys."""
    if not _is_of_activations(graph, product):
        return False
    axes, features = product.axes(graph.dimensions), graph.features
    summed, left = set(wide(axes.left_inner)), set(wide(axes.rows, axes.columns))
    return not product.is_dot or (bool(summed & features) and not left & features)

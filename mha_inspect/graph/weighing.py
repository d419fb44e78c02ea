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
    taken = {op.index for each in attentions for op in (each.score_product.op, each.value_product.op)}
    for product in graph.products.values():
        if product.op.index not in taken and _is_of_activations(graph, product):
            for carried in (product.left, product.right):
                weighing = _weighing(graph, Meeting(product, (), carried), taken)
                if weighing is not None:
                    yield weighing


def _weighing(graph: Graph, values: Meeting, taken: set[int]) -> Weighing | None:
    """Return how one factor of a product was made of scores; None where it was not."""
    over = set(wide(values.averaged(graph)))
    maker = graph.recording.producer(graph.before_moves(values.values))
    if not over or (maker is not None and graph.is_softmax(maker)):
        return None  # classes are voted for, or clusters counted: what a softmax gives is no value, but what weighs one
    for step in graph.back(values.carried, graph.carries):
        op = graph.recording.producer(step.tensor)
        if op is None or op.index in {*taken, values.product.multiply.index}:
            continue
        if _place_of(graph, op.output, over) is None or not (graph.product(op) or graph.reduces(op)):
            continue
        path = tuple(reversed(step.path))
        part = _weighing_part(graph, op.output, path, over)
        if part is None:
            return None
        start, stop = part
        masked = next(tensor for tensor in path[start].inputs if start == 0 or tensor in path[start - 1].outputs)
        dim = _place_of(graph, masked, over)
        scores = None if dim is None else score_product(graph, masked, dim)
        if dim is None or scores is None or scores.product.op.index in taken or not _compares(graph, scores.product):
            return None
        ahead = Meeting(values.product, path[stop:], values.carried)
        return Weighing(masked, dim, path[start:stop], scores, ahead)
    return None


def _weighing_part(graph: Graph, scores: TensorRef, path: tuple[Op, ...], over: set[Axis]) -> tuple[int, int] | None:
    """Return where the part of a path that makes weights of scores begins and ends; None where nothing is bent."""
    since = graph.recording.producers[scores.id] + 1
    made = made_of({scores.id}, graph.recording.ops[since : path[-1].index] if path else ())
    parts = []
    for place, op in enumerate(path):
        came_by = path[place - 1].outputs if place else op.inputs[:1]
        others = [tensor for tensor in op.inputs if tensor.id in made and tensor not in came_by]
        if any(other.numel > 1 and not _repeated(graph, other, op.output) <= over for other in others):
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
    """Return the axes that a tensor is broadcast along: by their places, as it may have one of them at another."""
    rank = len(whole.shape)
    dims = enumerate(graph.dimensions.of(whole))
    return {axis for place, dim in dims if not is_wide(factor, rank, place) for axis in wide(dim)}


def _place_of(graph: Graph, tensor: TensorRef, over: set[Axis]) -> int | None:
    """Return the one dimension that has these axes; None where it is not one."""
    places = [place for place, dim in enumerate(graph.dimensions.of(tensor)) if over & set(dim)]
    return places[0] if len(places) == 1 else None


def _is_of_activations(graph: Graph, product: Product) -> bool:
    return graph.is_activation(product.left) and graph.is_activation(product.right)


def _compares(graph: Graph, product: Product) -> bool:
    """Return whether features are summed up, and what is left are positions: queries are compared with keys."""
    axes = product.axes(graph.dimensions)
    summed, left = set(wide(axes.left_inner)), set(wide(axes.rows, axes.columns))
    sums_features = bool(summed & graph.features) and not left & graph.features
    return _is_of_activations(graph, product) and (sums_features or not product.is_dot)

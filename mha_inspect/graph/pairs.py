"""Find attention as pairs of products: the second averages, over positions of the first, with weights made of it.

    scores = q @ k.transpose(-1, -2)            # batch heads query key
    context = weights_of(scores) @ v            # the sum over the keys

How the weights are made of the scores is not looked at here: `response` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..record.catalog import fused
from ..record.ops import Op, TensorRef
from .axis import Axis, size_of, wide
from .dataflow import Graph
from .products import Product, ProductPath
from .replay import region
from .scores import mixing_of

_FAR = 300
"""Operations between scores and weights after which two products are no pair."""
_TRIED = 4
"""The most scores that are tried for one product with values."""
_LOOKED = 12
"""The most products that are looked at for them."""


class Pair(NamedTuple):
    """Two products that may be one attention."""

    scores: Product
    values: ProductPath
    """The product with the values, and its factor that is the weights, or moved from them."""
    over: frozenset[Axis]
    """The axes that the product with the values sums over."""


def pairs_of(graph: Graph) -> Iterator[Pair]:
    """Yield pairs of products of activations; for each product with values, the most likely scores first."""
    behind = _products_behind(graph)
    products = list(graph.products.values())
    for product in products:
        if _is_step_of_kernel(graph, product):
            continue
        for weights in (product.left, product.right):
            values = ProductPath(product, (), weights)
            over = frozenset(wide(values.averaged(graph.dimensions)))
            for scores in _nearest(graph, products, behind, weights, over):
                yield Pair(scores, values, over)


def _is_step_of_kernel(graph: Graph, product: Product) -> bool:
    """Return whether a product is a step that this program wrote for a fused attention: it needs no measurement."""
    if product.op.kernel is None:
        return False
    kernel = fused(graph.recording.kernels[product.op.kernel].op)
    return kernel is not None and kernel.way == "attention"


def _products_behind(graph: Graph) -> dict[int, int]:
    """Return the id of each tensor to the products that it depends on, as bits: bit n is the n-th product.

    What is read from memory depends on all that was written into it before.
    """
    behind: dict[int, int] = {}
    written: dict[int, int] = {}
    places = {index: place for place, index in enumerate(graph.products)}
    for op in graph.recording.ops:
        bits = 1 << places[op.index] if op.index in places else 0
        for tensor in op.inputs:
            bits |= behind.get(tensor.id, 0) | written.get(tensor.storage, 0)
        if not bits:
            continue
        for output in op.outputs:
            behind[output.id] = bits
        if op.kind == "write":
            written[op.output.storage] = written.get(op.output.storage, 0) | bits
            for tensor in graph.results(op):
                behind[tensor.id] = behind.get(tensor.id, 0) | bits
    return behind


def _may_be_scores(graph: Graph, scores: Product, over: frozenset[Axis]) -> bool:
    """Return whether a product compares positions, among them those that are averaged over."""
    if not graph.comes_from_inputs(scores.left, scores.right):
        return False
    axes = scores.axes(graph.dimensions)
    compared = {*axes.rows, *axes.columns}
    summed = {*axes.left_inner, *axes.right_inner}
    everywhere = compared | set(axes.batch) | summed
    if not over & everywhere:
        return True  # the axis was lost on the way, e.g. in a sort: only a measurement can say
    return bool(over & compared) and not over & (summed - compared)


def _nearest(
    graph: Graph, products: list[Product], behind: dict[int, int], weights: TensorRef, over: frozenset[Axis]
) -> list[Product]:
    """Return the products behind weights that no other candidate depends on, the most likely scores first.

    These are not gathered on the way, and sum over most features: a position may have a product of its own.
    """
    nearest: list[tuple[Product, bool]] = []
    remaining = behind.get(weights.id, 0)
    looked = 0
    while remaining and looked < _LOOKED and len(nearest) < _TRIED:
        place = remaining.bit_length() - 1
        remaining ^= 1 << place
        looked += 1
        scores = products[place]
        if not _may_be_scores(graph, scores, over):
            continue
        remaining &= ~behind[scores.op.output.id]
        ops = region(graph, (scores.op.output,), weights).ops
        if len(ops) <= _FAR and _mixes_heads_alone(graph, scores, ops):
            nearest.append((scores, any(op.does("gathers") for op in ops)))
    nearest.sort(key=lambda found: (found[1], -_features(graph, found[0]), found[0].op.index))
    return [scores for scores, _ in nearest]


def _features(graph: Graph, scores: Product) -> int:
    """Return how many products are summed for each score."""
    return size_of(scores.axes(graph.dimensions).left_inner)


def _mixes_heads_alone(graph: Graph, scores: Product, ops: tuple[Op, ...]) -> bool:
    """Return whether every projection among operations sums over heads: batch axes of the scores product."""
    heads = set(wide(scores.axes(graph.dimensions).batch))
    for op in ops:
        mixing = mixing_of(graph, op)
        if mixing is not None and not graph.dimensions.along(mixing.source, mixing.place) <= heads:
            return False
    return True

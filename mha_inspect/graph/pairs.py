"""Find attention as pairs of products: the second averages, over positions of the first, with weights made of it.

    scores = q @ k.transpose(-1, -2)            # batch heads query key
    context = weights_of(scores) @ v            # the sum over the keys

How the weights are made of the scores is not looked at here: `response` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .axis import Axis, size_of, wide
from .dataflow import Graph, inside
from .products import Product, ProductPath, product_of
from .replay import region
from .scores import BATCHED, mixings_of, only_activation

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
    learned = _with_learned_factor(graph)
    for product in products:
        for weights in (product.left, product.right):
            values = ProductPath(product, (), weights)
            over = frozenset(wide(values.averaged(graph.dimensions)))
            nearest = _nearest(graph, products, behind, weights, over)
            for scores in nearest or _of_learned_queries(graph, learned, values, over):
                yield Pair(scores, values, over)


def _with_learned_factor(graph: Graph) -> list[tuple[Product, TensorRef]]:
    """Return the products of an activation with a parameter, each with its activation."""
    products = []
    for op in graph.recording.ops:
        product = None if op.base_name == "addmm" else product_of(graph.recording, op)
        if product is None:
            continue
        activation = only_activation(graph, product)
        if activation is not None and graph.comes_from_inputs(activation):
            products.append((product, activation))
    return products


def _of_learned_queries(
    graph: Graph,
    learned: list[tuple[Product, TensorRef]],
    values: ProductPath,
    over: frozenset[Axis],
) -> list[Product]:
    """Return the last product of keys with learned queries behind weights; none if there is no such product.

        scores = self.query @ k.transpose(-1, -2)            # query: slots head_dim, k: batch key head_dim

    The weights are summed over positions of the keys: over output features a projection is a router. A layer outside
    of the module that multiplies by the values is a scorer.
    """
    module = values.product.multiply.module
    for product, keys in reversed(learned):
        op = product.op
        if op.index >= values.product.op.index:
            continue
        is_of_module = op.base_name in BATCHED or inside(module, op.module)
        if not is_of_module or not _has_positions(graph, product, keys, over):
            continue
        ops = region(graph, (op.output,), values.tensor).ops
        if 0 < len(ops) <= _FAR and not _is_of_pairs(graph, keys):
            return [product]
    return []


def _has_positions(
    graph: Graph,
    product: Product,
    keys: TensorRef,
    over: frozenset[Axis],
) -> bool:
    """Return whether the weights are summed over an axis of the keys, apart from those of a batch and of features."""
    dims = graph.dimensions.of(keys)
    if product.multiply.does("product"):
        dims = dims[-2:]  # without those that the factors of a batched product have in common
    axes = product.axes(graph.dimensions)
    features = {*axes.left_inner, *axes.right_inner}
    return not over.isdisjoint(set(wide(*dims)) - features)


def _is_of_pairs(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor is computed of each query with each key, as in `(q[:, :, None] + k[:, None]).tanh()`."""
    for step in graph.back(tensor, lambda op: op.pointwise or graph.moves(op)):
        op = graph.producer(step.tensor)
        if op is None or len(op.inputs) != 2:
            continue
        sizes = [graph.before_repeats(factor).numel for factor in op.inputs]
        if graph.comes_from_inputs(*op.inputs) and max(sizes) < op.output.numel:
            return True
    return False


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
    if not any(map(graph.comes_from_inputs, (scores.left, scores.right))):
        return False
    axes = scores.axes(graph.dimensions)
    compared = {*axes.rows, *axes.columns}
    summed = {*axes.left_inner, *axes.right_inner}
    if over.isdisjoint(compared | summed | set(axes.batch)):
        return True  # the axis was lost on the way, e.g. in a sort: only a measurement can say
    return not over.isdisjoint(compared) and over.isdisjoint(summed - compared)


class _Scores(NamedTuple):
    """A product that may be the scores, in the order of likelihood."""

    is_unlikely: bool
    """Whether it is not of two inputs, or is gathered on the way."""
    features: int
    """How many products are summed for each score, with a minus: many come first."""
    place: int
    """The index of its operation."""
    product: Product


def _nearest(
    graph: Graph,
    products: list[Product],
    behind: dict[int, int],
    weights: TensorRef,
    over: frozenset[Axis],
) -> list[Product]:
    """Return the products behind weights that no other candidate depends on, the most likely scores first.

    These are of two inputs, are not gathered on the way, and sum over most features: a position may have a product of
    its own.
    """
    nearest: list[_Scores] = []
    remaining = behind.get(weights.id, 0)
    looked = 0
    while remaining and looked < _LOOKED and len(nearest) < _TRIED:
        place = remaining.bit_length() - 1
        remaining ^= 1 << place
        looked += 1
        product = products[place]
        if not _may_be_scores(graph, product, over):
            continue
        remaining &= ~behind[product.op.output.id]
        ops = region(graph, (product.op.output,), weights).ops
        if len(ops) <= _FAR and _mixes_heads_alone(graph, product, ops, over):
            is_of_inputs = graph.comes_from_inputs(product.left, product.right)
            is_unlikely = not is_of_inputs or any(op.does("gathers") for op in ops)
            nearest.append(_Scores(is_unlikely, -_features(graph, product), product.op.index, product))
    nearest.sort(key=lambda scores: scores[:3])
    return [scores.product for scores in nearest]


def _features(graph: Graph, scores: Product) -> int:
    """Return how many products are summed for each score."""
    return size_of(scores.axes(graph.dimensions).left_inner)


def _mixes_heads_alone(graph: Graph, scores: Product, ops: tuple[Op, ...], over: frozenset[Axis]) -> bool:
    """Return whether every projection among operations sums over heads: batch axes of the scores product.

    The output features of such a projection are heads too, and no keys: what averages over features that a projection
    made is a gate, e.g. over the branches of a convolution.
    """
    heads = set(wide(scores.axes(graph.dimensions).batch))
    for mixing in mixings_of(graph, ops):
        if not graph.dimensions.along(mixing.source, mixing.place) <= heads:
            return False
        made = graph.dimensions.along(mixing.op.output, mixing.place)
        if not over.isdisjoint(made):
            return False
        heads |= made
    return True

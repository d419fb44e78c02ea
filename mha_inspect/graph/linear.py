"""Two products of activations one of which goes into the other: what attention without a softmax looks like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..record.ops import Op, TensorRef
from .dimensions import Axis, wide
from .found import Attention
from .products import Product, outer_product_of, product_of
from .walk import Graph


@dataclass(frozen=True)
class Chain:
    """A product whose result, changed on the way or not, is a factor of a second product."""

    first: Product
    between: tuple[Op, ...]
    """The operations from the first to the second, in the order in which they ran."""
    second: Product
    carried: TensorRef
    """The factor of the second that was made of the first."""


def find_chains(graph: Graph, attentions: Iterable[Attention]) -> list[Chain]:
    """Every such pair that is no part of an attention, in order; for each factor the nearest product behind it."""
    taken = {
        op.index
        for found in attentions
        for one in (found, *found.branches)
        for op in (one.score_product.op, one.value_product.op)
    }
    products = _products(graph)
    features = features_of(graph) if products else set()
    chains = []
    for second in products.values():
        for carried in (second.left, second.right):
            chain = _chain(graph, products, second, carried)
            if chain is None or {chain.first.op.index, second.op.index} & taken:
                continue
            if not _stays_in_place(graph, chain, features):
                chains.append(chain)
    return chains


def features_of(graph: Graph) -> set[Axis]:
    """The axes of the matrices that project something: what they take in, and what they give."""
    return {
        atom
        for op in graph.recording.ops
        if graph.is_projection(op)
        for tensor in op.inputs
        if graph.is_weight(tensor)
        for dim in graph.dimensions.of(tensor)
        for atom in dim
    }


def _stays_in_place(graph: Graph, chain: Chain, features: set[Axis]) -> bool:
    """Whether the first has no sum, and is made for every position of what comes in by itself: no two of them meet."""
    axes = chain.first.axes(graph.dimensions)
    if axes.left_inner or any(op.does("runs") for op in chain.between):
        return False
    positions = [set(wide(*graph.dimensions.of(named.tensor))) - features for named in graph.recording.inputs]
    kept = {*axes.batch} & {*chain.second.axes(graph.dimensions).batch}
    return any(own and own <= kept for own in positions)


def _products(graph: Graph) -> dict[int, Product]:
    """Index of the operation that gives it, to every product of two activations."""
    found: dict[int, Product] = {}
    summed: set[int] = set()
    for op in reversed(graph.recording.ops):
        product = product_of(graph.recording, op) or (None if op.index in summed else outer_product_of(op))
        if product is None or not all(is_activation(graph, tensor) for tensor in (product.left, product.right)):
            continue
        summed.add(product.multiply.index)
        found[op.index] = product
    return dict(reversed(found.items()))


def is_activation(graph: Graph, tensor: TensorRef) -> bool:
    """Whether this depends on what came in, and is no parameter, nor one of a stack of matrices that was picked."""
    source = graph.recording.producer(graph.before_moves(tensor))
    picked = source is not None and source.does("gathers") and len(source.inputs[0].shape) > 2
    return (
        graph.comes_from_inputs(tensor)
        and not graph.is_weight(tensor)
        and not (picked and source is not None and graph.is_weight(source.inputs[0]))
    )


def _chain(graph: Graph, products: dict[int, Product], second: Product, carried: TensorRef) -> Chain | None:
    """The nearest product behind a factor, with nothing between that makes something else of it."""

    def through(op: Op) -> bool:
        return (
            op.index not in products
            and not graph.operands(op)
            and not graph.is_softmax(op)
            and (op.kind != "compute" or op.pointwise or op.does("gathers", "carries", "norms", "runs"))
        )

    for step in graph.back(carried, through):
        op = graph.recording.producer(step.tensor)
        if op is not None and op.index in products and op.index != second.multiply.index:
            return Chain(products[op.index], tuple(reversed(step.path)), second, carried)
    return None

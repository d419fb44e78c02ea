"""Find attention over a memory: the keys and the values are parameters, and only the queries depend on an input.

    q = self.to_q(x)                                            # x: batch query embed
    return (q @ self.keys.mT).softmax(-1) @ self.values         # keys, values: memory embed

Two layers with a softmax between them are the same arithmetic. They are no attention: the memory has no bias, is
multiplied where the softmax is, and is read by queries that were projected before.
"""

from __future__ import annotations

from ..record.ops import Op, TensorRef
from .axis import wide
from .dataflow import Graph, inside
from .products import Product, ProductPath, product_of
from .softmax import Softmax


def memory_paths(graph: Graph, softmax: Softmax) -> tuple[ProductPath, ProductPath] | None:
    """Return the scores product and the values product of a softmax over a memory; None for any other softmax."""
    scores = _scores(graph, softmax)
    if scores is None:
        return None
    values = _values(graph, softmax)
    return None if values is None else (scores, values)


def _scores(graph: Graph, softmax: Softmax) -> ProductPath | None:
    """Return the product of projected queries and a memory: `batch query embed, memory embed -> batch query memory`."""
    over = graph.dimensions.along(softmax.masked, softmax.dim)
    if not over:
        return None
    for step in graph.back(softmax.masked, graph.passes_on):
        op = graph.producer(step.tensor)
        product = None if op is None else _with_memory(graph, op, softmax)
        if product is None:
            continue
        query, memory = _factors(graph, product)
        axes = product.axes(graph.dimensions)
        slots = set(wide(*graph.dimensions.of(memory)))
        slots.difference_update(axes.left_inner, axes.right_inner)
        if over <= slots and _is_projected(graph, query, softmax.op.module):
            path = step.path[::-1]
            return ProductPath(product, path, product.op.output)
    return None


def _values(graph: Graph, softmax: Softmax) -> ProductPath | None:
    """Return the product of weights and a memory: `batch query memory, memory embed -> batch query embed`."""
    weights = softmax.op.output
    over = graph.dimensions.along(weights, softmax.dim)
    for op, step in graph.forward(weights, graph.passes_on):
        product = _with_memory(graph, op, softmax)
        if product is None:
            continue
        axes = product.axes(graph.dimensions)
        if over & {*axes.left_inner, *axes.right_inner}:
            return ProductPath(product, step.path, step.tensor)
    return None


def _with_memory(graph: Graph, op: Op, softmax: Softmax) -> Product | None:
    """Return a product of a tensor that depends on an input with a memory; None for any other operation."""
    product = product_of(graph.recording, op)
    if product is None or op.base_name == "addmm" or graph.has_bias(op):
        return None
    if op.base_name != "bmm" and not inside(softmax.op.module, op.module):
        return None  # a layer of its own
    if graph.comes_from_inputs(product.left) == graph.comes_from_inputs(product.right):
        return None
    _, memory = _factors(graph, product)
    return product if memory.id in graph.learned else None


def _factors(graph: Graph, product: Product) -> tuple[TensorRef, TensorRef]:
    """Return the factor that depends on an input, and the memory."""
    if graph.comes_from_inputs(product.left):
        return product.left, product.right
    return product.right, product.left


def _is_projected(graph: Graph, query: TensorRef, module: str) -> bool:
    """Return whether the module of the softmax projects the queries, and may scale, bias or norm them."""

    def through(op: Op) -> bool:
        if not inside(op.module, module):
            return False
        return graph.moves(op) or op.pointwise or op.does("norms")

    for step in graph.back(query, through):
        op = graph.producer(step.tensor)
        if op is not None and graph.is_projection(op) and inside(op.module, module):
            return True
    return False

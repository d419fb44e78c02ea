"""The two products around a softmax: the one that made the scores, and the one with the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..record.ops import Op, TensorRef
from .additive import joint_scores
from .attention import Mixing
from .dataflow import Graph
from .dimensions import Axis, size_of, wide
from .products import Product, outer_product_of, product_of


@dataclass(frozen=True)
class Meeting:
    """A product, and the operations between it and the softmax, in the order in which they ran."""

    product: Product
    path: tuple[Op, ...]
    carried: TensorRef
    """On the side of the scores what the product gives; on the side of the values the factor that is the weights."""


def score_product(graph: Graph, masked: TensorRef, dim: int) -> Meeting | None:
    """What made the scores that a softmax is taken of: a product, or where there is none what has them without one.

    Relative positions are products too: they are gathered, or shifted on the way, or do not depend on the input.
    """
    best: tuple[tuple[bool, bool, bool, bool, int], Meeting] | None = None
    over = _wide(graph, masked, dim) if masked.shape else set()
    for step in graph.back(masked, lambda op: graph.carries(op) or _mixes(graph, op, over)):
        op = graph.recording.producer(step.tensor)
        if op is None:
            continue
        learned = _has_learned_query(graph, op, masked, dim)
        product = product_of(graph.recording, op) if learned else graph.product(op)
        if product is not None and _mixes_heads(graph, step.path, product):
            gathered = any(passed.does("gathers") for passed in step.path)
            of_positions = not all(map(graph.comes_from_inputs, (product.left, product.right)))
            rank = (learned, gathered, of_positions, any(map(graph.is_projection, step.path)), len(step.path))
            if best is None or rank < best[0]:
                best = (rank, Meeting(product, tuple(reversed(step.path)), product.op.output))
    if best is None or best[0][0]:
        joint = joint_scores(graph, masked, dim)
        if joint is not None:
            return Meeting(*joint, joint[0].op.output)
    return None if best is None else best[1]


def _has_learned_query(graph: Graph, op: Op, masked: TensorRef, dim: int) -> bool:
    """Whether this is a product of keys with a parameter that stands for the queries, batch by batch.

    A projection has no batch; and where a router's weights stand, the softmax runs over what they give.
    """
    factors = graph.operands(op)
    if factors is None or op.base_name not in ("bmm", "baddbmm"):
        return False
    keys = [tensor for tensor in factors if not graph.is_weight(tensor)]
    if len(keys) != 1 or not masked.shape:
        return False
    over = _wide(graph, masked, dim)
    return bool(over & {atom for axis in graph.dimensions.of(keys[0])[-2:] for atom in axis})


def value_product(graph: Graph, weights: TensorRef, dim: int) -> Meeting | None:
    """The product of weights and values."""
    if not weights.shape:
        return None
    single: Meeting | None = None
    over = _wide(graph, weights, dim)

    def through(op: Op) -> bool:
        return graph.carries(op) or _picks(op, dim) or _mixes(graph, op, over) or _norms_heads(graph, op, over)

    for op, step in graph.forward(weights, through):
        product = graph.product(op)
        if product is None:
            product = graph.product_with(op)
            # A sum over anything else is no average over keys.
            picked = {axis for passed in step.path if passed.does("picks") for axis in _wide(graph, passed.output, dim)}
            if product is not None and not _sums(graph, product, over | picked):
                product = None
        # Mixed by head, or laid out along what else there is, as where they say what is written into which slot,
        # they are weights still if they are summed over the keys.
        changed = any(graph.is_projection(passed) or outer_product_of(passed) for passed in step.path)
        if product is not None and changed and not _sums(graph, product, over):
            product = None
        if product is not None:
            return Meeting(product, step.path, step.tensor)
        if single is None and len(op.inputs) == 2 and op.base_name == "mul" and weights.shape[dim] == 1:
            # The average over a single key needs no sum: einsum multiplies.
            other = op.inputs[op.inputs[0].id == step.tensor.id]
            wider = other.numel > step.tensor.numel and graph.comes_from_inputs(other)
            single = Meeting(Product(op, op, *op.inputs), step.path, step.tensor) if wider else None
    return single


def _picks(op: Op, dim: int) -> bool:
    """Whether this leaves more than one weight of each query: where one is left, keys are chosen, and not averaged."""
    return op.does("picks") and dim < len(op.output.shape) and op.output.shape[dim] > 1


def _sums(graph: Graph, product: Product, over: set[Axis]) -> bool:
    """Whether a product sums over what the softmax runs over."""
    axes = product.axes(graph.dimensions)
    return not over or bool(over & {*axes.left_inner, *axes.right_inner})


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """A projection, as far as it could be one from heads to heads; None for any other operation."""
    if not graph.is_projection(op):
        return None
    source, place = graph.projected(op), -1
    if op.base_name == "convolution":
        place = 1
    elif graph.is_weight((graph.operands(op) or op.inputs)[0]) and len(source.shape) > 1:
        place = -2
    return Mixing(op, source, place)


def _mixes(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Whether a projection leaves alone what the softmax runs over, so that it may mix scores or weights by head."""
    mixing = mixing_of(graph, op) if over else None
    if mixing is None:
        return False
    kept = {atom for dim in graph.dimensions.of(mixing.source) for atom in dim}
    return over <= kept - set(graph.dimensions.of(mixing.source)[mixing.place])


def _norms_heads(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Whether this is a norm over another dimension than the one that the softmax runs over: over the heads."""
    if not over or not op.does("norms"):
        return False
    dims = graph.dimensions.of(op.inputs[0])
    return len(dims) > 1 and not over & set(dims[1 if "batch_norm" in op.base_name else -1])


def _mixes_heads(graph: Graph, path: Iterable[Op], product: Product) -> bool:
    """Whether projections on the way from the scores to the softmax mix what their product runs over, the heads."""
    heads = set(wide(product.axes(graph.dimensions).batch))
    mixings = (mixing for op in path if (mixing := mixing_of(graph, op)) is not None)
    return all(_wide(graph, mixing.source, mixing.place) <= heads for mixing in mixings)


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Whether this only moves a factor about for the product: within its call, or to broadcast it."""
    if not graph.moves(op):
        return False
    broadcast = product.multiply is not product.op and op.does("broadcasts")
    same = [size for size in op.inputs[0].shape if size != 1] == [size for size in op.output.shape if size != 1]
    return op.call == product.multiply.call or (broadcast and (same or op.base_name == "expand"))


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """A factor before it was moved for the product."""
    while (op := graph.recording.producer(factor)) is not None and moved_for(graph, op, product):
        factor = op.inputs[0]
    return factor


@dataclass(frozen=True)
class Softmaxed:
    """Which side of the product of scores holds the keys, and whether the softmax runs over them."""

    key_first: bool
    over_queries: bool = False


def softmaxed_side(graph: Graph, behind: Meeting, ahead: Meeting, masked: TensorRef, dim: int) -> Softmaxed | None:
    """Return the side of the keys: what the values are averaged over. None where this softmax is no attention's.

    None are softmaxes that assign: over an axis along which every score has a product of its own, where there are no
    queries beside the keys (capsules), over the features that a projection gives (clusters of nodes), over clusters
    that average what was compared with them (k-means), and of learned queries that average the keys as they are.
    """
    product = behind.product
    if len(product.op.output.shape) < 2 or not masked.shape:
        return Softmaxed(key_first=False)
    axes = product.axes(graph.dimensions)
    rows, columns, over = set(axes.rows), set(axes.columns), _wide(graph, masked, dim)
    if over & set(axes.batch) - rows - columns and not (size_of(rows) > 1 and size_of(columns) > 1):
        return None
    averaged = ahead.product.axes(graph.dimensions)
    weights_last = ahead.product.right.id == ahead.carried.id
    summed = set(wide(averaged.right_inner if weights_last else averaged.left_inner))
    over_rows = bool(over & rows) and not over & columns
    other = (columns if over_rows else rows) - over
    if over and summed & other and not summed & over:
        assigns = _is_width(graph, product, over) or _are_alike(
            graph, ahead, product.right if over_rows else product.left
        )
        return None if assigns else Softmaxed(not over_rows, over_queries=True)
    return None if _pools(graph, product, ahead) else Softmaxed(over_rows)


def _is_width(graph: Graph, product: Product, over: set[Axis]) -> bool:
    """Whether an axis of the scores is all the features that a projection gives one factor of their product."""
    for factor in (product.left, product.right):
        for step in graph.back(factor, lambda op: graph.moves(op) or op.pointwise):
            op = graph.recording.producer(step.tensor)
            if op is not None and graph.is_projection(op) and set(graph.dimensions.of(op.output)[-1]) <= over:
                return True
    return False


def _pools(graph: Graph, product: Product, ahead: Meeting) -> bool:
    """Whether a parameter's scores of some features weigh the very same features: pooling, and no attention."""
    keys = [factor for factor in (product.left, product.right) if not graph.is_weight(factor)]
    return len(keys) == 1 and _are_alike(graph, ahead, keys[0])


def _are_alike(graph: Graph, ahead: Meeting, keys: TensorRef) -> bool:
    """Whether what is averaged are the very features that made the scores."""
    values = ahead.product.left if ahead.product.right.id == ahead.carried.id else ahead.product.right
    return graph.before_moves(keys, whole=True).id == graph.before_moves(values, whole=True).id


def _wide(graph: Graph, tensor: TensorRef, dim: int) -> set[Axis]:
    return set(wide(graph.dimensions.of(tensor)[dim]))

"""The two products around a softmax: the one that made the scores, and the one with the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..record.ops import Op, TensorRef
from .additive import has_sizes_of, joint_scores
from .attention import Mixing
from .dataflow import Graph
from .dimensions import Axis, Dim, size_of, wide
from .products import Product, outer_product_of, product_of


@dataclass(frozen=True)
class Meeting:
    """A product, and the operations between it and the softmax, in the order in which they ran."""

    product: Product
    path: tuple[Op, ...]
    carried: TensorRef
    """On the side of the scores what the product gives; on the side of the values the factor that is the weights."""

    @property
    def values_first(self) -> bool:
        """Whether the values are the left factor of the product with the weights."""
        return self.product.right.id == self.carried.id

    @property
    def values(self) -> TensorRef:
        """The factor that the weights meet."""
        return self.product.left if self.values_first else self.product.right

    def averaged(self, graph: Graph) -> Dim:
        """Return the axes of the weights that the product with the values sums over."""
        axes = self.product.axes(graph.dimensions)
        return axes.right_inner if self.values_first else axes.left_inner


def score_product(graph: Graph, masked: TensorRef, dim: int) -> Meeting | None:
    """Return what made the scores that a softmax is taken of: a product, or where there is none what has them else.

    Relative positions are products too: they are gathered, or shifted on the way, or do not depend on the input.
    """
    best: tuple[tuple[bool, bool, bool, bool, int], Meeting] | None = None
    over = graph.dimensions.along(masked, dim)
    for step in graph.back(masked, lambda op: graph.carries(op) or _mixes(graph, op, over)):
        op = graph.recording.producer(step.tensor)
        if op is None:
            continue
        learned = _has_learned_query(graph, op, over)
        product = product_of(graph.recording, op) if learned else graph.product(op)
        if product is not None and _mixes_heads(graph, step.path, product):
            gathered = any(passed.does("gathers") for passed in step.path)
            of_positions = not all(map(graph.comes_from_inputs, (product.left, product.right)))
            rank = (learned, gathered, of_positions, any(map(graph.is_projection, step.path)), len(step.path))
            if best is None or rank < best[0]:
                best = (rank, Meeting(product, tuple(reversed(step.path)), product.op.output))
    joint = joint_scores(graph, masked, dim) if best is None or best[0][0] else None
    if joint is not None:
        return Meeting(*joint, joint[0].op.output)
    return None if best is None else best[1]


def _has_learned_query(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether this is a product of keys with a parameter that stands for the queries, batch by batch.

    A projection has no batch; and where a router's weights stand, the softmax runs over what they give.
    """
    factors = graph.operands(op) if op.base_name in ("bmm", "baddbmm") else None
    keys = [tensor for tensor in factors or () if not graph.is_weight(tensor)]
    return len(keys) == 1 and not over.isdisjoint(atom for dim in graph.dimensions.of(keys[0])[-2:] for atom in dim)


def value_product(graph: Graph, weights: TensorRef, dim: int) -> Meeting | None:
    """Return the product of weights and values; None where there is none."""
    if not weights.shape:
        return None
    single: Meeting | None = None
    over = graph.dimensions.along(weights, dim)

    def through(op: Op) -> bool:
        # Where one weight of each query is left, keys are chosen, and not averaged.
        picks = op.does("picks") and dim < len(op.output.shape) and op.output.shape[dim] > 1
        return graph.carries(op) or picks or _mixes(graph, op, over) or _norms_heads(graph, op, over)

    for op, step in graph.forward(weights, through):
        product = graph.product(op)
        if product is None:
            product = graph.product_with(op)
            # A sum over anything else is no average over keys.
            picked = [graph.dimensions.along(passed.output, dim) for passed in step.path if passed.does("picks")]
            if product is not None and not _sums(graph, product, over.union(*picked)):
                product = None
        if product is not None:
            # Mixed by head, or laid out along what else there is, as where they say what is written into which slot,
            # they are weights still if they are summed over the keys.
            changed = any(graph.is_projection(passed) or outer_product_of(passed) for passed in step.path)
            if not changed or _sums(graph, product, over):
                return Meeting(product, step.path, step.tensor)
        if single is None and len(op.inputs) == 2 and op.base_name == "mul" and weights.shape[dim] == 1:
            # The average over a single key needs no sum: einsum multiplies.
            values = op.inputs[op.inputs[0].id == step.tensor.id]
            wider = values.numel > step.tensor.numel and graph.comes_from_inputs(values)
            single = Meeting(Product(op, op, *op.inputs), step.path, step.tensor) if wider else None
    return single


def _sums(graph: Graph, product: Product, over: set[Axis]) -> bool:
    """Return whether a product sums over what the softmax runs over."""
    axes = product.axes(graph.dimensions)
    return not over or not over.isdisjoint((*axes.left_inner, *axes.right_inner))


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """Return a projection, as far as it could be one from heads to heads; None for any other operation."""
    if not graph.is_projection(op):
        return None
    source, place = graph.projected(op), -1
    if op.base_name == "convolution":
        place = 1
    elif graph.is_weight((graph.operands(op) or op.inputs)[0]) and len(source.shape) > 1:
        place = -2
    return Mixing(op, source, place)


def _mixes(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether a projection leaves alone what the softmax runs over: it may mix scores or weights by head."""
    mixing = mixing_of(graph, op) if over else None
    if mixing is None:
        return False
    dims = graph.dimensions.of(mixing.source)
    return over <= {atom for dim in dims for atom in dim} - set(dims[mixing.place])


def _norms_heads(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether this is a norm over another dimension than the one that the softmax runs over: over the heads."""
    if not over or not op.does("norms"):
        return False
    dims = graph.dimensions.of(op.inputs[0])
    return len(dims) > 1 and not over & set(dims[1 if "batch_norm" in op.base_name else -1])


def _mixes_heads(graph: Graph, path: Iterable[Op], product: Product) -> bool:
    """Return whether projections on the way to the softmax mix what the product of scores runs over, the heads."""
    heads = set(wide(product.axes(graph.dimensions).batch))
    mixings = (mixing for op in path if (mixing := mixing_of(graph, op)) is not None)
    return all(graph.dimensions.along(mixing.source, mixing.place) <= heads for mixing in mixings)


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Return whether this only moves a factor about for the product: within its call, or to broadcast it."""
    if not graph.moves(op):
        return False
    broadcast = product.multiply is not product.op and op.does("broadcasts")
    return op.call == product.multiply.call or (
        broadcast and (op.base_name == "expand" or has_sizes_of(op.inputs[0], op.output))
    )


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """Return a factor before it was moved for the product."""
    return graph.before(factor, lambda op: moved_for(graph, op, product))


@dataclass(frozen=True)
class Softmaxed:
    """Which side of the product of scores holds the keys, and whether the softmax runs over them."""

    key_first: bool
    over_queries: bool = False


def softmaxed_side(graph: Graph, scores: Meeting, values: Meeting, masked: TensorRef, dim: int) -> Softmaxed | None:
    """Return the side of the keys: what the values are averaged over. None where this softmax is no attention's.

    None are softmaxes that assign: over an axis along which every score has a product of its own, where there are no
    queries beside the keys (capsules), over the features that a projection gives (clusters of nodes), over clusters
    that average what was compared with them (k-means), and of learned queries that average the keys as they are.
    """
    product = scores.product
    if len(product.op.output.shape) < 2 or not masked.shape:
        return Softmaxed(key_first=False)
    axes = product.axes(graph.dimensions)
    rows, columns, over = set(axes.rows), set(axes.columns), graph.dimensions.along(masked, dim)
    if over & set(axes.batch) - rows - columns and not (size_of(rows) > 1 and size_of(columns) > 1):
        return None
    over_rows = bool(over & rows) and not over & columns
    summed = set(wide(values.averaged(graph)))
    if over and summed & (columns if over_rows else rows) - over and not summed & over:
        keys = product.right if over_rows else product.left
        assigns = _is_width(graph, product, over) or _are_alike(graph, values, keys)
        return None if assigns else Softmaxed(not over_rows, over_queries=True)
    # A parameter's scores of some features weigh the very same features: pooling, and no attention.
    given = [factor for factor in (product.left, product.right) if not graph.is_weight(factor)]
    pools = len(given) == 1 and _are_alike(graph, values, given[0])
    return None if pools else Softmaxed(over_rows)


def _is_width(graph: Graph, product: Product, over: set[Axis]) -> bool:
    """Return whether an axis of the scores is all the features that a projection gives one factor of their product."""
    for factor in (product.left, product.right):
        for step in graph.back(factor, lambda op: graph.moves(op) or op.pointwise):
            op = graph.recording.producer(step.tensor)
            if op is not None and graph.is_projection(op) and set(graph.dimensions.of(op.output)[-1]) <= over:
                return True
    return False


def _are_alike(graph: Graph, values: Meeting, keys: TensorRef) -> bool:
    """Return whether what is averaged are the very features that made the scores."""
    return graph.before_moves(keys, whole=True).id == graph.before_moves(values.values, whole=True).id

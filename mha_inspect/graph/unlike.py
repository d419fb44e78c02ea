"""Say what is no attention, though it has scores and a product with values: capsules, slots, k-means, routing."""

from __future__ import annotations

from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .attention import Attention
from .axis import Axis, wide
from .dataflow import Graph
from .meet import only_activation
from .products import Product, ProductPath
from .reading import Softmax


class SoftmaxedSide(NamedTuple):
    """Which side of the scores is the keys, and which the softmax runs over."""

    key_first: bool
    """Whether the left side of the scores is the keys."""
    over_queries: bool
    """Whether the softmax runs over the queries."""


def softmaxed_side(
    graph: Graph,
    product: Product,
    values: ProductPath,
    masked: TensorRef,
    dim: int,
) -> SoftmaxedSide | None:
    """Return which side of the scores is the keys, and whether the softmax runs over the queries.

    The keys are the axis that the values are averaged over. None for softmaxes that are not attention: clusters of
    nodes (over the features of a projection), k-means (over clusters that average the tensors compared with them), and
    slots of experts, to which learned queries hand out the keys themselves.
    """
    axes = product.axes(graph.dimensions)
    over = graph.dimensions.along(masked, dim)
    summed = set(wide(values.averaged(graph.dimensions)))
    over_rows = not over.isdisjoint(axes.rows) and over.isdisjoint(axes.columns)
    beside = set(axes.columns if over_rows else axes.rows) - over
    is_over_queries = bool(over) and not summed.isdisjoint(beside) and summed.isdisjoint(over)
    if is_over_queries:
        keys = product.right if over_rows else product.left
        averages_keys = _unmoved(graph, keys) == _unmoved(graph, values.values)
        if averages_keys or _is_width(graph, product, over):
            return None
        return SoftmaxedSide(key_first=not over_rows, over_queries=True)
    if _hands_out_keys(graph, product, values):
        return None
    return SoftmaxedSide(key_first=over_rows, over_queries=False)


def _hands_out_keys(graph: Graph, product: Product, values: ProductPath) -> bool:
    """Return whether learned queries average the keys themselves, and another softmax hands the tokens back.

    These are experts or slots.
    """
    keys = only_activation(graph, product)
    if keys is None or _unmoved(graph, keys) != _unmoved(graph, values.values):
        return False
    softmaxes: set[int] = set()
    for reader, _ in graph.forward(product.op.output, graph.passes_on):
        if reader.does("softmax"):
            softmaxes.add(reader.index)
    return len(softmaxes) > 1


def is_routing(graph: Graph, query: TensorRef, key: TensorRef, values: TensorRef) -> bool:
    """Return whether votes are averaged, compared with their own average, and averaged again: routing by agreement.

        shares = agreed.softmax(1)                        # batch input capsule, of zeros at first
        made = (shares[..., None] * votes).sum(1)         # votes: batch input capsule features
        agreed = agreed + (votes * made[:, None]).sum(-1)

    The queries of an attention are given or learned, also where its keys are its values.
    """
    votes = _unmoved(graph, values)
    if _unmoved(graph, key) != votes:
        return False
    is_averaged = False
    visited: set[int] = set()
    queue = [query]
    while queue:
        tensor = queue.pop()
        if tensor.id in visited:
            continue
        visited.add(tensor.id)
        if _unmoved(graph, tensor) == votes:
            return False
        op = graph.producer(tensor)
        if op is None:
            if tensor.id in graph.given_or_learned:
                return False
            continue
        shares = [read for read in op.inputs if _unmoved(graph, read) != votes]
        multiplies = op.does("product") or op.base_name == "mul"
        if multiplies and 0 < len(shares) < len(op.inputs):
            is_averaged = True
            queue += shares
        else:
            queue += op.inputs
    return is_averaged


def _is_width(graph: Graph, product: Product, over: set[Axis]) -> bool:
    """Return whether an axis of the scores is all output features of a projection of one factor."""
    for factor in (product.left, product.right):
        for step in graph.back(factor, lambda op: graph.moves(op) or op.pointwise):
            op = graph.producer(step.tensor)
            if op is None or not graph.is_projection(op):
                continue
            features = graph.dimensions.of(op.output)[-1]
            if over.issuperset(features):
                return True
    return False


def _unmoved(graph: Graph, tensor: TensorRef) -> int:
    """Return the id of a tensor before all of its elements were viewed or copied."""

    def is_whole(op: Op) -> bool:
        if not graph.moves(op):
            return False
        return op.inputs[0].numel <= op.output.numel

    return graph.before(tensor, is_whole).id


def is_dispatch(graph: Graph, attention: Attention, attentions: list[Attention]) -> bool:
    """Return whether one scores product gives the weights of two averages, and one average depends on the other.

    This is a soft mixture of experts: tokens are averaged into slots, and the results are averaged back into tokens.
    With projected values it is an attention of two sides to each other.
    """
    scores = attention.score_product.op
    for second in attentions:
        if second is attention or second.score_product.op is not scores:
            continue
        if _gives_values(graph, attention, second) or _gives_values(graph, second, attention):
            return True
    return False


def _gives_values(graph: Graph, first: Attention, second: Attention) -> bool:
    """Return whether an average of values that were not projected leads to the values of another attention."""
    if "value" in first.projections:
        return False
    return graph.leads_to(first.stages["context"], second.stages["v_heads"])


def is_made_of_weights(
    graph: Graph,
    values: TensorRef,
    softmax: Softmax,
    scored: Product,
) -> bool:
    """Return whether these values are weights: a pseudo-inverse of them, or powers of an adjacency matrix.

    They depend on these very weights element by element, or are computed from weights and constants alone.
    """
    weights = softmax.op.output.id
    if any(step.tensor.id == weights for step in graph.back(values, graph.passes_on)):
        return True
    has_weights = False

    def through(op: Op) -> bool:
        return op is not scored.op and not _ends_values(graph, op)

    for step in graph.back(values, through):
        op = graph.producer(step.tensor)
        if op is None:
            if step.tensor.id in graph.given_or_learned:
                return False
        elif op is scored.op or _gives_weights(graph, op):
            has_weights = True
        elif _ends_values(graph, op):
            return False
    return has_weights


def _ends_values(graph: Graph, op: Op) -> bool:
    """Return whether a walk back from values ends here: at a projection, or at a softmax."""
    return graph.is_projection(op) or op.does("softmax")


def _gives_weights(graph: Graph, op: Op) -> bool:
    """Return whether this is a softmax of scores; one over the features of a tensor gives no weights."""
    if not op.does("softmax"):
        return False
    for step in graph.back(op.inputs[0], graph.passes_on):
        maker = graph.producer(step.tensor)
        if maker is not None and graph.product(maker) is not None:
            return True
    return False


def _is_of_activations(graph: Graph, product: Product) -> bool:
    """Return whether both factors depend on inputs and are no matrices picked from a stack of parameters."""
    if not graph.comes_from_inputs(product.left, product.right):
        return False
    if _is_picked_weight(graph, product.left):
        return False
    return not _is_picked_weight(graph, product.right)


def _is_picked_weight(graph: Graph, factor: TensorRef) -> bool:
    """Return whether a factor is picked from a stack of matrices that are parameters."""
    op = graph.producer(graph.before_moves(factor))
    if op is None or not op.does("gathers"):
        return False
    table = op.inputs[0]
    return len(table.shape) > 2 and graph.is_weight(table)


def compares(graph: Graph, product: Product) -> bool:
    """Return whether features are summed and positions remain: queries are compared with keys."""
    if not _is_of_activations(graph, product):
        return False
    axes = product.axes(graph.dimensions)
    if not product.is_dot:
        # Without features to sum, e.g. x·w − |x|²/2 of random features has the queries on both sides.
        return product.op is not product.multiply or bool(wide(axes.rows) and wide(axes.columns))
    sums_features = not graph.features.isdisjoint(wide(axes.left_inner))
    return sums_features and graph.features.isdisjoint(wide(axes.rows, axes.columns))


def power_of(graph: Graph, tensor: TensorRef, weights: TensorRef) -> int:
    """Return how many times the weights are multiplied in `(weights @ weights) @ values`; 0 for anything else.

    Both factors are the weights, or products of them: `batch heads query key` with as many keys as queries.
    """
    source = graph.before_moves(tensor)
    if source.id == graph.before_moves(weights).id:
        return 1
    op = graph.producer(source)
    product = None if op is None else graph.products.get(op.index)
    if product is None:
        return 0
    left = power_of(graph, product.left, weights)
    first = graph.before_moves(product.left)
    second = graph.before_moves(product.right)
    if not left or first.id == second.id:
        return 2 * left
    right = power_of(graph, product.right, weights)
    return left + right if right else 0

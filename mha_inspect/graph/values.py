"""Find the values product of the weights, and decide whether softmax, scores and values are an attention.

Weights need no softmax: `sigmoid(scores)`, `relu(scores) / n`, `exp(scores) / (1 + Σ)`, sparsemax. They are computed
element by element, and with sums over the keys of each query. Without a nonlinear function it is linear attention: its
products can be reordered, so it has no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .axis import Axis, size_of, wide
from .dataflow import Graph, Step, made_of
from .products import Product, ProductAxes, ProductPath, is_wide
from .rules import reduced_places
from .scores import mixes, score_product
from .softmax import Softmax

_DIVISORS = {"div": 1, "reciprocal": 0}
"""Operations that divide, and the place of the divisor among their tensors."""


def value_product(graph: Graph, weights: TensorRef, dim: int) -> ProductPath | None:
    """Return the product of weights and values; None if there is none."""
    if not weights.shape:
        return None
    over = graph.dimensions.along(weights, dim)
    single: ProductPath | None = None

    def through(op: Op) -> bool:
        if op.outputs and power_of(graph, op.output, weights) > 1:
            return True
        # If one weight of each query remains, keys are chosen instead of averaged.
        if op.does("picks") and dim < len(op.output.shape) and op.output.shape[dim] > 1:
            return True
        return graph.passes_on(op) or mixes(graph, op, over) or _norms_heads(graph, op, over)

    for op, step in graph.forward(weights, through):
        product = graph.products.get(op.index) or graph.products_by_multiplication.get(op.index)
        is_summed = product is not None and power_of(graph, op.output, weights) < 2
        if product is not None and is_summed and _sums_over_keys(graph, product, step.path, over):
            return ProductPath(product, step.path, step.tensor)
        if single is None and weights.shape[dim] == 1:
            single = _over_single_key(graph, op, step)
    return single


def _sums_over_keys(graph: Graph, product: Product, path: Iterable[Op], over: set[Axis]) -> bool:
    """Return whether a product may be that of weights and values.

    Weights that are mixed by head, or multiplied out along other axes, are weights if they are summed over the keys.
    """
    if not over or not any(graph.is_projection(op) or _is_outer(op) for op in path):
        return True
    axes = product.axes(graph.dimensions)
    return not over.isdisjoint((*axes.left_inner, *axes.right_inner))


def _over_single_key(graph: Graph, op: Op, step: Step) -> ProductPath | None:
    """Return a multiplication as the average over a single key, which needs no sum: einsum multiplies. Else None."""
    if op.base_name != "mul" or len(op.inputs) != 2 or op.output.numel <= step.tensor.numel:
        return None
    left, right = op.inputs
    values = right if left.id == step.tensor.id else left
    if not graph.comes_from_inputs(values):
        return None
    return ProductPath(Product(op, op, left, right), step.path, step.tensor)


def power_of(graph: Graph, tensor: TensorRef, weights: TensorRef) -> int:
    """Return how many times the weights are multiplied in `(weights @ weights) @ values`; 0 for anything else.

    Both factors are the weights, or products of them: `batch heads query key` with as many keys as queries.
    """
    source = graph.before_moves(tensor)
    if source.id == graph.before_moves(weights).id:
        return 1
    op = graph.recording.producer(source)
    product = None if op is None else graph.products.get(op.index)
    if product is None:
        return 0
    left = power_of(graph, product.left, weights)
    if not left or graph.before_moves(product.left).id == graph.before_moves(product.right).id:
        return 2 * left
    right = power_of(graph, product.right, weights)
    return left + right if right else 0


def is_made_of_weights(graph: Graph, values: TensorRef, softmax: Softmax, scored: Product) -> bool:
    """Return whether these values are weights: a pseudo-inverse of them, or powers of an adjacency matrix.

    They depend on these very weights element by element, or are computed from weights and constants alone.
    """
    if any(step.tensor.id == softmax.op.output.id for step in graph.back(values, graph.passes_on)):
        return True
    has_weights = False
    for step in graph.back(values, lambda op: op is not scored.op and not _ends_values(graph, op)):
        op = graph.recording.producer(step.tensor)
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
    return graph.is_projection(op) or op.index in graph.softmaxes


def _gives_weights(graph: Graph, op: Op) -> bool:
    """Return whether this is a softmax of scores; one over the features of a tensor gives no weights."""
    softmax = graph.softmaxes.get(op.index)
    if softmax is None:
        return False
    return score_product(graph, softmax.masked, softmax.dim, softmax.op.module) is not None


def sums_over_all(graph: Graph, softmax: Softmax, values: ProductPath) -> bool:
    """Return whether the product with the values sums over every dimension of a softmax over several."""
    if not softmax.beside:
        return True
    over: set[Axis] = set()
    for place in (softmax.dim, *softmax.beside):
        over |= graph.dimensions.along(softmax.op.output, place)
    return over <= set(wide(values.averaged(graph.dimensions)))


def _is_outer(op: Op) -> bool:
    """Return whether this is a multiplication in which each factor is repeated along an axis of the other."""
    if op.base_name != "mul" or len(op.inputs) != 2:
        return False
    rank = len(op.output.shape)
    left, right = (_wide_places(factor, rank) for factor in op.inputs)
    return bool(left - right) and bool(right - left)


def _wide_places(factor: TensorRef, rank: int) -> set[int]:
    """Return the dimensions of a result of `rank` dimensions along which a factor has more than one element."""
    return {place for place in range(rank) if is_wide(factor, rank, place)}


def _norms_heads(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether this is a norm over a dimension other than that of the softmax: over the heads."""
    if not over or not op.does("norms"):
        return False
    dims = graph.dimensions.of(op.inputs[0])
    if len(dims) < 2:
        return False
    normed = dims[1] if "batch_norm" in op.base_name else dims[-1]
    return over.isdisjoint(normed)


class SoftmaxedSide(NamedTuple):
    """Which side of the scores is the keys, and which the softmax runs over."""

    key_first: bool
    """Whether the left side of the scores is the keys."""
    over_queries: bool
    """Whether the softmax runs over the queries."""


def softmaxed_side(
    graph: Graph, product: Product, values: ProductPath, masked: TensorRef, dim: int
) -> SoftmaxedSide | None:
    """Return which side of the scores is the keys, and whether the softmax runs over the queries.

    The keys are the axis that the values are averaged over. Return None for softmaxes that are not attention: capsule
    routing (over an axis that every score has a product of its own for, without queries beside the keys, or of weights
    that average over the features of the scores), clusters of nodes (over the features of a projection), k-means (over
    clusters that average the tensors compared with them), and slots of experts, to which learned queries hand out the
    keys themselves.
    """
    axes = product.axes(graph.dimensions)
    over = graph.dimensions.along(masked, dim)
    summed = set(wide(values.averaged(graph.dimensions)))
    if _is_over_votes(axes, over, summed):
        return None
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


def _is_over_votes(axes: ProductAxes, over: set[Axis], summed: set[Axis]) -> bool:
    """Return whether a softmax is one of capsules: over products of their own, or averaged over features."""
    batch = set(axes.batch).difference(axes.rows, axes.columns)
    has_queries = size_of(set(axes.rows)) > 1 and size_of(set(axes.columns)) > 1
    if not over.isdisjoint(batch) and not has_queries:
        return True
    features = {*axes.left_inner, *axes.right_inner} - over
    return bool(over) and bool(summed) and summed <= features


def _hands_out_keys(graph: Graph, product: Product, values: ProductPath) -> bool:
    """Return whether learned queries average the keys themselves, and another softmax hands the tokens back.

    These are experts or slots.
    """
    activations = [factor for factor in (product.left, product.right) if not graph.is_weight(factor)]
    if len(activations) != 1 or _unmoved(graph, activations[0]) != _unmoved(graph, values.values):
        return False
    readers = graph.forward(product.op.output, graph.passes_on)
    softmaxes = {reader.index for reader, _ in readers if reader.index in graph.softmaxes}
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
        op = graph.recording.producer(tensor)
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
            op = graph.recording.producer(step.tensor)
            if op is not None and graph.is_projection(op) and over.issuperset(graph.dimensions.of(op.output)[-1]):
                return True
    return False


def _unmoved(graph: Graph, tensor: TensorRef) -> int:
    """Return the id of a tensor before all of its elements were viewed or copied."""

    def is_whole(op: Op) -> bool:
        return graph.moves(op) and op.inputs[0].numel <= op.output.numel

    return graph.before(tensor, is_whole).id


# -- softmaxes in pieces ----------------------------------------------------------------------------------------------


def find_pieces(graph: Graph) -> Iterator[tuple[Softmax, ProductPath, ProductPath]]:
    """Yield softmaxes over pieces of the keys, each with its products: flash attention written in Python.

    The exponentials of each piece are summed, and multiplied by the values. Both are rescaled and added to those of
    other pieces, and one is divided by the other.
    """
    for op in graph.recording.ops:
        masked = _shifted_before(graph, op)
        if masked is None or op.index in graph.softmaxes:
            continue
        total = _sum_of_exponentials(graph, op)
        if total is None:
            continue
        places = reduced_places(total)
        if len(places) != 1:
            continue
        values = value_product(graph, op.output, places[0])
        scores = None if values is None else score_product(graph, masked, places[0], op.module)
        if values is None or scores is None or not _compares(graph, scores.product):
            continue
        divided = _division_of_sums(graph, op, total, values.product.op)
        if divided is not None:
            yield Softmax(op, masked, places[0], divided=divided), scores, values


def _shifted_before(graph: Graph, op: Op) -> TensorRef | None:
    """Return the scores in `exp(scores - maximum)`; None for other operations."""
    if op.base_name.rstrip("_") != "exp" or not op.inputs:
        return None
    shift = graph.recording.producer(op.inputs[0])
    if shift is None or shift.base_name.rstrip("_") != "sub":
        return None
    return shift.inputs[0]


def _sum_of_exponentials(graph: Graph, exponential: Op) -> Op | None:
    """Return the operation that sums these exponentials, at most masked before it; None if there is none."""
    for reader, _ in graph.forward(exponential.output, lambda op: graph.moves(op) or op.does("fills")):
        if reader.base_name == "sum":
            return reader
    return None


def _division_of_sums(graph: Graph, exponential: Op, total: Op, product: Op) -> Op | None:
    """Return the last operation that divides what is made of a product with values by what is made of a sum.

    It is the addition to other pieces after it, if there is one. None if nothing is divided so.
    """
    after = [op for op in graph.recording.ops[exponential.index :] if not op.does("product")]
    totals = made_of({total.output.id}, after)
    contexts = made_of({product.output.id}, after)
    inverse = made_of(_divided_by(after, totals), after)
    of_sums = totals - contexts
    divisions = [
        op
        for op in after
        if op.does("scales") and op.output.id in inverse and _reads(op, contexts) and _reads(op, of_sums)
    ]
    if not divisions:
        return None
    first, last = divisions[0], divisions[-1]
    if first.kind == "write":  # other queries may be in the same memory
        last = [op for op in divisions if op.output.offset == first.output.offset][-1]
    both = totals | contexts
    for reader in graph.recording.consumers.get(last.output.id, ()):
        if reader.base_name == "add" and all(tensor.id in both for tensor in reader.inputs):
            return reader
    return last


def _divided_by(ops: Iterable[Op], divisors: set[int]) -> set[int]:
    """Return the ids of what is divided by one of these, or the inverse of it."""
    quotients = set()
    for op in ops:
        place = _DIVISORS.get(op.base_name.rstrip("_"))
        if place is not None and any(tensor.id in divisors for tensor in op.inputs[place:]):
            quotients.add(op.output.id)
    return quotients


def _reads(op: Op, ids: set[int]) -> bool:
    """Return whether an operation reads one of these tensors."""
    return any(tensor.id in ids for tensor in op.inputs)


# -- weights without a softmax ----------------------------------------------------------------------------------------


Weighing = tuple[Softmax, ProductPath, ProductPath]
"""The operations that compute weights from scores, the scores product, and the values product."""


def find_weighings(graph: Graph, taken: set[int]) -> Iterator[Weighing]:
    """Yield every path from scores to values without a softmax, except for products that are taken."""
    for product in graph.products.values():
        if product.op.index not in taken and _is_of_activations(graph, product):
            for tensor in (product.left, product.right):
                weighing = _weighing(graph, ProductPath(product, (), tensor), taken)
                if weighing is not None:
                    yield weighing


def _weighing(graph: Graph, values: ProductPath, taken: set[int]) -> Weighing | None:
    """Return how one factor of a product was computed from scores; None if it was not."""
    over = set(wide(values.averaged(graph.dimensions)))
    maker = graph.recording.producer(graph.before_moves(values.values))
    if not over or (maker is not None and maker.index in graph.softmaxes):
        return None  # values given by a softmax: votes for classes, or counts of clusters
    for step in graph.back(values.tensor, graph.passes_on):
        op = graph.recording.producer(step.tensor)
        if op is None or op.index in taken or op is values.product.multiply:
            continue
        if _place_of(graph, op.output, over) is not None and (graph.product(op) or graph.reduces(op)):
            return _weighing_from(graph, op, values._replace(path=step.path[::-1]), over, taken)
    return None


def _weighing_from(graph: Graph, op: Op, values: ProductPath, over: set[Axis], taken: set[int]) -> Weighing | None:
    """Return the weights that are computed of the result of an operation; None if these are no scores.

    The path of `values` begins at that operation.
    """
    path = values.path
    part = _weighing_part(graph, op.output, path, over)
    if part is None:
        return None
    masked = _input_on_path(path, part.start)
    dim = _place_of(graph, masked, over)
    scores = None if dim is None else score_product(graph, masked, dim, op.module)
    if dim is None or scores is None:
        return None
    if scores.product.op.index in taken or not _compares(graph, scores.product):
        return None
    masks = [mask for mask in path[part.bent : part.stop] if mask.does("fills_where") or len(mask.inputs) == 2]
    softmax = Softmax(path[part.stop - 1], masked, dim, tuple(masks), ops=path[part.start : part.stop])
    return softmax, scores, values._replace(path=path[part.stop :])


def _input_on_path(path: tuple[Op, ...], place: int) -> TensorRef:
    """Return the input of an operation of a path that the operation before it made; of the first, its first input."""
    inputs = path[place].inputs
    if place == 0:
        return inputs[0]
    return next(tensor for tensor in inputs if tensor in path[place - 1].outputs)


class _WeighingPart(NamedTuple):
    """Where the steps from scores to weights are on a path."""

    start: int
    bent: int
    """The place after the last one that bends."""
    stop: int
    """The place after the masks."""


def _weighing_part(graph: Graph, scores: TensorRef, path: tuple[Op, ...], over: set[Axis]) -> _WeighingPart | None:
    """Return where the steps from scores to weights begin, bend last, and end after masks; None without a bend."""
    places = _places_of_steps(graph, scores, path, over)
    if places is None or not any(graph.bends(path[place]) for place in places):
        return None
    if path[places[-1]].base_name.rstrip("_") == "exp":
        return None  # exponentials are divided later, one piece at a time
    start, bent = places[0], places[-1] + 1
    while start and _adds_number(path[start - 1]):
        start -= 1
    stop = bent
    while stop < len(path) and (path[stop].does("masks") or graph.is_scale(path[stop])):
        stop += 1
    return _WeighingPart(start, bent, stop)


def _adds_number(op: Op) -> bool:
    return op.base_name in ("add", "sub") and len(op.inputs) == 1


def _places_of_steps(graph: Graph, scores: TensorRef, path: tuple[Op, ...], over: set[Axis]) -> list[int] | None:
    """Return the places on a path of what bends scores, or combines them with what depends on them too.

    None if weights are compared with those of other queries.
    """
    if not path:
        return []
    since = graph.recording.producers[scores.id] + 1
    dependent = made_of({scores.id}, graph.recording.ops[since : path[-1].index])
    places = []
    came_by = path[0].inputs[:1]
    for place, op in enumerate(path):
        operands = [tensor for tensor in op.inputs if tensor.id in dependent and tensor not in came_by]
        for operand in operands:
            if operand.numel > 1 and not _repeated(graph, operand, op.output) <= over:
                return None
        if operands or graph.bends(op):
            places.append(place)
        came_by = op.outputs
    return places


def _repeated(graph: Graph, factor: TensorRef, whole: TensorRef) -> set[Axis]:
    """Return the axes that a tensor is broadcast along, by position: it may have the same axis in another position."""
    axes: set[Axis] = set()
    for place, dim in enumerate(graph.dimensions.of(whole)):
        if not is_wide(factor, len(whole.shape), place):
            axes.update(wide(dim))
    return axes


def _place_of(graph: Graph, tensor: TensorRef, over: set[Axis]) -> int | None:
    """Return the one dimension that has these axes; None if several or no dimensions do."""
    dims = graph.dimensions.of(tensor)
    places = [place for place, dim in enumerate(dims) if not over.isdisjoint(dim)]
    return places[0] if len(places) == 1 else None


def _is_of_activations(graph: Graph, product: Product) -> bool:
    """Return whether both factors depend on inputs and are no matrices picked from a stack of parameters."""
    if not graph.comes_from_inputs(product.left, product.right):
        return False
    return not any(_is_picked_weight(graph, factor) for factor in (product.left, product.right))


def _is_picked_weight(graph: Graph, factor: TensorRef) -> bool:
    """Return whether a factor is picked from a stack of matrices that are parameters."""
    op = graph.recording.producer(graph.before_moves(factor))
    if op is None or not op.does("gathers"):
        return False
    table = op.inputs[0]
    return len(table.shape) > 2 and graph.is_weight(table)


def _compares(graph: Graph, product: Product) -> bool:
    """Return whether features are summed and positions remain: queries are compared with keys."""
    if not _is_of_activations(graph, product):
        return False
    if not product.is_dot:
        return True
    axes = product.axes(graph.dimensions)
    sums_features = not graph.features.isdisjoint(wide(axes.left_inner))
    return sums_features and graph.features.isdisjoint(wide(axes.rows, axes.columns))

"""Find the values product of the weights, and decide whether softmax, scores and values are an attention.

Weights need no softmax: `sigmoid(scores)`, `relu(scores) / n`, `exp(scores) / (1 + Σ)`, sparsemax. They are computed
element by element, and with sums over the keys of each query. Without a nonlinear function it is linear attention: its
products can be reordered, so it has no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .axis import Axis, plain_name, size_of, wide
from .dataflow import Graph, Step, made_of
from .ids import any_in, ids_of
from .products import Product, ProductAxes, ProductPath, is_wide, wide_places
from .rules import reduced_places
from .scores import mixes, only_activation, score_product
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
        if _leaves_several(op, dim) or graph.passes_on(op):
            return True
        return mixes(graph, op, over) or _norms_heads(graph, op, over)

    for op, step in graph.forward(weights, through):
        product = graph.products.get(op.index) or graph.products_by_multiplication.get(op.index)
        is_average = product is not None and power_of(graph, op.output, weights) < 2
        if product is not None and is_average and _sums_over_keys(graph, product, step.path, over):
            return ProductPath(product, step.path, step.tensor)
        if single is None and weights.shape[dim] == 1:
            single = _over_single_key(graph, op, step)
    return single


def _leaves_several(op: Op, dim: int) -> bool:
    """Return whether several weights of each query are picked: if one remains, keys are chosen and not averaged."""
    if not op.does("picks"):
        return False
    shape = op.output.shape
    return dim < len(shape) and shape[dim] > 1


def _sums_over_keys(
    graph: Graph,
    product: Product,
    path: Iterable[Op],
    over: set[Axis],
) -> bool:
    """Return whether a product may be that of weights and values.

    Weights that are mixed by head, or multiplied out along other axes, are weights if they are summed over the keys.
    """
    is_changed = any(graph.is_projection(op) or _is_outer(op) for op in path)
    if not over or not is_changed:
        return True
    axes = product.axes(graph.dimensions)
    return not over.isdisjoint((*axes.left_inner, *axes.right_inner))


def _over_single_key(graph: Graph, op: Op, step: Step) -> ProductPath | None:
    """Return a multiplication as the average over a single key, which needs no sum: einsum multiplies. Else None."""
    if op.base_name != "mul" or len(op.inputs) != 2:
        return None
    left, right = op.inputs
    values = right if left.id == step.tensor.id else left
    is_wider = op.output.numel > step.tensor.numel
    if not is_wider or not graph.comes_from_inputs(values):
        return None
    return ProductPath(Product(op, op, left, right), step.path, step.tensor)


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
    left = wide_places(op.inputs[0], rank)
    right = wide_places(op.inputs[1], rank)
    return not left <= right and not right <= left


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
    graph: Graph,
    product: Product,
    values: ProductPath,
    masked: TensorRef,
    dim: int,
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
    rows, columns = set(axes.rows), set(axes.columns)
    batch = set(axes.batch) - rows - columns
    has_queries = size_of(rows) > 1 and size_of(columns) > 1
    if not over.isdisjoint(batch) and not has_queries:
        return True
    features = {*axes.left_inner, *axes.right_inner} - over
    return bool(over and summed) and summed <= features


def _hands_out_keys(graph: Graph, product: Product, values: ProductPath) -> bool:
    """Return whether learned queries average the keys themselves, and another softmax hands the tokens back.

    These are experts or slots.
    """
    keys = only_activation(graph, product)
    if keys is None or _unmoved(graph, keys) != _unmoved(graph, values.values):
        return False
    softmaxes: set[int] = set()
    for reader, _ in graph.forward(product.op.output, graph.passes_on):
        if reader.index in graph.softmaxes:
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
    if plain_name(op) != "exp" or not op.inputs:
        return None
    shift = graph.producer(op.inputs[0])
    if shift is None or plain_name(shift) != "sub":
        return None
    return shift.inputs[0]


def _sum_of_exponentials(graph: Graph, exponential: Op) -> Op | None:
    """Return the operation that sums these exponentials, at most masked before it; None if there is none."""

    def through(op: Op) -> bool:
        return graph.moves(op) or op.does("fills")

    for reader, _ in graph.forward(exponential.output, through):
        if reader.base_name == "sum":
            return reader
    return None


def _division_of_sums(graph: Graph, exponential: Op, total: Op, product: Op) -> Op | None:
    """Return the last operation that divides what is made of a product with values by what is made of a sum.

    It is the addition to other pieces after it, if there is one. None if nothing is divided so.
    """
    later = graph.recording.ops[exponential.index :]
    after = [op for op in later if not op.does("product")]
    totals = made_of({total.output.id}, after)
    contexts = made_of({product.output.id}, after)
    inverse = made_of(_divided_by(after, totals), after)
    of_sums = totals - contexts
    divisions: list[Op] = []
    for op in after:
        divides = op.does("scales") and op.output.id in inverse
        if divides and any_in(op.inputs, contexts) and any_in(op.inputs, of_sums):
            divisions.append(op)
    if not divisions:
        return None
    first = divisions[0].output
    if divisions[0].kind == "write":  # other queries may be in the same memory
        divisions = [op for op in divisions if op.output.offset == first.offset]
    last = divisions[-1]
    both = totals | contexts
    for reader in graph.readers(last.output):
        if reader.base_name == "add" and both.issuperset(ids_of(reader.inputs)):
            return reader
    return last


def _divided_by(ops: Iterable[Op], divisors: set[int]) -> set[int]:
    """Return the ids of what is divided by one of these, or the inverse of it."""
    quotients = set()
    for op in ops:
        place = _DIVISORS.get(plain_name(op))
        if place is not None and any_in(op.inputs[place:], divisors):
            quotients.add(op.output.id)
    return quotients


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
    if not over or _is_of_softmax(graph, values.values):
        return None
    for step in graph.back(values.tensor, graph.passes_on):
        op = graph.producer(step.tensor)
        if op is None or op.index in taken or op is values.product.multiply:
            continue
        may_be_scores = graph.product(op) is not None or graph.reduces(op)
        if may_be_scores and _place_of(graph, op.output, over) is not None:
            path = step.path[::-1]
            return _weighing_from(graph, op, values._replace(path=path), over, taken)
    return None


def _is_of_softmax(graph: Graph, values: TensorRef) -> bool:
    """Return whether values are given by a softmax: they are votes for classes, or counts of clusters."""
    maker = graph.producer(graph.before_moves(values))
    return maker is not None and maker.index in graph.softmaxes


def _weighing_from(
    graph: Graph,
    op: Op,
    values: ProductPath,
    over: set[Axis],
    taken: set[int],
) -> Weighing | None:
    """Return the weights that are computed of the result of an operation; None if these are no scores.

    The path of `values` begins at that operation.
    """
    path = values.path
    part = _weighing_part(graph, op.output, path, over)
    if part is None:
        return None
    masked = _input_on_path(path, part.start)
    dim = _place_of(graph, masked, over)
    if dim is None:
        return None
    scores = score_product(graph, masked, dim, op.module)
    if scores is None or scores.product.op.index in taken:
        return None
    if not _compares(graph, scores.product):
        return None
    weighing = path[part.start : part.stop]
    after_bend = path[part.bent : part.stop]
    masks = tuple(filter(_applies_mask, after_bend))
    softmax = Softmax(weighing[-1], masked, dim, masks, ops=weighing)
    rest = path[part.stop :]
    return softmax, scores, values._replace(path=rest)


def _applies_mask(op: Op) -> bool:
    """Return whether an operation applies a mask that is a tensor, and does not only scale by a number."""
    return op.does("fills_where") or len(op.inputs) == 2


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


def _weighing_part(
    graph: Graph,
    scores: TensorRef,
    path: tuple[Op, ...],
    over: set[Axis],
) -> _WeighingPart | None:
    """Return where the steps from scores to weights begin, bend last, and end after masks; None without a bend."""
    places = _places_of_steps(graph, scores, path, over)
    if places is None or not any(graph.bends(path[place]) for place in places):
        return None
    first, last = places[0], places[-1]
    if plain_name(path[last]) == "exp":
        return None  # exponentials are divided later, one piece at a time
    start = first
    while start and _adds_number(path[start - 1]):
        start -= 1
    stop = last + 1
    while stop < len(path) and _masks_or_scales(graph, path[stop]):
        stop += 1
    return _WeighingPart(start, last + 1, stop)


def _masks_or_scales(graph: Graph, op: Op) -> bool:
    return op.does("masks") or graph.is_scale(op)


def _adds_number(op: Op) -> bool:
    return op.base_name in ("add", "sub") and len(op.inputs) == 1


def _places_of_steps(
    graph: Graph,
    scores: TensorRef,
    path: tuple[Op, ...],
    over: set[Axis],
) -> list[int] | None:
    """Return the places on a path of what bends scores, or combines them with what depends on them too.

    None if weights are compared with those of other queries.
    """
    if not path:
        return []
    since = graph.recording.producers[scores.id] + 1
    between = graph.recording.ops[since : path[-1].index]
    dependent = made_of({scores.id}, between)
    places = []
    came_by = path[0].inputs[:1]
    for place, op in enumerate(path):
        operands = [tensor for tensor in op.inputs if tensor.id in dependent and tensor not in came_by]
        for operand in operands:
            is_of_query = _repeated(graph, operand, op.output) <= over
            if operand.numel > 1 and not is_of_query:
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


def _compares(graph: Graph, product: Product) -> bool:
    """Return whether features are summed and positions remain: queries are compared with keys."""
    if not _is_of_activations(graph, product):
        return False
    if not product.is_dot:
        return True
    axes = product.axes(graph.dimensions)
    sums_features = not graph.features.isdisjoint(wide(axes.left_inner))
    return sums_features and graph.features.isdisjoint(wide(axes.rows, axes.columns))

"""Find the values product of the weights, and decide whether softmax, scores and values are an attention.

Weights need no softmax: `sigmoid(scores)`, `relu(scores) / n`, `exp(scores) / (1 + Σ)`, sparsemax. They are computed
element by element, and with sums over the keys of each query. Without a nonlinear function it is linear attention: its
products can be reordered, so it has no weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..record.ops import Op, TensorRef
from .axis import Axis, size_of, wide
from .dataflow import Graph, made_of
from .products import Product, ProductPath, is_wide
from .rules import reduced_places
from .scores import mixes, score_product
from .softmax import Softmax

_DIVISORS = {"div": 1, "reciprocal": 0}
"""Operations that divide, and the place of the divisor among their tensors."""


def value_product(graph: Graph, weights: TensorRef, dim: int) -> ProductPath | None:
    """Return the product of weights and values; None if there is none."""
    over = graph.dimensions.along(weights, dim)
    single: ProductPath | None = None

    def through(op: Op) -> bool:
        if op.outputs and power_of(graph, op.output, weights) > 1:
            return True
        # If one weight of each query remains, keys are chosen instead of averaged.
        picks = op.does("picks") and dim < len(op.output.shape) and op.output.shape[dim] > 1
        return graph.passes_on(op) or picks or mixes(graph, op, over) or _norms_heads(graph, op, over)

    for op, step in graph.forward(weights, through) if weights.shape else ():
        product = graph.products.get(op.index) or graph.products_by_multiplication.get(op.index)
        if product is not None and power_of(graph, op.output, weights) < 2:
            # Weights that are mixed by head, or multiplied out along other axes, are weights if they are summed over
            # the keys.
            changed = any(graph.is_projection(passed) or _is_outer(passed) for passed in step.path)
            axes = product.axes(graph.dimensions)
            if not changed or not over or over & {*axes.left_inner, *axes.right_inner}:
                return ProductPath(product, step.path, step.tensor)
        if single is None and len(op.inputs) == 2 and op.base_name == "mul" and weights.shape[dim] == 1:
            # The average over a single key needs no sum: einsum multiplies.
            values = op.inputs[op.inputs[0].id == step.tensor.id]
            wider = op.output.numel > step.tensor.numel and graph.comes_from_inputs(values)
            single = ProductPath(Product(op, op, *op.inputs), step.path, step.tensor) if wider else None
    return single


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
    places = (softmax.dim, *softmax.beside) if softmax.beside else ()
    over = {axis for place in places for axis in graph.dimensions.along(softmax.op.output, place)}
    return over <= set(wide(values.averaged(graph.dimensions)))


def _is_outer(op: Op) -> bool:
    """Return whether this is a multiplication in which each factor is repeated along an axis of the other."""
    rank = len(op.output.shape)
    sides = [{place for place in range(rank) if is_wide(tensor, rank, place)} for tensor in op.inputs]
    return op.base_name == "mul" and len(sides) == 2 and bool(sides[0] - sides[1]) and bool(sides[1] - sides[0])


def _norms_heads(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether this is a norm over a dimension other than that of the softmax: over the heads."""
    dims = graph.dimensions.of(op.inputs[0]) if over and op.does("norms") else ()
    return len(dims) > 1 and not over & set(dims[1 if "batch_norm" in op.base_name else -1])


def softmaxed_side(
    graph: Graph, product: Product, values: ProductPath, masked: TensorRef, dim: int
) -> tuple[bool, bool] | None:
    """Return whether the left side of the scores is the keys, and whether the softmax runs over the queries.

    The keys are the axis that the values are averaged over. Return None for softmaxes that are not attention: capsule
    routing (over an axis that every score has a product of its own for, without queries beside the keys, or of weights
    that average over the features of the scores), clusters of nodes (over the features of a projection), k-means (over
    clusters that average the tensors compared with them), and slots of experts, to which learned queries hand out the
    keys themselves.
    """
    axes = product.axes(graph.dimensions)
    rows, columns, over = set(axes.rows), set(axes.columns), graph.dimensions.along(masked, dim)
    if over & set(axes.batch) - rows - columns and not (size_of(rows) > 1 and size_of(columns) > 1):
        return None
    over_rows = bool(over & rows) and not over & columns
    summed = set(wide(values.averaged(graph.dimensions)))
    if over and summed and summed <= {*axes.left_inner, *axes.right_inner} - over:
        return None
    if over and summed & (columns if over_rows else rows) - over and not summed & over:
        keys = product.right if over_rows else product.left
        alike = _unmoved(graph, keys) == _unmoved(graph, values.values)
        return None if alike or _is_width(graph, product, over) else (not over_rows, True)
    # Learned queries that average the keys themselves are experts or slots, if another softmax hands the tokens back.
    given = [factor for factor in (product.left, product.right) if not graph.is_weight(factor)]
    if len(given) != 1 or _unmoved(graph, given[0]) != _unmoved(graph, values.values):
        return over_rows, False
    readers = graph.forward(product.op.output, graph.passes_on)
    softmaxes = {reader.index for reader, _ in readers if reader.index in graph.softmaxes}
    return (over_rows, False) if len(softmaxes) < 2 else None


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
        op = graph.recording.producer(tensor)
        if _unmoved(graph, tensor) == votes or (op is None and tensor.id in graph.given_or_learned):
            return False
        if op is None:
            continue
        shares = [read for read in op.inputs if _unmoved(graph, read) != votes]
        if len(shares) < len(op.inputs) and (op.does("product") or op.base_name == "mul") and shares:
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
            if op is not None and graph.is_projection(op) and set(graph.dimensions.of(op.output)[-1]) <= over:
                return True
    return False


def _unmoved(graph: Graph, tensor: TensorRef) -> int:
    """Return the id of a tensor before all of its elements were viewed or copied."""
    return graph.before(tensor, lambda op: graph.moves(op) and op.inputs[0].numel <= op.output.numel).id


# -- softmaxes in pieces ----------------------------------------------------------------------------------------------


def find_pieces(graph: Graph) -> Iterator[tuple[Softmax, ProductPath, ProductPath]]:
    """Yield softmaxes over pieces of the keys, each with its products: flash attention written in Python.

    The exponentials of each piece are summed, and multiplied by the values. Both are rescaled and added to those of
    other pieces, and one is divided by the other.
    """
    for op in graph.recording.ops:
        shift = graph.recording.producer(op.inputs[0]) if op.base_name.rstrip("_") == "exp" and op.inputs else None
        if shift is None or shift.base_name.rstrip("_") != "sub" or op.index in graph.softmaxes:
            continue
        masked = shift.inputs[0]
        readers = graph.forward(op.output, lambda passed: graph.moves(passed) or passed.does("fills"))
        total = next((reader for reader, _ in readers if reader.base_name == "sum"), None)
        places = () if total is None else reduced_places(total)
        values = value_product(graph, op.output, places[0]) if len(places) == 1 else None
        scores = None if values is None else score_product(graph, masked, places[0], op.module)
        if total is None or values is None or scores is None or not _compares(graph, scores.product):
            continue
        after = [later for later in graph.recording.ops[op.index :] if not later.does("product")]
        totals, contexts = (made_of({made.output.id}, after) for made in (total, values.product.op))
        reads = {later.index: {tensor.id for tensor in later.inputs} for later in after}
        divisions = [each for each in after if each.base_name.rstrip("_") in _DIVISORS]
        divisors = [(each, each.inputs[_DIVISORS[each.base_name.rstrip("_")] :]) for each in divisions]
        inverse = made_of({each.output.id for each, read in divisors if {t.id for t in read} & totals}, after)
        scaled = [later for later in after if later.does("scales") and reads[later.index] & contexts]
        scaled = [each for each in scaled if each.output.id in inverse and reads[each.index] & totals - contexts]
        if scaled and scaled[0].kind == "write":  # other queries may be in the same memory
            scaled = [later for later in scaled if later.output.offset == scaled[0].output.offset]
        for last in scaled[-1:]:
            added = (each for each in graph.recording.consumers.get(last.output.id, ()) if each.base_name == "add")
            ends = (each for each in added if reads[each.index] <= totals | contexts)
            yield Softmax(op, masked, places[0], divided=next(ends, last)), scores, values


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
        if _place_of(graph, op.output, over) is None or not (graph.product(op) or graph.reduces(op)):
            continue
        path = step.path[::-1]
        part = _weighing_part(graph, op.output, path, over)
        if part is None:
            return None
        start, bent, stop = part
        masked = next(tensor for tensor in path[start].inputs if start == 0 or tensor in path[start - 1].outputs)
        dim = _place_of(graph, masked, over)
        scores = None if dim is None else score_product(graph, masked, dim, op.module)
        if dim is None or scores is None or scores.product.op.index in taken or not _compares(graph, scores.product):
            return None
        masks = tuple(op for op in path[bent:stop] if op.does("fills_where") or len(op.inputs) == 2)
        softmax = Softmax(path[stop - 1], masked, dim, masks, ops=path[start:stop])
        return softmax, scores, ProductPath(values.product, path[stop:], values.tensor)
    return None


def _weighing_part(
    graph: Graph, scores: TensorRef, path: tuple[Op, ...], over: set[Axis]
) -> tuple[int, int, int] | None:
    """Return where the steps from scores to weights begin, bend last, and end after masks; None without a bend."""
    since = graph.recording.producers[scores.id] + 1
    dependent = made_of({scores.id}, graph.recording.ops[since : path[-1].index] if path else ())
    parts = []
    for place, op in enumerate(path):
        came_by = path[place - 1].outputs if place else op.inputs[:1]
        others = [tensor for tensor in op.inputs if tensor.id in dependent and tensor not in came_by]
        if any(other.numel > 1 and not _repeated(graph, other, op.output) <= over for other in others):
            return None  # weights compared with those of other queries
        if others or graph.bends(op):
            parts.append(place)
    if not any(graph.bends(path[place]) for place in parts) or path[parts[-1]].base_name.rstrip("_") == "exp":
        return None  # exponentials are divided later, one piece at a time
    start, stop = parts[0], (bent := parts[-1] + 1)
    while start and path[start - 1].base_name in ("add", "sub") and len(path[start - 1].inputs) == 1:
        start -= 1  # an added number
    while stop < len(path) and (path[stop].does("masks") or graph.is_scale(path[stop])):
        stop += 1
    return start, bent, stop


def _repeated(graph: Graph, factor: TensorRef, whole: TensorRef) -> set[Axis]:
    """Return the axes that a tensor is broadcast along, by position: it may have the same axis in another position."""
    dims = enumerate(graph.dimensions.of(whole))
    return {axis for place, dim in dims if not is_wide(factor, len(whole.shape), place) for axis in wide(dim)}


def _place_of(graph: Graph, tensor: TensorRef, over: set[Axis]) -> int | None:
    """Return the one dimension that has these axes; None if several or no dimensions do."""
    places = [place for place, dim in enumerate(graph.dimensions.of(tensor)) if over & set(dim)]
    return places[0] if len(places) == 1 else None


def _is_of_activations(graph: Graph, product: Product) -> bool:
    """Return whether both factors depend on inputs and are no matrices picked from a stack of parameters."""
    for factor in (product.left, product.right):
        source = graph.recording.producer(graph.before_moves(factor))
        picked = source is not None and source.does("gathers") and len(source.inputs[0].shape) > 2
        if not graph.comes_from_inputs(factor) or (picked and source is not None and graph.is_weight(source.inputs[0])):
            return False
    return True


def _compares(graph: Graph, product: Product) -> bool:
    """Return whether features are summed and positions remain: queries are compared with keys."""
    axes = product.axes(graph.dimensions)
    summed, left = set(wide(axes.left_inner)), set(wide(axes.rows, axes.columns))
    sums_features = bool(summed & graph.features) and not left & graph.features
    return _is_of_activations(graph, product) and (sums_features or not product.is_dot)

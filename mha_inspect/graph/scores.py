"""What made scores, and what stands between that and the softmax: scale, mask, soft cap, sinks, and in which order.

Scores are a product of queries and keys. Without one they are added, subtracted or put side by side, bent, and reduced:
so are the attention of Bahdanau, its relatives on graphs, and scores by distance. The bend is what makes it attention:
without one, what comes of the queries is the same number for every key, and no weight hangs on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .attention import Mixing
from .axis import Axis, setting, wide
from .dataflow import Graph
from .products import Joint, Meeting, Product, sides_of
from .rules import reduced_places
from .softmax import is_shift

_LAYERS = {"add": 1, "sub": 1, "cat": 2, "distance": 0}
"""What queries and keys meet in, and how many reductions there may be from there to the scores: features that stand
side by side are mixed before they are bent, and a distance is a score."""

_ORDERS = {"sort": 1, "topk": 2}
"""What puts numbers in order, and which of its arguments says along which dimension."""


def score_product(graph: Graph, masked: TensorRef, dim: int) -> Meeting | None:
    """Return what made the scores that a softmax is taken of: a product, or where there is none what has them else.

    Relative positions are products too: they are gathered on the way, or do not depend on the input.
    """
    over = graph.dimensions.along(masked, dim)
    best: tuple[tuple[bool, bool, bool], Meeting] | None = None
    for step in graph.back(masked, lambda op: graph.carries(op) or mixes(graph, op, over)):
        op = graph.recording.producer(step.tensor)
        product = None if op is None else graph.product(op) or _of_learned_query(graph, op, over)
        if product is not None and _mixes_heads(graph, step.path, product):
            given = graph.comes_from_inputs(product.left, product.right)
            gathered = any(passed.does("gathers") for passed in step.path)
            rank = (product.op.index not in graph.products, gathered, not given)
            if best is None or rank < best[0]:
                best = rank, Meeting(product, step.path[::-1], product.op.output)
            if not any(rank):
                break
    for step in graph.back(masked, lambda op: graph.carries(op) or graph.reduces(op)) if over else ():
        op = graph.recording.producer(step.tensor) if best is None or best[0][0] else None
        joint = None if op is None else _joined(graph, op, step.path[::-1], over)
        if joint is not None:
            return joint
    return None if best is None else best[1]


def _of_learned_query(graph: Graph, op: Op, over: set[Axis]) -> Product | None:
    """Return a product of keys with a parameter that stands for the queries, batch by batch.

    A projection has no batch; and where a router's weights stand, the softmax runs over what they give.
    """
    factors = op.inputs[-2:] if op.base_name in ("bmm", "baddbmm") else ()
    keys = [tensor for tensor in factors if not graph.is_weight(tensor)]
    dims = graph.dimensions.of(keys[0])[-2:] if len(keys) == 1 else ()
    return Product(op, op, *factors) if any(over & set(dim) for dim in dims) else None


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """Return a projection, as far as it could be one from heads to heads; None for any other operation."""
    if not graph.is_projection(op):
        return None
    source, place = graph.projected(op), -1
    if op.base_name == "convolution":
        place = 1
    elif graph.is_weight(op.inputs[-2]) and len(source.shape) > 1:
        place = -2
    return Mixing(op, source, place)


def mixes(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether a projection leaves alone what the softmax runs over: it may mix scores or weights by head."""
    mixing = mixing_of(graph, op) if over else None
    if mixing is None:
        return False
    dims = graph.dimensions.of(mixing.source)
    return over <= {atom for dim in dims for atom in dim} - set(dims[mixing.place])


def _mixes_heads(graph: Graph, path: Iterable[Op], product: Product) -> bool:
    """Return whether projections on the way to the softmax mix what the product of scores runs over, the heads."""
    mixings = [mixing for op in path if (mixing := mixing_of(graph, op)) is not None]
    heads = set(wide(product.axes(graph.dimensions).batch)) if mixings else set()
    return all(graph.dimensions.along(mixing.source, mixing.place) <= heads for mixing in mixings)


# -- scores without a dot product -------------------------------------------------------------------------------------


def _joined(graph: Graph, op: Op, path: tuple[Op, ...], over: set[Axis]) -> Meeting | None:
    """Return the scores that an operation joins queries and keys for, and what is between them and the softmax."""
    name = "distance" if op.does("distances") else op.base_name.rstrip("_")
    if name not in _LAYERS or len(op.inputs) != 2 or not graph.comes_from_inputs(*op.inputs):
        return None
    ends = [place for place, passed in enumerate(path) if graph.reduces(passed)]
    bent = name == "distance" or any(graph.bends(passed) for passed in path)
    if len(ends) > _LAYERS[name] or (name == "cat" and not ends) or not bent:
        return None
    count = ends[-1] + 1 if ends else 0
    while 0 < count < len(path) and path[count].call == path[ends[-1]].call:
        count += 1  # a bias
    keys = [(left, right) for out, left, right in sides_of(graph.dimensions, op) if set(out) & over]
    if {(bool(left), bool(right)) for left, right in keys} not in ({(True, False)}, {(False, True)}):
        return None
    if _is_statistic(graph, op.inputs[bool(keys[0][0])], {atom for pair in keys for dim in pair for atom in dim}):
        return None
    left, right = (
        graph.before(graph.before_repeats(factor), lambda laid: laid.does("broadcasts") and _keeps_sizes(laid))
        for factor in op.inputs
    )
    joint = Joint(path[count - 1] if count else op, op, left, right, path[:count])
    return Meeting(joint, path[count:], joint.op.output)


def _is_statistic(graph: Graph, query: TensorRef, keys: set[Axis]) -> bool:
    """Return whether this is a mean of the keys, another number of a norm over them, or the keys put in order."""
    op = graph.recording.producer(graph.before_moves(query))
    if op is None or not op.inputs:
        return False
    places: tuple[int, ...] = reduced_places(op) if axes_rule(op.base_name) == "reduce" else ()
    if op.base_name in _ORDERS:
        places = (int(setting(op, _ORDERS[op.base_name], "dim", -1)),)
    dims = graph.dimensions.of(op.inputs[0])
    return bool(dims) and any(keys & set(dims[place]) for place in places)


def _keeps_sizes(op: Op) -> bool:
    """Return whether what comes out has the sizes of what went in, those of one aside."""
    return [size for size in op.inputs[0].shape if size != 1] == [size for size in op.output.shape if size != 1]


# -- factors ----------------------------------------------------------------------------------------------------------


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Return whether this only moves a factor about for the product: within its call, or to broadcast it."""
    if not graph.moves(op):
        return False
    broadcast = product.multiply is not product.op and op.does("broadcasts")
    return op.call == product.multiply.call or (broadcast and (op.base_name == "expand" or _keeps_sizes(op)))


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """Return a factor before it was moved for the product."""
    return graph.before(factor, lambda op: moved_for(graph, op, product))


# -- from the product to the softmax ----------------------------------------------------------------------------------


class Scoring(NamedTuple):
    """The way from the product of queries and keys to the softmax, in the order in which it ran."""

    scores: TensorRef
    """Scaled, before any mask, bias or bend."""
    masked: TensorRef
    """What the softmax is taken of, without sinks."""
    scale: float | None
    """What the scores were multiplied by up to there."""
    late_scale: float | None
    """What they were multiplied by afterwards, together with the masks."""
    masks: list[Op]
    mixed: list[Mixing]
    steps: list[tuple[str, float | None]]
    """What was done to the scores, in order: `add`, `fill` or `times` for a mask, `scale` and its number, `mixed` for
    a projection from heads to heads, or the name of a function."""
    sinks: Op | None = None


def multiply(numbers: Iterable[float | None]) -> float | None:
    """Return the product; None where one of them is not known."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def read_scoring(graph: Graph, scored: Product, path: tuple[Op, ...], softmax_input: TensorRef, dim: int) -> Scoring:
    """Follow `path`, the operations from the product to the softmax over `dim` in the order in which they ran.

    In `softmax(c · tanh(q·kᵀ · s / c) + mask)` the scores are `q·kᵀ · s`, and the steps are a `scale` of 1 / c,
    `tanh`, a `scale` of c, and `add`.
    """
    product = scored.op
    scores = tensor = before_scale = product.output
    scale: float | None = float(product.kwargs.get("alpha", 1))
    last_scale = scale
    late: list[float | None] = []
    masks = [product] if scored.is_dot and adds_mask(product) else []
    mixed: list[Mixing] = []
    steps: list[tuple[str, float | None]] = []
    # Some of the scores, cut out to be masked and written back, are not the scores.
    smallest = min(product.output.numel, softmax_input.numel)

    def result(masked: TensorRef, sinks: Op | None = None) -> Scoring:
        return Scoring(scores, masked, scale, multiply(late), masks, mixed, steps, sinks)

    for op in path:
        name = op.base_name.rstrip("_")
        is_plain = not masks and not steps
        if name == "cat" or (name == "constant_pad_nd" and op.output.id == softmax_input.id):
            return result(scores if is_plain else tensor, op)
        mixing = mixing_of(graph, op)
        if mixing is not None:
            # What turns the heads to the end for the projection is no part of the scores.
            plain = graph.before_moves(scores)
            scores = scores if not is_plain else graph.after_call(product) if plain.id == product.output.id else plain
            mixed.append(mixing)
            steps.append(("mixed", None))
        elif graph.is_scale(op) and is_plain:
            before_scale, last_scale = tensor, graph.scale_of(op)
            scale, scores = multiply((scale, last_scale)), op.output
        elif graph.is_scale(op) or name == "neg":
            number = -1.0 if name == "neg" else graph.scale_of(op)
            late.append(number)
            steps.append(("scale", number))
        elif is_shift(graph.recording, op):
            # What is taken off every score of a row changes no weight; along another axis the scores are normalised.
            shifted = {atom for dims in graph.dimensions.of(op.inputs[1]) for atom in dims}
            if graph.dimensions.along(softmax_input, dim) & shifted:
                steps.append(("log_softmax", None))
        elif adds_mask(op) and not (op.base_name == "copy_" and op.inputs[-1].id == tensor.id):
            if name == "sub" and op.inputs[1].id == tensor.id != op.inputs[0].id:
                late.append(-1.0)
                steps.append(("scale", -1.0))
            masks.append(op)
            steps.append(("fill" if op.does("fills") else "add", None))
        elif op.does("bends"):
            if name == "tanh" and is_plain and last_scale and scale is not None and scores.id == tensor.id:
                scale, scores = scale / last_scale, before_scale
                late.append(last_scale)
                steps.append(("scale", last_scale))
            steps.append((name, None))
        elif op.does("scales"):  # by a number for each head, or by a mask
            factor = min(op.inputs, key=lambda read: read.numel)
            if any(size > 1 for size in factor.shape[-2:]):
                masks.append(op)
                steps.append(("times", None))
            elif is_plain:
                scale, scores = None, op.output
            else:
                late.append(None)
                steps.append(("scale", None))
        elif is_plain and name != "_to_copy" and op.output.numel >= smallest:
            scores = op.output
        tensor = op.output
    return result(softmax_input)


def adds_mask(op: Op) -> bool:
    """Return whether this adds, or fills in, something that scores do not come from."""
    name = op.base_name.rstrip("_")
    if name in ("baddbmm", "addmm"):
        return bool(op.kwargs.get("beta", 1) != 0)
    return op.does("fills") or (name in ("add", "sub") and sum(bool(t.shape) for t in op.inputs) > 1)

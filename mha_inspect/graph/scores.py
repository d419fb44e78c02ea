"""Find the operation that gives the scores, and the steps to the softmax in order: scale, mask, soft cap, sinks.

Scores are a product of queries and keys. Without a product, queries and keys are added, subtracted or concatenated,
passed through a nonlinear function and reduced: e.g. the attention of Bahdanau, graph attention, and scores by
distance. The nonlinear function is needed: without it a query adds the same number to every score and changes no
weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .attention import Mixing
from .axis import Axis, setting, wide
from .dataflow import Graph, inside, made_of
from .products import Joint, Product, ProductPath, product_of, sides_of
from .rerun import between
from .rules import reduced_places
from .softmax import is_shift
from .standardised import statistic_step

_LAYERS = {"add": 1, "sub": 1, "cat": 2, "distance": 0}
"""How queries and keys are joined, and the maximal number of reductions from the join to the scores. Concatenated
features are mixed before the nonlinear function. A distance is a score."""

BATCHED = ("bmm", "baddbmm")
"""Products that a projection is not written with."""
_ORDERS = {"sort": 1, "topk": 2}
"""Operations that sort numbers, and the position of their dimension argument."""


def score_product(graph: Graph, masked: TensorRef, dim: int, module: str) -> ProductPath | None:
    """Return the product that gives the input of a softmax, or another join of queries and keys; None if there is none.

    A relative-position term is a product too, but it is gathered on the way or does not depend on the input.
    """
    over = graph.dimensions.along(masked, dim)
    best: tuple[tuple[bool, bool, bool], ProductPath] | None = None
    for step in graph.back(masked, lambda op: graph.passes_on(op) or graph.norms_scores(op) or mixes(graph, op, over)):
        op = graph.recording.producer(step.tensor)
        product = None if op is None else graph.product(op) or _of_learned_query(graph, op, over, module)
        if product is not None and _mixes_heads(graph, step.path, product):
            given = graph.comes_from_inputs(product.left, product.right)
            gathered = any(passed.does("gathers") for passed in step.path)
            rank = (product.op.index not in graph.products, gathered, not given)
            if best is None or rank < best[0]:
                best = rank, ProductPath(product, step.path[::-1], product.op.output)
            if not any(rank):
                break
    for step in graph.back(masked, lambda op: graph.passes_on(op) or graph.reduces(op)) if over else ():
        op = graph.recording.producer(step.tensor) if best is None or best[0][0] else None
        joint = None if op is None else _joined(graph, op, step.path[::-1], over)
        if joint is not None:
            return joint
    return None if best is None else best[1]._replace(path=_as_computed(graph, best[1]))


def _as_computed(graph: Graph, found: ProductPath) -> tuple[Op, ...]:
    """Return the path from a product, through what is computed from the scores where that is written over them."""
    path, computed = list[Op](), {found.tensor.storage}
    for op in found.path:
        computed |= {op.output.storage} if op.kind == "compute" else set()
        if op.base_name == "copy_" and op.inputs[0].storage in computed:
            path = between(graph.recording, {found.tensor.id}, op.inputs[-1]) or path
        path.append(op)
    return tuple(path)


def _of_learned_query(graph: Graph, op: Op, over: set[Axis], module: str) -> Product | None:
    """Return a product of keys with a parameter in place of the queries; None for other operations.

    The softmax runs over positions of the keys: over the output features of a projection it would be a router's. A
    layer of its own, outside the module of the softmax, is a scorer, and no query.
    """
    if not over or (op.base_name not in BATCHED and not inside(module, op.module)):
        return None
    product = product_of(graph.recording, op)
    if product is None or op.base_name == "addmm":
        return None
    keys = [factor for factor in (product.left, product.right) if not graph.is_weight(factor)]
    if len(keys) != 1 or not graph.comes_from_inputs(*keys):
        return None
    dims = graph.dimensions.of(keys[0])
    if product.multiply.does("product"):
        # Without the leading dimensions, which the factors of a batched product have in common.
        dims = dims[-2:]
    return product if any(over & set(dim) for dim in dims) else None


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """Return a projection as a possible mixing of heads; None for any other operation."""
    if not graph.is_projection(op):
        return None
    source, place = graph.projected(op), -1
    if op.base_name == "convolution":
        place = 1
    elif graph.is_weight(op.inputs[-2]) and len(source.shape) > 1:
        place = -2
    return Mixing(op, source, place)


def mixes(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether a projection may mix scores or weights by head: it sums over no axis of the softmax."""
    mixing = mixing_of(graph, op) if over else None
    if mixing is None:
        return False
    dims = graph.dimensions.of(mixing.source)
    return over <= {atom for dim in dims for atom in dim} - set(dims[mixing.place])


def _mixes_heads(graph: Graph, path: Iterable[Op], product: Product) -> bool:
    """Return whether every projection on the way to the softmax sums over heads: batch axes of the scores product."""
    mixings = [mixing for op in path if (mixing := mixing_of(graph, op)) is not None]
    heads = set(wide(product.axes(graph.dimensions).batch)) if mixings else set()
    return all(graph.dimensions.along(mixing.source, mixing.place) <= heads for mixing in mixings)


# -- scores without a dot product -------------------------------------------------------------------------------------


def _joined(graph: Graph, op: Op, path: tuple[Op, ...], over: set[Axis]) -> ProductPath | None:
    """Return the scores of queries and keys that this operation joins, and the path to the softmax; else None."""
    name = "distance" if op.does("distances") else op.base_name.rstrip("_")
    if name not in _LAYERS or len(op.inputs) != 2 or not graph.comes_from_inputs(*op.inputs):
        return None
    ends = [place for place, passed in enumerate(path) if graph.reduces(passed)]
    bent = name == "distance" or any(graph.bends(passed) for passed in path)
    if len(ends) > _LAYERS[name] or (name == "cat" and not ends) or not bent:
        return None
    count = ends[-1] + 1 if ends else 0
    while 0 < count < len(path) and path[count].call == path[ends[-1]].call:
        count += 1  # the bias
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
    return ProductPath(joint, path[count:], joint.op.output)


def further_term(graph: Graph, scored: Joint, op: Op) -> TensorRef | None:
    """Return what an operation adds to joined queries and keys that depends on the inputs too; None if nothing."""
    made = made_of({scored.multiply.output.id}, scored.between)
    others = [tensor for tensor in op.inputs if tensor.id not in made and graph.comes_from_inputs(tensor)]
    return others[0] if op.base_name.rstrip("_") == "add" and len(others) == 1 < len(op.inputs) else None


def with_keys_of(graph: Graph, scored: Product, values: TensorRef) -> Product:
    """Return scores whose keys are the term that is made of what the values are made of, if several terms are added."""
    made_of_values = _origins(graph, values)
    if not isinstance(scored, Joint):
        return scored
    for term in (further_term(graph, scored, op) for op in scored.between):
        if term is not None and _origins(graph, term) & made_of_values:
            is_other = [
                factor.shape == term.shape and not _origins(graph, factor) & made_of_values
                for factor in (scored.left, scored.right)
            ]
            if any(is_other):
                return replace(scored, left=term) if is_other[0] else replace(scored, right=term)
    return scored


def _origins(graph: Graph, tensor: TensorRef) -> set[int]:
    """Return the ids of a tensor before it was moved, and of what its projection reads."""
    origin = graph.before_moves(tensor)
    op = graph.recording.producer(origin)
    projected = {graph.before_moves(graph.projected(op)).id} if op is not None and graph.is_projection(op) else set()
    return {origin.id, *projected}


def _is_statistic(graph: Graph, query: TensorRef, keys: set[Axis]) -> bool:
    """Return whether this is a statistic of the keys, e.g. the mean in a norm, or the sorted keys."""
    op = graph.recording.producer(graph.before_moves(query))
    if op is None or not op.inputs:
        return False
    places: tuple[int, ...] = reduced_places(op) if axes_rule(op.base_name) == "reduce" else ()
    if op.base_name in _ORDERS:
        places = (int(setting(op, _ORDERS[op.base_name], "dim", -1)),)
    dims = graph.dimensions.of(op.inputs[0])
    return bool(dims) and any(keys & set(dims[place]) for place in places)


def _keeps_sizes(op: Op) -> bool:
    """Return whether input and output have the same sizes, apart from sizes of 1."""
    return [size for size in op.inputs[0].shape if size != 1] == [size for size in op.output.shape if size != 1]


# -- factors ----------------------------------------------------------------------------------------------------------


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Return whether this only rearranges a factor for the product: in the same call, or to broadcast it."""
    if not graph.moves(op):
        return False
    broadcast = product.multiply is not product.op and op.does("broadcasts")
    return op.call == product.multiply.call or (broadcast and (op.base_name == "expand" or _keeps_sizes(op)))


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """Return a factor before it was rearranged for the product."""
    return graph.before(factor, lambda op: moved_for(graph, op, product))


# -- from the product to the softmax ----------------------------------------------------------------------------------


class Scoring(NamedTuple):
    """The steps from the product of queries and keys to the softmax, in the order of the run."""

    scores: TensorRef
    """Scaled scores, before any mask, bias or nonlinear function."""
    masked: TensorRef
    """The input of the softmax, without sinks."""
    scale: float | None
    """The factor of the scores at that stage; None if unknown."""
    late_scale: float | None
    """The factor of the scores after that stage, together with the masks; None if unknown."""
    masks: list[Op]
    mixed: list[Mixing]
    steps: list[tuple[str, float | None]]
    """The steps from the scores to the softmax, in order: `add`, `fill` or `times` for a mask, `scale` and its number,
    `mixed` for a projection of heads, or the name of a function."""
    sinks: Op | None = None
    shifts: tuple[Op, ...] = ()
    """The masks that add one number for each softmax."""


def multiply(numbers: Iterable[float | None]) -> float | None:
    """Return the product of the numbers; None if one is unknown."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def read_scoring(graph: Graph, scored: Product, path: tuple[Op, ...], softmax_input: TensorRef, dim: int) -> Scoring:
    """Read the steps of `path`, the operations from the product to the softmax over `dim`, in the order of the run.

    In `softmax(c · tanh(q·kᵀ · s / c) + mask)` the scores are `q·kᵀ · s`, and the steps are a `scale` of 1 / c, `tanh`,
    a `scale` of c, and `add`.
    """
    product = scored.op
    scores = tensor = before_scale = product.output
    scale: float | None = float(product.kwargs.get("alpha", 1))
    last_scale = scale
    late_scales: list[float | None] = []
    masks: list[Op] = []
    mixed: list[Mixing] = []
    steps: list[tuple[str, float | None]] = []
    # A slice of the scores that is masked and written back is not the scores.
    smallest = min(product.output.numel, softmax_input.numel)

    def result(masked: TensorRef, sinks: Op | None = None) -> Scoring:
        return Scoring(scores, masked, scale, multiply(late_scales), masks, mixed, steps, sinks)

    for op, reader in zip(path, [*path[1:], None], strict=False):
        made = _read_by(op, reader, softmax_input)
        name = op.base_name.rstrip("_")
        is_plain = not masks and not steps
        if name == "cat" or (name == "constant_pad_nd" and made.id == softmax_input.id):
            return result(scores if is_plain else tensor, op)
        mixing = mixing_of(graph, op)
        if mixing is not None:
            # The permutation of heads for the mixing projection is no part of the scores.
            scores = _unmoved(graph, scores, product) if is_plain else scores
            mixed.append(mixing)
            steps.append(("mixed", None))
        elif graph.is_scale(op) and is_plain:
            before_scale, last_scale = tensor, graph.scale_of(op)
            scale, scores = multiply((scale, last_scale)), made
        elif graph.is_scale(op) or name == "neg":
            number = -1.0 if name == "neg" else graph.scale_of(op)
            late_scales.append(number)
            steps.append(("scale", number))
        elif is_shift(graph.recording, op):
            # A number subtracted from every score of a row changes no weight. Along another axis it normalises the
            # scores.
            shifted = {atom for dims in graph.dimensions.of(op.inputs[1]) for atom in dims}
            if graph.dimensions.along(softmax_input, dim) & shifted:
                steps.append(("log_softmax", None))
        elif statistic := statistic_step(graph, op, product.output):
            scores = _unmoved(graph, scores, product) if is_plain else scores
            if op.does("scales"):
                late_scales.append(None)
            steps.append((statistic, None))
        elif adds_mask(op) and not (op.base_name == "copy_" and op.inputs[-1].id == tensor.id):
            if name == "sub" and op.inputs[1].id == tensor.id != op.inputs[0].id:
                late_scales.append(-1.0)
                steps.append(("scale", -1.0))
            masks.append(op)
            steps.append(("fill" if op.does("fills") else "add", None))
        elif graph.norms_scores(op):
            # A permutation for the norm is no part of the scores, and what follows no longer multiplies q·kᵀ.
            scores = _unmoved(graph, scores, product) if is_plain else scores
            late_scales.append(None)
            steps.append((graph.norm_name(op), None))
        elif op.does("bends"):
            if name == "tanh" and is_plain and last_scale and scale is not None and scores.id == tensor.id:
                scale, scores = scale / last_scale, before_scale
                late_scales.append(last_scale)
                steps.append(("scale", last_scale))
            steps.append((name, None))
        elif op.does("scales"):  # a number for each head, or a mask
            factor = min(op.inputs, key=lambda read: read.numel)
            if any(size > 1 for size in factor.shape[-2:]):
                masks.append(op)
                steps.append(("times", None))
            elif is_plain:
                scale, scores = None, made
            else:
                late_scales.append(None)
                steps.append(("scale", None))
        elif is_plain and name != "_to_copy" and made.numel >= smallest:
            scores = made
        tensor = made
    return result(softmax_input)


def _unmoved(graph: Graph, scores: TensorRef, product: Op) -> TensorRef:
    """Return scores before they were permuted or reshaped, in the layout that the product was called for."""
    plain = graph.before_moves(scores)
    return graph.after_call(product) if plain.id == product.output.id else plain


def _read_by(op: Op, reader: Op | None, softmax_input: TensorRef) -> TensorRef:
    """Return the output of an operation that the next one reads, or else the softmax: a split gives several pieces."""
    read = (softmax_input,) if reader is None else reader.inputs
    return next((made for made in op.outputs if made in read), op.output)


def adds_mask(op: Op) -> bool:
    """Return whether this adds or fills in something that the scores do not depend on."""
    name = op.base_name.rstrip("_")
    return op.does("fills") or (name in ("add", "sub") and sum(bool(t.shape) for t in op.inputs) > 1)

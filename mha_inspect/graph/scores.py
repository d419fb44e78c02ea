"""Find the operation that gives the scores, and the steps to the softmax in order: scale, mask, soft cap, sinks.

Scores are a product of queries and keys, `q @ k.mT`. Without a product, queries and keys are joined: added, subtracted
or concatenated, passed through a nonlinear function and reduced. Examples are additive attention (Bahdanau),
`(tanh(q[:, :, None] + k[:, None]) * v).sum(-1)`, graph attention, and scores by distance. The nonlinear function is
needed: without it a query adds the same number to every score and changes no weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .attention import Mixing
from .axis import Axis, plain_name, setting, wide
from .dataflow import Graph, inside, made_of
from .products import Joint, Product, ProductPath, product_of, sides_of
from .rerun import between
from .rules import reduced_places
from .softmax import is_shift
from .standardised import statistic_step

_MOST_REDUCTIONS = {"add": 1, "sub": 1, "cat": 2, "distance": 0}
"""Each way to join queries and keys, with the most reductions of features that may follow before the scores.

A sum is reduced once, to one number per query and key. Concatenated features are also projected before the nonlinear
function. A distance is a score already.
"""

BATCHED = ("bmm", "baddbmm")
"""Products of two batches of matrices. A projection is never one of them: its weight has no batch."""
_SORTS = {"sort": 1, "topk": 2}
"""Operations that sort numbers, and the position of their dimension argument."""


def score_product(
    graph: Graph,
    masked: TensorRef,
    dim: int,
    module: str,
) -> ProductPath | None:
    """Return the product that gives the input of a softmax, or another join of queries and keys; None if there is none.

    `masked` is the input of the softmax, which runs over its dimension `dim` in the module `module`. A
    relative-position term is a product too, but it is gathered on the way or does not depend on the input.
    """
    over = graph.dimensions.along(masked, dim)
    scores = _likeliest_product(graph, masked, over, module)
    if scores is not None and scores.product.op.index in graph.products:
        return _through_writes(graph, scores)
    joined = _join_before(graph, masked, over)
    if joined is not None:
        return joined
    return None if scores is None else _through_writes(graph, scores)


class _Candidate(NamedTuple):
    """A product that may give the scores, with the reasons against it; the first reason counts most."""

    reasons: tuple[bool, bool, bool]
    """Whether it is not a product of two activations, is gathered on the way, or does not depend on an input."""
    scores: ProductPath


def _likeliest_product(
    graph: Graph,
    masked: TensorRef,
    over: set[Axis],
    module: str,
) -> ProductPath | None:
    """Return the product with the least reasons against it, of several the nearest to the softmax; None without one.

    `over` has the axes that the softmax runs over.
    """

    def through(op: Op) -> bool:
        return graph.passes_on(op) or graph.norms_scores(op) or mixes(graph, op, over)

    best: _Candidate | None = None
    for step in graph.back(masked, through):
        op = graph.producer(step.tensor)
        if op is None:
            continue
        product = graph.product(op) or _of_learned_query(graph, op, over, module)
        if product is None or not _mixes_heads(graph, step.path, product):
            continue
        reasons = (
            product.op.index not in graph.products,
            any(passed.does("gathers") for passed in step.path),
            not graph.comes_from_inputs(product.left, product.right),
        )
        if best is None or reasons < best.reasons:
            path = step.path[::-1]
            best = _Candidate(reasons, ProductPath(product, path, product.op.output))
        if not any(reasons):
            break
    return None if best is None else best.scores


def _join_before(graph: Graph, masked: TensorRef, over: set[Axis]) -> ProductPath | None:
    """Return the nearest join of queries and keys before a softmax over the axes `over`; None if there is none."""
    if not over:
        return None

    def through(op: Op) -> bool:
        return graph.passes_on(op) or graph.reduces(op)

    for step in graph.back(masked, through):
        op = graph.producer(step.tensor)
        if op is None:
            continue
        joined = _joined(graph, op, step.path[::-1], over)
        if joined is not None:
            return joined
    return None


def _through_writes(graph: Graph, scores: ProductPath) -> ProductPath:
    """Return the path with the operations whose result was written over the scores.

    In `scores[:, :, 0] = f(scores[:, :, 0])` the path through memory is `copy_` alone. The path that is returned has
    the operations of `f` before it.
    """
    path: list[Op] = []
    computed = {scores.tensor.storage}
    for op in scores.path:
        if op.kind == "compute":
            computed.add(op.output.storage)
        if op.base_name == "copy_" and op.inputs[0].storage in computed:
            computing = between(graph.recording, {scores.tensor.id}, op.inputs[-1])
            path = computing or path
        path.append(op)
    return scores._replace(path=tuple(path))


def _of_learned_query(
    graph: Graph,
    op: Op,
    over: set[Axis],
    module: str,
) -> Product | None:
    """Return a product of keys with a parameter that is the query, as in attention pooling; None for other operations.

    The softmax must run over positions of the keys: a softmax over the output features of a projection is a router's.
    The product must be in the module of the softmax: a layer outside scores tokens, but its weight is not a query.
    """
    if not over or (op.base_name not in BATCHED and not inside(module, op.module)):
        return None
    product = None if op.base_name == "addmm" else product_of(graph.recording, op)
    if product is None:
        return None
    keys = only_activation(graph, product)
    if keys is None or not graph.comes_from_inputs(keys):
        return None
    dims = graph.dimensions.of(keys)
    if product.multiply.does("product"):
        # Without the leading dimensions, which the factors of a batched product have in common.
        dims = dims[-2:]
    return None if over.isdisjoint(wide(*dims)) else product


def only_activation(graph: Graph, product: Product) -> TensorRef | None:
    """Return the factor of a product that is an activation, if the other is a weight; otherwise None."""
    if graph.is_weight(product.left) == graph.is_weight(product.right):
        return None
    return product.right if graph.is_weight(product.left) else product.left


def mixing_of(graph: Graph, op: Op) -> Mixing | None:
    """Return a projection as a possible mixing of heads, as in talking heads; None for any other operation.

    Its dimension is the one that is summed: channels of a convolution, the last of `x @ W`, the one before of `W @ x`.
    """
    if not graph.is_projection(op):
        return None
    source = graph.projected(op)
    if op.base_name == "convolution":
        summed = 1
    elif graph.is_weight(op.inputs[-2]) and len(source.shape) > 1:
        summed = -2
    else:
        summed = -1
    return Mixing(op, source, summed)


def mixes(graph: Graph, op: Op, over: set[Axis]) -> bool:
    """Return whether this is a projection that may mix the scores or weights of heads.

    It must not sum over an axis of the softmax, `over`.
    """
    if not over:
        return False
    mixing = mixing_of(graph, op)
    if mixing is None:
        return False
    dims = graph.dimensions.of(mixing.source)
    axes = set[Axis]().union(*dims)
    return over <= axes.difference(dims[mixing.place])


def mixings_of(graph: Graph, ops: Iterable[Op]) -> list[Mixing]:
    """Return the projections among operations as possible mixings of heads, in order."""
    mixings = []
    for op in ops:
        mixing = mixing_of(graph, op)
        if mixing is not None:
            mixings.append(mixing)
    return mixings


def _mixes_heads(graph: Graph, path: Iterable[Op], product: Product) -> bool:
    """Return whether every projection on the way to the softmax sums over heads.

    Heads are batch axes of the scores product: `batch heads` in `batch heads query key`.
    """
    mixings = mixings_of(graph, path)
    if not mixings:
        return True
    heads = set(wide(product.axes(graph.dimensions).batch))
    for mixing in mixings:
        summed = graph.dimensions.along(mixing.source, mixing.place)
        if not summed <= heads:
            return False
    return True


# -- scores without a dot product -------------------------------------------------------------------------------------


def _joined(
    graph: Graph,
    op: Op,
    path: tuple[Op, ...],
    over: set[Axis],
) -> ProductPath | None:
    """Return the scores of queries and keys that this operation joins, and the path to the softmax; else None."""
    name = "distance" if op.does("distances") else plain_name(op)
    if name not in _MOST_REDUCTIONS or len(op.inputs) != 2:
        return None
    if not graph.comes_from_inputs(*op.inputs):
        return None
    count = _count_to_scores(graph, name, path)
    if count is None:
        return None
    keys = _Keys.of(graph, op, over)
    if keys is None:
        return None
    left, right = op.inputs
    if _is_statistic(graph, right if keys.are_left else left, keys.axes):
        return None
    joint = Joint(
        op=path[count - 1] if count else op,
        multiply=op,
        left=_before_broadcast(graph, left),
        right=_before_broadcast(graph, right),
        between=path[:count],
    )
    return ProductPath(joint, path[count:], joint.op.output)


def _count_to_scores(graph: Graph, name: str, path: tuple[Op, ...]) -> int | None:
    """Return how many operations of the path lead from a join to the scores: up to the last reduction, and its bias.

    None if the join gives no scores: without a nonlinear function, or with more reductions than this kind of join has.
    In `linear(tanh(q + k))`, with the path `tanh, mv, add, softmax`, there are three.
    """
    if name != "distance" and not any(map(graph.bends, path)):
        return None
    ends = [place for place, op in enumerate(path) if graph.reduces(op)]
    if len(ends) > _MOST_REDUCTIONS[name]:
        return None
    if not ends:
        return None if name == "cat" else 0
    last = path[ends[-1]]
    count = ends[-1] + 1
    # A linear layer adds its bias in the same call.
    while count < len(path) and path[count].call == last.call:
        count += 1
    return count


class _Keys(NamedTuple):
    """The keys among the two factors of a join: the factor with the axes that the softmax runs over."""

    are_left: bool
    """Whether the keys are the left factor: `k + q` instead of `q + k`."""
    axes: set[Axis]
    """The axes of the softmax in the keys."""

    @classmethod
    def of(cls, graph: Graph, op: Op, over: set[Axis]) -> _Keys | None:
        """Return the factor that has the axes of the softmax; None if both have, or none."""
        left: set[Axis] = set()
        right: set[Axis] = set()
        for side in sides_of(graph.dimensions, op):
            if over.isdisjoint(side.whole):
                continue
            if bool(side.left) == bool(side.right):
                return None
            left.update(side.left)
            right.update(side.right)
        if bool(left) == bool(right):
            return None
        return cls(bool(left), left | right)


def _before_broadcast(graph: Graph, factor: TensorRef) -> TensorRef:
    """Return a factor of a join before it was repeated, and before dimensions of size one were added to it."""
    once = graph.before_repeats(factor)
    return graph.before(once, lambda op: op.does("broadcasts") and _keeps_sizes(op))


def further_term(graph: Graph, scored: Joint, op: Op) -> TensorRef | None:
    """Return the tensor that an operation adds to joined queries and keys, if it depends on the inputs; otherwise None.

    In `tanh(q + k + location)`, the second addition adds `location`, a further term.
    """
    if plain_name(op) != "add" or len(op.inputs) < 2:
        return None
    joined = made_of({scored.multiply.output.id}, scored.between)
    terms = []
    for tensor in op.inputs:
        if tensor.id not in joined and graph.comes_from_inputs(tensor):
            terms.append(tensor)
    return terms[0] if len(terms) == 1 else None


def with_keys_of(graph: Graph, scored: Product, values: TensorRef) -> Product:
    """Return joined scores with the right term as the keys, if several terms are added: `q + context + k`.

    The keys are the term that is computed from the same tensor as the values.
    """
    if not isinstance(scored, Joint):
        return scored
    origins_of_values = _origins(graph, values)

    def has_origin_of_values(tensor: TensorRef) -> bool:
        return not origins_of_values.isdisjoint(_origins(graph, tensor))

    for op in scored.between:
        term = further_term(graph, scored, op)
        if term is None or not has_origin_of_values(term):
            continue
        if scored.left.shape == term.shape and not has_origin_of_values(scored.left):
            return replace(scored, left=term)
        if scored.right.shape == term.shape and not has_origin_of_values(scored.right):
            return replace(scored, right=term)
    return scored


def _origins(graph: Graph, tensor: TensorRef) -> set[int]:
    """Return the ids of a tensor before it was reshaped or permuted, and of the input of its projection."""
    origin = graph.before_moves(tensor)
    op = graph.producer(origin)
    if op is None or not graph.is_projection(op):
        return {origin.id}
    return {origin.id, graph.before_moves(graph.projected(op)).id}


def _is_statistic(graph: Graph, query: TensorRef, keys: set[Axis]) -> bool:
    """Return whether the supposed query is a statistic of the keys: the mean in `k - k.mean()`, or the sorted keys."""
    op = graph.producer(graph.before_moves(query))
    if op is None or not op.inputs:
        return False
    dims = graph.dimensions.of(op.inputs[0])
    if not dims:
        return False
    return any(not keys.isdisjoint(dims[dim]) for dim in _dims_of_statistic(op))


def _dims_of_statistic(op: Op) -> tuple[int, ...]:
    """Return the dimensions that an operation reduces or sorts; none for other operations."""
    if op.base_name in _SORTS:
        return (int(setting(op, _SORTS[op.base_name], "dim", -1)),)
    return reduced_places(op) if axes_rule(op.base_name) == "reduce" else ()


def _keeps_sizes(op: Op) -> bool:
    """Return whether input and output have the same sizes, apart from sizes of 1."""
    return _sizes_above_one(op.inputs[0]) == _sizes_above_one(op.output)


def _sizes_above_one(tensor: TensorRef) -> list[int]:
    return [size for size in tensor.shape if size != 1]


# -- factors ----------------------------------------------------------------------------------------------------------


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Return whether an operation only rearranges a factor for the product: in the same call, or to broadcast it.

    torch.einsum permutes its operands before `bmm`; `q[:, :, None] * k[:, None]` adds dimensions before `mul`.
    """
    if not graph.moves(op):
        return False
    if op.call == product.multiply.call:
        return True
    if product.multiply is product.op or not op.does("broadcasts"):
        return False
    return op.base_name == "expand" or _keeps_sizes(op)


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """Return a factor as the user wrote it: before it was rearranged for the product."""
    return graph.before(factor, lambda op: moved_for(graph, op, product))


# -- from the product to the softmax ----------------------------------------------------------------------------------


class Scoring(NamedTuple):
    """The steps from the product of queries and keys to the softmax, in the order of the run."""

    scores: TensorRef
    """Scaled scores, before any mask, bias or nonlinear function."""
    masked: TensorRef
    """The input of the softmax, without sinks."""
    scale: float | None
    """The factor between q·kᵀ and `scores`, e.g. 1/√head_dim; None if unknown."""
    late_scale: float | None
    """The factor between `scores` and the softmax, which also scales the masks before it; None if unknown."""
    masks: list[Op]
    """The operations that add, fill in or multiply by a mask or a bias."""
    mixed: list[Mixing]
    """The projections that mix the scores of heads."""
    steps: list[tuple[str, float | None]]
    """The steps from the scores to the softmax, in order: `add`, `fill` or `times` for a mask, `scale` and its number,
    `mixed` for a projection of heads, or the name of a function."""
    sinks: Op | None = None
    """The operation that appends attention sinks."""
    shifts: tuple[Op, ...] = ()
    """Those of the masks that add one number to all scores of a query, which changes no weight."""


def multiply(numbers: Iterable[float | None]) -> float | None:
    """Return the product of the numbers; None if one is unknown."""
    product = 1.0
    for number in numbers:
        if number is None:
            return None
        product *= number
    return product


def read_scoring(
    graph: Graph,
    scored: Product,
    path: tuple[Op, ...],
    softmax_input: TensorRef,
    dim: int,
) -> Scoring:
    """Read the steps of `path`, the operations from the product to the softmax over `dim`, in the order of the run.

    In `softmax(c · tanh(q·kᵀ · s / c) + mask)` the scores are `q·kᵀ · s`, and the steps are a `scale` of 1 / c, `tanh`,
    a `scale` of c, and `add`.
    """
    over = graph.dimensions.along(softmax_input, dim)
    reader = _ScoringReader(graph, scored.op, softmax_input, over)
    for op, next_op in zip(path, [*path[1:], None], strict=False):
        result = _output_read_by(next_op, op, softmax_input)
        if reader.appends_sinks(op, result):
            return reader.before_sinks(op)
        reader.take(op, result)
    scoring = reader.scoring(softmax_input)
    is_scaled_in_part = _scales_a_part(graph, scored.op, softmax_input)
    return scoring._replace(late_scale=None) if is_scaled_in_part else scoring


def _scales_a_part(graph: Graph, product: Op, softmax_input: TensorRef) -> bool:
    """Return whether a part of the scores is multiplied, e.g. `scores[:, :, 0] *= 2`: there is no scale of all then."""
    fewest = min(product.output.numel, softmax_input.numel)
    for op in between(graph.recording, {product.output.id}, softmax_input):
        is_part = op.output.numel < fewest
        if is_part and (graph.is_scale(op) or op.does("scales")):
            return True
    return False


class _ScoringReader:
    """Collects the steps from the product of queries and keys to the softmax, one operation after another."""

    def __init__(
        self,
        graph: Graph,
        product: Op,
        softmax_input: TensorRef,
        over: set[Axis],
    ) -> None:
        self._graph = graph
        self._product = product
        self._softmax_input = softmax_input
        self._over = over
        """The axes of the softmax."""
        self._fewest_elements = min(product.output.numel, softmax_input.numel)
        """A tensor with fewer elements is a slice of the scores, e.g. one that is masked and written back."""
        self._tensor = product.output
        """The result of the last step."""
        self._scores = product.output
        self._before_scale = product.output
        """The scores before the last scale."""
        self._scale: float | None = float(product.kwargs.get("alpha", 1))
        self._last_scale: float | None = self._scale
        self._late_scales: list[float | None] = []
        self._masks: list[Op] = []
        self._mixed: list[Mixing] = []
        self._steps: list[tuple[str, float | None]] = []

    @property
    def _is_plain(self) -> bool:
        """Whether the scores were only moved and scaled so far."""
        return not self._masks and not self._steps

    # -- the end ------------------------------------------------------------------------------------------------------

    def scoring(self, masked: TensorRef, sinks: Op | None = None) -> Scoring:
        """Return the steps so far."""
        return Scoring(
            scores=self._scores,
            masked=masked,
            scale=self._scale,
            late_scale=multiply(self._late_scales),
            masks=self._masks,
            mixed=self._mixed,
            steps=self._steps,
            sinks=sinks,
        )

    def appends_sinks(self, op: Op, result: TensorRef) -> bool:
        """Return whether an operation appends sinks to the scores."""
        name = plain_name(op)
        return name == "cat" or (name == "constant_pad_nd" and result.id == self._softmax_input.id)

    def before_sinks(self, op: Op) -> Scoring:
        """Return the steps up to the operation that appends sinks."""
        return self.scoring(self._scores if self._is_plain else self._tensor, op)

    # -- one operation ------------------------------------------------------------------------------------------------

    def take(self, op: Op, result: TensorRef) -> None:
        """Take the next operation on the way from the scores to the softmax, and its result."""
        self._take_kind(op, result)
        self._tensor = result

    def _take_kind(self, op: Op, result: TensorRef) -> None:
        """Find what an operation does to the scores, and take that step."""
        graph, name = self._graph, plain_name(op)
        mixing = mixing_of(graph, op)
        if mixing is not None:
            return self._mix(mixing)
        if name == "neg":
            return self._scale_late(-1.0)
        if graph.is_scale(op):
            return self._multiply(graph.scale_of(op), result)
        if is_shift(graph.recording, op):
            return self._shift(op)
        statistic = statistic_step(graph, op, self._product.output)
        if statistic:
            return self._combine(op, statistic)
        is_written_back = op.base_name == "copy_" and op.inputs[-1].id == self._tensor.id
        if adds_mask(op) and not is_written_back:
            return self._mask(op)
        if graph.norms_scores(op):
            return self._norm(op)
        if op.does("bends"):
            return self._bend(name)
        if op.does("scales"):
            return self._multiply_by_tensor(op, result)
        if self._is_plain and name != "_to_copy" and result.numel >= self._fewest_elements:
            self._scores = result
        return None

    def _undo_permutation(self) -> None:
        """Take the scores before a permutation for a norm or a mixing projection, if they were only moved so far."""
        if self._is_plain:
            self._scores = _unmoved(self._graph, self._scores, self._product)

    def _mix(self, mixing: Mixing) -> None:
        """Take a projection that mixes the scores of heads."""
        self._undo_permutation()
        self._mixed.append(mixing)
        self._steps.append(("mixed", None))

    def _multiply(self, number: float | None, result: TensorRef) -> None:
        """Take a multiplication by one number: as a part of the scores if nothing else was done to them yet."""
        is_part = result.numel < self._fewest_elements
        if is_part or not self._is_plain:
            return self._scale_late(None if is_part else number)
        self._before_scale, self._last_scale = self._tensor, number
        self._scale = multiply((self._scale, number))
        self._scores = result
        return None

    def _scale_late(self, number: float | None) -> None:
        """Take a factor that comes after a mask or a nonlinear function, and so is no part of the scores."""
        self._late_scales.append(number)
        self._steps.append(("scale", number))

    def _shift(self, op: Op) -> None:
        """Take a number that is subtracted from every score of a row, which changes no weight.

        Along another axis it normalises the scores.
        """
        dims = self._graph.dimensions.of(op.inputs[1])
        shifted = set[Axis]().union(*dims)
        if not shifted.isdisjoint(self._over):
            self._steps.append(("log_softmax", None))

    def _combine(self, op: Op, statistic: str) -> None:
        """Take a statistic of the scores that is combined with them: `- mean`, `/ std`."""
        self._undo_permutation()
        if op.does("scales"):
            self._late_scales.append(None)
        self._steps.append((statistic, None))

    def _mask(self, op: Op) -> None:
        """Take a mask or bias that is added, subtracted or filled in; `mask - scores` also negates the scores."""
        is_subtracted = plain_name(op) == "sub" and op.inputs[1].id == self._tensor.id
        if is_subtracted and op.inputs[0].id != self._tensor.id:
            self._scale_late(-1.0)
        self._masks.append(op)
        self._steps.append(("fill" if op.does("fills") else "add", None))

    def _norm(self, op: Op) -> None:
        """Take a norm of the scores: what follows no longer multiplies q·kᵀ."""
        self._undo_permutation()
        self._late_scales.append(None)
        self._steps.append((self._graph.norm_name(op), None))

    def _bend(self, name: str) -> None:
        """Take a nonlinear function; the scale just before a tanh belongs to the soft cap."""
        is_scaled = self._scores.id == self._tensor.id
        if name == "tanh" and self._is_plain and is_scaled and self._last_scale and self._scale is not None:
            self._scale /= self._last_scale
            self._scores = self._before_scale
            self._scale_late(self._last_scale)
        self._steps.append((name, None))

    def _multiply_by_tensor(self, op: Op, result: TensorRef) -> None:
        """Take a multiplication by a number for each head, or by a mask."""
        factor = min(op.inputs, key=lambda read: read.numel)
        differs_by_position = any(size > 1 for size in factor.shape[-2:])
        if differs_by_position:
            self._masks.append(op)
            self._steps.append(("times", None))
        elif self._is_plain:
            self._scale = None
            self._scores = result
        else:
            self._scale_late(None)


def _unmoved(graph: Graph, scores: TensorRef, product: Op) -> TensorRef:
    """Return scores before they were permuted or reshaped, in the layout that the product was called for."""
    plain = graph.before_moves(scores)
    return graph.after_call(product) if plain.id == product.output.id else plain


def _output_read_by(reader: Op | None, op: Op, softmax_input: TensorRef) -> TensorRef:
    """Return the output of an operation that the next one reads, or else the softmax: a split gives several pieces."""
    read = (softmax_input,) if reader is None else reader.inputs
    for output in op.outputs:
        if output in read:
            return output
    return op.output


def adds_mask(op: Op) -> bool:
    """Return whether an operation fills in numbers, or adds or subtracts a tensor that is not a single number."""
    if op.does("fills"):
        return True
    if plain_name(op) not in ("add", "sub"):
        return False
    return sum(bool(tensor.shape) for tensor in op.inputs) > 1

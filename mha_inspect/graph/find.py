"""Find every attention in a recording by its dataflow, without any class name or source text.

Each product that may average values is looked at with the scores that may be behind its weights: what is between them
is measured. From the operands a walk goes back to the projections, and from the product with the values to the output.
The iterations of a loop over heads are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .attention import Attention
from .axis import Axis, plain_name, setting
from .dataflow import Graph, inside
from .kernels import readings_of_kernels
from .late import average_of_ones
from .meet import Meeting, Meetings, moved_for
from .mixing import mixings_of
from .pieces import with_keys_joined, with_pieces_joined
from .products import KernelScores, Product, ProductPath
from .projections import Projection, projections_behind, with_projections
from .reading import Reading, Softmax, multiply, read, read_weighing
from .rerun import Constants
from .turns import Joined, heads_agree, pieces_agree, place_of_join, read_same_tokens, sources_of
from .unlike import compares, is_dispatch, is_made_of_weights, is_routing, softmaxed_side


def attentions_of(graph: Graph) -> list[Attention]:
    """Return every attention of a recording, in the order of computation; empty if there is no attention."""
    constants = Constants(graph, {}, kept=False)
    attentions = [*_of_kernels(graph), *_Finder(graph, constants).all()]
    attentions.sort(key=lambda attention: attention.softmax.index)
    attentions = [attention for attention in attentions if not is_dispatch(graph, attention, attentions)]
    # The projection of another attention's queries, keys or values is no W_o.
    taken: set[int] = set()
    contexts: set[int] = set()
    for attention in attentions:
        taken.update(op.index for op in attention.projections.values())
        contexts.add(attention.stages["context"].id)
    attentions = [_with_output(graph, attention, taken, contexts) for attention in attentions]
    return _with_turns_merged(graph, with_pieces_joined(graph, attentions), constants)


def _of_kernels(graph: Graph) -> list[Attention]:
    """Return the attentions of fused kernels, which say all of what they compute."""
    attentions = []
    for reading in readings_of_kernels(graph):
        parts = _Parts(reading.softmax, reading.scores, reading.values, key_first=False, over_queries=False)
        attention = _attention_of_parts(graph, parts, reading)
        if attention is not None:
            attentions.append(attention)
    return attentions


class _Finder:
    """Finds the attentions of a run, by measuring what is between scores and products with values."""

    def __init__(self, graph: Graph, constants: Constants) -> None:
        self._graph = graph
        self._constants = constants
        self._meetings = Meetings(graph)
        self._found: dict[int, Attention] = {}
        """The index of each softmax to its attention."""
        self._mixing: set[int] = set()
        """The softmaxes of several scores: a product whose numbers are summed along the keys is a bias beside the
        scores, if there are any others."""

    def all(self) -> list[Attention]:
        """Return all of them."""
        remaining = []
        for values in self._meetings.averages():
            by_product = [self._take_softmax(meeting) for meeting in self._meetings.products(values)]
            if not any(by_product) and not any(map(self._take_softmax, self._meetings.joins(values))):
                remaining.append(values)
        for meeting in self._meetings.memories():
            self._take_softmax(meeting)
        return [*self._found.values(), *self._weighings(remaining)]

    def _take_softmax(self, meeting: Meeting) -> bool:
        """Note the attention of a meeting whose weights sum to one; return whether they do."""
        reading = read(self._graph, meeting, self._constants)
        if reading is None:
            return False
        softmax = reading.softmax.op.index
        is_better = softmax in self._mixing and not reading.mixes_positions
        if softmax in self._found and not is_better:
            return True
        attention = _attention_around(self._graph, reading)
        if attention is None:
            return True
        self._found[softmax] = attention
        self._mixing.discard(softmax)
        if reading.mixes_positions:
            self._mixing.add(softmax)
        return True

    def _weighings(self, remaining: Sequence[ProductPath]) -> list[Attention]:
        """Return the attentions of weights that are no softmax; pieces that give one context are one attention."""
        graph, constants = self._graph, self._constants
        taken: set[int] = set()
        for attention in self._found.values():
            taken.update((attention.score_product.op.index, attention.value_product.op.index))
        pieces: dict[int, list[Attention]] = {}
        for values in remaining:
            if values.product.op.index in taken:
                continue
            for meeting in (*self._meetings.products(values), *self._meetings.joins(values)):
                if meeting.scores.op.index in taken or not compares(graph, meeting.scores):
                    continue
                reading = read_weighing(graph, meeting, constants)
                piece = None if reading is None else _attention_around(graph, reading)
                if piece is not None:
                    pieces.setdefault(piece.stages["context"].id, []).append(piece)
                    break
        attentions = []
        for turns in pieces.values():
            if pieces_agree(turns):
                joined = with_keys_joined(graph, turns)
                attentions.append(replace(joined, average_of_ones=average_of_ones(graph, turns, constants)))
        return attentions


@dataclass(frozen=True)
class _Parts:
    """The scores, the weights and the values that may be one attention."""

    softmax: Softmax
    scores: ProductPath
    values: ProductPath
    key_first: bool
    """Whether the keys are the left operand of the scores product."""
    over_queries: bool
    """Whether the softmax runs over the queries."""

    @property
    def query(self) -> TensorRef:
        """The queries as the product of the scores reads them."""
        return self.scores.product.right if self.key_first else self.scores.product.left

    @property
    def key(self) -> TensorRef:
        """The keys as the product of the scores reads them."""
        return self.scores.product.left if self.key_first else self.scores.product.right

    @property
    def has_keys_transposed(self) -> bool:
        """Whether the product reads the keys with positions last."""
        return not self.key_first and not isinstance(self.scores.product, KernelScores)

    def positions(self, graph: Graph) -> dict[str, set[Axis]]:
        """Return the axes of the positions of each side."""
        scored = self.scores.product.axes(graph.dimensions)
        summed = self.values.product.axes(graph.dimensions)
        return {
            "query": set(scored.columns if self.key_first else scored.rows),
            "key": set(scored.left_rows if self.key_first else scored.right_columns),
            "value": set(summed.left_inner if self.values.values_first else summed.right_inner),
        }


def _attention_around(graph: Graph, reading: Reading) -> Attention | None:
    """Return the attention that was read; None if this is no attention."""
    softmax, scores, values = reading.softmax, reading.scores, reading.values
    side = softmaxed_side(graph, scores.product, values, softmax.masked, softmax.dim)
    if side is None or is_made_of_weights(graph, values.values, softmax, scores.product):
        return None
    key_first, over_queries = side
    return _attention_of_parts(graph, _Parts(softmax, scores, values, key_first, over_queries), reading)


def _attention_of_parts(graph: Graph, parts: _Parts, reading: Reading) -> Attention | None:
    """Return the attention of these parts; None if they route tokens, or say where something is."""
    values = parts.values
    if is_routing(graph, parts.query, parts.key, values.values):
        return None
    if graph.comes_from_inputs(parts.key) and values.values.id not in graph.given_or_learned:
        return None  # an average of numbers that are no input and not learned, e.g. positions: it says where
    return _attention_of(graph, parts, reading)


def _attention_of(graph: Graph, parts: _Parts, reading: Reading) -> Attention:
    """Return the attention of these parts."""
    softmax, values, product = parts.softmax, parts.values, parts.scores.product
    query_heads = _heads(graph, product, parts.query, transposed=parts.key_first)
    key_heads = _heads(graph, product, parts.key, transposed=parts.has_keys_transposed)
    value_heads = _heads(graph, values.product, values.values, transposed=values.values_first, unscaled=False)
    heads = {"q_heads": query_heads.tensor, "k_heads": key_heads.tensor, "v_heads": value_heads.tensor}
    module = product.multiply.module
    ends = projections_behind(graph, heads, module, parts.positions(graph))
    scoring = reading.scoring
    scores_scale, scale = None, None
    early_scales = _early_scales(graph, ends)
    if product.is_dot:
        scores_scale = multiply([query_heads.scale, key_heads.scale, scoring.scale])
        scale = multiply([*early_scales.values(), query_heads.scale, key_heads.scale, reading.factor])
    return Attention(
        softmax=softmax.op,
        score_product=product,
        value_product=values.product,
        stages={**with_projections(graph, heads, ends), **_stages_after_heads(graph, parts, reading)},
        scale=scale,
        scores_scale=scores_scale,
        early_scales=early_scales,
        softmax_dim=softmax.dim,
        key_first=parts.key_first,
        over_queries=parts.over_queries,
        value_first=values.values_first,
        masks=(*scoring.masks, *softmax.masks),
        divided=softmax.divided,
        scoring=tuple(scoring.steps),
        sinks=scoring.sinks,
        mixed_scores=tuple(scoring.mixed),
        mixed_weights=tuple(mixings_of(graph, values.path)),
        weights_path=values.path,
        weighing=softmax.ops,
        projections={name: end.op for name, end in ends.items()},
        earlier={name: end.earlier for name, end in ends.items() if end.earlier},
        before_repeats={"key": graph.before_repeats(key_heads.tensor)},
        shifts=scoring.shifts,
        is_over_memory=not graph.comes_from_inputs(parts.key),
        seen=reading.seen,
        has_factors=reading.has_factors,
        weights_scale=reading.weights_scale,
        module=module,
    )


def _stages_after_heads(graph: Graph, parts: _Parts, reading: Reading) -> dict[str, TensorRef]:
    """Return the scores, the masked scores, the weights and the context; without those that are never made."""
    softmax, scoring = parts.softmax, reading.scoring
    stages = {"scores": scoring.scores}
    if scoring.masks or (scoring.steps and not reading.hides_scale):
        stages["masked_scores"] = scoring.masked
    if softmax.divided is not None:
        stages["context"] = softmax.divided.output
        return stages
    stages["weights"] = _without_sinks(softmax.op.output, softmax.dim, parts.values.path)
    stages["context"] = graph.after_call(parts.values.product.op)
    return stages


def _early_scales(graph: Graph, ends: Mapping[str, Projection]) -> dict[str, float | None]:
    """Return the scale between the projections of queries and keys and their heads, by the name of the heads."""
    scales = {}
    for name in ("query", "key"):
        if name in ends:
            scales[f"{name[0]}_heads"] = _early_scale(graph, ends[name])
    return scales


# -- heads ------------------------------------------------------------------------------------------------------------


class _Heads(NamedTuple):
    """An operand of a product before it was transposed and scaled for it."""

    tensor: TensorRef
    scale: float | None
    """The number that it was multiplied by; None if it is unknown."""


def _heads(
    graph: Graph,
    product: Product,
    operand: TensorRef,
    *,
    transposed: bool,
    unscaled: bool = True,
) -> _Heads:
    """Return an operand before its transposition for the product, and if `unscaled` before its scaling; and its scale.

    The scale of queries and keys is a part of that of the scores. Values that are multiplied are other values.
    """
    scales: list[float | None] = []
    swapped = False
    tensor = operand
    while True:
        op = graph.producer(tensor)
        if op is None or not op.inputs:
            break
        if moved_for(graph, op, product):
            swapped = swapped or op.swaps_last_two
        elif unscaled and product.is_dot and _scales(graph, op):
            scales.append(graph.scale_of(op))
        elif transposed and not swapped and op.swaps_last_two:
            swapped = True
        elif not (unscaled and _is_result_of_scaling(graph, op)):
            break
        tensor = _largest_input(op) if _scales(graph, op) else op.inputs[0]
    return _Heads(tensor, multiply(scales))


def _largest_input(op: Op) -> TensorRef:
    return max(op.inputs, key=lambda read: read.numel)


def _is_result_of_scaling(graph: Graph, op: Op) -> bool:
    """Return whether this links a kernel's result to its last step, and the step is a scaling."""
    if not op.makes_result:
        return False
    step = graph.producer(op.inputs[0])
    return step is not None and _scales(graph, step)


def _scales(graph: Graph, op: Op) -> bool:
    """Return whether this multiplies every element by one number, except as the second half of a mean."""
    if not graph.is_scale(op):
        return False
    maker = graph.producer(_largest_input(op))
    if maker is None or maker.base_name != "sum":
        return True
    summed = maker.inputs[0].numel / max(maker.output.numel, 1)
    return not isclose((graph.scale_of(op) or 0) * summed, 1, rel_tol=1e-6)


def _early_scale(graph: Graph, end: Projection) -> float | None:
    """Return the scale between a projection and its heads, after the last norm; None if unknown.

    What is added to scaled features is not scaled: then no number multiplies all of them.
    """
    scales: list[float | None] = []
    for op in end.path:
        if _norms(graph, op):
            scales = []
        elif _scales(graph, op):
            scales.append(graph.scale_of(op))
        elif scales and plain_name(op) in ("add", "sub") and len(op.inputs) > 1:
            scales.append(None)
    return multiply(scales)


def _norms(graph: Graph, op: Op) -> bool:
    """Return whether this is a norm, or the last step of a norm in several operations: by a length, or by a gain."""
    if op.does("norms"):
        return op.base_name not in ("sum", "mean")  # alone they pool positions
    if not op.does("scales") or len(op.inputs) != 2 or graph.is_scale(op):
        return False
    return any(graph.is_weight(read) or _is_repeated_by_feature(read) for read in op.inputs)


def _is_repeated_by_feature(tensor: TensorRef) -> bool:
    """Return whether a tensor has one number for all features, as a length has."""
    if not tensor.shape:
        return False
    return tensor.shape[-1] == 1 or tensor.stride[-1] == 0


def _without_sinks(weights: TensorRef, dim: int, path: tuple[Op, ...]) -> TensorRef:
    """Return the weights without those of the sinks, which are cut off before the values product."""
    for op in path:
        if not op.does("cuts") or op.output.numel >= weights.numel:
            continue
        shape = op.output.shape
        has_rank = len(shape) == len(weights.shape)
        if not has_rank or shape[dim] != weights.shape[dim]:
            return op.output
    return weights


# -- output -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WayToOutput:
    """The operations that may come between the context of an attention and its output projection."""

    graph: Graph
    module: str
    context: TensorRef
    has_separate_heads: bool
    """Whether the context is still `batch heads query head_dim`, and not yet `batch query embed`."""
    queries: frozenset[int]
    """Ids of the queries before views and copies."""
    contexts: frozenset[int]
    """Ids of the contexts of all attentions."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        attention: Attention,
        contexts: Iterable[int],
    ) -> _WayToOutput:
        """Return the way from the context of this attention."""
        stages = attention.stages
        context = stages["context"]
        query_shape = stages.get("query", context).shape
        queries = [stages[name] for name in ("query", "q_heads") if name in stages]
        return cls(
            graph=graph,
            module=attention.module,
            context=context,
            has_separate_heads=len(context.shape) > 2 and context.shape != query_shape,
            queries=frozenset(graph.before_moves(query).id for query in queries),
            contexts=frozenset(contexts),
        )

    def continues_through(self, op: Op) -> bool:
        """Return whether the result of this operation is still the context, and not yet the output."""
        if self.graph.is_by_head(op):
            return True
        if op.does("product") or self._is_residual(op) or self._joins_query(op):
            return False
        if op.kind != "compute" or op.pointwise or op.does("passes_on"):
            return True
        return op.does("norms") and inside(op.module, self.module)

    def _is_residual(self, op: Op) -> bool:
        """Return whether this adds something else of the size of the context, e.g. the input of the block."""
        if plain_name(op) != "add":
            return False
        whole_operands = [read for read in op.inputs if read.numel == op.output.numel]
        if len(whole_operands) < 2:
            return False
        # An addition while heads are still separate belongs to the attention.
        keeps_heads = self.has_separate_heads and op.output.shape == self.context.shape
        if keeps_heads and op.module == self.module:
            return False
        # The contexts of several attentions may be added before one projection.
        return not all(map(self._is_context, op.inputs))

    def _joins_query(self, op: Op) -> bool:
        """Return whether this concatenates the context with its own query, as in a decoder: that is no output."""
        if op.base_name != "cat":
            return False
        return any(self.graph.before_moves(read).id in self.queries for read in op.inputs)

    def _is_context(self, tensor: TensorRef) -> bool:
        """Return whether a tensor is the context of an attention, at most moved, scaled or added to others."""
        steps = self.graph.back(tensor, self._keeps_context)
        return any(step.tensor.id in self.contexts for step in steps)

    def _keeps_context(self, op: Op) -> bool:
        if op.base_name == "add":
            return True
        return self.graph.moves(op) or self.graph.is_scale(op)


class _OutputProjection(NamedTuple):
    """The projection W_o of an attention."""

    op: Op
    read: TensorRef
    """The tensor that it reads on the way from the context."""


def _with_output(
    graph: Graph,
    attention: Attention,
    taken: set[int],
    contexts: set[int],
) -> Attention:
    """Return an attention with its concatenated heads, and its output if a projection that is not `taken` follows."""
    projection = _output_projection(graph, attention, taken, contexts)
    if projection is None:
        context = attention.stages["context"]
        concat = _onward(graph, context, attention.module)
        stages = {} if concat.id == context.id else {"concat": concat}
        return replace(attention, stages=attention.stages | stages)
    stages = {
        "concat": _concat_before(graph, attention, projection),
        "output": _output_after(graph, attention, projection.op),
    }
    projections = {**attention.projections, "output": projection.op}
    return replace(attention, stages=attention.stages | stages, projections=projections)


def _output_projection(
    graph: Graph,
    attention: Attention,
    taken: set[int],
    contexts: set[int],
) -> _OutputProjection | None:
    """Return the next projection after the context; None if it is `taken`, or there is none."""
    way = _WayToOutput.of(graph, attention, contexts)
    for op, step in graph.forward(attention.stages["context"], way.continues_through):
        if not graph.is_projection(op):
            continue
        if op.index in taken:
            return None
        # A projection of each head by itself is the output only if the heads are added up after it.
        if not graph.is_by_head(op) or _is_summed(graph, op):
            return _OutputProjection(op, step.tensor)
    return None


def _is_summed(graph: Graph, op: Op) -> bool:
    """Return whether the result of an operation is added up along a dimension, e.g. over the heads."""

    def through(passed: Op) -> bool:
        return graph.moves(passed) or passed.pointwise

    after = graph.forward(op.output, through)
    return any(reader.base_name in ("sum", "mean") for reader, _ in after)


def _concat_before(
    graph: Graph,
    attention: Attention,
    projection: _OutputProjection,
) -> TensorRef:
    """Return the concatenated heads, `batch query (heads head_dim)`, as the output projection was called with them."""
    op = projection.op
    concat = graph.before_call(op, projection.read)
    # In the attention's own code the reshape that concatenates heads may flatten rows too.
    return concat if op.module == attention.module else graph.before_flattening(concat, op.module)


def _output_after(graph: Graph, attention: Attention, projection: Op) -> TensorRef:
    """Return the output, `batch query embed`, at the end of the views and copies of the attention's module."""
    # An operation that moves the features to another dimension belongs to the next module.
    features_last = projection.base_name != "convolution"
    return _onward(graph, graph.after_projection(projection), attention.module, features_last=features_last)


def _onward(
    graph: Graph,
    tensor: TensorRef,
    module: str,
    *,
    features_last: bool = False,
) -> TensorRef:
    """Return the end of the chain of views and copies that starts here and stays in the module.

    With `features_last` the chain ends before the last dimension changes.
    """
    features = graph.dimensions.of(tensor)[-1:]

    def counts(op: Op) -> bool:
        if not graph.moves(op) or op.call in graph.calls_of_products:
            return False
        return inside(op.module, module)

    def passes(op: Op) -> bool:
        if op.output.numel != tensor.numel or not tensor.numel:
            return False
        return not features_last or graph.dimensions.of(op.output)[-1:] == features

    return graph.after(tensor, counts, passes)


# -- turns of a loop over heads ---------------------------------------------------------------------------------------


def _with_turns_merged(
    graph: Graph,
    attentions: list[Attention],
    constants: Constants,
) -> list[Attention]:
    """Merge attentions of the same source line and module whose contexts are joined head by head.

    A head may be a module. The iterations of a loop over pieces of a sequence are of one line too, and are joined along
    the sequence: they stay separate.
    """
    turns = [_Turn(attention, _joining(graph, attention)) for attention in attentions]
    joined = Joined(graph)
    for turn in turns:
        if turn.join is not None:
            joined.add(turn.join.op, turn.join.context)
    groups: dict[tuple[object, ...], list[_Turn]] = {}
    for place, turn in enumerate(turns):
        loop = _loop_of(graph, turn, joined)
        groups.setdefault((place,) if loop is None else loop, []).append(turn)
    merged: list[Attention] = []
    for group in groups.values():
        merged += _merged(graph, group, constants)
    return sorted(merged, key=lambda attention: attention.softmax.index)


class _Join(NamedTuple):
    """An operation that joins a context with others, and this context."""

    op: Op
    context: TensorRef


class _Turn(NamedTuple):
    """One attention, which may be one iteration of a loop over heads."""

    attention: Attention
    join: _Join | None
    """How its context is joined with others, head by head; None if it is not."""


def _loop_of(graph: Graph, turn: _Turn, joined: Joined) -> tuple[object, ...] | None:
    """Return equal values for the iterations of one loop over heads; None for an attention of its own."""
    attention, join = turn
    # The number of heads is known only if all that is joined is heads.
    if join is None or joined.has_others(join.op):
        return None
    return place_of_join(join.op), *(source.id for source in sources_of(graph, attention))


def _joining(graph: Graph, attention: Attention) -> _Join | None:
    """Return the operation that joins this context with others, head by head, and what it joins; None if none does."""
    axes = attention.value_product.axes(graph.dimensions)
    features = set(axes.rows if attention.value_first else axes.columns)

    def through(op: Op) -> bool:
        return graph.moves(op) or op.base_name == "native_dropout"

    for op, step in graph.forward(attention.stages["context"], through):
        if not op.outputs or len(op.inputs) < 2:
            continue
        if _joins_heads(graph, op, step.tensor, features):
            return _Join(op, step.tensor)
    return None


def _joins_heads(graph: Graph, op: Op, context: TensorRef, features: set[Axis]) -> bool:
    """Return whether an operation joins a context with others along a new dimension, or along its features.

    It is a stack or a concatenation, or writes the context into a part of a larger tensor.
    """
    cut: Op = op
    if op.base_name == "copy_" and op.inputs[0].id != context.id:
        cut = graph.producer(op.inputs[0]) or op
    if op.base_name == "stack" or cut.base_name == "select":
        return True
    if cut.base_name not in ("cat", "slice"):
        return False
    dims = graph.dimensions.of(context)
    rank = len(dims)
    if len(cut.output.shape) != rank:
        return False
    place = setting(cut, 1, "dim", 0) % rank
    return not features.isdisjoint(dims[place])


def _origin(graph: Graph, tensor: TensorRef) -> tuple[object, ...]:
    """Return equal values for tensors that are moved alike from one tensor, e.g. one slice that is taken twice."""
    views: list[object] = []
    source = tensor.id
    for step in graph.back(tensor, graph.moves):
        views.append((step.tensor.offset, step.tensor.shape, step.tensor.stride))
        source = step.tensor.id
    return source, *views


def _merged(
    graph: Graph,
    group: Sequence[_Turn],
    constants: Constants,
) -> list[Attention]:
    """Return one attention for all iterations of a loop; the iterations unchanged if they are no heads alike.

    Two with the same scores are none, and what is said of the first has to be true of the others.
    """
    turns = [turn.attention for turn in group]
    if len(turns) == 1 or _have_same_scores(graph, turns):
        return turns
    if not (read_same_tokens(graph, turns) and heads_agree(graph, turns, constants)):
        return turns
    first, join = group[0]
    module = first.module
    if join is not None and len({turn.module for turn in turns}) > 1:
        module = join.op.module
    stages, projections = _after_last(turns[-1])
    return [
        replace(
            first,
            stages=first.stages | stages,
            projections=first.projections | projections,
            branches=tuple(turns),
            module=module,
        )
    ]


def _have_same_scores(graph: Graph, turns: Sequence[Attention]) -> bool:
    """Return whether two iterations have the same queries and keys."""
    origins = set()
    for turn in turns:
        query = _origin(graph, turn.stages["q_heads"])
        key = _origin(graph, turn.stages["k_heads"])
        origins.add((query, key))
    return len(origins) < len(turns)


def _after_last(last: Attention) -> tuple[dict[str, TensorRef], dict[str, Op]]:
    """Return the stages after a loop and the output projection, by name, as the last iteration has them.

    Only the walk from the last iteration reaches the operations after the loop, also if a buffer is filled.
    """
    stages: dict[str, TensorRef] = {}
    for name in ("concat", "output"):
        if name in last.stages:
            stages[name] = last.stages[name]
    projections = {"output": last.projections["output"]} if "output" in last.projections else {}
    return stages, projections

"""Find every attention in a recording by its dataflow, without any class name or source text.

From each softmax a walk goes back through masks and scale to the scores product, and forward to the values product.
Weights without a softmax are found backward from the values product. From the operands the walk continues to the
projections, and from the values product to the output. The iterations of a loop over heads are merged.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from ..record.ops import Op, TensorRef
from .attention import Attention, positions_of
from .axis import setting, wide
from .dataflow import Graph, inside
from .late import average_of_ones, with_exponentials_masked
from .memory import memory_paths
from .pairs import pairs_of
from .pieces import with_keys_joined, with_pieces_joined, with_softmaxes_joined
from .products import Product, ProductPath
from .projections import Projection, projections_behind, with_projections
from .reading import Reading, read
from .rerun import Constants
from .scores import mixing_of, moved_for, multiply, read_scoring, score_product, with_keys_of
from .softmax import Softmax
from .turns import Joined, heads_agree, pieces_agree, place_of_join
from .values import (
    find_pieces,
    find_weighings,
    is_made_of_weights,
    is_routing,
    softmaxed_side,
    sums_over_all,
    value_product,
)


def attentions_of(graph: Graph) -> list[Attention]:
    """Return every attention of a recording, in the order of computation; empty if there is no attention."""
    constants = Constants(graph, {}, kept=False)
    attentions = _measured(graph, constants)
    taken = {each.value_product.op.index for each in attentions}
    softmaxed = {each.softmax.index for each in attentions}
    for softmax in graph.softmaxes.values():
        if softmax.op.index in softmaxed:
            continue
        values = softmax.values_product or value_product(graph, softmax.op.output, softmax.dim)
        if values is not None and (values.product.op.index in taken or not sums_over_all(graph, softmax, values)):
            continue
        scores = None if values is None else score_product(graph, softmax.masked, softmax.dim, softmax.op.module)
        if values is None or scores is None:
            scores, values = memory_paths(graph, softmax) or (None, None)
        attention = None if values is None or scores is None else _attention_around(graph, softmax, scores, values)
        if attention is not None:
            masked = with_exponentials_masked(graph, attention, constants)
            attentions.append(replace(masked, average_of_ones=average_of_ones(graph, [attention], constants)))
    taken = {op.index for each in attentions for op in (each.score_product.op, each.value_product.op)}
    pieces: dict[int, list[Attention]] = {}
    for softmax, scores, values in (*find_pieces(graph), *find_weighings(graph, taken)):
        attention = _attention_around(graph, softmax, scores, values)
        if attention is not None:
            masked = with_exponentials_masked(graph, attention, constants)
            pieces.setdefault(attention.stages["context"].id, []).append(masked)
    for turns in pieces.values():
        if pieces_agree(turns):
            joined = with_keys_joined(graph, turns)
            attentions.append(replace(joined, average_of_ones=average_of_ones(graph, turns, constants)))
    attentions.sort(key=lambda attention: attention.softmax.index)
    attentions = with_softmaxes_joined(graph, attentions)
    attentions = [attention for attention in attentions if not _is_dispatch(graph, attention, attentions)]
    # The projection of another attention's queries, keys or values is no W_o.
    taken = {op.index for attention in attentions for op in attention.projections.values()}
    contexts = {attention.stages["context"].id for attention in attentions}
    attentions = [_with_output(graph, attention, taken, contexts) for attention in attentions]
    return _with_turns_merged(graph, with_pieces_joined(graph, attentions), constants)


def _measured(graph: Graph, constants: Constants) -> list[Attention]:
    """Return the attentions of pairs of products whose weights, as a measurement shows, sum to one."""
    attentions: dict[int, Attention] = {}
    for pair in pairs_of(graph):
        reading = read(graph, pair, constants)
        if reading is None or reading.softmax.op.index in attentions:
            continue
        attention = _attention_around(graph, reading.softmax, reading.scores, reading.values, reading)
        if attention is not None:
            attentions[reading.softmax.op.index] = attention
    return list(attentions.values())


def _is_dispatch(graph: Graph, attention: Attention, attentions: list[Attention]) -> bool:
    """Return whether one scores product gives the weights of two averages, and one average depends on the other.

    This is a soft mixture of experts: tokens are averaged into slots, and the results are averaged back into tokens.
    With projected values it is an attention of two sides to each other.
    """
    scores = attention.score_product.op
    return any(
        "value" not in first.projections and graph.leads_to(first.stages["context"], second.stages["v_heads"])
        for other in attentions
        if other is not attention and other.score_product.op is scores
        for first, second in ((attention, other), (other, attention))
    )


def _attention_around(
    graph: Graph, softmax: Softmax, scores: ProductPath, values: ProductPath, reading: Reading | None = None
) -> Attention | None:
    """Return the attention around a softmax or around other weights; None if this is no attention."""
    product, averaged = with_keys_of(graph, scores.product, values.values), values.product
    side = softmaxed_side(graph, product, values, softmax.masked, softmax.dim)
    if side is None or is_made_of_weights(graph, values.values, softmax, scores.product):
        return None
    key_first, over_queries = side
    query, key = (product.right, product.left) if key_first else (product.left, product.right)
    if is_routing(graph, query, key, values.values):
        return None
    if graph.comes_from_inputs(key) and values.values.id not in graph.given_or_learned:
        return None  # an average of numbers that are no input and not learned, e.g. positions: it says where
    q_heads, q_scale = _heads(graph, product, query, transposed=key_first)
    k_heads, k_scale = _heads(graph, product, key, transposed=not key_first)
    v_heads, _ = _heads(graph, averaged, values.values, transposed=values.values_first, unscaled=False)
    heads = {"q_heads": q_heads, "k_heads": k_heads, "v_heads": v_heads}
    scored, summed = product.axes(graph.dimensions), averaged.axes(graph.dimensions)
    positions = {
        "query": set(scored.columns if key_first else scored.rows),
        "key": set(scored.left_rows if key_first else scored.right_columns),
        "value": set(summed.left_inner if values.values_first else summed.right_inner),
    }
    module = product.multiply.module
    ends = projections_behind(graph, heads, module, positions)
    stages = with_projections(graph, heads, ends)
    if reading is None:
        scoring = read_scoring(graph, product, scores.path, softmax.masked, softmax.dim)
        factor = multiply([scoring.scale, scoring.late_scale])
    else:
        scoring, factor = reading.scoring, reading.factor
    stages["scores"] = scoring.scores
    if scoring.masks or (scoring.steps and not (reading is not None and reading.hides_scale)):
        stages["masked_scores"] = scoring.masked
    if softmax.divided is None:
        stages["weights"] = _without_sinks(softmax.op.output, softmax.dim, values.path)
    stages["context"] = graph.after_call(averaged.op) if softmax.divided is None else softmax.divided.output
    scores_scale = multiply([q_scale, k_scale, scoring.scale]) if product.is_dot else None
    early = {f"{name[0]}_heads": _early_scale(graph, ends[name]) for name in ("query", "key") if name in ends}
    return Attention(
        softmax=softmax.op,
        score_product=product,
        value_product=averaged,
        stages=stages,
        scale=multiply([*early.values(), q_scale, k_scale, factor]) if product.is_dot else None,
        scores_scale=scores_scale,
        early_scales=early,
        softmax_dim=softmax.dim,
        key_first=key_first,
        over_queries=over_queries,
        value_first=values.values_first,
        masks=(*scoring.masks, *softmax.masks),
        divided=softmax.divided,
        scoring=tuple(scoring.steps),
        sinks=scoring.sinks,
        mixed_scores=tuple(scoring.mixed),
        mixed_weights=tuple(mixing for op in values.path if (mixing := mixing_of(graph, op)) is not None),
        weights_path=values.path,
        weighing=softmax.ops,
        projections={name: end.op for name, end in ends.items()},
        earlier={name: end.earlier for name, end in ends.items() if end.earlier},
        before_repeats={"key": graph.before_repeats(k_heads)},
        seen=None if reading is None else reading.seen,
        shifts=scoring.shifts,
        has_factors=reading is not None and reading.has_factors,
        weights_scale=1.0 if reading is None else reading.weights_scale,
        is_over_memory=not graph.comes_from_inputs(key),
        module=module,
    )


# -- heads ------------------------------------------------------------------------------------------------------------


def _heads(
    graph: Graph, product: Product, operand: TensorRef, *, transposed: bool, unscaled: bool = True
) -> tuple[TensorRef, float | None]:
    """Return an operand before its transposition for the product, and if `unscaled` before its scaling; and its scale.

    The scale of queries and keys is a part of that of the scores. Values that are multiplied are other values.
    """
    scales: list[float | None] = []
    swapped = False
    tensor = operand
    while (op := graph.recording.producer(tensor)) is not None and op.inputs:
        step = graph.recording.producer(op.inputs[0]) if op.makes_result else None
        if moved_for(graph, op, product):
            swapped = swapped or op.swaps_last_two
        elif unscaled and product.is_dot and _scales(graph, op):
            scales.append(graph.scale_of(op))
        elif transposed and not swapped and op.swaps_last_two:
            swapped = True
        elif step is None or not unscaled or not _scales(graph, step):
            break
        tensor = max(op.inputs, key=lambda read: read.numel) if _scales(graph, op) else op.inputs[0]
    return tensor, multiply(scales)


def _scales(graph: Graph, op: Op) -> bool:
    """Return whether this multiplies every element by one number, except as the second half of a mean."""
    if not graph.is_scale(op):
        return False
    maker = graph.recording.producer(max(op.inputs, key=lambda read: read.numel))
    if maker is None or maker.base_name != "sum":
        return True
    summed = maker.inputs[0].numel / max(maker.output.numel, 1)
    return not isclose((graph.scale_of(op) or 0) * summed, 1, rel_tol=1e-6)


def _early_scale(graph: Graph, end: Projection) -> float | None:
    """Return the scale between a projection and its heads, after the last norm; None if unknown."""
    after = max((place for place, op in enumerate(end.path) if _norms(graph, op)), default=-1)
    return multiply(graph.scale_of(op) for op in end.path[after + 1 :] if _scales(graph, op))


def _norms(graph: Graph, op: Op) -> bool:
    """Return whether this is a norm, or the last step of a norm in several operations: by a length, or by a gain."""
    if op.does("norms"):
        return op.base_name not in ("sum", "mean")  # alone they pool positions
    if not op.does("scales") or len(op.inputs) != 2 or graph.is_scale(op):
        return False
    return any(graph.is_weight(read) or read.shape[-1:] == (1,) or read.stride[-1:] == (0,) for read in op.inputs)


def _without_sinks(weights: TensorRef, dim: int, path: tuple[Op, ...]) -> TensorRef:
    """Return the weights without those of the sinks, which are cut off before the values product."""
    for op in path:
        same_keys = len(op.output.shape) == len(weights.shape) and op.output.shape[dim] == weights.shape[dim]
        if op.does("cuts") and op.output.numel < weights.numel and not same_keys:
            return next((tensor for tensor in op.outputs if tensor.numel < weights.numel), op.output)
    return weights


# -- output -----------------------------------------------------------------------------------------------------------


def _with_output(graph: Graph, attention: Attention, taken: set[int], contexts: set[int]) -> Attention:
    """Return an attention with its concatenated heads, and its output if a projection that is not `taken` follows."""
    context, module = attention.stages["context"], attention.module
    apart = len(context.shape) > 2 and context.shape != attention.stages.get("query", context).shape
    # A context concatenated with its own query, as in a decoder, is no output.
    given = [attention.stages[name] for name in ("query", "q_heads") if name in attention.stages]
    queries = {graph.before_moves(tensor).id for tensor in given}

    def is_context(tensor: TensorRef) -> bool:  # those of several attentions may be added before one projection
        steps = graph.back(tensor, lambda op: graph.moves(op) or graph.is_scale(op) or op.base_name == "add")
        return any(step.tensor.id in contexts for step in steps)

    def through(op: Op) -> bool:
        # An addition while heads are still separate belongs to the attention.
        adds = op.base_name.rstrip("_") == "add" and sum(read.numel == op.output.numel for read in op.inputs) > 1
        residual = adds and not (op.module == module and apart and op.output.shape == context.shape)
        residual = residual and not all(map(is_context, op.inputs))
        norms = op.does("norms") and inside(op.module, module)
        keeps_context = op.kind != "compute" or op.pointwise or op.does("passes_on") or norms
        beside = op.base_name == "cat" and queries & {graph.before_moves(tensor).id for tensor in op.inputs}
        return graph.is_by_head(op) or (keeps_context and not residual and not beside and not op.does("product"))

    concat = _onward(graph, context, module)
    stages = {"concat": concat} if concat.id != context.id else {}
    projections = attention.projections
    for op, step in graph.forward(context, through):
        if graph.is_projection(op):
            if op.index in taken:
                break
            after = graph.forward(op.output, lambda passed: graph.moves(passed) or passed.pointwise)
            if graph.is_by_head(op) and not any(reader.base_name in ("sum", "mean") for reader, _ in after):
                continue
            # In the attention's own code the reshape that concatenates heads may flatten rows too.
            concat = graph.before_call(op, step.tensor)
            concat = concat if op.module == module else graph.before_flattening(concat, op.module)
            # An operation that moves the features to another dimension belongs to the next module.
            features_last = op.base_name != "convolution"
            output = _onward(graph, graph.after_projection(op), module, features_last=features_last)
            stages, projections = {"concat": concat, "output": output}, {**projections, "output": op}
            break
    return replace(attention, stages=attention.stages | stages, projections=projections)


def _onward(graph: Graph, tensor: TensorRef, module: str, *, features_last: bool = False) -> TensorRef:
    """Return the end of the chain of views and copies that starts here and stays in the module.

    With `features_last` the chain ends before the last dimension changes.
    """
    features = graph.dimensions.of(tensor)[-1:]

    def counts(op: Op) -> bool:
        return graph.moves(op) and inside(op.module, module) and op.call not in graph.calls_of_products

    def passes(op: Op) -> bool:
        whole = op.output.numel == tensor.numel > 0
        return whole and not (features_last and graph.dimensions.of(op.output)[-1:] != features)

    return graph.after(tensor, counts, passes)


# -- turns of a loop over heads ---------------------------------------------------------------------------------------


def _with_turns_merged(graph: Graph, attentions: list[Attention], constants: Constants) -> list[Attention]:
    """Merge attentions of the same source line and module whose contexts are joined head by head.

    A head may be a module. The iterations of a loop over pieces of a sequence are of one line too, and are joined along
    the sequence: they stay separate.
    """
    groups: dict[tuple[object, ...], list[tuple[Attention, Op | None]]] = {}
    joints = [_joining(graph, attention) for attention in attentions]
    joined_contexts = Joined(graph)
    for found in joints:
        if found is not None:
            joined_contexts.add(*found)
    for place, (attention, found) in enumerate(zip(attentions, joints, strict=True)):
        key: tuple[object, ...] = (place,)
        joint = None if found is None else found[0]
        # The number of heads is known only if all that is joined is heads.
        if joint is not None and not joined_contexts.has_others(joint):
            axes = attention.score_product.axes(graph.dimensions)
            query = attention.stages.get("query")
            given = positions_of(attention, graph.dimensions, "query") if query is not None and query.shape else None
            outside = None if given is None else set(wide(*given))
            rows = set(wide(axes.columns if attention.key_first else axes.rows))
            if outside is None or rows <= outside <= {*axes.batch} | rows:
                joined = place_of_join(joint)
                # The queries of one softmax: another piece of an image has other queries.
                queries = frozenset(wide(axes.right_columns if attention.key_first else axes.left_rows))
                # If each head is a module, the iterations share the query before its projections.
                apart = joint.module != attention.module and "query" in attention.projections
                is_head = apart and set(wide(axes.batch)) <= (outside or set())
                owner = graph.before_moves(attention.stages["query"]).id if is_head else attention.module
                key = (attention.softmax.source, attention.score_product.op.source, owner, joined, queries)
        groups.setdefault(key, []).append((attention, joint))
    merged = [attention for group in groups.values() for attention in _merged(graph, group, constants)]
    return sorted(merged, key=lambda attention: attention.softmax.index)


def _joining(graph: Graph, attention: Attention) -> tuple[Op, TensorRef] | None:
    """Return the operation that joins this context with others, head by head, and what it joins; None if none does."""
    axes = attention.value_product.axes(graph.dimensions)
    features = set(axes.rows if attention.value_first else axes.columns)

    def through(op: Op) -> bool:
        return graph.moves(op) or op.base_name == "native_dropout"

    for op, step in graph.forward(attention.stages["context"], through):
        if not op.outputs or len(op.inputs) < 2:
            continue
        written = op.base_name == "copy_" and op.inputs[0].id != step.tensor.id
        cut = (graph.recording.producer(op.inputs[0]) if written else op) or op  # a slice of a larger tensor is written
        if op.base_name == "stack" or cut.base_name == "select":
            return op, step.tensor
        dims = graph.dimensions.of(step.tensor)
        joins = cut.base_name in ("cat", "slice") and len(cut.output.shape) == len(dims)
        if joins and features & set(dims[setting(cut, 1, "dim", 0) % len(dims)]):
            return op, step.tensor
    return None


def _origin(graph: Graph, tensor: TensorRef) -> tuple[object, ...]:
    """Return equal values for tensors that are moved alike from one tensor, e.g. one slice that is taken twice."""
    steps = [step.tensor for step in graph.back(tensor, graph.moves)]
    return steps[-1].id, *((each.offset, each.shape, each.stride) for each in steps)


def _merged(graph: Graph, group: list[tuple[Attention, Op | None]], constants: Constants) -> list[Attention]:
    """Return one attention for all iterations of a loop; the iterations unchanged if they are no heads alike.

    Two with the same scores are none, and what is said of the first has to be true of the others.
    """
    turns = [attention for attention, _ in group]
    (first, joint), last = group[0], turns[-1]
    scores = {tuple(_origin(graph, turn.stages[side]) for side in ("q_heads", "k_heads")) for turn in turns}
    if len(turns) == 1 or len(scores) < len(turns) or not heads_agree(graph, turns, constants):
        return turns
    apart = len({turn.module for turn in turns}) > 1
    # Only the walk from the last iteration reaches the operations after the loop, also if a buffer is filled.
    after = {name: last.stages[name] for name in ("concat", "output") if name in last.stages}
    output = {"output": last.projections["output"]} if "output" in last.projections else {}
    return [
        replace(
            first,
            stages=first.stages | after,
            projections=first.projections | output,
            branches=tuple(turns),
            module=joint.module if apart and joint is not None else first.module,
        )
    ]

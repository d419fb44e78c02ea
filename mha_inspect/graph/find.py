"""Find every attention in a recording by its dataflow: no class name and no source text is looked at.

From each softmax the walk goes back through mask and scale to the product that made the scores, or to what scored
queries and keys without one (`additive`), and forward to the product with the values. Weights that are no softmax are
found from that product backward (`weighing`). From the operands the walk goes on to the projections, and from the
product with the values forward to the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isclose, prod

from ..record.ops import Op, Recording, TensorRef
from .attention import Attention, Mixing
from .dataflow import Graph, inside
from .loops import merge_branches
from .pairing import Meeting, mixing_of, moved_for, score_product, softmaxed_side, value_product
from .products import Product
from .projections import Projection, adds_up, projections_behind, with_projections
from .scores import multiply, read_scoring
from .softmax import LateSoftmax, late_softmax_of, masks_on_exponentials
from .weighing import find_weighings


def find_attentions(recording: Recording) -> list[Attention]:
    """Return every attention of the recording, in the order in which they were computed."""
    return attentions_of(Graph(recording))


def attentions_of(graph: Graph) -> list[Attention]:
    """Return every attention of a recording whose dataflow has been read already, in the order of computation."""
    found = [_of_softmax(graph, op) or _of_late_softmax(graph, op) for op in graph.recording.ops]
    attentions = [attention for attention in found if attention is not None]
    for way in find_weighings(graph, attentions):
        attention = _around(graph, way.ops[-1], way.masked, way.dim, way.values, way.scores)
        attentions += [replace(attention, weighing=way.ops)] if attention is not None else []
    attentions.sort(key=lambda attention: attention.softmax.index)
    kept = [attention for attention in attentions if not _is_dispatch(graph, attention, attentions)]
    return merge_branches(graph, _with_own_outputs(graph, kept))


def _of_softmax(graph: Graph, op: Op) -> Attention | None:
    """Return the attention whose weights are the softmax that an operation completes."""
    masked, dim = graph.softmax(op) or (None, 0)
    values = None if masked is None else value_product(graph, op.output, dim)
    return None if masked is None or values is None else _around(graph, op, masked, dim, values)


def _of_late_softmax(graph: Graph, op: Op) -> Attention | None:
    """Return the attention whose weights are never formed, where an operation divides what comes of the values."""
    late = None if graph.is_softmax(op) else late_softmax_of(graph.recording, op)
    if late is None:
        return None
    return _around(graph, late.exponential, late.masked, late.dim, Meeting(late.product, (), late.carried), late=late)


def _is_dispatch(graph: Graph, attention: Attention, attentions: Iterable[Attention]) -> bool:
    """Return whether one product gives the weights of two averages, the one of what comes of the other.

    That is a soft mixture of experts: tokens are handed out to slots as they are, and what is made of them is handed
    back. Where values are projected, two sides attend to each other.
    """
    scores = attention.score_product.op
    others = [other for other in attentions if other is not attention and other.score_product.op is scores]
    return any(
        "value" not in first.projections and graph.leads_to(first.stages["context"], second.stages["v_heads"])
        for other in others
        for first, second in ((attention, other), (other, attention))
    )


def _around(
    graph: Graph,
    softmax: Op,
    masked: TensorRef,
    dim: int,
    values: Meeting,
    scores: Meeting | None = None,
    late: LateSoftmax | None = None,
) -> Attention | None:
    """Return the attention around a softmax; None where that is no attention's.

    Args:
        graph: the dataflow.
        softmax: what makes weights, or exponentials where it is a late softmax.
        masked: what the softmax is taken of, and `dim` the dimension that it runs over.
        values: where the weights meet the values.
        scores: what made the scores, where that is known.
        late: the softmax, where its weights are never formed.
    """
    scores = scores or score_product(graph, masked, dim)
    side = None if scores is None else softmaxed_side(graph, scores, values, masked, dim)
    if scores is None or side is None:
        return None
    product, averaged = scores.product, values.product
    query, key = (product.right, product.left) if side.key_first else (product.left, product.right)
    if any(step.tensor.id == softmax.output.id for step in graph.back(values.values, graph.carries)):
        return None  # weights that meet themselves, as where a matrix of them is inverted
    if graph.comes_from_inputs(key) and not graph.is_given_or_learned(values.values):
        return None  # the mean of numbers that nobody gave or learned, such as places: it says where, and not what
    q_heads, q_scale = _heads(graph, product, query, transposed=side.key_first)
    k_heads, k_scale = _heads(graph, product, key, transposed=not side.key_first)
    v_heads, _ = _heads(graph, averaged, values.values, transposed=values.values_first)
    heads = {"q_heads": q_heads, "k_heads": k_heads, "v_heads": v_heads}
    scored, summed = product.axes(graph.dimensions), averaged.axes(graph.dimensions)
    positions = {
        "query": set(scored.columns if side.key_first else scored.rows),
        "key": set(scored.left_rows if side.key_first else scored.right_columns),
        "value": set(summed.left_inner if values.values_first else summed.right_inner),
    }
    ends = projections_behind(graph, heads, product.multiply.module, positions)
    stages = with_projections(graph, heads, ends)
    scoring = read_scoring(graph, product, scores.path, masked, dim)
    if not (scoring.masks and scoring.masks[0] is product.op):
        stages["scores"] = scoring.scores
    if scoring.masks or scoring.bent:
        stages["masked_scores"] = scoring.masked
    if late is None:
        stages["weights"] = _without_sinks(softmax.output, dim, values.path)
    stages["context"] = graph.after_call(averaged.op) if late is None else late.divided.output
    after, output = _after_context(graph, stages, product.multiply.module)
    scores_scale = multiply([q_scale, k_scale, scoring.scale]) if product.is_dot else None
    early = [_early_scale(graph, ends[name]) for name in ("query", "key") if name in ends]
    on_exponentials = masks_on_exponentials(graph.recording, softmax if late is None else late.total)
    return Attention(
        softmax=softmax,
        score_product=product,
        value_product=averaged,
        stages=stages | after,
        scale=multiply([*early, scores_scale, scoring.late_scale]),
        scores_scale=scores_scale,
        softmax_dim=dim,
        key_first=side.key_first,
        over_queries=side.over_queries,
        value_first=values.values_first,
        masks=(*scoring.masks, *on_exponentials),
        divided=None if late is None else late.divided,
        scoring=tuple(scoring.steps),
        softcap=scoring.softcap,
        sinks=scoring.sinks,
        mixed_scores=_mixings(graph, scoring.mixed),
        mixed_weights=_mixings(graph, values.path),
        weights_path=values.path,
        projections={name: end.op for name, end in ends.items()} | ({} if output is None else {"output": output}),
        earlier={name: end.earlier for name, end in ends.items() if end.earlier},
        before_repeats={"key": graph.before_repeats(k_heads), "value": graph.before_repeats(v_heads)},
    )


def _mixings(graph: Graph, ops: Iterable[Op]) -> tuple[Mixing, ...]:
    return tuple(mixing for op in ops if (mixing := mixing_of(graph, op)) is not None)


# -- heads ------------------------------------------------------------------------------------------------------------


def _heads(graph: Graph, product: Product, operand: TensorRef, *, transposed: bool) -> tuple[TensorRef, float | None]:
    """Return an operand as it was before it was scaled, or transposed for the product alone, and its scale."""
    scales: list[float | None] = [1.0]
    swapped = False
    tensor = operand
    while (op := graph.recording.producer(tensor)) is not None and op.inputs:
        if moved_for(graph, op, product):
            swapped = swapped or op.swaps_last_two
        elif product.is_dot and _scales(graph, op):
            scales.append(graph.scale_of(op))
        elif op.makes_result and (step := graph.recording.producer(op.inputs[0])) is not None and _scales(graph, step):
            pass
        elif transposed and not swapped and op.swaps_last_two:
            swapped = True
        else:
            break
        tensor = max(op.inputs, key=lambda read: read.numel) if _scales(graph, op) else op.inputs[0]
    return tensor, multiply(scales)


def _scales(graph: Graph, op: Op) -> bool:
    """Return whether this multiplies everything by one number, and is not the second half of a mean."""
    if not graph.is_scale(op):
        return False
    behind = graph.recording.producer(max(op.inputs, key=lambda read: read.numel))
    if behind is None or behind.base_name != "sum":
        return True
    summed = behind.inputs[0].numel / max(behind.output.numel, 1)
    return not isclose((graph.scale_of(op) or 0) * summed, 1, rel_tol=1e-6)


def _early_scale(graph: Graph, end: Projection) -> float | None:
    """Return what was multiplied in between a projection and its heads, after the last norm."""
    after = max((place for place, op in enumerate(end.path) if _norms(graph, op)), default=-1)
    return multiply(graph.scale_of(op) for op in end.path[after + 1 :] if _scales(graph, op))


def _norms(graph: Graph, op: Op) -> bool:
    """Return whether this is a norm, or the last step of one that was written out: by a length, or by a gain."""
    if op.does("norms"):
        return op.base_name not in ("sum", "mean")  # by themselves they pool positions
    if not op.does("scales") or len(op.inputs) != 2 or graph.is_scale(op):
        return False
    smaller = min(op.inputs, key=_elements)
    return graph.is_weight(smaller) or _elements(smaller) * op.output.shape[-1] == op.output.numel


def _elements(tensor: TensorRef) -> int:
    """Return how many elements a tensor has, those that it repeats counted once."""
    return prod(size for size, stride in zip(tensor.shape, tensor.stride, strict=True) if stride)


def _without_sinks(weights: TensorRef, dim: int, path: tuple[Op, ...]) -> TensorRef:
    """Return the weights without those of the sinks, which are cut off before the values are averaged."""
    for op in path:
        kept = len(op.output.shape) == len(weights.shape) and op.output.shape[dim] == weights.shape[dim]
        if op.does("cuts") and op.output.numel < weights.numel and not kept:
            return next((tensor for tensor in op.outputs if tensor.numel < weights.numel), op.output)
    return weights


# -- output -----------------------------------------------------------------------------------------------------------


def _after_context(
    graph: Graph, stages: Mapping[str, TensorRef], module: str
) -> tuple[dict[str, TensorRef], Op | None]:
    """Return the heads side by side and the output, and what projects it; None where nothing does."""
    context = stages["context"]
    apart = len(context.shape) > 2 and context.shape != stages.get("query", context).shape
    # What a context is put beside its own query for, as in a decoder, is made of both.
    queries = {graph.before_moves(stages[name]).id for name in ("query", "q_heads") if name in stages}

    def through(op: Op) -> bool:
        # What is added while heads are still apart belongs to the attention.
        residual = adds_up((op,)) and not (op.module == module and apart and op.output.shape == context.shape)
        beside = op.base_name == "cat" and queries & {graph.before_moves(tensor).id for tensor in op.inputs}
        if residual or beside or graph.operands(op):
            return False
        norms = op.does("norms") and inside(op.module, module)
        return op.kind != "compute" or op.pointwise or op.does("carries") or norms

    for op, step in graph.forward(context, through):
        if graph.is_projection(op):
            # In the attention's own code the reshape that puts heads side by side may flatten rows as well.
            concat = graph.before_call(op, step.tensor)
            concat = concat if op.module == module else graph.before_flattening(concat, op.module)
            # What moves the features away from the last dimension belongs to what comes after.
            output = graph.after_projection(op)
            if op.base_name != "convolution":
                return {"concat": concat, "output": _onward(graph, output, module, features_last=True)}, op
            return {"concat": concat, "output": _onward(graph, output, module)}, op
    return _side_by_side(graph, context, module), None


def _side_by_side(graph: Graph, context: TensorRef, module: str) -> dict[str, TensorRef]:
    """Return the heads side by side, where nothing projects them and something moves them."""
    concat = _onward(graph, context, module)
    return {"concat": concat} if concat.id != context.id else {}


def _with_own_outputs(graph: Graph, attentions: list[Attention]) -> list[Attention]:
    """Return attentions without outputs that are another's queries, keys or values: what projects those is no W_o."""
    taken = {op.index for attention in attentions for side, op in attention.projections.items() if side != "output"}
    kept = []
    for attention in attentions:
        output = attention.projections.get("output")
        if output is not None and output.index in taken:
            stages = {name: tensor for name, tensor in attention.stages.items() if name not in ("concat", "output")}
            stages |= _side_by_side(graph, stages["context"], attention.module)
            projections = {side: op for side, op in attention.projections.items() if side != "output"}
            attention = replace(attention, stages=stages, projections=projections)
        kept.append(attention)
    return kept


def _onward(graph: Graph, tensor: TensorRef, module: str, *, features_last: bool = False) -> TensorRef:
    """Return the end of the chain of moves that begins here and stays in the module.

    With `features_last` it is one of moves that leave the last dimension where it is.
    """
    features = graph.dimensions.of(tensor)[-1:]

    def counts(op: Op) -> bool:
        return graph.moves(op) and inside(op.module, module) and op.call not in graph.calls_of_products

    def passes(op: Op) -> bool:
        whole = op.output.numel == tensor.numel > 0
        return whole and not (features_last and graph.dimensions.of(op.output)[-1:] != features)

    return graph.after(tensor, counts, passes)

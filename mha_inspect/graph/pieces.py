"""Put together an attention that the code computes in pieces: some queries, some keys, or some of the batch at a time.

A tensor that was never made as a whole gets a reference of its own. Its producer is a concatenation that torch never
ran, and its axis is the one that the code cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..record.ops import Op, TensorRef
from .attention import Attention
from .axis import Axis, Dim, piece, resolve, size_of, unify, wide
from .dataflow import Graph, made_of
from .ids import any_in, ids_of, in_order
from .indices import contiguous
from .products import Product
from .turns import common_scale, pieces_agree


class Cut(NamedTuple):
    """A tensor that was cut into consecutive pieces."""

    source: TensorRef | None
    """None if the pieces are not all of it."""
    piece: TensorRef
    """The first of the pieces."""
    axis: Dim
    """The axis that was cut."""
    part: Dim
    """The same axis in the first piece."""


def with_pieces_joined(graph: Graph, attentions: Sequence[Attention]) -> list[Attention]:
    """Merge attentions of one line whose queries are the pieces of one tensor, in order, with the same keys and values.

    The keys and values may be cut like the queries, by item of the batch and by head. Pieces of a sequence that have
    keys of their own, e.g. windows, stay separate.
    """
    merged: dict[int, Attention] = {}
    groups: dict[tuple[object, ...], list[Attention]] = {}
    for attention in attentions:
        merged[attention.softmax.index] = attention
        line = (attention.module,)
        for source in _cuts(graph, _ends(graph, attention, "query")):
            groups.setdefault((*line, source), []).append(attention)
    for group in groups.values():
        is_unmerged = all(merged.get(attention.softmax.index) is attention for attention in group)
        if len(group) < 2 or not is_unmerged:
            continue
        whole = _merged(graph, group)
        if whole is None:
            continue
        for turn in group:
            del merged[turn.softmax.index]
        merged[whole.softmax.index] = whole
    return in_order(merged)


def with_keys_joined(graph: Graph, turns: Sequence[Attention]) -> Attention:
    """Return one attention for those of pieces of the keys; without a known cut its stages are those of the first."""
    key = _cut_of_side(graph, turns, "key")
    value = _cut_of_side(graph, turns, "value")
    joined = None
    if key is not None and value is not None:
        joined = _joined(graph, turns, _Cuts(key=key, value=value))
    if joined is None:
        joined = replace(turns[0], pieces=tuple(turns) if len(turns) > 1 else ())
    return replace(
        joined,
        scale=common_scale([turn.scale for turn in turns]),
        scores_scale=common_scale([turn.scores_scale for turn in turns]),
    )


def _cut_of_side(graph: Graph, turns: Sequence[Attention], side: str) -> Cut | None:
    """Return the tensor that the keys or values of the turns are consecutive pieces of, of all of it or of a part."""
    return _cut(graph, [_ends(graph, turn, side) for turn in turns], whole=False)


@dataclass(frozen=True)
class _Cuts:
    """How the queries, the keys and the values were cut; None for what all pieces share."""

    query: Cut | None = None
    key: Cut | None = None
    value: Cut | None = None


def _merged(graph: Graph, turns: Sequence[Attention]) -> Attention | None:
    """Return one attention for those of pieces of the queries; None if they have more than that in common."""
    if _follow_from_first(graph, turns):
        return None
    if not _compute_alike(turns):
        return None
    if _have_one(turns, "k_heads") and _have_one(turns, "v_heads"):
        cut = _cut(graph, [_ends(graph, turn, "query") for turn in turns])
        return None if cut is None else _joined(graph, turns, _Cuts(query=cut))
    cuts = _cuts_of_all(graph, turns)
    if cuts is None or cuts.query is None:
        return None
    batch = turns[0].score_product.axes(graph.dimensions).batch
    if not set(cuts.query.part) <= set(batch) or not _are_as_many(cuts):
        return None
    if not wide(cuts.query.part):
        _make_cut_axes_one(graph, turns[0], cuts)
    return _joined(graph, turns, cuts)


def _are_as_many(cuts: _Cuts) -> bool:
    """Return whether queries and keys are cut along one axis: groups of query heads, each with a key head, are not."""
    assert cuts.query is not None
    return cuts.key is None or size_of(cuts.query.axis) == size_of(cuts.key.axis)


def _compute_alike(turns: Sequence[Attention]) -> bool:
    """Return whether turns compute alike, with one scale."""
    scale = common_scale([turn.scale for turn in turns])
    return scale == turns[0].scale and pieces_agree(turns)


def _follow_from_first(graph: Graph, turns: Sequence[Attention]) -> bool:
    """Return whether the queries of a turn depend on the context of the first."""
    after = made_of({turns[0].stages["context"].id}, graph.recording.ops)
    return any_in(_stage(turns, "q_heads"), after)


def _stage(turns: Sequence[Attention], stage: str) -> list[TensorRef]:
    """Return the tensor of a stage in each turn; the scores where a turn does not have the stage."""
    return [turn.stages.get(stage, turn.stages["scores"]) for turn in turns]


def _have_one(turns: Sequence[Attention], stage: str) -> bool:
    """Return whether the turns share one tensor in this stage."""
    return len(ids_of(_stage(turns, stage))) == 1


def _cuts_of_all(graph: Graph, turns: Sequence[Attention]) -> _Cuts | None:
    """Return how queries, keys and values are cut; None if they, or the masks that differ, are no pieces of a whole."""
    cuts: list[Cut] = []
    heads = [_stage(turns, stage) for stage in ("q_heads", "k_heads", "v_heads")]
    masks = zip(*(_masks(graph, turn) for turn in turns), strict=False)
    for pieces in (*heads, *masks):
        if len(ids_of(pieces)) == 1:
            continue
        cut = _cut(graph, [[part] for part in pieces])
        if cut is None:
            return None
        cuts.append(cut)
    return _Cuts(*cuts[:3]) if len(cuts) >= 3 else None


def _make_cut_axes_one(graph: Graph, turn: Attention, cuts: _Cuts) -> None:
    """Make the axes one that were cut to pieces of size one, which leave nothing for a product or a write to do so."""
    assert cuts.query is not None
    axis = cuts.query.axis
    written = _axes_written_to(graph, turn.stages["context"], size_of(axis))
    for cut in (cuts.key, cuts.value):
        if cut is not None:
            unify(axis, cut.axis)
    for dim in written:
        unify(axis, dim)


def _axes_written_to(graph: Graph, context: TensorRef, size: int) -> list[Dim]:
    """Return the axes of this size of buffers that a context is written into, one index of them at a time."""
    axes: list[Dim] = []
    for op in graph.recording.ops:
        if op.kind != "write" or op.inputs[-1].id != context.id:
            continue
        for source, slot in _cuts(graph, op.inputs[:1]).values():
            dims = graph.dimensions.of(source)
            for whole, part, dim in zip(source.shape, slot.shape, dims, strict=False):
                if whole == size and part == 1:
                    axes.append(dim)
    return axes


def _masks(graph: Graph, attention: Attention) -> list[TensorRef]:
    """Return what is added to or filled into the scores."""
    product = attention.score_product.op
    ops = graph.recording.ops[product.index + 1 : attention.softmax.index]
    scores = made_of({product.output.id}, ops)
    masks = []
    for op in attention.masks:
        for read in op.inputs:
            if read.id not in scores and read.numel > 1:
                masks.append(read)
    return masks


def _ends(graph: Graph, turn: Attention, side: str) -> list[TensorRef]:
    """Return the heads of a side, and what they are projected from."""
    heads = turn.stages[f"{side[0]}_heads"]
    op = turn.first_projection(side)
    return [heads] if op is None else [heads, graph.projected(op)]


class _Slice(NamedTuple):
    """A slice of a tensor."""

    source: TensorRef
    tensor: TensorRef


def _cuts(graph: Graph, ends: Sequence[TensorRef]) -> dict[int, _Slice]:
    """Return the tensors that one of these is computed from a slice of, position by position, by id, with the slice."""

    def keeps_positions(op: Op) -> bool:
        return op.kind != "compute" or op.does("norms")

    # Sums lead back through every layer: they are followed from the heads alone.
    heads = ends[0]
    steps = [*graph.back(heads, lambda op: keeps_positions(op) or op.pointwise)]
    for source in ends[1:]:
        steps += graph.back(source, keeps_positions)
    cuts: dict[int, _Slice] = {}
    for step in steps:
        op = graph.producer(step.tensor)
        if op is not None and op.does("cuts"):
            cuts[op.inputs[0].id] = _Slice(op.inputs[0], step.tensor)
    return cuts


def _cut(
    graph: Graph,
    turns: Sequence[Sequence[TensorRef]],
    *,
    whole: bool = True,
) -> Cut | None:
    """Return the tensor that the turns have consecutive pieces of, of the `whole` or not; None if there is none."""
    by_turn = [_cuts(graph, ends) for ends in turns]
    for number, (source, part) in by_turn[0].items():
        pieces = [cuts[number].tensor for cuts in by_turn if number in cuts]
        span = _span_of(source, pieces) if len(pieces) == len(turns) else None
        if span is None:
            continue
        axis = graph.dimensions.of(source)[span.place]
        part_axis = graph.dimensions.of(part)[span.place]
        if span.size == source.shape[span.place]:
            return Cut(source, part, axis, part_axis)
        if not whole:
            return Cut(None, part, piece(axis, span.start, span.size), part_axis)
    return None


class _Span(NamedTuple):
    """Consecutive indices of one dimension of a tensor."""

    place: int
    """The dimension."""
    start: int
    size: int


def _span_of(source: TensorRef, pieces: Sequence[TensorRef]) -> _Span | None:
    """Return the indices that these pieces of a tensor have together; None if they are not consecutive."""
    first = pieces[0]
    places = _unlike_places(first.shape, source.shape)
    if len(places) != 1:
        return None
    place = places[0]
    step = source.stride[place]
    start = (first.offset - source.offset) // max(step, 1)
    end = start
    for part in pieces:
        if part.offset != source.offset + end * step:
            return None
        end += part.shape[place]
    return _Span(place, start, end - start)


def _unlike_places(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the dimensions in which two shapes of as many dimensions differ."""
    return [place for place, size in enumerate(left) if size != right[place]]


def _joined(graph: Graph, turns: Sequence[Attention], cuts: _Cuts) -> Attention | None:
    """Return one attention for those of pieces of its queries, keys and values; None if the scores are no pieces."""
    first = max(turns, key=lambda turn: len(turn.masks))  # a mask may be needed for some pieces only
    # Only the walk from the last piece reaches the operations after the loop.
    last = turns[-1]
    scored = _of_scores(graph, turns[0], cuts)
    scores = _whole_scores(graph, turns, first, cuts, scored)
    if scores.op.output.numel == turns[0].score_product.op.output.numel:
        return None
    stages = _whole_stages(graph, turns, first, cuts, scored)
    keys = [turn.before_repeats["key"] for turn in turns]
    key = _whole(graph, keys, cuts.key) or first.before_repeats["key"]
    weights = _whole_or_first(graph, [turn.softmax.output for turn in turns], scored)
    values = _whole_values(graph, turns, first, cuts, scored)
    projections = dict(first.projections)
    if "output" in last.projections:
        projections["output"] = last.projections["output"]
    return replace(
        first,
        softmax=replace(first.softmax, outputs=(weights,)),
        score_product=scores,
        value_product=values,
        stages=stages,
        projections=projections,
        before_repeats={"key": key},
        pieces=tuple(turns),
    )


def _whole_scores(
    graph: Graph,
    turns: Sequence[Attention],
    first: Attention,
    cuts: _Cuts,
    scored: Cut | None,
) -> Product:
    """Return the product of all queries and keys."""
    factors = (cuts.key, cuts.query) if first.key_first else (cuts.query, cuts.key)
    products = [turn.score_product for turn in turns]
    return _whole_product(graph, products, first.score_product, _CutProduct(*factors, scored))


def _whole_values(
    graph: Graph,
    turns: Sequence[Attention],
    first: Attention,
    cuts: _Cuts,
    scored: Cut | None,
) -> Product:
    """Return the product of all weights and values."""
    factors = (cuts.value, scored) if first.value_first else (scored, cuts.value)
    products = [turn.value_product for turn in turns]
    return _whole_product(graph, products, first.value_product, _CutProduct(*factors, scored))


@dataclass(frozen=True)
class _CutProduct:
    """How the factors and the result of a product are cut."""

    left: Cut | None
    right: Cut | None
    result: Cut | None


def _whole_or_first(
    graph: Graph,
    tensors: Sequence[TensorRef],
    cut: Cut | None,
) -> TensorRef:
    """Return the whole of the pieces of an axis; the first of the tensors if they do not have that axis."""
    return _whole(graph, tensors, cut) or tensors[0]


def _whole_product(
    graph: Graph,
    products: Sequence[Product],
    like: Product,
    cuts: _CutProduct,
) -> Product:
    """Return the product of all pieces, of the operations of one of them.

    Args:
        graph: the dataflow.
        products: the products of the pieces.
        like: the one whose operations and arguments it has.
        cuts: how its factors and its result are cut.
    """
    left = _whole_or_first(graph, [product.left for product in products], cuts.left)
    right = _whole_or_first(graph, [product.right for product in products], cuts.right)
    multiplied = _whole_or_first(graph, [product.multiply.output for product in products], cuts.result)
    added = like.multiply.inputs[:-2]
    multiply = replace(
        like.multiply,
        inputs=(*added, left, right),
        outputs=(multiplied,),
    )
    result = _whole_or_first(graph, [product.op.output for product in products], cuts.result)
    op = multiply
    if like.op is not like.multiply:
        op = replace(like.op, inputs=(multiplied,), outputs=(result,))
    return replace(like, op=op, multiply=multiply, left=left, right=right)


def _whole_stages(
    graph: Graph,
    turns: Sequence[Attention],
    first: Attention,
    cuts: _Cuts,
    scored: Cut | None,
) -> dict[str, TensorRef]:
    """Return the stages of all pieces, those after them as the last piece leads to them."""
    last = turns[-1]
    ends = {}
    if "masked_scores" in first.stages:
        ends["masked_scores"] = last.stages["scores"]
    ends |= last.stages
    sides = {"q": cuts.query, "k": cuts.key, "v": cuts.value}
    stages = {}
    for stage, end in ends.items():
        cut = sides.get(stage[0], scored)
        stages[stage] = _whole(graph, _stage(turns, stage), cut) or end
    return stages


def _of_scores(graph: Graph, turn: Attention, cuts: _Cuts) -> Cut | None:
    """Return a cut of queries, or else of keys, as one of the scores, where the axis may have a twin."""
    cut = cuts.query or cuts.key
    if cut is None:
        return None
    axes = turn.score_product.axes(graph.dimensions)
    is_of_keys = cuts.query is None
    if turn.key_first == is_of_keys:
        factor, result = axes.left_rows, axes.rows
    else:
        factor, result = axes.right_columns, axes.columns
    part = resolve(cut.part)
    twins: list[Axis] = []
    for read, atom in zip(factor, result, strict=False):
        if read in part:
            twins.append(atom)
    if not twins or tuple(twins) == part:
        return cut
    axis = tuple([Axis(atom.size) for atom in resolve(cut.axis)])
    return cut._replace(axis=axis, part=tuple(twins))


def _whole(
    graph: Graph,
    tensors: Sequence[TensorRef],
    cut: Cut | None,
) -> TensorRef | None:
    """Return the whole of the pieces of an axis; None if they do not have that axis."""
    if cut is None or len(ids_of(tensors)) == 1:
        return None
    first = tensors[0]
    if cut.source is not None and cut.piece.id == first.id:
        return cut.source
    dims = [*graph.dimensions.of(first)]
    part = resolve(cut.part)
    place = _only_place(dims, part)
    if place is None:
        return None
    at, start = place
    before = dims[at][:start]
    after = dims[at][start + len(part) :]
    dims[at] = (*before, *resolve(cut.axis), *after)
    joined = _unmade(tensors, tuple(map(size_of, dims)))
    joined = replace(joined, stride=_repeated_as(first, joined))
    graph.dimensions.put(joined, tuple(dims))
    # The product with a single key may be a multiplication, with other dimensions.
    has_rank = all(len(tensor.shape) == len(dims) for tensor in tensors)
    if has_rank and not wide(before):
        _put_join(graph, tensors, joined, at)
    return joined


def _repeated_as(part: TensorRef, whole: TensorRef) -> tuple[int, ...]:
    """Return the strides of a tensor, zero along the dimensions that a piece of it repeats."""
    strides = []
    for step_of_part, step in zip(part.stride, whole.stride, strict=True):
        strides.append(step if step_of_part else 0)
    return tuple(strides)


def _only_place(dims: Sequence[Dim], part: Dim) -> tuple[int, int] | None:
    """Return the dimension that has these atoms side by side, and where they begin in it; None if not one has."""
    size = len(part)
    places = []
    for at, dim in enumerate(dims):
        for start in range(len(dim)):
            if dim[start : start + size] == part:
                places.append((at, start))
    return places[0] if len(places) == 1 else None


def _unmade(tensors: Sequence[TensorRef], shape: tuple[int, ...]) -> TensorRef:
    """Return the reference of a tensor that torch never made: of these pieces, in memory of its own."""
    number = -1 - abs(hash(tuple(tensor.id for tensor in tensors)))
    stride = contiguous(shape).stride
    return replace(tensors[0], id=number, shape=shape, stride=stride, offset=0, storage=number)


def _put_join(
    graph: Graph,
    tensors: Sequence[TensorRef],
    joined: TensorRef,
    place: int,
    *,
    is_stack: bool = False,
) -> None:
    """Add the concatenation, or the stack, of pieces to a recording, and its numbers where they were kept."""
    recording = graph.recording
    maker = recording.producer(tensors[0])
    if maker is None:
        return
    pieces = tuple(tensors)
    recording.joins[joined.id] = replace(
        maker,
        index=len(recording.ops) + len(recording.joins),
        name="aten.stack.default" if is_stack else "aten.cat.default",
        args=(pieces, place),
        inputs=pieces,
        outputs=(joined,),
        kind="view",
        call=-1,
    )
    if all(tensor.id in recording.values for tensor in tensors):
        join = torch.stack if is_stack else torch.cat
        numbers = [recording.values[tensor.id] for tensor in tensors]
        recording.values[joined.id] = join(numbers, place)

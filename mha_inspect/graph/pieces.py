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
from .layout import contiguous
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
    groups: dict[tuple[object, ...], list[Attention]] = {}
    for attention in attentions:
        line = attention.softmax.source, attention.score_product.op.source, attention.module
        for source in _cuts(graph, _ends(graph, attention, "query")):
            groups.setdefault((*line, source), []).append(attention)
    merged = {attention.softmax.index: attention for attention in attentions}
    for group in groups.values():
        is_unmerged = all(merged.get(attention.softmax.index) is attention for attention in group)
        whole = _merged(graph, group) if is_unmerged and len(group) > 1 else None
        if whole is None:
            continue
        for turn in group:
            del merged[turn.softmax.index]
        merged[whole.softmax.index] = whole
    return [merged[index] for index in sorted(merged)]


def with_keys_joined(graph: Graph, turns: Sequence[Attention]) -> Attention:
    """Return one attention for those of pieces of the keys; without a known cut its stages are those of the first."""
    key = _cut_of_side(graph, turns, "key")
    value = _cut_of_side(graph, turns, "value")
    joined = None if key is None or value is None else _joined(graph, turns, _Cuts(key=key, value=value))
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
    is_one_scale = common_scale([turn.scale for turn in turns]) == turns[0].scale
    if not is_one_scale or not pieces_agree(turns):
        return None
    if _have_one(turns, "k_heads") and _have_one(turns, "v_heads"):
        cut = _cut(graph, [_ends(graph, turn, "query") for turn in turns])
        return None if cut is None else _joined(graph, turns, _Cuts(query=cut))
    cuts = _cuts_of_all(graph, turns)
    if cuts is None or cuts.query is None:
        return None
    batch = turns[0].score_product.axes(graph.dimensions).batch
    if not set(cuts.query.part) <= set(batch):
        return None
    if not wide(cuts.query.part):
        _make_cut_axes_one(graph, turns[0], cuts)
    return _joined(graph, turns, cuts)


def _follow_from_first(graph: Graph, turns: Sequence[Attention]) -> bool:
    """Return whether the queries of a turn depend on the context of the first."""
    after = made_of({turns[0].stages["context"].id}, graph.recording.ops)
    return any(turn.stages["q_heads"].id in after for turn in turns)


def _have_one(turns: Sequence[Attention], stage: str) -> bool:
    """Return whether the turns share one tensor in this stage."""
    return len({turn.stages[stage].id for turn in turns}) == 1


def _cuts_of_all(graph: Graph, turns: Sequence[Attention]) -> _Cuts | None:
    """Return how queries, keys and values are cut; None if they, or the masks that differ, are no pieces of a whole."""
    cuts: list[Cut] = []
    tensors = [[turn.stages[stage] for turn in turns] for stage in ("q_heads", "k_heads", "v_heads")]
    masks = zip(*(_masks(graph, turn) for turn in turns), strict=False)
    for pieces in (*tensors, *masks):
        if len({piece.id for piece in pieces}) == 1:
            continue
        cut = _cut(graph, [[piece] for piece in pieces])
        if cut is None:
            return None
        cuts.append(cut)
    return _Cuts(*cuts[:3]) if len(cuts) >= 3 else None


def _make_cut_axes_one(graph: Graph, turn: Attention, cuts: _Cuts) -> None:
    """Make the axes one that were cut to pieces of size one, which leave nothing for a product or a write to do so."""
    query, key, value = cuts.query, cuts.key, cuts.value
    assert query is not None
    axes = [cut.axis for cut in (key, value) if cut is not None]
    axes += _axes_written_to(graph, turn.stages["context"], size_of(query.axis))
    for axis in axes:
        unify(query.axis, axis)


def _axes_written_to(graph: Graph, context: TensorRef, size: int) -> list[Dim]:
    """Return the axes of this size of buffers that a context is written into, one index of them at a time."""
    axes: list[Dim] = []
    for op in graph.recording.ops:
        if op.kind != "write" or op.inputs[-1].id != context.id:
            continue
        for source, slot in _cuts(graph, op.inputs[:1]).values():
            sizes = zip(source.shape, slot.shape, graph.dimensions.of(source), strict=False)
            axes += [dim for whole, part, dim in sizes if (whole, part) == (size, 1)]
    return axes


def _masks(graph: Graph, attention: Attention) -> list[TensorRef]:
    """Return what is added to or filled into the scores."""
    product = attention.score_product.op
    scores = made_of({product.output.id}, graph.recording.ops[product.index + 1 : attention.softmax.index])
    masks = []
    for op in attention.masks:
        masks += [read for read in op.inputs if read.id not in scores and read.numel > 1]
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
    steps = [*graph.back(ends[0], lambda op: keeps_positions(op) or op.pointwise)]
    for source in ends[1:]:
        steps += graph.back(source, keeps_positions)
    cuts: dict[int, _Slice] = {}
    for step in steps:
        op = graph.recording.producer(step.tensor)
        if op is not None and op.does("cuts"):
            cuts[op.inputs[0].id] = _Slice(op.inputs[0], step.tensor)
    return cuts


def _cut(graph: Graph, turns: Sequence[Sequence[TensorRef]], *, whole: bool = True) -> Cut | None:
    """Return the tensor that the turns have consecutive pieces of, of the `whole` or not; None if there is none."""
    first, *later = [_cuts(graph, ends) for ends in turns]
    for number, (source, part) in first.items():
        if not all(number in cuts for cuts in later):
            continue
        pieces = [part, *(cuts[number].tensor for cuts in later)]
        span = _span_of(source, pieces)
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
    places = [place for place, size in enumerate(first.shape) if size != source.shape[place]]
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


def _joined(graph: Graph, turns: Sequence[Attention], cuts: _Cuts) -> Attention | None:
    """Return one attention for those of pieces of its queries, keys and values; None if the scores are no pieces."""
    first = max(turns, key=lambda turn: len(turn.masks))  # a mask may be needed for some pieces only
    # Only the walk from the last piece reaches the operations after the loop.
    last = turns[-1]
    scored = _of_scores(graph, turns[0], cuts)
    left, right = (cuts.key, cuts.query) if first.key_first else (cuts.query, cuts.key)
    scores = _whole_product(graph, [turn.score_product for turn in turns], first.score_product, (left, right, scored))
    if scores.op.output.numel == turns[0].score_product.op.output.numel:
        return None
    stages = _whole_stages(graph, turns, first, cuts, scored)
    keys = [turn.before_repeats["key"] for turn in turns]
    before_repeats = _whole(graph, keys, cuts.key) or first.before_repeats["key"]
    weights = _whole_or_first(graph, [turn.softmax.output for turn in turns], scored)
    left, right = (cuts.value, scored) if first.value_first else (scored, cuts.value)
    values = _whole_product(graph, [turn.value_product for turn in turns], first.value_product, (left, right, scored))
    output = {"output": last.projections["output"]} if "output" in last.projections else {}
    return replace(
        first,
        softmax=replace(first.softmax, outputs=(weights,)),
        score_product=scores,
        value_product=values,
        stages=stages,
        projections=first.projections | output,
        before_repeats={"key": before_repeats},
        pieces=tuple(turns),
    )


def _whole_or_first(graph: Graph, tensors: Sequence[TensorRef], cut: Cut | None) -> TensorRef:
    """Return the whole of the pieces of an axis; the first of the tensors if they do not have that axis."""
    return _whole(graph, tensors, cut) or tensors[0]


def _whole_product(
    graph: Graph, products: Sequence[Product], like: Product, cuts: tuple[Cut | None, Cut | None, Cut | None]
) -> Product:
    """Return the product of all pieces, of the operations of one of them.

    Args:
        graph: the dataflow.
        products: the products of the pieces.
        like: the one whose operations and arguments it has.
        cuts: how its left factor, its right factor and its result are cut.
    """
    of_left, of_right, of_result = cuts
    left = _whole_or_first(graph, [product.left for product in products], of_left)
    right = _whole_or_first(graph, [product.right for product in products], of_right)
    multiplied = _whole_or_first(graph, [product.multiply.output for product in products], of_result)
    inputs = (*like.multiply.inputs[:-2], left, right)
    multiply = replace(like.multiply, inputs=inputs, outputs=(multiplied,))
    result = _whole_or_first(graph, [product.op.output for product in products], of_result)
    op = multiply
    if like.op is not like.multiply:
        op = replace(like.op, inputs=(multiplied,), outputs=(result,))
    return replace(like, op=op, multiply=multiply, left=left, right=right)


def _whole_stages(
    graph: Graph, turns: Sequence[Attention], first: Attention, cuts: _Cuts, scored: Cut | None
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
        pieces = [turn.stages.get(stage, turn.stages["scores"]) for turn in turns]
        stages[stage] = _whole(graph, pieces, sides.get(stage[0], scored)) or end
    return stages


def _of_scores(graph: Graph, turn: Attention, cuts: _Cuts) -> Cut | None:
    """Return a cut of queries, or else of keys, as one of the scores, where the axis may have a twin."""
    cut = cuts.query or cuts.key
    if cut is None:
        return None
    axes = turn.score_product.axes(graph.dimensions)
    is_left = turn.key_first == (cuts.query is None)
    factor, result = (axes.left_rows, axes.rows) if is_left else (axes.right_columns, axes.columns)
    part = resolve(cut.part)
    twins = tuple([atom for read, atom in zip(factor, result, strict=False) if read in part])
    if not twins or twins == part:
        return cut
    return cut._replace(axis=tuple(Axis(atom.size) for atom in resolve(cut.axis)), part=twins)


def _whole(graph: Graph, tensors: Sequence[TensorRef], cut: Cut | None) -> TensorRef | None:
    """Return the whole of the pieces of an axis; None if they do not have that axis."""
    if cut is None or len({tensor.id for tensor in tensors}) == 1:
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
    before, after = dims[at][:start], dims[at][start + len(part) :]
    dims[at] = (*before, *resolve(cut.axis), *after)
    shape = tuple(map(size_of, dims))
    joined = _unmade(tensors, shape)
    # An axis that a piece repeats is repeated in the whole too.
    stride = tuple(step if repeated else 0 for repeated, step in zip(first.stride, joined.stride, strict=True))
    joined = replace(joined, stride=stride)
    graph.dimensions.put(joined, tuple(dims))
    # The product with a single key may be a multiplication, with other dimensions.
    if not wide(before) and all(len(tensor.shape) == len(dims) for tensor in tensors):
        _put_join(graph, tensors, joined, at)
    return joined


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
    graph: Graph, tensors: Sequence[TensorRef], joined: TensorRef, place: int, *, is_stack: bool = False
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
        recording.values[joined.id] = join([recording.values[tensor.id] for tensor in tensors], place)


# -- pieces of the softmax alone --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ScoresPiece:
    """The scores that one softmax reads, as a piece of all scores."""

    turn: Attention
    source: TensorRef
    """All scores."""
    tensor: TensorRef
    """The piece."""
    place: int
    """The dimension of all scores that was cut."""
    start: int
    size: int
    keeps_place: bool
    """Whether the piece has the cut dimension; false for a single index of it."""

    @property
    def softmax_dim(self) -> int:
        """The dimension of all scores that the softmax runs over."""
        dim = self.turn.softmax_dim % len(self.turn.softmax.output.shape)
        return dim if self.keeps_place or dim < self.place else dim + 1

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for pieces that were cut alike: the memory of all scores, the cut dimension, and the softmax."""
        source = self.source
        memory = source.storage, source.offset, source.shape, source.stride
        return memory, self.place, self.keeps_place, self.softmax_dim


def with_softmaxes_joined(graph: Graph, attentions: Sequence[Attention]) -> list[Attention]:
    """Merge attentions of one product of queries and keys and of one product with the values.

    Only their softmaxes are computed in pieces of the scores, e.g. in place by halves of the batch.
    """
    groups: dict[tuple[int, int], list[Attention]] = {}
    for attention in attentions:
        products = attention.score_product.op.index, attention.value_product.op.index
        groups.setdefault(products, []).append(attention)
    merged: list[Attention] = []
    for group in groups.values():
        whole = _with_softmax_joined(graph, group) if len(group) > 1 else None
        merged += group if whole is None else [whole]
    return sorted(merged, key=lambda attention: attention.softmax.index)


def _with_softmax_joined(graph: Graph, turns: Sequence[Attention]) -> Attention | None:
    """Return one attention for those whose softmaxes read all pieces of the scores; None if some are missing."""
    pieces = _scores_pieces(graph, turns)
    if pieces is None or not _are_all(pieces):
        return None
    if not pieces_agree(turns) or common_scale([turn.scale for turn in turns]) != turns[0].scale:
        return None
    first = pieces[0]
    weights = _whole_weights(graph, pieces)
    if weights is None or first.place == first.softmax_dim:
        return None
    # The first in the order of the run: what was written before is no step of its scores.
    turn = turns[0]
    stages = dict(turn.stages)
    for name in ("scores", "masked_scores"):
        tensor = _stage_of_pieces(graph, pieces, name)
        if tensor is not None:
            stages[name] = tensor
        elif name in stages:
            return None
    stages["weights"] = weights
    producer_index = graph.recording.producers.get(weights.id, -1)
    return replace(
        turn,
        softmax=replace(turn.softmax, outputs=(weights,)),
        softmax_dim=first.softmax_dim,
        stages=stages,
        weights_path=tuple(op for op in turn.weights_path if op.index > producer_index),
        pieces=tuple(piece.turn for piece in pieces),
        cut_place=first.place,
    )


def _scores_pieces(graph: Graph, turns: Sequence[Attention]) -> list[_ScoresPiece] | None:
    """Return the scores of the turns as pieces, cut alike, in their order; None if some are no pieces."""
    pieces = []
    for turn in turns:
        part = _scores_piece(graph, turn)
        if part is None:
            return None
        pieces.append(part)
    if len({part.layout for part in pieces}) > 1:
        return None
    return sorted(pieces, key=lambda part: part.start)


def _are_all(pieces: Sequence[_ScoresPiece]) -> bool:
    """Return whether pieces, in order, are all of the scores."""
    end = 0
    for part in pieces:
        if part.start != end:
            return False
        end += part.size
    first = pieces[0]
    return end == first.source.shape[first.place]


def _scores_piece(graph: Graph, turn: Attention) -> _ScoresPiece | None:
    """Return the scores that a softmax reads as a piece of all scores; None if they are no piece."""
    softmax = graph.softmaxes.get(turn.softmax.index)
    if softmax is None:
        return None
    shape = turn.softmax.output.shape
    read: dict[int, TensorRef] = {}
    for step in graph.back(softmax.masked, graph.passes_on):
        op = graph.recording.producer(step.tensor)
        # Pieces that were written before are further back: the nearest tensor of the memory is the piece.
        if step.tensor.shape == shape:
            read.setdefault(step.tensor.storage, step.tensor)
        if op is None or not (op.does("cuts") or op.base_name in ("select", "unbind")):
            continue
        source = op.inputs[0]
        part = read.get(source.storage)
        if part is not None and source.numel == turn.score_product.op.output.numel:
            return _piece_of(turn, source, part)
    return None


def _piece_of(turn: Attention, source: TensorRef, part: TensorRef) -> _ScoresPiece | None:
    """Return a tensor as a piece of all scores; None if it is another view of them."""
    place = _cut_place(source, part)
    if place is None:
        return None
    keeps_place = len(part.shape) == len(source.shape)
    return _ScoresPiece(
        turn=turn,
        source=source,
        tensor=part,
        place=place,
        start=(part.offset - source.offset) // max(source.stride[place], 1),
        size=part.shape[place] if keeps_place else 1,
        keeps_place=keeps_place,
    )


def _cut_place(source: TensorRef, part: TensorRef) -> int | None:
    """Return the one dimension of a tensor that a piece has a part of, or a single index; None for other views."""
    rank = len(source.shape)
    if len(part.shape) == rank:
        if part.stride != source.stride:
            return None
        places = [place for place in range(rank) if part.shape[place] != source.shape[place]]
    else:
        places = [place for place in range(rank) if _is_without(source, place, part)]
    return places[0] if len(places) == 1 else None


def _is_without(source: TensorRef, place: int, part: TensorRef) -> bool:
    """Return whether a tensor has all dimensions of another one but this."""
    shape = (*source.shape[:place], *source.shape[place + 1 :])
    stride = (*source.stride[:place], *source.stride[place + 1 :])
    return part.shape == shape and part.stride == stride


def _whole_weights(graph: Graph, pieces: Sequence[_ScoresPiece]) -> TensorRef | None:
    """Return the first tensor with the weights of all pieces, of the shape of the scores; None if there is none."""
    turn, shape = pieces[0].turn, pieces[0].source.shape
    product = turn.value_product
    factor = product.right if turn.value_first else product.left
    ops = graph.recording.ops[: product.multiply.index + 1]
    dependent = [made_of({part.turn.softmax.output.id}, ops) for part in pieces]
    of_all = set.intersection(*dependent)
    whole: TensorRef | None = None
    for step in graph.back(factor, graph.passes_on):
        if step.tensor.shape == shape and step.tensor.id in of_all:
            whole = step.tensor
    return whole


def _stage_of_pieces(graph: Graph, pieces: Sequence[_ScoresPiece], stage: str) -> TensorRef | None:
    """Return a stage before the softmax for all pieces; None if the pieces do not have it, or it is unknown."""
    first = min(pieces, key=lambda part: part.turn.softmax.index)
    tensor = first.turn.stages.get(stage)
    if tensor is None or tensor.shape == first.source.shape:
        return tensor
    if tensor.id == first.tensor.id:
        return first.source
    # Steps of a piece may include what was written for another one: only the input of the softmax is sure.
    if stage != "masked_scores" and len({part.turn.scoring for part in pieces}) > 1:
        return None
    tensors = [part.turn.stages.get(stage, part.turn.stages["scores"]) for part in pieces]
    if [tensor.shape for tensor in tensors] != [part.tensor.shape for part in pieces]:
        return None
    return _together(graph, tensors, first)


def _together(graph: Graph, tensors: Sequence[TensorRef], cut: _ScoresPiece) -> TensorRef:
    """Return a tensor that torch never made: the pieces, concatenated or stacked as the scores were cut."""
    joined = _unmade(tensors, cut.source.shape)
    graph.dimensions.put(joined, graph.dimensions.of(cut.source))
    _put_join(graph, tensors, joined, cut.place, is_stack=not cut.keeps_place)
    return joined

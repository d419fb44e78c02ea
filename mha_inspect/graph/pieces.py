"""Put together an attention that the code computes in pieces: some queries, some keys, or some of the batch at a time.

A tensor that was never made as a whole gets a reference of its own. Its producer is a concatenation that torch never
ran, and its axis is the one that the code cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter, mul
from typing import NamedTuple

import torch

from ..record.ops import TensorRef
from .attention import Attention
from .axis import Axis, Dim, piece, resolve, size_of, unify, wide
from .dataflow import Graph, made_of
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
    merged: dict[int, Attention] = {attention.softmax.index: attention for attention in attentions}
    for group in groups.values():
        known = all(merged.get(attention.softmax.index) is attention for attention in group)
        whole = _merged(graph, group) if known and len(group) > 1 else None
        if whole is not None:
            merged = {index: each for index, each in merged.items() if all(each is not turn for turn in group)}
            merged[whole.softmax.index] = whole
    return [merged[index] for index in sorted(merged)]


def with_keys_joined(graph: Graph, turns: Sequence[Attention]) -> Attention:
    """Return one attention for those of pieces of the keys; without a known cut its stages are those of the first."""
    key, value = (_cut(graph, [_ends(graph, turn, side) for turn in turns], whole=False) for side in ("key", "value"))
    whole = None if key is None or value is None else _joined(graph, turns, k=key, v=value)
    joined = whole or replace(turns[0], pieces=tuple(turns[1:] and turns))
    scales = [common_scale([getattr(turn, name) for turn in turns]) for name in ("scale", "scores_scale")]
    return replace(joined, scale=scales[0], scores_scale=scales[1])


def _merged(graph: Graph, turns: Sequence[Attention]) -> Attention | None:
    """Return one attention for those of pieces of the queries; None if they have more than that in common."""
    after = made_of({turns[0].stages["context"].id}, graph.recording.ops)
    if any(turn.stages["q_heads"].id in after for turn in turns):
        return None
    is_one_scale = common_scale([turn.scale for turn in turns]) == turns[0].scale
    if not is_one_scale or not pieces_agree(turns):
        return None
    heads = {side: [turn.stages[f"{side}_heads"] for turn in turns] for side in "qkv"}
    if all(len({tensor.id for tensor in heads[side]}) == 1 for side in "kv"):
        cut = _cut(graph, [_ends(graph, turn, "query") for turn in turns])
        return None if cut is None else _joined(graph, turns, q=cut)
    masks = zip(*(_masks(graph, turn) for turn in turns), strict=False)
    cuts = [
        _cut(graph, [[each] for each in tensors])
        for tensors in (*heads.values(), *masks)
        if len({t.id for t in tensors}) > 1
    ]
    known = [cut for cut in cuts if cut is not None]
    if len(known) < max(len(cuts), 3):
        return None
    q, k, v = known[:3]
    batch = set(turns[0].score_product.axes(graph.dimensions).batch)
    if not set(q.part) <= batch:
        return None
    if not wide(q.part):
        _make_cut_axes_one(graph, turns[0], (q, k, v))
    return _joined(graph, turns, q=q, k=k, v=v)


def _make_cut_axes_one(graph: Graph, turn: Attention, cuts: Sequence[Cut]) -> None:
    """Make the axes one that were cut to pieces of size one, which leave nothing for a product or a write to do so."""
    size, context = size_of(cuts[0].axis), turn.stages["context"].id
    writes = [op for op in graph.recording.ops if op.kind == "write" and op.inputs[-1].id == context]
    results = [each for op in writes for each in _cuts(graph, op.inputs[:1]).values()]
    shapes = [(zip(source.shape, part.shape, strict=False), graph.dimensions.of(source)) for source, part in results]
    axes = [dim for pairs, dims in shapes for pair, dim in zip(pairs, dims, strict=False) if pair == (size, 1)]
    for axis in (*(cut.axis for cut in cuts[1:]), *axes):
        unify(cuts[0].axis, axis)


def _masks(graph: Graph, attention: Attention) -> list[TensorRef]:
    """Return what is added to or filled into the scores."""
    product = attention.score_product.op
    scores = made_of({product.output.id}, graph.recording.ops[product.index + 1 : attention.softmax.index])
    return [read for op in attention.masks for read in op.inputs if read.id not in scores and read.numel > 1]


def _ends(graph: Graph, turn: Attention, side: str) -> list[TensorRef]:
    """Return the heads of a side, and what they are projected from."""
    op = turn.first_projection(side)
    return [turn.stages[f"{side[0]}_heads"], *([] if op is None else [graph.projected(op)])]


def _cuts(graph: Graph, ends: Sequence[TensorRef]) -> dict[int, tuple[TensorRef, TensorRef]]:
    """Return the tensors that one of these is computed from a slice of, position by position, by id, with the slice."""
    steps = [*graph.back(ends[0], lambda op: op.kind != "compute" or op.does("norms") or op.pointwise)]
    for source in ends[1:]:  # sums lead back through every layer
        steps += graph.back(source, lambda op: op.kind != "compute" or op.does("norms"))
    ops = [(graph.recording.producer(step.tensor), step.tensor) for step in steps]
    return {op.inputs[0].id: (op.inputs[0], piece) for op, piece in ops if op is not None and op.does("cuts")}


def _cut(graph: Graph, turns: Sequence[Sequence[TensorRef]], *, whole: bool = True) -> Cut | None:
    """Return the tensor that the turns have consecutive pieces of, of the `whole` or not; None if there is none."""
    first, *others = [_cuts(graph, ends) for ends in turns]
    for number, (source, part) in first.items():
        pieces = [part, *(other[number][1] for other in others if number in other)]
        places = [at for at, size in enumerate(part.shape) if size != source.shape[at]]
        if len(pieces) == len(turns) and len(places) == 1:
            (at,) = places
            axis, step = graph.dimensions.of(source)[at], source.stride[at]
            start, size = (part.offset - source.offset) // max(step, 1), sum(each.shape[at] for each in pieces)
            starts = accumulate((each.shape[at] for each in pieces[:-1]), initial=start)
            if [each.offset for each in pieces] == [source.offset + start * step for start in starts]:
                if size == source.shape[at]:
                    return Cut(source, part, axis, graph.dimensions.of(part)[at])
                if not whole:
                    return Cut(None, part, piece(axis, start, size), graph.dimensions.of(part)[at])
    return None


def _joined(
    graph: Graph, turns: Sequence[Attention], q: Cut | None = None, k: Cut | None = None, v: Cut | None = None
) -> Attention | None:
    """Return one attention for those of pieces of its queries, keys and values; None if the scores are no pieces."""
    first, last = max(turns, key=lambda turn: len(turn.masks)), turns[-1]  # a mask may be needed for some pieces only
    scored = _of_scores(graph, turns[0], q or k, of_keys=q is None)
    sides = {"q": q, "k": k, "v": v}

    def join(path: str, cut: Cut | None) -> TensorRef:
        tensors = [attrgetter(path)(turn) for turn in turns]
        return _whole(graph, tensors, cut) or tensors[0]

    def product(path: str, *factors: Cut | None) -> Product:
        known: Product = getattr(first, path)
        left, right = (join(f"{path}.{side}", cut) for side, cut in zip(("left", "right"), factors, strict=True))
        outputs = (join(f"{path}.multiply.output", scored),)
        multiply = replace(known.multiply, inputs=(*known.multiply.inputs[:-2], left, right), outputs=outputs)
        summed = replace(known.op, inputs=outputs, outputs=(join(f"{path}.op.output", scored),))
        op = multiply if known.op is known.multiply else summed
        return replace(known, op=op, multiply=multiply, left=left, right=right)

    scores = product("score_product", *((k, q) if first.key_first else (q, k)))
    if scores.op.output.numel == turns[0].score_product.op.output.numel:
        return None
    # Only the walk from the last piece reaches the operations after the loop.
    ends = {"masked_scores": last.stages["scores"]} if "masked_scores" in first.stages else {}
    stages = {
        stage: _whole(
            graph,
            [turn.stages.get(stage, turn.stages["scores"]) for turn in turns],
            sides.get(stage[0], scored),
        )
        or end
        for stage, end in (ends | last.stages).items()
    }
    output = {"output": last.projections["output"]} if "output" in last.projections else {}
    before = _whole(graph, [turn.before_repeats["key"] for turn in turns], k) or first.before_repeats["key"]
    return replace(
        first,
        softmax=replace(first.softmax, outputs=(join("softmax.output", scored),)),
        score_product=scores,
        value_product=product("value_product", *((v, scored) if first.value_first else (scored, v))),
        stages=stages,
        projections=first.projections | output,
        before_repeats={"key": before},
        pieces=tuple(turns),
    )


def _of_scores(graph: Graph, turn: Attention, cut: Cut | None, *, of_keys: bool) -> Cut | None:
    """Return a cut of queries, or of keys, as one of the scores, where the axis may have a twin."""
    axes = turn.score_product.axes(graph.dimensions)
    is_left = turn.key_first == of_keys
    pairs = zip(*((axes.left_rows, axes.rows) if is_left else (axes.right_columns, axes.columns)), strict=False)
    part = () if cut is None else tuple(made for given, made in pairs if given in resolve(cut.part))
    if cut is None or not part or part == resolve(cut.part):
        return cut
    return cut._replace(axis=tuple(Axis(atom.size) for atom in resolve(cut.axis)), part=part)


def _whole(graph: Graph, tensors: Sequence[TensorRef], cut: Cut | None) -> TensorRef | None:
    """Return the whole of the pieces of an axis; None if they do not have that axis."""
    first, dims = tensors[0], [*graph.dimensions.of(tensors[0])]
    if cut is None or len({tensor.id for tensor in tensors}) == 1:
        return None
    if cut.source is not None and cut.piece.id == first.id:
        return cut.source
    whole, part = resolve(cut.axis), resolve(cut.part)
    size = len(part)
    places = [(at, i) for at, dim in enumerate(dims) for i in range(len(dim)) if dim[i : i + size] == part]
    if len(places) != 1:
        return None
    ((at, start),) = places
    is_inner = bool(wide(dims[at][:start]))
    dims[at] = (*dims[at][:start], *whole, *dims[at][start + size :])
    shape, number = tuple(map(size_of, dims)), -1 - abs(hash(tuple(tensor.id for tensor in tensors)))
    steps = [*accumulate(reversed(shape), mul, initial=1)][-2::-1]
    stride = tuple(old and new for old, new in zip(first.stride, steps, strict=True))
    joined = replace(first, id=number, shape=shape, stride=stride, offset=0, storage=number)
    graph.dimensions.put(joined, tuple(dims))
    recording, cat = graph.recording, "aten.cat.default"
    maker = recording.producer(first)
    # The product with a single key may be a multiplication, with other dimensions.
    if not is_inner and maker is not None and all(len(tensor.shape) == len(dims) for tensor in tensors):
        pieces, end = tuple(tensors), len(recording.ops) + len(recording.joins)
        recording.joins[joined.id] = replace(
            maker, index=end, name=cat, args=(pieces, at), inputs=pieces, outputs=(joined,), kind="view", call=-1
        )
        if all(piece.id in recording.values for piece in pieces):
            recording.values[joined.id] = torch.cat([recording.values[piece.id] for piece in pieces], at)
    return joined


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
    found = [_scores_piece(graph, turn) for turn in turns]
    pieces = [each for each in found if each is not None]
    if len(pieces) < len(turns) or len({each.layout for each in pieces}) > 1:
        return None
    pieces.sort(key=lambda each: each.start)
    first = pieces[0]
    ends = [*accumulate((each.size for each in pieces), initial=0)]
    if [each.start for each in pieces] != ends[:-1] or ends[-1] != first.source.shape[first.place]:
        return None
    if not pieces_agree(turns) or common_scale([turn.scale for turn in turns]) != turns[0].scale:
        return None
    weights = _whole_weights(graph, pieces)
    if weights is None or first.place == first.softmax_dim:
        return None
    stages = {name: _stage_of_pieces(graph, pieces, name) for name in ("scores", "masked_scores")}
    known = {name: tensor for name, tensor in stages.items() if tensor is not None}
    if any(name in turns[0].stages and name not in known for name in stages):
        return None
    # The first in the order of the run: what was written before is no step of its scores.
    turn = turns[0]
    made = graph.recording.producers.get(weights.id, -1)
    return replace(
        turn,
        softmax=replace(turn.softmax, outputs=(weights,)),
        softmax_dim=first.softmax_dim,
        stages=turn.stages | known | {"weights": weights},
        weights_path=tuple(op for op in turn.weights_path if op.index > made),
        pieces=tuple(each.turn for each in pieces),
        cut_place=first.place,
    )


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
        piece = read.get(source.storage)
        if piece is None or source.numel != turn.score_product.op.output.numel:
            continue
        place = _cut_place(source, piece)
        if place is None:
            return None
        start = (piece.offset - source.offset) // max(source.stride[place], 1)
        keeps_place = len(shape) == len(source.shape)
        return _ScoresPiece(turn, source, piece, place, start, shape[place] if keeps_place else 1, keeps_place)
    return None


def _cut_place(source: TensorRef, piece: TensorRef) -> int | None:
    """Return the one dimension of a tensor that a piece has a part of, or a single index; None for other views."""
    layout, whole = (list(zip(tensor.shape, tensor.stride, strict=True)) for tensor in (piece, source))
    if len(layout) == len(whole):
        places = [place for place, size in enumerate(piece.shape) if size != source.shape[place]]
        return places[0] if len(places) == 1 and piece.stride == source.stride else None
    single = [place for place in range(len(whole)) if [*whole[:place], *whole[place + 1 :]] == layout]
    return single[0] if len(single) == 1 else None


def _whole_weights(graph: Graph, pieces: Sequence[_ScoresPiece]) -> TensorRef | None:
    """Return the first tensor with the weights of all pieces, of the shape of the scores; None if there is none."""
    turn, shape = pieces[0].turn, pieces[0].source.shape
    product = turn.value_product
    factor = product.right if turn.value_first else product.left
    ops = graph.recording.ops[: product.multiply.index + 1]
    made = [made_of({each.turn.softmax.output.id}, ops) for each in pieces]
    steps = graph.back(factor, graph.passes_on)
    whole = [step.tensor for step in steps if step.tensor.shape == shape and all(step.tensor.id in ids for ids in made)]
    return whole[-1] if whole else None


def _stage_of_pieces(graph: Graph, pieces: Sequence[_ScoresPiece], stage: str) -> TensorRef | None:
    """Return a stage before the softmax for all pieces; None if the pieces do not have it, or it is unknown."""
    first = min(pieces, key=lambda each: each.turn.softmax.index)
    own = first.turn.stages.get(stage)
    if own is None or own.shape == first.source.shape:
        return own
    if own.id == first.tensor.id:
        return first.source
    tensors = [each.turn.stages.get(stage, each.turn.stages["scores"]) for each in pieces]
    # Steps of a piece may include what was written for another one: only the input of the softmax is sure.
    sure = stage == "masked_scores" or len({each.turn.scoring for each in pieces}) == 1
    if not sure or any(tensor.shape != each.tensor.shape for tensor, each in zip(tensors, pieces, strict=True)):
        return None
    return _together(graph, tensors, first)


def _together(graph: Graph, tensors: Sequence[TensorRef], cut: _ScoresPiece) -> TensorRef:
    """Return a tensor that torch never made: the pieces, concatenated or stacked as the scores were cut."""
    shape, number = cut.source.shape, -1 - abs(hash(tuple(tensor.id for tensor in tensors)))
    stride = tuple([*accumulate(reversed(shape), mul, initial=1)][-2::-1])
    joined = replace(tensors[0], id=number, shape=shape, stride=stride, offset=0, storage=number)
    graph.dimensions.put(joined, graph.dimensions.of(cut.source))
    recording = graph.recording
    maker = recording.producer(tensors[0])
    if maker is None:
        return joined
    recording.joins[number] = replace(
        maker,
        index=len(recording.ops) + len(recording.joins),
        name="aten.cat.default" if cut.keeps_place else "aten.stack.default",
        args=(tuple(tensors), cut.place),
        inputs=tuple(tensors),
        outputs=(joined,),
        kind="view",
        call=-1,
    )
    if all(tensor.id in recording.values for tensor in tensors):
        join = torch.cat if cut.keeps_place else torch.stack
        recording.values[number] = join([recording.values[tensor.id] for tensor in tensors], cut.place)
    return joined

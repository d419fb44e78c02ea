"""Put together an attention that the code computes in pieces: some queries, some keys, or some of the batch at a time.

A tensor that was never made as a whole gets a reference of its own. Its producer is a concatenation that torch never
ran, and its axis is the one that the code cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter, mul
from typing import NamedTuple

import torch

from ..record.ops import TensorRef
from .attention import Attention
from .axis import Dim, resolve, size_of, wide
from .dataflow import Graph, made_of
from .products import Product

_APART = 1 << 40
"""Difference between the id of the first piece and that of the whole."""


class Cut(NamedTuple):
    """A tensor that was cut into consecutive pieces."""

    source: TensorRef
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
    """Return one attention for those of pieces of the keys with one softmax; the first if the cut was not found."""
    cuts = [_cut(graph, [_ends(graph, turn, side) for turn in turns]) for side in ("key", "value")]
    known = [cut for cut in cuts if cut is not None]
    return (_joined(graph, turns, known) if len(known) == len(cuts) else None) or turns[0]


def _merged(graph: Graph, turns: Sequence[Attention]) -> Attention | None:
    """Return one attention for those of pieces of the queries; None if they have more than that in common."""
    after = made_of({turns[0].stages["context"].id}, graph.recording.ops)
    if len({(turn.scale, turn.scoring) for turn in turns}) > 1 or any(t.stages["q_heads"].id in after for t in turns):
        return None
    sides = [[turn.stages[side] for turn in turns] for side in ("k_heads", "v_heads")]
    others = [tensors for tensors in sides if len({tensor.id for tensor in tensors}) > 1]
    if not others:
        cut = _cut(graph, [_ends(graph, turn, "query") for turn in turns])
        return None if cut is None else _joined(graph, turns, [cut])
    masks = zip(*(_masks(graph, turn) for turn in turns), strict=False)
    apart = (*others, *(each for each in masks if len({tensor.id for tensor in each}) > 1))
    cuts = [
        _cut(graph, [[each] for each in tensors]) for tensors in ([turn.stages["q_heads"] for turn in turns], *apart)
    ]
    known = [cut for cut in cuts if cut is not None]
    batch = set(turns[0].score_product.axes(graph.dimensions).batch)
    return _joined(graph, turns, known) if len(known) == len(cuts) and set(known[0].part) <= batch else None


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


def _cut(graph: Graph, turns: Sequence[Sequence[TensorRef]]) -> Cut | None:
    """Return the tensor that every turn has a piece of, in order; None if there is none."""
    first, *others = [_cuts(graph, ends) for ends in turns]
    for number, (whole, piece) in first.items():
        pieces = [piece, *(other[number][1] for other in others if number in other)]
        places = [at for at, size in enumerate(piece.shape) if size != whole.shape[at]]
        if len(pieces) == len(turns) and len(places) == 1:
            (at,) = places
            starts = accumulate((each.shape[at] for each in pieces), initial=0)
            offsets = [whole.offset + start * whole.stride[at] for start in starts]
            if [*(each.offset for each in pieces), whole.offset + whole.shape[at] * whole.stride[at]] == offsets:
                return Cut(whole, piece, *(graph.dimensions.of(tensor)[at] for tensor in (whole, piece)))
    return None


def _joined(graph: Graph, turns: Sequence[Attention], cuts: Sequence[Cut]) -> Attention | None:
    """Return one attention for those of the pieces of an axis; None if the scores do not have that axis."""
    first, last = turns[0], turns[-1]

    def join(path: str) -> TensorRef:
        tensors = [attrgetter(path)(turn) for turn in turns]
        return _whole(graph, tensors, cuts) or tensors[0]

    def product(path: str) -> Product:
        known: Product = getattr(first, path)
        left, right, outputs = join(f"{path}.left"), join(f"{path}.right"), (join(f"{path}.multiply.output"),)
        multiply = replace(known.multiply, inputs=(*known.multiply.inputs[:-2], left, right), outputs=outputs)
        summed = replace(known.op, inputs=outputs, outputs=(join(f"{path}.op.output"),))
        op = multiply if known.op is known.multiply else summed
        return replace(known, op=op, multiply=multiply, left=left, right=right)

    scores = product("score_product")
    if scores.op.output.numel == first.score_product.op.output.numel:
        return None
    # Only the walk from the last piece reaches the operations after the loop.
    stages = {
        stage: _whole(graph, [turn.stages.get(stage, end) for turn in turns], cuts) or end
        for stage, end in last.stages.items()
    }
    output = {"output": last.projections["output"]} if "output" in last.projections else {}
    before = _whole(graph, [turn.before_repeats["key"] for turn in turns], cuts) or first.before_repeats["key"]
    return replace(
        first,
        softmax=replace(first.softmax, outputs=(join("softmax.output"),)),
        score_product=scores,
        value_product=product("value_product"),
        stages=stages,
        projections=first.projections | output,
        before_repeats={"key": before},
        masks=tuple(scores.op if op is first.score_product.op else op for op in first.masks),
        pieces=tuple(turns),
    )


def _whole(graph: Graph, tensors: Sequence[TensorRef], cuts: Iterable[Cut]) -> TensorRef | None:
    """Return the whole of the pieces of an axis; None if they do not have that axis."""
    first, dims = tensors[0], [*graph.dimensions.of(tensors[0])]
    source = next((cut.source for cut in cuts if cut.piece.id == first.id), None)
    places = {
        at: (resolve(cut.axis), resolve(cut.part))
        for cut in cuts
        for at, dim in enumerate(dims)
        if {*resolve(cut.part)} <= {*dim} and not {*resolve(cut.axis)} <= {*dim}
    }
    if source is not None or len({tensor.id for tensor in tensors}) == 1 or len(places) != 1:
        return source
    ((at, (whole, piece)),) = places.items()
    start = dims[at].index(piece[0])
    is_inner = bool(wide(dims[at][:start]))
    dims[at] = (*dims[at][:start], *whole, *dims[at][start + len(piece) :])
    shape, number = tuple(map(size_of, dims)), first.id - _APART
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

"""Find the rows of W_q, W_k, W_v and the columns of W_o that belong to each head, in the parameters of a module.

Labels (`graph.labels`) say which elements of a parameter the heads are made of. There the axes of the stage give the
head and the feature of each element. With `q, k, v = qkv(x).chunk(3, -1)` and 3 heads of 4 features, the keys of head 1
are rows 16 to 19 of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from ..graph.attention import Attention
from ..graph.computed_weights import does_more_to_weights
from ..graph.dataflow import made_of
from ..graph.equal_layers import Layer
from ..graph.gates import Gate, gates_of
from ..graph.ids import in_order
from ..graph.indices import Indices, counted
from ..graph.label import Axis, Label, Span
from ..graph.labels import Labels
from ..graph.projections import earlier_projections, joined_projections
from ..graph.ways import Meeting, Walk, Way
from ..record.ops import Named, Op, TensorRef
from .axes import AxisNames
from .heads import label_of_stage, rows_by_head
from .named_run import NamedRun
from .pattern import dims_of
from .projection import Part, Projection, have_in_common, merged, of_no_head, of_whole_rows, with_projections_of_heads

SIDES = {"q": "query", "k": "key", "v": "value", "o": "output"}
"""The letter of a part, and its projection."""
_MATRICES, _BIASES = ("W", "joined W"), ("b", "joined b")
FACTORS = ("factor", "added factor")
"""Kinds of use of a parameter in a product of matrices that gives a weight, or is added to one."""
_BY_FEATURE = (*_MATRICES, *_BIASES, "appended", "prepended")
"""Kinds of use with a number, or a row, for each feature."""
_BEFORE = {"norm": "norm before", "shift": "shift before", "b": "shift before", "filter": "filter before"}
"""Kinds of use to those in front of the projection."""


def projections(run: NamedRun) -> list[list[Projection]]:
    """Return for each attention its matrices and biases, with the place of each head's part.

    The module is not run again, and the tensors of the run need not be kept. A side without a projection is absent.
    """
    of_attentions: list[list[Projection]] = []
    for (_, names), (parts, serves) in zip(run.attentions, parts_of(run), strict=True):
        by_name: dict[str, list[Part]] = {}
        for part in parts:
            if part.name and not part.is_vector:
                by_name.setdefault(part.name, []).append(part)
        matrices: list[Projection] = []
        for name, of_name in by_name.items():
            matrices.append(_projection(name, of_name, names, serves))
        of_attentions.append(matrices)
    return of_attentions


Serves = tuple[tuple[int, ...], ...]


def _projection(
    name: str,
    parts: list[Part],
    names: AxisNames,
    serves: Serves,
) -> Projection:
    """Return a matrix or a bias of an attention from its parts: `W_q` of `heads head_dim embed`."""
    first = parts[0]
    letter = name[-1]
    # In a loop over heads, heads with one key may have values of their own.
    count = max(num_heads(names, letter), _number_of_heads(parts))
    width = 0
    for part in parts:
        for places in part.heads.values():
            width = max(width, len(places))
    if name == "b_o":
        count = 1
        shape: tuple[int, ...] = (width,)
    elif first.kind == "W":
        embed = first.width if first.inner is not None else 0
        shape = (count, width, embed)
    else:
        shape = (count, width)
    is_shared = letter in "kv" and count == len(serves)
    return Projection(
        part=name,
        shape=shape,
        is_whole=_are_whole(parts, count, width),
        serves=serves if is_shared else (),
        parts=tuple(parts),
    )


def _number_of_heads(parts: Iterable[Part]) -> int:
    """Return the number of heads, of which the last one has a part."""
    last = 0
    for part in parts:
        last = max(last, *part.heads) if part.heads else last
    return last + 1


def _are_whole(parts: list[Part], count: int, width: int) -> bool:
    """Return whether parts have every feature of every head once, as a number of a parameter that is used unchanged."""
    for part in parts:
        if not part.moved or part.is_shared or have_in_common(part.heads):
            return False
        is_matrix = part.kind == "W"
        has_inner = part.inner is not None
        if has_inner != is_matrix or part.width != parts[0].width:
            return False
    if width == 0 or _number_of_heads(parts) > count:
        return False
    is_once = _coverage(parts, count, width) == 1
    return bool(is_once.all())


def _coverage(parts: list[Part], count: int, width: int) -> Indices:
    """Return how often each feature of each head is in the parts, `heads head_dim`."""
    covered = np.zeros((count, width), int)
    for part in parts:
        for head, places in part.heads.items():
            if len(places) != width:
                continue
            present = places[places >= 0]
            covered[head] += places >= 0
            if len(np.unique(present)) < len(present):  # used twice
                covered[head] += 1
    return covered


def num_heads(names: AxisNames, letter: str) -> int:
    """Return the number of heads of `q`, `k`, `v` or `o`."""
    return names.num_kv_heads if letter in "kv" else names.num_heads


class PartsInParameters(NamedTuple):
    """The parts of an attention in the parameters."""

    parts: list[Part]
    serves: Serves
    """The query heads that use each key head."""


def parts_in(run: NamedRun, place: int) -> PartsInParameters:
    """Return the parts of one attention of a run in the parameters."""
    attention, names = run.attentions[place]
    return _PartsOfAttention(run, attention, names).all()


def parts_of(run: NamedRun) -> list[PartsInParameters]:
    """Return the parts of each attention of a run in the parameters; those of equal layers are found once."""
    return run.read_parameters(parts_in, _in_layer)


def _in_layer(found: PartsInParameters, layer: Layer) -> PartsInParameters:
    """Return the parts in the parameters of an equal layer."""
    parts = [replace(part, parameter=layer.parameter(part.parameter.name)) for part in found.parts]
    return PartsInParameters(parts, found.serves)


def parameters_behind(
    run: NamedRun,
    tensors: Iterable[TensorRef],
    passes: Callable[[Op], bool] = lambda op: True,
) -> list[Named]:
    """Return the parameters that tensors are made of, through operations that pass the test."""
    parameters: dict[str, Named] = {}
    for tensor in tensors:
        for step in run.graph.back(tensor, passes):
            if run.recording.producer(step.tensor) is not None:
                continue
            for named in run.graph.parameters_in(step.tensor.storage):
                parameters[named.name] = named
    return list(parameters.values())


@dataclass(frozen=True)
class _Target:
    """A tensor by heads, to which parameters are followed."""

    tensor: TensorRef
    heads: Label
    """The head and feature of each element; no axes if unknown."""


class _PartsOfAttention:
    """Finds the parts of one attention in the parameters."""

    def __init__(self, run: NamedRun, attention: Attention, names: AxisNames) -> None:
        self._run = run
        self._graph = run.graph
        self._attention = attention
        self._names = names
        self._turns = attention.branches or (attention,)
        contexts = [(turn.stages["context"], self._heads_of(turn, "context")) for turn in self._turns]
        self._labels = Labels(run.graph, contexts)
        self._serves: Serves = ()
        self._has_joined = False

    def all(self) -> PartsInParameters:
        """Return all parts of the heads and the output, and the query heads that use each key head."""
        if self._names.num_kv_heads < self._names.num_heads:
            self._serve(self._key_heads())
        parts: list[Part] = []
        for letter in "qkv":
            parts += self._side(letter)
        parts += self._output()
        return PartsInParameters(parts, self._serves)

    def _key_heads(self) -> list[int]:
        """Return the key head of each query head: 0, 0, 1, 1 of four, or 0, 1, 0, 1 if the groups come first."""
        heads, shared = self._names.num_heads, self._names.num_kv_heads
        dims = dims_of(self._names.of_stage("q_heads"))
        has_groups = any("group" in dim for dim in dims)
        if has_groups and self._names.head_order.index("group") == 1:
            return [head % shared for head in range(heads)]
        return [head * shared // heads for head in range(heads)]

    def _serve(self, key_heads: list[int]) -> None:
        """Take the key head of each query head."""
        serves: dict[int, list[int]] = {}
        for head, key_head in enumerate(key_heads):
            serves.setdefault(key_head, []).append(head)
        numbers = range(self._names.num_kv_heads)
        self._serves = tuple(tuple(serves.get(number, ())) for number in numbers)

    # -- queries, keys and values -------------------------------------------------------------------------------------

    def _side(self, letter: str) -> list[Part]:
        """Return the parts of the queries, keys or values, by head."""
        side = SIDES[letter]
        stops = self._given_ids()
        since = self._first_index(side)
        parts: list[Part] = []
        for turn in self._turns:
            op = turn.projections.get(side) or self._attention.projections.get(side)
            ends: set[int] = set()
            if op is not None and not self._attention.earlier.get(side):
                ends = {op.index}
            stage = f"{letter}_heads"
            heads = turn.stages[stage]
            way = Walk(self._graph, stops, ends, since).to(heads)
            self._labels.follow(way.ops)
            target = _Target(heads, self._heads_of(turn, stage))
            for meeting, part in self._on_way(letter, op, way, target):
                parts.append(self._with_reads(part, op, turn) if meeting.kind == "W" else part)
        return self._numbered(letter, with_projections_of_heads(merged(parts)))

    def _given_ids(self) -> set[int]:
        """Return the ids of the queries, keys and values before their projections, apart from learned ones."""
        ids: set[int] = set()
        for turn in self._turns:
            for name in ("query", "key", "value"):
                tensor = turn.stages.get(name)
                if tensor is not None and not self._graph.is_weight(tensor):
                    ids.add(tensor.id)
        return ids

    def _first_index(self, side: str) -> int:
        """Return the index of the first operation that gives queries, keys or values before their projection."""
        indices: list[int] = []
        for turn in self._turns:
            if side in turn.stages:
                indices.append(self._index_of(turn.stages[side]))
        return min(indices, default=-1)

    def _index_of(self, tensor: TensorRef) -> int:
        """Return the index of the operation that a tensor is the result of; -1 for an input."""
        return self._run.recording.producers.get(tensor.id, -1)

    def _heads_of(self, turn: Attention, stage: str) -> Label:
        """Return the head and feature of each element of a stage."""
        return label_of_stage(self._attention, self._names, turn, stage)

    def _on_way(
        self,
        letter: str,
        projection: Op | None,
        way: Way,
        target: _Target,
    ) -> Iterator[tuple[Meeting, Part]]:
        """Yield the parts on the way to the heads of one turn, each with the meeting that it comes from."""
        adapters: dict[int, set[int]] = {}
        if projection is not None:
            adapters = self._adapters(projection, way)
        by_meeting: list[tuple[Meeting, list[Part]]] = []
        present: set[int] = set()
        for meeting in self._meetings(letter, projection, way, adapters):
            parts = list(self._parts(letter, meeting, target))
            by_meeting.append((meeting, parts))
            if parts and meeting.op is not None:
                present.add(meeting.op.index)
        for meeting, parts in by_meeting:
            if meeting.kind == "added factor" and not _reaches(meeting, adapters, present):
                continue
            for part in parts:
                yield meeting, part

    def _meetings(
        self,
        letter: str,
        projection: Op | None,
        way: Way,
        adapters: Mapping[int, set[int]],
    ) -> Iterator[Meeting]:
        """Yield the meetings of a side with their kinds, also those that other meetings decide."""
        joined: dict[int, set[int]] = {}
        of_gates: set[int] = set()
        if projection is not None:
            joined = joined_projections(self._graph, projection, way.ops)
            of_gates = self._operations_of_gates(projection, way)
        if joined and letter == "q":
            self._has_joined = True
        side = SIDES[letter]
        placed = [self._placed(meeting, projection, side, joined) for meeting in way.meetings]
        of_adapters = set(chain(adapters, *adapters.values()))
        normed = _normed(placed, way)
        for meeting in placed:
            op = meeting.op
            if op is None:
                yield meeting
            elif op.index in of_adapters and meeting.kind == "beside":
                yield replace(meeting, kind="added factor")
            elif op.index in of_gates:
                yield replace(meeting, kind="gate")
            elif meeting.kind in _BIASES and not normed.isdisjoint(_ids_read(op)):
                yield replace(meeting, kind="shift")  # the bias of a norm, not of the projection
            else:
                yield meeting

    def _operations_of_gates(self, projection: Op, way: Way) -> set[int]:
        """Return the indices of the operations that gates of a projection are computed by."""
        indices: set[int] = set()
        for gate in gates_of(self._graph, [projection.output], way.ops):
            for op in self._way_to_gate(gate).ops:
                indices.add(op.index)
        return indices

    def _placed(
        self,
        meeting: Meeting,
        projection: Op | None,
        side: str,
        joined: Mapping[int, set[int]],
    ) -> Meeting:
        """Return a meeting with its kind, decided by its place before or after the projection or a joined one."""
        if projection is None or meeting.op is None:
            return meeting
        kind = self._kind_at(meeting.kind, meeting.op, projection, side, joined)
        return replace(meeting, kind=kind)

    def _kind_at(
        self,
        kind: str,
        op: Op,
        projection: Op,
        side: str,
        joined: Mapping[int, set[int]],
    ) -> str:
        """Return the kind of use of a parameter that an operation before or after the projection reads.

        `joined` are the projections of further tokens, with the ids of the tensors that are made of their results.
        """
        projects = self._graph.is_projection(op)
        is_before = op.index < projection.index
        after_joined = set(chain(*joined.values()))
        is_after_joined = not after_joined.isdisjoint(_ids_read(op))
        is_of_projection = not projects and not is_after_joined
        if is_before and is_of_projection and kind in _BEFORE:
            return _BEFORE[kind]
        if op is projection:
            return "W" if kind == "before" else kind
        if op.index in joined:
            return "joined W" if kind == "before" else "joined b"
        if kind == "b" and is_after_joined and not projects:
            return "joined b"
        if projects and (kind == "before" or is_before):
            return self._kind_of_further(op, side)
        return kind

    def _kind_of_further(self, op: Op, side: str) -> str:
        """Return the kind of use of a projection that is not the last one."""
        if op in self._attention.earlier.get(side, ()):
            return "before"
        shares_keys = self._names.num_kv_heads < self._names.num_heads
        if shares_keys and side in ("query", "output") and self._graph.is_by_head(op):
            return "absorbed"
        return "beside"

    def _adapters(self, projection: Op, way: Way) -> dict[int, set[int]]:
        """Return the low-rank projections whose result is added to that of the projection, as in LoRA.

        Each comes with the indices of the projections before it.
        """
        ops = [op for op in way.ops if not _is_noise(op)]
        of_projection = made_of({projection.output.id}, ops)
        sums: list[set[int]] = []
        for op in ops:
            if op.base_name.rstrip("_") == "add":
                sums.append(_ids_read(op))
        adapters: dict[int, set[int]] = {}
        for meeting in way.meetings:
            adapter = meeting.op
            if adapter is None or adapter is projection or not self._graph.is_projection(adapter):
                continue
            earlier = earlier_projections(self._graph, adapter, self._attention.module)
            if not earlier:
                continue
            beside = made_of({adapter.output.id}, ops) - of_projection
            if any(read & of_projection and read & beside for read in sums):
                adapters[adapter.index] = {before.index for before in earlier}
        return adapters

    def _with_reads(self, part: Part, op: Op | None, turn: Attention) -> Part:
        """Return a part of a matrix with the input features that it reads, if it does not read all."""
        given = turn.stages.get(SIDES[part.letter])
        if op is None or part.inner is None or self._attention.earlier:
            return part
        if given is None or not given.shape:
            return part
        number, _ = part.inner
        whole = given.shape[-1]
        if number >= whole or op.base_name == "convolution":
            return part
        taken = self._graph.projected(op)
        first = self._first_feature(given, taken, number)
        if first is None:
            return part
        return replace(part, reads=dict.fromkeys(part.heads, first), width=whole)

    def _first_feature(self, given: TensorRef, taken: TensorRef, number: int) -> int | None:
        """Return the first of the neighbouring features of a tensor that another one is made of; None for others."""
        features = Axis("features")
        rank, width = len(given.shape), given.shape[-1]
        label = Label(given.shape, {features: Span.of(counted(rank, rank - 1, width))})
        labels = Labels(self._graph, [(given, label)])
        walk = Walk(self._graph, {given.id}, since=self._index_of(given))
        labels.follow(walk.to(taken).ops)
        span = labels.of(taken).spans.get(features)
        if span is None:
            return None
        numbers = span.low.reshape(-1, span.low.shape[-1])
        row: list[int] = numbers[0].tolist()
        first = row[0]
        if first < 0 or row != list(range(first, first + number)):
            return None
        return first

    def _numbered(self, letter: str, parts: list[Part]) -> list[Part]:
        """Return the parts with key/value heads counted once each, if several heads turn out to be the same one."""
        if letter not in "kv":
            return parts
        count = _number_of_heads(parts)
        is_loop = bool(self._attention.branches)
        if num_heads(self._names, letter) >= count and not is_loop:
            return parts
        signs = [_sign(parts, head) for head in range(count)]
        distinct = _in_order(signs)
        if len(distinct) != self._names.num_kv_heads:
            # In a loop, some heads may have one value, and keys of their own: these are counted like the queries.
            if not is_loop:
                return parts
            return [replace(part, is_shared=False) for part in parts]
        if len(distinct) == count:
            return parts
        self._serve([distinct.index(sign) for sign in signs])
        numbers: dict[int, int] = {}
        for number, sign in enumerate(distinct):
            numbers[signs.index(sign)] = number
        return [_renumbered(part, numbers) for part in parts]

    # -- the output ---------------------------------------------------------------------------------------------------

    def _output(self) -> list[Part]:
        """Return the parts of the output: the columns of each head, and the bias."""
        attention = self._attention
        ops = self._output_projections()
        has_output = "output" in attention.stages or bool(attention.summed)
        if not ops or not has_output:
            return []
        joined = self._joined_outputs(ops)
        parts: list[Part] = []
        for op in ops:
            parts += self._columns(op, "W")
        for op in joined:
            parts += self._columns(op, "joined W")
        further = [*self._after_joined(joined), *self._after_output(ops, parts)]
        return merged([*parts, *further])

    def _output_projections(self) -> list[Op]:
        """Return the projections to the output, each once."""
        ops: dict[int, Op] = {}
        for turn in (*self._turns, self._attention):
            if "output" in turn.projections:
                op = turn.projections["output"]
                ops[op.index] = op
        for op in self._attention.summed:
            ops[op.index] = op
        return list(ops.values())

    def _contexts(self) -> list[TensorRef]:
        """Return the context of each turn."""
        return [turn.stages["context"] for turn in self._turns]

    def _joined_outputs(self, ops: list[Op]) -> list[Op]:
        """Return the output projections of further tokens, if such tokens have queries of their own."""
        if not self._has_joined:
            return []
        joined: dict[int, Op] = {}
        for context in self._contexts():
            for op, _ in self._graph.forward(context, self._graph.moves):
                if op not in ops and self._graph.is_projection(op):
                    joined[op.index] = op
        return list(joined.values())

    def _columns(self, op: Op, kind: str) -> Iterator[Part]:
        """Yield the parts of a projection of the contexts, and of what is done to these before."""
        graph = self._graph
        taken = graph.projected(op)
        way = self._way_from_contexts(taken)
        gates = list(gates_of(graph, self._contexts(), way.ops))
        ways_to_gates = list(map(self._way_to_gate, gates))
        of_gates: set[int] = set()
        ops = {on_way.index: on_way for on_way in way.ops}
        for way_to_gate in ways_to_gates:
            for of_gate in way_to_gate.ops:
                of_gates.add(of_gate.index)
                ops[of_gate.index] = of_gate
        labels = self._labels
        labels.follow(in_order(ops))
        target = _Target(taken, labels.of(taken))
        matrix = Meeting(op, graph.weight_of(op), kind)
        yield from self._parts("o", matrix, target)
        for gate, way_to_gate in zip(gates, ways_to_gates, strict=True):
            gated = gate.op.output
            for meeting in way_to_gate.meetings:
                yield from self._parts("g", meeting, _Target(gated, labels.of(gated)))
        for meeting in way.meetings:
            if meeting.op is None or meeting.op.index not in of_gates:
                placed = self._placed(meeting, op, "output", {})
                yield from self._parts("o", placed, target)

    def _way_from_contexts(self, taken: TensorRef) -> Way:
        """Return the way from the contexts to what is projected; those of other attentions end it too."""
        contexts = [turn.stages["context"] for turn in self._attention.turns]
        stops = {context.id for context in contexts}
        for attention, _ in self._run.attentions:
            stops.add(attention.stages["context"].id)
        since = min(map(self._index_of, contexts))
        return Walk(self._graph, stops, since=since).to(taken)

    def _after_joined(self, joined: list[Op]) -> Iterator[Part]:
        """Yield the biases of the output projections of further tokens."""
        for op in joined:
            result = self._graph.after_projection(op)
            walk = Walk(self._graph, ends={op.index}, since=op.index - 1)
            for meeting in walk.to(result).meetings:
                if meeting.kind != "b":
                    continue
                bias = replace(meeting, kind="joined b")
                target = _Target(result, Label(result.shape))
                for part in self._parts("o", bias, target):
                    yield of_no_head(part)

    def _after_output(self, ops: list[Op], matrices: list[Part]) -> Iterator[Part]:
        """Yield the bias of the output, and what else is done to it."""
        if "output" not in self._attention.stages:
            return
        output = self._attention.stages["output"]
        names = {part.parameter.name for part in matrices}
        indices = {op.index for op in ops}
        walk = Walk(self._graph, ends=indices, since=min(indices) - 1)
        for meeting in walk.to(output).meetings:
            if meeting.op in ops and meeting.kind != "b":
                continue
            target = _Target(output, Label(output.shape))
            placed = self._placed(meeting, ops[0], "output", {})
            for part in self._parts("o", placed, target):
                if part.parameter.name not in names:
                    yield of_no_head(part)

    def _way_to_gate(self, gate: Gate) -> Way:
        """Return the way from a gate's input to its factor."""
        ends: set[int] = set()
        for op in gate.projections:
            earlier = earlier_projections(self._graph, op, self._attention.module)
            first = earlier[0] if earlier else op
            ends.add(first.index)
        way = Walk(self._graph, ends=ends).to(gate.factor)
        meetings: list[Meeting] = []
        for meeting in way.meetings:
            is_last = meeting.kind == "before" and meeting.op in gate.projections
            meetings.append(replace(meeting, kind="W") if is_last else meeting)
        return Way(way.ops, meetings)

    # -- from parameters to heads -------------------------------------------------------------------------------------

    def _parts(self, letter: str, meeting: Meeting, target: _Target) -> Iterator[Part]:
        """Yield the parts of the heads of a target in the parameters behind a weight."""
        weight = meeting.weight
        weighing = Walk(self._graph, since=0).to(weight).ops
        self._labels.follow(weighing)
        is_moved = all(op.kind in ("view", "copy") for op in weighing)
        kinds = self._kinds_behind(weight, meeting.kind)
        for parameter in parameters_behind(self._run, [weight]):
            places = self._places(letter, meeting, target, parameter)
            if places is not None and (places.high < 0).all():
                continue  # joined with others in this weight, of which the heads have no row of this one
            kind = kinds.get(parameter.name, meeting.kind)
            heads: dict[int, Indices] = {}
            if kind != "computed":
                heads = self._heads(letter, meeting, target, places, parameter)
            part = self._part(kind, letter, parameter, heads, meeting)
            if not is_moved:
                part = replace(part, moved=False)
            yield self._with_inner_of(part, meeting)

    def _part(
        self,
        kind: str,
        letter: str,
        parameter: Named,
        heads: dict[int, Indices],
        meeting: Meeting,
    ) -> Part:
        """Return a part of the heads in a parameter; of heads with elements in common it is shared."""
        is_shared = have_in_common(heads) if heads else kind not in (*_MATRICES, *_BIASES)
        if self._names.mixes_positions and self._names.num_heads > 1:
            is_shared = True
        weight = meeting.weight
        taps: tuple[int, ...] = ()
        if meeting.op is not None and meeting.op.base_name == "convolution":
            taps = weight.shape[2:]
        has_rank = len(parameter.tensor.shape) == len(weight.shape)
        has_taps = has_rank and kind in (*_MATRICES, "before", "filter")
        return Part(
            kind=kind,
            letter=letter,
            parameter=parameter,
            heads={} if is_shared and letter == "g" else heads,
            is_shared=is_shared,
            taps=len(taps) if has_taps else 0,
            moved=prod(taps) == 1,
        )

    def _with_inner_of(self, part: Part, meeting: Meeting) -> Part:
        """Return a part with the numbers of each feature, if it is of a matrix or of a factor of one."""
        if part.kind in FACTORS:
            return of_whole_rows(part)
        op = meeting.op
        if op is None or not self._graph.is_projection(op):
            return part
        if meeting.weight.id != self._graph.weight_of(op).id:
            return part
        return self._with_inner(part, op)

    def _kinds_behind(self, weight: TensorRef, kind: str) -> dict[str, str]:
        """Return the kinds of parameters that a weight is computed from by more than moving and scaling elements."""
        if kind not in _MATRICES:
            return {}

        def keeps_elements(op: Op) -> bool:
            return not does_more_to_weights(op)

        def multiplies(op: Op) -> bool:
            return op.does("product") or keeps_elements(op)

        moved = self._names_behind(weight, keeps_elements)
        multiplied = self._names_behind(weight, multiplies)
        kinds: dict[str, str] = {}
        for named in parameters_behind(self._run, [weight]):
            if named.name in moved:
                continue
            if named.name not in multiplied:
                kinds[named.name] = "computed"
            else:
                kinds[named.name] = "added factor" if moved else "factor"
        return kinds

    def _names_behind(self, weight: TensorRef, passes: Callable[[Op], bool]) -> set[str]:
        """Return the names of the parameters that a weight is made of, through operations that pass the test."""
        return {named.name for named in parameters_behind(self._run, [weight], passes)}

    def _places(
        self,
        letter: str,
        meeting: Meeting,
        target: _Target,
        parameter: Named,
    ) -> Span | None:
        """Return the places in a parameter that a target is made of; None if they are unknown."""
        tensor = parameter.tensor
        label = self._labels.of(target.tensor)
        if letter == "o" and meeting.op is not None and meeting.kind in _MATRICES:
            label = self._entering(meeting.op)
        return label.places_in(parameter.name, tensor.shape, tensor.stride)

    def _heads(
        self,
        letter: str,
        meeting: Meeting,
        target: _Target,
        places: Span | None,
        parameter: Named,
    ) -> dict[int, Indices]:
        """Return the places of each head's features in a parameter; without their order if they are no features."""
        if places is None:
            return {}
        heads = rows_by_head(places, target.heads, parameter.tensor.stride)
        has_features = meeting.kind in _BY_FEATURE
        # A gate may have one number for all features of a head.
        is_one_number = letter == "g" and all(map(_is_one_number, heads.values()))
        if has_features and not is_one_number:
            return heads
        for head, row in heads.items():
            heads[head] = np.unique(row[row >= 0])
        return heads

    def _entering(self, op: Op) -> Label:
        """Return for each projected feature the first weight element that it is multiplied by."""
        weight = self._graph.weight_of(op)
        rank = len(weight.shape)
        label = self._labels.of(weight)
        if rank < 2:
            return label
        summed, features = self._graph.places_of_weight(op)
        first = np.array([0])
        label = label.taking(features % rank, first)
        if op.base_name == "convolution":
            for place in range(2, rank):
                label = label.taking(place, first)
            ones = [1] * (rank - 2)
            return label.reshaped((weight.shape[summed], *ones))
        if len(self._graph.projected(op).shape) == 1:
            return label.reshaped((max(label.shape),))
        return label.swapped(rank - 2, rank - 1)

    def _with_inner(self, part: Part, op: Op) -> Part:
        """Return a part of a matrix with the count of each feature's numbers, and the step between them."""
        weight, tensor = self._graph.weight_of(op), part.parameter.tensor
        summed, features = self._graph.places_of_weight(op)
        is_of_output = part.letter == "o" and part.kind in _MATRICES
        place = features if is_of_output else summed
        row = self._labels.of(weight).along(place, part.parameter.name)
        places = row.places_in(part.parameter.name, tensor.shape, tensor.stride)
        if places is None:
            return part
        numbers: list[int] = places.low.reshape(-1).tolist()
        count = len(numbers)
        if count < weight.shape[place] or min(numbers, default=0) < 0:
            return part
        step = numbers[1] - numbers[0] if count > 1 else 1
        distance = numbers[-1] - numbers[0]
        if step < 1 or distance != step * (count - 1):
            return part
        return replace(part, inner=(count, step), width=count)


def _is_one_number(row: Indices) -> bool:
    """Return whether all features of a head have the same place."""
    return bool((row == row[0]).all())


def _ids_read(op: Op) -> set[int]:
    """Return the ids of the tensors that an operation reads."""
    return {tensor.id for tensor in op.inputs}


_Sign = tuple[tuple[str | int, ...], ...]
"""The parameters of a head, each with its name and the places of the head in it."""


def _sign(parts: list[Part], head: int) -> _Sign:
    """Return what two heads have in common if they are the same one: their places in the parameters."""
    signs: list[tuple[str | int, ...]] = []
    for part in parts:
        if head in part.heads and part.kind in ("W", "b"):
            places: list[int] = part.heads[head].tolist()
            signs.append((part.parameter.name, *places))
    return tuple(signs)


def _in_order(signs: list[_Sign]) -> list[_Sign]:
    """Return distinct heads, sorted by their rows if they are in one parameter."""
    distinct = list(dict.fromkeys(signs))
    parameters = {sign[0][0] for sign in signs if sign}
    return sorted(distinct) if len(parameters) == 1 else distinct


def _renumbered(part: Part, numbers: Mapping[int, int]) -> Part:
    """Return a part with other numbers of its heads; those without a number are left out."""
    heads: dict[int, Indices] = {}
    for head, row in part.heads.items():
        if head in numbers:
            heads[numbers[head]] = row
    is_shared = have_in_common(heads) if heads else part.is_shared
    return replace(part, heads=heads, is_shared=is_shared)


def _normed(meetings: Iterable[Meeting], way: Way) -> set[int]:
    """Return the ids of the tensors that are made of the results of norms with a gain."""
    gains: list[int] = []
    for meeting in meetings:
        if meeting.op is not None and meeting.kind == "norm":
            gains.append(meeting.op.output.id)
    return made_of(gains, way.ops)


def _is_noise(op: Op) -> bool:
    """Return whether an operation makes a tensor in the shape of another one."""
    return op.base_name.endswith("_like") or op.base_name.startswith("new_")


def _reaches(meeting: Meeting, adapters: Mapping[int, set[int]], present: set[int]) -> bool:
    """Return whether a projection of an adapter reaches the heads of a side: its last one has rows there."""
    if meeting.op is None:
        return True
    index = meeting.op.index
    if index not in present:
        return False
    if index in adapters:
        return True
    reaching = [adapters[last] for last in adapters.keys() & present]
    return any(index in earlier for earlier in reaching)

"""Find the rows of W_q, W_k, W_v and the columns of W_o that belong to each head, in the parameters of a module.

The indices of a parameter's elements are followed (`graph.layouts`) to the heads. There the axes of the stage give the
head and the feature of each element. With `q, k, v = qkv(x).chunk(3, -1)` and 3 heads of 4 features, the keys of head 1
are rows 16 to 19 of the weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..graph.attention import Attention
from ..graph.dataflow import made_of
from ..graph.gates import Gate, gates_of
from ..graph.layout import Indices, Layout, Source, Span
from ..graph.layouts import Layouts
from ..graph.projections import earlier_projections, joined_projections
from ..record.ops import Named, Op, TensorRef
from .axes import AxisNames
from .heads import Codes, codes_in, codes_of, rows_of
from .named_run import NamedRun
from .pattern import dims_of
from .projection import Part, Projection, have_in_common, is_elsewhere, merged, of_no_head

SIDES = {"q": "query", "k": "key", "v": "value", "o": "output"}
"""The letter of a part, and its projection."""
_MATRICES, _BIASES = ("W", "joined W"), ("b", "joined b")
_LONGEST = 600
"""Operations after which a walk gives up: projections need fewer."""


def projections(run: NamedRun) -> list[list[Projection]]:
    """Return for each attention its matrices and biases, with the place of each head's part.

    The module is not run again, and the tensors of the run need not be kept. A side without a projection is absent.
    """
    every = []
    for (_, names), (parts, serves) in zip(run.attentions, parts_of(run), strict=True):
        named: dict[str, list[Part]] = {}
        for part in parts:
            if part.name and not part.is_vector:
                named.setdefault(part.name, []).append(part)
        every.append([_projection(name, of_name, names, serves) for name, of_name in named.items()])
    return every


Serves = tuple[tuple[int, ...], ...]


def _projection(name: str, parts: list[Part], names: AxisNames, serves: Serves) -> Projection:
    first, single = parts[0], name == "b_o"
    count = 1 if single else num_heads(names, name[-1])
    width = max((len(places) for part in parts for places in part.heads.values()), default=0)
    covered = np.zeros((count, width), int)
    for part in parts:
        for head, places in part.heads.items():
            if head < count and len(places) == width:
                covered[head] += places >= 0
                covered[head] += len(np.unique(places[places >= 0])) < (places >= 0).sum()  # used twice
    embed = first.width if first.inner is not None else 0
    shape = (width,) if single else (count, width, embed) if first.kind == "W" else (count, width)
    is_whole = (
        width > 0
        and bool((covered == 1).all())
        and all(head < count for part in parts for head in part.heads)
        and all(part.moved and not part.is_shared for part in parts)
        and all((part.inner is not None) == (part.kind == "W") and part.width == first.width for part in parts)
    )
    return Projection(name, shape, is_whole, serves if name[-1] in "kv" else (), tuple(parts))


def num_heads(names: AxisNames, letter: str) -> int:
    """Return the number of heads of `q`, `k`, `v` or `o`."""
    return names.num_kv_heads if letter in "kv" else names.num_heads


def parts_at(run: NamedRun, place: int) -> tuple[list[Part], Serves]:
    """Return the parts of an attention in the parameters, and the query heads that use each key head.

    They are computed once for a run.
    """
    known: dict[int, tuple[list[Part], Serves]] = vars(run).setdefault("_parts", {})
    if place not in known:
        known[place] = _PartsOfAttention(run, *run.attentions[place]).all()
    return known[place]


def parts_of(run: NamedRun) -> list[tuple[list[Part], Serves]]:
    """Return what `parts_at` does, for each attention of a run."""
    return [parts_at(run, place) for place in range(len(run.attentions))]


def parameters_behind(
    run: NamedRun, tensors: Iterable[TensorRef], passes: Callable[[Op], bool] = lambda op: True
) -> list[Named]:
    """Return the parameters that tensors are made of, through operations that pass the test."""
    parameters: dict[str, Named] = {}
    for tensor in tensors:
        for step in run.graph.back(tensor, passes):
            if run.recording.producer(step.tensor) is None:
                for named in run.graph.parameters_in(step.tensor.storage):
                    parameters[named.name] = named
    return list(parameters.values())


@dataclass(frozen=True)
class _Meeting:
    """An operation that applies a parameter on the way to the heads; the parameter is at most moved or scaled."""

    op: Op | None
    """None if the heads are made of parameters alone."""
    weight: TensorRef
    kind: str


class _PartsOfAttention:
    """Finds the parts of one attention in the parameters."""

    def __init__(self, run: NamedRun, attention: Attention, names: AxisNames) -> None:
        self._run, self._graph, self._attention, self._names = run, run.graph, attention, names
        self._turns = attention.branches or (attention,)
        self._serves: Serves = ()
        self._has_joined = False
        self._layouts = Layouts(run.graph)

    def all(self) -> tuple[list[Part], Serves]:
        """Return all parts of the heads and the output, and the query heads that use each key head."""
        heads, shared = self._names.num_heads, self._names.num_kv_heads
        if shared < heads:
            words = [word for dim in dims_of(self._names.of_stage("q_heads")) for word in dim]
            inner = "group" in words and self._names.head_order.index("group") == 1
            self._serve([head % shared if inner else head * shared // heads for head in range(heads)])
        parts = [*self._side("q"), *self._side("k"), *self._side("v"), *self._output()]
        # A bias that is joined from several has elements of one side in each.
        return [part for part in parts if part.heads or not is_elsewhere(part, parts)], self._serves

    def _serve(self, users: list[int]) -> None:
        counted = range(self._names.num_kv_heads)
        self._serves = tuple(tuple(head for head, user in enumerate(users) if user == key) for key in counted)

    # -- queries, keys and values -------------------------------------------------------------------------------------

    def _side(self, letter: str) -> list[Part]:
        """Return the parts of the queries, keys or values, by head."""
        side, stage, parts = SIDES[letter], f"{letter}_heads", list[Part]()
        given = [turn.stages[name] for turn in self._turns for name in ("query", "key", "value") if name in turn.stages]
        stops = {tensor.id for tensor in given if not self._graph.is_weight(tensor)}
        since = [self._made_at(turn.stages[side]) for turn in self._turns if side in turn.stages]
        for number, turn in enumerate(self._turns):
            op = turn.projections.get(side) or self._attention.projections.get(side)
            ends = {op.index} if op is not None and not self._attention.earlier.get(side) else set()
            codes = codes_of(self._attention, self._names, turn, stage)
            way, meetings = self._way(turn.stages[stage], stops, ends, min(since, default=-1))
            joined = {} if op is None else joined_projections(self._graph, op, way)
            self._has_joined |= bool(joined) and letter == "q"
            placed_meetings = [self._placed(meeting, op, side, joined) for meeting in meetings]
            gains = [placed.op.output.id for placed in placed_meetings if placed.op and placed.kind == "norm"]
            gates = [] if op is None else gates_of(self._graph, [op.output], way)
            beside = {step.index for gate in gates for step in self._gate_way(gate)[0]}
            normed = made_of(gains, way)
            for placed in placed_meetings:
                if placed.op and placed.op.index in beside:
                    placed = replace(placed, kind="gate")
                elif placed.kind in ("b", "joined b") and placed.op and any(t.id in normed for t in placed.op.inputs):
                    placed = replace(placed, kind="shift")  # the bias of a norm, not of the projection
                of_meeting = self._parts(letter, placed, way, turn.stages[stage], codes, number)
                is_matrix = placed.kind == "W" and op is not None
                parts += [self._with_reads(part, op, turn) for part in of_meeting] if is_matrix and op else of_meeting
        return self._numbered(letter, merged(parts))

    def _made_at(self, tensor: TensorRef) -> int:
        return self._run.recording.producers.get(tensor.id, -1)

    def _placed(
        self, meeting: _Meeting, projection: Op | None, side: str, joined: Mapping[int, set[int]] | None = None
    ) -> _Meeting:
        """Return a meeting with its kind, decided by its place before or after the projection or a joined one."""
        op, kind = meeting.op, meeting.kind
        if projection is None or op is None:
            return meeting
        reads, projects = {tensor.id for tensor in op.inputs}, self._graph.is_projection(op)
        after_joined = any(reads & ids for ids in (joined or {}).values())
        if kind in ("norm", "shift", "b", "filter") and op.index < projection.index and not (projects or after_joined):
            kind = f"{'shift' if kind == 'b' else kind} before"
        elif op is projection:
            kind = "W" if kind == "before" else kind
        elif op.index in (joined or {}):
            kind = "joined W" if kind == "before" else "joined b"
        elif kind == "b" and after_joined and not projects:
            kind = "joined b"
        elif projects and (kind == "before" or op.index < projection.index):
            shared = self._names.num_kv_heads < self._names.num_heads and side in ("query", "output")
            beside = "absorbed" if shared and self._graph.is_by_head(op) else "beside"
            kind = "before" if op in self._attention.earlier.get(side, ()) else beside
        return replace(meeting, kind=kind)

    def _way(self, start: TensorRef, stops: set[int], ends: set[int], since: int) -> tuple[list[Op], list[_Meeting]]:
        """Return the operations on the way back to `stops`, in order, and the meetings with parameters on it.

        The products in `ends` end the way. At any other projection the walk goes on to the projected tensor. Of tensors
        made by the operation `since` or earlier, only weights are followed.
        """
        graph, ops, meetings, beyond = self._graph, dict[int, Op](), list[_Meeting](), set[int]()
        queue = deque([start])
        if graph.is_weight(start):
            meetings.append(_Meeting(None, start, "learned"))
        while queue and len(ops) < _LONGEST:
            tensor = queue.popleft()
            op = self._run.recording.producer(tensor)
            weight = graph.is_weight(tensor)
            follows = op is not None and op.index > since and (tensor.id not in stops or op.index in ends)
            if op is None or op.index in ops or not (weight or follows):
                continue
            ops[op.index] = op
            projects = graph.is_projection(op) and not weight
            projected, factor = (graph.projected(op), graph.weight_of(op)) if projects else (None, None)
            is_number = op.base_name in ("sum", "mean") and not graph.comes_from_inputs(tensor)
            for read in op.inputs:
                beyond |= {read.id} if read is projected or tensor.id in beyond else set()
                if read is projected:
                    queue += [read] if op.index not in ends else []
                    meetings += [_Meeting(None, read, "learned")] if graph.is_weight(read) else []
                elif weight or graph.is_weight(read) or not (projects or read.dtype == "bool" or is_number):
                    queue.append(read)
                    if not weight and graph.is_weight(read) and op.base_name not in ("zero_", "fill_"):
                        further = read is factor or tensor.id in beyond
                        kind = _kind(op, read) if not projects else "before" if further else "b"
                        meetings.append(_Meeting(op, read, kind))
        return [ops[index] for index in sorted(ops)], meetings

    def _with_reads(self, part: Part, op: Op, turn: Attention) -> Part:
        """Return a part of a matrix with the input features that it reads, if it does not read all."""
        given = turn.stages.get(SIDES[part.letter])
        if given is None or not given.shape or part.inner is None or self._attention.earlier:
            return part
        number = part.inner[0]
        if number >= given.shape[-1] or op.base_name == "convolution":
            return part
        source, taken = Source("features", 0), self._graph.projected(op)
        numbers = np.arange(given.shape[-1]).reshape([1] * (len(given.shape) - 1) + [-1])
        layouts = Layouts(self._graph, [(given, Layout(given.shape, {source: Span.of(numbers)}))])
        layouts.follow(self._way(taken, {given.id}, set(), self._made_at(given))[0])
        span = layouts.of(taken).spans.get(source)
        features = [] if span is None else span.low.reshape(-1, span.low.shape[-1])[0].tolist()
        if not features or features != [*range(features[0], features[0] + number)] or features[0] < 0:
            return part
        return replace(part, reads=dict.fromkeys(part.heads, features[0]), width=given.shape[-1])

    def _numbered(self, letter: str, parts: list[Part]) -> list[Part]:
        """Return the parts with key/value heads counted once each, if several heads turn out to be the same one."""
        shared, count = num_heads(self._names, letter), 1 + max((head for p in parts for head in p.heads), default=0)
        if shared >= count or letter not in "kv":
            return parts
        signs = [
            tuple((p.parameter.name, *p.heads[head].tolist()) for p in parts if head in p.heads and p.kind in "Wb")
            for head in range(count)
        ]
        apart = [*dict.fromkeys(signs)]  # sorted by rows below, if they are in one parameter
        if len({part[:1] for sign in signs for part in sign[:1]}) == 1:
            apart.sort()
        if len(apart) != shared:
            return parts
        self._serve([apart.index(sign) for sign in signs])
        chosen = {signs.index(sign): number for number, sign in enumerate(apart)}
        parts = [replace(p, heads={chosen[h]: row for h, row in p.heads.items() if h in chosen}) for p in parts]
        return [replace(p, is_shared=have_in_common(p.heads)) if p.heads else p for p in parts]

    # -- the output ---------------------------------------------------------------------------------------------------

    def _output(self) -> list[Part]:
        """Return the parts of the output: the columns of each head, and the bias."""
        output, contexts = self._attention.stages.get("output"), [turn.stages["context"] for turn in self._turns]
        ops = [turn.projections["output"] for turn in (*self._turns, self._attention) if "output" in turn.projections]
        ops = [*{op.index: op for op in ops}.values()]
        if output is None or not ops:
            return []
        parts: list[Part] = []
        of_turns = [codes_of(self._attention, self._names, turn, "context") for turn in self._turns]
        joined, ends = self._joined_outputs(contexts, ops), [turn.stages["context"] for turn in self._attention.turns]
        since = min(map(self._made_at, ends))
        stops = {attention.stages["context"].id for attention, _ in self._run.attentions} | {t.id for t in ends}
        for op in (*ops, *joined):
            taken, weight = self._graph.projected(op), self._graph.weight_of(op)
            way, meetings = self._way(taken, stops, set(), since)
            codes = self._codes_at(taken, way, contexts, of_turns)
            weighing = self._way(weight, set(), set(), 0)[0]
            kind = "joined W" if op in joined else "W"
            parts += self._parts("o", _Meeting(op, weight, kind), weighing, taken, codes)
            beside: set[int] = set()
            for gate in gates_of(self._graph, contexts, way):
                gate_way, of_gate = self._gate_way(gate)
                beside |= {step.index for step in gate_way}
                gated = gate.op.output, self._codes_at(gate.op.output, way, contexts, of_turns)
                for meeting in of_gate:
                    parts += self._parts("g", meeting, [*gate_way, gate.op], *gated)
            for meeting in (meeting for meeting in meetings if meeting.op is None or meeting.op.index not in beside):
                parts += self._parts("o", self._placed(meeting, op, "output"), way, taken, codes)
        for op in joined:
            made = self._graph.after_projection(op)
            for meeting in self._way(made, set(), {op.index}, op.index - 1)[1]:
                if meeting.kind == "b":
                    added = self._parts("o", replace(meeting, kind="joined b"), [], made, None)
                    parts += map(of_no_head, added)
        known = {part.parameter.name for part in parts}
        for meeting in self._way(output, set(), {op.index for op in ops}, min(op.index for op in ops) - 1)[1]:
            if meeting.op not in ops or meeting.kind == "b":
                added = self._parts("o", self._placed(meeting, ops[0], "output"), [], output, None)
                parts += [of_no_head(part) for part in added if part.parameter.name not in known]
        return merged(parts)

    def _joined_outputs(self, contexts: list[TensorRef], ops: list[Op]) -> list[Op]:
        """Return the output projections of further tokens, if such tokens have queries of their own."""
        found: dict[int, Op] = {}
        for op, _ in (each for context in contexts for each in self._graph.forward(context, self._graph.moves)):
            if self._has_joined and op not in ops and self._graph.is_projection(op):
                found[op.index] = op
        return [*found.values()]

    def _gate_way(self, gate: Gate) -> tuple[list[Op], list[_Meeting]]:
        """Return the operations from a gate's input to its factor, in order, and the parameters that they apply."""
        last, module = gate.projections, self._attention.module
        ends = {(*earlier_projections(self._graph, op, module), op)[0].index for op in last}
        way, meetings = self._way(gate.factor, set(), ends, -1)
        return way, [replace(at, kind="W") if at.kind == "before" and at.op in last else at for at in meetings]

    def _codes_at(
        self, taken: TensorRef, way: list[Op], contexts: list[TensorRef], of_turns: list[Codes | None]
    ) -> Codes | None:
        """Return the head and feature of each projected element, from the contexts of all turns."""
        known = [codes for codes in of_turns if codes is not None]
        if len(known) < len(of_turns):
            return None
        pairs = zip(contexts, known, strict=True)
        layouts = Layouts(
            self._graph, [(context, codes.layout(context.shape, turn)) for turn, (context, codes) in enumerate(pairs)]
        )
        layouts.follow(way)
        return codes_in(layouts.of(taken), known[0], len(known))

    # -- from parameters to heads -------------------------------------------------------------------------------------

    def _parts(
        self, letter: str, meeting: _Meeting, way: list[Op], target: TensorRef, codes: Codes | None, turn: int = 0
    ) -> Iterator[Part]:
        """Yield the parts of these heads in the parameters behind a weight.

        Args:
            letter: the side of the heads.
            meeting: the operation that applies the weight.
            way: the operations that lead to the target.
            target: the heads; for W_o the projected tensor.
            codes: head and feature of each element of the target; None if unknown.
            turn: the number of the turn in a loop over heads.
        """
        op, kind = meeting.op, meeting.kind
        taps = meeting.weight.shape[2:] if op is not None and op.base_name == "convolution" else ()
        weighing = self._way(meeting.weight, set(), set(), 0)[0]
        moved = prod(taps) == 1 and all(op.kind in ("view", "copy") for op in weighing)
        self._layouts.follow(way)
        self._layouts.follow(weighing)
        for parameter in parameters_behind(self._run, [meeting.weight]):
            heads: dict[int, Indices] = {}
            if codes is not None:
                entering = letter == "o" and kind in _MATRICES and op is not None
                layout = self._layouts.entering(op) if entering and op else self._layouts.of(target)
                places = layout.places_in(parameter.name, parameter.tensor.shape, parameter.tensor.stride)
                if places is not None:
                    rows = enumerate(rows_of(places, codes, parameter.tensor.stride), start=turn * codes.heads)
                    heads = {head: row for head, row in rows if (row >= 0).any()}
                once = letter == "g" and all((row == row[0]).all() for row in heads.values())
                if kind not in (*_MATRICES, *_BIASES, "appended", "prepended") or once:
                    heads = {head: np.unique(row[row >= 0]) for head, row in heads.items()}
            mixed = self._names.mixes_positions and self._names.num_heads > 1
            is_shared = mixed or (have_in_common(heads) if heads else kind not in (*_MATRICES, *_BIASES))
            heads = {} if is_shared and letter == "g" else heads
            same_rank = len(parameter.tensor.shape) == len(meeting.weight.shape)
            of_taps = len(taps) if same_rank and kind in (*_MATRICES, "before", "filter") else 0
            part = Part(kind, letter, parameter, heads, is_shared, taps=of_taps, moved=moved)
            projects = op is not None and self._graph.is_projection(op)
            if op is not None and projects and meeting.weight.id == self._graph.weight_of(op).id:
                part = self._with_inner(part, op)
            yield part

    def _with_inner(self, part: Part, op: Op) -> Part:
        """Return a part of a matrix with the count of each feature's numbers, and the step between them."""
        weight, tensor = self._graph.weight_of(op), part.parameter.tensor
        place = self._graph.places_of_weight(op)[part.letter == "o" and part.kind in _MATRICES]
        number = weight.shape[place]
        row = self._layouts.of(weight).along(place, part.parameter.name)
        places = row.places_in(part.parameter.name, tensor.shape, tensor.stride)
        if places is None:
            return part
        known = places.low.reshape(-1)
        if (known < 0).any():
            return part
        step = int(known[1] - known[0]) if len(known) > 1 else 1
        if len(known) < number or step < 1 or known[-1] - known[0] != step * (number - 1):
            return part
        return replace(part, inner=(number, step), width=number)


def _kind(op: Op, parameter: TensorRef) -> str:
    """Return the kind of use of a parameter by an operation other than a projection."""
    if op.does("joins"):
        return "prepended" if op.base_name == "cat" and op.inputs[0] is parameter else "appended"
    if op.does("convolution"):  # of each channel by itself
        return "filter" if parameter is op.inputs[1] else "shift"
    if op.does("norms"):
        gain_and_bias = [arg for arg in op.args[1:] if not isinstance(arg, tuple)]  # a layer norm has a shape first
        return "shift" if parameter in gain_and_bias[1:2] else "norm"
    name = op.base_name.rstrip("_")
    if name == "addcmul":
        return "b" if parameter is op.inputs[0] else "norm"
    return {"add": "b", "sub": "b", "mul": "norm", "div": "norm", "copy": "appended"}.get(name, "learned")

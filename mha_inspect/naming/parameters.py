"""Find the rows of W_q, W_k, W_v and the columns of W_o that belong to each head, in the parameters of a module.

The indices of a parameter's elements are followed (`graph.layouts`) to the heads. There the axes of the stage give the
head and the feature of each element. With `q, k, v = qkv(x).chunk(3, -1)` and 3 heads of 4 features, the keys of head 1
are rows 16 to 19 of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..graph.attention import Attention
from ..graph.computed_weights import does_more_to_weights
from ..graph.dataflow import made_of
from ..graph.gates import Gate, gates_of
from ..graph.layout import Indices, Layout, Source, Span
from ..graph.layouts import Layouts
from ..graph.projections import earlier_projections, joined_projections
from ..graph.ways import Meeting, Walk, Way
from ..record.ops import Named, Op, TensorRef
from .axes import AxisNames
from .heads import Codes, codes_in, codes_of, rows_of
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
    heads = {head for part in parts for head in part.heads}
    # In a loop over heads, heads with one key may have values of their own.
    count = 1 if single else max(num_heads(names, name[-1]), 1 + max(heads, default=0))
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
        and all(part.moved and not part.is_shared and not have_in_common(part.heads) for part in parts)
        and all((part.inner is not None) == (part.kind == "W") and part.width == first.width for part in parts)
    )
    shared = serves if name[-1] in "kv" and count == len(serves) else ()
    return Projection(name, shape, is_whole, shared, tuple(parts))


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
class _Target:
    """A tensor by heads, to which parameters are followed."""

    tensor: TensorRef
    codes: Codes | None
    """The head and feature of each element; None if unknown."""
    layouts: Layouts
    """What the tensors on the way to it are made of."""
    turn: int = 0
    """The number of the turn in a loop over heads."""


class _PartsOfAttention:
    """Finds the parts of one attention in the parameters."""

    def __init__(self, run: NamedRun, attention: Attention, names: AxisNames) -> None:
        self._run, self._graph, self._attention, self._names = run, run.graph, attention, names
        self._turns = attention.branches or (attention,)
        self._serves: Serves = ()
        self._has_joined = False

    def all(self) -> tuple[list[Part], Serves]:
        """Return all parts of the heads and the output, and the query heads that use each key head."""
        heads, shared = self._names.num_heads, self._names.num_kv_heads
        if shared < heads:
            words = [word for dim in dims_of(self._names.of_stage("q_heads")) for word in dim]
            inner = "group" in words and self._names.head_order.index("group") == 1
            self._serve([head % shared if inner else head * shared // heads for head in range(heads)])
        parts = [*self._side("q"), *self._side("k"), *self._side("v"), *self._output()]
        return parts, self._serves

    def _serve(self, users: list[int]) -> None:
        counted = range(self._names.num_kv_heads)
        self._serves = tuple(tuple(head for head, user in enumerate(users) if user == key) for key in counted)

    # -- queries, keys and values -------------------------------------------------------------------------------------

    def _side(self, letter: str) -> list[Part]:
        """Return the parts of the queries, keys or values, by head."""
        side, parts = SIDES[letter], list[Part]()
        given = [turn.stages[name] for turn in self._turns for name in ("query", "key", "value") if name in turn.stages]
        stops = {tensor.id for tensor in given if not self._graph.is_weight(tensor)}
        since = min((self._made_at(turn.stages[side]) for turn in self._turns if side in turn.stages), default=-1)
        layouts = Layouts(self._graph)
        for number, turn in enumerate(self._turns):
            op = turn.projections.get(side) or self._attention.projections.get(side)
            ends = {op.index} if op is not None and not self._attention.earlier.get(side) else set()
            heads, codes = turn.stages[f"{letter}_heads"], self._codes_of(turn, f"{letter}_heads")
            way = Walk(self._graph, stops, ends, since).to(heads)
            layouts.follow(way.ops)
            target = _Target(heads, codes, layouts, number)
            adapters = {} if op is None else self._adapters(op, way)
            of_meetings = [
                (meeting, [*self._parts(letter, meeting, target)])
                for meeting in self._meetings(letter, op, way, adapters)
            ]
            present = {meeting.op.index for meeting, found in of_meetings if meeting.op is not None and found}
            for meeting, found in of_meetings:
                if meeting.kind == "added factor" and not _reaches(meeting, adapters, present):
                    continue
                for part in found:
                    is_matrix = meeting.kind == "W" and op is not None
                    parts.append(self._with_reads(part, op, turn) if is_matrix and op else part)
        return self._numbered(letter, with_projections_of_heads(merged(parts)))

    def _made_at(self, tensor: TensorRef) -> int:
        return self._run.recording.producers.get(tensor.id, -1)

    def _codes_of(self, turn: Attention, stage: str) -> Codes | None:
        return codes_of(self._attention, self._names, turn, stage)

    def _meetings(
        self, letter: str, projection: Op | None, way: Way, adapters: Mapping[int, set[int]]
    ) -> Iterator[Meeting]:
        """Yield the meetings of a side with their kinds, also those that other meetings decide."""
        joined: dict[int, set[int]] = {}
        beside: set[int] = set()
        if projection is not None:
            joined = joined_projections(self._graph, projection, way.ops)
            for gate in gates_of(self._graph, [projection.output], way.ops):
                beside.update(op.index for op in self._way_to_gate(gate).ops)
        self._has_joined |= bool(joined) and letter == "q"
        placed = [self._placed(meeting, projection, SIDES[letter], joined) for meeting in way.meetings]
        of_adapters = set[int]().union(adapters, *adapters.values())
        gains = [meeting.op.output.id for meeting in placed if meeting.op and meeting.kind == "norm"]
        normed = made_of(gains, way.ops)
        for meeting in placed:
            if meeting.op is None:
                yield meeting
            elif meeting.op.index in of_adapters and meeting.kind == "beside":
                yield replace(meeting, kind="added factor")
            elif meeting.op.index in beside:
                yield replace(meeting, kind="gate")
            elif meeting.kind in _BIASES and any(tensor.id in normed for tensor in meeting.op.inputs):
                yield replace(meeting, kind="shift")  # the bias of a norm, not of the projection
            else:
                yield meeting

    def _placed(
        self, meeting: Meeting, projection: Op | None, side: str, joined: Mapping[int, set[int]] | None = None
    ) -> Meeting:
        """Return a meeting with its kind, decided by its place before or after the projection or a joined one."""
        op, kind, joined = meeting.op, meeting.kind, joined or {}
        if projection is None or op is None:
            return meeting
        reads, projects = {tensor.id for tensor in op.inputs}, self._graph.is_projection(op)
        after_joined = any(reads & ids for ids in joined.values())
        is_before = op.index < projection.index
        if kind in _BEFORE and is_before and not (projects or after_joined):
            kind = _BEFORE[kind]
        elif op is projection:
            kind = "W" if kind == "before" else kind
        elif op.index in joined:
            kind = "joined W" if kind == "before" else "joined b"
        elif kind == "b" and after_joined and not projects:
            kind = "joined b"
        elif projects and (kind == "before" or is_before):
            kind = self._kind_of_further(op, side)
        return replace(meeting, kind=kind)

    def _kind_of_further(self, op: Op, side: str) -> str:
        """Return the kind of use of a projection that is not the last one."""
        if op in self._attention.earlier.get(side, ()):
            return "before"
        shared = self._names.num_kv_heads < self._names.num_heads and side in ("query", "output")
        return "absorbed" if shared and self._graph.is_by_head(op) else "beside"

    def _adapters(self, projection: Op, way: Way) -> dict[int, set[int]]:
        """Return the low-rank projections whose result is added to that of the projection, as in LoRA.

        Each comes with the indices of the projections before it.
        """
        adapters: dict[int, set[int]] = {}
        ops = [op for op in way.ops if not op.base_name.endswith("_like") and not op.base_name.startswith("new_")]
        own = made_of({projection.output.id}, ops)
        added = [{tensor.id for tensor in op.inputs} for op in ops if op.base_name.rstrip("_") == "add"]
        for op in (meeting.op for meeting in way.meetings):
            if op is None or op is projection or not self._graph.is_projection(op):
                continue
            made = made_of({op.output.id}, ops)
            earlier = earlier_projections(self._graph, op, self._attention.module)
            if earlier and any(read & own and read & made - own for read in added):
                adapters[op.index] = {each.index for each in earlier}
        return adapters

    def _with_reads(self, part: Part, op: Op, turn: Attention) -> Part:
        """Return a part of a matrix with the input features that it reads, if it does not read all."""
        given = turn.stages.get(SIDES[part.letter])
        if given is None or not given.shape or part.inner is None or self._attention.earlier:
            return part
        number, whole = part.inner[0], given.shape[-1]
        if number >= whole or op.base_name == "convolution":
            return part
        source, taken = Source("features", 0), self._graph.projected(op)
        numbers = np.arange(whole).reshape([1] * (len(given.shape) - 1) + [-1])
        layouts = Layouts(self._graph, [(given, Layout(given.shape, {source: Span.of(numbers)}))])
        layouts.follow(Walk(self._graph, {given.id}, since=self._made_at(given)).to(taken).ops)
        span = layouts.of(taken).spans.get(source)
        if span is None:
            return part
        first, *others = span.low.reshape(-1, span.low.shape[-1])[0].tolist()
        if first < 0 or others != [*range(first + 1, first + number)]:
            return part
        return replace(part, reads=dict.fromkeys(part.heads, first), width=whole)

    def _numbered(self, letter: str, parts: list[Part]) -> list[Part]:
        """Return the parts with key/value heads counted once each, if several heads turn out to be the same one."""
        count = 1 + max((head for p in parts for head in p.heads), default=0)
        if letter not in "kv" or (num_heads(self._names, letter) >= count and not self._attention.branches):
            return parts
        signs = [
            tuple((p.parameter.name, *p.heads[head].tolist()) for p in parts if head in p.heads and p.kind in "Wb")
            for head in range(count)
        ]
        apart = [*dict.fromkeys(signs)]  # sorted by rows below, if they are in one parameter
        if len({part[:1] for sign in signs for part in sign[:1]}) == 1:
            apart.sort()
        if len(apart) != self._names.num_kv_heads:
            # In a loop, some heads may have one value, and keys of their own: these are counted like the queries.
            return [replace(p, is_shared=False) for p in parts] if self._attention.branches else parts
        if len(apart) == count:
            return parts
        self._serve([apart.index(sign) for sign in signs])
        chosen = {signs.index(sign): number for number, sign in enumerate(apart)}
        parts = [replace(p, heads={chosen[h]: row for h, row in p.heads.items() if h in chosen}) for p in parts]
        return [replace(p, is_shared=have_in_common(p.heads)) if p.heads else p for p in parts]

    # -- the output ---------------------------------------------------------------------------------------------------

    def _output(self) -> list[Part]:
        """Return the parts of the output: the columns of each head, and the bias."""
        turns = [turn for turn in (*self._turns, self._attention) if "output" in turn.projections]
        every = [*(turn.projections["output"] for turn in turns), *self._attention.summed]
        ops = [*{op.index: op for op in every}.values()]
        if not ops or not ("output" in self._attention.stages or self._attention.summed):
            return []
        joined = self._joined_outputs(ops)
        codes = [self._codes_of(turn, "context") for turn in self._turns]
        parts = [part for op in ops for part in self._columns(op, "W", codes)]
        parts += [part for op in joined for part in self._columns(op, "joined W", codes)]
        return merged([*parts, *self._after_joined(joined), *self._after_output(ops, parts)])

    def _contexts(self) -> list[TensorRef]:
        return [turn.stages["context"] for turn in self._turns]

    def _joined_outputs(self, ops: list[Op]) -> list[Op]:
        """Return the output projections of further tokens, if such tokens have queries of their own."""
        found: dict[int, Op] = {}
        for context in self._contexts() if self._has_joined else ():
            for op, _ in self._graph.forward(context, self._graph.moves):
                if op not in ops and self._graph.is_projection(op):
                    found[op.index] = op
        return [*found.values()]

    def _columns(self, op: Op, kind: str, of_turns: list[Codes | None]) -> Iterator[Part]:
        """Yield the parts of a projection of the contexts, and of what is done to these before."""
        ends = [turn.stages["context"] for turn in self._attention.turns]
        stops = {attention.stages["context"].id for attention, _ in self._run.attentions} | {t.id for t in ends}
        taken, weight = self._graph.projected(op), self._graph.weight_of(op)
        way = Walk(self._graph, stops, since=min(map(self._made_at, ends))).to(taken)
        gates = [(gate, self._way_to_gate(gate)) for gate in gates_of(self._graph, self._contexts(), way.ops)]
        of_gates = {op.index: op for _, to_gate in gates for op in to_gate.ops}
        every = {op.index: op for op in way.ops} | of_gates
        layouts = Layouts(self._graph)
        layouts.follow([every[index] for index in sorted(every)])
        target = _Target(taken, self._codes_at(taken, way, of_turns), layouts)
        yield from self._parts("o", Meeting(op, weight, kind), target)
        for gate, to_gate in gates:
            gated = gate.op.output
            of_gate = _Target(gated, self._codes_at(gated, way, of_turns), layouts)
            for meeting in to_gate.meetings:
                yield from self._parts("g", meeting, of_gate)
        for meeting in way.meetings:
            if meeting.op is None or meeting.op.index not in of_gates:
                yield from self._parts("o", self._placed(meeting, op, "output"), target)

    def _after_joined(self, joined: list[Op]) -> Iterator[Part]:
        """Yield the biases of the output projections of further tokens."""
        for op in joined:
            made = self._graph.after_projection(op)
            for meeting in Walk(self._graph, ends={op.index}, since=op.index - 1).to(made).meetings:
                if meeting.kind == "b":
                    target = _Target(made, None, Layouts(self._graph))
                    added = self._parts("o", replace(meeting, kind="joined b"), target)
                    yield from map(of_no_head, added)

    def _after_output(self, ops: list[Op], known: list[Part]) -> Iterator[Part]:
        """Yield the bias of the output, and what else is done to it."""
        if "output" not in self._attention.stages:
            return
        output, names = self._attention.stages["output"], {part.parameter.name for part in known}
        indices = {op.index for op in ops}
        for meeting in Walk(self._graph, ends=indices, since=min(indices) - 1).to(output).meetings:
            if meeting.op not in ops or meeting.kind == "b":
                target = _Target(output, None, Layouts(self._graph))
                for part in self._parts("o", self._placed(meeting, ops[0], "output"), target):
                    if part.parameter.name not in names:
                        yield of_no_head(part)

    def _way_to_gate(self, gate: Gate) -> Way:
        """Return the way from a gate's input to its factor."""
        last, module = gate.projections, self._attention.module
        ends = {(*earlier_projections(self._graph, op, module), op)[0].index for op in last}
        way = Walk(self._graph, ends=ends).to(gate.factor)
        is_last = [meeting.kind == "before" and meeting.op in last for meeting in way.meetings]
        kinds = ["W" if of_last else at.kind for of_last, at in zip(is_last, way.meetings, strict=True)]
        return Way(way.ops, [replace(at, kind=kind) for at, kind in zip(way.meetings, kinds, strict=True)])

    def _codes_at(self, taken: TensorRef, way: Way, of_turns: list[Codes | None]) -> Codes | None:
        """Return the head and feature of each projected element, from the contexts of all turns."""
        known = [codes for codes in of_turns if codes is not None]
        if len(known) < len(of_turns):
            return None
        contexts = enumerate(zip(self._contexts(), known, strict=True))
        given = [(context, codes.layout(context.shape, turn)) for turn, (context, codes) in contexts]
        layouts = Layouts(self._graph, given)
        layouts.follow(way.ops)
        return codes_in(layouts.of(taken), known[0], len(known))

    # -- from parameters to heads -------------------------------------------------------------------------------------

    def _parts(self, letter: str, meeting: Meeting, target: _Target) -> Iterator[Part]:
        """Yield the parts of the heads of a target in the parameters behind a weight."""
        op, kind, weight = meeting.op, meeting.kind, meeting.weight
        taps = weight.shape[2:] if op is not None and op.base_name == "convolution" else ()
        weighing = Walk(self._graph, since=0).to(weight).ops
        target.layouts.follow(weighing)
        kinds = self._kinds_behind(weight, kind)
        for parameter in parameters_behind(self._run, [weight]):
            kind = kinds.get(parameter.name, meeting.kind)
            places = self._places(letter, meeting, target, parameter)
            if places is not None and (places.high < 0).all():
                continue  # joined with others in this weight, of which the heads have no row of this one
            heads = {} if kind == "computed" else self._heads(letter, meeting, target, places, parameter)
            is_shared = have_in_common(heads) if heads else kind not in (*_MATRICES, *_BIASES)
            is_shared |= self._names.mixes_positions and self._names.num_heads > 1
            same_rank = len(parameter.tensor.shape) == len(weight.shape)
            part = Part(
                kind=kind,
                letter=letter,
                parameter=parameter,
                heads={} if is_shared and letter == "g" else heads,
                is_shared=is_shared,
                taps=len(taps) if same_rank and kind in (*_MATRICES, "before", "filter") else 0,
                moved=prod(taps) == 1 and all(op.kind in ("view", "copy") for op in weighing),
            )
            if kind in FACTORS:
                yield of_whole_rows(part)
                continue
            is_matrix = op is not None and self._graph.is_projection(op) and weight.id == self._graph.weight_of(op).id
            yield self._with_inner(part, op, target.layouts) if is_matrix and op is not None else part

    def _kinds_behind(self, weight: TensorRef, kind: str) -> dict[str, str]:
        """Return the kinds of parameters that a weight is computed from by more than moving and scaling elements."""
        if kind not in _MATRICES:
            return {}

        def keeps_elements(op: Op) -> bool:
            return not does_more_to_weights(op)

        def multiplies(op: Op) -> bool:
            return op.does("product") or keeps_elements(op)

        every = {named.name for named in parameters_behind(self._run, [weight])}
        moved = {named.name for named in parameters_behind(self._run, [weight], keeps_elements)}
        factors = {named.name for named in parameters_behind(self._run, [weight], multiplies)} - moved
        return dict.fromkeys(every - moved, "computed") | dict.fromkeys(factors, "added factor" if moved else "factor")

    def _places(self, letter: str, meeting: Meeting, target: _Target, parameter: Named) -> Span | None:
        """Return the places in a parameter that a target is made of; None if they are unknown."""
        op, tensor = meeting.op, parameter.tensor
        if letter == "o" and meeting.kind in _MATRICES and op is not None:
            layout = target.layouts.entering(op)
        else:
            layout = target.layouts.of(target.tensor)
        return layout.places_in(parameter.name, tensor.shape, tensor.stride)

    def _heads(
        self, letter: str, meeting: Meeting, target: _Target, places: Span | None, parameter: Named
    ) -> dict[int, Indices]:
        """Return the places of each head's features in a parameter; without their order if they are no features."""
        codes = target.codes
        if codes is None or places is None:
            return {}
        rows = enumerate(rows_of(places, codes, parameter.tensor.stride), start=target.turn * codes.heads)
        heads = {head: row for head, row in rows if (row >= 0).any()}
        # A gate may have one number for all features of a head.
        is_one = letter == "g" and all((row == row[0]).all() for row in heads.values())
        if is_one or meeting.kind not in _BY_FEATURE:
            return {head: np.unique(row[row >= 0]) for head, row in heads.items()}
        return heads

    def _with_inner(self, part: Part, op: Op, layouts: Layouts) -> Part:
        """Return a part of a matrix with the count of each feature's numbers, and the step between them."""
        weight, tensor = self._graph.weight_of(op), part.parameter.tensor
        place = self._graph.places_of_weight(op)[part.letter == "o" and part.kind in _MATRICES]
        row = layouts.of(weight).along(place, part.parameter.name)
        places = row.places_in(part.parameter.name, tensor.shape, tensor.stride)
        numbers = [] if places is None else places.low.reshape(-1).tolist()
        if len(numbers) < weight.shape[place] or min(numbers, default=0) < 0:
            return part
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        if step < 1 or numbers[-1] - numbers[0] != step * (len(numbers) - 1):
            return part
        return replace(part, inner=(len(numbers), step), width=len(numbers))


def _reaches(meeting: Meeting, adapters: Mapping[int, set[int]], present: set[int]) -> bool:
    """Return whether a projection of an adapter reaches the heads of a side: its last one has rows there."""
    if meeting.op is None:
        return True
    index = meeting.op.index
    return index in present and (
        index in adapters or any(index in adapters[last] for last in adapters.keys() & present)
    )

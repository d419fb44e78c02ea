"""Which elements of which parameters are a head's: read off a recording, with no gradient and no second run.

From elements of the heads the walk goes back to the products that gave them, and to the rows of the matrices there;
from what the output's product takes in it goes back to the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.elements import Elements, Met, Origins, elements_at, product_sources
from ..record.ops import Named, Op, TensorRef
from .axes import AxisNames
from .canonical import sizes_in
from .layout import Layout, number_of_positions
from .subject import Run

SIDES = {"q": "query", "k": "key", "v": "value", "o": "output"}
"""What a part is called after, and the projection of which it is."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one parameter holds of one matrix, bias, or other numbers of one side of an attention."""

    kind: str
    """`W` and `b` for what projects; else as in `elements.Met`."""
    letter: str
    """`q`, `k`, `v` or `o`."""
    parameter: Named
    heads: dict[int, Tensor]
    """Head to where in the parameter each of its features is, -1 where it is not there; of what is neither `W` nor `b`
    all the elements that have a part in it."""
    inner: tuple[int, int] | None = None
    """How many numbers each feature has in a matrix (what it takes in; for W_o what it gives), and the step from one to
    the next; None for what has one, or where that is not known."""
    width: int = 0
    """How many features of what comes in the heads have before them, be it that each reads a part of them."""
    reads: dict[int, int] | None = None
    """Head to the first feature that it reads, where it reads a part of them."""
    moved: bool = True
    """Whether the numbers are used as they are: moved or cast, and nothing done to them."""
    operation: Op | None = None
    """The one by which it first meets what is projected."""

    @property
    def numel(self) -> int:
        """How many numbers it is."""
        return sum(int((own >= 0).sum()) for own in self.heads.values()) * (1 if self.inner is None else self.inner[0])

    @property
    def is_shared(self) -> bool:
        """Whether heads have elements in common: then it belongs to none."""
        first, *others = self.heads.values()
        return any(bool(torch.isin(other[other >= 0], first).any()) for other in others[:1])


class Finder:
    """Finds what the parameters hold of one attention."""

    def __init__(self, run: Run, origins: Origins, found: Attention, names: AxisNames) -> None:
        self._run, self._origins, self.found, self.names = run, origins, found, names
        self._graph = run.graph
        self._turns = found.branches or (found,)
        self.serves: tuple[tuple[int, ...], ...] = ()
        """For each key/value head, the query heads that use it."""

    def parts(self) -> list[Part]:
        """Everything that parameters hold of this attention's heads, and of its output."""
        found: list[Part] = []
        for letter in "qkv":
            found += self._side(letter)
        return found + self._output()

    def num_heads(self, letter: str) -> int:
        """How many heads there are of `q`, `k`, `v` or `o`."""
        return self.names.num_kv_heads if letter in "kv" else self.names.num_heads

    # -- queries, keys and values ---------------------------------------------------------------------------------

    def _ops(self, side: str) -> list[Op]:
        ops = [turn.projections[side] for turn in (*self._turns, self.found) if side in turn.projections]
        return list({op.index: op for op in ops}.values())

    def _side(self, letter: str) -> list[Part]:
        """What parameters hold of the queries, keys or values, head by head."""
        stage, side = f"{letter}_heads", SIDES[letter]
        layouts = self._layouts(stage)
        if layouts is None:
            return []
        given = [turn.stages[name] for turn in self._turns for name in ("query", "key", "value") if name in turn.stages]
        stops = [tensor for tensor in given if not self._graph.is_weight(tensor)]
        own = [turn.stages[side] for turn in self._turns if side in turn.stages]
        # A learned query is made of parameters alone, all of which are followed.
        made = [-1 if self._graph.is_weight(t) else self._graph.recording.producers.get(t.id, -1) for t in own]
        ops = self._ops(side)
        earlier = self.found.earlier.get(side, ())
        met: list[Met] = []
        first = 0
        for layout in layouts:
            ends = [] if earlier else ops
            trail = self._origins.back(layout.elements(first), stops, ends=ends, since=min(made, default=-1))
            met += trail.met
            first += layout.num_heads
        last = [op.index for op in ops]
        met = [replace(one, kind=_kind(one, last)) for one in met]
        return self._told(letter, met, first, layouts[0].head_dim, self._key_heads(letter, met, layouts, first))

    def _layouts(self, stage: str) -> list[Layout] | None:
        """The heads of each turn, those that are the same once; None where their axes are not known."""
        tensors = {turn.stages[stage].id: turn.stages[stage] for turn in self._turns}
        sizes = sizes_in(self.found, self.names, stage)
        try:
            return [Layout(tensor, self.names.of_stage(stage), sizes) for tensor in tensors.values()]
        except ValueError:
            return None

    def _key_heads(self, letter: str, met: list[Met], layouts: list[Layout], heads: int) -> list[int]:
        """For each head of the layouts, its number among those that differ, where as many are shared."""
        every = list(range(heads))
        shared = self.names.num_kv_heads
        if shared == heads == self.names.num_heads or letter == "q":
            return every
        width = layouts[0].head_dim
        kinds = {"W"} if any(one.kind == "W" for one in met) else {one.kind for one in met}
        signs: list[list[tuple[object, ...]]] = [[] for _ in every]
        for one in met:
            if one.kind in kinds:
                for head in every:
                    own = torch.unique(one.places[one.ids // width == head])
                    if len(own):
                        signs[head].append((one.parameter.name, int(own[0]), int(own[-1]), len(own)))
        told = list(map(tuple, signs))
        apart = list(dict.fromkeys(told))
        numbers = [apart.index(sign) for sign in told] if len(apart) == shared < heads else every
        if letter == "k" and shared < self.names.num_heads:
            query = self._layouts("q_heads")
            if len(numbers) == self.names.num_heads:
                users = numbers
            elif query is not None and len(query) == 1:
                users = query[0].key_heads(shared).tolist()
            else:
                users = [head * shared // self.names.num_heads for head in range(self.names.num_heads)]
            self.serves = tuple(tuple(h for h, k in enumerate(users) if k == own) for own in range(shared))
        return numbers

    def _told(self, letter: str, met: list[Met], heads: int, width: int, numbers: list[int]) -> list[Part]:
        """What was met, put together by the parameter and by what is done with it."""
        groups: dict[tuple[str, str], list[Met]] = {}
        for one in met:
            groups.setdefault((one.parameter.name, one.kind), []).append(one)
        parts = []
        for (_, kind), several in groups.items():
            ids = torch.cat([one.ids for one in several])
            places = torch.cat([one.places for one in several])
            exact = kind in ("W", "b")
            table = _by_head(ids, places, heads, width, numbers) if exact else {}
            for head in range(heads) if not table else ():
                if numbers[head] in table:
                    continue
                own = ids // width == head
                if not bool(own.any()):
                    continue
                features = _by_feature(ids[own] % width, places[own], width) if exact else torch.unique(places[own])
                table[numbers[head]] = features
            if self.names.mixes_positions and heads > 1:  # every feature is in every head, at some of the positions
                table = dict.fromkeys(range(self.num_heads(letter)), torch.unique(torch.cat([*table.values()])))
            op = several[0].operation
            inner, moved, reads, comes_in = None, True, None, 0
            if kind in ("W", "before") and op is not None and letter != "o" and self._graph.is_projection(op):
                inner, moved = self._inner(op, several[0].parameter.name), self._only_moved(self._weight(op)[0])
                reads = self._reads(letter, several, width, numbers) if kind == "W" else None
                comes_in = 0 if inner is None else inner[0]
                if reads:
                    comes_in = self.found.stages[SIDES[letter]].shape[-1]
            parts.append(Part(kind, letter, several[0].parameter, table, inner, comes_in, reads, moved, op))
        return parts

    def _inner(self, op: Op, name: str, along: int | None = None) -> tuple[int, int] | None:
        """How many numbers of a parameter a feature has, and the step from one to the next; None where it is not even.

        They are what a product sums over, or with `along` what it gives along that dimension.
        """
        weight, number = self._weight(op)
        number = number if along is None else op.output.shape[along]
        every = torch.arange(number)
        coordinates = [every if place == along else torch.zeros_like(every) for place in range(len(op.output.shape))]
        sources = product_sources(op, coordinates, every if along is None else 0)
        at = next(at for tensor, at in sources if tensor.id == weight.id)
        trail = self._origins.back(Elements(weight, at, every, kind="W"))
        own = [one for one in trail.met if one.parameter.name == name]
        if not own or len(own[0].places) != number:
            return None
        places = own[0].places[torch.argsort(own[0].ids)]
        step = int(places[1] - places[0]) if number > 1 else 1
        return (number, step) if step and bool((places - places[0] == step * every).all()) else None

    def _weight(self, op: Op) -> tuple[TensorRef, int]:
        """The weight of a product, and how many numbers of it make one number of the result."""
        if op.base_name == "convolution":
            return op.inputs[1], op.inputs[1].shape[1]
        left, right = self._graph.operands(op) or op.inputs[:2]
        return (right if self._graph.is_weight(right) else left), left.shape[-1]

    def _only_moved(self, tensor: TensorRef) -> bool:
        op = self._graph.recording.producer(tensor)
        if op is None:
            return True
        return op.kind in ("view", "copy") and all(map(self._only_moved, op.inputs))

    def _reads(self, letter: str, met: list[Met], width: int, numbers: list[int]) -> dict[int, int] | None:
        """Head to the first feature that its matrix reads; None where each reads all of them, or it is not known."""
        side = SIDES[letter]
        found: dict[int, int] = {}
        for one in met:
            given = self.found.stages.get(side)
            if one.operation is None or given is None or self.found.earlier.get(side) or not given.shape:
                return None
            _, number = self._weight(one.operation)
            if number >= given.shape[-1] or one.operation.base_name == "convolution":
                return None
            every = torch.arange(number)
            coordinates = [torch.zeros_like(every) for _ in one.operation.output.shape]
            tensor, at = next(
                pair
                for pair in product_sources(one.operation, coordinates, every)
                if not self._graph.is_weight(pair[0])
            )
            stops = [turn.stages[side] for turn in self._turns]
            trail = self._origins.back(Elements(tensor, at, every), stops)
            if len(trail.reached) != 1 or len(trail.reached[0].at) != number:
                return None
            features = trail.reached[0].at % given.shape[-1]
            if not bool((features - features[0] == every).all()):
                return None
            for head in torch.unique(one.ids // width).tolist():
                found[numbers[head]] = int(features[0])
        return found

    # -- the output -----------------------------------------------------------------------------------------------

    def _output(self) -> list[Part]:
        """What parameters hold of the output: the columns of each head, and what is added."""
        layouts = self._layouts("context")
        output = self.found.stages.get("output")
        ops = self._ops("output")
        if layouts is None or output is None or not ops:
            return []
        contexts = {layout.tensor.id: layout for layout in layouts}
        # Where a loop runs over pieces of the sequence, each is an attention, and one product projects them all.
        beside = [other for other, _ in self._run.attentions if other.projections.get("output") in ops]
        for other in beside:
            if not other.branches and other.stages["context"].shape == layouts[0].tensor.shape:
                contexts.setdefault(other.stages["context"].id, layouts[0].of(other.stages["context"]))
        first = min(self._graph.recording.producers.get(tensor, -1) for tensor in contexts)
        turns = {layout.tensor.id: place for place, layout in enumerate(layouts)}
        width = layouts[0].head_dim
        parts: list[Part] = []
        met: list[Met] = []
        for op in ops:
            taken, rows = self._taken(op)
            trail = self._origins.back(taken, [layout.tensor for layout in contexts.values()], since=first)
            owner = torch.full((rows,), -1)
            for reached in reversed(trail.reached):
                layout = contexts[reached.tensor.id]
                head, feature = layout.head_and_feature(reached.at)
                head = head + turns.get(reached.tensor.id, 0) * layout.num_heads
                owner[reached.ids] = head * width + feature
            known = (owner >= 0).nonzero().flatten()
            weights = self._columns(op, known)
            met += [Met(one.parameter, "W", owner[one.ids], one.places, op) for one in weights]
            met += [
                Met(one.parameter, one.kind if one.kind != "b" else "norm", owner[one.ids], one.places, one.operation)
                for one in trail.met
            ]
        met = [replace(one, ids=one.ids[kept], places=one.places[kept]) for one in met for kept in [one.ids >= 0]]
        heads = self.names.num_heads
        for part in self._told("o", [one for one in met if len(one.ids)], heads, width, list(range(heads))):
            if part.kind == "W" and part.operation is not None:
                weight, _ = self._weight(part.operation)
                inner = self._given(part.operation, part.parameter.name)
                given = 0 if inner is None else inner[0]
                part = replace(part, inner=inner, width=given, moved=self._only_moved(weight))
            parts.append(part)
        return parts + self._added(output, ops, first, {part.parameter.name for part in parts})

    def _taken(self, op: Op) -> tuple[Elements, int]:
        """What an output's product takes in, at some positions; ids are the features, of each matrix that it has."""
        tensor = self._graph.projected(op)
        weight, number = self._weight(op)
        many = tensor.shape[0] if len(weight.shape) == 3 and weight.stride[0] and op.base_name != "convolution" else 1
        left = op.base_name == "convolution" or not self._graph.is_weight(op.inputs[-2])
        features = 1 if op.base_name == "convolution" else len(tensor.shape) - (1 if left else 2)
        features = max(features, 0)
        if op.base_name == "convolution":
            number = tensor.shape[1]
        positions = max([1, *(size for dim, size in enumerate(tensor.shape) if dim != features)])
        spread = torch.arange(number_of_positions(positions, many * number))
        at, matrix, feature = torch.cartesian_prod(spread, torch.arange(many), torch.arange(number)).reshape(-1, 3).T
        coordinates = [at * (size - 1) // max(len(spread) - 1, 1) for size in tensor.shape]
        coordinates[features] = feature
        if many > 1:
            coordinates[0] = matrix
        return elements_at(tensor, coordinates, matrix * number + feature), many * number

    def _columns(self, op: Op, ids: Tensor) -> list[Met]:
        """Where in the parameters the columns of an output's matrix are, for its first row."""
        weight, number = self._weight(op)
        if op.base_name == "convolution":
            number = self._graph.projected(op).shape[1]
        coordinates = [torch.zeros_like(ids) for _ in op.output.shape]
        if len(op.output.shape) == 3 and op.base_name != "convolution":
            coordinates[0] = ids // number
        tensor, at = next(one for one in product_sources(op, coordinates, ids % number) if one[0].id == weight.id)
        return self._origins.back(Elements(tensor, at, ids, kind="W")).met

    def _given(self, op: Op, name: str) -> tuple[int, int] | None:
        """How many numbers a column of an output's matrix has, and the step from one to the next."""
        weight, _ = self._weight(op)
        if op.base_name == "convolution":
            return self._inner(op, name, along=1)
        rows = self._graph.operands(op) is not None and weight.id == op.inputs[-2].id and len(op.output.shape) > 1
        return self._inner(op, name, along=len(op.output.shape) - (2 if rows else 1))

    def _added(self, output: TensorRef, ops: list[Op], since: int, known: set[str]) -> list[Part]:
        """What is added to the output, or scales it: it belongs to no head."""
        size = output.shape[-1] if output.shape else 1
        positions = torch.arange(number_of_positions(max(output.numel // max(size, 1), 1), size))
        if ops[0].base_name == "convolution":
            start = elements_at(output, [torch.zeros(1, dtype=torch.long)] * len(output.shape), torch.zeros(1).long())
        else:
            at, feature = torch.cartesian_prod(positions, torch.arange(size)).reshape(-1, 2).T
            start = Elements(output, at * size + feature, feature)
        trail = self._origins.back(start, ends=ops, since=since)
        met = [one for one in trail.met if one.kind != "W" and one.parameter.name not in known]
        return self._told("o", met, 1, size, [0])


def _kind(met: Met, projections: Sequence[int]) -> str:
    """What is done with a parameter, seen from the projections of a side: what is added earlier is no bias of one."""
    if met.operation is None or not projections:
        return met.kind
    if met.kind == "before" and met.operation.index in projections:
        return "W"
    early = met.operation.index < min(projections)
    return "before" if met.kind == "b" and early and len(met.operation.inputs) == 3 else met.kind


def _by_head(ids: Tensor, places: Tensor, heads: int, width: int, numbers: list[int]) -> dict[int, Tensor]:
    """Head to where each of its features is, where each is at one place; empty where one is at several or at none."""
    table = torch.full((heads * width,), -1)
    table[ids] = places
    if bool((table[ids] != places).any()) or bool((table < 0).any()):
        return {}
    by_head = table.reshape(heads, width).unbind(0)
    return {numbers[head]: by_head[head] for head in reversed(range(heads))}


def _by_feature(features: Tensor, places: Tensor, width: int) -> Tensor:
    """Where each feature is; where several places have a part in one (a rotation), each in the order they lie in."""
    pairs = torch.unique(torch.stack([features, places], dim=1), dim=0)
    table = torch.full((width,), -1)
    if len(torch.unique(pairs[:, 0])) == len(pairs):
        table[pairs[:, 0]] = pairs[:, 1]
        return table
    several: dict[int, list[int]] = {}
    for feature, place in zip(features.tolist(), places.tolist(), strict=True):
        if place not in several.setdefault(feature, []):
            several[feature].append(place)
    order = torch.unique(places).tolist()
    if len(order) == width and all(order[feature] in own for feature, own in several.items()):
        return torch.tensor(order)
    taken: set[int] = set()
    for feature, own in several.items():
        place = next((one for one in own if one not in taken), own[0])
        taken.add(place)
        table[feature] = place
    return table


def parts_of(run: Run) -> list[tuple[Finder, list[Part]]]:
    """What the parameters hold of each attention of a run."""
    origins = Origins(run.graph)
    finders = [Finder(run, origins, found, names) for found, names in run.attentions]
    return [(finder, finder.parts()) for finder in finders]

"""What the parameters hold of each head: read off the axes of the tensors between a projection and its heads.

The first tensor behind a projection whose features are heads and head_dim alone says where each feature of each head
lies; from there it is arithmetic with strides to the column of the product, and on to the row of its matrix.

In `q, k, v = qkv(x).chunk(3, -1)` the keys begin at feature 12 of 36: of 3 heads of 4 features, the second head's are
at 16 to 19 in what the product gives, and so in rows 16 to 19 of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.axis import setting
from ..graph.dataflow import Graph
from ..graph.dimensions import Axis, Dim, resolve, size_of, wide
from ..graph.places import Elements, broadcast, coordinates, coordinates_of, origins
from ..graph.rules import reduced_places
from ..record.ops import Named, Op, TensorRef
from .axes import AxisNames
from .named_run import NamedRun
from .roles import Roles

SIDES = {"q": "query", "k": "key", "v": "value", "o": "output"}
"""What a part is called after, and the projection of which it is."""
_NO_SOURCE = {"new_zeros", "zeros_like", "ones_like", "full_like", "empty_like", "new_empty", "new_full", "bernoulli"}
_STATISTICS = {"mean", "sum", "amax", "var", "std", "linalg_vector_norm", "var_mean"}
"""What a norm divides by hangs on all features: it is taken as a number that is given."""
_LONGEST = 600
"""Operations after which a walk gives up: no projection takes so many."""
_LARGE = 1 << 16
"""Elements of what is no matrix from which on one row of it stands for all."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one parameter holds of one matrix, bias, or other numbers of one side of an attention."""

    kind: str
    """`W` and `b` for what projects, `before` for another projection, `norm` for what is multiplied, `appended` for
    what is joined, `learned` for anything else."""
    letter: str
    """`q`, `k`, `v` or `o`."""
    parameter: Named
    heads: dict[int, Tensor]
    """Head to where in the parameter each of its features is, in elements of its memory, -1 where it is not there; of
    what is neither `W` nor `b` all the elements that have a part in it. Empty where that is not known."""
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
    def name(self) -> str:
        """`W_q`, `b_q`, or `bias_k` of a learned key; empty for what is none of these."""
        kind = {"appended": "bias", "W": "W", "b": "b"}.get(self.kind, "")
        return f"{kind}_{self.letter}" if kind else ""

    @property
    def is_shared(self) -> bool:
        """Whether heads have elements in common: then it belongs to none."""
        first, *others = self.heads.values() or [torch.zeros(0)]
        return any(bool(torch.isin(other[other >= 0], first).any()) for other in others[:1])


@dataclass(frozen=True, eq=False)
class _Meeting:
    """An operation by which a parameter meets what becomes heads."""

    op: Op | None
    """None where the heads are made of parameters alone."""
    weight: TensorRef
    kind: str


@dataclass(frozen=True, eq=False)
class _Heads:
    """The features of heads in one tensor, at its first position."""

    tensor: TensorRef
    at: Tensor
    """Where in memory each is: `heads features`."""
    start: int
    """The first of a head's features that are there, where it was put together of several pieces."""
    width: int
    """How many features a head has."""

    @property
    def coordinates(self) -> list[Tensor]:
        """Where along each dimension of the tensor each of them is."""
        return coordinates(self.tensor, self.at)

    def in_all(self, row: Tensor) -> Tensor:
        """Return numbers of the features that are there among those of a head, with -1 for the others."""
        if len(row) == self.width:
            return row
        return torch.full((self.width,), -1).index_copy(0, torch.arange(self.start, self.start + len(row)), row)


class PartFinder:
    """Finds what the parameters hold of one attention."""

    def __init__(self, run: NamedRun, attention: Attention, names: AxisNames) -> None:
        self.attention, self.names = attention, names
        self._graph, self._recording = run.graph, run.recording
        self._turns = attention.branches or (attention,)
        self._roles = [Roles(turn, run.graph.dimensions) for turn in self._turns]

    def parts(self) -> list[Part]:
        """Return everything that parameters hold of this attention's heads, and of its output."""
        return [*self._side("q"), *self._side("k"), *self._side("v"), *self._output()]

    def num_heads(self, letter: str) -> int:
        """Return how many heads there are of `q`, `k`, `v` or `o`."""
        return self.names.num_kv_heads if letter in "kv" else self.names.num_heads

    @cached_property
    def serves(self) -> tuple[tuple[int, ...], ...]:
        """For each key/value head, the query heads that use it; empty where each has its own."""
        heads, shared = self.names.num_heads, self.names.num_kv_heads
        if shared >= heads:
            return ()
        users = [head * shared // heads for head in range(heads)]
        every, shared_axes = wide(resolve(self._roles[0].heads)), wide(resolve(self._roles[0].kv_heads))
        if len(self._turns) == heads:
            keys = [turn.stages["k_heads"].id for turn in self._turns]
            users = [[*dict.fromkeys(keys)].index(key) for key in keys]
        elif set(shared_axes) <= set(every) and size_of(every) == heads and size_of(shared_axes) == shared:
            users = _grid(every, _row_major([atom for atom in every if atom in shared_axes])).tolist()
        return tuple(tuple(head for head, key in enumerate(users) if key == number) for number in range(shared))

    # -- where heads and features are ---------------------------------------------------------------------------------

    def _table(self, roles: Roles, letter: str, tensor: TensorRef, apart: set[Axis] | None = None) -> _Heads | None:
        """Return where each feature of each head is in a tensor.

        None where its axes do not tell, and where it has others of the axes `apart`: it is not unpacked yet.
        """
        groups = roles.groups(letter)
        names = ("kv_heads", "heads") if letter in "kv" else ("heads",)
        maps = roles.maps if letter in "qk" else ()
        features = [wide(resolve((*maps, *group))) for name, group in groups if name.endswith("head_dim")]
        dims = self._graph.dimensions.of(tensor)
        features = [atoms for group in features for atoms in (*_wholes(group), *_turned(dims, group))]
        counted = [wide(resolve(group)) for wanted in names for name, group in groups if name == wanted]
        for heads, head_dim in product(counted, features):
            steps, start = _steps(dims, tensor.stride, {*heads, *head_dim}) or ({}, -1)
            if start >= 0 and (apart is None or not set(wide(*dims)) & apart - {*heads, *head_dim}):
                places = tensor.offset + start + _grid(heads, steps)[:, None] + _grid(head_dim, steps)
                return _Heads(tensor, places, 0, places.shape[1])
        return None

    def _unpacked(self, turn: int, letter: str, op: Op, heads: TensorRef) -> _Heads | None:
        """Return the first tensor behind a projection whose features are those of this side alone, some of them its."""
        apart = self._apart(op)
        steps = self._graph.back(heads, lambda passed: passed is not op and not self._graph.is_projection(passed))
        path = next((step.path[::-1] for step in steps if self._recording.producer(step.tensor) is op), None)
        if path is None:
            return None
        reads = [{tensor.id for tensor in passed.inputs} for passed in path] + [{heads.id}]
        tensors = [
            next((t for t in o.outputs if t.id in ids), o.output) for o, ids in zip((op, *path), reads, strict=True)
        ]
        tensors.append(heads)  # also where it was written into piece by piece
        tables = (self._table(self._roles[turn], letter, tensor, apart) for tensor in tensors)
        return next((table for table in tables if table is not None and self._before(table, op.output)), None)

    def _before(self, heads: _Heads, tensor: TensorRef) -> _Heads | None:
        """Return where in a tensor the features of heads were that were made of it one by one, those that were.

        Features that are turned are made of two each, and all of them together of as many: those in their order.
        None where it is not one run of them, the same for all heads.
        """
        start = Elements(heads.tensor, heads.at.flatten(), torch.arange(heads.at.numel()))
        at, twice = torch.full((heads.at.numel(),), -1), torch.zeros(heads.at.numel(), dtype=torch.bool)
        sources: list[Tensor] = []
        for elements in origins(self._recording, start, lambda other: other.id == tensor.id):
            if elements.tensor.id == tensor.id:
                twice[elements.ids] |= (at[elements.ids] >= 0) & (at[elements.ids] != elements.at)
                at[elements.ids] = elements.at
                sources.append(torch.stack([elements.ids, elements.at]))
        known = ((at >= 0) & ~twice).reshape(heads.at.shape)
        if bool(twice.any()):
            pairs, width = torch.cat(sources, 1), heads.at.shape[1]
            for head, row in enumerate(known):
                turned = (~row).nonzero().flatten()
                made_of = torch.unique(pairs[1, torch.isin(pairs[0], turned + head * width)])
                if len(made_of) == len(turned):
                    at[turned + head * width] = made_of
                    row[turned] = True
        columns = known.all(0).nonzero().flatten()
        if not len(columns) or len(columns) <= int(columns[-1] - columns[0]) or bool(known.any(0).sum() > len(columns)):
            return None
        return replace(
            heads, tensor=tensor, at=at.reshape(heads.at.shape)[:, columns], start=heads.start + int(columns[0])
        )

    def _heads_in(
        self, turn: int, letter: str, op: Op | None, tensor: TensorRef, unpacked: _Heads | None
    ) -> _Heads | None:
        """Return where the features of the heads are in a tensor on the way to them; None where it is not known."""
        before = None if unpacked is None else self._before(unpacked, tensor)
        return before or self._table(self._roles[turn], letter, tensor, self._apart(op))

    def _apart(self, op: Op | None) -> set[Axis]:
        """Return the axes of what a projection gives and takes, which a tensor that is unpacked has no others of."""
        return set() if op is None else set(wide(*self._graph.dimensions.of(self._weight(op))))

    # -- queries, keys and values -------------------------------------------------------------------------------------

    def _side(self, letter: str) -> list[Part]:
        """Return what parameters hold of the queries, keys or values, head by head."""
        side, parts, first = SIDES[letter], list[Part](), 0
        given = [turn.stages[name] for turn in self._turns for name in ("query", "key", "value") if name in turn.stages]
        stops = {tensor.id for tensor in given if not self._graph.is_weight(tensor)}
        sources = [turn.stages[side] for turn in self._turns if side in turn.stages]
        since = min((self._recording.producers.get(t.id, -1) for t in sources if t.id in stops), default=-1)
        turns = {turn.stages[f"{letter}_heads"].id: place for place, turn in reversed([*enumerate(self._turns)])}
        for place in sorted(turns.values()):
            turn = self._turns[place]
            heads = turn.stages[f"{letter}_heads"]
            op = turn.projections.get(side) or self.attention.projections.get(side)
            unpacked = None if op is None else self._unpacked(place, letter, op, heads)
            count = max(self.num_heads(letter) // len(turns), 1) if unpacked is None else len(unpacked.at)
            ends = {op.index} if op is not None and not self.attention.earlier.get(side) else set()
            for meeting in self._meetings([heads], stops, ends, since):
                kind = meeting.kind
                if op is not None and meeting.op is not None:
                    kind = "W" if meeting.op is op and kind == "before" else kind
                    early = meeting.op.index < op.index and self._graph.is_projection(meeting.op)
                    kind = "before" if kind == "b" and early else kind
                where = None if meeting.op is None else self._heads_in(place, letter, op, meeting.op.output, unpacked)
                of_meeting = self._parts(
                    letter, _Meeting(meeting.op, meeting.weight, kind), where, range(first, first + count)
                )
                parts += [self._with_reads(part, turn) for part in of_meeting] if kind == "W" else of_meeting
            first += count
        return self._numbered(letter, _merged(parts))

    def _with_reads(self, part: Part, turn: Attention) -> Part:
        """Return a part of a matrix with the features of what comes in that it reads, where these are not all."""
        given, op = turn.stages.get(SIDES[part.letter]), part.operation
        if given is None or not given.shape or op is None or part.inner is None or self.attention.earlier:
            return part
        taken, number = self._graph.projected(op), part.inner[0]
        if number >= given.shape[-1] or op.base_name == "convolution":
            return part
        ends = torch.tensor([0, number - 1])
        at = [ends if place == len(taken.shape) - 1 else torch.zeros_like(ends) for place in range(len(taken.shape))]
        for elements in origins(self._recording, Elements.of(taken, at, ends), lambda tensor: tensor.id == given.id):
            if elements.tensor.id == given.id and len(elements.at) == 2:
                start, stop = coordinates(given, elements.at)[-1].tolist()
                if stop - start == number - 1:
                    return replace(part, reads=dict.fromkeys(part.heads, start), width=given.shape[-1])
        return part

    def _numbered(self, letter: str, parts: list[Part]) -> list[Part]:
        """Return the parts with the numbers of heads that differ, where several heads were found to share one."""
        shared, count = self.num_heads(letter), 1 + max((head for part in parts for head in part.heads), default=0)
        if shared < count and letter in "kv":
            signs = [
                tuple((p.parameter.name, *p.heads[head][[0, -1]].tolist()) for p in parts if head in p.heads)
                for head in range(count)
            ]
            apart = [*dict.fromkeys(signs)]
            if len(apart) == shared:
                parts = [
                    replace(p, heads={apart.index(signs[h]): places for h, places in reversed(p.heads.items())})
                    for p in parts
                ]
        return parts

    def _meetings(self, start: list[TensorRef], stops: set[int], ends: set[int], since: int) -> Iterator[_Meeting]:
        """Yield the operations by which parameters meet what tensors are made of, on the way back to `stops`.

        The products `ends` end a way. At any other one with a weight what it projects is followed on. Of what was made
        by the operation `since` or before nothing is followed.
        """
        queue: list[_Meeting | TensorRef] = [*start]
        seen = set[int]()
        while queue and len(seen) < _LONGEST:
            now = queue.pop()
            if isinstance(now, _Meeting):
                yield now
                continue
            op = self._recording.producer(now)
            if self._graph.is_weight(now):
                yield _Meeting(None, now, "learned")
            elif op is not None and op.index > since and now.id not in stops and op.index not in seen:
                seen.add(op.index)
                queue += reversed([*self._behind(op, ends)])

    def _behind(self, op: Op, ends: set[int]) -> Iterator[_Meeting | TensorRef]:
        """Yield what an operation meets, and what it reads that is to be followed, in order."""
        if self._graph.is_projection(op):
            for read in op.inputs:
                if read.id == self._weight(op).id:
                    yield _Meeting(op, read, "before")
                elif read.id != self._graph.projected(op).id and self._graph.is_weight(read):
                    yield _Meeting(op, read, "b")
            if op.index not in ends:
                yield self._graph.projected(op)
        elif not self._is_statistic(op):
            reads = op.inputs[:1] if op.does("gathers") else op.inputs
            for read in reads:
                weight = self._graph.is_weight(read)
                if weight or read.dtype != "bool":
                    yield _Meeting(op, read, _kind(op)) if weight else read

    def _is_statistic(self, op: Op) -> bool:
        """Whether this reduces features to a number, which hangs on all of them: a norm divides by it."""
        if op.base_name not in _STATISTICS or not op.inputs:
            return op.base_name in _NO_SOURCE
        dims = self._graph.dimensions.of(op.inputs[0])
        return any(set(wide(dims[place])) & self._graph.features for place in reduced_places(op))

    # -- the output ---------------------------------------------------------------------------------------------------

    def _output(self) -> list[Part]:
        """Return what parameters hold of the output: the columns of each head, and what is added."""
        output, contexts = self.attention.stages.get("output"), [turn.stages["context"] for turn in self._turns]
        ops = [turn.projections["output"] for turn in (*self._turns, self.attention) if "output" in turn.projections]
        ops = [*{op.index: op for op in ops}.values()]
        if output is None or not ops:
            return []
        parts: list[Part] = []
        for turn, op in enumerate(ops):
            taken = self._graph.projected(op)
            table = self._table(Roles(self.attention, self._graph.dimensions), "o", taken) if len(ops) == 1 else None
            table = table or self._table(self._roles[min(turn, len(self._roles) - 1)], "o", taken)
            heads = range(turn, turn + 1) if len(ops) > 1 else range(self.names.num_heads)
            parts += self._parts("o", _Meeting(op, self._weight(op), "W"), table, heads)
            since = min(self._recording.producers.get(context.id, -1) for context in contexts)
            for meeting in self._meetings([taken], {context.id for context in contexts}, set(), since):
                where = table if meeting.op is not None and meeting.op.output.shape == taken.shape else None
                kind = "norm" if meeting.kind == "b" else meeting.kind
                parts += self._parts("o", _Meeting(meeting.op, meeting.weight, kind), where, heads)
        known = {part.parameter.name for part in parts}
        for meeting in self._meetings([output], set(), {op.index for op in ops}, min(op.index for op in ops) - 1):
            if meeting.op not in ops or meeting.kind == "b":
                added = self._parts("o", meeting, None, range(1))
                parts += [part for part in added if part.parameter.name not in known]
        return _merged(parts)

    # -- from operations to parameters --------------------------------------------------------------------------------

    def _parts(self, letter: str, meeting: _Meeting, where: _Heads | None, heads: range) -> list[Part]:
        """Return what the parameters behind a weight hold of these heads.

        Args:
            letter: whose heads.
            met: how the weight is met.
            where: each feature of each head in what the operation gives (for W_o: takes); None where it is not known.
            heads: their numbers.
        """
        exact, at = (
            meeting.kind in ("W", "b"),
            None if where is None else self._in_weight(letter, meeting, where.coordinates),
        )
        whole = self.names.mixes_positions and self.names.num_heads > 1  # every feature is in every head, somewhere
        heads = range(self.num_heads(letter)) if whole and letter != "o" else heads
        places = self._all_of(meeting) if at is None else at
        parts = []
        for parameter, ids, found in self._in_parameters(meeting.weight, [own.flatten() for own in places]):
            by_head: dict[int, Tensor] = {}
            if whole or at is None:
                belongs_to_none = not exact or whole or letter == "o"
                by_head = dict.fromkeys(heads, torch.unique(found)) if belongs_to_none else {}
            elif where is not None and len(at[0]) == len(heads):
                table = torch.full((at[0].numel(),), -1)
                table[ids] = found
                for head, row in zip(heads, table.reshape(at[0].shape), strict=True):
                    if bool((row >= 0).all() if exact else (row >= 0).any()):
                        by_head[head] = where.in_all(row) if exact else torch.unique(row[row >= 0])
            part = Part(meeting.kind, letter, parameter, by_head, operation=meeting.op)
            first = [own.flatten()[ids[:1]] for own in places]
            parts.append(self._with_inner(part, meeting.weight, first) if self._is_factor(meeting) else part)
        return parts

    def _in_weight(self, letter: str, meeting: _Meeting, where: list[Tensor]) -> list[Tensor] | None:
        """Return where in a weight each feature of each head is met; None where it is not known."""
        op, weight = meeting.op, meeting.weight
        if op is None:
            return None
        if self._is_factor(meeting):
            if letter == "o":
                return None if meeting.kind == "before" else _Factor(self._graph, op).at(where, taken=True)
            return _Factor(self._graph, op).at(where, taken=False)
        if op.base_name == "convolution" or "batch_norm" in op.base_name or "group_norm" in op.base_name:
            return [where[1]]
        if op.base_name in ("cat", "stack"):
            dim = setting(op, 1, "dim", 0) % len(op.output.shape)
            return [torch.zeros_like(c) if place == dim else c for place, c in enumerate(where)]
        return broadcast(where, op.output.shape, weight.shape)

    def _all_of(self, meeting: _Meeting) -> list[Tensor]:
        """Return where all of a weight is: of a matrix that all gives, and of a large table a row."""
        op, shape = meeting.op, meeting.weight.shape
        if op is not None and self._is_factor(meeting):
            factor, rank = _Factor(self._graph, op), len(op.output.shape)
            features = torch.arange(op.output.shape[factor.given] if rank else 1)
            out = [features if dim == factor.given % rank else torch.zeros_like(features) for dim in range(rank)]
            return factor.at(out or [features], taken=False)
        if meeting.weight.numel <= _LARGE:
            return coordinates_of(torch.arange(meeting.weight.numel), shape)
        row = torch.arange(shape[-1])
        return [row if dim == len(shape) - 1 else torch.zeros_like(row) for dim in range(len(shape))]

    def _in_parameters(self, weight: TensorRef, at: list[Tensor]) -> Iterator[tuple[Named, Tensor, Tensor]]:
        """Yield each parameter that elements of a weight come from, their numbers, and where in its memory they are."""
        pieces: dict[str, tuple[Named, list[Tensor], list[Tensor]]] = {}
        start = Elements.of(weight, at, torch.arange(len(at[0]) if at else 1))
        for elements in origins(self._recording, start, lambda tensor: False):
            for parameter in {named.name: named for named in self._recording.parameters}.values():
                tensor = parameter.tensor
                places = elements.at - tensor.offset
                span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
                kept = (places >= 0) & (places <= span)
                if tensor.storage == elements.tensor.storage and bool(kept.any()):
                    _, ids, found = pieces.setdefault(parameter.name, (parameter, [], []))
                    ids.append(elements.ids[kept])
                    found.append(places[kept])
        for parameter, ids, found in pieces.values():
            yield parameter, torch.cat(ids), torch.cat(found)

    def _with_inner(self, part: Part, weight: TensorRef, first: list[Tensor]) -> Part:
        """Return a part of a matrix with how many numbers each of its features has, and how far apart they are."""
        op = part.operation
        assert op is not None, "a matrix is a factor of a product"
        factor = _Factor(self._graph, op)
        place = factor.outer if part.letter == "o" else factor.inner
        number = weight.shape[place]
        ends = torch.tensor([0, min(1, number - 1), number - 1])
        at = [ends if dim == place % len(weight.shape) else c.expand(3) for dim, c in enumerate(first)]
        inner = None
        for parameter, ids, places in self._in_parameters(weight, at):
            if parameter.name == part.parameter.name and len(ids) == 3:
                start, step, last = (int(places[ids == at_end][0]) for at_end in range(3))
                step = step - start if number > 1 else 1
                inner = (number, step) if step > 0 and last - start == step * (number - 1) else None
        taps = weight.shape[2:] if op.base_name == "convolution" else ()
        moved = prod(taps) == 1 and self._only_moved(weight)
        return replace(part, inner=inner, width=0 if inner is None else number, moved=moved)

    def _is_factor(self, meeting: _Meeting) -> bool:
        """Whether a weight is the matrix of a projection."""
        return (
            meeting.op is not None
            and meeting.kind in ("W", "before")
            and meeting.weight.id == self._weight(meeting.op).id
        )

    def _weight(self, op: Op) -> TensorRef:
        """Return the weight of a projection."""
        return _Factor(self._graph, op).weight

    def _only_moved(self, tensor: TensorRef) -> bool:
        op = self._recording.producer(tensor)
        return op is None or (op.kind in ("view", "copy") and all(map(self._only_moved, op.inputs)))


def _kind(op: Op) -> str:
    """Return what an operation that is no projection does with a parameter."""
    if op.does("joins"):
        return "appended"
    name = "mul" if op.does("norms") else op.base_name.rstrip("_")
    return {"add": "b", "sub": "b", "mul": "norm", "div": "norm", "copy": "appended"}.get(name, "learned")


class _Factor:
    """The weight of a projection: which of its dimensions is summed over, and which gives the features."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.op = op
        if op.base_name == "convolution":
            self.weight, self.inner, self.outer, self.given, self.taken = op.inputs[1], 1, 0, 1, 1
            return
        left, right = graph.operands(op) or op.inputs[:2]
        is_right = graph.is_weight(right)
        self.weight, self.inner, self.outer = (right, -2, -1) if is_right else (left, -1, -2)
        # Columns that a matrix multiplies from the left stand before the last dimension.
        self.given = self.taken = -1 if is_right or len(right.shape) == 1 else -2
        if len(self.weight.shape) == 1:
            self.inner = self.outer = 0

    def at(self, where: list[Tensor], *, taken: bool) -> list[Tensor]:
        """Return where in the weight numbers are first met, by where they are in what is given, or `taken` in."""
        own, features = (self.inner, where[self.taken]) if taken else (self.outer, where[self.given])
        rank = len(self.weight.shape)
        batch = where[: rank - 2] if self.op.base_name != "convolution" else []
        at = [*batch, *(torch.zeros_like(features) for _ in range(rank - len(batch)))]
        if rank > 1 or taken:
            at[own] = features
        return at


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Return one part for each parameter and what is done with it, with the heads of all."""
    merged: dict[tuple[str, str], Part] = {}
    for part in parts:
        key = part.parameter.name, part.kind
        known = merged.get(key)
        if known is None:
            merged[key] = part
        else:
            reads = {**(part.reads or {}), **(known.reads or {})} or None
            merged[key] = replace(known, heads={**part.heads, **known.heads}, reads=reads)
    return [replace(part, heads=dict(sorted(part.heads.items()))) for part in merged.values()]


def _steps(dims: Iterable[Dim], strides: Iterable[int], wanted: set[Axis]) -> tuple[dict[Axis, int], int] | None:
    """Return how far apart in memory the places along each of these axes are, and where the first is; None where not
    all are there."""
    steps, start = dict[Axis, int](), 0
    for dim, stride in zip(dims, strides, strict=True):
        atoms, offset = _piece(dim, wanted)
        start += offset * stride
        steps |= {atom: step * stride for atom, step in _row_major(atoms).items() if atom in wanted}
    return (steps, start) if steps.keys() == wanted else None


def _wholes(features: Dim) -> Iterator[Dim]:
    """Yield the features of a head, and all that they were before a piece of them was turned."""
    yield features
    start = 0
    for piece in features[0].joined if len(features) == 1 else ():
        atoms = resolve(piece)
        whole, place = atoms[0].origins.get(size_of(atoms), ((), 0)) if atoms else ((), 0)
        if size_of(whole) == size_of(features) and place == start:
            yield wide(resolve(whole))
        start += size_of(atoms)


def _turned(dims: Iterable[Dim], features: Dim) -> Iterator[Dim]:
    """Yield what stands for the features of a head, where some of their axes are others since they were turned."""
    for dim in dims:
        for place in range(len(dim) - len(features) + 1):
            run = dim[place : place + len(features)]
            if set(run) & set(features) and [atom.size for atom in run] == [atom.size for atom in features]:
                yield run


def _piece(dim: Dim, wanted: set[Axis]) -> tuple[Dim, int]:
    """Return the piece of a dimension that has these axes, where several were joined, and where it begins."""
    offset = 0
    for part in dim[0].joined if len(dim) == 1 and dim[0] not in wanted else ():
        if wanted & set(resolve(part)):
            return resolve(part), offset
        offset += size_of(part)
    return dim, 0


def _row_major(atoms: Iterable[Axis]) -> dict[Axis, int]:
    """Return how far apart the places along each axis of a dimension are."""
    steps, step = dict[Axis, int](), 1
    for atom in reversed([*atoms]):
        steps[atom] = step
        step *= atom.size
    return steps


def _grid(atoms: Iterable[Axis], steps: Mapping[Axis, int]) -> Tensor:
    """Return where the places along these axes are, in row-major order."""
    at = torch.zeros(1, dtype=torch.long)
    for atom in atoms:
        at = (at[:, None] + torch.arange(atom.size) * steps.get(atom, 0)).flatten()
    return at


def parts_of(run: NamedRun) -> list[tuple[PartFinder, list[Part]]]:
    """Return what the parameters hold of each attention of a run."""
    finders = [PartFinder(run, attention, names) for attention, names in run.attentions]
    return [(finder, finder.parts()) for finder in finders]

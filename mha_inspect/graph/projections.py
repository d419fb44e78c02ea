"""The projections behind heads: the products with parameters that made queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..record.ops import Op, TensorRef
from .axis import setting
from .dataflow import Graph, inside
from .dimensions import Axis, wide
from .pairing import mixing_of


@dataclass(frozen=True)
class Projection:
    """A product with a parameter that made heads, and the operations from it to them, in order."""

    op: Op
    path: tuple[Op, ...]
    earlier: tuple[Op, ...] = ()
    """Projections down to something narrower that came before, in order."""


class Projections:
    """Finds projections in one recording."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._recording = graph.recording

    def behind(
        self, stages: dict[str, TensorRef], module: str, positions: dict[str, set[Axis]]
    ) -> dict[str, Projection]:
        """The projections of query, key and value, those that there are; none of a recurrence's steps is one."""
        query = self._projection(stages["q_heads"], module, set()) if "q_heads" in stages else None
        like = None if query is None else self._origin(query.op)
        found = {"query": query} | {
            name: self._projection(stages[f"{name[0]}_heads"], module, positions[name], like)
            for name in ("key", "value")
            if f"{name[0]}_heads" in stages
        }
        ends = {name: end for name, end in found.items() if end and not self._is_a_step(end, positions[name])}
        for name, end in ends.items():
            others = {other.op.index for side, other in ends.items() if (side == "query") != (name == "query")}
            ends[name] = self._with_earlier(end, module, others)
        return ends

    def put_before(self, stages: dict[str, TensorRef], ends: dict[str, Projection]) -> dict[str, Op]:
        """Put the projections and what they project before the heads; return their products."""
        before: dict[str, TensorRef] = {}
        for name, end in ends.items():
            op = end.earlier[0] if end.earlier else end.op
            source = self._graph.before_flattening(self._graph.before_call(op, self._graph.projected(op)), op.module)
            origin = self._graph.before_moves(source)
            before[name] = origin if origin.id in self._recording.input_ids else source
        projected = {f"{name[0]}_proj": self._projected(name, ends) for name in ends}
        heads = dict(stages)
        stages.clear()
        stages.update(before)
        stages.update(projected)
        stages.update(heads)
        return {name: end.op for name, end in ends.items()}

    def _through(self, op: Op) -> bool:
        """What may stand between a projection and heads."""
        return not self._graph.operands(op) and (
            op.kind != "compute" or op.pointwise or op.does("norms", "carries", "gathers", "pools")
        )

    def _origin(self, op: Op) -> int:
        """The id of what a projection projects, before it was moved about."""
        return self._graph.before_moves(self._graph.projected(op)).id

    def _projection(
        self, heads: TensorRef, module: str, positions: set[Axis], like: int | None = None
    ) -> Projection | None:
        """The nearest projection behind a tensor of heads; where several are added up, that of what `like` is.

        Where heads are put together of several projections' pieces, one that feeds another of them is not the last. One
        that gives `positions` makes fewer keys of many, and is passed where the features come from another.
        """
        nearest: Projection | None = None
        along: Projection | None = None
        for step in self._graph.back(heads, lambda op: self._through(op) or self._gives(op, positions)):
            op = self._recording.producer(step.tensor)
            if op is None or not self._graph.is_projection(op):
                continue
            end = Projection(op, tuple(reversed(step.path)))
            if self._gives(op, positions):
                along = along or end
            elif nearest is None:
                own = inside(op.module, module)
                if not own and (along or any(passed.does("norms") for passed in step.path)):
                    break
                nearest = end
                added = like is not None and any(map(self._adds, step.path)) and not self._is_of(end, like)
                if not added and not any(passed.base_name == "cat" for passed in step.path):
                    break
            elif self._is_of(end, like) or (inside(op.module, module) and self._feeds(nearest.op, op)):
                return end
        return nearest or along

    def _is_a_step(self, end: Projection, positions: set[Axis]) -> bool:
        """Whether this makes one position of many that are put side by side, as each step of a recurrence does."""
        for op in end.path:
            if op.base_name in ("cat", "stack") and len(op.inputs) > 2:
                joined = self._graph.dimensions.of(op.output)[setting(op, 1, "dim", 0) % len(op.output.shape)]
                if set(joined) & positions and self._graph.leads_to(op.inputs[0], op.inputs[1]):
                    return True
        return False

    def _gives(self, op: Op, positions: set[Axis]) -> bool:
        """Whether a projection makes positions, and no features."""
        mixing = mixing_of(self._graph, op) if positions else None
        dim = () if mixing is None else self._graph.dimensions.of(op.output)[mixing.place]
        given = set(wide(dim))
        return bool(given) and given <= positions

    def _adds(self, op: Op) -> bool:
        """Whether this adds up two tensors that come from what is given."""
        return op.base_name.rstrip("_") == "add" and sum(map(self._graph.comes_from_inputs, op.inputs)) > 1

    def _is_of(self, end: Projection, like: int | None) -> bool:
        """Whether a projection, one of several that are added up, projects a tensor, by its id."""
        return self._origin(end.op) == like and any(map(self._adds, end.path))

    def _feeds(self, first: Op, second: Op) -> bool:
        """Whether one projection projects what another gives."""
        steps = self._graph.back(self._graph.projected(second), self._through) if first is not second else ()
        return any(self._recording.producer(step.tensor) is first for step in steps)

    def _with_earlier(self, end: Projection, module: str, others: set[int]) -> Projection:
        """With the projections before it, down to something narrower, in the same module and for this side alone."""
        earlier: list[Op] = []
        op = end.op
        while len(earlier) < 3:
            latent = self._graph.projected(op)
            found = self._projection(latent, module, set())
            if found is None or not inside(found.op.module, module) or not latent.shape:
                break
            source = self._graph.projected(found.op)
            narrow = latent.shape[-1] < min(source.shape[-1], op.output.shape[-1])
            if not narrow or found.op.index in others or adds_up(found.path):
                break
            earlier.insert(0, found.op)
            op = found.op
        return Projection(end.op, end.path, tuple(earlier))

    def _projected(self, name: str, ends: dict[str, Projection]) -> TensorRef:
        """What a projection gives: the end of its call, or where it is shared, what is unpacked for this one alone."""
        end = ends[name]
        whole = self._graph.after_projection(end.op)
        others = [other.path for side, other in ends.items() if side != name and other.op is end.op]
        if not others:
            return whole
        shared = {op.index for path in others for op in path}
        last = max((place for place, op in enumerate(end.path) if op.index in shared), default=-1)
        after = end.path[last + 1] if last + 1 < len(end.path) else None
        if after is None:
            return whole
        # A split hands a piece to each of them, and is shared; what comes next reads its piece. Slices are not.
        splitting = end.path[last] if last >= 0 and len(end.path[last].outputs) > 1 else None
        if splitting is not None:
            pieces = {tensor.id for tensor in splitting.outputs}
            own = next((tensor for tensor in after.inputs if tensor.id in pieces), None)
        else:
            own = after.output if self._graph.moves(after) else None
        # Where heads are already apart from their features it is not the projection any more.
        merged = own is not None and len(own.shape) <= len(whole.shape) and own.shape[:-1] == whole.shape[:-1]
        return own if own is not None and merged else whole


def adds_up(path: Iterable[Op]) -> bool:
    """Whether two tensors of one size are added up on the way."""
    return any(
        op.base_name.rstrip("_") == "add" and sum(t.numel == op.output.numel for t in op.inputs) > 1 for op in path
    )

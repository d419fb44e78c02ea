"""Walk back from a tensor to what it is computed from, and note where parameters are applied on the way.

On the way back from `norm(x @ weight.T + bias)` to `x`, `weight` is met in a product, `bias` in an addition, and the
gain of the norm in the norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ..record.ops import Op, TensorRef
from .dataflow import Graph
from .part import Part, whole

_LONGEST = 600
"""Operations after which a walk gives up: projections need fewer."""


@dataclass(frozen=True)
class Meeting:
    """An operation that applies a parameter; the parameter is at most moved or scaled."""

    op: Op | None
    """None if the tensor is made of parameters alone."""
    weight: TensorRef
    kind: str
    """`naming.projection.Part.kind`, as far as the operation shows it."""


@dataclass(frozen=True)
class Way:
    """The operations that lead to a tensor, in order, and the parameters that they apply."""

    ops: list[Op] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)


@dataclass(frozen=True)
class Walk:
    """Where a walk back ends."""

    graph: Graph
    stops: Collection[int] = ()
    """Ids of tensors."""
    ends: Collection[int] = ()
    """Indices of projections: the walk goes to them, also at a stop, and not to what they project."""
    since: int = -1
    """Of tensors that this operation or an earlier one made, only weights are followed."""

    def to(self, start: TensorRef) -> Way:
        """Return the way to a tensor."""
        ops: dict[int, Op] = {}
        meetings: dict[tuple[int, int], Meeting] = {}
        projected: set[int] = set()  # ids of tensors that lead to what a projection reads
        queue: deque[tuple[TensorRef, Part | None]] = deque([(start, whole(start))])
        visited: set[tuple[int, Part | None]] = set()
        learned = [Meeting(None, start, "learned")] if self.graph.is_weight(start) else []
        while queue and len(ops) < _LONGEST:
            tensor, part = queue.popleft()
            op = self.graph.recording.producer(tensor)
            if op is None or (op.index, part) in visited or not self._follows(op, tensor):
                continue
            visited.add((op.index, part))
            ops[op.index] = op
            if self.graph.is_weight(tensor):
                queue += [(read, None) for read in op.inputs]
                continue
            reads = [*self.graph.parts_read(op, tensor, part)]
            read_ids = {read.id for read, _ in reads}
            is_projected = tensor.id in projected
            if is_projected:
                projected.update(read_ids)
            if self.graph.is_projection(op):
                projected.add(self.graph.projected(op).id)
                behind = self._behind_projection(op)
                met = self._met_in_projection(op, is_projected=is_projected)
            else:
                behind = self._behind(op, tensor)
                met = [meeting for meeting in self._met(op) if meeting.weight.id in read_ids]
            followed = {read.id for read in behind}
            queue += [(read, of_read) for read, of_read in reads if read.id in followed]
            for meeting in met:
                meetings.setdefault((op.index, meeting.weight.id), meeting)
        return Way([ops[index] for index in sorted(ops)], [*learned, *meetings.values()])

    def _follows(self, op: Op, tensor: TensorRef) -> bool:
        if self.graph.is_weight(tensor):
            return True
        return op.index > self.since and (tensor.id not in self.stops or op.index in self.ends)

    def _behind_projection(self, op: Op) -> list[TensorRef]:
        """Return the inputs of a projection that are followed."""
        projected = self.graph.projected(op)
        weights = [read for read in op.inputs if read is not projected and self.graph.is_weight(read)]
        return weights if op.index in self.ends else [projected, *weights]

    def _met_in_projection(self, op: Op, *, is_projected: bool) -> list[Meeting]:
        """Return the parameters of a projection; those of one before another have one kind."""
        projected, weight = self.graph.projected(op), self.graph.weight_of(op)
        meetings = []
        for read in op.inputs:
            if not self.graph.is_weight(read):
                continue
            if read is projected:
                meetings.append(Meeting(None, read, "learned"))
            else:
                meetings.append(Meeting(op, read, "before" if read is weight or is_projected else "b"))
        return meetings

    def _behind(self, op: Op, tensor: TensorRef) -> list[TensorRef]:
        """Return the inputs of an operation that are followed: no masks, and no number that positions are made of."""
        is_number = op.base_name in ("sum", "mean") and not self.graph.comes_from_inputs(tensor)
        return [read for read in op.inputs if self.graph.is_weight(read) or not (read.dtype == "bool" or is_number)]

    def _met(self, op: Op) -> list[Meeting]:
        if op.base_name in ("zero_", "fill_"):
            return []
        return [Meeting(op, read, _kind(op, read)) for read in op.inputs if self.graph.is_weight(read)]


_KINDS = {"add": "b", "sub": "b", "mul": "norm", "div": "norm", "copy": "appended"}
"""Name of an operation to the kind of use of a parameter."""


def _kind(op: Op, parameter: TensorRef) -> str:
    """Return the kind of use of a parameter by an operation other than a projection."""
    name = op.base_name.rstrip("_")
    if op.does("joins"):
        return "prepended" if name == "cat" and op.inputs[0] is parameter else "appended"
    if op.does("convolution"):  # of each channel by itself
        return "filter" if parameter is op.inputs[1] else "shift"
    if op.does("norms"):
        gain_and_bias = [arg for arg in op.args[1:] if not isinstance(arg, tuple)]  # a layer norm has a shape first
        return "shift" if parameter in gain_and_bias[1:2] else "norm"
    if name == "addcmul":
        return "b" if parameter is op.inputs[0] else "norm"
    return _KINDS.get(name, "learned")

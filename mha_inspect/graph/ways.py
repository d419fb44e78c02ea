"""Walk back from a tensor to what it is computed from, and note where parameters are applied on the way.

On the way back from `norm(x @ weight.T + bias)` to `x`, `weight` is met in a product, `bias` in an addition, and the
gain of the norm in the norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from ..record.ops import Op, TensorRef
from .axis import plain_name
from .dataflow import Graph
from .ids import ids_of, in_order

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
        queue = deque([start])
        while queue and len(ops) < _LONGEST:
            tensor = queue.popleft()
            op = self.graph.producer(tensor)
            if op is None or op.index in ops or not self._follows(op, tensor):
                continue
            ops[op.index] = op
            if self.graph.is_weight(tensor):
                queue += op.inputs
                continue
            is_projected = tensor.id in projected
            if is_projected:
                projected.update(ids_of(op.inputs))
            if self.graph.is_projection(op):
                projected.add(self.graph.projected(op).id)
                behind = self._behind_projection(op)
                applied = self._applied_by_projection(op, is_projected=is_projected)
            else:
                behind = self._behind(op, tensor)
                applied = self._applied(op)
            queue += behind
            for meeting in applied:
                meetings.setdefault((op.index, meeting.weight.id), meeting)
        learned = [Meeting(None, start, "learned")] if self.graph.is_weight(start) else []
        return Way(in_order(ops), [*learned, *meetings.values()])

    def _follows(self, op: Op, tensor: TensorRef) -> bool:
        if self.graph.is_weight(tensor):
            return True
        is_stop = tensor.id in self.stops and op.index not in self.ends
        return op.index > self.since and not is_stop

    def _behind_projection(self, op: Op) -> list[TensorRef]:
        """Return the inputs of a projection that are followed."""
        projected = self.graph.projected(op)
        followed = [] if op.index in self.ends else [projected]
        for read in op.inputs:
            if read is not projected and self.graph.is_weight(read):
                followed.append(read)
        return followed

    def _applied_by_projection(self, op: Op, *, is_projected: bool) -> list[Meeting]:
        """Return the parameters of a projection; those of one before another have one kind."""
        projected = self.graph.projected(op)
        weight = self.graph.weight_of(op)
        meetings = []
        for read in op.inputs:
            if not self.graph.is_weight(read):
                continue
            if read is projected:
                meetings.append(Meeting(None, read, "learned"))
            elif read is weight or is_projected:
                meetings.append(Meeting(op, read, "before"))
            else:
                meetings.append(Meeting(op, read, "b"))
        return meetings

    def _behind(self, op: Op, tensor: TensorRef) -> list[TensorRef]:
        """Return the inputs of an operation that are followed: no masks, and no number that positions are made of."""
        is_number = op.base_name in ("sum", "mean") and not self.graph.comes_from_inputs(tensor)
        followed = []
        for read in op.inputs:
            is_mask = read.dtype == "bool"
            if self.graph.is_weight(read) or not (is_mask or is_number):
                followed.append(read)
        return followed

    def _applied(self, op: Op) -> list[Meeting]:
        """Return the parameters that an operation other than a projection applies."""
        if op.base_name in ("zero_", "fill_"):
            return []
        weights = filter(self.graph.is_weight, op.inputs)
        return [Meeting(op, read, _kind(op, read)) for read in weights]


_KINDS = {"add": "b", "sub": "b", "mul": "norm", "div": "norm", "copy": "appended"}
"""Name of an operation to the kind of use of a parameter."""


def _kind(op: Op, parameter: TensorRef) -> str:
    """Return the kind of use of a parameter by an operation other than a projection."""
    name = plain_name(op)
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

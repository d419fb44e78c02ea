"""Group attentions whose code is equal, so that one of each group is judged.

Equal code means equal operations from query, key and value to the output: names, lines, arguments, shapes and numbers,
and equal constants, e.g. masks and tables of positions. Parameters may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import made_of
from ..graph.equal_layers import same_content, without_tensors
from ..naming.axes import AxisNames
from ..record.ops import Op, Recording, TensorRef
from ..running.subject import Run

Kind = tuple[Attention, AxisNames, int]
"""An attention, the names of its axes, and the number of attentions with equal code, itself included."""
Named = tuple[Attention, AxisNames]
"""An attention, and the names of its axes."""
Content = Callable[[TensorRef], Tensor | None]
"""Returns the value of a recorded tensor; None if it was not kept."""

_SOURCES = (
    ("query", "q_proj", "q_heads"),
    ("key", "k_proj", "k_heads"),
    ("value", "v_proj", "v_heads"),
)
"""By side, the stages that may be the first."""


def groups_of(run: Run, content: Content) -> tuple[tuple[Named, ...], ...]:
    """Return the attentions of each code, in order."""
    # Layers in a row that repeat operation by operation have equal code: one of them is read.
    by_place: dict[int, object] = {}
    groups: dict[object, list[Named]] = defaultdict(list)
    codes = _Codes(run, content)
    for named, instance in zip(run.attentions, run.distinct.instances, strict=True):
        place = instance.place
        if place not in by_place:
            by_place[place] = codes.of(named[0])
        groups[by_place[place]].append(named)
    return tuple(map(tuple, groups.values()))


def kinds_of(run: Run, content: Content) -> tuple[Kind, ...]:
    """Return the first attention of each code, in order."""
    return kinds_in(groups_of(run, content))


def kinds_in(groups: Iterable[Sequence[Named]]) -> tuple[Kind, ...]:
    """Return the first attention of each group, and how many it has."""
    kinds = []
    for group in groups:
        attention, names = group[0]
        kinds.append((attention, names, len(group)))
    return tuple(kinds)


class _Codes:
    """Describes the code of attentions of one run: two descriptions are equal if the code is."""

    def __init__(self, run: Run, content: Content) -> None:
        self._run = run
        self._content_of = content
        self._contents: dict[object, list[Tensor]] = defaultdict(list)
        """By layout, the different contents of constants."""
        self._by_tensor: dict[int, object] = {}
        """By tensor, the number of its content."""
        self._parameters = run.recording.parameter_storages
        self._writes = _writes_by_storage(run.recording)
        self._caches = _given_storages(run.recording) & self._writes.keys()
        """Storages from outside the run that it writes."""

    def of(self, attention: Attention) -> object:
        """Return the description of an attention."""
        sources = _sources_of(attention)
        ops = self._ops_to(_ends_of(attention), sources)
        derived = made_of(sources.keys() | self._weights_of(ops), ops)
        described: dict[int, object] = dict(sources)
        code: list[object] = []
        for op in ops:
            if not any(tensor.id in derived for tensor in op.inputs):
                continue  # a constant: its content says what it is
            code.append(self._described(op, described))
            for place, tensor in enumerate(op.outputs):
                described[tensor.id] = (len(code), place)
        stages = []
        for stage, tensor in attention.stages.items():
            stages.append((stage, described.get(tensor.id)))
        return tuple(code), tuple(stages), attention.scale, len(attention.masks)

    def _described(self, op: Op, described: Mapping[int, object]) -> object:
        """Return the description of an operation, given those of the tensors before it."""
        inputs = []
        for tensor in op.inputs:
            description = described.get(tensor.id)
            if description is None:
                description = self._from_outside(op, tensor)
            inputs.append(description)
        outputs = tuple(map(_layout, op.outputs))
        return op.name, op.source, _arguments(op), tuple(inputs), outputs

    def _ops_to(self, ends: Iterable[TensorRef], sources: Mapping[int, str]) -> list[Op]:
        """Return the operations after the sources were made that the ends are computed by, in order."""
        recording = self._run.recording
        start = max((recording.producers.get(number, -1) for number in sources), default=-1)
        needed: dict[int, Op] = {}
        queue = list(ends)
        while queue:
            tensor = queue.pop()
            op = recording.producer(tensor)
            if op is None or tensor.id in sources:
                continue
            if op.index <= start or op.index in needed:
                continue
            needed[op.index] = op
            for operand in op.inputs:
                queue.append(operand)
                queue += self._written_between(operand, start, op.index)
        return [needed[index] for index in sorted(needed)]

    def _written_between(self, tensor: TensorRef, start: int, stop: int) -> list[TensorRef]:
        """Return what operations between two places of the run write into the memory of a tensor."""
        written = []
        for write in self._writes.get(tensor.storage, ()):
            if start < write.index < stop:
                written.append(write.output)
        return written

    def _weights_of(self, ops: Iterable[Op]) -> set[int]:
        """Return the ids of the parameters, and of parts of them, that operations read."""
        weights: set[int] = set()
        for op in ops:
            weights.update(tensor.id for tensor in op.inputs if tensor.storage in self._parameters)
        return weights

    def _from_outside(self, op: Op, tensor: TensorRef) -> object:
        """Return what an operation reads that is not made from the query, the key and the value.

        Numbers of a cache and statistics of a norm are data, as parameters are: only their layout counts.
        """
        is_number = tensor.dtype.startswith(("float", "bfloat"))
        is_joined = op.kind in ("copy", "write") or op.does("joins")
        if tensor.storage in self._parameters or tensor.storage in self._caches:
            return "data", _layout(tensor)
        if is_number and (is_joined or "batch_norm" in op.base_name):
            return "data", _layout(tensor)
        return _layout(tensor), self._number(tensor)

    def _number(self, tensor: TensorRef) -> object:
        """Return the number of a constant's content, equal for equal content of one layout."""
        if tensor.id not in self._by_tensor:
            self._by_tensor[tensor.id] = self._number_of(tensor)
        return self._by_tensor[tensor.id]

    def _number_of(self, tensor: TensorRef) -> object:
        content = self._content_of(tensor)
        if content is None or content.is_meta:
            return self._run.recording.scalars.get(tensor.id)
        alike = self._contents[_layout(tensor)]
        for number, like in enumerate(alike):
            if content is like or same_content(content, like):
                return number
        alike.append(content)
        return len(alike) - 1


def _writes_by_storage(recording: Recording) -> Mapping[int, list[Op]]:
    """Return for each storage the operations that write into it."""
    writes: dict[int, list[Op]] = defaultdict(list)
    for op in recording.ops:
        if op.kind == "write" and op.outputs:
            writes[op.output.storage].append(op)
    return writes


def _given_storages(recording: Recording) -> set[int]:
    """Return the storages of inputs and buffers."""
    return {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}


def _sources_of(attention: Attention) -> dict[int, str]:
    """Return the ids of the query, the key and the value, with the sides that they are."""
    sources: dict[int, str] = {}
    for stages in _SOURCES:
        source = _first_stage(attention, stages)
        if source is not None:
            sources[source.id] = f"{sources.get(source.id, '')} {stages[0]}"
    return sources


def _first_stage(attention: Attention, stages: Iterable[str]) -> TensorRef | None:
    """Return the first of some stages that an attention has; None if it has none of them."""
    for stage in stages:
        if stage in attention.stages:
            return attention.stages[stage]
    return None


def _ends_of(attention: Attention) -> list[TensorRef]:
    """Return the last tensors of an attention."""
    ends = []
    for stage in ("output", "concat", "context"):
        if stage in attention.stages:
            ends.append(attention.stages[stage])
    for turn in attention.turns:
        ends.append(turn.value_product.op.output)
    return ends


def _layout(tensor: TensorRef) -> object:
    return tensor.shape, tensor.stride, tensor.dtype


def _arguments(op: Op) -> object:
    """Return the arguments of an operation that are no tensors."""
    named = []
    for name, value in op.kwargs.items():
        named.append((name, without_tensors(value)))
    return without_tensors(op.args), tuple(named)

"""Group attentions whose code is equal, so that one of each group is judged.

Equal code means equal operations from query, key and value to the output: names, lines, arguments, shapes and numbers,
and equal constants, e.g. masks and tables of positions. Parameters may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from torch import Tensor

from ...graph.attention import Attention
from ...graph.dataflow import made_of
from ...graph.instances import same_content, without_tensors
from ...naming.axes import AxisNames
from ...record.ops import Op, TensorRef
from ...running.subject import Run

Kind = tuple[Attention, AxisNames, int]
"""An attention, the names of its axes, and the number of attentions with equal code, itself included."""
Content = Callable[[TensorRef], Tensor | None]
"""Returns the value of a recorded tensor; None if it was not kept."""

_SOURCES = ("query", "q_proj", "q_heads"), ("key", "k_proj", "k_heads"), ("value", "v_proj", "v_heads")
"""By side, the stages that may be the first."""


def kinds_of(run: Run, content: Content) -> tuple[Kind, ...]:
    """Return the first attention of each code, in order."""
    # Layers in a row that repeat operation by operation have equal code: one of them is read.
    by_place: dict[int, object] = {}
    groups: dict[object, list[tuple[Attention, AxisNames]]] = defaultdict(list)
    codes = _Codes(run, content)
    for named, instance in zip(run.attentions, run.distinct.instances, strict=True):
        if instance.place not in by_place:
            by_place[instance.place] = codes.of(named[0])
        groups[by_place[instance.place]].append(named)
    return tuple([(*group[0], len(group)) for group in groups.values()])


class _Codes:
    """Describes the code of attentions of one run: two descriptions are equal if the code is."""

    def __init__(self, run: Run, content: Content) -> None:
        self._run, self._content_of = run, content
        self._contents: dict[object, list[Tensor]] = defaultdict(list)
        self._by_tensor: dict[int, object] = {}
        self._parameters = run.recording.parameter_storages
        self._writes: dict[int, list[Op]] = defaultdict(list)
        """By storage, the operations that write into it."""
        for op in run.recording.ops:
            if op.kind == "write" and op.outputs:
                self._writes[op.output.storage].append(op)
        given = (*run.recording.inputs, *run.recording.buffers)
        self._caches = {named.tensor.storage for named in given} & self._writes.keys()
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
            read = [described.get(tensor.id) or self._from_outside(op, tensor) for tensor in op.inputs]
            code.append((op.name, op.source, _arguments(op), tuple(read), tuple(map(_layout, op.outputs))))
            described.update((tensor.id, (len(code), place)) for place, tensor in enumerate(op.outputs))
        stages = tuple((stage, described.get(tensor.id)) for stage, tensor in attention.stages.items())
        return tuple(code), stages, attention.scale, len(attention.masks)

    def _ops_to(self, ends: Iterable[TensorRef], sources: dict[int, str]) -> list[Op]:
        """Return the operations after the sources were made that the ends are computed by, in order."""
        recording = self._run.recording
        start = max((recording.producers.get(number, -1) for number in sources), default=-1)
        needed: dict[int, Op] = {}
        queue = list(ends)
        while queue:
            tensor = queue.pop()
            op = recording.producer(tensor)
            if op is None or tensor.id in sources or op.index <= start or op.index in needed:
                continue
            needed[op.index] = op
            queue += op.inputs
            for read in op.inputs:
                queue += [write.output for write in self._writes[read.storage] if start < write.index < op.index]
        return [needed[index] for index in sorted(needed)]

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
        number = self._by_tensor.get(tensor.id)
        if number is None:
            number = self._by_tensor[tensor.id] = self._number_of(tensor)
        return number

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


def _sources_of(attention: Attention) -> dict[int, str]:
    """Return the ids of the query, the key and the value, with the sides that they are."""
    sources: dict[int, str] = {}
    for names in _SOURCES:
        stage = next((name for name in names if name in attention.stages), None)
        if stage is not None:
            number = attention.stages[stage].id
            sources[number] = f"{sources.get(number, '')} {names[0]}"
    return sources


def _ends_of(attention: Attention) -> list[TensorRef]:
    """Return the last tensors of an attention."""
    stages = [attention.stages[name] for name in ("output", "concat", "context") if name in attention.stages]
    return [*stages, *(turn.value_product.op.output for turn in attention.turns)]


def _layout(tensor: TensorRef) -> object:
    return tensor.shape, tensor.stride, tensor.dtype


def _arguments(op: Op) -> object:
    named = tuple([(name, without_tensors(value)) for name, value in op.kwargs.items()])
    return without_tensors(op.args), named

"""Group attentions whose code is equal, so that one of each group is judged.

Equal code means equal operations from query, key and value to the output: names, lines, arguments, layouts, and equal
constants, e.g. masks and tables of positions. Parameters may differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from ..graph.attention import Attention
from ..graph.equal_layers import same_content, without_tensors
from ..graph.replay import region
from ..naming.axes import AxisNames
from ..record.ops import Op, TensorRef
from ..running.subject import Run

Kind = tuple[Attention, AxisNames, int]
"""An attention, the names of its axes, and the number of attentions with equal code, itself included."""
Named = tuple[Attention, AxisNames]
"""An attention, and the names of its axes."""
Content = Callable[[TensorRef], Tensor | None]
"""Returns the value of a recorded tensor; None if it was not kept."""


def groups_of(run: Run, content: Content) -> tuple[tuple[Named, ...], ...]:
    """Return the attentions of each code, in order."""
    # Layers in a row that repeat operation by operation have equal code: one of them is read.
    by_place: dict[int, object] = {}
    groups: dict[object, list[Named]] = defaultdict(list)
    codes = _Codes(run, content)
    for named, instance in zip(run.attentions, run.distinct.instances, strict=True):
        if instance.place not in by_place:
            by_place[instance.place] = codes.of(named[0])
        groups[by_place[instance.place]].append(named)
    return tuple(map(tuple, groups.values()))


class _Codes:
    """Describes the code of attentions of one run: two descriptions are equal if the code is."""

    def __init__(self, run: Run, content: Content) -> None:
        self._run = run
        self._content_of = content
        self._contents: dict[object, list[Tensor]] = defaultdict(list)
        """By layout, the different contents of constants."""
        recording = run.recording
        given = {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}
        written = {op.output.storage for op in recording.ops if op.kind == "write" and op.outputs}
        self._data = recording.parameter_storages.keys() | (given & written)
        """Storages of parameters and caches, of which only the layout counts."""

    def of(self, attention: Attention) -> object:
        """Return the description of an attention."""
        sources, ends = _sources_of(attention), _ends_of(attention)
        ops: dict[int, Op] = {}
        for end in ends:
            ops |= {op.index: op for op in region(self._run.graph, tuple(sources), end).ops}
        described: dict[int, object] = {tensor.id: ("source", place) for place, tensor in enumerate(sources)}
        code: list[object] = []
        for index in sorted(ops):
            op = ops[index]
            inputs = []
            for tensor in op.inputs:
                inputs.append(described.get(tensor.id) or self._from_outside(op, tensor))
            arguments = [(name, without_tensors(value)) for name, value in op.kwargs.items()]
            outputs = tuple(map(_layout, op.outputs))
            code.append((op.name, op.source, without_tensors(op.args), tuple(arguments), tuple(inputs), outputs))
            for place, tensor in enumerate(self._run.graph.results(op)):
                described[tensor.id] = (len(code), place)
        stages = [(stage, described.get(tensor.id)) for stage, tensor in attention.stages.items()]
        return tuple(code), tuple(stages), attention.scale, len(attention.masks)

    def _from_outside(self, op: Op, tensor: TensorRef) -> object:
        """Return what an operation reads that is not made from the query, the key and the value.

        Numbers that are joined, e.g. of a cache, and statistics of a norm are data, as parameters are.
        """
        is_number = tensor.dtype.startswith(("float", "bfloat"))
        is_joined = op.kind in ("copy", "write") or op.does("joins") or "batch_norm" in op.base_name
        if tensor.storage in self._data or (is_number and is_joined):
            return "data", _layout(tensor)
        content = self._content_of(tensor)
        if content is None or content.is_meta:
            return _layout(tensor), self._run.recording.scalars.get(tensor.id)
        alike = self._contents[_layout(tensor)]
        for number, like in enumerate(alike):
            if content is like or same_content(content, like):
                return _layout(tensor), number
        alike.append(content)
        return _layout(tensor), len(alike) - 1


def _sources_of(attention: Attention) -> list[TensorRef]:
    """Return the query, the key and the value, or the first stages of them that there are."""
    sources: dict[int, TensorRef] = {}
    for side in ("query", "key", "value"):
        for stage in (side, f"{side[0]}_proj", f"{side[0]}_heads"):
            if stage in attention.stages:
                tensor = attention.stages[stage]
                sources[tensor.id] = tensor
                break
    return list(sources.values())


def _ends_of(attention: Attention) -> list[TensorRef]:
    """Return the last tensors of an attention."""
    ends = [attention.stages[stage] for stage in ("output", "concat", "context") if stage in attention.stages]
    return [*ends, *(turn.value_product.op.output for turn in attention.turns)]


def _layout(tensor: TensorRef) -> object:
    return tensor.shape, tensor.stride, tensor.dtype

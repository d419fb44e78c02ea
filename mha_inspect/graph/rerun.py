"""Run recorded operations again: with other values, or on the constants that a tensor was computed from."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..record.arguments import tensors_in
from ..record.kernels import STEPS
from ..record.ops import Op, Recording, TensorRef
from .dataflow import Graph, made_of
from .equal_layers import Layer
from .ids import any_in, ids_of, in_order

_LARGEST = 1 << 20
"""Tensors with more elements are not computed again."""
_FILLED = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operations that read no number of their input, only its shape and dtype."""
FUSED_DROPOUTS = ("native_dropout", "_fused_dropout")
"""Operations that give their input without what is dropped, and a mask of what is kept."""


def results_of(op: Op, content: Callable[[TensorRef], Tensor]) -> list[Tensor]:
    """Run an operation again and return its outputs. Raise `ValueError` if their shapes differ, or for a collective."""
    reshaped = reshaped_again(op, content)
    if reshaped is not None:
        return [reshaped]
    args = [as_argument(value, content) for value in op.args]
    kwargs = {}
    for name, value in op.kwargs.items():
        # What a module on meta computes of no input has numbers on the CPU.
        kwargs[name] = "cpu" if value == "meta" else as_argument(value, content)
    return call_again(op, args, kwargs)


def reshaped_again(op: Op, content: Callable[[TensorRef], Tensor]) -> Tensor | None:
    """Return the result of an operation that only reshapes its input; None for other operations.

    The changed tensor may have another memory layout than the recorded one. Raise `ValueError` for a collective.
    """
    if op.is_collective:
        raise ValueError("the other ranks would have to run it too")
    if op.makes_result or op.base_name in ("view", "_unsafe_view", "_reshape_alias"):
        return content(op.inputs[0]).reshape(op.output.shape)
    return None


def as_argument(value: Any, content: Callable[[TensorRef], Tensor]) -> Any:
    """Return a recorded argument as torch takes it: the content of a tensor, a list for a tuple, and dtypes."""
    if isinstance(value, TensorRef):
        return content(value)
    if isinstance(value, tuple):
        return [as_argument(item, content) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def call_again(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Call an operation with other arguments, and return its outputs. Raise `ValueError` if their shapes differ."""
    function = STEPS[op.base_name] if op.is_step else attrgetter(op.name)(torch.ops)
    results = []
    for _, tensor in tensors_in(function(*args, **kwargs)):
        results.append(tensor)
    shapes = [tuple(tensor.shape) for tensor in results]
    if shapes != [tensor.shape for tensor in op.outputs]:
        raise ValueError("the results have other shapes")
    return results


def memory_of(tensor: Tensor) -> Tensor:
    """Return all of the memory that a tensor views, as a row of elements."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def run_again(
    graph: Graph,
    op: Op,
    content: Callable[[TensorRef], Tensor],
) -> dict[int, Tensor]:
    """Run an operation again. Return its outputs, and what reads the memory that it wrote, by their ids.

    Nothing is drawn again: what is random has the numbers of the run. Raise `ValueError` if they were not kept.
    """
    if op.does("draws"):
        return _as_drawn(graph, op, content)
    if op.kind != "write":
        results = results_of(op, content)
        return with_ids(op.outputs, results)
    written = op.inputs[0]
    before = content(written)
    if op.output.storage != written.storage or not has_layout_of(before, written):
        raise ValueError("the memory has another layout")
    return write_again(op, before, content, graph.results(op))


def _as_drawn(
    graph: Graph,
    op: Op,
    content: Callable[[TensorRef], Tensor],
) -> dict[int, Tensor]:
    """Return the results of an operation that draws random numbers, as the run drew them, by their ids.

    A dropout keeps what it kept in the run. Raise `ValueError` if the numbers were not kept.
    """
    kept = graph.recording.values
    if op.base_name in FUSED_DROPOUTS:
        result, mask = op.outputs
        if mask.id not in kept:
            raise ValueError("what a dropout kept is unknown")
        scale = _scale_of_dropout(op)
        return {result.id: content(op.inputs[0]) * kept[mask.id] * scale, mask.id: kept[mask.id]}
    results = ids_of(graph.results(op))
    if not results <= kept.keys():
        raise ValueError("the numbers that were drawn are unknown")
    return {number: kept[number].detach() for number in results}


def _scale_of_dropout(op: Op) -> float:
    """Return by what a fused dropout multiplies the numbers that it keeps."""
    share = float(op.args[1])
    is_off = len(op.args) > 2 and op.args[2] is False
    if is_off:
        return 1.0
    if op.base_name == "native_dropout":
        share = 1 - share  # it has the probability of dropping, and `_fused_dropout` that of keeping
    return 1 / share if share else 0.0


def with_ids(tensors: Iterable[TensorRef], contents: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the content of tensors by their ids."""
    return {tensor.id: content for tensor, content in zip(tensors, contents, strict=False)}


def has_layout_of(tensor: Tensor, recorded: TensorRef) -> bool:
    """Return whether a tensor is where a recorded one was in its memory."""
    return tensor.storage_offset() == recorded.offset and tensor.stride() == recorded.stride


def write_again(
    op: Op,
    before: Tensor,
    content: Callable[[TensorRef], Tensor],
    views: Iterable[TensorRef],
) -> dict[int, Tensor]:
    """Run an operation that writes into a tensor, `before`; return the views of the memory afterwards, by id.

    A copy is written, so that what was read before keeps its content.
    """
    written = op.inputs[0]
    memory = memory_of(before).clone()

    def at(tensor: TensorRef) -> Tensor:
        return memory.as_strided(tensor.shape, tensor.stride, tensor.offset)

    results_of(op, lambda tensor: at(tensor) if tensor.id == written.id else content(tensor))
    return {tensor.id: at(tensor) for tensor in views}


def between(recording: Recording, sources: set[int], target: TensorRef) -> list[Op]:
    """Return the operations on the paths from sources to a tensor, in order."""
    # What was made before the first of them is on no path.
    places = [recording.producers.get(number, -1) for number in sources]
    start = min(places, default=-1)
    ordered = _behind(recording, sources, target, start)
    reached = made_of(sources, ordered)
    on_paths = [op for op in ordered if any_in(op.inputs, reached)]
    if not on_paths or on_paths[-1] is not recording.producer(target):
        return []
    return on_paths


def _behind(
    recording: Recording,
    ends: Container[int],
    target: TensorRef,
    start: int = -1,
) -> list[Op]:
    """Return the operations after `start` that a tensor is computed by from the tensors `ends`, in order."""
    needed: dict[int, Op] = {}
    queue = [target]
    while queue:
        tensor = queue.pop()
        if tensor.id in ends:
            continue
        op = recording.producer(tensor)
        if op is not None and op.index > start and op.index not in needed:
            needed[op.index] = op
            queue += op.inputs
    return in_order(needed)


def _blank(tensor: TensorRef) -> Tensor:
    """Return zeros for a tensor of which only shape and dtype are read."""
    return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))


class Constants:
    """Values of tensors that no projection has a part in, e.g. masks and tables of positions, computed when needed."""

    def __init__(
        self,
        graph: Graph,
        leaves: Mapping[int, Tensor],
        *,
        kept: bool = True,
    ) -> None:
        """Take the tensors of inputs, parameters and buffers by id; with `kept`, use what the recording kept too."""
        recording = graph.recording
        self._recording = recording
        self._leaves = {**recording.constants, **leaves}
        self._kept = recording.values if kept else {}
        self._values: dict[int, Tensor | None] = {}
        self._read: dict[int, TensorRef] = {}
        """The tensors whose content was taken, by id."""
        self.graph = graph

    @cached_property
    def _activations(self) -> set[int]:
        """Ids of tensors that depend on a projection."""
        ops = self._recording.ops
        projected: set[int] = set()
        reading: list[Op] = []
        for op in ops:
            if self.graph.is_projection(op):
                projected.add(op.output.id)
            if op.base_name not in _FILLED:
                reading.append(op)
        return made_of(projected, reading)

    @cached_property
    def _written(self) -> set[int]:
        """Numbers of storages that are written in place."""
        return {op.output.storage for op in self._recording.ops if op.kind == "write"}

    def value(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a tensor; None if it depends on a projection, or cannot be computed again."""
        if tensor.id not in self._values:
            self._values[tensor.id] = None  # while it is being computed
            value = self._compute(tensor)
            self._values[tensor.id] = None if value is None or value.is_meta else value
        return self._values[tensor.id]

    def numbers(self, tensor: TensorRef) -> list[int]:
        """Return the integers in a tensor; empty if they are unknown."""
        value = self.value(tensor)
        if value is None or value.is_floating_point() or value.is_complex():
            return []
        return [int(number) for number in value.flatten().tolist()]

    def _compute(self, tensor: TensorRef) -> Tensor | None:
        if tensor.id in self._kept:
            self._read[tensor.id] = tensor
            kept: Tensor = self._kept[tensor.id]
            return kept.detach()
        if tensor.id in self._activations:
            return None
        op = self._recording.producer(tensor)
        return self._leaf(tensor) if op is None else self._result(op, tensor)

    def _leaf(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a tensor that no operation made; None if it is unknown, or is written in place later."""
        if tensor.storage in self._written:
            return None
        self._read[tensor.id] = tensor
        number = self._recording.scalars.get(tensor.id)
        return self._leaves.get(tensor.id) if number is None else torch.tensor(number)

    def _result(self, op: Op, tensor: TensorRef) -> Tensor | None:
        """Return the value of a result of an operation, by running it again; None if that is not possible."""
        if tensor.storage in self._written:
            self._compute_before(tensor)
        is_filled = op.base_name in _FILLED
        if not is_filled and any(self.value(read) is None for read in op.inputs):
            return None
        if op.does("draws") or (tensor.numel > _LARGEST and op.kind != "view"):
            return None
        try:
            content = _blank if is_filled else self._computed
            with torch.no_grad():
                self._values.update(run_again(self.graph, op, content))
        except Exception:  # an operation may raise anything when called directly
            return None
        return self._values[tensor.id]

    def _compute_before(self, tensor: TensorRef) -> None:
        """Compute what leads to a tensor in written memory, in the order of the run: writes may be a long chain."""
        ends = {*self._values} - {tensor.id} | self._activations
        for op in _behind(self._recording, ends, tensor)[:-1]:
            self.value(op.output)

    def are_in(self, layer: Layer) -> bool:
        """Return whether everything that was read so far has the same content in an equal layer."""
        return layer.has_same(self._read.values(), self._recording.values, self._leaves)

    def _computed(self, tensor: TensorRef) -> Tensor:
        value = self.value(tensor)
        assert value is not None
        return value

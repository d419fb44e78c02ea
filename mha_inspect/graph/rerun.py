"""Run recorded operations again: with other values, or on the constants that a tensor was computed from."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..record.arguments import tensors_in
from ..record.ops import Op, Recording, TensorRef
from .dataflow import Graph, made_of
from .instances import Translation, same_content

_LARGEST = 1 << 20
"""Tensors with more elements are not computed again."""
_FILLED = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
"""Operations that read no number of their input, only its shape and dtype."""


def results_of(op: Op, content: Callable[[TensorRef], Tensor]) -> list[Tensor]:
    """Run an operation again and return its outputs. Raise `ValueError` if their shapes differ, or for a collective."""
    if op.is_collective:
        raise ValueError("the other ranks would have to run it too")
    if op.makes_result or op.base_name in ("view", "_unsafe_view", "_reshape_alias"):
        # The changed tensor may have another memory layout than the recorded one.
        return [content(op.inputs[0]).reshape(op.output.shape)]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return content(value)
        if isinstance(value, tuple):
            return [argument(item) for item in value]
        is_dtype = isinstance(value, str) and value.startswith("torch.")
        return getattr(torch, value.removeprefix("torch.")) if is_dtype else value

    namespace, name, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    # The steps of an opened kernel are recorded on meta.
    named = {key: "cpu" if value == "meta" else argument(value) for key, value in op.kwargs.items()}
    results = [tensor for _, tensor in tensors_in(function(*map(argument, op.args), **named))]
    if [tuple(tensor.shape) for tensor in results] != [tensor.shape for tensor in op.outputs]:
        raise ValueError("the results have other shapes")
    return results


def run_again(graph: Graph, op: Op, content: Callable[[TensorRef], Tensor]) -> dict[int, Tensor]:
    """Run an operation again. Return its outputs, and what reads the memory that it wrote, by their ids."""
    if op.kind != "write":
        return {output.id: result for output, result in zip(op.outputs, results_of(op, content), strict=False)}
    written, before = op.inputs[0], content(op.inputs[0])
    layout = before.storage_offset(), before.stride()
    if layout != (written.offset, written.stride) or op.output.storage != written.storage:
        raise ValueError("the memory has another layout")
    # A copy is written, so that what was read before keeps its content.
    memory = before.as_strided((before.untyped_storage().nbytes() // before.element_size(),), (1,), 0).clone()

    def at(tensor: TensorRef) -> Tensor:
        return memory.as_strided(tensor.shape, tensor.stride, tensor.offset)

    results_of(op, lambda tensor: at(tensor) if tensor.id == written.id else content(tensor))
    return {tensor.id: at(tensor) for tensor in graph.results(op)}


def between(recording: Recording, sources: set[int], target: TensorRef) -> list[Op]:
    """Return the operations on the paths from sources to a tensor, in order."""
    # What was made before the first of them is on no path.
    start = min((recording.producers.get(number, -1) for number in sources), default=-1)
    ordered = _behind(recording, sources, target, start)
    reached = made_of(sources, ordered)
    ordered = [op for op in ordered if any(tensor.id in reached for tensor in op.inputs)]
    return ordered if ordered and ordered[-1] is recording.producer(target) else []


def _behind(recording: Recording, known: Container[int], target: TensorRef, start: int = -1) -> list[Op]:
    """Return the operations after `start` that a tensor is computed by from known tensors, in order."""
    needed: dict[int, Op] = {}
    queue = [target]
    while queue:
        tensor = queue.pop()
        op = recording.producer(tensor)
        if tensor.id not in known and op is not None and op.index > start and op.index not in needed:
            needed[op.index] = op
            queue += op.inputs
    return [needed[index] for index in sorted(needed)]


def _blank(tensor: TensorRef) -> Tensor:
    """Return zeros for a tensor of which only shape and dtype are read."""
    return torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))


class Constants:
    """Values of tensors that no projection has a part in, e.g. masks and tables of positions, computed when needed."""

    def __init__(self, graph: Graph, leaves: Mapping[int, Tensor], *, kept: bool = True) -> None:
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
    def _unknown(self) -> tuple[set[int], set[int]]:
        """Ids of tensors that depend on a projection, and numbers of storages that are written in place."""
        ops = self._recording.ops
        projected = (op.output.id for op in ops if self.graph.is_projection(op))
        reading = [op for op in ops if op.base_name not in _FILLED]
        return made_of(projected, reading), {op.output.storage for op in ops if op.kind == "write"}

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
        known = value is not None and not value.is_floating_point() and not value.is_complex()
        return [int(number) for number in value.flatten().tolist()] if known and value is not None else []

    def _compute(self, tensor: TensorRef) -> Tensor | None:
        kept: Tensor | None = self._kept.get(tensor.id)
        if kept is not None:
            self._read[tensor.id] = tensor
            return kept.detach()
        activations, written = self._unknown
        op = self._recording.producer(tensor)
        if tensor.id in activations or (op is None and tensor.storage in written):
            return None
        if op is None:
            number = self._recording.scalars.get(tensor.id)
            self._read[tensor.id] = tensor
            return self._leaves.get(tensor.id) if number is None else torch.tensor(number)
        if tensor.storage in written:  # maybe a long chain of writes
            for earlier in _behind(self._recording, {*self._values} - {tensor.id} | activations, tensor)[:-1]:
                self.value(earlier.output)
        is_filled = op.base_name in _FILLED
        unknown = not is_filled and any(self.value(read) is None for read in op.inputs)
        if unknown or op.does("draws") or (tensor.numel > _LARGEST and op.kind != "view"):
            return None
        try:
            with torch.no_grad():
                self._values.update(run_again(self.graph, op, _blank if is_filled else self._known))
        except Exception:  # an operation may raise anything when called directly
            return None
        return self._values[tensor.id]

    def are_alike(self, translation: Translation) -> bool:
        """Return whether everything that was read so far has the same content where a translation leads."""
        return all(self._has_content_of(tensor, translation.tensor(tensor)) for tensor in self._read.values())

    def _has_content_of(self, tensor: TensorRef, like: TensorRef) -> bool:
        if tensor.id == like.id:
            return True
        values = self._recording.values
        pairs = ((known.get(tensor.id), known.get(like.id)) for known in (values, self._leaves))
        return all(left is right or same_content(left, right) for left, right in pairs)

    def _known(self, tensor: TensorRef) -> Tensor:
        value = self.value(tensor)
        assert value is not None
        return value

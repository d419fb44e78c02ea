"""Run a part of a recording again on drawn numbers, in float64, to measure what it computes.

What a part computes does not depend on how it is written. These two are measured alike, since only their numbers are
read (scores: `batch heads query key`):

    weights = (scores / 2).softmax(-1)
    weights = torch.exp2(scores * 0.7213475) / torch.exp2(scores * 0.7213475).sum(-1, keepdim=True)

A tensor from outside of the part, e.g. a mask, has its real content if no input and no parameter decides it. Otherwise
other numbers stand in for it, which are drawn again in each run: what does not change with them is the same for any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..record.arguments import tensors_in
from ..record.ops import Op, TensorRef
from .dataflow import Graph, made_of
from .rerun import Constants

_MOST = 1 << 23
"""Numbers of all results of a part; a part with more is not run again."""
_FLOATS = frozenset(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64"))


_DROPOUTS = ("native_dropout", "_fused_dropout")
"""Operations that are run as if nothing is dropped: their results are their input and a mask of ones."""
_COINS = ("bernoulli_",)
"""Operations that fill a tensor with what is kept, 0 or 1. They are run as if each were kept by its share: dropout
divides by that, and drops nothing."""
_BY_DTYPE = {"_softmax": 2, "_log_softmax": 2, "_safe_softmax": 2}
"""Operations with an argument that says which dtype they compute in, and its place."""


class NotReplayedError(ValueError):
    """A part of a recording cannot be run again: too large, random, or without the content of an index."""


@dataclass(frozen=True)
class Region:
    """The operations on all ways from some tensors to another, in the order of the run."""

    sources: tuple[TensorRef, ...]
    target: TensorRef
    ops: tuple[Op, ...]

    made: frozenset[int]
    """The ids of the tensors that the operations make, or that view memory that these wrote."""

    def from_outside(self) -> list[TensorRef]:
        """Return the tensors that the operations read and neither make nor have as a source."""
        inside = {*self.made, *(source.id for source in self.sources)}
        tensors: dict[int, TensorRef] = {}
        for op in self.ops:
            for tensor in op.inputs:
                if tensor.id not in inside:
                    tensors[tensor.id] = tensor
        return list(tensors.values())


def region(graph: Graph, sources: tuple[TensorRef, ...], target: TensorRef) -> Region:
    """Return the operations on the ways from the sources to a tensor; without operations if there is no way.

    Only the operations between the first source and the target are looked at, however long the run is.
    """
    recording = graph.recording
    last = recording.producers.get(target.id, -1)
    first = min(recording.producers.get(source.id, -1) for source in sources) + 1
    span = recording.ops[first : last + 1]
    reached = made_of({source.id for source in sources}, span)
    needed = {target.id}
    ops: list[Op] = []
    for op in reversed(span):
        results = graph.results(op)
        if any(tensor.id in needed for tensor in results) and any(tensor.id in reached for tensor in op.inputs):
            ops.append(op)
            needed.update(tensor.id for tensor in op.inputs)
    made = frozenset(tensor.id for op in ops for tensor in graph.results(op))
    return Region(sources, target, tuple(reversed(ops)), made)


class Replay:
    """Runs a region again; numbers stand in for tensors from outside whose content is unknown."""

    def __init__(self, graph: Graph, part: Region, constants: Constants) -> None:
        """Raise `NotReplayedError` if the region is too large, draws random numbers, or needs an unknown index."""
        self._graph = graph
        self._part = part
        size = sum(output.numel for op in part.ops for output in op.outputs)
        if not part.ops or size > _MOST:
            raise NotReplayedError("nothing to run" if not part.ops else "too large")
        if any(op.does("draws") and op.base_name not in (*_DROPOUTS, *_COINS) for op in part.ops):
            raise NotReplayedError("it draws random numbers")
        self._known: dict[int, Tensor] = {}
        self.unknown: list[TensorRef] = []
        """The tensors from outside that other numbers stand in for."""
        for tensor in part.from_outside():
            value = constants.value(tensor)
            if value is not None:
                self._known[tensor.id] = as_double(value)
            elif tensor.dtype.startswith(("int", "uint")):
                raise NotReplayedError("an index is unknown")
            else:
                self.unknown.append(tensor)
        self._after: dict[int, tuple[Op, ...]] = {}
        """Id of a source to the operations that depend on it."""
        self._sizes = _sizes_of_written(part)
        self._put_in_memory()

    def _put_in_memory(self) -> None:
        """Lay tensors from outside out in memory of the recorded size, where a region writes into it."""
        memories: dict[int, Tensor] = {}
        for tensor in sorted(self._part.from_outside(), key=lambda outside: outside.id):
            value = self._known.get(tensor.id)
            if tensor.storage not in self._sizes or value is None:
                continue
            memory = memories.get(tensor.storage)
            if memory is None:
                memory = memories[tensor.storage] = torch.zeros(self._sizes[tensor.storage], dtype=value.dtype)
            place = memory.as_strided(tensor.shape, tensor.stride, tensor.offset)
            self._known[tensor.id] = place.copy_(value)

    def run(self, given: Mapping[int, Tensor], draw: int = 0) -> dict[int, Tensor]:
        """Return the content of each tensor of the region by its id.

        Args:
            given: the content of each source by its id.
            draw: the number of the draw of the stand-ins. Equal numbers give equal stand-ins.
        """
        generator = torch.Generator().manual_seed(1000 + draw)
        content = self._known | {tensor.id: drawn(tensor, generator) for tensor in self.unknown} | dict(given)
        return self._through(self._part.ops, content)

    def _through(self, ops: Sequence[Op], content: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run operations, and return the content with that of the tensors that they make."""
        try:
            with torch.no_grad():
                for op in ops:
                    results = _run_again(self._graph, op, content.__getitem__)
                    if op.kind != "write":
                        results = self._in_own_memory(op, results)
                    content.update(results)
        except Exception as error:  # an operation may raise anything when it is called directly
            raise NotReplayedError(f"{type(error).__name__}: {error}") from None
        return content

    def run_again(self, content: Mapping[int, Tensor], changed: TensorRef, numbers: Tensor) -> dict[int, Tensor]:
        """Return the content of each tensor where one source has other numbers: only what depends on it is run."""
        if changed.id not in self._after:
            reached = made_of({changed.id}, self._part.ops)
            self._after[changed.id] = tuple(
                op for op in self._part.ops if any(tensor.id in reached for tensor in op.inputs)
            )
        return self._through(self._after[changed.id], {**content, changed.id: numbers})

    def _in_own_memory(self, op: Op, results: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return results laid out as they were recorded, if their memory is written into later."""
        read = {tensor.storage for tensor in op.inputs}
        laid: dict[int, Tensor] = {}
        for output in op.outputs:
            result = results.get(output.id)
            if result is None or output.storage not in self._sizes or output.storage in read:
                continue
            memory = torch.zeros(self._sizes[output.storage], dtype=result.dtype)
            laid[output.id] = memory.as_strided(output.shape, output.stride, output.offset).copy_(result)
        return results | laid


def _sizes_of_written(part: Region) -> dict[int, int]:
    """Return the memory that a region writes into by its number, and how many elements it has at least."""
    written = {op.output.storage for op in part.ops if op.kind == "write"}
    sizes: dict[int, int] = {}
    for op in part.ops:
        for tensor in (*op.inputs, *op.outputs):
            if tensor.storage in written and tensor.numel:
                ends = zip(tensor.shape, tensor.stride, strict=True)
                end = tensor.offset + 1 + sum((size - 1) * step for size, step in ends)
                sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), end)
    return sizes


def drawn(tensor: TensorRef, generator: torch.Generator, size: float = 1.0) -> Tensor:
    """Return drawn numbers in the memory layout of a tensor: normal ones in float64, or booleans, mostly true."""
    if tensor.dtype == "bool":
        return torch.rand(tensor.shape, generator=generator) < 0.7
    numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size
    if tensor.dtype.startswith("complex"):
        numbers = torch.complex(numbers, torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size)
    return in_layout(numbers, tensor)


def in_layout(numbers: Tensor, tensor: TensorRef) -> Tensor:
    """Return these numbers with the strides of a recorded tensor, where each element has memory of its own."""
    steps = [step for step, length in zip(tensor.stride, tensor.shape, strict=True) if length > 1]
    if 0 in steps:
        return numbers
    laid = torch.empty_strided(tensor.shape, tensor.stride, dtype=numbers.dtype)
    return laid.copy_(numbers)


def as_double(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, real and complex numbers in double precision."""
    plain = value.detach().cpu()
    if plain.is_complex():
        return plain.to(torch.complex128)
    return plain.double() if plain.is_floating_point() else plain


def _run_again(graph: Graph, op: Op, content: Callable[[int], Tensor]) -> dict[int, Tensor]:
    """Run an operation in double precision. Return its outputs, and what views the memory that it wrote, by id."""

    def of(tensor: TensorRef) -> Tensor:
        return content(tensor.id)

    if op.kind != "write":
        results = results_of(op, of)
        return {output.id: result for output, result in zip(op.outputs, results, strict=False)}
    written, before = op.inputs[0], of(op.inputs[0])
    if op.output.storage != written.storage:
        raise ValueError("it writes into other memory than that of its first operand")
    views = graph.results(op)
    alone = all(tensor.shape == written.shape and tensor.stride == written.stride for tensor in views)
    if alone and all(tensor.offset == written.offset for tensor in views):
        changed = before.clone()
        results_of(op, lambda tensor: changed if tensor.id == written.id else of(tensor))
        return {tensor.id: changed for tensor in views}
    if (before.storage_offset(), before.stride()) != (written.offset, written.stride):
        raise ValueError("the memory has another layout")
    # A copy is written, so that what was read before keeps its content.
    memory = before.as_strided((before.untyped_storage().nbytes() // before.element_size(),), (1,), 0).clone()

    def at(tensor: TensorRef) -> Tensor:
        return memory.as_strided(tensor.shape, tensor.stride, tensor.offset)

    results_of(op, lambda tensor: at(tensor) if tensor.id == written.id else of(tensor))
    return {tensor.id: at(tensor) for tensor in views}


def results_of(op: Op, content: Callable[[TensorRef], Tensor]) -> list[Tensor]:
    """Run an operation in double precision and return its outputs. Raise `ValueError` if their shapes differ."""
    if op.is_collective:
        raise ValueError("the other ranks would have to run it too")
    if op.makes_result or op.base_name in ("view", "_unsafe_view", "_reshape_alias"):
        return [content(op.inputs[0]).reshape(op.output.shape)]
    if op.base_name in _DROPOUTS:
        source = content(op.inputs[0])
        return [source, torch.ones_like(source, dtype=torch.bool)]
    if op.base_name in _COINS:
        kept = float(op.args[1]) if len(op.args) > 1 else 0.5
        return [content(op.inputs[0]).fill_(kept)]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return content(value)
        if isinstance(value, tuple):
            return [argument(item) for item in value]
        if isinstance(value, str) and value.startswith("torch."):
            return torch.float64 if value in _FLOATS else getattr(torch, value.removeprefix("torch."))
        return value

    namespace, name, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    # The steps of an opened kernel are recorded on meta.
    named = {key: "cpu" if key == "device" else argument(value) for key, value in op.kwargs.items()}
    values = [argument(value) for value in op.args]
    place = _BY_DTYPE.get(op.base_name)
    if place is not None and place < len(values):
        values[place] = None if op.base_name == "_safe_softmax" else False
    results = [tensor for _, tensor in tensors_in(function(*values, **named))]
    if [tuple(tensor.shape) for tensor in results] != [tensor.shape for tensor in op.outputs]:
        raise ValueError("the results have other shapes")
    return [result.double() if result.is_floating_point() else result for result in results]

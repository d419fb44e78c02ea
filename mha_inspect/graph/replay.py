"""Run a part of a recording again on drawn numbers, in float64, to measure what it computes.

What a part computes does not depend on how it is written. These two are measured alike, since only their numbers are
read (scores: `batch heads query key`):

    weights = (scores / 2).softmax(-1)
    weights = torch.exp2(scores * 0.7213475) / torch.exp2(scores * 0.7213475).sum(-1, keepdim=True)

A tensor from outside of the part, e.g. a mask, has its real content if no input and no parameter decides it. Otherwise
other numbers stand in for it, which are drawn again in each run: what does not change with them is the same for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .dataflow import Graph, made_of
from .ids import any_in, ids_of
from .rerun import (
    FUSED_DROPOUTS,
    Constants,
    as_argument,
    call_again,
    has_layout_of,
    memory_of,
    reshaped_again,
    with_ids,
)

_MOST = 1 << 23
"""Numbers of all results of a part; a part with more is not run again."""
_FLOATS = frozenset(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64"))


_COINS = ("bernoulli_",)
"""Operations that fill a tensor with what is kept, 0 or 1. They are run as if each were kept by its share: dropout
divides by that, and drops nothing."""
_BY_DTYPE = {"_softmax": 2, "_log_softmax": 2, "_safe_softmax": 2}
"""Operations with an argument that says which dtype they compute in, and its place."""


class NotReplayedError(ValueError):
    """A part of a recording cannot be run again: too large, random, or without the content of an index."""


_UNEXPECTED = (RuntimeError, ValueError, LookupError, ArithmeticError)
"""Errors of numbers and shapes. Those of Python code, e.g. a wrong name or type, are bugs and pass."""


@contextmanager
def measuring() -> Iterator[None]:
    """Measure in the body, on the CPU and without gradients: the door of every measurement of a recorded part.

    A module may compute anything, in shapes that nobody foresaw. Numbers or shapes that a measurement did not expect
    raise `NotReplayedError`: what it asked is then unknown.
    """
    # torch looks at each of its functions while a device is set.
    is_cpu = torch.get_default_device().type == "cpu"
    with nullcontext() if is_cpu else torch.device("cpu"), torch.no_grad():
        try:
            yield
        except _UNEXPECTED as error:
            raise NotReplayedError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Region:
    """The operations on all ways from some tensors to another, in the order of the run."""

    sources: tuple[TensorRef, ...]
    target: TensorRef
    ops: tuple[Op, ...]

    results: frozenset[int]
    """The ids of the tensors that the operations make, or that view memory that these wrote."""
    tensors: Mapping[int, TensorRef] = field(default_factory=dict)
    """The tensors of a narrowed region by id: some have fewer elements than in the recording."""
    indices: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)
    """The id of each tensor of a narrowed region to the indices that it keeps, by dimension."""

    def of_run(self, tensor: TensorRef) -> TensorRef:
        """Return a recorded tensor as it is here."""
        return self.tensors.get(tensor.id, tensor)

    def cut(self, tensor: TensorRef, value: Tensor) -> Tensor:
        """Return the elements that are kept of the content of a tensor."""
        for place, indices in self.indices.get(tensor.id, {}).items():
            value = value.index_select(place, indices)
        return value

    def from_outside(self) -> list[TensorRef]:
        """Return the tensors that the operations read and neither make nor have as a source."""
        inside = {*self.results, *ids_of(self.sources)}
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
    places = [recording.producers.get(source.id, -1) for source in sources]
    first = min(places) + 1
    span = recording.ops[first : last + 1]
    reached = made_of(ids_of(sources), span)
    needed = {target.id}
    ops: list[Op] = []
    results: set[int] = set()
    for op in reversed(span):
        output_ids = ids_of(graph.results(op))
        if output_ids.isdisjoint(needed):
            continue
        input_ids = ids_of(op.inputs)
        if input_ids.isdisjoint(reached):
            continue
        ops.append(op)
        results |= output_ids
        needed |= input_ids
    return Region(sources, target, tuple(reversed(ops)), frozenset(results))


class Replay:
    """Runs a region again; numbers stand in for tensors from outside whose content is unknown."""

    def __init__(self, graph: Graph, part: Region, constants: Constants) -> None:
        """Raise `NotReplayedError` if the region is too large, draws random numbers, or needs an unknown index."""
        _require_runnable(part)
        self._graph = graph
        self._part = part
        self._constants: dict[int, Tensor] = {}
        """The real content of tensors from outside, by id."""
        self.unknown: list[TensorRef] = []
        """The tensors from outside that other numbers stand in for."""
        for tensor in part.from_outside():
            value = constants.value(tensor)
            if value is not None:
                self._constants[tensor.id] = as_double(part.cut(tensor, value.detach().cpu()))
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
            value = self._constants.get(tensor.id)
            if tensor.storage not in self._sizes or value is None:
                continue
            if tensor.storage not in memories:
                size = self._sizes[tensor.storage]
                memories[tensor.storage] = torch.zeros(size, dtype=value.dtype)
            memory = memories[tensor.storage]
            place = memory.as_strided(tensor.shape, tensor.stride, tensor.offset)
            self._constants[tensor.id] = place.copy_(value)

    def run(self, given: Mapping[int, Tensor], draw: int = 0) -> dict[int, Tensor]:
        """Return the content of each tensor of the region by its id.

        Args:
            given: the content of each source by its id.
            draw: the number of the draw of the stand-ins. Equal numbers give equal stand-ins.
        """
        generator = torch.Generator().manual_seed(1000 + draw)
        content = dict(self._constants)
        for tensor in self.unknown:
            content[tensor.id] = drawn(tensor, generator)
        content.update(given)
        return self._through(self._part.ops, content)

    def _through(
        self,
        ops: Sequence[Op],
        content: dict[int, Tensor],
    ) -> dict[int, Tensor]:
        """Run operations, and return the content with that of the tensors that they make."""
        try:
            with torch.no_grad():
                for op in ops:
                    results = self._run_again(op, content.__getitem__)
                    if op.kind != "write":
                        results = self._in_own_memory(op, results)
                    content.update(results)
        except Exception as error:  # an operation may raise anything when it is called directly
            raise NotReplayedError(f"{type(error).__name__}: {error}") from None
        return content

    def _run_again(self, op: Op, content: Callable[[int], Tensor]) -> dict[int, Tensor]:
        """Run an operation in double precision. Return its outputs, and what views memory that it wrote, by id."""

        def of(tensor: TensorRef) -> Tensor:
            return content(tensor.id)

        if op.kind != "write":
            return with_ids(op.outputs, results_of(op, of))
        views = [self._part.of_run(tensor) for tensor in self._graph.results(op)]
        return _write_again(op, views, of)

    def run_again(
        self,
        content: Mapping[int, Tensor],
        changed: TensorRef,
        numbers: Tensor,
    ) -> dict[int, Tensor]:
        """Return the content of each tensor where one source has other numbers: only what depends on it is run."""
        if changed.id not in self._after:
            self._after[changed.id] = self._ops_after(changed)
        return self._through(self._after[changed.id], {**content, changed.id: numbers})

    def _ops_after(self, source: TensorRef) -> tuple[Op, ...]:
        """Return the operations of the region that depend on a source."""
        reached = made_of({source.id}, self._part.ops)
        return tuple(op for op in self._part.ops if any_in(op.inputs, reached))

    def _in_own_memory(self, op: Op, results: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return results laid out as they were recorded, if their memory is written into later."""
        read = {tensor.storage for tensor in op.inputs}
        laid = dict(results)
        for output in op.outputs:
            storage = output.storage
            if output.id not in results or storage not in self._sizes or storage in read:
                continue
            result = results[output.id]
            memory = torch.zeros(self._sizes[storage], dtype=result.dtype)
            place = memory.as_strided(output.shape, output.stride, output.offset)
            laid[output.id] = place.copy_(result)
        return laid


def _require_runnable(part: Region) -> None:
    """Raise `NotReplayedError` if a region is empty, too large, or draws random numbers."""
    if not part.ops:
        raise NotReplayedError("nothing to run")
    size = 0
    for op in part.ops:
        size += sum(output.numel for output in op.outputs)
    if size > _MOST:
        raise NotReplayedError("too large")
    for op in part.ops:
        if op.does("draws") and op.base_name not in (*FUSED_DROPOUTS, *_COINS):
            raise NotReplayedError("it draws random numbers")


def _sizes_of_written(part: Region) -> dict[int, int]:
    """Return the memory that a region writes into by its number, and how many elements it has at least."""
    written = {op.output.storage for op in part.ops if op.kind == "write"}
    sizes: dict[int, int] = {}
    for op in part.ops:
        for tensor in (*op.inputs, *op.outputs):
            if tensor.storage in written and tensor.numel:
                sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), _end(tensor))
    return sizes


def _end(tensor: TensorRef) -> int:
    """Return the position in memory after the last element of a tensor."""
    last = tensor.offset
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (size - 1) * step
    return last + 1


def drawn(tensor: TensorRef, generator: torch.Generator, size: float = 1.0) -> Tensor:
    """Return drawn numbers in the memory layout of a tensor: normal ones in float64, or booleans, mostly true."""
    if tensor.dtype == "bool":
        return torch.rand(tensor.shape, generator=generator) < 0.7
    numbers = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size
    if tensor.dtype.startswith("complex"):
        imaginary = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size
        numbers = torch.complex(numbers, imaginary)
    return in_layout(numbers, tensor)


def in_layout(numbers: Tensor, tensor: TensorRef) -> Tensor:
    """Return these numbers with the strides of a recorded tensor, where each element has memory of its own."""
    for step, length in zip(tensor.stride, tensor.shape, strict=True):
        if length > 1 and step == 0:
            return numbers
    laid = torch.empty_strided(tensor.shape, tensor.stride, dtype=numbers.dtype)
    return laid.copy_(numbers)


def as_double(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, real and complex numbers in double precision."""
    plain = value.detach().cpu()
    if plain.is_complex():
        return plain.to(torch.complex128)
    return plain.double() if plain.is_floating_point() else plain


def _write_again(
    op: Op,
    views: Sequence[TensorRef],
    content: Callable[[TensorRef], Tensor],
) -> dict[int, Tensor]:
    """Run an operation that writes into a copy of its first operand, so that what was read before keeps its content.

    Return what views the memory afterwards, by id.
    """
    written = op.inputs[0]
    before = content(written)
    if op.output.storage != written.storage:
        raise ValueError("it writes into other memory than that of its first operand")
    is_view_alone = all(_is_same_view(tensor, written) for tensor in views)
    if not is_view_alone and not has_layout_of(before, written):
        raise ValueError("the memory has another layout")
    memory = before if is_view_alone else memory_of(before)
    changed = memory.clone()

    def at(tensor: TensorRef) -> Tensor:
        if is_view_alone:
            return changed
        return changed.as_strided(tensor.shape, tensor.stride, tensor.offset)

    results_of(op, lambda tensor: at(tensor) if tensor.id == written.id else content(tensor))
    return {tensor.id: at(tensor) for tensor in views}


def _is_same_view(tensor: TensorRef, like: TensorRef) -> bool:
    """Return whether two tensors have the same place in a memory."""
    if tensor.shape != like.shape or tensor.offset != like.offset:
        return False
    return tensor.stride == like.stride


def results_of(op: Op, content: Callable[[TensorRef], Tensor]) -> list[Tensor]:
    """Run an operation in double precision and return its outputs. Raise `ValueError` if their shapes differ."""
    if op.base_name in FUSED_DROPOUTS:
        # As if nothing is dropped.
        source = content(op.inputs[0])
        return [source, torch.ones_like(source, dtype=torch.bool)]
    if op.base_name in _COINS:
        share = float(op.args[1]) if len(op.args) > 1 else 0.5
        return [content(op.inputs[0]).fill_(share)]
    reshaped = reshaped_again(op, content)
    if reshaped is not None:
        return [reshaped]
    args = [_in_double(value, content) for value in op.args]
    place = _BY_DTYPE.get(op.base_name)
    if place is not None and place < len(args):
        args[place] = None if op.base_name == "_safe_softmax" else False
    kwargs = {}
    for name, value in op.kwargs.items():
        # Whatever the device of the run, it is measured on the CPU.
        kwargs[name] = "cpu" if name == "device" else _in_double(value, content)
    results = []
    for result in call_again(op, args, kwargs):
        results.append(result.double() if result.is_floating_point() else result)
    return results


def _in_double(value: Any, content: Callable[[TensorRef], Tensor]) -> Any:
    """Return a recorded argument as torch takes it: the content of a tensor, and float64 for any float."""
    if isinstance(value, tuple):
        return [_in_double(item, content) for item in value]
    if isinstance(value, str) and value in _FLOATS:
        return torch.float64
    return as_argument(value, content)

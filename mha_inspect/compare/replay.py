"""Recompute a stage of a recorded attention after a change in an earlier one.

Only the operations between two stages run, on recorded tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..graph.rerun import between, run_again
from ..record.ops import Op, TensorRef
from ..running.subject import Run


class Recorded(Protocol):
    """A run with the values of its tensors."""

    @property
    def run(self) -> Run:
        """The run."""

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a recorded tensor; None if it was not kept."""


@dataclass(frozen=True)
class KeptRun:
    """A run whose operations are replayed."""

    run: Run
    leaves: Mapping[int, Tensor]
    """Values of inputs, parameters and buffers, by tensor id."""

    def content(self, tensor: TensorRef) -> Tensor | None:
        """Return the value of a recorded tensor; None if it was not kept."""
        value: Tensor | None = self.run.recording.values.get(tensor.id, self.leaves.get(tensor.id))
        return None if value is None else value.detach()


class LostError(Exception):
    """A property of an attention cannot be determined, e.g. because a tensor cannot be recomputed."""


def content_of(evidence: Recorded, tensor: TensorRef) -> Tensor:
    """Return the value of a recorded tensor. Raise `LostError` if it was not kept."""
    value = evidence.content(tensor)
    if value is None:
        raise LostError
    return value


def again(evidence: Recorded, source: TensorRef, value: Tensor, target: TensorRef) -> Tensor:
    """Return the value of `target` if `source` had this value. Raise `LostError` if it cannot be computed."""
    with torch.no_grad():
        value = laid_out_as(source, value)
        return replayed(evidence, {source.id: value}, target)[target.id]


def laid_out_as(recorded: TensorRef, value: Tensor) -> Tensor:
    """Return a value with the strides of a recorded tensor: views go by the recorded layout."""
    if value.stride() == recorded.stride:
        return value
    if 0 in recorded.stride:  # an expanded tensor cannot be written
        return value
    laid_out = torch.empty_strided(recorded.shape, recorded.stride, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)


def replayed(evidence: Recorded, values: Mapping[int, Tensor], target: TensorRef) -> dict[int, Tensor]:
    """Return every tensor between these ones and `target`, by id, recomputed; autograd may follow.

    Raise `LostError` if one cannot be computed.
    """
    graph = evidence.run.graph
    computed = dict(values)
    for op in between(graph.recording, {*values}, target):
        content = partial(_operand, evidence, computed, op)
        try:
            results = run_again(graph, op, content)
        except Exception as error:  # an operation may raise anything when called directly
            raise LostError from error
        for number, result in results.items():
            if number not in values:
                computed[number] = result
    if target.id not in computed:
        raise LostError
    return computed


def _operand(evidence: Recorded, computed: Mapping[int, Tensor], op: Op, tensor: TensorRef) -> Tensor:
    """Return the value that an operation reads: the recomputed one, else the recorded one."""
    value = computed.get(tensor.id)
    if value is None:
        value = content_of(evidence, tensor)
    if value.is_inference():
        value = value.clone()  # autograd rejects a tensor of inference mode
    is_written = op.kind == "write" and tensor is op.inputs[0]
    return _in_memory(evidence, op, value) if is_written else value


def _in_memory(evidence: Recorded, op: Op, value: Tensor) -> Tensor:
    """Return a value as it was in the memory that an operation writes, beside what else is read there afterwards."""
    written = op.inputs[0]
    tensors = [written, *evidence.run.graph.results(op)]
    size = max(map(_end_of, tensors))
    if _is_in_memory(written, size, value):
        return value
    memory = value.new_zeros(size)
    for tensor in tensors:
        content = evidence.content(tensor)
        if content is not None:
            place = memory.as_strided(tensor.shape, tensor.stride, tensor.offset)
            place.copy_(content)
    in_memory = memory.as_strided(written.shape, written.stride, written.offset)
    in_memory.copy_(value)
    return in_memory


def _is_in_memory(written: TensorRef, size: int, value: Tensor) -> bool:
    """Return whether a value lies as the recorded tensor did, in a memory of at least `size` elements."""
    if value.storage_offset() != written.offset or value.stride() != written.stride:
        return False
    return value.untyped_storage().nbytes() >= size * value.itemsize


def _end_of(tensor: TensorRef) -> int:
    """Return how many elements of its memory a tensor needs, from the first one on."""
    last = tensor.offset
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (size - 1) * step
    return last + 1

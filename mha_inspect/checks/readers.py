"""Find which operations read each parameter on the way to an output."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..record.ops import Op, Recording, TensorRef
from .evidence import Evidence

_LARGEST = 1 << 24
"""The largest output of a projection, in elements, whose unread features are searched."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers, which are not run themselves."""


class Readers:
    """The operations that read each parameter, limited to those that an output depends on."""

    def __init__(self, evidence: Evidence) -> None:
        recording = evidence.run.recording
        self._graph = evidence.run.graph
        self._module = evidence.subject.module
        self._read: dict[int, list[TensorRef]] = defaultdict(list)
        """The tensors that something reads, by the memory that they view."""
        for named in recording.outputs:
            self._read[named.tensor.storage].append(named.tensor)
        calls: dict[int, dict[int, Op]] = defaultdict(dict)
        for op in _reading_ops(recording):
            if op.kind == "view":
                continue
            for tensor in op.inputs:
                self._read[tensor.storage].append(tensor)
                calls[tensor.storage].setdefault(op.call, op)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.ops: dict[str, list[Op]] = {}
        """Parameter to the operations that use it, one per call."""
        for named in recording.parameters:
            self.shapes[named.name] = named.tensor.shape
            self.ops[named.name] = list(calls[named.tensor.storage].values())
        self._unread = [name for name, ops in self.ops.items() if not ops]
        self.mentioned: set[str] = set()
        """Parameters and modules that a finding already names."""

    def owners(self, name: str) -> set[str]:
        """Return the module of a parameter, and the module that runs that one: lists are not run."""
        module = self._run_module(name.split(".")[:-1])
        parent = self._run_module(module[:-1])
        return {".".join(module), ".".join(parent)}

    def _run_module(self, path: list[str]) -> list[str]:
        """Return the path of the innermost module on a path that is run: lists are not."""
        while path and isinstance(self._module.get_submodule(".".join(path)), _LISTS):
            path = path[:-1]
        return path

    def unread(self) -> list[str]:
        """Return unused parameters that no finding names yet."""
        return [name for name in self._unread if not self._is_mentioned(name)]

    def _is_mentioned(self, name: str) -> bool:
        """Return whether a finding names a parameter, or a module around it."""
        return any(f"{name}.".startswith(f"{path}.") for path in self.mentioned)

    def unread_features(self, projection: Op) -> set[int]:
        """Return the output features of a projection, after its bias, that no operation reads."""
        result = self._graph.after_projection(projection)
        if result.numel > _LARGEST or not _is_contiguous(result):
            return set()
        memory = torch.zeros(result.offset + result.numel, dtype=torch.bool)
        for tensor in self._read[result.storage]:
            if tensor.shape and tensor.numel:
                _mark(memory, tensor, result.itemsize)
        by_feature = memory[result.offset :].reshape(-1, result.shape[-1]).any(0)
        return set((~by_feature).nonzero().flatten().tolist())


def _is_contiguous(tensor: TensorRef) -> bool:
    """Return whether the elements of a tensor lie one after the other."""
    return tensor.stride == torch.empty(tensor.shape, device="meta").stride()


def _mark(memory: Tensor, tensor: TensorRef, itemsize: int) -> None:
    """Set the elements of a memory that a tensor covers, in numbers of `itemsize` bytes."""
    # A complex number covers two features.
    parts = max(tensor.itemsize // itemsize, 1)
    strides = [stride * parts for stride in tensor.stride]
    covered = memory.as_strided((*tensor.shape, parts), (*strides, 1), tensor.offset * parts)
    covered.fill_(True)


def _reading_ops(recording: Recording) -> list[Op]:
    """Return the operations that an output depends on, the last first."""
    tensors = {named.tensor.id for named in recording.outputs}
    storages = {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}
    reading = []
    for op in reversed(recording.ops):
        is_read = any(tensor.id in tensors for tensor in op.outputs)
        # What is written into the memory of an input or a buffer may be read in a later run.
        is_kept = op.kind == "write" and op.inputs and op.inputs[0].storage in storages
        if not is_read and not is_kept:
            continue
        reading.append(op)
        for tensor in op.inputs:
            tensors.add(tensor.id)
            storages.add(tensor.storage)
    return reading


@dataclass(frozen=True)
class Weight:
    """The weight of a projection: a parameter, or a slice of one."""

    name: str
    """The name of the parameter."""
    is_whole: bool
    """Whether the projection reads all of the parameter."""


def weight_of(evidence: Evidence, op: Op) -> Weight | None:
    """Return the weight of a projection; None if it is no parameter."""
    graph = evidence.run.graph
    parameters = evidence.run.recording.parameter_storages
    for tensor in reversed(op.inputs):
        parameter = parameters.get(graph.before_moves(tensor).storage)  # einsum copies a weight by head
        if parameter is None or len(tensor.shape) < 2 or not graph.is_weight(tensor):
            continue
        return Weight(parameter.name, is_whole=tensor.numel == parameter.tensor.numel)
    return None

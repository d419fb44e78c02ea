"""Find which operations read each parameter on the way to an output."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from ...record.ops import Op, Recording
from .evidence import Evidence

_LARGEST = 1 << 24
"""The largest output of a projection, in elements, whose unread features are searched."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers, which are not run themselves."""


class Readers:
    """The operations that read each parameter, limited to those that an output depends on."""

    def __init__(self, evidence: Evidence) -> None:
        recording = evidence.run.recording
        self._graph, self._module = evidence.run.graph, evidence.subject.module
        reading = _reading_ops(recording)
        self._read = [named.tensor for named in recording.outputs]
        calls: dict[int, dict[int, Op]] = defaultdict(dict)
        for op in reading:
            if op.kind == "view":
                continue
            for tensor in op.inputs:
                self._read.append(tensor)
                calls[tensor.storage].setdefault(op.call, op)
        self.shapes = {named.name: named.tensor.shape for named in recording.parameters}
        self.ops = {named.name: [*calls[named.tensor.storage].values()] for named in recording.parameters}
        """Parameter to the operations that use it, one per call."""
        self.mentioned: set[str] = set()
        """Parameters and modules that a finding already names."""

    def owners(self, name: str) -> set[str]:
        """Return the module of a parameter, and the module that runs that one: lists are not run."""
        path, owners = name.split(".")[:-1], set[str]()
        for _ in range(2):
            while path and isinstance(self._module.get_submodule(".".join(path)), _LISTS):
                path.pop()
            owners.add(".".join(path))
            path = path[:-1]
        return owners

    def unread(self) -> list[str]:
        """Return unused parameters that no finding names yet."""
        return [name for name, ops in self.ops.items() if not ops and not self._is_mentioned(name)]

    def _is_mentioned(self, name: str) -> bool:
        """Return whether a finding names a parameter, or a module around it."""
        return any(f"{name}.".startswith(f"{path}.") for path in self.mentioned)

    def unread_features(self, projection: Op) -> set[int]:
        """Return the output features of a projection, after its bias, that no operation reads."""
        result = self._graph.after_projection(projection)
        if result.numel > _LARGEST or result.stride != torch.empty(result.shape, device="meta").stride():
            return set()
        read = torch.zeros(result.offset + result.numel, dtype=torch.bool)
        for tensor in self._read:
            if tensor.storage == result.storage and tensor.shape and tensor.numel:
                # A complex number covers two features.
                parts = max(tensor.itemsize // result.itemsize, 1)
                strides = *(stride * parts for stride in tensor.stride), 1
                read.as_strided((*tensor.shape, parts), strides, tensor.offset * parts).fill_(True)
        by_feature = read[result.offset :].reshape(-1, result.shape[-1]).any(0)
        return {int(place) for place in (~by_feature).nonzero().flatten()}


def _reading_ops(recording: Recording) -> list[Op]:
    """Return the operations that an output depends on, the last first."""
    tensors = {named.tensor.id for named in recording.outputs}
    storages = {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}
    reading = []
    for op in reversed(recording.ops):
        is_read = any(tensor.id in tensors for tensor in op.outputs)
        # What is written into the memory of an input or a buffer may be read in a later run.
        if is_read or (op.kind == "write" and op.inputs and op.inputs[0].storage in storages):
            reading.append(op)
            tensors.update(tensor.id for tensor in op.inputs)
            storages.update(tensor.storage for tensor in op.inputs)
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
    graph, storages = evidence.run.graph, evidence.run.recording.parameter_storages
    for tensor in reversed(op.inputs):
        storage = graph.before_moves(tensor).storage  # einsum copies a weight by head
        if storage in storages and len(tensor.shape) > 1 and graph.is_weight(tensor):
            parameter = storages[storage]
            return Weight(parameter.name, is_whole=tensor.numel == parameter.tensor.numel)
    return None

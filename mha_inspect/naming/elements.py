"""Follow elements of tensors forward through a recording, by running its operations again on numbered elements.

Memory is simulated with one float64 tensor per storage, so that views are free. torch itself moves, joins and gathers
the numbers. Of the real contents only tables of indices are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from math import nan
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..graph.dataflow import Graph
from ..graph.rules import reduced_places, written_places
from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef

_MOVED_BY_TORCH = ("repeat", "roll", "flip", "im2col", "constant_pad_nd")


class Elements:
    """For each tensor the numbers of the elements that it is made of, from 1; nan without a numbered element."""

    def __init__(
        self,
        graph: Graph,
        merge: Callable[[Tensor, Tensor], Tensor] = torch.fmin,
        parameter: TensorRef | None = None,
    ) -> None:
        """Assign numbers to the elements of a parameter, if given, by their places in its memory."""
        self._graph, self._merge, self._parameter = graph, merge, parameter
        self._memory: dict[int, Tensor] = {}
        self.merged = False
        """Whether any element was made of two, of which `merge` chose one."""

    def number(self, tensor: TensorRef, numbers: Tensor) -> None:
        """Assign numbers to the elements of a tensor, and of the pieces that it is put together from."""
        self._of(tensor).copy_(numbers)
        join = self._graph.recording.joins.get(tensor.id)
        if join is not None:
            start, at = 0, join.args[1]
            for piece in join.inputs:
                self.number(piece, numbers.narrow(at, start, piece.shape[at]))
                start += piece.shape[at]

    def of(self, tensor: TensorRef) -> Tensor:
        """Return the numbers of a tensor; for complex numbers those of the real parts."""
        numbers = self._of(tensor) if self._knows(tensor) else torch.tensor(nan).expand(tensor.shape)
        return numbers.real if numbers.is_complex() else numbers

    def at(self, tensor: TensorRef, place: int, index: int = 0) -> Tensor:
        """Return the numbers of a tensor at one index of a dimension; the dimension stays, with size 1."""
        at, shape = place % len(tensor.shape), tensor.shape
        shape = (*shape[:at], 1, *shape[at + 1 :])
        return self.of(replace(tensor, shape=shape, offset=tensor.offset + index * tensor.stride[at]))

    def follow(self, ops: Iterable[Op]) -> None:
        """Run these operations, in order, on the numbers."""
        for op in ops:
            if (op.kind != "view" or op.does("joins")) and op.outputs and any(map(self._knows, op.inputs)):
                numbers = self._made_by(op)
                if numbers is not None or op.output.storage in self._memory:
                    self._of(op.output).copy_(torch.tensor(nan) if numbers is None else numbers)

    def entering(self, op: Op) -> Tensor:
        """Return for each projected feature the number of the first weight element that it is multiplied by."""
        weight, taken = weight_of(self._graph, op), self._graph.projected(op)
        if op.base_name == "convolution":
            return _by_channel(self.at(weight, 0).flatten(1)[0], len(taken.shape)).expand(taken.shape)
        if len(weight.shape) == 1 or len(taken.shape) == 1:
            return (self.of(weight) if len(weight.shape) == 1 else self.at(weight, 0)[0]).expand(taken.shape)
        return self.at(weight, -2 if taken is op.inputs[-1] else -1).mT.expand(taken.shape)

    def _knows(self, tensor: TensorRef) -> bool:
        is_parameter = self._parameter is not None and self._parameter.storage == tensor.storage
        return is_parameter or tensor.storage in self._memory

    def _of(self, tensor: TensorRef) -> Tensor:
        """Return the simulated memory of a tensor, grown if necessary."""
        strides = list(zip(tensor.shape, tensor.stride, strict=True))
        if self._parameter is not None and self._parameter.storage == tensor.storage:
            numbers = torch.tensor(tensor.offset - self._parameter.offset + 1, dtype=torch.float64)
            for size, stride in strides:
                numbers = numbers.unsqueeze(-1) + torch.arange(size, dtype=torch.float64) * stride
            return numbers
        parts = 2 if tensor.dtype.startswith("complex") else 1
        needed = (tensor.offset + max(sum((size - 1) * stride for size, stride in strides), 0) + 1) * parts
        memory = self._memory.get(tensor.storage, torch.empty(0, dtype=torch.float64))
        if len(memory) < needed:
            memory = self._memory[tensor.storage] = torch.cat([memory, memory.new_full((needed - len(memory),), nan)])
        if parts == 2:
            memory = torch.view_as_complex(memory[: len(memory) // 2 * 2].view(-1, 2))
        return memory.as_strided(tensor.shape, tensor.stride, tensor.offset)

    def _made_by(self, op: Op) -> Tensor | None:
        """Return the numbers of an operation's result; None if its elements no longer correspond to single ones."""
        name, shape = op.base_name.rstrip("_"), op.output.shape
        absorbed = self._graph.is_by_head(op) and not self._knows(weight_of(self._graph, op))
        if absorbed or self._graph.is_by_table(op):
            return self._turned(op)
        if self._graph.is_projection(op) or self._graph.is_by_channel(op):
            return self._projected(op)
        if name == "copy":
            return self.of(op.inputs[-1])
        if axes_rule(op.base_name) == "index_write":
            return self._written(op)
        if op.does("joins", "gathers") or name in _MOVED_BY_TORCH:
            return self._moved(op)
        if op.does("product", "runs", "softmax") or name.endswith("_like"):
            return None
        if axes_rule(op.base_name) == "reduce":
            source = self.of(op.inputs[0])
            for place in reduced_places(op):
                source = _where_alike(source, place)
            return source.reshape(shape)
        if op.does("pools", "picks"):
            return _at_any_place(self.of(op.inputs[0]), shape)
        reads = [self._of(tensor) for tensor in op.inputs if self._knows(tensor)]
        if "batch_norm" in name or "group_norm" in name:
            reads = [_by_channel(read, len(shape)) for read in reads]
        return self._together(reads, shape)

    def _projected(self, op: Op) -> Tensor | None:
        """Return for each output feature of a projection the first number of its row, or its bias.

        A product may also sum over positions, or over a kernel per channel: the features then keep their numbers.
        """
        taken, weight, shape = self._graph.projected(op), weight_of(self._graph, op), op.output.shape
        source = self.of(taken)
        if op.base_name == "convolution":
            reads = [self.at(weight, 1).flatten(1)[:, 0], *map(self.of, op.inputs[2:])]
            if self._graph.is_by_channel(op):
                reads.append(_at_any_place(source, shape))
            return self._together([_by_channel(read, len(shape)) for read in reads], shape)
        is_left = taken is op.inputs[-1]
        rows = self.at(weight, -1 if is_left else -2 if len(weight.shape) > 1 else 0)
        if is_left and len(taken.shape) == 1:
            rows = rows[..., 0]
        summed = _where_alike(source, -2 if is_left and source.dim() > 1 else -1)
        return self._together([rows, summed, *map(self.of, op.inputs[:-2])], shape)

    def _turned(self, op: Op) -> Tensor:
        """Return the numbers of features that a matrix mixes that has none itself, e.g. that of a rotation."""
        left = self._knows(op.inputs[-2])
        source, self.merged = self.of(op.inputs[-2 if left else -1]), True
        place = source.dim() - (1 if left or source.dim() < 2 else 2)
        return reduce(self._merge, source.unbind(place)).unsqueeze(place).expand(op.output.shape)

    def _written(self, op: Op) -> Tensor | None:
        """Return the numbers after an indexed write of values that are alike along the indexed dimension."""
        written, table, values = written_places(op), op.inputs[0], op.inputs[-1]
        if written is None or len(op.inputs) < 3:
            return None
        (place, rank), numbers = written, self.of(values)
        numbers = numbers[(None,) * (len(table.shape) - 1 + rank - numbers.dim())]
        numbers = numbers.flatten(place, place + rank - 1) if rank else numbers.unsqueeze(place)
        numbers = _where_alike(numbers, place)
        return self._together([self.of(table), numbers], table.shape)

    def _moved(self, op: Op) -> Tensor | None:
        """Return torch's result on the numbers; None if a table of indices was not kept."""

        def argument(value: Any) -> Any:
            if isinstance(value, tuple):
                return [argument(item) for item in value]
            if not isinstance(value, TensorRef):
                return value
            if value.dtype.startswith(("int", "uint", "bool")):
                return self._graph.recording.values[value.id].cpu()
            return self._of(value) if self._knows(value) else torch.full(value.shape, nan, dtype=torch.float64)

        function = attrgetter(op.name)(torch.ops)
        try:
            moved: Tensor = function(*map(argument, op.args), **{key: argument(v) for key, v in op.kwargs.items()})
        except (KeyError, RuntimeError):
            return None
        return torch.where(moved >= 1, moved, nan)  # padding has the value that it was filled with

    def _together(self, reads: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor | None:
        """Return several tensors of numbers, broadcast to one shape and merged; None without any."""
        together: Tensor | None = None
        for read in reads:
            sizes = zip(reversed(read.shape), reversed(shape), strict=False)
            if read.dim() > len(shape) or any(size not in (1, whole) for size, whole in sizes):
                continue
            if together is None or together.is_complex():
                together = read.expand(shape) if together is None else together
            else:
                self.merged |= bool(((together != read) & ~together.isnan() & ~read.isnan()).any())
                together = self._merge(together, read)
        return together


def weight_of(graph: Graph, op: Op) -> TensorRef:
    """Return the weight of a projection."""
    if op.base_name == "convolution":
        return op.inputs[1]
    return op.inputs[-1] if graph.is_weight(op.inputs[-1]) else op.inputs[-2]


def places_of_weight(graph: Graph, op: Op) -> tuple[int, int]:
    """Return the dimension of a projection's weight that is summed over, and the dimension of its output features."""
    if op.base_name == "convolution":
        return 1, 0
    if len(weight_of(graph, op).shape) < 2:
        return -1, -1
    return (-1, -2) if graph.projected(op) is op.inputs[-1] else (-2, -1)


def _where_alike(numbers: Tensor, place: int) -> Tensor:
    """Return the number that is the same along a dimension; nan where the numbers differ."""
    if not numbers.dim() or not numbers.shape[place]:
        return numbers.sum(place, keepdim=True) * nan  # no number is there to be the same
    first = numbers.narrow(place, 0, 1)
    return torch.where((numbers == first).all(place, keepdim=True), first, nan)


def _by_channel(numbers: Tensor, rank: int) -> Tensor:
    """Return one number per channel, shaped to broadcast to a tensor with the channels after the batch."""
    return numbers.view(-1, *[1] * (rank - 2)) if numbers.dim() == 1 else numbers


def _at_any_place(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of a pooled or selected tensor, along the dimensions whose size is unchanged."""
    return numbers[tuple(slice(None if n == m else 1) for n, m in zip(numbers.shape, shape, strict=True))].expand(shape)

"""Follow what tensors are made of through the operations of a recording, forward only: a rule for each family of them.

Of `q, k, v = qkv(x).chunk(3, -1)`, with 3 heads of 4 features, the keys are made of rows 12 to 23 of the weight: the
product gives its rows to the features, and the chunk takes 12 of them. Of the numbers only tables of indices are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..record.catalog import axes_rule
from ..record.ops import Named, Op, Recording, TensorRef
from .axis import plain_name, setting
from .indices import ABSENT, Indices, Shape, View, collapsed, with_size
from .label import Axis, Label, Span, combined, joined, read
from .rules import reduced_places, written_places


class Dataflow(Protocol):
    """What is asked of the dataflow of a recording."""

    recording: Recording

    @property
    def given_or_learned(self) -> set[int]:
        """Ids of tensors that depend on an input of the run or on a parameter."""

    def parameters_in(self, storage: int) -> list[Named]:
        """Return the parameters in a memory."""

    def is_weight(self, tensor: TensorRef) -> bool:
        """Return whether this is a parameter, at most viewed, copied, cast or scaled."""

    def is_projection(self, op: Op) -> bool:
        """Return whether this is a product or a convolution with a parameter."""

    def is_by_channel(self, op: Op) -> bool:
        """Return whether this is a convolution of each channel by itself."""

    def is_by_head(self, op: Op) -> bool:
        """Return whether this multiplies heads by a matrix each."""

    def is_by_table(self, op: Op) -> bool:
        """Return whether this multiplies by square matrices that are neither given nor learned."""


class Labels:
    """The labels of tensors that are made of parameters, and of tensors that are given a label.

    A view is known by its strides, so only operations that fill memory are followed.
    """

    def __init__(
        self,
        graph: Dataflow,
        given: Iterable[tuple[TensorRef, Label]] = (),
    ) -> None:
        self.graph = graph
        self._labels: dict[int, Label] = {}
        self._in_memory: dict[int, dict[int, tuple[View, Label]]] = {}
        """Storage to what operations put there, by the index of the operation."""
        self._followed: set[int] = set()
        for tensor, label in given:
            self._give(tensor, label)

    def _give(self, tensor: TensorRef, label: Label) -> None:
        """Take the label of a tensor, and of the pieces that it is put together from."""
        recording = self.graph.recording
        self._put(recording.producers.get(tensor.id, -1), tensor, label)
        join = recording.joins.get(tensor.id)
        if join is None:
            return
        place, start = join.args[1], 0
        for piece in join.inputs:
            has_place = len(piece.shape) == len(tensor.shape)
            size = piece.shape[place] if has_place else 1
            part = label.taking(place, np.arange(start, start + size))
            self._give(piece, part.reshaped(piece.shape))
            start += size

    def _put(self, index: int, tensor: TensorRef, label: Label) -> None:
        self._labels[tensor.id] = label
        self._in_memory.setdefault(tensor.storage, {})[index] = _view_of(tensor), label

    def follow(self, ops: Iterable[Op]) -> None:
        """Follow what these operations, in order, make. Each is followed once."""
        for op in ops:
            is_view = op.kind == "view" and not (op.does("joins") or op.makes_result)
            if is_view or op.index in self._followed or not op.outputs:
                continue
            self._followed.add(op.index)
            results = self._results(op)[: len(op.outputs)]
            for tensor, label in zip_longest(op.outputs, results):
                shape = shape_of(tensor)
                if label is not None and label.shape == shape:
                    self._put(op.index, tensor, label)
                elif op.kind == "write":  # what was there is gone
                    self._put(op.index, tensor, Label(shape))

    def of(self, tensor: TensorRef) -> Label:
        """Return the label of a tensor; without axes if it is made of none, or that is unknown."""
        label = self._labels.get(tensor.id)
        return self._from_memory(tensor) if label is None else label

    def _from_memory(self, tensor: TensorRef) -> Label:
        """Return the label of a view of a parameter, or of memory that operations filled."""
        view = _view_of(tensor)
        filled = self._filled_before(tensor)
        parameters = self.graph.parameters_in(tensor.storage)
        if not parameters:
            return read(view, filled)
        labels = []
        for named in parameters:
            parameter = _view_of(named.tensor), Label.whole(named.name, named.tensor.shape)
            labels.append(read(view, [parameter, *filled]))
        return combined(labels, view.shape)

    def _filled_before(self, tensor: TensorRef) -> list[tuple[View, Label]]:
        """Return what operations put into the memory of a tensor until it was made, in order."""
        in_memory = self._in_memory.get(tensor.storage)
        if in_memory is None:
            return []
        last = self.graph.recording.producers.get(tensor.id, -1)
        filled: list[tuple[View, Label]] = []
        for index in sorted(in_memory):
            if index > last:
                break
            place, label = in_memory[index]
            if filled and place == filled[0][0]:
                filled = []  # all that was there is written over
            filled.append((place, label))
        return filled

    def _results(self, op: Op) -> Results:
        """Return the labels of an operation's outputs; None where they are unknown."""
        operands = [self.of(tensor) for tensor in op.inputs]
        if not any(label.spans for label in operands):
            return []
        name = plain_name(op)
        rule = RULES.get(name) or RULES.get(axes_rule(op.base_name))
        if rule is not None:
            return rule(self.graph, op, operands)
        is_new = name.startswith("new_") or name.endswith("_like") or name in ("fill", "zero")
        if is_new or op.does("product", "runs", "softmax", "draws"):
            return []
        if op.does("pools", "picks"):
            return [_at_unchanged(operands[0], op.output.shape)]
        return _pointwise(self.graph, op, operands)


def is_made_of(graph: Dataflow, tensor: TensorRef, source: TensorRef, ops: Iterable[Op]) -> bool:
    """Return whether a tensor has elements that these operations, in order, make of another one.

    Keys and values may be joined, or written into one memory, and cut apart again. True if that is unknown.
    """
    axis = Axis("source")
    shape = shape_of(source)
    everywhere = Span.of(np.zeros([1] * len(shape), np.int64))
    labels = Labels(graph, [(source, Label(shape, {axis: everywhere}))])
    labels.follow(ops)
    span = labels.of(tensor).spans.get(axis)
    return span is None or bool(span.is_known.any())


def shape_of(tensor: TensorRef) -> Shape:
    """Return the shape of a tensor's label: complex numbers have a last dimension of 2."""
    return (*tensor.shape, 2) if _is_complex(tensor) else tensor.shape


def _is_complex(tensor: TensorRef) -> bool:
    return tensor.dtype.startswith("complex")


def _view_of(tensor: TensorRef) -> View:
    shape, stride, offset = tensor.shape, tensor.stride, tensor.offset
    if not _is_complex(tensor):
        return View(shape, stride, offset)
    steps = [2 * step for step in stride]
    return View((*shape, 2), (*steps, 1), 2 * offset)


# -- rules ------------------------------------------------------------------------------------------------------------

Results = Sequence[Label | None]
"""The label of each output of an operation; None where it is unknown."""
Rule = Callable[[Dataflow, Op, list[Label]], Results]
"""A function of an operation and the labels of its inputs that returns the labels of its outputs."""
_FIRST = np.array([0])
"""The first index of a dimension."""


def _pointwise(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Combine element by element; a number for each channel comes after the batch."""
    if "batch_norm" in op.base_name or "group_norm" in op.base_name:
        rank = len(op.output.shape)
        operands = [_by_channel(label, rank) for label in operands]
    if _is_complex(op.output):
        operands = list(map(_as_complex, operands, op.inputs))
    return [combined(operands, shape_of(op.output))]


def _as_complex(label: Label, tensor: TensorRef) -> Label:
    """Return the label of a tensor with a last dimension for complex numbers."""
    return label if _is_complex(tensor) else label.reshaped((*label.shape, 1))


def _by_channel(label: Label, rank: int) -> Label:
    """Return the label of one number per channel, to broadcast to a tensor with the channels after the batch."""
    if len(label.shape) != 1:
        return label
    return label.reshaped((*label.shape, *[1] * (rank - 2)))


def _first(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    return [operands[0]]


def _copy(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    return [combined(operands[-1:], shape_of(op.output))]


def _reshape(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    return [operands[0].reshaped(shape_of(op.output))]


def _join(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    rank = len(op.output.shape)
    place = int(setting(op, 1, "dim", 0)) % max(rank, 1)
    used = []
    for label, tensor in zip(operands, op.inputs, strict=True):
        if op.base_name == "stack":
            sizes = list(label.shape)
            sizes.insert(place, 1)
            label = label.reshaped(tuple(sizes))
        if tensor.numel:
            used.append(label)
    if not used or not all(label.shape for label in used):
        return []
    return [joined(used, place)]


def _reduce(graph: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Sum, or take a mean: what differs is mixed. The sum of a product with a table, e.g. a rotation, has all of it."""
    places = reduced_places(op)
    label = operands[0]
    if op.base_name == "sum" and _is_by_numbers(graph, op.inputs[0]):
        for place in places:
            label = label.spread(place)
    return [label.reduced(places, tensor.shape) for tensor in op.outputs]


def _is_by_numbers(graph: Dataflow, tensor: TensorRef) -> bool:
    """Return whether a tensor is multiplied by numbers that are neither given nor learned, e.g. a table."""
    op = graph.recording.producer(tensor)
    if op is None or op.base_name != "mul":
        return False
    return any(factor.id not in graph.given_or_learned for factor in op.inputs)


def _at_unchanged(label: Label, shape: Shape) -> Label | None:
    """Return the label of a pooled or selected tensor, without what differs along dimensions of another size."""
    if len(shape) != len(label.shape):
        return None
    changed = [place for place, size in enumerate(shape) if size != label.shape[place]]
    return Label(shape, label.without(*changed).spans)


# -- products ---------------------------------------------------------------------------------------------------------


def _product(graph: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Multiply matrices. A weight gives its rows, with their first column; what is summed of an activation is lost.

    Heads that are multiplied by a matrix each, or rotated by a table, stay what they are made of.
    """
    if op.does("distances"):
        return []
    if not graph.is_projection(op) and not graph.is_by_table(op):
        return []
    *added, left, right = operands
    first, second = op.inputs[-2:]
    left = _summed(graph, op, first, left, len(left.shape) - 1)
    right = _summed(graph, op, second, right, max(len(right.shape) - 2, 0))
    shape = op.output.shape
    if len(second.shape) == 1:  # mv, dot
        left = left.mapped(left.shape[:-1], lambda array: array.squeeze(-1))
        right = Label((1,) * len(shape), right.spans if shape else {})
    return [combined([*added, left, right], shape)]


def _summed(graph: Dataflow, op: Op, factor: TensorRef, label: Label, place: int) -> Label:
    """Return the label of a factor of a product after the sum over one of its dimensions, which stays with size 1."""
    if graph.is_weight(factor):
        return label.taking(place, _FIRST)
    if graph.is_by_head(op) or graph.is_by_table(op):
        return label.spread(place)
    return label.reduced([place], with_size(label.shape, place, 1))


def _convolution(graph: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Convolve: the output channels are the rows of the weight; one of each channel by itself keeps the channels."""
    source, weight, *bias = operands
    shape = op.output.shape
    if setting(op, 6, "transposed", False):
        weight = weight.swapped(0, 1)
    for place in range(1, len(weight.shape)):
        weight = weight.taking(place, _FIRST)
    ones = [1] * (len(shape) - 2)
    parts = [rows.reshaped((rows.shape[0], *ones)) for rows in (weight, *bias)]
    if graph.is_by_channel(op):
        channels = _at_unchanged(source, shape)
        if channels is not None:
            parts.append(channels)
    return [combined(parts, shape)]


# -- tables of indices ------------------------------------------------------------------------------------------------


_MARK = 0.25
"""What is added to each index: a number that torch pads with has another fraction."""


def _moved(graph: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Let torch itself read by indices, roll, flip, pad or repeat: what is alike along a dimension needs no indices."""
    source, touched = operands[0], _touched(op)
    contents = _contents(graph, op.inputs[1:])
    if contents is None:
        return []
    for table in op.inputs[1:]:
        if table.id not in contents:
            source = source.without(*touched)
            contents[table.id] = torch.zeros(table.shape, dtype=torch.long)

    def along(array: Indices) -> Indices:
        return _moved_by_torch(op, array, touched, contents)

    try:
        return [source.mapped(op.output.shape, along)]
    except (RuntimeError, IndexError):
        return []


def _moved_by_torch(
    op: Op,
    array: Indices,
    touched: Collection[int],
    contents: dict[int, Tensor],
) -> Indices:
    """Return indices after an operation that moves them: torch runs it on their numbers.

    Args:
        op: the operation.
        array: the indices, with size one along the dimensions along which they do not differ.
        touched: the dimensions that the operation changes.
        contents: the other tensors that it reads, by id.
    """
    first = op.inputs[0]
    sizes = []
    for place, length in enumerate(first.shape):
        sizes.append(length if place in touched else array.shape[place])
    numbers = torch.from_numpy(np.broadcast_to(array, sizes) + _MARK)
    contents = {**contents, first.id: numbers}
    function = attrgetter(op.name)(torch.ops)
    args = _with_contents(op.args, contents)
    kwargs = {}
    for name, value in op.kwargs.items():
        kwargs[name] = _with_contents(value, contents)
    moved = function(*args, **kwargs).numpy()
    moved = np.nan_to_num(moved, nan=0, posinf=0, neginf=0)
    is_marked = moved % 1 == _MARK
    indices = np.where(is_marked, np.floor(moved), ABSENT)
    return collapsed(indices.astype(np.int64))


def _contents(graph: Dataflow, tables: Iterable[TensorRef]) -> dict[int, Tensor] | None:
    """Return the numbers of tables of indices, by id, as far as they were kept; None if a mask was not."""
    contents: dict[int, Tensor] = {}
    for table in tables:
        value = graph.recording.values.get(table.id)
        if value is not None and not value.is_meta:
            contents[table.id] = value.cpu()
        elif table.dtype == "bool":
            return None
    return contents


def _with_contents(value: Any, contents: Mapping[int, Tensor]) -> Any:
    """Return an argument with the content of each tensor."""
    if isinstance(value, tuple):
        return [_with_contents(item, contents) for item in value]
    if isinstance(value, TensorRef):
        return contents[value.id]
    return value


def _touched(op: Op) -> Collection[int]:
    """Return the dimensions that an operation does not leave as they are."""
    name = op.base_name
    rank = len(op.inputs[0].shape)
    if name == "embedding":
        return [0]
    if name in ("roll", "flip"):
        places = op.args[-1] or range(rank)
        return [place % rank for place in places]
    if len(op.args) < 2:
        return range(rank)
    argument = op.args[1]
    if name == "index":
        return [place for place, table in enumerate(argument) if table is not None]
    if name == "index_select":
        return [int(argument) % max(rank, 1)]
    if name == "constant_pad_nd":
        padded = len(argument) // 2
        return range(rank)[-padded:]
    if name == "repeat" and len(argument) == rank:
        return [place for place, times in enumerate(argument) if times > 1]
    return range(rank)


def _index_write(_: Dataflow, op: Op, operands: list[Label]) -> Results:
    """Write `table[..., indices, ...] = values`, e.g. into a cache: what is alike along the dimension counts."""
    written = written_places(op)
    if written is None or len(operands) < 3:
        return []
    place, rank = written
    table, values = operands[0], operands[-1]
    shape = table.shape
    missing = len(shape) - 1 + rank - len(values.shape)
    if missing < 0:
        return []
    values = values.reshaped((1,) * missing + values.shape)
    end = place + rank

    def with_one(sizes: Shape) -> Shape:
        return (*sizes[:place], 1, *sizes[end:])

    alike = values.without(*range(place, end))
    moved = alike.mapped(with_one(values.shape), lambda array: array.reshape(with_one(array.shape)))
    return [combined([table, moved], shape)]


RULES: Mapping[str, Rule] = {
    "pointwise": _pointwise,
    "copy": _copy,
    "result": _first,
    "reshape": _reshape,
    "join": _join,
    "reduce": _reduce,
    "product": _product,
    "convolution": _convolution,
    "index_write": _index_write,
    **dict.fromkeys(("repeat", "roll", "flip", "pad", "columns", "index", "gather", "repeat_interleave"), _moved),
}
"""The rules by the names of operations, or of families of them in `record.catalog`."""

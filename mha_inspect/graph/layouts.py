"""Follow what tensors are made of through the operations of a recording, forward only: a rule for each family of them.

Of `q, k, v = qkv(x).chunk(3, -1)`, with 3 heads of 4 features, the keys are made of rows 12 to 23 of the weight: the
product gives its rows to the features, and the chunk takes 12 of them. Of the numbers only tables of indices are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axis import setting
from .dataflow import Graph
from .layout import (
    ABSENT,
    Indices,
    Layout,
    Shape,
    View,
    collapsed,
    combined,
    joined,
    read,
    reduced,
    reshaped,
    spread,
    swapped,
    taken,
    whole,
)
from .rules import reduced_places, written_places


class Layouts:
    """The layouts of tensors that are made of parameters, or of what is given instead.

    A view is known by its strides, so only operations that fill memory are followed.
    """

    def __init__(self, graph: Graph, given: Iterable[tuple[TensorRef, Layout]] = ()) -> None:
        self.graph = graph
        self._layouts: dict[int, Layout] = {}
        self._in_memory: dict[int, dict[int, tuple[TensorRef, Layout]]] = {}
        """Storage to what operations put there, by the index of the operation."""
        self._followed: set[int] = set()
        for tensor, layout in given:
            self._give(tensor, layout)

    def _give(self, tensor: TensorRef, layout: Layout) -> None:
        """Take the layout of a tensor, and of the pieces that it is put together from."""
        recording = self.graph.recording
        self._put(recording.producers.get(tensor.id, -1), tensor, layout)
        join, start = recording.joins.get(tensor.id), 0
        for piece in () if join is None else join.inputs:
            place = join.args[1] if join is not None else 0
            size = piece.shape[place] if len(piece.shape) == len(tensor.shape) else 1
            part = taken(layout, place, np.arange(start, start + size))
            self._give(piece, reshaped(part, piece.shape))
            start += size

    def _put(self, index: int, tensor: TensorRef, layout: Layout) -> None:
        self._layouts[tensor.id] = layout
        self._in_memory.setdefault(tensor.storage, {})[index] = tensor, layout

    def follow(self, ops: Iterable[Op]) -> None:
        """Follow what these operations, in order, make. Each is followed once."""
        for op in ops:
            is_view = op.kind == "view" and not (op.does("joins") or op.makes_result)
            if is_view or op.index in self._followed or not op.outputs:
                continue
            self._followed.add(op.index)
            layouts = [self.of(tensor) for tensor in op.inputs]
            results = self._results(op, layouts) if any(layout.spans for layout in layouts) else []
            for tensor, layout in zip_longest(op.outputs, results[: len(op.outputs)]):
                if layout is not None and layout.shape == shape_of(tensor):
                    self._put(op.index, tensor, layout)
                elif op.kind == "write":  # what was there is gone
                    self._put(op.index, tensor, Layout(shape_of(tensor)))

    def of(self, tensor: TensorRef) -> Layout:
        """Return the layout of a tensor; without sources if it is made of none, or that is unknown."""
        known = self._layouts.get(tensor.id)
        return self._from_memory(tensor) if known is None else known

    def _from_memory(self, tensor: TensorRef) -> Layout:
        """Return the layout of a view of a parameter, or of memory that operations filled."""
        view, last = _view_of(tensor), self.graph.recording.producers.get(tensor.id, -1)
        filled: list[tuple[View, Layout]] = []
        for index, (ref, layout) in sorted(self._in_memory.get(tensor.storage, {}).items()):
            if index <= last:
                place = _view_of(ref)
                filled = [(place, layout)] if filled and place == filled[0][0] else [*filled, (place, layout)]
        of_parameters = [
            read(view, [(_view_of(named.tensor), whole(named.name, named.tensor.shape)), *filled])
            for named in self.graph.parameters_in(tensor.storage)
        ]
        return combined(of_parameters or [read(view, filled)], view.shape)

    def entering(self, op: Op) -> Layout:
        """Return for each projected feature the first weight element that it is multiplied by."""
        weight, rank = self.graph.weight_of(op), len(self.graph.weight_of(op).shape)
        layout, (summed, made) = self.of(weight), self.graph.places_of_weight(op)
        if rank < 2:
            return layout
        layout = taken(layout, made % rank, np.array([0]))
        if op.base_name == "convolution":
            for place in range(2, rank):
                layout = taken(layout, place, np.array([0]))
            return reshaped(layout, (weight.shape[summed], *[1] * (rank - 2)))
        if len(self.graph.projected(op).shape) == 1:
            return reshaped(layout, (max(layout.shape),))
        return swapped(layout, rank - 2, rank - 1)

    def _results(self, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
        """Return the layouts of an operation's outputs; None where they are unknown."""
        name = op.base_name.rstrip("_")
        rule = _RULES.get(name) or _RULES.get(axes_rule(op.base_name))
        if rule is not None:
            return rule(self, op, layouts)
        is_new = name.startswith("new_") or name.endswith("_like") or name in ("fill", "zero")
        if is_new or op.does("product", "runs", "softmax", "draws"):
            return []
        if op.does("pools", "picks"):
            return [_at_unchanged(layouts[0], op.output.shape)]
        return _pointwise(self, op, layouts)


def shape_of(tensor: TensorRef) -> Shape:
    """Return the shape of a tensor's layout: complex numbers have a last dimension of 2."""
    return (*tensor.shape, 2) if _is_complex(tensor) else tensor.shape


def _is_complex(tensor: TensorRef) -> bool:
    return tensor.dtype.startswith("complex")


def _view_of(tensor: TensorRef) -> View:
    if _is_complex(tensor):
        return View((*tensor.shape, 2), (*(2 * step for step in tensor.stride), 1), 2 * tensor.offset)
    return View(tensor.shape, tensor.stride, tensor.offset)


# -- rules ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Layouts, Op, list[Layout]], Sequence[Layout | None]]
"""A function of an operation and the layouts of its inputs that returns the layouts of its outputs."""


def _pointwise(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    """Combine element by element; a number for each channel comes after the batch."""
    rank = len(op.output.shape)
    if "batch_norm" in op.base_name or "group_norm" in op.base_name:
        layouts = [_by_channel(layout, rank) for layout in layouts]
    if _is_complex(op.output):
        layouts = [
            layout if _is_complex(tensor) else reshaped(layout, (*layout.shape, 1))
            for layout, tensor in zip(layouts, op.inputs, strict=True)
        ]
    return [combined(layouts, shape_of(op.output))]


def _by_channel(layout: Layout, rank: int) -> Layout:
    """Return the layout of one number per channel, to broadcast to a tensor with the channels after the batch."""
    return reshaped(layout, (*layout.shape, *[1] * (rank - 2))) if len(layout.shape) == 1 else layout


def _first(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    return [layouts[0]]


def _copy(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    return [combined(layouts[-1:], shape_of(op.output))]


def _reshape(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    return [reshaped(layouts[0], shape_of(op.output))]


def _join(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    rank = len(op.output.shape)
    place = int(setting(op, 1, "dim", 0)) % max(rank, 1)
    if op.base_name == "stack":
        layouts = [reshaped(layout, (*layout.shape[:place], 1, *layout.shape[place:])) for layout in layouts]
    used = [layout for layout, tensor in zip(layouts, op.inputs, strict=True) if tensor.numel]
    return [joined(used, place)] if used and all(layout.shape for layout in used) else []


def _reduce(_: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    return [reduced(layouts[0], reduced_places(op), tensor.shape) for tensor in op.outputs]


def _at_unchanged(layout: Layout, shape: Shape) -> Layout | None:
    """Return the layout of a pooled or selected tensor, without what differs along dimensions of another size."""
    if len(shape) != len(layout.shape):
        return None
    changed = [place for place, size in enumerate(shape) if size != layout.shape[place]]
    return Layout(shape, layout.without(*changed).spans)


# -- products ---------------------------------------------------------------------------------------------------------


def _product(known: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    """Multiply matrices. A weight gives its rows, with their first column; what is summed of an activation is lost.

    Heads that are multiplied by a matrix each, or rotated by a table, stay what they are made of.
    """
    graph, (*added, left, right) = known.graph, layouts
    factors = op.inputs[-2:]
    if op.does("distances") or not (graph.is_projection(op) or graph.is_by_table(op)):
        return []
    mixes = graph.is_by_head(op) or graph.is_by_table(op)

    def summed(layout: Layout, tensor: TensorRef, place: int) -> Layout:
        if graph.is_weight(tensor):
            return taken(layout, place, np.array([0]))
        return spread(layout, place) if mixes else reduced(layout, [place], _one_at(layout.shape, place))

    left = summed(left, factors[0], len(left.shape) - 1)
    right = summed(right, factors[1], max(len(right.shape) - 2, 0))
    shape = op.output.shape
    if len(factors[1].shape) == 1:  # mv, dot
        left = left.mapped(left.shape[:-1], lambda array: array.squeeze(-1))
        right = Layout((1,) * len(shape), {} if not shape else right.spans)
    return [combined([*added, left, right], shape)]


def _one_at(shape: Shape, place: int) -> Shape:
    return (*shape[:place], 1, *shape[place + 1 :])


def _convolution(known: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    """Convolve: the output channels are the rows of the weight; one of each channel by itself keeps the channels."""
    source, weight, *bias = layouts
    shape = op.output.shape
    if setting(op, 6, "transposed", False):
        weight = swapped(weight, 0, 1)
    for place in range(1, len(weight.shape)):
        weight = taken(weight, place, np.array([0]))
    rows = [reshaped(each, (each.shape[0], *[1] * (len(shape) - 2))) for each in (weight, *bias)]
    kept = _at_unchanged(source, shape) if known.graph.is_by_channel(op) else None
    return [combined([*rows, *([kept] if kept is not None else [])], shape)]


# -- tables of indices ------------------------------------------------------------------------------------------------


_MARK = 0.25
"""What is added to each index: a number that torch pads with has another fraction."""


def _moved(known: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    """Let torch itself read by indices, roll, flip, pad or repeat: what is alike along a dimension needs no indices."""
    touched, source, (first, *tables) = _touched(op), layouts[0], op.inputs
    values = [known.graph.recording.values.get(table.id) for table in tables]
    contents: dict[int, Tensor] = {}
    for table, value in zip(tables, values, strict=True):
        if value is not None and not value.is_meta:
            contents[table.id] = value.cpu()
        elif table.dtype == "bool":
            return []
        else:
            source = source.without(*touched)
            contents[table.id] = torch.zeros(table.shape, dtype=torch.long)

    def along(array: Indices) -> Indices:
        sizes = [n if place in touched else array.shape[place] for place, n in enumerate(first.shape)]
        contents[first.id] = torch.from_numpy(np.broadcast_to(array, sizes) + _MARK)
        kwargs = {name: _with_contents(value, contents) for name, value in op.kwargs.items()}
        moved = attrgetter(op.name)(torch.ops)(*_with_contents(op.args, contents), **kwargs).numpy()
        moved = np.nan_to_num(moved, nan=0, posinf=0, neginf=0)
        return collapsed(np.where(moved % 1 == _MARK, np.floor(moved), ABSENT).astype(np.int64))

    try:
        return [source.mapped(op.output.shape, along)]
    except (RuntimeError, IndexError):
        return []


def _with_contents(value: Any, contents: Mapping[int, Tensor]) -> Any:
    """Return an argument with the content of each tensor."""
    if isinstance(value, tuple):
        return [_with_contents(item, contents) for item in value]
    return contents[value.id] if isinstance(value, TensorRef) else value


def _touched(op: Op) -> Collection[int]:
    """Return the dimensions that an operation does not leave as they are."""
    name, rank = op.base_name, len(op.inputs[0].shape)
    if name == "index":
        return [place for place, table in enumerate(op.args[1]) if table is not None]
    if name == "index_select":
        return [int(op.args[1]) % max(rank, 1)]
    if name == "embedding":
        return [0]
    if name in ("roll", "flip"):
        return [place % rank for place in op.args[-1] or range(rank)]
    if name == "constant_pad_nd":
        return range(rank)[-(len(op.args[1]) // 2) :]
    if name == "repeat" and len(op.args[1]) == rank:
        return [place for place, times in enumerate(op.args[1]) if times > 1]
    return range(rank)


def _index_write(known: Layouts, op: Op, layouts: list[Layout]) -> Sequence[Layout | None]:
    """Write `table[..., indices, ...] = values`, e.g. into a cache: each index has the values that are put there.

    Where the indices are unknown, what is alike along the dimension counts.
    """
    written, table, values = written_places(op), layouts[0], layouts[-1]
    if written is None or len(layouts) < 3:
        return []
    (place, rank), shape = written, table.shape
    missing = len(shape) - 1 + rank - len(values.shape)
    if missing < 0:
        return []
    values = reshaped(values, (1,) * missing + values.shape)
    order = _order_written(known, op, shape[place], values.shape[place])
    others = [tuple(n for at, n in enumerate(each.shape) if at != place) for each in (table, values)]
    if order is not None and others[0] == others[1]:
        return [taken(joined([table, values], place), place, order)]
    kept = values.without(*range(place, place + rank))
    ones = (*values.shape[:place], 1, *values.shape[place + rank :])

    def along(array: Indices) -> Indices:
        return array.reshape((*array.shape[:place], 1, *array.shape[place + rank :]))

    return [combined([table, kept.mapped(ones, along)], shape)]


def _order_written(known: Layouts, op: Op, size: int, count: int) -> Indices | None:
    """Return for each index of a written dimension its place in the table, or after it in the values.

    None if the indices are unknown, or are more than one for each of the values, or add to what is there.
    """
    indices = known.graph.recording.values.get(op.inputs[1].id)
    if indices is None or indices.is_meta or indices.dim() != 1 or len(indices) != count:
        return None
    if op.base_name.startswith("index_put") and setting(op, 3, "accumulate", False):
        return None
    order = np.arange(size)
    order[indices.cpu().numpy()] = size + np.arange(count)
    return order


_RULES: Mapping[str, Rule] = {
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

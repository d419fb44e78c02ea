"""Narrow a region of a recording to some of its scores, so that it is measured on thousands and not on millions.

A softmax over the keys needs all of them, and so does whatever else combines scores along a dimension. All other
dimensions are independent: a few batch items, heads and queries, spread from the first to the last, show the same.

    scores: batch heads query key = 2, 4, 256, 256      # narrowed: 2, 4, 4, 256
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, prod
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .dataflow import Graph
from .replay import Region
from .rerun import Constants

MOST = 1 << 12
"""Scores up to which a region is measured whole."""
_FEWEST = 4
"""Indices that each dimension keeps at least."""

Dims = tuple[int | None, ...]
"""For each dimension of a tensor the dimension of the scores that it is; None for another."""

_ALONG = ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
"""Operations that combine elements along the dimension of their second argument, and keep the shape."""
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "logsumexp", "prod", "any", "all", "linalg_vector_norm")
"""Operations that leave out the dimensions of an argument, or give them size one."""
_RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")


def narrowed(graph: Graph, part: Region, constants: Constants) -> Region:
    """Return a region on about `MOST` scores; unchanged if that is not possible, or if it has no more.

    Where a tensor from outside is largest or smallest is kept: one that differs in a single query differs here too.
    """
    source = part.sources[0]
    if len(part.sources) > 1 or source.numel <= MOST or not _writes_alone(graph, part):
        return part
    walk = _Walk(graph, part)
    for op in part.ops:
        walk.take(op)
    picked = _picked(source.shape, walk.fixed, MOST)
    for tensor in part.from_outside():
        value = constants.value(tensor)
        if value is not None:
            _pick_extremes(picked, walk.dims.get(tensor.id, ()), value)
    return _with_sizes(graph, part, walk.dims, picked) if picked else part


def _writes_alone(graph: Graph, part: Region) -> bool:
    """Return whether what a region writes into is always read as the whole that was written."""
    for op in part.ops:
        if op.kind != "write":
            continue
        written = op.inputs[0]
        for tensor in graph.results(op):
            if (tensor.shape, tensor.stride, tensor.offset) != (written.shape, written.stride, written.offset):
                return False
    return True


def _picked(shape: Sequence[int], fixed: set[int], most: int) -> dict[int, Tensor]:
    """Return the indices to keep of each dimension that is narrowed; empty if none can be."""
    counts = list(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        size = prod(counts)
        if dim not in fixed and size > most:
            counts[dim] = min(shape[dim], max(_FEWEST, ceil(shape[dim] * most / size)))
    picked: dict[int, Tensor] = {}
    for dim, (count, size) in enumerate(zip(counts, shape, strict=True)):
        if count < size:
            picked[dim] = torch.linspace(0, size - 1, count).round().long()
    return picked


def _pick_extremes(picked: dict[int, Tensor], dims: Dims, value: Tensor) -> None:
    """Add the indices where the content of a tensor is largest and smallest, and so among its finite numbers."""
    if value.is_complex() or not any(dim in picked for dim in dims):
        return
    numbers = value.detach().cpu().double()
    finite = numbers.nan_to_num(0.0, 0.0, 0.0)
    for extreme in (numbers.argmax(), numbers.argmin(), finite.argmax(), finite.argmin()):
        places = torch.unravel_index(extreme, numbers.shape)
        for dim, index in zip(dims, places, strict=True):
            if dim in picked:
                indices = {*picked[dim].tolist(), int(index)}
                picked[dim] = torch.tensor(sorted(indices))


def _with_sizes(graph: Graph, part: Region, dims: Mapping[int, Dims], picked: Mapping[int, Tensor]) -> Region:
    """Return a region whose tensors have the picked indices alone."""
    tensors: dict[int, TensorRef] = {}
    indices: dict[int, dict[int, Tensor]] = {}

    def narrow(tensor: TensorRef) -> TensorRef:
        if tensor.id not in tensors:
            places: dict[int, Tensor] = {}
            for place, dim in enumerate(dims.get(tensor.id, ())):
                if dim is not None and dim in picked:
                    places[place] = picked[dim]
            indices[tensor.id] = places
            tensors[tensor.id] = _with_counts(tensor, places) if places else tensor
        return tensors[tensor.id]

    ops = []
    for op in part.ops:
        inputs = tuple(map(narrow, op.inputs))
        outputs = tuple(map(narrow, op.outputs))
        for tensor in graph.results(op):
            narrow(tensor)
        ops.append(replace(op, args=_args_of(op, outputs, narrow), inputs=inputs, outputs=outputs))
    sources = tuple(map(narrow, part.sources))
    return replace(part, sources=sources, target=narrow(part.target), ops=tuple(ops), tensors=tensors, indices=indices)


def _with_counts(tensor: TensorRef, places: Mapping[int, Tensor]) -> TensorRef:
    """Return a tensor with fewer elements in some dimensions, in memory of its own."""
    shape = list(tensor.shape)
    for place, indices in places.items():
        shape[place] = len(indices)
    steps = list(accumulate(reversed(shape[1:]), mul, initial=1))
    return replace(tensor, shape=tuple(shape), stride=tuple(reversed(steps)), offset=0)


def _args_of(op: Op, outputs: Sequence[TensorRef], narrow: Any) -> tuple[Any, ...]:
    """Return the arguments of an operation with narrowed tensors, and sizes that fit."""
    if op.base_name in (*_RESHAPES, "expand"):
        return (narrow(op.inputs[0]), outputs[0].shape)

    def narrowed_value(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return narrow(value)
        if isinstance(value, tuple):
            return tuple(map(narrowed_value, value))
        return value

    return tuple(map(narrowed_value, op.args))


@dataclass
class _Walk:
    """Follows the dimensions of the scores through a region."""

    graph: Graph
    part: Region
    dims: dict[int, Dims] = field(default_factory=dict)
    """The id of each tensor to its dimensions."""
    fixed: set[int] = field(default_factory=set)
    """The dimensions along which scores are combined: they stay whole."""

    def __post_init__(self) -> None:
        source = self.part.sources[0]
        self.dims[source.id] = tuple(range(len(source.shape)))
        self._inside = {source.id, *self.part.results}

    def take(self, op: Op) -> None:
        """Follow an operation."""
        after = self._after(op)
        if after is None:
            self._give_up(op)
            after = ()
        for output in self.graph.results(op):
            is_known = len(after) == len(output.shape)
            self.dims[output.id] = after if is_known else (None,) * len(output.shape)
            if not is_known:
                self.fixed.update(dim for dim in after if dim is not None)

    def _give_up(self, op: Op) -> None:
        """Keep everything whole that an operation reads."""
        for tensor in op.inputs:
            self._fix(self.dims.get(tensor.id, ()))
            if tensor.id not in self._inside:
                self._note(tensor, (None,) * len(tensor.shape))

    def _fix(self, dims: Dims) -> None:
        self.fixed.update(dim for dim in dims if dim is not None)

    def _note(self, tensor: TensorRef, dims: Dims) -> None:
        """Note the dimensions of a tensor from outside; what it is read as twice, in two ways, stays whole."""
        if self.dims.setdefault(tensor.id, dims) != dims:
            self._fix(dims)
            self._fix(self.dims[tensor.id])

    def _after(self, op: Op) -> Dims | None:
        """Return the dimensions of the results of an operation; None if it is unknown how it moves them."""
        name = op.base_name.rstrip("_")
        if not op.inputs or not op.outputs:
            return None
        if self._is_by_element(op):
            return self._broadcast(op)
        if name == "cat":
            return self._joined(op)
        if len(op.inputs) > 1:
            return None
        before = self.dims[op.inputs[0].id]
        if name in _ALONG:
            self._fix_places(before, [int(op.args[1])])
            return before
        if name in _REDUCTIONS:
            return self._reduced(op, before)
        if op.base_name in _RESHAPES:
            return self._reshaped(op.inputs[0].shape, op.output.shape, before)
        return self._moved(op, before)

    @staticmethod
    def _is_by_element(op: Op) -> bool:
        """Return whether each element of a result is made of those at the same place of what is read."""
        if op.does("runs"):
            return False
        if op.makes_result:
            return op.inputs[0].shape == op.output.shape
        is_maker = op.base_name.endswith("_like")
        is_dropout = op.base_name in ("native_dropout", "_fused_dropout", "bernoulli_")
        return op.pointwise or is_maker or is_dropout or axes_rule(op.base_name) == "pointwise"

    def _joined(self, op: Op) -> Dims:
        """Return the dimensions after a concatenation: the one that it is along stays whole."""
        rank = len(op.output.shape)
        place = int(op.args[1]) % rank if len(op.args) > 1 else 0
        for tensor in op.inputs:
            if tensor.id in self._inside and len(tensor.shape) == rank:
                self._fix_places(self.dims[tensor.id], [place])
        return self._broadcast(op)

    def _broadcast(self, op: Op) -> Dims:
        """Return the dimensions of the result of an operation by element, and note those of what it reads."""
        shape = op.output.shape
        met: list[set[int | None]] = [set() for _ in shape]
        for tensor in op.inputs:
            if tensor.id in self._inside:
                self._meet(met, tensor)
        after = list(map(self._only, met))
        for tensor in op.inputs:
            if tensor.id not in self._inside:
                aligned = after[len(shape) - len(tensor.shape) :]
                pairs = zip(tensor.shape, aligned, strict=True)
                self._note(tensor, tuple(dim if size > 1 else None for size, dim in pairs))
        return tuple(after)

    def _meet(self, met: Sequence[set[int | None]], tensor: TensorRef) -> None:
        """Add the dimensions of a tensor to those that meet in each dimension of a result."""
        start = len(met) - len(tensor.shape)
        for place, (size, dim) in enumerate(zip(tensor.shape, self.dims[tensor.id], strict=True), start):
            if size > 1:
                met[place].add(dim)

    def _only(self, met: set[int | None]) -> int | None:
        """Return the only one of the dimensions that meet; several stay whole."""
        if len(met) == 1:
            return next(iter(met))
        self._fix(tuple(met))
        return None

    def _fix_places(self, dims: Dims, places: Sequence[int]) -> None:
        self._fix(tuple(dims[place] for place in places))

    def _reduced(self, op: Op, before: Dims) -> Dims | None:
        """Return the dimensions that a reduction leaves."""
        place = 2 if op.base_name == "linalg_vector_norm" else 1
        wanted = op.args[place] if len(op.args) > place else None
        if isinstance(wanted, int):
            wanted = (wanted,)
        if not wanted:
            return None
        rank = len(before)
        left_out = {dim % rank for dim in wanted}
        self._fix_places(before, list(left_out))
        if len(op.output.shape) == rank:
            return tuple(None if place in left_out else dim for place, dim in enumerate(before))
        return tuple(dim for place, dim in enumerate(before) if place not in left_out)

    def _reshaped(self, old: Sequence[int], new: Sequence[int], before: Dims) -> Dims:
        """Return the dimensions after a reshape: one that is split or joined stays whole."""
        starts = {(prod(old[:place]), size): dim for place, (size, dim) in enumerate(zip(old, before, strict=True))}
        after: list[int | None] = []
        for place, size in enumerate(new):
            after.append(starts.get((prod(new[:place]), size)) if size > 1 else None)
        self._fix(tuple(dim for dim in before if dim not in after))
        return tuple(after)

    def _moved(self, op: Op, before: Dims) -> Dims | None:
        """Return the dimensions after a view; None for any other operation."""
        rank = len(before)
        name = op.base_name
        if name == "t":
            return before[::-1]
        if name == "transpose":
            order = list(range(rank))
            first, second = int(op.args[1]) % rank, int(op.args[2]) % rank
            order[first], order[second] = second, first
            return tuple(before[place] for place in order)
        if name == "permute":
            return tuple(before[place] for place in op.args[1])
        if name == "unsqueeze":
            place = int(op.args[1]) % (rank + 1)
            return (*before[:place], None, *before[place:])
        if name == "expand":
            added = len(op.output.shape) - rank
            return (None,) * added + before
        if name == "slice":
            place = int(op.args[1]) % rank if len(op.args) > 1 else 0
            self._fix_places(before, [place])
            return before
        if name == "squeeze":
            left_out = set(range(rank))
            if len(op.args) > 1:
                dims = (op.args[1],) if isinstance(op.args[1], int) else op.args[1]
                left_out = {dim % rank for dim in dims}
            shape = op.inputs[0].shape
            return tuple(dim for place, dim in enumerate(before) if place not in left_out or shape[place] > 1)
        if name in ("split", "split_with_sizes", "chunk"):
            place = int(op.args[2]) % rank if len(op.args) > 2 else 0
            self._fix_places(before, [place])
            return before
        if name in ("select", "unbind"):
            place = int(op.args[1]) % rank if len(op.args) > 1 else 0
            self._fix_places(before, [place])
            return (*before[:place], *before[place + 1 :])
        return None

"""Tensors that are described and not made: what the steps of a kernel would give, where nobody looks at the numbers.

The steps of an attention are few, and what each does to shapes and memory is written here. So a kernel's steps can be
recorded without computing them, and without torch's meta tensors, whose first use imports symbolic shapes: a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .storage import Look

_A = torch.ops.aten


class _Memory:
    """A piece of memory that was never there."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False)
class Sketch:
    """A tensor by its description."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: Any
    """What tells its memory from any other."""

    @classmethod
    def new(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Sketch:
        """Describe a tensor in memory of its own."""
        return cls(tuple(shape), _contiguous(shape), 0, dtype, device, _Memory())

    @classmethod
    def of(cls, tensor: Tensor, look: Look) -> Sketch:
        """Describe a tensor that is there."""
        offset, shape, stride, dtype = look[1:5]
        return cls(tuple(shape), tuple(stride), offset, dtype, tensor.device, look[0])

    @property
    def look(self) -> Look:
        """What the recorder writes down."""
        return (self.memory, self.offset, self.shape, self.strides, self.dtype)

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in elements."""
        return self.strides

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)


def sketched(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a step would give for tensors that are described."""
    return _RULES[func](*args, **kwargs)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(size, 1) for size in shape[place + 1 :]) for place in range(len(shape)))


def _as_laid_out(x: Sketch, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Sketch:
    """A result for each element, its dimensions in the order that the operand has them in memory."""
    made = Sketch.new(x.shape, dtype or x.dtype, x.device)
    if 0 in x.strides or x.strides == made.strides:
        return made
    order = sorted(range(x.dim()), key=lambda place: (x.strides[place], x.shape[place]), reverse=True)
    within = _contiguous([x.shape[place] for place in order])
    strides = dict(zip(order, within, strict=True))
    return replace(made, strides=tuple(strides[place] for place in range(x.dim())))


def _broadcast(x: Sketch, *others: Any) -> Sketch:
    shapes = [other.shape for other in (x, *others) if isinstance(other, Sketch)]
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    shape = tuple(map(max, zip(*wide, strict=True)))
    like = next(other for other in (*others, x) if isinstance(other, Sketch) and other.dtype != torch.bool)
    return _as_laid_out(replace(x, dtype=like.dtype)) if shape == x.shape else Sketch.new(shape, like.dtype, x.device)


def _fresh(x: Sketch, *_: Any, **__: Any) -> Sketch:
    return Sketch.new(x.shape, x.dtype, x.device)


def _product(left: Sketch, right: Sketch) -> Sketch:
    return Sketch.new((*left.shape[:-1], right.shape[-1]), left.dtype, left.device)


def _transpose(x: Sketch, one: int, other: int) -> Sketch:
    order = list(range(x.dim()))
    order[one], order[other] = order[other], order[one]
    return replace(x, shape=tuple(x.shape[i] for i in order), strides=tuple(x.strides[i] for i in order))


def _expand(x: Sketch, shape: Sequence[int]) -> Sketch:
    more = len(shape) - x.dim()
    own = ((1,) * more + x.shape, (0,) * more + x.strides)
    strides = tuple(s if n == size else 0 for size, n, s in zip(shape, *own, strict=True))
    return replace(x, shape=tuple(shape), strides=strides)


def _unsqueeze(x: Sketch, place: int) -> Sketch:
    place %= x.dim() + 1
    stride = x.shape[place] * x.strides[place] if place < x.dim() else 1
    shape, strides = list(x.shape), list(x.strides)
    shape.insert(place, 1)
    strides.insert(place, stride)
    return replace(x, shape=tuple(shape), strides=tuple(strides))


def _squeeze(x: Sketch, place: int) -> Sketch:
    shape, strides = list(x.shape), list(x.strides)
    del shape[place], strides[place]
    return replace(x, shape=tuple(shape), strides=tuple(strides))


def _view(x: Sketch, shape: Sequence[int]) -> Sketch:
    """A view to a shape that merges, or splits, dimensions that run over memory as one."""
    strides: list[int] = []
    dims = [(n, s) for n, s in zip(x.shape, x.strides, strict=True) if n != 1]
    size, inner = dims.pop() if dims else (1, 1)
    left = size
    for wanted in reversed(shape):
        while wanted > left and dims:
            size = dims.pop()[0]
            left *= size
        strides.append(inner)
        inner *= wanted
        left //= max(wanted, 1)
        if left == 1 and dims:
            left, inner = dims.pop()
    return replace(x, shape=tuple(shape), strides=tuple(reversed(strides)))


def _split(x: Sketch, size: int, dim: int) -> list[Sketch]:
    dim %= x.dim()
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    starts = range(0, x.shape[dim], size)
    return [replace(x, shape=shape, offset=x.offset + start * x.strides[dim]) for start in starts]


def _scalar(_: float, *, dtype: torch.dtype, device: torch.device) -> Sketch:
    return Sketch.new((), dtype, device)


_RULES: dict[Any, Callable[..., Any]] = {
    _A._to_copy.default: _as_laid_out,
    _A.mul.Scalar: _as_laid_out,
    _A.masked_fill.Scalar: _as_laid_out,
    _A.add.Tensor: _broadcast,
    _A.where.self: _broadcast,
    _A._softmax.default: _fresh,
    _A._safe_softmax.default: _fresh,
    _A.clone.default: _fresh,
    _A.tril.default: _fresh,
    _A.bmm.default: _product,
    _A.mm.default: _product,
    _A.transpose.int: _transpose,
    _A.expand.default: _expand,
    _A.unsqueeze.default: _unsqueeze,
    _A.squeeze.dim: _squeeze,
    _A.view.default: _view,
    _A._unsafe_view.default: _view,
    _A.split.Tensor: _split,
    _A.ones.default: Sketch.new,
    _A.scalar_tensor.default: _scalar,
}
"""Each operation that steps are made of, to what it does to descriptions."""

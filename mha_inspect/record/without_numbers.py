"""Compute one operation of an opened kernel without numbers: its result has a shape, a dtype and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_A = torch.ops.aten
_VIEWS = {
    _A.transpose.int: _A.transpose.int,
    _A.expand.default: _A.expand.default,
    _A.unsqueeze.default: _A.unsqueeze.default,
    _A.view.default: _A.view.default,
    _A.split.Tensor: _A.split.Tensor,
    _A._unsafe_view.default: _A.view.default,
}
"""Operations whose results are views, with the operation that makes the view."""
_PRODUCTS = frozenset({_A.bmm.default, _A.mm.default})
"""Matrix products: `... n k` times `... k m`."""
_CONTIGUOUS = frozenset({_A._softmax.default, _A._safe_softmax.default, _A.clone.default, _A.tril.default})
"""Operations with a contiguous result, whatever the strides of the operand."""


def described(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operation without its numbers: a real view for a view, else an empty tensor on meta.

    The product `bmm` of [2, 3, 4] and [2, 4, 5] gives an empty [2, 3, 5]. Calling torch's own operations on meta
    tensors would import its symbolic shapes, which takes a second.
    """
    if func in _VIEWS:
        return _VIEWS[func](*args, **kwargs)
    if func is _A.ones.default:
        return _empty(args[0], kwargs["dtype"])
    if func is _A.scalar_tensor.default:
        return _empty((), kwargs["dtype"])
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    first = operands[0]
    if func in _PRODUCTS:
        *rows, _ = first.shape
        columns = operands[1].shape[-1]
        return _empty([*rows, columns], first.dtype)
    shape = _broadcast(operands)
    dtype = kwargs.get("dtype") or _dtype_of(operands)
    if func in _CONTIGUOUS or shape != first.shape or 0 in first.stride():
        return _empty(shape, dtype)
    return _in_the_order_of(first, dtype)


def _in_the_order_of(operand: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor with the shape of an operand, and its order of dimensions in memory.

    A pointwise operation keeps that order: `x.transpose(1, 2) + 1` is transposed, too.
    """
    rank = operand.dim()

    def distance(dim: int) -> tuple[int, int]:
        """Return the distance of two numbers along a dimension; of two that are alike, the size decides."""
        return operand.stride(dim), operand.shape[dim]

    outermost_first = sorted(range(rank), key=distance, reverse=True)
    in_memory = _empty([operand.shape[dim] for dim in outermost_first], dtype)
    return in_memory.permute([outermost_first.index(dim) for dim in range(rank)])


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of operands that are broadcast against each other: [2, 1, 4] and [3, 1] give [2, 3, 4]."""
    rank = max(tensor.dim() for tensor in operands)
    shapes = []
    for tensor in operands:
        missing = rank - tensor.dim()
        shapes.append([1] * missing + list(tensor.shape))
    return tuple(map(max, zip(*shapes, strict=True)))


def _dtype_of(operands: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first operand that is not boolean; boolean if all are."""
    for tensor in operands:
        if tensor.dtype != torch.bool:
            return tensor.dtype
    return operands[0].dtype

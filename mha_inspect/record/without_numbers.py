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
        return _empty((*first.shape[:-1], operands[1].shape[-1]), first.dtype)
    shape = _broadcast(operands)
    dtype = kwargs.get("dtype") or _dtype_of(operands)
    if func in _CONTIGUOUS or shape != first.shape or 0 in first.stride():
        return _empty(shape, dtype)
    # A pointwise operation keeps the order of the dimensions in memory, outermost first.
    rank = len(shape)
    order = sorted(range(rank), key=lambda dim: (first.stride(dim), first.shape[dim]), reverse=True)
    in_memory = _empty([shape[dim] for dim in order], dtype)
    return in_memory.permute([order.index(dim) for dim in range(rank)])


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of operands that are broadcast against each other: [2, 1, 4] and [3, 1] give [2, 3, 4]."""
    rank = max(tensor.dim() for tensor in operands)
    shapes = [(1,) * (rank - tensor.dim()) + tuple(tensor.shape) for tensor in operands]
    return tuple(map(max, zip(*shapes, strict=True)))


def _dtype_of(operands: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first operand that is not boolean; boolean if all are."""
    for tensor in operands:
        if tensor.dtype != torch.bool:
            return tensor.dtype
    return operands[0].dtype

"""Compute a step without its numbers, so that its result has a shape, a dtype and an order in memory."""

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
_IN_ORDER = frozenset({_A._softmax.default, _A._safe_softmax.default, _A.clone.default, _A.tril.default})


def described(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step without its numbers: a real view for a view, else an empty tensor on meta.

    torch's own computations on meta tensors import its symbolic shapes, which takes a second; this does not.
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
    if func in _IN_ORDER or shape != first.shape or 0 in first.stride():
        return _empty(shape, dtype)
    # Pointwise: the dimensions keep their order in memory.
    order = _order_in_memory(first)
    in_memory = _empty([shape[place] for place in order], dtype)
    places = [order.index(place) for place in range(len(shape))]
    return in_memory.permute(places)


def _order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions in the order of their strides, the largest first: 0 2 1 for a transposed `[2, 3, 4]`."""

    def stride_and_size(place: int) -> tuple[int, int]:
        return tensor.stride(place), tensor.shape[place]

    return sorted(range(tensor.dim()), key=stride_and_size, reverse=True)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of operands that are broadcast against each other: [2, 1, 4] and [3, 1] give [2, 3, 4]."""
    rank = max(tensor.dim() for tensor in operands)
    shape = [1] * rank
    for tensor in operands:
        missing = rank - tensor.dim()
        for place, size in enumerate(tensor.shape, missing):
            shape[place] = max(shape[place], size)
    return tuple(shape)


def _dtype_of(operands: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of the first operand that is no mask; of the first if all are masks."""
    for tensor in operands:
        if tensor.dtype != torch.bool:
            return tensor.dtype
    return operands[0].dtype

"""Compute a step without its numbers, so that its result has a shape, a dtype and an order in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_A = torch.ops.aten
_VIEWS = {
    op: op
    for op in (
        _A.transpose.int,
        _A.expand.default,
        _A.unsqueeze.default,
        _A.view.default,
        _A.split.Tensor,
    )
} | {_A._unsafe_view.default: _A.view.default}
_PRODUCTS = frozenset({_A.bmm.default, _A.mm.default})
_IN_ORDER = frozenset({_A._softmax.default, _A._safe_softmax.default, _A.clone.default, _A.tril.default})


def described(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step without its numbers: a real view for a view, else an empty tensor on meta.

    torch's own computations on meta tensors import its symbolic shapes, which takes a second; this does not.
    """
    if func in _VIEWS:
        return _VIEWS[func](*args, **kwargs)
    if func in (_A.ones.default, _A.scalar_tensor.default):
        return torch.empty(args[0] if func is _A.ones.default else (), dtype=kwargs["dtype"], device="meta")
    first, *others = [arg for arg in args if isinstance(arg, Tensor)]
    if func in _PRODUCTS:
        return torch.empty((*first.shape[:-1], others[0].shape[-1]), dtype=first.dtype, device="meta")
    rank = max(tensor.dim() for tensor in (first, *others))
    wide = [(1,) * (rank - tensor.dim()) + tuple(tensor.shape) for tensor in (first, *others)]
    shape = tuple(map(max, zip(*wide, strict=True)))
    dtype = kwargs.get("dtype") or next((t.dtype for t in (first, *others) if t.dtype != torch.bool), first.dtype)
    if func in _IN_ORDER or shape != first.shape or 0 in first.stride():
        return torch.empty(shape, dtype=dtype, device="meta")
    # Pointwise: the dimensions keep their order in memory.
    order = sorted(range(rank), key=lambda place: (first.stride(place), first.shape[place]), reverse=True)
    empty = torch.empty([shape[place] for place in order], dtype=dtype, device="meta")
    return empty.permute([order.index(place) for place in range(rank)])

"""One side alone is rounded to a coarser dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pair import Difference, Why

_COARSER = (torch.bfloat16, torch.float16)


def rounded(difference: Difference) -> Why | None:
    """Return the dtype to which one side is rounded. In their own dtypes: float64 does not show what was rounded."""
    where = difference.where
    left, right = difference.left.detach(), difference.right.detach()
    for called, side, other in ((where.left, left, right), (where.right, right, left)):
        for dtype in _COARSER:
            if _is_coarser_alone(dtype, side, other):
                coarser = str(dtype).removeprefix("torch.")
                sentence = f"{difference.start} {called} is rounded to {coarser}; the other side's rounds to the same."
                return Why("dtype", sentence, fact=f"{coarser} {called}")
    return None


def _is_coarser_alone(dtype: torch.dtype, rounded: Tensor, exact: Tensor) -> bool:
    """Return whether one tensor is the other one rounded to a dtype, and the other one is not rounded."""
    if rounded.itemsize <= dtype.itemsize:
        return False
    if not _is_rounded_to(rounded, dtype) or _is_rounded_to(exact, dtype):
        return False
    step = torch.finfo(dtype).eps * rounded.abs().double()
    apart = (exact.double() - rounded.double()).abs()
    return bool((apart <= step).all())


def _is_rounded_to(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a dtype has every number of a tensor."""
    there_and_back = tensor.to(dtype).to(tensor.dtype)
    return torch.equal(tensor, there_and_back)

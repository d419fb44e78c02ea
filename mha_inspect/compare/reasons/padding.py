"""Both sides differ in what they return for padding alone: kernels and implementations are free there."""

from __future__ import annotations

import torch
from torch import Tensor

from ...record.arguments import argument_names, tensors_in
from ...text import plural
from ..comparable_run import ComparableRun, Comparison
from ..pair import Why

_CERTAIN = 10
"""Differences above this many rounding errors are no rounding."""


def padding(left: ComparableRun, right: ComparableRun) -> Why | None:
    """Return the mask that says where the outputs differ: they are the same at every token that it keeps.

    Kernels and implementations are free in what they return for padding.
    """
    differs = _tokens_that_differ(left, right)
    if differs is None:
        return None
    subject = left.subject
    for name, mask in tensors_in(argument_names(subject.module, subject.args, subject.kwargs)):
        if mask.shape != differs.shape:
            continue
        is_mask = (mask == 0) | (mask == 1)
        if not bool(is_mask.all()):
            continue
        for value in (0, 1):
            masked = (mask == value).to(differs.device)
            if _has_all(masked, differs):
                tokens = f"{plural(int(masked.sum()), 'token')} of {masked.numel()}"
                sentence = f"The outputs differ only at the {tokens} where {name} is {value}."
                return Why("padding", sentence)
    return None


def _tokens_that_differ(left: ComparableRun, right: ComparableRun) -> Tensor | None:
    """Return `batch token`: True where the outputs differ by more than rounding; None if it cannot be said."""
    ours = left.output
    theirs = right.output
    floor = Comparison(left, right).output(()).noise_floor
    if ours.shape != theirs.shape or ours.dim() < 3 or floor is None:
        return None
    apart = (ours.double() - theirs.double()).nan_to_num(torch.inf).abs()
    by_token = apart.flatten(2).amax(2)
    return by_token > _CERTAIN * floor


def _has_all(masked: Tensor, differs: Tensor) -> bool:
    """Return whether every token that differs is masked, and some tokens are masked and some not: `batch token`."""
    if not bool(masked.any()) or bool(masked.all()):
        return False
    return not bool((differs & ~masked).any())

"""Note who sees whom while a run is recorded: which places of the weights are not zero.

The weights themselves are not kept. Of each softmax (and of each `exp` and `sigmoid`, which weights are made of by
hand) there remain booleans of two dimensions, where anything has no weight at all; else next to nothing is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .kernels import AttentionCall

MASKED_BELOW = -1e4
"""A row of which every score is at most this has no key left, whatever weights its softmax gives."""
_SPREAD = 80.0
"""Scores that are no farther apart all have a weight, in float32."""
_LARGEST = 1 << 24
"""Elements of a boolean up to which it is kept."""


@dataclass(frozen=True, eq=False)
class Sight:
    """Which places of weights are not zero."""

    pairs: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    """Two dimensions to a boolean of both: whether any weight there is not zero. Empty: no weight is zero."""
    blind: Tensor | None = None
    """True for each row of a softmax that has no key left, with one for its keys; None where every row has one."""


OPEN = Sight()
"""Everything sees everything."""


def sight_of(scores: Tensor | None, weights: Any, dim: int | None) -> Sight | None:
    """Return who sees whom in weights; None where there are no numbers to tell.

    Args:
        scores: what the weights are made of, masks included; None where that is not known.
        weights: of any layout.
        dim: the dimension of a softmax, else None.
    """
    if type(weights) is not Tensor or weights.is_meta or weights.dim() < 2 or not weights.is_floating_point():
        return None
    if weights.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if not weights.numel() or (scores is not None and scores.shape != weights.shape):
        return None
    if scores is not None:
        low, high = (float(number) for number in scores.aminmax())
        if low > MASKED_BELOW and high - low < _SPREAD:
            return OPEN
    seen = weights.nan_to_num(0.0) != 0
    if dim is None:
        return _reduced(seen, combinations(range(seen.dim()), 2), None)
    dim %= seen.dim()
    blind = None
    if scores is not None:
        highest = scores.amax(dim, keepdim=True)
        seen &= highest > MASKED_BELOW
        blind = highest <= MASKED_BELOW  # and not where a score is NaN
    return _reduced(seen, [(min(at, dim), max(at, dim)) for at in range(seen.dim()) if at != dim], dim, blind)


def sight_of_kernel(asked: AttentionCall) -> Sight | None:
    """Return who sees whom in the weights of a fused kernel, read off what it was asked for."""
    shape = asked.scores_shape
    if asked.query.is_meta or shape[-2] * shape[-1] > _LARGEST:
        return None
    allowed = asked.allowed(torch.arange(shape[-2], device=asked.query.device))
    if asked.bias is not None and asked.bias.numel():
        open_ = asked.bias if asked.bias.dtype == torch.bool else asked.bias > MASKED_BELOW
        allowed = open_ if allowed is None else allowed & open_
    if allowed is None or bool(allowed.all()):
        return OPEN
    seen = allowed[(None,) * (len(shape) - allowed.dim())]
    last = len(shape) - 1
    return _reduced(seen.expand(*seen.shape[:-2], *shape[-2:]), [(at, last) for at in range(last)], last)


def _reduced(seen: Tensor, pairs: Any, dim: int | None, blind: Tensor | None = None) -> Sight | None:
    """Return the sight of booleans that are laid out as the weights are; rows that see nothing are blind by default."""
    kept = {}
    for pair in pairs:
        others = [at for at in range(seen.dim()) if at not in pair]
        if seen.shape[pair[0]] * seen.shape[pair[1]] <= _LARGEST:
            kept[pair] = seen.any(others) if others else seen
    if blind is None and dim is not None:
        blind = ~seen.any(dim, keepdim=True)
    return Sight(kept, blind if blind is not None and bool(blind.any()) else None)

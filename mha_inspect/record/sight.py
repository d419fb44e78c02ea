"""Note which query sees which key while a run is recorded: the nonzero attention weights.

The weights themselves are not kept. Each softmax (and each `exp` and `sigmoid`, which handwritten weights use) leaves
two-dimensional booleans if some weight is zero. If every weight is nonzero, the cost is negligible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .kernels import AttentionCall

MASKED_BELOW = -1e4
"""A row whose scores are all at most this is fully masked, whatever weights its softmax gives."""
_SPREAD = 80.0
"""Scores that differ by at most this all have a nonzero weight in float32."""
_LARGEST = 1 << 24
"""Booleans with more elements are not kept."""


@dataclass(frozen=True, eq=False)
class Sight:
    """Which attention weights are nonzero."""

    pairs: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    """Two dimensions to a boolean over both: whether any weight there is nonzero. Empty if every weight is nonzero."""
    blind: Tensor | None = None
    """Boolean, true for each fully masked row, with size 1 in the key dimension; None if no row is fully masked."""


OPEN = Sight()
"""Every query sees every key."""


def sight_of(scores: Tensor | None, weights: Any, dim: int | None) -> Sight | None:
    """Return which query sees which key in attention weights; None if the weights have no numbers.

    Args:
        scores: the masked scores that the weights are computed from; None if not known.
        weights: attention weights in any layout.
        dim: the dimension of the softmax; None for other functions.
    """
    if type(weights) is not Tensor or not _can_be_read(weights):
        return None
    if scores is not None:
        if scores.shape != weights.shape:
            return None
        low, high = map(float, scores.aminmax())
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
        blind = highest <= MASKED_BELOW  # false for a row with NaN
    return _reduced(seen, _pairs_with(dim, seen.dim()), dim, blind)


def _can_be_read(weights: Tensor) -> bool:
    """Return whether weights have two dimensions, and numbers that may be read while the run goes on."""
    if weights.is_meta or weights.dim() < 2 or not weights.is_floating_point():
        return False
    if weights.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return weights.numel() > 0


def _pairs_with(dim: int, rank: int) -> list[tuple[int, int]]:
    """Return a dimension with each of the others, in ascending order: (0, 2), (1, 2), (2, 3) for 2 of 4."""
    pairs = []
    for place in range(rank):
        if place != dim:
            pairs.append((min(place, dim), max(place, dim)))
    return pairs


def hides_by_scores(asked: AttentionCall) -> bool:
    """Return whether the bias of a kernel has finite numbers that may hide a key, which depends on the scores."""
    bias = asked.bias
    if bias is None or bias.is_meta or not bias.is_floating_point() or not bias.numel():
        return False
    is_masked = bias <= MASKED_BELOW
    may_hide = (bias <= -_SPREAD) & ~is_masked
    return bool(may_hide.any())


def sight_of_kernel(asked: AttentionCall) -> Sight | None:
    """Return which query sees which key, from the arguments of a fused kernel; None if too large or on meta."""
    shape = asked.scores_shape
    if asked.query.is_meta or shape[-2] * shape[-1] > _LARGEST:
        return None
    rows = torch.arange(shape[-2], device=asked.query.device)
    allowed = asked.places.allowed(rows, *shape[-2:])
    if asked.bias is not None and asked.bias.numel():
        unmasked = asked.bias if asked.bias.dtype == torch.bool else asked.bias > MASKED_BELOW
        allowed = unmasked if allowed is None else allowed & unmasked
    if allowed is None or bool(allowed.all()):
        return OPEN
    missing = len(shape) - allowed.dim()
    last = len(shape) - 1
    # A mask is the same for all heads, say: what is not repeated for them is reduced once.
    return _reduced(allowed[(None,) * missing], _pairs_with(last, len(shape)), last, shape=shape)


def joined_sight(sights: Sequence[Sight], shapes: Sequence[tuple[int, ...]], place: int, dim: int) -> Sight:
    """Return the sight of weights from those of their pieces along a dimension; the softmax runs over `dim`."""
    pairs = {}
    for pair in sorted({pair for sight in sights for pair in sight.pairs}):
        pieces = []
        for sight, shape in zip(sights, shapes, strict=True):
            pieces.append(_pair_of(sight, pair, shape))
        if place in pair:
            pairs[pair] = torch.cat(pieces, pair.index(place))
        else:
            pairs[pair] = torch.stack(pieces).any(0)
    if dim == place or all(sight.blind is None for sight in sights):
        return Sight(pairs)
    blind = []
    for sight, shape in zip(sights, shapes, strict=True):
        blind.append(_blind_of(sight, dim, shape))
    return Sight(pairs, torch.cat(blind, place))


def _pair_of(sight: Sight, pair: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Return which weights are nonzero over two dimensions of weights of a shape: all, if the sight says nothing."""
    if pair in sight.pairs:
        return sight.pairs[pair]
    first, second = pair
    return torch.ones((shape[first], shape[second]), dtype=torch.bool)


def _blind_of(sight: Sight, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Return which rows of weights of a shape are fully masked; the softmax runs over `dim`."""
    if sight.blind is not None:
        return sight.blind
    rows = list(shape)
    rows[dim] = 1
    return torch.zeros(rows, dtype=torch.bool)


def narrowed(sight: Sight, seen: Tensor, dim: int) -> Sight:
    """Return the sight of weights of which some are set to zero after the exponentials that the sight is of.

    Args:
        sight: the nonzero exponentials.
        seen: the weights that are kept, in the same layout.
        dim: the dimension of the softmax.
    """
    dim %= seen.dim()
    kept = _reduced(seen, _pairs_with(dim, seen.dim()), dim)
    if kept is None:
        return sight
    if not sight.pairs:
        return kept
    pairs = {pair: both & sight.pairs.get(pair, both) for pair, both in kept.pairs.items()}
    return Sight(pairs, sight.blind if kept.blind is None else kept.blind)


def _reduced(
    seen: Tensor,
    pairs: Any,
    dim: int | None,
    blind: Tensor | None = None,
    *,
    shape: Sequence[int] = (),
) -> Sight | None:
    """Return the sight for booleans in the layout of the weights; without `blind`, rows that see no key are blind.

    With `shape`, the booleans are of size one in dimensions of the weights along which they do not differ.
    """
    sizes = tuple(shape or seen.shape)
    by_pair = {}
    for first, second in pairs:
        if sizes[first] * sizes[second] > _LARGEST:
            continue
        rest = [dim for dim in range(seen.dim()) if dim not in (first, second)]
        both = any_along(seen, rest) if rest else seen
        by_pair[first, second] = both.expand(sizes[first], sizes[second])
    if blind is None and dim is not None:
        rows = list(sizes)
        rows[dim] = 1
        blind = (~any_along(seen, [dim]).unsqueeze(dim)).expand(rows)
    if blind is None or not bool(blind.any()):
        return Sight(by_pair)
    return Sight(by_pair, blind)


def any_along(seen: Tensor, dims: list[int]) -> Tensor:
    """Return whether any boolean along some dimensions is true: many times as fast as torch's own `any`."""
    if not seen.numel():
        return seen.any(dims)
    return seen.view(torch.uint8).amax(dims).view(torch.bool)

"""Find the same tokens in two runs by their numbers: calls of other sizes round differently, and a cache drops rows.

whole   token  0 1 2 3        one call over all tokens
call    row      0 1 2        a call with a cache that dropped token 0: its rows are the tokens 1, 2 and 3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
"""The token of a row that has the numbers of none."""
_ROUNDING = 1600.0
"""Numbers within this many epsilons of the largest are equal."""
_COARSEST = 1 / 8
"""The largest tolerance, relative to the largest number: also in a dtype of few bits."""
_SMALLEST = 1e-6
"""The largest number is taken as at least this."""


@dataclass(frozen=True, eq=False)
class InBoth:
    """One tensor in the one call over all tokens and in the call that continues, in the same axes."""

    whole: Tensor
    call: Tensor

    @property
    def are_near(self) -> bool:
        """Whether both are equal but for rounding; they have the same shape."""
        return near(self.whole, self.call)

    @property
    def are_the_same(self) -> bool:
        """Whether both have the same shape and are equal but for rounding."""
        return self.whole.shape == self.call.shape and self.are_near

    def rows(self, expected: Tensor) -> Tensor:
        """Return for each row of `batch heads row feature` of the call its token: that with the same numbers.

        Of several such tokens, the `expected` token of the row is taken. Without one it is `NO_TOKEN`.
        """
        count = self.call.shape[2]
        tokens = torch.full((count,), NO_TOKEN)
        for row in range(count):
            fits = self._tokens_like(row)
            if int(expected[row]) in fits:
                tokens[row] = expected[row]
            elif fits:
                tokens[row] = fits[0]
        return tokens

    def _tokens_like(self, row: int) -> list[int]:
        """Return the tokens of the one call with the numbers of this row of the call."""
        distances = (self.whole - self.call[:, :, row : row + 1]).abs()
        furthest = distances.nan_to_num(torch.inf).amax((0, 1, 3))
        fits = furthest <= tolerance(self.whole)
        places: list[int] = fits.nonzero().flatten().tolist()
        return places

    def first_unlike(self, axis: int) -> int:
        """Return the first position along an axis at which both differ."""
        for position in range(self.whole.shape[axis]):
            whole = self.whole.narrow(axis, position, 1)
            call = self.call.narrow(axis, position, 1)
            if not near(whole, call):
                return position
        return 0


def tolerance(numbers: Tensor) -> float:
    """Return how far apart numbers of this size may be and are still equal."""
    if not (numbers.is_floating_point() or numbers.is_complex()):
        return 0.0  # positions and ids: whole numbers are equal, or they are not
    finite = numbers[numbers.isfinite()]
    largest = 1.0
    if finite.numel():
        largest = float(finite.abs().max())
    relative = min(_ROUNDING * torch.finfo(numbers.dtype).eps, _COARSEST)
    return relative * max(largest, _SMALLEST)


def near(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding; two NaNs and two equal infinities are."""
    distances = (left.double() - right.double()).abs()
    if not distances.numel():
        return True
    are_equal = (left == right) | (left.isnan() & right.isnan())
    distances = distances.masked_fill(are_equal, 0.0)
    distances = distances.nan_to_num(torch.inf)
    return float(distances.max()) <= tolerance(left)


def are_unlike(heads: Tensor) -> bool:
    """Return whether no two tokens of `batch heads key feature` have the same numbers."""
    rows = heads.movedim(2, 0).flatten(1)
    return len(torch.unique(rows, dim=0)) == len(rows)


def shape_without(axis: int, tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of all dimensions but one; `axis` is not the last."""
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])

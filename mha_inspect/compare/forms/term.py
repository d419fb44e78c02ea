"""One side adds the same vector to every token: a bias that the other side leaves out, or adds more often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..pair import Difference, Why, are_near

_FEWEST = 3
"""With fewer tokens, a vector for all of them may be chance."""
_OF_TOKENS = ("batch", "query", "key")


@dataclass(frozen=True)
class Added:
    """A parameter that the left adds to every token more often than the right; less often if `times` is negative."""

    name: str
    times: int


def term(difference: Difference) -> Why | None:
    """Return the vector that one side adds to every token, and the parameter that it is."""
    vector = _vector_of(difference)
    if vector is None:
        return None
    start = f"The difference of {difference.stage} is the same at every token"
    added = added_parameter(difference)
    if added is not None:
        return Why(
            "term",
            f"{start}, and it is {added.name}: {_how_often(added, difference)}.",
            fact=f"{added.times} {added.name}",
        )
    where = difference.where
    return Why("term", f"{start}: one vector, of no parameter alone, is added {where.left} and not {where.right}.")


def added_parameter(difference: Difference) -> Added | None:
    """Return the parameter that is all of the difference; None without one."""
    vector = _vector_of(difference)
    if vector is None:
        return None
    for name, parameter in difference.parameters.of_dimensions(1).items():
        for piece in _pieces(parameter, vector.numel()):
            times = _times(vector, piece, difference.near)
            if times:
                return Added(name, times)
    return None


def _vector_of(difference: Difference) -> Tensor | None:
    """Return the vector that the left has more than the right at every token; None if that is not all."""
    if not difference.is_finite or "scores" in difference.stage or "weights" in difference.stage:
        return None
    axes = [axis for axis, name in enumerate(difference.names) if name in _OF_TOKENS]
    tokens = prod(difference.left.shape[axis] for axis in axes)
    if not axes or tokens < _FEWEST:
        return None
    vector = (difference.ours - difference.theirs).mean(axes, keepdim=True)
    if not difference.is_explained_by(difference.theirs + vector):
        return None
    # Tokens that are all the same differ by a vector whatever the cause.
    mean = difference.ours.mean(axes, keepdim=True)
    if are_near(difference.ours, mean.expand_as(difference.ours), difference.near):
        return None
    return vector.flatten().cpu()


def _how_often(added: Added, difference: Difference) -> str:
    """Return which side adds a parameter more often: `it is not added on the left`."""
    where = difference.where
    of_left, of_right = difference.parameters.unread
    more, less, unread = where.left, where.right, of_right
    if added.times < 0:
        more, less, unread = where.right, where.left, of_left
    times = abs(added.times)
    if times > 1:
        return f"it is added {times} times more {more}"
    if added.name in unread:
        return f"it is not added {less}"
    return f"it is added once more {more}"


def _pieces(parameter: Tensor, size: int) -> Iterator[Tensor]:
    """Yield a parameter, or its pieces of a size: biases of queries, keys and values may be in one."""
    numbers = parameter.detach().double().flatten()
    if not size or numbers.numel() % size:
        return
    yield from torch.split(numbers.cpu(), size)


def _times(vector: Tensor, piece: Tensor, near: float) -> int:
    """Return how often a piece of a parameter is in a vector; 0 if it is not a whole number of times."""
    square = float((piece * piece).sum())
    # Equal numbers alone, e.g. the ones of a norm, may be any vector of equal numbers.
    has_one_number = bool((piece == piece[0]).all())
    if has_one_number or not square:
        return 0
    product = float((vector * piece).sum())
    times = round(product / square)
    apart = max(1.0, abs(times)) * near
    return times if are_near(vector, times * piece, apart) else 0

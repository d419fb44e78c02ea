"""Hold a fused kernel, and the steps that stand for it, against float64 of its own inputs: a few rows are enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels import Attention, Part, attention, run
from .rounding import Rounding, max_difference, rounding_error

Check = Callable[[], Rounding]
"""How far a kernel and its steps are apart, worked out when it is called."""
_ROWS = 4
_COPIED = 1 << 20
"""Bytes of keys and values that are copied to be looked at when the run is over; more are looked at right away."""
_STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Rounding of float64 in units of float32's, in which it is measured: there is nothing finer."""


def few_rows(asked: Attention, given: Tensor, made: Tensor | None, turn: int) -> Check:
    """Return what compares a kernel's result with its steps', `... heads query head_dim`, beside measured rounding.

    A few rows of one head are looked at, the one where the two are farthest apart among them. Without `made` (steps
    that are described alone) they are computed and compared, of another head at each `turn`. What is returned may be
    called when the run is over: it holds no tensor of the run.
    """
    count = given.shape[-2]
    head, row = _worst(given, made) if made is not None else (_at(turn, given.shape[:-2]), count - 1)
    step = max(1, count // _ROWS)
    rows = range(row % step, count, step)
    few, own = asked.of_head(head, rows), given[head][rows.start :: rows.step]
    if made is not None:
        difference = max_difference(given, made)
        return lambda: _judged(few, own, difference)
    if 2 * few.key.numel() * few.key.element_size() > _COPIED:
        found = _judged(few, own)
        return lambda: found
    few = few.with_tensors(Tensor.clone)
    return lambda: _judged(few, own)


def _judged(few: Attention, given: Tensor, difference: float | None = None) -> Rounding:
    """Judge a difference, by default that of these rows from what a kernel gave for them."""
    dtype = torch.float64 if given.dtype == torch.float64 else torch.float32
    # Computed anew also where the steps were run: where these are wrong, their error is no rounding.
    own = attention(run, few, dtype)[0].to(given.dtype)
    exact = attention(run, few, torch.float64)[0]
    difference = max_difference(given, own) if difference is None else difference
    if dtype == torch.float64:
        coarse = attention(run, few, torch.float32)[0]
        return Rounding.of(difference, rounding_error(coarse, exact) * _STEP)
    return Rounding.of(difference, _error(own, exact))


def check_part(
    part: Part,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...] | None,
) -> Rounding:
    """How far what a leaf gives is from what its steps give, beside the rounding of a few rows."""
    some, few = part.few(*args, **kwargs)
    exact = part.steps(run, *map(_double, some))
    own = part.steps(run, *some)
    if made is None:
        difference = max(max_difference(few(one), other) for one, other in zip(given, own, strict=True))
    else:
        difference = max(max_difference(one, other) for one, other in zip(given, made, strict=True))
    if given[0].dtype == torch.float64:
        coarse = part.steps(run, *(_double(arg, torch.float32) for arg in some))
        return Rounding.of(difference, max(map(rounding_error, coarse, exact)) * _STEP)
    return Rounding.of(difference, max(map(_error, own, exact)))


def _double(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _error(own: Tensor, exact: Tensor) -> float:
    """The largest rounding error, which to store the largest number alone may make half a step."""
    largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()
    return max(rounding_error(own, exact), float(largest) * torch.finfo(own.dtype).eps / 2)


def _at(turn: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One place after the other in a shape."""
    place = []
    for size in reversed(shape):
        turn, at = divmod(turn, size)
        place.append(at)
    return tuple(reversed(place))


def _worst(given: Tensor, made: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the head, and its row, where two tensors are farthest apart."""
    apart = (given - made).abs()
    largest = float(apart.max())
    if not math.isfinite(largest):
        same = (given == made) | (given.isnan() & made.isnan())
        apart = apart.nan_to_num(nan=math.inf).masked_fill(same, 0.0)
    *head, row, _ = (int(i) for i in torch.unravel_index(apart.argmax(), apart.shape))
    return tuple(head), row

"""Hold a fused kernel, and the steps that stand for it, against float64 of its own inputs: a few rows are enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from .kernels import Attention, Part, attention, run
from .rounding import STEP, Rounding, max_difference, rounding_error

Check = Callable[[], Rounding]
"""How far a kernel and its steps are apart, worked out when it is called."""
_ROWS = 4
_COPIED = 1 << 20
"""Bytes of keys and values that are copied to be looked at when the run is over; more are looked at right away."""


class Shelf:
    """Memory for the few numbers of each kernel that are looked at when the run is over.

    What is allocated between the large blocks of a forward, and stays, keeps those from being joined and used again: a
    process grew by the size of a layer for each. So the numbers lie apart, and no tensor is held.
    """

    _PAGE = 1 << 20

    def __init__(self) -> None:
        self._page: mmap | None = None
        self._used = 0

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor onto the shelf, and return what hands it out; one of another device stays there."""
        if tensor.device.type != "cpu":
            copied = tensor.clone()
            return lambda: copied
        size = tensor.numel() * tensor.element_size()
        if self._page is None or self._used + size > len(self._page):
            self._page, self._used = mmap(-1, max(size, self._PAGE)), 0
        page, start, shape, dtype = self._page, self._used, tensor.shape, tensor.dtype
        self._used += -(-size // 16) * 16

        def get() -> Tensor:
            return torch.frombuffer(page, dtype=dtype, count=shape.numel(), offset=start).view(shape)

        get().copy_(tensor)
        return get


def few_rows(asked: Attention, given: Tensor, made: Tensor | None, turn: int, shelf: Shelf) -> Check:
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
    shelved, result = few.with_tensors(shelf.put), shelf.put(own)

    def taken(get: Any) -> Any:
        return get()

    return lambda: _judged(shelved.with_tensors(taken), result())


def _judged(few: Attention, given: Tensor, difference: float | None = None) -> Rounding:
    """Judge a difference, by default that of these rows from what a kernel gave for them."""

    def computed(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (attention(run, few, dtype),)

    # Computed anew also where the steps were run: where these are wrong, their error is no rounding.
    own = computed(torch.float64 if given.dtype == torch.float64 else torch.float32)[0][0].to(given.dtype)
    difference = max_difference(given, own) if difference is None else difference
    return _beside_rounding(difference, (own[None],), computed)


def check_part(
    part: Part,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: tuple[Tensor, ...],
    made: tuple[Tensor, ...] | None,
) -> Rounding:
    """How far what a leaf gives is from what its steps give, beside the rounding of a few rows."""
    some, few = part.few(*args, **kwargs)
    own = part.steps(run, *some)
    pairs = zip(given, made, strict=True) if made is not None else zip(map(few, given), own, strict=True)
    difference = max(max_difference(one, other) for one, other in pairs)
    return _beside_rounding(difference, own, lambda dtype: part.steps(run, *(_cast(arg, dtype) for arg in some)))


def _beside_rounding(
    difference: float, own: tuple[Tensor, ...], computed: Callable[[torch.dtype], tuple[Tensor, ...]]
) -> Rounding:
    """Judge a difference beside the rounding of `own`, which `computed` gives in another dtype."""
    exact = computed(torch.float64)
    if own[0].dtype == torch.float64:
        return Rounding.of(difference, max(map(rounding_error, computed(torch.float32), exact)) * STEP)
    return Rounding.of(difference, max(map(_error, own, exact)))


def _cast(value: Any, dtype: torch.dtype) -> Any:
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
    *head, row, _ = _at(int(apart.argmax()), apart.shape)
    return tuple(head), row

"""Rehearse: run something on less input, see what it takes of memory, and foresee what all of the input takes.

No command is modelled: the very code that is to run is what runs, on a few sequences that are cut short. What it takes
at its peak grows with the number of positions and with their square, and with the number of sequences.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ctypes import CDLL
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

_FEW = 16
"""A length up to which nothing is cut."""
_START = 4, 32
"""Sequences and positions of the first rehearsal; each that follows is twice as large."""
_LEAST = 3
"""Rehearsals that a foresight is made from: as many as there are terms."""
_ENOUGH = 1 << 27
"""Bytes from which on what is allocated once, or a piece at a time, matters no more."""
_PAIRS = 1 << 25
"""Pairs of positions from which on a rehearsal takes its time."""
_MARGIN = 1.3
"""What the largest runs take beside it: memory is freed in pieces, and not at once."""


@dataclass(frozen=True)
class Extent:
    """How much input there is."""

    rows: int
    """Sequences."""
    length: int
    """Positions of the longest one."""

    @property
    def terms(self) -> tuple[int, int, int]:
        """What bytes are a sum of: as often as once, as there are positions, and as there are pairs of them."""
        return 1, self.rows * self.length, self.rows * self.length**2


@dataclass(frozen=True)
class Cut:
    """What is left of the input in a rehearsal."""

    whole: Extent
    left: Extent

    def rows(self, count: int) -> int:
        """Return how many are left of what there is as often as sequences, or as heads of all of them."""
        each, rest = divmod(count, self.whole.rows)
        return count if rest else each * self.left.rows

    def length(self, count: int) -> int:
        """Return how many positions are left of a sequence."""
        return count if count <= _FEW else max(_FEW, ceil(count * self.left.length / self.whole.length))

    def shape(self, shape: tuple[int, ...], *, vectors: bool) -> tuple[int, ...]:
        """Return the shape that is left of an input, which is one of `vectors` or of whole numbers."""
        places, features = split(shape, vectors=vectors)
        if len(places) == 2 and places == (self.whole.length, self.whole.rows):
            return (self.left.length, self.left.rows, *features)
        if len(places) > 2:  # an image
            return (self.rows(places[0]), *places[1:], *features)
        return (*map(self.rows, places[:-1]), *map(self.length, places[-1:]), *features)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return what is left of an input."""
        return _shortened(tensor, self.shape(tuple(tensor.shape), vectors=tensor.is_floating_point()))

    def mask(self, mask: Tensor) -> Tensor:
        """Return what is left of a mask `... query key`."""
        first = (*map(self.rows, mask.shape[:-2][:1]), *mask.shape[1:-2])
        return _shortened(mask, (*first, *map(self.length, mask.shape[-2:])))

    def budget(self, whole: int) -> int:
        """Return the share of a bound on bytes that are as many as pairs of positions."""
        return whole * self.left.terms[2] // self.whole.terms[2]


_now: ContextVar[Cut | None] = ContextVar("cut", default=None)


def rehearsed() -> Cut | None:
    """Return what is left of the input in this rehearsal; None where it is for good."""
    return _now.get()


def split(shape: tuple[int, ...], *, vectors: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of an input that number its sequences and positions, and those of what stands at each."""
    places = len(shape) - 1 if vectors and len(shape) > 1 else len(shape)
    return shape[:places], shape[places:]


def _shortened(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(size) for size in shape)].clone()


@contextmanager
def _cut_to(cut: Cut) -> Iterator[None]:
    token = _now.set(cut)
    try:
        yield
    finally:
        _now.reset(token)


def foresee(run: Callable[[], object], whole: Extent, device: torch.device, free: int) -> Callable[[Extent], int]:
    """Return what tells the bytes that `run` takes at its peak, by how much input it has.

    Args:
        run: makes its input anew, as `rehearsed` says.
        whole: the input that it has for good.
        device: whose memory is meant.
        free: bytes of which a rehearsal may take a small part.

    Raises `OSError` where the system does not tell, and whatever `run` raises on less input.
    """
    seen: list[tuple[Extent, int]] = []
    kept = 0  # by the first: what is imported, and kept for the next time
    for left in _steps(whole):
        before = held(device)
        with _cut_to(Cut(whole, left)):
            seen.append((left, kept + taken(run, device, before)))
        # Later ones keep what oneDNN makes for products of their sizes; the real run makes that for its own alone.
        kept = kept or max(0, held(device) - before)
        most, grown = seen[-1][1], seen[-1][1] - seen[0][1]  # what its parameters take says nothing
        # Nothing grows faster than pairs of positions do: where all of it did and had room twice, it fits.
        fits = 2 * _MARGIN * most * whole.terms[2] < free * left.terms[2]
        if most > free or (len(seen) >= _LEAST and grown > min(_ENOUGH, free // 8)):
            break
        if fits and left.terms[2] >= _PAIRS:
            break
    gc.collect()  # what the last one held in circles is not there when it runs for good
    factors = _fitted(seen[-_LEAST:])

    def summed(extent: Extent, margin: float = 1.0) -> float:
        once, *more = (one * term for one, term in zip(factors, extent.terms, strict=True))
        return once + margin * sum(more)

    nearest, most = seen[-1]
    least = max(1.0, most / (summed(nearest) or 1))  # the largest of them says more than the sum
    return lambda extent: int(least * summed(extent, _MARGIN))


def _steps(whole: Extent) -> Iterator[Extent]:
    rows, length = min(whole.rows, _START[0]), min(whole.length, _START[1])
    yield Extent(rows, length)
    while (rows, length) != (whole.rows, whole.length):
        if length < whole.length:
            length = min(2 * length, whole.length)
        else:
            rows = min(2 * rows, whole.rows)
        yield Extent(rows, length)


def held(device: torch.device) -> int:
    """Return the bytes that this process holds now, or that it holds of a device.

    Raises `OSError` where the system does not tell.
    """
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(AttributeError, OSError):
        CDLL(None).malloc_trim(0)  # what is free and held back would be taken unseen
    return _field("VmRSS:")


def taken(run: Callable[[], object], device: torch.device, before: int) -> int:
    """Return the most bytes that were held at one time while `run` ran, beyond those that were held before.

    Raises `OSError` where the system does not tell.
    """
    held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    run()
    return max(0, _field("VmHWM:") - before)


def _field(name: str) -> int:
    """Return a number of bytes that the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _fitted(seen: list[tuple[Extent, int]]) -> list[float]:
    """Return how many bytes each term takes, none of them less than nothing: what comes nearest to what was seen."""
    terms = torch.tensor([[term / (taken or 1) for term in left.terms] for left, taken in seen], dtype=torch.float64)
    wanted = torch.ones(len(seen), 1, dtype=torch.float64)
    best, least = [0.0, 0.0, 0.0], float("inf")
    for number in (3, 2, 1):
        for chosen in combinations(range(3), number):
            columns = terms[:, chosen]
            sizes = columns.norm(dim=0).clamp(min=1e-300)
            found = torch.linalg.lstsq(columns / sizes, wanted, driver="gelsd").solution
            missed = float((columns / sizes @ found - wanted).norm())
            if bool((found >= 0).all()) and missed < 0.99 * least:
                least = missed
                shares = (found[:, 0] / sizes).tolist()
                best = [shares[chosen.index(place)] if place in chosen else 0.0 for place in range(3)]
    return best

"""Find why a stage of a rank is not its part of the whole module's stage: each reason is tried on the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..measure.replaced import places_in, replacement
from ..naming.pattern import CANONICAL_AXES
from ..text import listed, shortened, spans

_CERTAIN = 10
"""Numbers within this many rounding errors are the same."""
_LEAST = 64
"""The same, in epsilons of the largest number: the rounding error may have been measured as 0."""


@dataclass(frozen=True, eq=False)
class StageOfRanks:
    """A stage of an attention in the whole module, and on every rank, all in canonical axes."""

    name: str
    wholes: Mapping[str, Tensor]
    """The stages of the whole module, by name."""
    every: Sequence[Tensor]
    """The stage of each rank."""
    biases: Mapping[str, Tensor]
    """Vectors among the parameters of the whole module, by name."""
    floor: float
    """The rounding error of the stage."""

    @property
    def _whole(self) -> Tensor:
        return self.wholes[self.name]

    def _is_near(self, left: Tensor, right: Tensor) -> bool:
        if left.shape != right.shape:
            return False
        largest = float(self._whole.abs().nan_to_num(0.0, 0.0, 0.0).max())
        apart = (left.double() - right.double()).abs().nan_to_num(torch.inf)
        return float(apart.max()) <= self._nearness(right.dtype, largest)

    def _nearness(self, dtype: torch.dtype, largest: float) -> float:
        """Return the distance of two numbers up to which they are the same, in a stage whose largest number is this."""
        return max(_CERTAIN * self.floor, _LEAST * torch.finfo(dtype).eps * largest)

    def reason(self, rank: int) -> str:
        """Return what makes the stage of a rank its part of the whole; empty if nothing that was tried does."""
        return next(self._tried(rank), "")

    def _tried(self, rank: int) -> Iterator[str]:
        if self.every[rank].shape == self._whole.shape:
            yield from self._of_sum(rank)
            return
        yield from self._of_other_part(rank)
        yield from self._of_order(rank)
        if not self.name.endswith("_proj"):
            return
        apart = self._without_biases()
        for sentence in (*apart._of_other_part(rank), *apart._of_order(rank)):
            yield f"Apart from the bias: {sentence[0].lower()}{sentence[1:]}"

    def _without_biases(self) -> StageOfRanks:
        """Return the projections, `batch positions features`, without what all tokens have in common."""
        wholes = {name: _centered(whole) for name, whole in self.wholes.items() if name.endswith("_proj")}
        return replace(self, wholes=wholes, every=[_centered(part) for part in self.every])

    def _of_sum(self, rank: int) -> Iterator[str]:
        """Yield a sum over ranks that is missing, was made twice, or has a bias of every rank."""
        whole, got, ranks = self._whole, self.every[rank], len(self.every)
        added = torch.stack([*self.every]).sum(0)
        if self._is_near(added, whole):
            yield f"The sum over the {ranks} ranks equals the whole module: an all_reduce is missing."
        if self._is_near(got / ranks, whole):
            yield f"The result is {ranks} times that of the whole module: every rank adds what only one should."
        for name, bias in self.biases.items():
            if bias.shape != whole.shape[-1:] or not bool(bias.any()):
                continue
            times = "" if ranks == 2 else f"{ranks - 1} · "
            if self._is_near(got - (ranks - 1) * bias, whole):
                yield f"Without {times}{name}, the result equals the whole module: every rank adds the bias."
            if self._is_near(added - (ranks - 1) * bias, whole):
                yield (
                    f"The sum over the {ranks} ranks, without {times}{name}, equals the whole module: an all_reduce "
                    "is missing, and every rank adds the bias."
                )

    def _of_other_part(self, rank: int) -> Iterator[str]:
        """Yield a part of another rank, or of another stage, that this rank has in its place."""
        got, ranks = self.every[rank], len(self.every)
        for further in range(ranks):
            if further == rank:
                continue
            part = part_of(self._whole, got.shape, further, ranks)
            if part is not None and self._is_near(part, got):
                yield f"The result is the part of rank {further}."
        for name, whole in self.wholes.items():
            if name == self.name or whole.dim() != got.dim():
                continue
            part = part_of(whole, got.shape, rank, ranks)
            if part is not None and self._is_near(part, got):
                yield f"The result is the part of {name}."

    def _of_order(self, rank: int) -> Iterator[str]:
        """Yield which features or heads of the whole a rank has in place of its own, or a change of its own part."""
        got, whole = self.every[rank], self._whole
        near = self._nearness(got.dtype, float(whole.abs().max()))
        cut = [axis for axis in range(got.dim()) if got.shape[axis] != whole.shape[axis]]
        places = places_in(whole, got, cut[0], near) if len(cut) == 1 else None
        if places is not None and len(set(places)) == len(places):
            word = "features" if cut[0] == got.dim() - 1 else "heads"
            size = len(places)
            expected = spans(range(rank * size, (rank + 1) * size))
            yield f"The result has {word} {_in_turn(places)} of the whole module instead of {expected}."
        expected_part = part_of(whole, got.shape, rank, len(self.every))
        if expected_part is None:
            return
        called = "in the whole module", f"on rank {rank}"
        change = replacement(self.name, CANONICAL_AXES[self.name], (expected_part, got), near, called)
        if change is not None:
            yield change.sentence


def _centered(content: Tensor) -> Tensor:
    """Return `batch positions features` without the mean over all tokens."""
    return content - content.mean((0, 1), keepdim=True)


def _in_turn(places: Sequence[int]) -> str:
    """Return places in their order, runs as ranges: `21–23, 0–8`."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return shortened(listed([spans(run) for run in runs]), 60)


def part_of(whole: Tensor, shape: Sequence[int], rank: int, ranks: int) -> Tensor | None:
    """Return the part of a stage that a rank should have, in this shape; None if it is no equal part."""
    for dim, (size, of_rank) in enumerate(zip(whole.shape, shape, strict=True)):
        if size == of_rank:
            continue
        if of_rank * ranks != size:
            return None
        whole = whole.narrow(dim, rank * of_rank, of_rank)
    return whole

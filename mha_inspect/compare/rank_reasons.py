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
        finite = self._whole.abs().nan_to_num(0.0, 0.0, 0.0)
        nearness = self._nearness(right.dtype, float(finite.max()))
        apart = (left.double() - right.double()).abs()
        return float(apart.nan_to_num(torch.inf).max()) <= nearness

    def _nearness(self, dtype: torch.dtype, largest: float) -> float:
        """Return the distance of two numbers up to which they are the same, in a stage whose largest number is this."""
        least = _LEAST * torch.finfo(dtype).eps * largest
        return max(_CERTAIN * self.floor, least)

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
        wholes: dict[str, Tensor] = {}
        for name, whole in self.wholes.items():
            if name.endswith("_proj"):
                wholes[name] = _centered(whole)
        return replace(self, wholes=wholes, every=[_centered(part) for part in self.every])

    def _of_sum(self, rank: int) -> Iterator[str]:
        """Yield a sum over ranks that is missing, was made twice, or has a bias of every rank."""
        whole = self._whole
        of_rank = self.every[rank]
        ranks = len(self.every)
        added = torch.stack([*self.every]).sum(0)
        if self._is_near(added, whole):
            yield f"The sum over the {ranks} ranks equals the whole module: an all_reduce is missing."
        if self._is_near(of_rank / ranks, whole):
            yield f"The result is {ranks} times that of the whole module: every rank adds what only one should."
        for name, bias in self.biases.items():
            if bias.shape != whole.shape[-1:] or not bool(bias.any()):
                continue
            surplus = (ranks - 1) * bias
            term = name if ranks == 2 else f"{ranks - 1} · {name}"
            if self._is_near(of_rank - surplus, whole):
                yield f"Without {term}, the result equals the whole module: every rank adds the bias."
            if self._is_near(added - surplus, whole):
                yield (
                    f"The sum over the {ranks} ranks, without {term}, equals the whole module: an all_reduce "
                    "is missing, and every rank adds the bias."
                )

    def _of_other_part(self, rank: int) -> Iterator[str]:
        """Yield a part of another rank, or of another stage, that this rank has in its place."""
        for further in range(len(self.every)):
            if further != rank and self._is_part(self._whole, further, of_rank=rank):
                yield f"The result is the part of rank {further}."
        for name, whole in self.wholes.items():
            if name == self.name or whole.dim() != self.every[rank].dim():
                continue
            if self._is_part(whole, rank, of_rank=rank):
                yield f"The result is the part of {name}."

    def _is_part(self, whole: Tensor, place: int, *, of_rank: int) -> bool:
        """Return whether a rank has the part of a whole stage that is for the rank at `place`."""
        content = self.every[of_rank]
        part = part_of(whole, content.shape, place, len(self.every))
        return part is not None and self._is_near(part, content)

    def _of_order(self, rank: int) -> Iterator[str]:
        """Yield which features or heads of the whole a rank has in place of its own, or a change of its own part."""
        whole = self._whole
        content = self.every[rank]
        near = self._nearness(content.dtype, float(whole.abs().max()))
        yield from self._of_places(rank, near)
        part = part_of(whole, content.shape, rank, len(self.every))
        if part is None:
            return
        change = replacement(
            self.name,
            CANONICAL_AXES[self.name],
            (part, content),
            near,
            called=("in the whole module", f"on rank {rank}"),
        )
        if change is not None:
            yield change.sentence

    def _of_places(self, rank: int, near: float) -> Iterator[str]:
        """Yield which features or heads of the whole a rank has, if its part is cut along one axis."""
        whole = self._whole
        content = self.every[rank]
        cut = [axis for axis in range(content.dim()) if content.shape[axis] != whole.shape[axis]]
        if len(cut) != 1:
            return
        (axis,) = cut
        places = places_in(whole, content, axis, near)
        if places is None or len(set(places)) != len(places):
            return
        word = "features" if axis == content.dim() - 1 else "heads"
        size = len(places)
        expected = spans(range(rank * size, (rank + 1) * size))
        yield f"The result has {word} {_in_turn(places)} of the whole module instead of {expected}."


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

"""Find the first stage of a rank that is not its part of the whole module's stage, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..naming.canonical import contents_of
from ..naming.pattern import STAGES
from ..record.ranks import local
from ..record.rounding import distances, judge, rounding_error
from ..running.subject import Run, Subject
from ..text import shape as shape_text
from .rank_reasons import StageOfRanks, part_of


@dataclass(frozen=True, eq=False)
class RunOfRanks:
    """A simulated run, in which each tensor is there for every rank."""

    run: Run
    kept: Mapping[int, list[Tensor]]
    """The tensors of each rank, by tensor id; one alone if it is that of all ranks."""
    ranks: int

    def take(self, rank: int) -> None:
        """Make the tensors of a rank those of the run."""
        for number, tensors in self.kept.items():
            self.run.recording.values[number] = tensors[rank % len(tensors)]

    def stage(self, rank: int, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention on a rank in canonical axes; None if an axis has no name."""
        self.take(rank)
        attention, names = self.run.attentions[place]
        return contents_of(self.run, attention, names).get(stage)

    def of_every_rank(self, place: int, stage: str) -> list[Tensor]:
        """Return a stage of each rank in canonical axes; fewer tensors if an axis has no name on a rank."""
        every = []
        for rank in range(self.ranks):
            content = self.stage(rank, place, stage)
            if content is not None:
                every.append(content.clone())
        return every


@dataclass(frozen=True)
class _RankDifference:
    """How a stage of a rank is not its part of the whole module's."""

    words: str
    """The end of a sentence."""
    floor: float
    """The rounding error of the whole module's stage."""
    is_part: bool
    """Whether its shape is that of a part."""


@dataclass(frozen=True, eq=False)
class _ByRank:
    """A whole module beside the run of its ranks."""

    subject: Subject
    whole: Run
    cut: RunOfRanks

    @cached_property
    def _exact(self) -> Run | None:
        """The whole module in float64; None if it does not run in it."""
        try:
            return self.subject.fresh().copied(torch.float64).recorded(keep=True)
        except Exception:  # user code may raise anything in another dtype
            return None

    def differences(self) -> Iterator[str]:
        """Yield what differs, in the order of computation, as sentences."""
        for place in range(len(self.whole.attentions)):
            expected = self._expected(place)
            precise = self._precise(place)
            of_attention = f" of attention {place + 1}" if len(self.whole.attentions) > 1 else ""
            for stage in STAGES:
                if stage not in expected:
                    continue
                for rank in range(self.cut.ranks):
                    content = self.cut.stage(rank, place, stage)
                    if content is None:
                        continue
                    part = _PartOfRank(rank, self.cut.ranks, content)
                    difference = part.difference_from(expected[stage], precise.get(stage))
                    if difference is not None:
                        why = self._why(rank, place, stage, difference)
                        yield f"The first difference is {stage}{of_attention}{difference.words}{why}"

    def _expected(self, place: int) -> Mapping[str, Tensor]:
        """Return the stages of an attention of the whole module in canonical axes, by name."""
        attention, names = self.whole.attentions[place]
        return contents_of(self.whole, attention, names)

    def _precise(self, place: int) -> Mapping[str, Tensor]:
        """Return the same in float64; empty if the module does not run in it."""
        if self._exact is None:
            return {}
        attention, names = self._exact.attentions[place]
        return contents_of(self._exact, attention, names)

    def _why(self, rank: int, place: int, stage: str, difference: _RankDifference) -> str:
        """Return the reason of a rank's stage as a further sentence; empty without one."""
        if not difference.is_part:
            return ""
        every = self.cut.of_every_rank(place, stage)
        if len(every) != self.cut.ranks:
            return ""
        stages = StageOfRanks(
            name=stage,
            wholes=self._expected(place),
            every=every,
            biases=_vectors(self.subject.module),
            floor=difference.floor,
        )
        reason = stages.reason(rank)
        return f" {reason}" if reason else ""


def first_difference(subject: Subject, whole: Run, cut: RunOfRanks) -> str:
    """Return a sentence that names the first stage of a rank that is not its part of the whole module's stage."""
    count = len(cut.run.attentions)
    if len(whole.attentions) != count:
        return f"A rank computes {count} attentions where the whole module computes {len(whole.attentions)}."
    agrees = "Every stage of every rank agrees with the whole module: the difference comes after the attentions."
    return next(_ByRank(subject, whole, cut).differences(), agrees)


@dataclass(frozen=True, eq=False)
class _PartOfRank:
    """A stage on one of several ranks, in canonical axes."""

    rank: int
    ranks: int
    content: Tensor

    def difference_from(self, whole: Tensor, precise: Tensor | None) -> _RankDifference | None:
        """Return how the stage is not its part of the whole module's; None if it is.

        `precise` is the whole module's stage in float64, which shows its rounding error.
        """
        floor = 0.0
        if precise is not None:
            floor = rounding_error(whole, precise.to(whole.dtype))
        part = part_of(whole, self.content.shape, self.rank, self.ranks)
        if part is None:
            shape = shape_text(tuple(self.content.shape))
            whole_shape = shape_text(tuple(whole.shape))
            return _RankDifference(f": rank {self.rank} has {shape}, no part of {whole_shape}.", floor, is_part=False)
        largest, _ = distances(part, self.content)
        _, verdict = judge(largest, floor)
        if verdict != "differs":
            return None
        return _RankDifference(f" on rank {self.rank}: {largest:.2g}, rounding {floor:.1g}.", floor, is_part=True)


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of one dimension: biases, and weights of norms."""
    return {name: local(vector).detach() for name, vector in module.named_parameters() if vector.dim() == 1}

"""Find the first stage of a rank that is not its part of the whole module's stage, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..naming.canonical import contents_of
from ..naming.pattern import CANONICAL_AXES, STAGES
from ..record.ranks import local
from ..record.rounding import distances, judge, rounding_error
from ..running.subject import Run, Subject
from ..text import listed, shortened, spans
from ..text import shape as shape_text
from .forms import form_of
from .forms.order import places_in
from .forms.term import added_parameter
from .pair import Difference, Parameters, Where, tolerance


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


def first_difference(subject: Subject, whole: Run, cut: RunOfRanks) -> str:
    """Return a sentence that names the first stage of a rank that is not its part of the whole module's stage."""
    count = len(cut.run.attentions)
    if len(whole.attentions) != count:
        return f"A rank computes {count} attentions where the whole module computes {len(whole.attentions)}."
    agrees = "Every stage of every rank agrees with the whole module: the difference comes after the attentions."
    return next(_Ranks(subject, whole, cut).differences(), agrees)


@dataclass(frozen=True, eq=False)
class _Ranks:
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

    @cached_property
    def _parameters(self) -> Parameters:
        named = self.subject.module.named_parameters()
        return Parameters({name: local(parameter) for name, parameter in named})

    def differences(self) -> Iterator[str]:
        """Yield what differs, in the order of computation, as sentences."""
        for place in range(len(self.whole.attentions)):
            expected = _stages(self.whole, place)
            precise = {} if self._exact is None else _stages(self._exact, place)
            of_attention = f" of attention {place + 1}" if len(self.whole.attentions) > 1 else ""
            for stage in STAGES:
                if stage not in expected:
                    continue
                floor = 0.0
                if stage in precise:
                    floor = rounding_error(expected[stage], precise[stage].to(expected[stage].dtype))
                every = self.cut.of_every_rank(place, stage)
                at = _StageOfRanks(stage, expected, every, self._parameters, floor, whole_ranks=self.cut.ranks)
                for rank in range(len(every)):
                    words = at.words(rank)
                    if words:
                        yield f"The first difference is {stage}{of_attention}{words}"


def _stages(run: Run, place: int) -> Mapping[str, Tensor]:
    """Return the stages of an attention in canonical axes, by name."""
    attention, names = run.attentions[place]
    return contents_of(run, attention, names)


@dataclass(frozen=True, eq=False)
class _StageOfRanks:
    """A stage of an attention in the whole module, and on every rank, all in canonical axes."""

    name: str
    wholes: Mapping[str, Tensor]
    """The stages of the whole module, by name."""
    every: Sequence[Tensor]
    """The stage of each rank."""
    parameters: Parameters
    """Those of the whole module."""
    floor: float
    """The rounding error of the stage."""
    whole_ranks: int
    """The number of ranks; there are fewer stages if an axis has no name on one."""

    @property
    def _whole(self) -> Tensor:
        return self.wholes[self.name]

    @property
    def _near(self) -> float:
        return tolerance(self._whole, self.floor)

    def words(self, rank: int) -> str:
        """Return the end of a sentence on how the stage of a rank is not its part of the whole; empty if it is."""
        content = self.every[rank]
        part = part_of(self._whole, content.shape, rank, self.whole_ranks)
        if part is None:
            shape = shape_text(tuple(content.shape))
            whole_shape = shape_text(tuple(self._whole.shape))
            return f": rank {rank} has {shape}, no part of {whole_shape}."
        largest, _ = distances(part, content)
        _, verdict = judge(largest, self.floor)
        if verdict != "differs":
            return ""
        words = f" on rank {rank}: {largest:.2g}, rounding {self.floor:.1g}."
        has_all = len(self.every) == self.whole_ranks
        reason = next(self._reasons(rank), "") if has_all else ""
        return f"{words} {reason}" if reason else words

    def _difference(self, whole: Tensor, content: Tensor, rank: int) -> Difference:
        return Difference(
            stage=self.name,
            axes=CANONICAL_AXES[self.name],
            left=whole,
            right=content,
            near=self._near,
            where=Where("in the whole module", f"on rank {rank}"),
            parameters=self.parameters,
        )

    def _reasons(self, rank: int) -> Iterator[str]:
        """Yield what makes the stage of a rank its part of the whole."""
        if self.every[rank].shape == self._whole.shape:
            yield from self._of_sum(rank)
            return
        yield from self._of_part(rank)
        if not self.name.endswith("_proj"):
            return
        for sentence in self._without_biases()._of_part(rank):
            yield f"Apart from the bias: {sentence[0].lower()}{sentence[1:]}"

    def _without_biases(self) -> _StageOfRanks:
        """Return the projections, `batch positions features`, without what all tokens have in common."""
        wholes = {name: _centered(whole) for name, whole in self.wholes.items() if name.endswith("_proj")}
        return replace(self, wholes=wholes, every=[_centered(part) for part in self.every])

    # -- a stage that every rank has whole ----------------------------------------------------------------------------

    def _of_sum(self, rank: int) -> Iterator[str]:
        """Yield a sum over ranks that is missing, was made twice, or has a bias of every rank."""
        ranks = len(self.every)
        of_rank = self._difference(self._whole, self.every[rank], rank)
        of_sum = self._difference(self._whole, torch.stack([*self.every]).sum(0), rank)
        if of_sum.is_explained_by(of_sum.right):
            yield f"The sum over the {ranks} ranks equals the whole module: an all_reduce is missing."
        if of_rank.is_explained_by(of_rank.right / ranks):
            yield f"The result is {ranks} times that of the whole module: every rank adds what only one should."
        for difference, is_sum in ((of_rank, False), (of_sum, True)):
            added = added_parameter(difference)
            if added is None or added.times != 1 - ranks:
                continue
            term = added.name if ranks == 2 else f"{ranks - 1} · {added.name}"
            if is_sum:
                yield (
                    f"The sum over the {ranks} ranks, without {term}, equals the whole module: an all_reduce "
                    "is missing, and every rank adds the bias."
                )
            else:
                yield f"Without {term}, the result equals the whole module: every rank adds the bias."

    # -- a stage of which every rank has a part -----------------------------------------------------------------------

    def _of_part(self, rank: int) -> Iterator[str]:
        """Yield a part of another rank or stage that this rank has, other features or heads, or a form of its own."""
        content = self.every[rank]
        ranks = len(self.every)
        for further in range(ranks):
            if further != rank and self._is_part(self._whole, further, of_rank=rank):
                yield f"The result is the part of rank {further}."
        for name, whole in self.wholes.items():
            if name == self.name or whole.dim() != content.dim():
                continue
            if self._is_part(whole, rank, of_rank=rank):
                yield f"The result is the part of {name}."
        yield from self._of_places(rank)
        part = part_of(self._whole, content.shape, rank, ranks)
        if part is None:
            return
        form = form_of(self._difference(part, content, rank))
        if form is not None:
            yield form.sentence

    def _is_part(self, whole: Tensor, place: int, *, of_rank: int) -> bool:
        """Return whether a rank has the part of a whole stage that is for the rank at `place`."""
        content = self.every[of_rank]
        part = part_of(whole, content.shape, place, len(self.every))
        return part is not None and self._difference(part, content, of_rank).is_explained_by(content)

    def _of_places(self, rank: int) -> Iterator[str]:
        """Yield which features or heads of the whole a rank has, if its part is cut along one axis."""
        content = self.every[rank]
        sizes = zip(content.shape, self._whole.shape, strict=True)
        cut = [axis for axis, (size, whole_size) in enumerate(sizes) if size != whole_size]
        if len(cut) != 1:
            return
        axis = cut[0]
        places = places_in(self._whole, content, axis, self._near)
        if places is None or len({*places}) < len(places):
            return
        word = "heads"
        if axis == content.dim() - 1:
            word = "features"
        first = rank * len(places)
        expected = spans(range(first, first + len(places)))
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

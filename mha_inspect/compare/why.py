"""Find why two modules with the same weights do not compute the same.

Changes of the weights are tried first: with one of them written into the right side, both return the same. Otherwise
the stages are asked in order. A stage that differs, and is explained, is put into the left run, which is computed again
from there; so the next one is a difference of its own, and in the end both return the same, or not everything is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ..naming.canonical import returned_content
from ..naming.pattern import STAGES
from ..record.arguments import dense
from ..record.ops import TensorRef
from ..text import listed, plural
from .comparable_run import ComparableRun, ComparedStage, Comparison
from .forms import form_of
from .pair import Difference, Pair, Reason, Where, Why, are_near, tolerance
from .reasons.exchanged import exchanged
from .reasons.linear import linear, linear_after
from .reasons.made_of import behind
from .reasons.mask import mask
from .reasons.norm import norm
from .reasons.number import number
from .reasons.padding import padding
from .reasons.position import position
from .reasons.rotation import rotation
from .reasons.rows import by_head
from .reasons.scale import scale
from .reasons.shared import shared
from .replay import LostError, replayed

_INPUTS = frozenset({"query", "key", "value"})
OF_WEIGHTS = frozenset({"q_proj", "k_proj", "v_proj", "output"})
"""Stages that a matrix alone makes: an adapter beside it is added to them."""
_MOST = 48
"""The most stages to put into a run."""


def _of_form(pair: Pair, difference: Difference) -> Why | None:
    return form_of(difference)


REASONS: tuple[Reason, ...] = (scale, mask, rotation, norm, number, shared, exchanged, _of_form, linear, position)
"""Asked in this order about a stage that differs."""


def why_merged(left: ComparableRun, right: ComparableRun, where: Where) -> tuple[Why, ...]:
    """Return why two sides differ of which one has the adapters of the other in its weights."""
    return _facts(_Search(left, right, where, leaving_out=OF_WEIGHTS).searched())


def why(left: ComparableRun, right: ComparableRun, where: Where) -> tuple[Why, ...]:
    """Return why two sides with the same weights and input differ; empty if it is not known.

    The weights of the right are as before when this returns.
    """
    with by_head(left, right, where) as orders:
        if orders:
            trial = _Search(left, right, where).searched()
            if trial.is_all:
                return (*orders, *_facts(trial))
    return _facts(_Search(left, right, where).searched())


def first_difference(rows: Sequence[ComparedStage], leaving_out: frozenset[str] = frozenset()) -> ComparedStage | None:
    """Return the first stage that differs, and not in form alone; None if none does."""
    by_place: dict[int, list[ComparedStage]] = {}
    for row in rows:
        if row.difference is not None:
            by_place.setdefault(row.place, []).append(row)
    for stages in by_place.values():
        same = set()
        differing: dict[str, ComparedStage] = {}
        for row in stages:
            if row.verdict == "same":
                same.add(row.name)
            if row.verdict == "differs" and row.name not in leaving_out:
                differing[row.name] = row
        for name in _effective(same.__contains__):
            if name in differing:
                return differing[name]
    return None


def _effective(is_same: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the stages whose difference changes anything: not those before a stage that is the same."""
    alike: set[str] = set()
    for stage in STAGES:
        if is_same(stage):
            alike |= behind(stage)
    # What comes in has a part in all of the attention, and may go around it.
    if is_same("output") or is_same("context"):
        alike |= _INPUTS
    return tuple(stage for stage in STAGES if stage not in alike)


def why_norms(left: ComparableRun, right: ComparableRun, stage: str | None, where: Where) -> Iterator[Why]:
    """Yield how queries or keys are normalized otherwise, where the weights of both sides differ."""
    for pair in Comparison(left, right).pairs(where):
        content = None if stage is None else pair.left.stage(stage)
        if stage is None or content is None:
            continue
        reason = norm(pair, Difference(stage, "", content, content, near=0.0, where=where))
        if reason is not None:
            yield reason
            return


# -- the stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Trial:
    """The left run with some stages of the right put into it."""

    values: Mapping[int, Tensor] = field(default_factory=dict)
    """The tensors that were put in, by id."""
    computed: Mapping[int, Tensor] = field(default_factory=dict)
    """These, and what was computed of them up to the output."""
    found: tuple[_Found, ...] = ()
    """The reasons of these stages."""
    end: str = ""
    """How the search ended: what is known of the outputs."""
    is_all: bool = False
    """Whether both sides return the same with what was put in."""


@dataclass(frozen=True)
class _Found:
    """The reason of one stage."""

    why: Why
    place: int
    stage: str


@dataclass(frozen=True, eq=False)
class _Search:
    """Two runs, whose stages are asked in order."""

    left: ComparableRun
    right: ComparableRun
    where: Where
    leaving_out: frozenset[str] = frozenset()
    """Stages that differ in form alone."""

    def searched(self) -> _Trial:
        """Return the left run with each stage of the right that differs, up to the first without a reason."""
        trial = _Trial()
        comparison = Comparison(self.left, self.right)
        if not comparison.are_paired:
            return trial
        for place, pair in enumerate(comparison.pairs(self.where)):
            at = replace(pair, left=replace(pair.left, changed=trial.computed))
            for stage in _effective(partial(_is_same_in, at)):
                if stage in self.leaving_out:
                    continue
                trial = self._after(trial, pair, place, stage)
                if trial.end:
                    return trial
        return self._at_the_end(trial)

    def _after(self, trial: _Trial, pair: Pair, place: int, stage: str) -> _Trial:
        """Return the left run with the right's stage in it, if that differs and is explained."""
        at = replace(pair, left=replace(pair.left, changed=trial.computed))
        difference = at.difference(stage)
        if difference is None:
            return trial
        reason = _reason_of(at, difference)
        found = trial.found if reason is None else (*trial.found, _Found(reason, place, stage))
        try:
            further = self._put_in(trial, at, stage)
        except LostError:
            return replace(trial, found=found, end="Whether anything else differs could not be tried.")
        if reason is not None:
            is_last = len(found) >= _MOST or not reason.is_all
            return replace(further, found=found, end="More may differ." if is_last else "")
        # A stage that differs in form alone changes no output.
        before, after = self._output(trial), self._output(further)
        if are_near(before, after, tolerance(before, self._floor)):
            return trial
        return replace(trial, end=f"More differs: {stage} is not the same even then.")

    def _put_in(self, trial: _Trial, pair: Pair, stage: str) -> _Trial:
        """Return the left run with a further stage of the right in it. Raise `LostError` if it cannot be computed."""
        value = pair.put_into_left(stage)
        if value is None:
            raise LostError
        values = {**trial.values, pair.left.attention.stages[stage].id: value}
        with torch.no_grad():
            return replace(trial, values=values, computed=replayed(pair.left.kept, values, self._returned))

    # -- the outputs --------------------------------------------------------------------------------------------------

    @property
    def _returned(self) -> TensorRef:
        """The first tensor that the left returns."""
        return self.left.run.recording.outputs[0].tensor

    @cached_property
    def _floor(self) -> float:
        """The larger rounding error of both outputs."""
        return max(side.output_floor(()) for side in (self.left, self.right))

    def _output(self, trial: _Trial) -> Tensor:
        """Return the output of the left run with what was put in."""
        value = trial.computed.get(self._returned.id)
        if value is None:
            return self.left.output
        content = returned_content(self.left.run, dense(value))
        return dense(value) if content is None else content

    def _at_the_end(self, trial: _Trial) -> _Trial:
        """Return the search with the reason of the outputs, if they still differ, and whether all is known then."""
        left, right = self._output(trial), self.right.output
        alike = "With all of this changed, both return the same."
        if len(trial.found) == 1:
            alike = "With that changed, both return the same."
        if are_near(left, right, tolerance(right, self._floor)):
            return replace(trial, end=alike, is_all=True)
        of_padding = None if trial.found else padding(self.left, self.right)
        if of_padding is not None:
            return replace(trial, found=(_Found(of_padding, 0, ""),))
        reason = self._of_output(left, right)
        if reason is None:
            return replace(trial, end="More differs: the outputs are not the same even then.")
        return replace(trial, found=(*trial.found, _Found(reason, 0, "")))

    def _of_output(self, left: Tensor, right: Tensor) -> Why | None:
        """Return the form of the difference of both outputs, which nothing before them explains."""
        if left.shape != right.shape or left.dim() != 3 or not self.left.attentions:
            return None
        pair = Comparison(self.left, self.right).pair(0, self.where)
        difference = pair.beside("the output", "batch query embed", left, right, self._floor)
        if difference is None:
            return None
        return form_of(difference) or linear_after(pair, difference)


def _is_same_in(pair: Pair, stage: str) -> bool:
    """Return whether both sides have a stage, with the same numbers."""
    left = pair.left.stage(stage)
    right = pair.right.stage(stage)
    if left is None or right is None or left.shape != right.shape:
        return False
    return pair.difference(stage) is None


def _reason_of(pair: Pair, difference: Difference) -> Why | None:
    if difference.left.is_complex() or difference.right.is_complex():
        return None
    for reason in REASONS:
        found = reason(pair, difference)
        if found is not None:
            return found
    return None


def _facts(trial: _Trial) -> tuple[Why, ...]:
    """Return each fact once, in the order of computation, with the stages that it is true of; last, if that is all."""
    by_fact: dict[tuple[str, str], list[_Found]] = {}
    for each in trial.found:
        fact = each.why.fact or each.stage
        alike = by_fact.setdefault((each.why.kind, fact), [])
        alike.append(each)
    whys = [_of_one_fact(together) for together in by_fact.values()]
    if whys and trial.end:
        last = whys.pop()
        sentence = f"{last.sentence} {trial.end}"
        whys.append(replace(last, sentence=sentence))
    return tuple(whys)


def _of_one_fact(found: Sequence[_Found]) -> Why:
    """Return the first of several reasons that are alike, with the stages and attentions of the others."""
    first = found[0]
    stages = list(dict.fromkeys(each.stage for each in found))
    places = {each.place for each in found}
    sentence = first.why.sentence
    if len(stages) > 1:
        sentence += f" The same is true of {listed(stages[1:])}."
    if len(places) > 1:
        sentence += f" The same is true in {plural(len(places), 'attention')}."
    return replace(first.why, sentence=sentence)

"""One head count, run: once as it is, and looked into, whole or at a few queries; and the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..graph.attention import Attention
from ..measure.stage_difference import stage_noise
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, content_of, own_axes, sizes_in
from ..naming.stages import STAGES
from ..record.arguments import first_tensor
from ..record.cut import POSITIONS, ROWS, Layout, cut, layouts_of
from ..record.rounding import rounding_error
from ..record.subject import Run, Subject
from ..reports.common import Verdict
from ..targets.memory import is_out_of_memory
from .trace import environment_of

T = TypeVar("T")
GIVEN = ("query", "key", "value")


@dataclass(frozen=True)
class Counted:
    """A module that was built with a number of heads, and what it is run on."""

    num_heads: int
    own: Subject
    is_known: bool = False
    """Whether nothing but its attention hangs on the head count, which nobody knows of a module of the user's."""


@dataclass(frozen=True)
class Place:
    """Which part of the arguments is looked at: a few sequences, about `row`, and with `few` few of their positions."""

    row: int = 0
    few: bool = False


class Look:
    """The stages of a run that was recorded with its tensors kept."""

    def __init__(self, own: Subject, like: Look | None = None) -> None:
        """Run it. `like` is a look at the same module in another dtype: its axes are called as there."""
        with torch.no_grad(), own.replaying(own.state()):
            run = own.recorded(keep=True)
            self.run: Run = replace(run, wider=own.wider_run(run) if like is None else like.run.wider)
        self._like = like
        self._contents: dict[tuple[int, str], Tensor | None] = {}

    @cached_property
    def attentions(self) -> tuple[tuple[Attention, AxisNames], ...]:
        """Each attention with the names of its axes."""
        if self._like is not None and _steps(self._like.run) == _steps(self.run):
            return self._like.attentions
        return self.run.attentions

    def get(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in canonical axes; None where it has none, or an axis has no name."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        if (place, stage) not in self._contents:
            self._contents[place, stage] = content_of(self.run, *self.attentions[place], stage)
        return self._contents[place, stage]

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The stages that there are, and that cannot be brought into canonical axes."""
        missing = {
            stage
            for place, (found, _) in enumerate(self.attentions)
            for stage in found.stages
            if self.get(place, stage) is None
        }
        return tuple(stage for stage in STAGES if stage in missing)


def _steps(run: Run) -> list[tuple[str, ...]]:
    """Which operation made which tensor out of which, whatever their sizes."""
    return [(op.name, *(str(t.id) for t in (*op.inputs, *op.outputs))) for op in run.recording.ops]


class HeadRun:
    """One head count: what it returns, and looks inside as they are asked for."""

    def __init__(self, counted: Counted, like: HeadRun | None = None, *, whole: bool = False) -> None:
        """`like` is the baseline, which has found how to cut the arguments; with `whole` they are not cut."""
        self.num_heads, self.own = counted.num_heads, counted.own
        self._looks: dict[Place | None, Look] = {}
        self.layout: Layout | None = None
        if not whole:
            self.layout = self._found_layout() if like is None else like.layout

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.own.module

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.own.label or type(self.module).__name__

    @cached_property
    def output(self) -> Tensor:
        """What its one run returned first, as it lays that out."""
        if self.layout is None or None in self._looks:
            return first_tensor(self.look(None).run.returned).detach()
        with torch.no_grad(), self.own.replaying(self.own.state()):
            return first_tensor(self.own.plain()).detach()

    def place_of(self, place: Place | None) -> Place | None:
        """Return None for a place that is all there is."""
        whole = place is None or self.layout is None or (not place.few and self.layout.rows <= ROWS)
        return None if whole else place

    def at(self, place: Place | None) -> Subject:
        """Return the subject at a place; None is all of it."""
        if place is None or self.layout is None:
            return self.own
        return cut(self.own, self.layout, place.row, few=place.few)

    def look(self, place: Place | None) -> Look:
        """Return the stages at a place, all of them where the arguments are not cut."""
        place = self.place_of(place)
        if place not in self._looks:
            self._looks[place] = Look(self.at(place))
        return self._looks[place]

    @property
    def nearest(self) -> Look:
        """The look that costs least: what it was built of can be seen in any."""
        return self.look(Place(few=True))

    def forget(self) -> None:
        """Let go of what was looked at."""
        self._looks.clear()

    @cached_property
    def by_query(self) -> Tensor | None:
        """The output as `batch query embed`; None where it has other axes."""
        look = self.nearest
        (found, names), pattern = look.attentions[-1], own_axes(look.run).returned[0]
        for stage in ("output", "concat"):
            sizes = sizes_in(found, names, stage) if stage in found.stages else None
            content = None if sizes is None else canonical(self.output, stage, pattern, sizes)
            if content is not None:
                return content
        # Of a model the output has features of its own, laid out as its attention is all the same.
        weights, shape = look.get(len(look.attentions) - 1, "weights"), self.output.shape[:2]
        rows = None if weights is None else (weights.shape[0], weights.shape[2])
        if self.layout is not None and self.layout.batch == 0:
            rows = (self.layout.rows, self.layout.first.shape[1])
        return self.output if shape == rows else None

    def _found_layout(self) -> Layout | None:
        """How the arguments are laid out, as a run of a cut shows; None where that saves little, or cannot be."""
        for layout in layouts_of(self.own):
            self.layout = layout
            try:
                look = self.look(Place(few=True))
            except Exception:  # whatever somebody's forward may raise at sizes that nobody asked for
                continue
            weights = look.get(0, "weights") if look.attentions else None
            rows = min(layout.rows, ROWS), min(layout.first.shape[layout.length], POSITIONS)
            if weights is not None and (weights.shape[0], weights.shape[2]) == rows:
                return layout
            self._looks.clear()
        return None


class Noise:
    """The rounding error of the baseline, measured against the same computation in float64.

    For a baseline in float64 there is nothing finer: a run in float32 is measured against it, and scaled by the ratio
    of the two dtypes' rounding steps.
    """

    def __init__(self, baseline: HeadRun) -> None:
        self._baseline = baseline
        self._swapped = environment_of(baseline.own).dtype == "float64"
        self._dtype = torch.float32 if self._swapped else torch.float64
        self._looks: dict[Place | None, Look] = {}

    @cached_property
    def _other(self) -> Subject:
        """The whole subject in the dtype that is measured against."""
        try:
            return self._baseline.own.copied(self._dtype)
        except (RuntimeError, TypeError) as error:
            raise self._refused(error, "copied, and to measure rounding a copy is run in another dtype") from None

    @property
    def scale(self) -> float:
        """What a measured error counts."""
        return torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if self._swapped else 1.0

    @cached_property
    def of_output(self) -> float:
        """Of the whole output."""
        if self._baseline.layout is None:
            exact = first_tensor(self._look(None).run.returned)
        else:
            with torch.no_grad():
                exact = first_tensor(self._run(self._other.plain))
        return rounding_error(self._baseline.output, exact) * self.scale

    def of_stage(self, place: int, stage: str, where: Place | None, like: Tensor) -> float:
        """Of a stage of an attention, in the form in which it is compared with `like`."""
        mine, exact = self._baseline.look(where).get(place, stage), self._look(where).get(place, stage)
        if mine is None or exact is None:
            return 0.0
        content, finer = (exact, mine) if self._swapped else (mine, exact)
        return stage_noise(stage, content, finer, like) * self.scale

    def _look(self, where: Place | None) -> Look:
        where = self._baseline.place_of(where)
        if where not in self._looks:
            own = self._baseline.at(where)
            other = self._other if where is None else self._other.with_arguments_of(own, self._dtype)
            self._looks[where] = self._run(lambda: Look(other, self._baseline.look(where)))
        return self._looks[where]

    def _run(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except RuntimeError as error:
            reason = "What it makes in its forward has a dtype of its own."
            name = str(self._dtype).removeprefix("torch.")
            raise self._refused(error, f"run in {name}, and rounding is measured by that", reason) from None

    def _refused(self, error: Exception, what: str, why: str = "") -> Exception:
        if is_out_of_memory(error):
            return error
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return InputError(f"{self._baseline.label} cannot be {what}: {first}{f'. {why}' if why else ''}")


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return `differs` where one does, `same` where all are."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"

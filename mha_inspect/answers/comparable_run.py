"""A run of a subject that is compared with others: its stages in canonical axes, and how much each is rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import DeviceError, InputError, MhaInspectError, is_out_of_memory
from ..graph.attention import Attention
from ..measure.content import stage_noise
from ..measure.weights import Weights, weights_of
from ..naming.axes import AxisNames
from ..naming.canonical import content_of, returned_content
from ..naming.pattern import CANONICAL_AXES
from ..naming.visibility import Rows, visibility
from ..record.arguments import dense, first_tensor, tensors_in
from ..record.rounding import beside, rounding_error
from ..reports.common import MeasuredAgainst
from ..running.subject import Run, Subject
from ..text import first_line
from .run_report import drops_at_random, environment_of

T = TypeVar("T")
_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")


class ComparableRun:
    """A subject, run with its tensors kept; and once more in float64 where its rounding is asked for.

    Every run begins with what the module keeps from run to run as it was at first, and leaves no trace.
    """

    def __init__(self, subject: Subject, like: ComparableRun | None = None, finer: Subject | None = None) -> None:
        """Take a subject.

        Args:
            subject: what is run.
            like: a run of the same in another dtype, whose axes have the same names.
            finer: the same with inputs, and weights that are drawn, of a finer dtype: what is run in float64.
        """
        self.subject, self.finer, self._like = subject, finer, like
        self._contents: dict[tuple[int, str], Tensor | None] = {}
        self.measured_against: MeasuredAgainst = "float64"
        """What rounding is measured against: known once it is."""

    @property
    def label(self) -> str:
        """What sentences call it."""
        return self.subject.name

    @property
    def dtype(self) -> str:
        """The dtype of its numbers."""
        return environment_of(self.subject).dtype or "float32"

    @cached_property
    def run(self) -> Run:
        """The run, with every tensor kept. Raises `DeviceError` or `InputError` where there is no number to compare."""
        with torch.no_grad():
            with self.subject.apart() as subject:
                run = subject.recorded(keep=True)
            returned = [dense(tensor) for _, tensor in tensors_in(run.returned)]
            if any(tensor.is_meta for tensor in returned):
                raise DeviceError(
                    "device meta has shapes and no numbers to compare. Take a module and inputs on the CPU."
                )
            if returned and not any(tensor.numel() for tensor in returned):
                raise InputError(
                    f"{self.label} returns {list(returned[0].shape)}, in which there is no number to compare: give it "
                    "inputs without a dimension of zero."
                )
            return run.beside(self.subject.wider_run(run) if self._like is None else self._like.run.wider)

    def forget(self) -> None:
        """Let go of what was run: the weights are others now, or nobody asks any more."""
        self._contents.clear()
        for name in ("run", "output", "_pair", "_named"):
            vars(self).pop(name, None)

    @cached_property
    def _named(self) -> Run:
        """The run that attentions and axes are read off: that of the same in another dtype, where it did the same."""
        alike = self._like is not None and _steps(self._like.run) == _steps(self.run)
        return self._like._named if self._like is not None and alike else self.run

    @property
    def attentions(self) -> tuple[tuple[Attention, AxisNames], ...]:
        """Each attention with the names of its axes."""
        return self._named.attentions

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """Where the weights of each attention are."""
        return weights_of(self.run, self.subject.module)

    def content(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in canonical axes; None where it has none, or an axis has no name."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        if (place, stage) not in self._contents:
            self._contents[place, stage] = content_of(self.run, *self.attentions[place], stage)
        return self._contents[place, stage]

    def masked_queries(self, place: int) -> Rows:
        """Return the queries of an attention to which no key is left in at least one head."""
        known = visibility(self.run.graph, *self.attentions[place]) if place < len(self.attentions) else None
        return () if known is None else known.blind

    @property
    def returned(self) -> Tensor:
        """What the forward returns first, as it lays that out."""
        return first_tensor(self.run.returned).detach()

    @cached_property
    def output(self) -> Tensor:
        """What the forward returns first, in canonical axes where they are known."""
        content = returned_content(self._named, self.returned)
        return self.returned if content is None else content

    @property
    def drops(self) -> bool:
        """Whether it draws random numbers, as a module in training does."""
        return drops_at_random(self.run)

    # -- rounding -----------------------------------------------------------------------------------------------------

    @cached_property
    def _pair(self) -> tuple[ComparableRun, ComparableRun, float]:
        """A run whose rounding is measured, the same in float64, and what an error that is measured so counts.

        Beside float64 there is nothing finer: it is measured in float32. Where elements are drawn, both are copies.
        """
        dtype = getattr(torch, self.dtype)
        is_exact = dtype == torch.float64
        exact = self if is_exact and not self.drops else self._in(torch.float64)
        measured = self._in(torch.float32 if is_exact else dtype) if is_exact or self.drops else self
        # Half a digit is one of its own dtype.
        return measured, exact, 1.0 if self.measured_against == "half a digit" else beside(dtype)[1]

    def _in(self, dtype: torch.dtype) -> ComparableRun:
        """Run a copy in another dtype, in eval mode where it would draw other elements.

        Where there is none, or it does not run, itself with every number off by half a last digit.
        """
        subject = self.finer if self.finer is not None and dtype == torch.float64 else self.subject

        def of_copy(copied: Subject) -> ComparableRun:
            copy = ComparableRun(copied, self)
            if self.drops:
                copied.module.eval()
            _ = copy.run
            return copy

        try:
            copy = measured_in(self.label, subject.copied, dtype, of_copy)
        except InputError:
            if self.drops:
                raise
            self.measured_against = "half a digit"
            copy = ComparableRun(self.subject.shaken(), self)
        if copy.drops:
            raise InputError(
                f"{self.label} draws random numbers in its forward, and others in another dtype: how much is rounded "
                "cannot be measured. Leave them out, or draw them outside of it and give them as an argument."
            )
        return copy

    def floor(self, place: int, stage: str, like: Tensor, rows: Rows) -> float:
        """Measure the rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query whose every key is masked has no result that rounding could be measured against.
        """
        measured, exact, unit = self._pair
        contents = [run.content(place, stage) for run in (measured, exact)]
        ours, theirs = (content if content is None else _without(stage, content, rows) for content in contents)
        return 0.0 if ours is None or theirs is None else stage_noise(stage, ours, theirs, like) * unit

    def output_floor(self, rows: Rows) -> float:
        """Measure the rounding error of the output without these queries, where it is `batch query` and one more."""
        measured, exact, unit = self._pair
        weights = self.content(len(self.attentions) - 1, "weights") if rows else None
        by_query = weights is not None and measured.output.shape[:2] == (weights.shape[0], weights.shape[2])
        ours, theirs = (_without("output", run.output, rows if by_query else ()) for run in (measured, exact))
        return rounding_error(ours, theirs) * unit


def _steps(run: Run) -> list[tuple[str, ...]]:
    """Return which operation made which tensor out of which, whatever their sizes."""
    return [(op.name, *(str(t.id) for t in (*op.inputs, *op.outputs))) for op in run.recording.ops]


def measured_in(
    label: str, copied: Callable[[torch.dtype], Subject], dtype: torch.dtype, measure: Callable[[Subject], T]
) -> T:
    """Return what is measured of a copy in another dtype. Raises `InputError` where it cannot be copied or run."""
    what, why = "copied, and to measure rounding a copy is run in another dtype", ""
    try:
        copy = copied(dtype)
        what = f"run in {str(dtype).removeprefix('torch.')}, and rounding is measured by that"
        why = " What it makes in its forward has a dtype of its own."
        return measure(copy)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError):
            raise
        first, why = first_line(error), why if isinstance(error, RuntimeError) else ""
        dot = "." if why and not first.endswith(".") else ""
        raise InputError(f"{label} cannot be {what}: {first}{dot}{why}") from None


def _without(stage: str, content: Tensor, rows: Rows) -> Tensor:
    """Return the stage, in canonical axes, with zeros for these queries, those of them that it has."""
    if stage in _OF_KEYS or not rows:
        return content
    cleared = content.clone()
    by_query = cleared.transpose(1, 2) if "heads" in CANONICAL_AXES[stage].split() else cleared
    for batch, query in rows:
        if batch < by_query.shape[0] and query < by_query.shape[1]:
            by_query[batch, query] = 0
    return cleared

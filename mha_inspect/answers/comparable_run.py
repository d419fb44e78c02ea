"""Run a subject for comparison: its stages in canonical axes, and the rounding error of each."""

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
from .ranks import require_alone
from .run_report import drops_at_random, environment_of

T = TypeVar("T")
_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")


class ComparableRun:
    """A run of a subject in canonical axes, with its rounding error measured by a second run in float64.

    Every run starts from the module's initial state (buffers, random generators) and restores it.
    """

    def __init__(self, subject: Subject, like: ComparableRun | None = None, finer: Subject | None = None) -> None:
        """Prepare the run of a subject.

        Args:
            subject: the subject to run.
            like: a run of the same subject in another dtype; its names of axes are used.
            finer: the subject with inputs and random weights in a finer dtype, for the run in float64.
        """
        self.subject, self.finer, self._like = subject, finer, like
        self._contents: dict[tuple[int, str], Tensor | None] = {}
        self.measured_against: MeasuredAgainst = "float64"
        """The reference of the rounding error; final once the error was measured."""

    @property
    def label(self) -> str:
        """The subject's name in sentences."""
        return self.subject.name

    @property
    def dtype(self) -> str:
        """The dtype of inputs and parameters; float32 if they have no floating-point numbers."""
        return environment_of(self.subject).dtype or "float32"

    @cached_property
    def run(self) -> Run:
        """The run, with every tensor kept. Raises `DeviceError` or `InputError` if it has no numbers to compare."""
        require_alone(self.subject, "a comparison")
        with torch.no_grad():
            with self.subject.apart() as subject:
                run = subject.recorded(keep=True)
            require_alone(self.subject, "a comparison", run)
            returned = [dense(tensor) for _, tensor in tensors_in(run.returned)]
            if any(tensor.is_meta for tensor in returned):
                raise DeviceError(
                    "device meta has shapes but no numbers to compare. Use a module and inputs on the CPU."
                )
            if returned and not any(tensor.numel() for tensor in returned):
                raise InputError(
                    f"{self.label} returns {list(returned[0].shape)}, which has no numbers to compare. "
                    "Give inputs without a dimension of 0."
                )
            return run.beside(self.subject.wider_run(run) if self._like is None else self._like.run.wider)

    def forget(self) -> None:
        """Drop the run and its tensors, because the weights changed or the run is no longer needed."""
        self._contents.clear()
        for name in ("run", "output", "_pair", "_named"):
            vars(self).pop(name, None)

    @cached_property
    def _named(self) -> Run:
        """The run that names attentions and axes: the run in another dtype if both have the same operations."""
        alike = self._like is not None and _steps(self._like.run) == _steps(self.run)
        return self._like._named if self._like is not None and alike else self.run

    @property
    def attentions(self) -> tuple[tuple[Attention, AxisNames], ...]:
        """Each attention with the names of its axes."""
        return self._named.attentions

    @cached_property
    def weights(self) -> tuple[Weights, ...]:
        """The places of each attention's weights."""
        return weights_of(self.run, self.subject.module)

    def content(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of an attention in canonical axes; None if it is absent, or an axis has no name."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        if (place, stage) not in self._contents:
            self._contents[place, stage] = content_of(self.run, *self.attentions[place], stage)
        return self._contents[place, stage]

    def masked_queries(self, place: int) -> Rows:
        """Return the queries of an attention with every key masked out in at least one head."""
        known = visibility(self.run.graph, *self.attentions[place]) if place < len(self.attentions) else None
        return () if known is None else known.blind

    @property
    def returned(self) -> Tensor:
        """The forward's first tensor, in its own layout."""
        return first_tensor(self.run.returned).detach()

    @cached_property
    def output(self) -> Tensor:
        """The forward's first tensor, in canonical axes if its axes could be named."""
        content = returned_content(self._named, self.returned)
        return self.returned if content is None else content

    @property
    def drops(self) -> bool:
        """Whether the forward drops elements at random, e.g. by dropout in training."""
        return drops_at_random(self.run)

    # -- rounding -----------------------------------------------------------------------------------------------------

    @cached_property
    def _pair(self) -> tuple[ComparableRun, ComparableRun, float]:
        """The measured run, the exact run in float64, and the factor of the measured error.

        float64 itself is measured by a copy in float32. With random elements, both runs are copies.
        """
        dtype = getattr(torch, self.dtype)
        is_exact = dtype == torch.float64
        exact = self if is_exact and not self.drops else self._in(torch.float64)
        measured = self._in(torch.float32 if is_exact else dtype) if is_exact or self.drops else self
        # Half a digit refers to the run's own dtype.
        return measured, exact, 1.0 if self.measured_against == "half a digit" else beside(dtype)[1]

    def _in(self, dtype: torch.dtype) -> ComparableRun:
        """Return the run of a copy in another dtype, in eval mode if the module drops elements.

        If the copy fails, return a run of the subject with every number changed by half its last digit.
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
                f"{self.label} draws random numbers in its forward, different ones in another dtype, so rounding "
                "cannot be measured. Remove them, or draw them outside the forward and pass them as an argument."
            )
        return copy

    def floor(self, place: int, stage: str, like: Tensor, rows: Rows) -> float:
        """Return the rounding error of a stage without these queries, in the form in which it is compared with `like`.

        A query with every key masked out has no defined result, so it has no rounding error.
        """
        measured, exact, unit = self._pair
        contents = [run.content(place, stage) for run in (measured, exact)]
        ours, theirs = (content if content is None else _without(stage, content, rows) for content in contents)
        return 0.0 if ours is None or theirs is None else stage_noise(stage, ours, theirs, like) * unit

    def output_floor(self, rows: Rows) -> float:
        """Return the rounding error of the output; these queries are excluded if the output begins `batch query`."""
        measured, exact, unit = self._pair
        weights = self.content(len(self.attentions) - 1, "weights") if rows else None
        by_query = weights is not None and measured.output.shape[:2] == (weights.shape[0], weights.shape[2])
        ours, theirs = (_without("output", run.output, rows if by_query else ()) for run in (measured, exact))
        return rounding_error(ours, theirs) * unit


def _steps(run: Run) -> list[tuple[str, ...]]:
    """Return the operations with their inputs and outputs, independent of sizes."""
    return [(op.name, *(str(t.id) for t in (*op.inputs, *op.outputs))) for op in run.recording.ops]


def measured_in(
    label: str, copied: Callable[[torch.dtype], Subject], dtype: torch.dtype, measure: Callable[[Subject], T]
) -> T:
    """Return the measurement of a copy in another dtype. Raises `InputError` if it cannot be copied or run."""
    what, why = "copied, and measuring rounding needs a copy in another dtype", ""
    try:
        copy = copied(dtype)
        what = f"run in {str(dtype).removeprefix('torch.')}, and measuring rounding needs that"
        why = " Tensors made in its forward have a fixed dtype."
        return measure(copy)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError):
            raise
        first, why = first_line(error), why if isinstance(error, RuntimeError) else ""
        dot = "." if why and not first.endswith(".") else ""
        raise InputError(f"{label} cannot be {what}: {first}{dot}{why}") from None


def _without(stage: str, content: Tensor, rows: Rows) -> Tensor:
    """Return the stage, in canonical axes, with zeros for these queries."""
    if stage in _OF_KEYS or not rows:
        return content
    cleared = content.clone()
    by_query = cleared.transpose(1, 2) if "heads" in CANONICAL_AXES[stage].split() else cleared
    for batch, query in rows:
        if batch < by_query.shape[0] and query < by_query.shape[1]:
            by_query[batch, query] = 0
    return cleared

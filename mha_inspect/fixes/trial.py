"""Run and judge a subject from a source that may be edited: in memory, with the weights of the one that is wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from ..checks.check import check
from ..checks.intent import Intent
from ..errors import ForwardError
from ..failures.report import forward_error
from ..layers.spec import Show
from ..record.arguments import tensors_in
from ..reports.check import CheckReport, Finding
from ..reports.trace import Failure
from ..running.subject import Subject, run_and_record


class OutOfTimeError(BaseException):
    """The time for a search is over. No error of an edited source: `except Exception` lets it through."""


@dataclass(eq=False)
class Deadline:
    """The end of a search."""

    until: float
    """The moment, as of `time.perf_counter`."""
    last: float = field(default_factory=time.perf_counter)
    longest: float = 0.0
    """The longest step so far, in seconds."""

    def tick(self, _: str = "") -> None:
        """Raise `OutOfTimeError` if another step may end too late; called before each run."""
        now = time.perf_counter()
        self.longest = max(self.longest, now - self.last)
        self.last = now
        if now + self.longest > self.until:
            raise OutOfTimeError


class RejectedError(Exception):
    """An edited source cannot stand in the place of the file."""


@dataclass(frozen=True, eq=False)
class Target:
    """What is fixed: a module of Python, and how to build a subject from it."""

    module: ModuleType
    """The module of the file that may be edited."""
    make: Callable[[int], Subject]
    """Builds the subject anew with this seed, from the module that stands in `sys.modules`."""
    intent: Callable[[], Intent] = Intent
    """The declared behaviour."""
    deadline: Deadline = field(default_factory=lambda: Deadline(math.inf))
    """The end of a search for a patch."""


@dataclass(frozen=True, eq=False)
class Kept:
    """What an edited source has in common with the one that is wrong."""

    weights: Mapping[str, Tensor]
    """Copies of the parameters, by name."""
    inputs: Mapping[str, tuple[torch.Size, torch.dtype]]
    """The sizes and the type of each input, by its path: an edit may not have others guessed."""


@dataclass(frozen=True, eq=False)
class Judged:
    """What is wrong with a subject."""

    report: CheckReport | None
    """The report of `check`; None if the forward raises."""
    failure: Failure | None = None
    """Why the forward raises; None if it returns."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are sure."""
        return () if self.report is None else tuple(finding for finding in self.report.findings if finding.sure)

    @property
    def checks(self) -> set[str]:
        """The names of the checks with a finding, sure or not."""
        return set() if self.report is None else {finding.check for finding in self.report.findings}


def judged(target: Target, seed: int, kept: Kept, only: Sequence[str] = ()) -> Judged:
    """Build and judge the subject with these weights. Raises any error but that of its forward."""
    subject = made(target, seed, kept)
    failure = failure_of(subject)
    if failure is not None:
        return Judged(None, failure)
    return Judged(check(subject, target.intent(), only=only, tick=target.deadline.tick))


def failure_of(subject: Subject) -> Failure | None:
    """Return why the forward of a subject raises in eval mode; None if it returns."""
    with subject.settings(), subject.apart() as fresh, torch.no_grad():
        fresh.module.eval()
        before = fresh.state()
        run = run_and_record(fresh.module, fresh.args, fresh.kwargs)
        if run.error is None:
            return None
        error = forward_error(fresh, run, Show(), before)
    if isinstance(error, ForwardError):
        return error.trace.failure
    raise error


def made(target: Target, seed: int, kept: Kept) -> Subject:
    """Build the subject, with the weights of another one. Raises `RejectedError` if its parameters or inputs differ."""
    target.deadline.tick()
    subject = target.make(seed)
    parameters = dict(subject.module.named_parameters())
    if _shapes(kept.weights) != _shapes(parameters):
        raise RejectedError("its parameters are others")
    if _forms_of_inputs(subject) != kept.inputs:
        raise RejectedError("its inputs are others")
    with torch.no_grad():
        for name, tensor in kept.weights.items():
            parameters[name].copy_(tensor)
    return subject


def _forms_of_inputs(subject: Subject) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the sizes and the type of each input, by its path."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors_in((subject.args, subject.kwargs))}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def kept_of(subject: Subject) -> Kept:
    """Return what edits of the source of a subject keep: its parameters, and the forms of its inputs."""
    weights = {name: tensor.detach().clone() for name, tensor in subject.module.named_parameters()}
    return Kept(weights, _forms_of_inputs(subject))


def outputs_of(subject: Subject, *, training: bool = False) -> list[Tensor]:
    """Return the tensors of the output of one run, in eval or in training mode. Raises any error of the forward."""
    with subject.settings(), subject.apart() as fresh, torch.no_grad():
        fresh.module.train(training)
        returned = fresh.plain()
        return [tensor.detach().clone() for _, tensor in tensors_in(returned)]


_NO_PART = 1e-6
"""Gradients that are smaller than the largest by this factor are rounding."""


def rows_in_use(subject: Subject) -> set[tuple[str, int]]:
    """Return the rows of matrices, by name and number, that have a part in the outputs in eval mode.

    A bias of keys has none with a softmax over keys, so parameters of one dimension are left out.
    """
    with subject.settings(), replace(subject, grad=True).apart() as fresh, torch.enable_grad():
        fresh.module.eval()
        matrices = {name: weight for name, weight in fresh.module.named_parameters() if weight.dim() > 1}
        outputs = [tensor for _, tensor in tensors_in(fresh.plain()) if tensor.requires_grad]
        if not outputs or not matrices:
            return set()
        weighted = [(tensor * torch.randn(tensor.shape, device=tensor.device)).sum() for tensor in outputs]
        total = torch.stack([part.double() for part in weighted]).sum()
        grads = torch.autograd.grad(total, list(matrices.values()), allow_unused=True)
    sizes = {}
    for name, gradient in zip(matrices, grads, strict=True):
        if gradient is not None and gradient.numel():
            sizes[name] = gradient.abs().nan_to_num(1.0, 1.0, 1.0).flatten(1).amax(1)
    least = max((float(size.max()) for size in sizes.values()), default=0.0) * _NO_PART
    rows: set[tuple[str, int]] = set()
    for name, size in sizes.items():
        rows.update((name, row) for row in (size > least).nonzero().flatten().tolist())
    return rows


def stages_of(subject: Subject) -> dict[str, Tensor]:
    """Return the stages of each attention of a run in eval mode: `0 scores`; none if the forward raises."""
    with subject.settings(), subject.apart() as fresh, torch.no_grad():
        fresh.module.eval()
        run = run_and_record(fresh.module, fresh.args, fresh.kwargs, keep=True)
    tensors: dict[str, Tensor] = {}
    for number, (attention, _) in enumerate(run.attentions):
        for name, stage in attention.stages.items():
            if stage.id in run.recording.values:
                tensors[f"{number} {name}"] = run.recording.values[stage.id]
    return tensors


def axes_of_stage(subject: Subject, stage: str) -> list[str]:
    """Return the axes of a stage of each attention that has it, in a run in eval mode."""
    with subject.settings(), subject.apart() as fresh, torch.no_grad():
        fresh.module.eval()
        run = run_and_record(fresh.module, fresh.args, fresh.kwargs)
    return [names.of_stage(stage) for attention, names in run.attentions if stage in attention.stages]


def shapes_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the shapes of tensors."""
    return [tuple(tensor.shape) for tensor in tensors]

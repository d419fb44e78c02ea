"""Compare learning under each head count: the weights after a few steps of the same task, from the same start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compare.comparable_run import ComparableRun, measured_in
from ..errors import InputError, is_out_of_memory
from ..layers.spec import require_steps
from ..measure.run_report import environment_of
from ..measure.weights import PARTS, Weights, as_matrix
from ..record.arguments import copy_module, first_tensor, tensors_in
from ..record.rounding import beside, judge, max_difference, rounding_error
from ..reports.compare_heads import HeadTraining, PartTraining, Training
from ..running.subject import Subject
from ..text import first_line, percent, plural

LOSS = "mean((output - target)²), with a random normal target from the seed"
LEARNING_RATE = 0.1
OPTIMIZER = f"SGD, learning rate {LEARNING_RATE}"
# Not Adam: it divides a gradient by its own size, and so makes full steps of pure rounding.
_TARGET_STREAM = 0x746172676574
"""Offset to the seed for the target, so that it differs from the weights and the input."""
_WORTH_THREADS = 1 << 27
"""Multiplications of a forward above which several threads are faster: about ten milliseconds."""

Parts = dict[str, Tensor]
"""Tensors by part: `W_q` to `b_o` if the module is one attention, otherwise parameters by name."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The weights after some steps."""

    parts: Parts
    loss: float
    """The loss of the first run."""
    last_loss: float
    before: Parts
    """The weights before the first step."""


Outcomes = tuple[Outcome, Outcome]
"""The outcome in the module's dtype, and in the dtype of the rounding measurement."""


@dataclass(frozen=True)
class Learner:
    """A subject of one head count, prepared to compare its learning."""

    num_heads: int
    subject: Subject
    weights: Weights | None = None
    """The places of its matrices and biases; None means that its parts are its parameters."""
    nan: str = ""
    """The reason why every gradient would be NaN; empty if there is none."""
    dtype: str = ""
    """` in float64` for a copy in another dtype; otherwise empty."""

    @classmethod
    def of(cls, num_heads: int, run: ComparableRun) -> Learner:
        """Return the learner of a run."""
        nan = ""
        count = int(run.returned.isnan().sum())
        if count:
            nan = f"{count:,} of {run.returned.numel():,} numbers of the output of {run.label} are NaN"
        return cls(num_heads, run.subject, _weights_by_head(run), nan)

    @property
    def beside(self) -> tuple[torch.dtype, float]:
        """The dtype of the rounding measurement, and the factor of the measured error."""
        return beside(getattr(torch, environment_of(self.subject).dtype or "float32"))

    def twice(self, measure: Callable[[Learner], Outcome]) -> Outcomes:
        """Return the measurement of this learner and of its copy in the dtype of the rounding measurement.

        Raises `InputError` if the copy does not run, or every gradient would be NaN.
        """
        if self.nan:
            raise InputError(f"training would be NaN: {self.nan}. Leave each query an unmasked key, or remove --steps.")
        outcome = measure(self)
        dtype, _ = self.beside
        suffix = f" in {str(dtype).removeprefix('torch.')}"

        def of_copy(copy: Subject) -> Outcome:
            return measure(replace(self, subject=copy, dtype=suffix))

        return outcome, measured_in(self.subject.name, self.subject.copied, dtype, of_copy)

    def parts(self, numbers: Mapping[str, Tensor] | None = None) -> Parts:
        """Return its weights by part; `numbers`, by the parameter's name, replace the parameters."""
        named = dict(self.subject.module.named_parameters()) if numbers is None else numbers
        if self.weights is None:
            return {name: tensor.detach().clone() for name, tensor in named.items()}
        parts = {}
        projections = self.weights.projections
        for part in PARTS:
            if part in projections:
                by_head = projections[part].read(named.__getitem__)
                parts[part] = as_matrix(part, by_head)
        return parts

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run the body, including a backward pass, with the seed's random numbers; then restore the module's state."""
        seed = self.subject.seed or 0
        with self.subject.replaying(self.subject.state()), torch.enable_grad():
            torch.manual_seed(seed % 2**64)
            yield

    def loss(self) -> Tensor:
        """Return mean((output - target)²) of one run, with its graph; each run starts from the initial state.

        Raises `InputError` if it has no gradient.
        """
        fresh = self.subject.fresh()
        output = first_tensor(fresh.module(*fresh.args, **fresh.kwargs))
        if not output.requires_grad:
            raise InputError(
                "There is no gradient: the output depends on no trainable parameter (no_grad, integers or frozen "
                "parameters). Remove --steps."
            )
        seed = (self.subject.seed or 0) + _TARGET_STREAM
        generator = torch.Generator("cpu").manual_seed(seed % 2**64)
        target = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
        errors = output - target.to(device=output.device, dtype=output.dtype)
        return errors.square().mean()

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of one run, and its gradient for every trainable parameter; `.grad` is unchanged.

        Raises `InputError` if autograd cannot differentiate the forward.
        """
        learns = {}
        for name, parameter in self.subject.module.named_parameters():
            if parameter.requires_grad:
                learns[name] = parameter
        loss = self.loss()
        try:
            gradients = torch.autograd.grad(loss, list(learns.values()), allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"There is no gradient of {self.subject.name}: {first_line(error)} Remove --steps, "
                "or remove in-place changes from its forward."
            ) from None
        return float(loss.detach()), dict(zip(learns, gradients, strict=True))


def _weights_by_head(run: ComparableRun) -> Weights | None:
    """Return the weights of a module that is one attention, whose parameters are all its projections, and all learn."""
    if len(run.weights) != 1:
        return None
    (weights,) = run.weights
    if weights.missing:
        return None
    projected: set[str] = set()
    for projection in weights.projections.values():
        projected.update(projection.parameters)
    parameters = dict(run.subject.module.named_parameters())
    if projected != parameters.keys():
        return None
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return None
    return weights


def in_the_same_parts(learners: Sequence[Learner]) -> list[Learner]:
    """Return the learners with their weights by head if that is possible for all, otherwise by parameter."""
    if all(learner.weights is not None for learner in learners):
        return list(learners)
    return [replace(learner, weights=None) for learner in learners]


def _larger_error(learner: Learner, part: str, *pairs: Outcomes) -> float:
    """Return the larger rounding error of two results, each measured against its exact result.

    Two results that differ by rounding alone are at most twice that apart, even if one head count rounds more.
    """
    errors = []
    for result, exact in pairs:
        errors.append(rounding_error(result.parts[part], exact.parts[part]))
    _, unit = learner.beside
    return max(errors) * unit


def compare_training(
    learners: Sequence[Learner],
    steps: int,
    tick: Callable[[str], None] = lambda words: None,
) -> Training:
    """Train a copy of each module from the same weights, and compare the results with those of the first, the baseline.

    `tick` is called with the progress before each step.

    Raises `SpecError` for an impossible number of steps, `InputError` if there is no gradient, or it would be NaN.
    """
    require_steps(steps)
    counts: list[HeadTraining] = []
    base: Outcomes | None = None
    for learner in learners:
        outcomes = learner.twice(lambda learner: train(learner, steps, tick))
        if base is None:
            base = outcomes
        counts.append(_training_row(learner, outcomes, base))
    return Training(
        steps,
        OPTIMIZER,
        f"from the input to a target, by {LOSS}",
        tuple(counts),
        _training_answer(counts, steps),
    )


def train(learner: Learner, steps: int, tick: Callable[[str], None]) -> Outcome:
    """Return the outcome of training a copy; the module is unchanged, and `tick` gets the progress before each step.

    The steps equal those of `torch.optim.SGD`, whose import takes a second (torch.compile).
    """
    module = copy_module(learner.subject.module)
    copied = replace(learner, subject=replace(learner.subject, module=module))
    losses = []
    with copied.undisturbed(), few_threads(copied.subject):
        for step in range(steps):
            tick(f"{plural(learner.num_heads, 'head')}, step {step + 1:,} of {steps:,}{learner.dtype}")
            loss, gradients = copied.gradients()
            losses.append(loss)
            with torch.no_grad():
                for name, gradient in gradients.items():
                    module.get_parameter(name).add_(gradient, alpha=-LEARNING_RATE)
        last = float(copied.loss().detach())
    return Outcome(copied.parts(), losses[0], last, learner.parts())


@contextmanager
def few_threads(subject: Subject) -> Iterator[None]:
    """Run the body in one thread if a step is too small to gain from several threads."""
    before = torch.get_num_threads()
    counts = []
    for _, tensor in tensors_in((subject.args, subject.kwargs)):
        features = tensor.shape[-1] if tensor.dim() else 1
        counts.append(tensor.numel() // features)
    tokens = max(counts, default=1)
    weights = sum(parameter.numel() for parameter in subject.module.parameters())
    if tokens * weights < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _training_row(learner: Learner, outcomes: Outcomes, base: Outcomes) -> HeadTraining:
    """Return a row of the report; without a comparison if the weights did not start the same."""
    trained, _ = outcomes
    baseline, _ = base
    parts = tuple(_part_row(learner, part, outcomes, base) for part in trained.parts)
    row = HeadTraining(
        num_heads=learner.num_heads,
        first_loss=trained.loss,
        last_loss=trained.last_loss,
        moved=_distance(trained.parts, trained.before),
        max_abs_difference=None,
        apart=None,
        noise_floor=None,
        times_noise=None,
        verdict=None,
        parts=parts,
    )
    has_same_parts = trained.before.keys() == baseline.before.keys()
    if not has_same_parts or any(part.verdict is None for part in parts):
        return row
    # Each part by itself: the rounding of one part may exceed the changes of all others.
    furthest = max(parts, key=lambda part: part.times_noise or 0.0)
    movement = _distance(baseline.parts, baseline.before)
    apart = 0.0
    if movement:
        apart = _distance(trained.parts, baseline.parts) / movement
    return replace(
        row,
        max_abs_difference=max(part.max_abs_difference or 0.0 for part in parts),
        apart=apart,
        noise_floor=furthest.noise_floor,
        times_noise=furthest.times_noise,
        verdict=furthest.verdict,
    )


def _part_row(learner: Learner, part: str, outcomes: Outcomes, base: Outcomes) -> PartTraining:
    """Return how far a part is from the baseline's after training; without a comparison if they did not start alike."""
    trained, _ = outcomes
    baseline, _ = base
    after = trained.parts[part]
    before = trained.before[part]
    moved = _norm(after, before)
    start = baseline.before.get(part)
    if start is None or not torch.equal(before, start):
        return PartTraining(None, None, None, None, None, part=part, moved=moved)
    end = baseline.parts[part]
    floor = _larger_error(learner, part, outcomes, base)
    difference = max_difference(after, end)
    times_noise, verdict = judge(difference, floor)
    _, verdict_on_baseline = judge(max_difference(end, start), floor)
    change = _norm(end, start)
    relative = 0.0
    if verdict == "differs" and verdict_on_baseline == "same":
        relative = math.inf  # relative to rounding it would have no meaning
    elif change:
        relative = _norm(after, end) / change
    return PartTraining(difference, relative, floor, times_noise, verdict, part=part, moved=moved)


def _norm(after: Tensor, before: Tensor) -> float:
    """Return ‖after - before‖."""
    return float((after.double() - before.double()).norm())


def _distance(left: Parts, right: Parts) -> float:
    """Return the norm of the difference of all parts together."""
    total = 0.0
    for part in left:
        difference = left[part].double() - right[part].double()
        total += float(difference.square().sum())
    return math.sqrt(total)


def _training_answer(counts: Sequence[HeadTraining], steps: int) -> str:
    """Return whether the head counts have different weights after the same steps; the first count is the baseline."""
    base, *compared = counts
    if any(count.verdict is None for count in compared):
        return "The head count changes the parameters, so weights cannot start the same: only losses can be compared."
    differing = [count for count in compared if count.verdict == "differs"]
    if differing:
        furthest = max(differing, key=lambda count: count.apart or 0.0)
        heads = plural(furthest.num_heads, "head")
        base_heads = plural(base.num_heads, "head")
        start = "The first step" if steps == 1 else "Training"
        return (
            f"{start} gives different weights: the distance between {heads} and {base_heads} is "
            f"{percent(furthest.apart or 0.0)} of the change with {base_heads}."
        )
    if any(count.verdict == "inconclusive" for count in compared):
        return "Undecided: after the same steps, the weights differ by little more than rounding."
    return "After the same steps from the same start, the weights are the same for every head count."

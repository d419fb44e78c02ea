"""What is learned: a few steps of the same optimiser on the same task, and how far the weights have moved apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SpecError
from ..forward import Forward
from ..noise import judge
from ..reports.compare_heads import HeadTraining, Training
from ..stage_contents import in_dtype
from .gradients import LOSS, larger_floor, loss_of, noise_scale, require_finite
from .sentences import heads
from .weights import matrices

LEARNING_RATE = 0.1
OPTIMIZER = f"SGD, learning rate {LEARNING_RATE}"
# Not Adam: it divides a gradient by its own size, and so makes whole steps of those that are 0 but for rounding.


@dataclass(frozen=True, eq=False)
class Trained:
    """The weights before and after, as matrices, and the loss at either end."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    first_loss: float
    last_loss: float


def compare_training(forwards: Sequence[Forward], steps: int, cause: str = "") -> Training:
    """Train a copy of each layer and compare the weights with those of the first.

    Args:
        forwards: one a head count, the baseline first, with the same weights.
        steps: of the optimiser.
        cause: why all outputs must be equal, in a few words; empty where nothing says that they must.

    Raises:
        SpecError: there are no steps.
        InputError: a query has no key left: its output, and so every gradient, is NaN.
    """
    if steps < 1:
        raise SpecError(f"steps {steps} trains nothing: it must be 1 or more. Try 10.")
    require_finite(forwards[0], "training")
    other = torch.float32 if forwards[0].spec.dtype == "float64" else torch.float64
    scale = noise_scale(forwards[0])
    baseline, exact = train(forwards[0], steps), train(in_dtype(forwards[0], other), steps)
    counts = [_count(forwards[0], baseline, baseline, (exact, exact), scale)]
    for forward in forwards[1:]:
        finer = train(in_dtype(forward, other), steps)
        counts.append(_count(forward, train(forward, steps), baseline, (exact, finer), scale))
    return Training(steps, OPTIMIZER, f"from the input to a target, by {LOSS}", tuple(counts), _answer(counts, cause))


def train(forward: Forward, steps: int) -> Trained:
    """Train a copy; the module stays as it is."""
    module = copy.deepcopy(forward.module)
    learner = replace(forward, module=module)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    losses = []
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(learner)
            # torch does not annotate it.
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        last = float(loss_of(learner).detach())
    return Trained(matrices(forward.module), matrices(module), losses[0], last)


def _count(
    forward: Forward, mine: Trained, baseline: Trained, exact: tuple[Trained, Trained], scale: float
) -> HeadTraining:
    row = HeadTraining(
        num_heads=forward.spec.num_heads,
        first_loss=mine.first_loss,
        last_loss=mine.last_loss,
        moved=_distance(mine.after, mine.before),
        max_abs_difference=None,
        apart=None,
        noise_floor=None,
        times_noise=None,
        verdict=None,
    )
    if any(not torch.equal(mine.before[part], start) for part, start in _shaped(baseline.before, mine.before)):
        return row
    ends = [(part, baseline.after[part], mine.after[part]) for part in mine.after]
    largest = max(float((one.double() - other.double()).abs().max()) for _, one, other in ends)
    # Of each part by itself: the weights of one part may be rounded more than those of all others are moved.
    judged = [
        (
            float((one.double() - other.double()).abs().max()),
            larger_floor((one, exact[0].after[part]), (other, exact[1].after[part])) * scale,
        )
        for part, one, other in ends
    ]
    difference, floor = max(judged, key=lambda pair: judge(*pair)[0])
    times, verdict = judge(difference, floor)
    movement = _distance(baseline.after, baseline.before)
    apart = _distance(mine.after, baseline.after) / movement if movement else 0.0
    return replace(row, max_abs_difference=largest, apart=apart, noise_floor=floor, times_noise=times, verdict=verdict)


def _shaped(theirs: dict[str, Tensor], mine: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """By part, the baseline's numbers; of another shape they equal nothing."""
    return [(part, theirs[part]) for part in mine]


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """‖left - right‖ over all parts."""
    return math.sqrt(sum(float((left[part].double() - right[part].double()).square().sum()) for part in left))


def _answer(counts: Sequence[HeadTraining], cause: str) -> str:
    base, others = counts[0], counts[1:]
    steps = "After the same steps from the same start"
    if any(count.verdict is None for count in others):
        return (
            "The weights cannot start the same, for the head count changes the parameters: "
            "losses can be compared, and weights cannot."
        )
    differing = [count for count in others if count.verdict == "differs"]
    if differing:
        furthest = max(differing, key=lambda count: count.apart or 0.0)
        ours, theirs = heads(furthest.num_heads), heads(base.num_heads)
        return (
            f"{steps} the weights have moved apart: those of {ours} end {100 * (furthest.apart or 0.0):.3g} % as far "
            f"from those of {theirs} as those of {theirs} have moved."
        )
    if any(count.verdict == "inconclusive" for count in others):
        return f"{steps} the weights are too close to tell apart from rounding."
    return f"{steps} the weights are the same for every head count{f', because {cause}' if cause else ''}."

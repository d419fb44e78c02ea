"""What is learned: a few steps of the same optimiser on the same task, and how far the weights have moved apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import SpecError
from ...record.copying import copy_module
from ...record.rounding import judge
from ...reports.compare_heads import HeadTraining, Training
from ...text import plural
from .gradients import LOSS, larger_floor
from .learner import Learner

LEARNING_RATE = 0.1
OPTIMIZER = f"SGD, learning rate {LEARNING_RATE}"
# Not Adam: it divides a gradient by its own size, and so makes whole steps of those that are 0 but for rounding.


@dataclass(frozen=True, eq=False)
class Trained:
    """The weights before and after, by part, and the loss at either end."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    first_loss: float
    last_loss: float


def compare_training(learners: Sequence[Learner], steps: int, cause: str = "") -> Training:
    """Train a copy of each module and compare the weights with those of the first.

    Args:
        learners: one a head count, the baseline first, with the same weights.
        steps: of the optimiser.
        cause: why all outputs must be equal, in a few words; empty where nothing says that they must.

    Raises:
        SpecError: there are no steps.
        InputError: a query has no key left: its output, and so every gradient, is NaN; or there is no gradient.
    """
    if steps < 1:
        raise SpecError(f"steps {steps} trains nothing: it must be 1 or more. Try 10.")
    first, *others = learners
    first.require_finite("training")
    scale = first.noise_scale
    baseline, exact = train(first, steps), train(first.exact, steps)
    counts = [_count(first.num_heads, baseline, baseline, (exact, exact), scale)]
    for other in others:
        finer = train(other.exact, steps)
        counts.append(_count(other.num_heads, train(other, steps), baseline, (exact, finer), scale))
    return Training(steps, OPTIMIZER, f"from the input to a target, by {LOSS}", tuple(counts), _answer(counts, cause))


def train(learner: Learner, steps: int) -> Trained:
    """Train a copy; the module stays as it is."""
    module = copy_module(learner.own.module)
    copied = replace(learner, own=replace(learner.own, module=module))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    losses = []
    with copied.undisturbed():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = copied.loss()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            optimizer.step()
            losses.append(float(loss.detach()))
        last = float(copied.loss().detach())
    return Trained(learner.parts(), copied.parts(), losses[0], last)


def _count(
    num_heads: int, mine: Trained, baseline: Trained, exact: tuple[Trained, Trained], scale: float
) -> HeadTraining:
    row = HeadTraining(
        num_heads=num_heads,
        first_loss=mine.first_loss,
        last_loss=mine.last_loss,
        moved=_distance(mine.after, mine.before),
        max_abs_difference=None,
        apart=None,
        noise_floor=None,
        times_noise=None,
        verdict=None,
    )
    if mine.before.keys() != baseline.before.keys() or any(
        not torch.equal(start, baseline.before[part]) for part, start in mine.before.items()
    ):
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
        ours, theirs = plural(furthest.num_heads, "head"), plural(base.num_heads, "head")
        return (
            f"{steps} the weights have moved apart: those of {ours} end {100 * (furthest.apart or 0.0):.3g} % as far "
            f"from those of {theirs} as those of {theirs} have moved."
        )
    if any(count.verdict == "inconclusive" for count in others):
        return f"{steps} the weights are too close to tell apart from rounding."
    return f"{steps} the weights are the same for every head count{f', because {cause}' if cause else ''}."

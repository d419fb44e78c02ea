"""What would be learned: the gradient of every parameter for each head count, with the same weights, input and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...measure.stage_difference import distances
from ...record.rounding import judge, rounding_error
from ...reports.compare_heads import Gradients, HeadGradients, PartGradient
from ...text import percent, plural
from .learner import Learner
from .rows import overall

LOSS = "mean((output - target)²), the target drawn from a normal distribution by the seed"


@dataclass(frozen=True, eq=False)
class Gradient:
    """The loss of one run, and its gradient by part."""

    loss: float
    parts: dict[str, Tensor]


def compare_gradients(learners: Sequence[Learner], cause: str = "") -> Gradients:
    """The gradients of modules that hold the same weights, against those of the first.

    Args:
        learners: one a head count, the baseline first.
        cause: why all outputs must be equal, in a few words; empty where nothing says that they must.

    Raises:
        InputError: a query has no key left: its output, and so every gradient, is NaN; or there is no gradient.
    """
    learners[0].require_finite("gradients")
    exact = [gradient_of(learner.exact) for learner in learners]
    mine = [gradient_of(learner) for learner in learners]
    scale = learners[0].noise_scale
    counts = tuple(
        _count(learner.num_heads, gradient, mine[0], (exact[0], finer), scale)
        for learner, gradient, finer in zip(learners, mine, exact, strict=True)
    )
    return Gradients(LOSS, counts, _answer(counts, cause))


def gradient_of(learner: Learner) -> Gradient:
    """The gradient of the loss for every parameter that learns; the parameters' own `.grad` stays as it is."""
    named = {name: parameter for name, parameter in learner.own.module.named_parameters() if parameter.requires_grad}
    with learner.undisturbed():
        loss = learner.loss()
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    by_name = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }
    return Gradient(float(loss.detach()), learner.parts(by_name))


def _count(
    num_heads: int, mine: Gradient, baseline: Gradient, exact: tuple[Gradient, Gradient], scale: float
) -> HeadGradients:
    parts = []
    for part, gradient in mine.parts.items():
        base, norm = baseline.parts.get(part), float(gradient.double().norm())
        if base is None or base.shape != gradient.shape:
            parts.append(PartGradient(part, norm, None, None, None, None, None))
            continue
        largest, relative = distances(base, gradient)
        floor = larger_floor((base, exact[0].parts[part]), (gradient, exact[1].parts[part])) * scale
        times, verdict = judge(largest, floor)
        parts.append(PartGradient(part, norm, largest, relative, floor, times, verdict))
    return HeadGradients(num_heads, mine.loss, tuple(parts), overall([part.verdict for part in parts]))


def larger_floor(*measured: tuple[Tensor, Tensor]) -> float:
    """The largest rounding error of several results, each beside its exact one.

    Two results that are the same but for rounding are at most twice that apart: a gradient that is 0 but for rounding
    is no difference, however much more one head count rounds than another.
    """
    return max(rounding_error(content, exact) for content, exact in measured)


def _answer(counts: Sequence[HeadGradients], cause: str) -> str:
    base, others = counts[0], counts[1:]
    differing = [count for count in others if count.verdict == "differs"]
    changed = any(part.verdict is None for count in others for part in count.parts)
    if not differing:
        because = f", because {cause}" if cause else ""
        if any(count.verdict == "inconclusive" for count in others):
            return "The gradients are too close to tell apart from rounding."
        return f"The gradient of every parameter is the same for every head count{because}: the same would be learned."
    furthest = {part.part: part.relative_difference or 0.0 for part in differing[-1].parts if part.verdict == "differs"}
    most = max(furthest, key=lambda part: furthest[part])
    text = (
        "A first step of learning would change the weights differently: with "
        f"{plural(differing[-1].num_heads, 'head')} the gradient of {most} is "
        f"{percent(furthest[most])} away from that with {plural(base.num_heads, 'head')}."
    )
    return f"{text} Parts whose shape the head count changes cannot be compared." if changed else text

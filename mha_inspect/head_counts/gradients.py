"""What would be learned: the gradient of every parameter for each head count, with the same weights, input and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..forward import Forward
from ..noise import first_tensor, judge, rounding_error
from ..reports.common import Verdict
from ..reports.compare_heads import Gradients, HeadGradients, PartGradient
from ..stage_contents import in_dtype
from ..stage_difference import distances
from .sentences import heads
from .weights import matrices

LOSS = "mean((output - target)²), the target drawn from a normal distribution by the seed"
_TARGET_STREAM = 0x746172676574
"""Added to the seed of the target, so that it is neither the weights nor the input."""


@dataclass(frozen=True, eq=False)
class Gradient:
    """The loss of one run, and its gradient by matrix and bias."""

    loss: float
    parts: dict[str, Tensor]


def compare_gradients(forwards: Sequence[Forward], cause: str = "") -> Gradients:
    """The gradients of layers that hold the same weights, against those of the first.

    Args:
        forwards: one a head count, the baseline first.
        cause: why all outputs must be equal, in a few words; empty where nothing says that they must.

    Raises:
        InputError: a query has no key left: its output, and so every gradient, is NaN.
    """
    require_finite(forwards[0], "gradients")
    exact = [gradient_of(_other(forward)) for forward in forwards]
    mine = [gradient_of(forward) for forward in forwards]
    scale = noise_scale(forwards[0])
    counts = tuple(
        _count(forward, gradient, mine[0], (exact[0], finer), scale)
        for forward, gradient, finer in zip(forwards, mine, exact, strict=True)
    )
    return Gradients(LOSS, counts, _answer(counts, cause))


def require_finite(forward: Forward, what: str) -> None:
    """Raise `InputError` where a query has no key to look at."""
    masked = forward.inputs.fully_masked_rows(forward.spec.num_heads)
    if masked:
        raise InputError(
            f"{what} would be NaN: query {masked[0][1]} of batch row {masked[0][0]} has no key left to look at. "
            "Leave each query a key, or leave this out."
        )


def _other(forward: Forward) -> Forward:
    """The same in float64; for float64, in float32, whose rounding is scaled by `noise_scale`."""
    return in_dtype(forward, torch.float32 if forward.spec.dtype == "float64" else torch.float64)


def noise_scale(forward: Forward) -> float:
    """What a rounding error that was measured has to be multiplied by."""
    steps = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return steps if forward.spec.dtype == "float64" else 1.0


def loss_of(forward: Forward) -> Tensor:
    """The loss of one run, with its graph."""
    with torch.enable_grad():
        output = first_tensor(forward.module(*forward.args, **forward.kwargs))
        generator = torch.Generator("cpu").manual_seed((forward.spec.seed + _TARGET_STREAM) % 2**64)
        target = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu")
        return (output - target.to(device=output.device, dtype=output.dtype)).square().mean()


def gradient_of(forward: Forward) -> Gradient:
    """The gradient of the loss for every parameter; the parameters' own `.grad` stays as it is."""
    loss = loss_of(forward)
    named = dict(forward.module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    by_name = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }
    return Gradient(float(loss.detach()), matrices(forward.module, by_name))


def _count(
    forward: Forward, mine: Gradient, baseline: Gradient, exact: tuple[Gradient, Gradient], scale: float
) -> HeadGradients:
    parts = []
    for part, gradient in mine.parts.items():
        base, norm = baseline.parts[part], float(gradient.double().norm())
        if base.shape != gradient.shape:
            parts.append(PartGradient(part, norm, None, None, None, None, None))
            continue
        largest, relative = distances(base, gradient)
        floor = larger_floor((base, exact[0].parts[part]), (gradient, exact[1].parts[part])) * scale
        times, verdict = judge(largest, floor)
        parts.append(PartGradient(part, norm, largest, relative, floor, times, verdict))
    return HeadGradients(forward.spec.num_heads, mine.loss, tuple(parts), overall([part.verdict for part in parts]))


def larger_floor(*measured: tuple[Tensor, Tensor]) -> float:
    """The largest rounding error of several results, each beside its exact one.

    Two results that are the same but for rounding are at most twice that apart: a gradient that is 0 but for rounding
    is no difference, however much more one head count rounds than another.
    """
    return max(rounding_error(content, exact) for content, exact in measured)


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """`differs` where one does, `same` where all are."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"


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
        f"A first step of learning would change the weights differently: with {heads(differing[-1].num_heads)} the "
        f"gradient of {most} is {100 * furthest[most]:.3g} % away from that with {heads(base.num_heads)}."
    )
    return f"{text} Parts whose shape the head count changes cannot be compared." if changed else text

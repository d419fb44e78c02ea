"""Read the ladders that positions enter by: the slopes of ALiBi by head, and the frequencies of a rotation by pair.

Both are measured: slopes from what is added to the scores, frequencies from the angle between neighbours. A ladder that
is its formula's moved by one step is most likely counted from the wrong number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..measure.slopes import NEAR, rises_with_distance, slopes_in
from ..naming.axes import AxisNames
from ..naming.canonical import content_of
from ..naming.visibility import sees_by_head
from ..reports.check import Fact, Finding
from ..text import small
from .each_kind import of_each_kind
from .evidence import Evidence

_FEWEST_PAIRS = 3
"""The smallest number of pairs whose ratios show a ladder."""
_SHOWN = 8
"""The largest number of steps to list."""


def slopes_of(evidence: Evidence, attention: Attention, names: AxisNames) -> list[float]:
    """Return the slope of each head, by which scores change from key to key; empty if the bias is not linear."""
    biased = _biased(evidence, attention, names)
    if biased is None or not biased.first.slopes():
        return []  # most biases have no slope in the first head already
    return biased.slopes()


@dataclass(frozen=True, eq=False)
class _Biased:
    """Scores before and after a bias, and which keys are seen, each `batch heads query key`."""

    scores: Tensor
    masked: Tensor
    weights: Tensor

    @cached_property
    def seen(self) -> Tensor:
        """Which keys are seen."""
        return sees_by_head(self.weights, self.masked)

    @property
    def first(self) -> _Biased:
        """The first head alone."""
        return _Biased(self.scores[:, :1], self.masked[:, :1], self.weights[:, :1])

    def slopes(self) -> list[float]:
        """Return the slope of each head; empty if the bias is not linear."""
        return slopes_in(self.scores, self.masked, self.seen)


def _biased(evidence: Evidence, attention: Attention, names: AxisNames) -> _Biased | None:
    """Return the scores of an attention with a bias; None if they are unknown."""
    if not {"scores", "masked_scores", "weights"} <= attention.stages.keys():
        return None
    scores = content_of(evidence.run, attention, names, "scores")
    masked = content_of(evidence.run, attention, names, "masked_scores")
    weights = content_of(evidence.run, attention, names, "weights")
    if scores is None or masked is None or weights is None:
        return None
    if not scores.shape == masked.shape == weights.shape:
        return None
    return _Biased(scores, masked, weights)


def ladder_facts(evidence: Evidence) -> Iterator[Fact]:
    """Yield the slopes by head and the frequencies of each kind of attention, each once."""
    facts: list[Fact] = []
    for attention, names, _ in evidence.kinds:
        slopes = slopes_of(evidence, attention, names)
        if slopes:
            facts.append(Fact("slopes by head", _listed(slopes)))
        frequencies = evidence.inner_of(attention, names).frequencies
        if frequencies:
            ladder = f"{_listed(frequencies)} a position{_base(frequencies)}"
            facts.append(Fact("rotary by pair", ladder))
    yield from dict.fromkeys(facts)


def _listed(numbers: Sequence[float]) -> str:
    """Return the numbers, those before the last left out if they are many: `1, 0.5, …, 0.001`."""
    words = [small(number) for number in numbers]
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN - 2], "…", words[-1]]
    return ", ".join(words)


def _base(frequencies: Sequence[float]) -> str:
    """Return the base of a ladder `base^(-2i/d)` in words; empty if it is another one."""
    ratio = _ratio(frequencies)
    if ratio is None or abs(frequencies[0] - 1) > NEAR:
        return ""
    count = len(frequencies)
    base = frequencies[-1] ** (-count / (count - 1))
    rounded = float(f"{base:.3g}")
    return f": base {rounded:,.0f}"


@partial(of_each_kind, "")
def slopes_off(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a suspicion if the slopes are those of ALiBi, 2^(-8h/H) for h = 1..H, with every h one too low or high."""
    slopes = slopes_of(evidence, attention, names)
    count = len(slopes)
    if count < 2:
        return
    right = small(2.0 ** (-8 / count))
    for first in (0, 2):
        expected = [2.0 ** (-8 * (first + place) / count) for place in range(count)]
        if not _are_near(slopes, expected):
            continue
        yield Finding(
            "masking",
            f"The slopes of ALiBi are one step off: the first head has {small(slopes[0])}, "
            f"expected 2^(-8/{count}) = {right}.",
            f"The {count} slopes are 2^(-8h/{count}) for h = {first} to {first + count - 1}.",
            sure=False,
            source=_line_of_mask(attention),
            fix="Count heads from 1: 2 ** (-8 * torch.arange(1, heads + 1) / heads).",
        )


def _line_of_mask(attention: Attention) -> str:
    """Return the line of the first mask; empty without a mask."""
    return attention.masks[0].source if attention.masks else ""


@partial(of_each_kind, "")
def slopes_upside_down(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a suspicion if a bias that is linear in the distance favours the keys that are far from their query."""
    slopes = slopes_of(evidence, attention, names)
    biased = _biased(evidence, attention, names) if slopes else None
    if biased is None:
        return
    if not rises_with_distance(biased.scores, biased.masked, biased.seen):
        return
    yield Finding(
        "masking",
        "The bias raises the scores of keys that are far from their query; ALiBi lowers them.",
        f"Each position of distance adds {small(slopes[0])} to the score in head 0.",
        sure=False,
        source=_line_of_mask(attention),
        fix="Change the sign of the bias: slopes * (key - query) for keys before their query.",
    )


def frequencies_off(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a suspicion if the frequencies of a rotation are base^(-2i/d) with every i one too high."""
    frequencies = evidence.inner_of(attention, names).frequencies
    ratio = _ratio(frequencies)
    if ratio is None or ratio > 1 - 3 * NEAR:
        return
    if abs(frequencies[0] / ratio - 1) > NEAR / 2:
        return  # the first pair is not turned by the ratio itself
    pairs = len(frequencies)
    yield Finding(
        "rotary",
        f"The frequencies of the rotation are one step off: the first pair turns by {small(frequencies[0])} a "
        "position, expected 1.",
        f"The {pairs} frequencies are base^(-2i/{2 * pairs}) for i = 1 to {pairs}.",
        sure=False,
        source=attention.score_product.op.source,
        fix="Count pairs from 0: base ** (-torch.arange(0, dims, 2) / dims).",
    )


def _ratio(frequencies: Sequence[float]) -> float | None:
    """Return the ratio between neighbours, if it is the same for all; else None."""
    if len(frequencies) < _FEWEST_PAIRS or min(frequencies) <= 0:
        return None
    first, second = frequencies[:2]
    if second >= first:
        return None
    ratio = second / first
    expected = [first * ratio**place for place in range(len(frequencies))]
    # The rounding of the ratio grows with the number of steps.
    return ratio if _are_near(frequencies, expected, NEAR * 2) else None


def _are_near(numbers: Sequence[float], expected: Sequence[float], near: float = NEAR) -> bool:
    """Return whether numbers agree one by one, within a part of each."""
    left = Tensor(list(numbers)).double()
    right = Tensor(list(expected)).double()
    if left.shape != right.shape:
        return False
    return bool(torch.isclose(left, right, rtol=near, atol=0).all())

"""Put several attentions of one side beside one attention of the other, whose heads they are.

ByHead    attention 1  attention 2  attention 3  attention 4      a head each
Whole     attention 1: head 0, 1, 2, 3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..measure.content import compare_stage
from ..naming.pattern import CANONICAL_AXES, STAGES
from .comparable_run import ComparableRun, ComparedStage, Comparison

_INPUTS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class HeadsApart:
    """Two runs, one of which computes the heads of each attention as attentions of their own."""

    left: ComparableRun
    right: ComparableRun
    apart: ComparableRun
    """The side with more attentions."""
    together: ComparableRun
    count: int
    """How many attentions of one side are one of the other."""

    @property
    def sentence(self) -> str:
        """Return how the attentions are compared, as the end of a sentence."""
        attentions = f"attentions 1–{self.count} of {self.apart.label}"
        of_other = f"the attention of {self.together.label}"
        if len(self.together.attentions) > 1:
            of_other = f"the first attention of {self.together.label}, and so on"
        return f"{attentions} are compared as the heads of {of_other}."

    def rows(self) -> Iterator[ComparedStage]:
        """Yield the stages of each attention beside those of its heads, in order."""
        for place in range(len(self.together.attentions)):
            for stage in STAGES:
                if self.together.has_stage(place, stage) or self.apart.has_stage(place * self.count, stage):
                    yield self._compared(place, stage)

    def group(self, place: int) -> range:
        """Return the places of the attentions that are the heads of one."""
        return range(place * self.count, (place + 1) * self.count)

    def _compared(self, place: int, stage: str) -> ComparedStage:
        joined = self._joined(place, stage)
        whole = self.together.content(place, stage)
        is_left = self.apart is self.left
        left, right = (joined, whole) if is_left else (whole, joined)
        difference = None
        if left is not None and right is not None:
            difference = compare_stage(stage, left, right, lambda: self._floor(place, stage))
        return ComparedStage(
            place=place,
            name=stage,
            left=left,
            right=right,
            difference=difference,
            left_places=self.group(place) if is_left else range(place, place + 1),
            right_places=range(place, place + 1) if is_left else self.group(place),
        )

    def _joined(self, place: int, stage: str) -> Tensor | None:
        """Return a stage of all heads that are apart; None if one lacks it, or it has no part for each head."""
        contents: list[Tensor] = []
        for head in self.group(place):
            content = self.apart.content(head, stage)
            if content is None:
                return None
            contents.append(content)
        if stage in _INPUTS:
            return contents[0] if all(torch.equal(contents[0], content) for content in contents) else None
        axes = CANONICAL_AXES[stage].split()
        if "heads" in axes or "kv_heads" in axes:
            return torch.cat(contents, 1)
        # Each head has its own part of the output, and their sum is the output.
        return None if stage == "output" else torch.cat(contents, -1)

    def _floor(self, place: int, stage: str) -> float:
        """Return the largest rounding error of a stage, on both sides."""
        rows = Comparison(self.left, self.right).masked[place]
        floors: list[float] = []
        for run, places in ((self.together, range(place, place + 1)), (self.apart, self.group(place))):
            for each in places:
                content = run.content(each, stage)
                if content is not None:
                    floors.append(run.floor(each, stage, content, rows))
        return max(floors)


def heads_apart(left: ComparableRun, right: ComparableRun) -> HeadsApart | None:
    """Return both sides where the attentions of one are the heads of the other's; None where they are not."""
    for apart, together in ((left, right), (right, left)):
        attentions = len(together.attentions)
        count = len(apart.attentions) // attentions if attentions else 0
        if count < 2 or count * attentions != len(apart.attentions):
            continue
        found = HeadsApart(left, right, apart, together, count)
        for place, (_, names) in enumerate(together.attentions):
            heads = sum(apart.attentions[each][1].num_heads for each in found.group(place))
            if heads != names.num_heads:
                return None
        return found
    return None

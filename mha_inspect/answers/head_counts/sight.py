"""What each query can see: the facts from which follows where the head count cannot matter.

Of a layer that was built from flags its inputs tell it, of any other module its runs: what the mask left of the scores,
and the keys and values as they meet.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...measure.stage_difference import BLOCKED_BELOW
from ...record.rounding import SAME_UP_TO, judge
from ...targets.flag_inputs import Inputs
from ...targets.spec import AttentionSpec
from ..sides.module_run import ModuleRun


class Sight(ABC):
    """What each query can see, whatever the weights are."""

    allowed: Tensor
    """True where no mask forbids a query to look: `batch query key`, 1 wide where batch or query does not matter."""
    rows: tuple[int, int]
    """How many sequences and queries there are."""
    extra_keys: int = 0
    """Keys that a layer appends itself, which no mask covers."""
    masked: bool
    """Whether there is a mask."""

    @property
    def left(self) -> Tensor:
        """`batch query`: how many keys are left to look at."""
        return (self.allowed.sum(dim=-1) + self.extra_keys).expand(self.rows)

    @property
    def one_key(self) -> Tensor:
        """`batch query`: whether it is one alone."""
        return self.left == 1

    @property
    def causal(self) -> bool:
        """Whether a mask forbids every key behind the query's own position."""
        return self.masked and self.allowed.shape[1] > 1 and not bool(self.allowed.triu(1).any())

    @abstractmethod
    def alike_values(self) -> Tensor:
        """`batch query`: whether all values that it can see are the same."""

    @abstractmethod
    def alike_keys(self) -> Tensor:
        """`batch query`: whether all keys that it can see are the same, and so all of its scores."""

    def _alike(self, content: Tensor, floor: Callable[[], float]) -> Tensor:
        """Whether all rows of `batch key width` that any query of a sequence can see are the same, but for rounding."""
        content, shape = content.detach().cpu(), (content.shape[0], content.shape[1])
        seen = self.allowed.any(dim=1).expand(shape)
        first = content[torch.arange(shape[0]), seen.int().argmax(dim=1)][:, None]
        # A quick look at one feature spares a pass over all of them.
        if not bool((((content[..., 0] - first[..., 0]).abs() <= SAME_UP_TO * floor()) | ~seen).all(dim=1).any()):
            return torch.zeros(self.rows, dtype=torch.bool)
        near = (content - first).abs() <= SAME_UP_TO * floor()
        return (near.all(dim=-1) | ~seen).all(dim=1)[:, None].expand(self.rows)


class InputSight(Sight):
    """What the inputs of a layer that was built from flags tell."""

    def __init__(self, spec: AttentionSpec, inputs: Inputs, key: Tensor, value: Tensor, allowed: Tensor) -> None:
        self._spec, self._key, self._value = spec, key, value
        self.allowed, self.rows = allowed, (inputs.batch, inputs.query_len)
        self.extra_keys = inputs.extra_keys
        self.masked = inputs.attn_mask is not None or inputs.key_padding_mask is not None

    def alike_values(self) -> Tensor:
        """As the class says; what is appended has a value of its own."""
        return self._given(self._value)

    def alike_keys(self) -> Tensor:
        """As the class says; a position that turns a key makes it another one."""
        return torch.zeros(self.rows, dtype=torch.bool) if self._spec.rope else self._given(self._key)

    def _given(self, content: Tensor) -> Tensor:
        return torch.zeros(self.rows, dtype=torch.bool) if self.extra_keys else self._alike(content, lambda: 0.0)


def sight_of_inputs(spec: AttentionSpec, inputs: Inputs, key: Tensor, value: Tensor) -> Sight | None:
    """What the inputs of a layer tell; None where what a query can see depends on the head.

    Args:
        spec: for rotary positions.
        inputs: for the masks.
        key: `batch key kdim`.
        value: `batch key vdim`.
    """
    allowed = torch.ones(1, 1, 1, dtype=torch.bool)
    if inputs.attn_mask is not None:
        mask = inputs.attn_mask.cpu()
        if mask.dim() == 3:
            return None
        allowed = allowed & ~(mask if mask.dtype == torch.bool else mask == -math.inf)
    if inputs.key_padding_mask is not None:
        allowed = allowed & ~inputs.key_padding_mask.cpu().view(inputs.batch, 1, inputs.key_len)
    return InputSight(spec, inputs, key, value, allowed.expand(-1, -1, inputs.key_len))


class RunSight(Sight):
    """What the runs of a module under each head count tell, of all the attentions that it has."""

    def __init__(self, runs: Sequence[ModuleRun], allowed: Sequence[Tensor]) -> None:
        self._runs, self._each = runs, allowed
        self.allowed, self.rows = allowed[0], (allowed[0].shape[0], allowed[0].shape[1])
        self.masked = any(not bool(one.all()) for one in allowed)

    @property
    def one_key(self) -> Tensor:
        """Whether it is one alone in every attention, and a key that hangs on one alone itself where several follow."""
        one = torch.stack([allowed.sum(dim=-1) == 1 for allowed in self._each]).all(dim=0)
        before = None
        while len(self._each) > 1 and (before is None or not torch.equal(before, one)):
            before = one
            for allowed in self._each:
                one = one & one.gather(1, allowed.int().argmax(dim=-1))
        return one

    def alike_values(self) -> Tensor:
        """As the class says, by the values that the baseline's weights meet."""
        return self._stage("v_heads")

    def alike_keys(self) -> Tensor:
        """As the class says, by the keys that the baseline's queries meet, and by the weights of each head count."""
        alike = self._stage("k_heads")
        for run in self._runs if bool(alike.any()) else ():
            weights = run.contents[0].get("weights")
            if weights is None:
                return torch.zeros_like(alike)
            equal = self.allowed / self.left[..., None].clamp(min=1)
            apart = float(((weights.detach().cpu().double() - equal[:, None]).abs() * alike[:, None, :, None]).max())
            if judge(apart, run.floor(0, "weights", weights))[1] != "same":
                return torch.zeros_like(alike)
        return alike

    def _stage(self, stage: str) -> Tensor:
        """Of a stage of the baseline, `batch heads key head_dim`."""
        run = self._runs[0]
        content = run.contents[0].get(stage)
        if len(self._each) > 1 or content is None or content.shape[2] != self.allowed.shape[2]:
            return torch.zeros(self.rows, dtype=torch.bool)
        return self._alike(content.transpose(1, 2).flatten(2), lambda: run.floor(0, stage, content))


def sight_of_runs(runs: Sequence[ModuleRun]) -> Sight | None:
    """What the runs of a module under each head count tell, the baseline's first.

    None where it is not known what a query can see: an axis has no name, it depends on the head, or sinks take a part
    of the weight.
    """
    if all(_single_key(found) for run in runs for found, _ in run.opened.attentions):
        # One query and one key leave no trace in a shape, and need none.
        return RunSight(runs, [torch.ones(1, 1, 1, dtype=torch.bool)])
    every = [_allowed(run) for run in runs]
    first = every[0]
    if first is None or not first:
        return None
    for other in every[1:]:
        if other is None or len(other) != len(first) or not all(map(torch.equal, first, other)):
            return None
    square = all(one.shape == first[0].shape and one.shape[1] == one.shape[2] for one in first)
    return RunSight(runs, first) if len(first) == 1 or square else None


def _single_key(found: Attention) -> bool:
    return found.softmax.output.shape[found.softmax_dim] == 1 and found.sinks is None and not found.masks


def _allowed(run: ModuleRun) -> list[Tensor] | None:
    """`batch query key` of each attention."""
    every = []
    for (found, _), contents in zip(run.opened.attentions, run.contents, strict=True):
        weights, scores = contents.get("weights"), contents.get("masked_scores")
        if weights is None or found.sinks is not None or (found.masks and scores is None):
            return None
        allowed = torch.ones(weights.shape, dtype=torch.bool) if scores is None else (scores > BLOCKED_BELOW).cpu()
        if allowed.shape != weights.shape or not bool((allowed == allowed[:, :1]).all()):
            return None
        every.append(allowed[:, 0])
    return every

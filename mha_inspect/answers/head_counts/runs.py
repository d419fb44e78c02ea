"""Each head count run once as it is; and a look inside, at a few queries, to see where two head counts part ways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...measure.stage_difference import compare_stage, stage_noise
from ...measure.stages import Known, StageContents, in_dtype
from ...naming.stages import STAGES
from ...record.rounding import first_tensor, rounding_error
from ...reports.common import Verdict
from ...targets.flag_inputs import Inputs
from ...targets.load import Layer, called_with

QUERIES = 32
"""Queries that are looked at. A query's attention knows nothing of the others, so a few show what all of them do."""

_GIVEN = ("query", "key", "value")
_FROM_THE_SOFTMAX = frozenset(STAGES[STAGES.index("weights") :])


@dataclass(frozen=True)
class Place:
    """Which queries are looked at: `QUERIES` from `start` on, in one sequence of the batch."""

    row: int = 0
    start: int = 0
    few_keys: bool = False
    """Whether only the first `QUERIES` keys are there. Up to the scores, which are a number for each pair of a query
    and a key, a few show what all of them do; from the softmax on it is another computation."""


class HeadRun:
    """One head count: its plain run, and looks inside as they are asked for."""

    def __init__(self, forward: Layer, like: HeadRun | None = None) -> None:
        """`like` is another head count of the same layer."""
        self.forward = forward
        self.known: Known = Known() if like is None else like.known
        self._looks: dict[Place, StageContents] = {}

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.forward.spec.num_heads

    @cached_property
    def output(self) -> Tensor:
        """What the plain run returns, as the layer lays it out."""
        return first_tensor(self.forward.plain()).detach()

    @property
    def batch_first(self) -> Tensor:
        """The output as `batch query embed`, of size 1 where there is no batch."""
        if self.forward.inputs.unbatched:
            return self.output[None]
        return self.output if self.forward.spec.batch_first else self.output.transpose(0, 1)

    def look(self, place: Place) -> StageContents:
        """The stages of these queries, from an opened run of them alone."""
        if place not in self._looks:
            forward = at_place(self.forward, place)
            self._looks[place] = StageContents(forward, forward.recorded(keep=True), self.known)
        return self._looks[place]

    def forget(self) -> None:
        """Let go of what was looked at."""
        self._looks.clear()


def at_place(forward: Layer, place: Place) -> Layer:
    """The same layer with the queries of one place, the keys of that sequence, and the masks that belong to them."""
    inputs = forward.inputs
    stop = min(place.start + QUERIES, inputs.query_len)
    keys = min(QUERIES, inputs.key_len) if place.few_keys else inputs.key_len
    if inputs.batch == 1 and (place.start, stop, keys) == (0, inputs.query_len, inputs.key_len):
        return forward
    heads, first_head = forward.spec.num_heads, place.row * forward.spec.num_heads

    def cut(tensor: Tensor, start: int, stop: int) -> Tensor:
        if inputs.unbatched:
            return tensor[start:stop]
        rows = slice(place.row, place.row + 1)
        part = tensor[rows, start:stop] if forward.spec.batch_first else tensor[start:stop, rows]
        return part.contiguous()

    query = cut(inputs.query, place.start, stop)
    key = query if inputs.key is inputs.query and (place.start, stop) == (0, keys) else cut(inputs.key, 0, keys)
    value = key if inputs.value is inputs.key else cut(inputs.value, 0, keys)
    mask = inputs.attn_mask
    if mask is not None:
        mask = mask[first_head : first_head + heads] if mask.dim() == 3 else mask
        mask = mask[..., place.start : stop, :keys]
    padding = inputs.key_padding_mask
    if padding is not None:
        padding = padding[:keys] if inputs.unbatched else padding[place.row : place.row + 1, :keys]
    few: Inputs = replace(
        inputs,
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        key_padding_mask=padding,
        batch=1,
        query_len=stop - place.start,
        key_len=keys,
    )
    return called_with(forward.module, forward.spec, forward.run, few, forward.layer)


class Noise:
    """The rounding error of the baseline, measured against the same computation in float64.

    For a baseline in float64 there is nothing finer: a run in float32 is measured against it, and scaled by the ratio
    of the two dtypes' rounding steps.
    """

    def __init__(self, baseline: HeadRun) -> None:
        self._baseline = baseline
        self._in_float64 = baseline.forward.spec.dtype == "float64"
        self._others: dict[Place, StageContents] = {}

    @cached_property
    def _other(self) -> Layer:
        """The whole run in the dtype that is measured against."""
        return in_dtype(self._baseline.forward, torch.float32 if self._in_float64 else torch.float64)

    @cached_property
    def _scale(self) -> float:
        return torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if self._in_float64 else 1.0

    @cached_property
    def of_output(self) -> float:
        """Of the whole output."""
        return rounding_error(self._baseline.output, first_tensor(self._other.plain())) * self._scale

    def of_stage(self, stage: str, place: Place, other: Tensor) -> float:
        """Of a stage, in the form in which it is compared with `other`."""
        mine = self._baseline.look(place)
        if place not in self._others:
            module, dtype = self._other.module, torch.float32 if self._in_float64 else torch.float64
            forward = in_dtype(mine.forward, dtype, module)
            self._others[place] = StageContents(forward, forward.recorded(keep=True), self._baseline.known)
        ours, theirs = mine.get(stage), self._others[place].get(stage)
        assert ours is not None, stage
        assert theirs is not None, stage
        content, exact = (theirs, ours) if self._in_float64 else (ours, theirs)
        return stage_noise(stage, content, exact, other) * self._scale


@dataclass(frozen=True)
class Walk:
    """The stages of two runs side by side, in order."""

    same: tuple[str, ...]
    """Those before the first that differs whose content is the same."""
    first: str | None
    """The first whose content differs."""
    note: str = ""
    """Why it could not be subtracted, where the shapes differ."""
    rejoined: str | None = None
    """The stage after it from which on everything is the same again."""
    looked_at: int = 0
    """Queries whose stages were looked at, where they are not all of them; else 0."""


def walk(baseline: HeadRun, other: HeadRun, noise: Noise, *, to_the_end: bool) -> Walk:
    """Compare stage by stage, by content, until one differs; `to_the_end` goes on to see where they meet again.

    The first queries of the first sequence are looked at; where nothing differs there, those where the outputs are
    furthest apart.
    """
    if not to_the_end:
        found = _walk(baseline, other, noise, Place(few_keys=True), to_the_end)
        if found.first is not None:
            return found
    found = _walk(baseline, other, noise, Place(), to_the_end)
    if found.first is not None or not baseline.output.numel():
        return found
    apart = (baseline.batch_first - other.batch_first).abs().amax(dim=-1)
    row, query = divmod(int(apart.nan_to_num(nan=-1.0).argmax()), apart.shape[1])
    place = Place(row, query // QUERIES * QUERIES)
    return found if place == Place() else _walk(baseline, other, noise, place, to_the_end)


def _walk(baseline: HeadRun, other: HeadRun, noise: Noise, place: Place, to_the_end: bool) -> Walk:
    mine, theirs = baseline.look(place), other.look(place)
    same: list[str] = []
    first = rejoined = None
    note = ""
    for stage in mine.stages:
        if place.few_keys and stage in _FROM_THE_SOFTMAX:
            break
        left, right = mine.get(stage), theirs.get(stage)
        if stage in _GIVEN or left is None or right is None:
            continue
        verdict, why = _verdict(stage, left, right, noise, place)
        if first is not None:
            rejoined = None if verdict == "differs" else rejoined or stage
        elif verdict == "differs":
            first, note = stage, why
        else:
            same.append(stage)
        if first is not None and not to_the_end:
            break
    few = mine.forward is not baseline.forward
    return Walk(tuple(same), first, note, rejoined, mine.forward.inputs.query_len if few else 0)


def _verdict(stage: str, left: Tensor, right: Tensor, noise: Noise, place: Place) -> tuple[Verdict, str]:
    found = compare_stage(stage, left, right, lambda: noise.of_stage(stage, place, right))
    if found.max_abs_difference is None:
        # Few queries and keys were looked at: the width alone is that of the whole stage.
        return "differs", f"{right.shape[-1]} features wide instead of {left.shape[-1]}"
    return found.verdict or "same", ""

"""Say what happens to queries, keys and scores inside an attention: positions, norms, a cache, a window, a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..graph.attention import Attention
from ..graph.instances import Translation
from ..graph.rerun import Constants
from ..record.sight import Sight
from ..reports.trace import Cache, Position, QKNorm
from .axes import AxisNames
from .named_run import NamedRun
from .operand_path import OperandPath, cache_of, norm_of
from .positions import Added, Rotation, Turned, added_by, rotation_of
from .visibility import filled_slots, masks_of, noted, visibility, window_of

_STAGES = {"query": "q_heads", "key": "k_heads", "value": "v_heads"}


@dataclass(frozen=True)
class OperandSteps:
    """What becomes of queries, keys or values between their projection and the product."""

    norm: QKNorm | None = None
    cache: Cache | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    """Index of an operation that computes all this to `rms_norm`, `rotary`, or an empty text for the cache."""


@dataclass(frozen=True)
class InnerSteps:
    """What happens to queries, keys and scores inside one attention."""

    position: Position | None = None
    qk_norm: QKNorm | None = None
    cache: Cache | None = None
    window: int | None = None
    bias: bool = False
    operands: Mapping[str, OperandSteps] = field(default_factory=dict)
    """`q_heads`, `k_heads`, `v_heads` to their steps; a stage without any is absent."""
    added: Mapping[int, Added] = field(default_factory=dict)
    """Index of an operation that masks scores to what it adds."""
    frequencies: tuple[float, ...] = ()
    """The angle between neighbours in each pair of features that is rotated; empty if nothing is, or it is unknown."""


class InnerStepsReader:
    """Reads the inner steps of each attention of a run; `leaves` are values of inputs, parameters and buffers."""

    def __init__(self, run: NamedRun, leaves: Mapping[int, Tensor]) -> None:
        self._run, self._graph = run, run.graph
        self._constants = Constants(run.graph, leaves)
        self._rotations: dict[Any, Rotation | None] = {}
        self._windows: dict[tuple[int, str], tuple[Sight | None, int | None]] = {}

    def are_alike(self, translation: Translation) -> bool:
        """Return whether the constants that were read so far have the same content in other layers."""
        return self._constants.are_alike(translation)

    def of(self, attention: Attention, names: AxisNames) -> InnerSteps:
        """Return the inner steps of an attention."""
        turn = attention.turns[0]
        paths = {side: OperandPath(self._graph, turn, side) for side in _STAGES}
        sides = ("query", "key")
        norms = {side: norm_of(path, names) for side, path in paths.items()}
        seen = partial(self._seen, attention, names)
        first = {
            side: OperandPath(self._graph, turn, side, from_first=True) if turn.earlier.get(side) else paths[side]
            for side in ("key", "value")
        }
        turns = {side: self._turned(turn, names, side) for side in sides}
        caches = {side: cache_of(path, self._constants, names, seen) for side, path in first.items()}
        added = added_by(self._graph, self._constants, turn, lambda op: masks_of(self._graph, turn, op))
        operands: dict[str, OperandSteps] = {}
        for side, stage in _STAGES.items():
            norm, turned, cached = norms.get(side), turns.get(side), caches.get(side)
            steps = dict.fromkeys(cached[1] if cached else (), "")
            for name, step in ((f"{norm[0].kind}_norm" if norm else "", norm), ("rotary", turned)):
                span = range(0) if step is None else step[1]
                steps |= dict.fromkeys((*span[:1], *(op.index for op in paths[side].ops if op.index in span)), name)
            if norm or turned or cached:
                operands[stage] = OperandSteps(norm[0] if norm else None, cached[0] if cached else None, steps)
        norm = norms["query"] or norms["key"]
        rotary = _rotary(turns["query"], turns["key"])
        for index, each in added.items() if rotary is None else ():
            if each.product is not None:
                like = replace(turn, score_product=each.product)
                rotary = _rotary(*(self._turned(like, names, side) for side in sides))
                added[index] = each._replace(position=rotary)
        return InnerSteps(
            position=rotary or next((each.position for each in added.values() if each.position), None),
            qk_norm=norm[0] if norm else None,
            cache=caches["key"][0] if caches["key"] else None,
            window=self._window(attention, names),
            bias=turn.has_factors or any(each.bias for each in added.values()),
            operands=operands,
            added=added,
            frequencies=next((turned[0].frequencies for turned in turns.values() if turned), ()),
        )

    def _turned(self, attention: Attention, names: AxisNames, side: str) -> Turned | None:
        """Return the rotation of queries or keys, after or before the last of their projections; None without one."""
        paths = (OperandPath(self._graph, attention, side, from_first=first) for first in (False, True))
        turns = (rotation_of(path, names, constants=self._constants, known=self._rotations) for path in paths)
        return next(filter(None, turns), None)

    def _seen(self, attention: Attention, names: AxisNames) -> Tensor | None:
        """Return which query sees which key; None if unknown."""
        known = visibility(self._graph, attention, names)
        return None if known is None else known.seen

    def _window(self, attention: Attention, names: AxisNames) -> int | None:
        """Return the window of an attention; layers with one mask share it."""
        sight = noted(self._graph, attention)
        key = id(sight), names.of_stage("weights") if "weights" in attention.stages else ""
        if key not in self._windows or attention.branches:
            limited = names.num_windows == 1 and sight is not None and sight.pairs
            seen = self._seen(attention, names) if limited else None
            self._windows[key] = sight, None if seen is None else window_of(filled_slots(self._graph, attention, seen))
        return self._windows[key][1]


def _rotary(query: Turned | None, key: Turned | None) -> Position | None:
    """Return the rotation of queries and keys as a position; None if neither is rotated."""
    either = query or key
    if either is None:
        return None
    offsets = (None if turned is None else turned[0].offset for turned in (query, key))
    return Position("rotary", either[0].layout, either[0].dims, *offsets)


def bias_steps(attention: Attention, added: Mapping[int, Added]) -> tuple[tuple[str, float | None], ...]:
    """Return `attention.scoring` with what an `add` adds that is no mask.

    This is a `bias`, a further `product` of queries and keys or a `rotary` one, or is `made` of the scores.
    """
    ops = list(attention.masks)
    steps: list[tuple[str, float | None]] = []
    for kind, number in attention.scoring:
        op = ops.pop(0) if kind in ("add", "fill", "times") and ops else None
        told = added.get(op.index) if op is not None and kind == "add" else None
        if told is not None and told.product is not None:
            steps.append(("rotary" if told.position else "product", None))
        elif told is not None and told.of_scores:
            steps.append(("made", None))
        elif told is not None and told.bias:
            steps += [("bias", None), *([("add", None)] if told.mask else [])]
        else:
            steps.append((kind, number))
    return tuple(steps)

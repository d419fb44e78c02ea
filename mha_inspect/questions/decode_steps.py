"""Describe each call of a decode loop by its attentions: its tokens, its cache and its positions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..record.arguments import parts_of
from ..reports.trace import AttentionReport, Position, Stage, Step, Trace
from ..text import spans

_SCORES = ("scores", "masked_scores", "weights")


def step_of(attentions: Sequence[AttentionReport], before: int, *, continued: bool = False) -> Step:
    """Return the row of a call with these attentions, after calls with `before` tokens.

    Keys beside those of its own tokens are of earlier calls if the call is `continued` or a cache is seen.

    Raises `InputError` without attentions.
    """
    if not attentions:
        raise InputError("no attention was found: nothing here computes softmax(QKᵀ)V. Check the target.")
    continued = continued or any(attention.cache for attention in attentions)
    # The scores may have a group of heads in place of the queries.
    queries = min(map(_queries, attentions))
    of_tokens = [attention for attention in attentions if _queries(attention) == queries]
    widest = max(of_tokens, key=_keys)
    past = 0
    if continued:
        # Empty slots of a static cache may not be known.
        earlier = max(_keys(widest) - queries, 0)
        past = min(before, earlier)
    flops = 0
    for attention in attentions:
        flops += sum(stage.flops for stage in attention.stages)
    rotation = _rotation(of_tokens)
    return Step(
        queries=queries,
        past=past,
        new=queries,
        scores=_shape_of_scores(widest),
        cache_bytes=sum(map(_read_bytes, attentions)),
        flops=flops,
        query_offset=None if rotation is None else rotation.query_offset,
        key_offset=None if rotation is None else rotation.key_offset,
    )


def with_steps(trace: Trace) -> Trace:
    """Return the trace of a block, with a row for each call if it is a loop that attends to a cache token by token."""
    if trace.failure is not None:
        return trace
    modules = [attention.module for attention in trace.attentions]
    for size in range(1, len(modules) // 2 + 1):
        # A call may run a module several times.
        if modules[size:] != modules[:-size] or len(modules) % size:
            continue
        rows = _steps_of_calls(trace.attentions, size)
        if all(row.queries == 1 and row.past for row in rows[1:]):
            notes = (*jumps(rows, may_drop=True), *trace.notes)
            return replace(trace, steps=tuple(rows), notes=notes)
    return trace


def _steps_of_calls(attentions: Sequence[AttentionReport], size: int) -> list[Step]:
    """Return the row of each call, if each runs this number of attentions."""
    rows: list[Step] = []
    tokens = 0
    for start in range(0, len(attentions), size):
        row = step_of(attentions[start : start + size], tokens)
        rows.append(row)
        tokens += row.new
    return rows


# -- positions --------------------------------------------------------------------------------------------------------


def _rotation(attentions: Sequence[AttentionReport]) -> Position | None:
    """Return the rotary position of a call; None if nothing is rotated, or attentions have several."""
    rotations: dict[tuple[int | None, int | None], Position] = {}
    for attention in attentions:
        position = attention.position
        if position is None or position.kind != "rotary":
            continue
        offsets = (position.query_offset, position.key_offset)
        rotations.setdefault(offsets, position)
    if len(rotations) != 1:
        return None
    (rotation,) = rotations.values()
    return rotation


def jumps(steps: Sequence[Step], *, may_drop: bool) -> list[str]:
    """Return a sentence if a call does not go on at the position after that of the call before it; else nothing.

    With `may_drop`, a call may go on behind the keys that are kept: tokens that were drafted and rejected are no more.
    """
    for before, step in pairwise(steps):
        expected = _next_position(before, step)
        if expected is None or step.query_offset == expected:
            continue
        if may_drop and step.query_offset == step.past:
            continue
        return [f"The positions jump: {_positions(before)}, then {_positions(step)}; expected {expected}."]
    return []


def _next_position(before: Step, step: Step) -> int | None:
    """Return the position of the first query of a call that continues another one; None if it is unknown."""
    if before.query_offset is None or step.query_offset is None or not step.past:
        return None
    if step.key_offset in (None, step.query_offset):
        return before.query_offset + before.queries
    return step.key_offset + step.past  # cached keys are rotated anew, by their rows


def _positions(step: Step) -> str:
    """Return the positions of a call as a range, `0–5`; empty if they are unknown."""
    if step.query_offset is None:
        return ""
    return spans(range(step.query_offset, step.query_offset + step.queries))


# -- sizes ------------------------------------------------------------------------------------------------------------


def _queries(attention: AttentionReport) -> int:
    """Return the number of queries; 1 if no stage names them."""
    return _size(attention, "query", ("query", "q_proj", "output", *_SCORES))


def _keys(attention: AttentionReport) -> int:
    """Return the number of keys; 1 if no stage names them."""
    return _size(attention, "key", _SCORES)


def _size(attention: AttentionReport, axis: str, names: Sequence[str]) -> int:
    """Return the size of an axis in the first of these stages that names it; 1 if none does."""
    stages = {stage.name: stage for stage in attention.stages}
    for name in names:
        if name not in stages:
            continue
        sizes = _sizes(stages[name])
        if axis in sizes:
            return sizes[axis]
    return 1


def _sizes(stage: Stage) -> dict[str, int]:
    """Return the size of each axis of a stage: `{"batch": 2, "query": 5, "(heads head_dim)": 64}`."""
    axes = re.findall(r"\([^)]*\)|\S+", stage.axes)
    return dict(zip(axes, stage.shape, strict=False))


def _shape_of_scores(attention: AttentionReport) -> tuple[int, ...]:
    """Return the shape of the first stage with scores; empty without one."""
    for stage in attention.stages:
        if stage.name in _SCORES:
            return stage.shape
    return ()


def _read_bytes(attention: AttentionReport) -> int:
    """Return the bytes of the keys and values, in as many heads as are projected."""
    total = 0
    for stage in attention.stages:
        if stage.name not in ("k_heads", "v_heads"):
            continue
        heads = _heads_in(stage, attention)
        projected = min(attention.num_kv_heads, heads)
        total += stage.nbytes * projected // heads
    return total


def _heads_in(stage: Stage, attention: AttentionReport) -> int:
    """Return the number of heads in a stage of keys or values."""
    sizes = _sizes(stage)
    for axis in ("kv_heads", "heads"):
        if axis in sizes:
            return sizes[axis]
    # The heads are merged with another axis: `(batch kv_heads) key head_dim`.
    if "kv_heads" in stage.axes:
        return attention.num_kv_heads
    return attention.num_heads


def cache_bytes_of(cache: Any) -> int:
    """Return the bytes of the tensors in a cache: nested containers, or an object with them as attributes.

    Counters and lengths do not count: they have fewer than two dimensions.
    """
    nbytes = 0
    queue = [cache]
    seen: set[int] = set()
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, (nn.Module, type)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and value.dim() > 1:
            nbytes += value.nbytes
        parts = [part for _, part in parts_of(value)]
        if not parts:
            parts = [*getattr(value, "__dict__", {}).values()]
        queue += parts
    return nbytes

"""Describe the part of the attentions that a rank of a process group has, and its place in the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import prod
from typing import TypeVar

import numpy as np
from torch import Tensor, nn

from ..errors import InputError
from ..graph.attention import Attention
from ..naming.named_run import NamedRun
from ..naming.parameters import parts_of
from ..naming.pattern import dims_of
from ..naming.projection import Part, coordinates
from ..record.ranks import local, needs_ranks, parameters_of, piece_of
from ..reports.trace import Rank, Stage, Trace
from ..running.subject import Run, Subject

T = TypeVar("T")
_OF_ALL_HEADS = ("query", "key", "value", "output")
"""The stages without an axis of heads."""
_OF_FEATURES = ("q_proj", "k_proj", "v_proj", "concat")
"""The stages in which the features of all heads are one axis."""


@dataclass(frozen=True)
class Shard:
    """The rows of W_q, W_k or W_v, or the columns of W_o, that a rank computes with."""

    rows: tuple[int, int]
    """The first and the row after the last, in the parameter over all ranks."""
    size: int
    """Number of rows of the parameter on this rank, also those of other matrices in it."""
    whole: int
    """The same over all ranks."""
    dim: int
    """0 for rows of the parameter, 1 for columns: those of W_o, and of a transposed W_q."""


def rank_of(rank: int, trace: Trace, run: Run, module: nn.Module) -> Rank:
    """Return the part of the attentions that a rank has, from its own run of the module.

    `kv_copied` needs the other ranks: `with_copies` sets it.
    """
    parameters = parameters_of(module)
    # Plain parameters beside collectives may be cut by hand: their place in the whole is unknown.
    is_known = not trace.collectives or any(map(piece_of, parameters.values()))
    shards = shards_of(run, parameters) if is_known else []
    flops = 0
    for attention in trace.attentions:
        flops += sum(stage.flops for stage in attention.stages)
    return Rank(
        rank=rank,
        heads=_only({attention.num_heads for attention in trace.attentions}),
        kv_heads=_only({attention.num_kv_heads for attention in trace.attentions}),
        kv_copied=False,
        rows=_common_rows(shards),
        bytes=sum(local(parameter).nbytes for parameter in parameters.values()),
        flops=flops,
        exchanged=sum(collective.nbytes for collective in trace.collectives or ()),
    )


def _only(numbers: Collection[T]) -> T | None:
    """Return the only number; None if there are several or none."""
    return next(iter(numbers)) if len(numbers) == 1 else None


def _common_rows(shards: Sequence[Mapping[str, Shard]]) -> dict[str, tuple[int, int]]:
    """Return the rows of each matrix of the first attention, if every other attention that has it has the same."""
    rows: dict[str, tuple[int, int]] = {}
    for name, shard in shards[0].items() if shards else ():
        if all(further.get(name, shard).rows == shard.rows for further in shards[1:]):
            rows[name] = shard.rows
    return rows


def require_alone(subject: Subject, asked: str, run: Run | None = None) -> None:
    """Raise `InputError` if more runs, which `asked` needs, would need the other ranks of a process group."""
    if needs_ranks(subject.module, None if run is None else run.recording):
        raise InputError(
            f"{asked} runs {subject.name} several times, and its parameters or results are spread over ranks, which "
            "would have to run it too. Use trace, or give the module as it is before sharding."
        )


def with_copies(ranks: Sequence[Rank]) -> tuple[Rank, ...]:
    """Return the ranks of a process group, with `kv_copied` where one with other queries has the same keys."""
    queries_of_keys: dict[object, set[object]] = {}
    for rank in ranks:
        queries_of_keys.setdefault(rank.rows.get("W_k"), set()).add(rank.rows.get("W_q"))
    marked = []
    for rank in ranks:
        keys = rank.rows.get("W_k")
        is_copied = keys is not None and len(queries_of_keys[keys]) > 1
        marked.append(replace(rank, kv_copied=is_copied))
    return tuple(marked)


def with_whole_shapes(trace: Trace, run: Run, *modules: nn.Module) -> Trace:
    """Return the trace with the shape over all ranks for each stage of which this rank has some heads."""
    parameters: dict[str, Tensor] = {}
    for module in modules:
        parameters.update(parameters_of(module))
    if not any(map(piece_of, parameters.values())):
        return trace
    attentions = []
    for report, (attention, _), shards in zip(
        trace.attentions, run.attentions, shards_of(run, parameters), strict=True
    ):
        # With one feature a head, a rank's only head and its feature are both a size of one: either may be the other.
        sure_shards = {} if report.head_dim == 1 else shards
        stages = []
        for stage in report.stages:
            whole = _whole_shape(stage, sure_shards) or _before_scattering(stage, attention, run)
            stages.append(replace(stage, whole=whole))
        attentions.append(replace(report, stages=tuple(stages)))
    return replace(trace, attentions=tuple(attentions))


def _before_scattering(stage: Stage, attention: Attention, run: Run) -> tuple[int, ...] | None:
    """Return the shape of the output before ranks added up their parts and kept a piece each; None if they did not."""
    if stage.name != "output" or "output" not in attention.projections:
        return None
    output = attention.projections["output"].output
    for _, step in run.graph.forward(output, lambda op: op.kind in ("view", "copy")):
        shape = step.tensor.shape
        if len(shape) != len(stage.shape) or shape[-1] != stage.shape[-1]:
            continue
        if prod(shape) > prod(stage.shape):
            return shape
    return None


def _whole_shape(stage: Stage, shards: Mapping[str, Shard]) -> tuple[int, ...] | None:
    """Return the shape of a stage with the heads of all ranks; None if this rank has all, or they are unknown."""
    dims = dims_of(stage.axes)
    axes = set(chain.from_iterable(dims))
    if "packed" in axes:
        return None  # the contexts of all ranks may have been gathered
    letter = stage.name[0] if stage.name[0] in "kv" else "q"
    of_stage, of_queries, of_keys = (_times_of_whole(shards, name) for name in (letter, "q", "k"))
    factors: dict[str, Fraction] = {"heads": of_stage, "kv_heads": of_keys, "group": of_queries / of_keys}
    if axes.isdisjoint(factors):  # a rank with a single head
        axis = "head_dim" if stage.name in _OF_FEATURES else "1"
        if stage.name in _OF_ALL_HEADS or dims.count([axis]) != 1:
            return None
        factors = {axis: of_stage}
    whole = []
    for size, names in zip(stage.shape, dims, strict=True):
        factor = prod(factors.get(name, Fraction(1)) for name in names)
        whole.append(int(size * factor))
    return None if tuple(whole) == stage.shape else tuple(whole)


def _times_of_whole(shards: Mapping[str, Shard], letter: str) -> Fraction:
    """Return how many times the rows of this rank W_q, W_k or W_v has over all ranks; 1 if it is not cut."""
    shard = shards.get(f"W_{letter}")
    return Fraction(1) if shard is None else Fraction(shard.whole, shard.size)


def shards_of(run: NamedRun, parameters: Mapping[str, Tensor]) -> list[dict[str, Shard]]:
    """Return for each attention the rank's part of W_q, W_k, W_v and W_o, where each is in one matrix."""
    by_attention = []
    for parts, _ in parts_of(run):
        matrices = [part for part in parts if part.kind == "W" and part.heads and part.parameter.name in parameters]
        counts = Counter(part.name for part in matrices)
        shards: dict[str, Shard] = {}
        for part in matrices:
            shard = shard_of(part, parameters[part.parameter.name])
            if shard is not None and counts[part.name] == 1:
                shards[part.name] = shard
        by_attention.append(shards)
    return by_attention


def shard_of(part: Part, parameter: Tensor) -> Shard | None:
    """Return the part of a matrix that a rank has; None if it is no block of rows or columns."""
    used, piece = part.parameter.tensor, piece_of(parameter)
    if len(used.shape) != 2 or part.inner is None:
        return None
    dim = int(part.inner[1] == used.stride[0] and part.inner[0] == used.shape[0])
    rows = np.concatenate([*part.heads.values()])
    places = coordinates(rows[rows >= 0], used)[dim]
    size, start, whole = used.shape[dim], 0, used.shape[dim]
    if piece is not None:
        start, whole = piece.start[dim], piece.whole[dim]
        if local(parameter).shape[dim] < size:  # FSDP gathered the part of this rank's heads from several ranks
            start -= start % size
    return Shard((start + int(places.min()), start + int(places.max()) + 1), size, whole, dim)

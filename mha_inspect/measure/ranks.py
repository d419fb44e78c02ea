"""Describe the part of the attentions that a rank of a process group has, and its place in the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

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

    @property
    def is_on_every_rank(self) -> bool:
        """Whether each rank has the whole parameter."""
        return self.size == self.whole


def rank_of(rank: int, trace: Trace, run: Run, module: nn.Module) -> Rank:
    """Return the part of the attentions that a rank has, from its own run of the module.

    `kv_copied` needs the other ranks: `with_copies` sets it.
    """
    parameters = parameters_of(module)
    # Plain parameters beside collectives may be cut by hand: their place in the whole is unknown.
    has_places = not trace.collectives or any(map(piece_of, parameters.values()))
    rows: dict[str, tuple[int, int]] = {}
    if has_places:
        rows = _rows_of(shards_of(run, parameters))
    heads: set[int] = set()
    kv_heads: set[int] = set()
    flops = 0
    for attention in trace.attentions:
        heads.add(attention.num_heads)
        kv_heads.add(attention.num_kv_heads)
        flops += sum(stage.flops for stage in attention.stages)
    return Rank(
        rank=rank,
        heads=_only(heads),
        kv_heads=_only(kv_heads),
        kv_copied=False,
        rows=rows,
        bytes=sum(local(parameter).nbytes for parameter in parameters.values()),
        flops=flops,
        exchanged=sum(collective.nbytes for collective in trace.collectives or ()),
    )


def _only(counts: set[int]) -> int | None:
    """Return the only number of a set; None if it has none or several."""
    if len(counts) != 1:
        return None
    (count,) = counts
    return count


def _rows_of(shards: Sequence[Mapping[str, Shard]]) -> dict[str, tuple[int, int]]:
    """Return the rows of W_q, W_k, W_v and W_o in the first attention, where no later one has another part."""
    rows: dict[str, tuple[int, int]] = {}
    if not shards:
        return rows
    first, *later = shards
    for name, shard in first.items():
        places = {shards[name].rows for shards in later if name in shards}
        if places <= {shard.rows}:
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
    queries: dict[object, set[object]] = {}
    for rank in ranks:
        keys = rank.rows.get("W_k")
        of_keys = queries.setdefault(keys, set())
        of_keys.add(rank.rows.get("W_q"))
    marked = []
    for rank in ranks:
        keys = rank.rows.get("W_k")
        is_copied = keys is not None and len(queries[keys]) > 1
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
    places = zip(trace.attentions, run.attentions, shards_of(run, parameters), strict=True)
    for report, (attention, _), shards in places:
        # With one feature a head, a rank's only head and its feature are both a size of one: either may be the other.
        usable = {} if report.head_dim == 1 else shards
        stages = []
        for stage in report.stages:
            whole = _whole_shape(stage, usable)
            if whole is None:
                whole = _before_scattering(stage, attention, run)
            stages.append(replace(stage, whole=whole))
        attentions.append(replace(report, stages=tuple(stages)))
    return replace(trace, attentions=tuple(attentions))


def _before_scattering(stage: Stage, attention: Attention, run: Run) -> tuple[int, ...] | None:
    """Return the shape of the output before ranks added up their parts and kept a piece each; None if they did not."""
    if stage.name != "output" or "output" not in attention.projections:
        return None
    projected = attention.projections["output"].output
    for _, step in run.graph.forward(projected, lambda op: op.kind in ("view", "copy")):
        shape = step.tensor.shape
        if len(shape) != len(stage.shape) or shape[-1] != stage.shape[-1]:
            continue
        if prod(shape) > prod(stage.shape):
            return shape
    return None


def _whole_shape(stage: Stage, shards: Mapping[str, Shard]) -> tuple[int, ...] | None:
    """Return the shape of a stage with the heads of all ranks; None if this rank has all, or they are unknown."""
    dims = dims_of(stage.axes)
    if any("packed" in axes for axes in dims):
        return None  # the contexts of all ranks may have been gathered
    factors = _factors(stage, dims, shards)
    whole = []
    for size, axes in zip(stage.shape, dims, strict=True):
        of_whole = Fraction(size)
        for axis in axes:
            of_whole *= factors.get(axis, 1)
        whole.append(int(of_whole))
    if tuple(whole) == stage.shape:
        return None
    return tuple(whole)


def _factors(stage: Stage, dims: Sequence[Sequence[str]], shards: Mapping[str, Shard]) -> dict[str, Fraction]:
    """Return how often the size of an axis on a rank is in the whole: `{"heads": 4}` with a quarter of the heads."""
    of_queries = _factor("W_q", shards)
    of_keys = _factor("W_k", shards)
    of_stage = of_queries
    if stage.name[0] in "kv":
        of_stage = _factor(f"W_{stage.name[0]}", shards)
    factors = {
        "heads": of_stage,
        "kv_heads": of_keys,
        "group": of_queries / of_keys,
    }
    if any(not factors.keys().isdisjoint(axes) for axes in dims):
        return factors
    # A rank with a single head: its axis is that of the features, or has no name.
    axis = "head_dim" if stage.name in _OF_FEATURES else "1"
    if stage.name in _OF_ALL_HEADS or dims.count([axis]) != 1:
        return {}
    return {axis: of_stage}


def _factor(name: str, shards: Mapping[str, Shard]) -> Fraction:
    """Return how often the rows of a rank are in the whole matrix: 4 for a quarter; 1 if its part is unknown."""
    if name not in shards:
        return Fraction(1)
    return Fraction(shards[name].whole, shards[name].size)


def shards_of(run: NamedRun, parameters: Mapping[str, Tensor]) -> list[dict[str, Shard]]:
    """Return for each attention the rank's part of W_q, W_k, W_v and W_o, where each is in one matrix."""
    return [_shards(in_parameters.parts, parameters) for in_parameters in parts_of(run)]


def _shards(parts: Sequence[Part], parameters: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Return the rank's part of each projection of one attention that is a block of a single matrix."""
    matrices: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "W" and part.heads and part.parameter.name in parameters:
            matrices.setdefault(part.name, []).append(part)
    shards: dict[str, Shard] = {}
    for name, of_name in matrices.items():
        if len(of_name) > 1:
            continue
        (part,) = of_name
        shard = shard_of(part, parameters[part.parameter.name])
        if shard is not None:
            shards[name] = shard
    return shards


def shard_of(part: Part, parameter: Tensor) -> Shard | None:
    """Return the part of a matrix that a rank has; None if it is no block of rows or columns."""
    used = part.parameter.tensor
    if len(used.shape) != 2 or part.inner is None:
        return None
    # The features of heads are columns where the numbers of one feature run down the rows.
    down_the_rows = (used.shape[0], used.stride[0])
    dim = 1 if part.inner == down_the_rows else 0
    features = np.concatenate([*part.heads.values()])
    places = coordinates(features[features >= 0], used)[dim]
    size = used.shape[dim]
    start = 0
    whole = size
    piece = piece_of(parameter)
    if piece is not None:
        start = piece.start[dim]
        whole = piece.whole[dim]
        if local(parameter).shape[dim] < size:  # FSDP gathered the part of this rank's heads from several ranks
            start -= start % size
    first = start + int(places.min())
    last = start + int(places.max())
    return Shard(rows=(first, last + 1), size=size, whole=whole, dim=dim)

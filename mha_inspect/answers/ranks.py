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


def rank_of(rank: int, trace: Trace, run: Run, module: nn.Module) -> Rank:
    """Return the part of the attentions that a rank has, from its own run of the module.

    `kv_copied` needs the other ranks: `with_copies` sets it.
    """
    parameters = parameters_of(module)
    # Plain parameters beside collectives may be cut by hand: their place in the whole is unknown.
    is_known = not trace.collectives or any(map(piece_of, parameters.values()))
    first, *others = shards_of(run, parameters) if is_known and run.attentions else [{}]
    heads = {attention.num_heads for attention in trace.attentions}
    kv_heads = {attention.num_kv_heads for attention in trace.attentions}
    return Rank(
        rank=rank,
        heads=heads.pop() if len(heads) == 1 else None,
        kv_heads=kv_heads.pop() if len(kv_heads) == 1 else None,
        kv_copied=False,
        rows={
            name: shard.rows
            for name, shard in first.items()
            if all(other.get(name, shard).rows == shard.rows for other in others)
        },
        bytes=sum(local(parameter).nbytes for parameter in parameters.values()),
        flops=sum(stage.flops for attention in trace.attentions for stage in attention.stages),
        exchanged=sum(collective.nbytes for collective in trace.collectives or ()),
    )


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
    for each in ranks:
        queries.setdefault(each.rows.get("W_k"), set()).add(each.rows.get("W_q"))
    copied = {rows for rows, of_queries in queries.items() if rows is not None and len(of_queries) > 1}
    return tuple(replace(each, kv_copied=each.rows.get("W_k") in copied) for each in ranks)


def with_whole_shapes(trace: Trace, run: Run, *modules: nn.Module) -> Trace:
    """Return the trace with the shape over all ranks for each stage of which this rank has some heads."""
    parameters = {name: parameter for module in modules for name, parameter in parameters_of(module).items()}
    if not any(map(piece_of, parameters.values())):
        return trace
    of_each = shards_of(run, parameters)
    # With one feature a head, a rank's only head and its feature are both a size of one: either may be the other.
    known = [{} if each.head_dim == 1 else shards for each, shards in zip(trace.attentions, of_each, strict=True)]
    every = zip(trace.attentions, run.attentions, known, strict=True)
    attentions = []
    for report, (attention, _), shards in every:
        wholes = [_whole_shape(stage, shards) or _before_scattering(stage, attention, run) for stage in report.stages]
        stages = tuple(replace(stage, whole=whole) for stage, whole in zip(report.stages, wholes, strict=True))
        attentions.append(replace(report, stages=stages))
    return replace(trace, attentions=tuple(attentions))


def _before_scattering(stage: Stage, attention: Attention, run: Run) -> tuple[int, ...] | None:
    """Return the shape of the output before ranks added up their parts and kept a piece each; None if they did not."""
    if stage.name != "output" or "output" not in attention.projections:
        return None
    moved = run.graph.forward(attention.projections["output"].output, lambda op: op.kind in ("view", "copy"))
    shapes = (step.tensor.shape for _, step in moved)
    alike = (shape for shape in shapes if len(shape) == len(stage.shape) and shape[-1] == stage.shape[-1])
    return next((shape for shape in alike if prod(shape) > prod(stage.shape)), None)


def _whole_shape(stage: Stage, shards: Mapping[str, Shard]) -> tuple[int, ...] | None:
    """Return the shape of a stage with the heads of all ranks; None if this rank has all, or they are unknown."""

    def times(letter: str) -> Fraction:
        shard = shards.get(f"W_{letter}")
        return Fraction(1) if shard is None else Fraction(shard.whole, shard.size)

    dims, own, of_keys = dims_of(stage.axes), times(stage.name[0] if stage.name[0] in "kv" else "q"), times("k")
    if any("packed" in axes for axes in dims):
        return None  # the contexts of all ranks may have been gathered
    factors = {"heads": own, "kv_heads": of_keys, "group": times("q") / of_keys}
    if not any(axis in factors for axes in dims for axis in axes):  # a rank with a single head
        axis = "head_dim" if stage.name in _OF_FEATURES else "1"
        factors = {axis: own} if stage.name not in _OF_ALL_HEADS and dims.count([axis]) == 1 else {}
    sizes = zip(stage.shape, dims, strict=True)
    whole = tuple(int(size * prod(factors.get(axis, Fraction(1)) for axis in axes)) for size, axes in sizes)
    return None if whole == stage.shape else whole


def shards_of(run: NamedRun, parameters: Mapping[str, Tensor]) -> list[dict[str, Shard]]:
    """Return for each attention the rank's part of W_q, W_k, W_v and W_o, where each is in one matrix."""
    every = []
    for parts, _ in parts_of(run):
        matrices = [part for part in parts if part.kind == "W" and part.heads and part.parameter.name in parameters]
        names = [part.name for part in matrices]
        shards = {part.name: shard_of(part, parameters[part.parameter.name]) for part in matrices}
        every.append({name: shard for name, shard in shards.items() if shard is not None and names.count(name) == 1})
    return every


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

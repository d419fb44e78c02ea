"""Describe the part of the attentions that a rank of a process group has, and its place in the whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from math import prod
from types import FrameType

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..graph.attention import Attention
from ..naming.named_run import NamedRun
from ..naming.parameters import Part, coordinates, parts_of
from ..naming.pattern import dims_of
from ..record.arguments import argument_names, tensors_in
from ..record.ranks import local, needs_ranks, parameters_of, piece_of
from ..record.site import Site, place_of_site
from ..reports.trace import Rank, Stage, Trace
from ..running.subject import Run, Subject
from ..text import first_few, spans

_INPUT = "input "
"""Begins the name of an input among digests."""
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


def rank_of(rank: int, trace: Trace, run: Run, module: nn.Module) -> Rank:
    """Return the part of the attentions that a rank has, from its own run of the module.

    `kv_copied` needs the other ranks: `with_copies` sets it.
    """
    parameters = parameters_of(module)
    # Plain parameters beside collectives may be cut by hand: their place in the whole is unknown.
    is_known = not trace.collectives or any(map(piece_of, parameters.values()))
    first, *others = shards_of(run, parameters) if is_known and run.attentions else [{}]
    heads, kv_heads = (
        {getattr(attention, name) for attention in trace.attentions} for name in ("num_heads", "num_kv_heads")
    )
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
            "would have to run it too. Use trace or params, or give the module as it is before sharding."
        )


def digests_of(run: Run, subject: Subject) -> dict[str, str]:
    """Return a digest of what ranks should have alike, by name: the inputs, copied parameters and the operations.

    Parameters that may be cut by hand are left out.
    """
    parameters = parameters_of(subject.module)
    cut = {name for name, parameter in parameters.items() if piece_of(parameter)}
    if not cut and any(op.is_collective for op in run.recording.ops):
        parameters = {}
    copied = {name: _digest(parameter) for name, parameter in parameters.items() if name not in cut}
    given = tensors_in(argument_names(subject.module, subject.args, subject.kwargs))
    inputs = {f"{_INPUT}{name}": _digest(tensor) for name, tensor in given}
    return {"the number of operations": str(len(run.recording.ops)), **copied, **inputs}


def _digest(tensor: Tensor) -> str:
    own = local(tensor, filled=True).detach()
    if own.is_meta or own.layout != torch.strided:
        return ""
    return blake2b(own.cpu().contiguous().flatten().view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def unlike(digests: Sequence[Mapping[str, str]], ranks: Sequence[Rank]) -> str:
    """Return a sentence on what other ranks have unlike rank 0 and should have alike; empty if there is nothing."""
    queries = [each.rows.get("W_q") for each in ranks]
    shares_input = len(set(queries)) == len(queries)  # else some ranks have the same heads, for inputs of their own
    found = {
        name: [rank for rank, each in enumerate(digests) if each.get(name) != digest]
        for name, digest in digests[0].items()
        if shares_input or not name.startswith(_INPUT)
    }
    said = [f"{name} (rank {spans(others)})" for name, others in found.items() if others]
    return f"Ranks differ from rank 0 where they should be alike: {first_few(said, 4)}." if said else ""


def with_copies(ranks: Sequence[Rank]) -> tuple[Rank, ...]:
    """Return the ranks of a process group, with `kv_copied` where one with other queries has the same keys."""
    queries: dict[object, set[object]] = {}
    for each in ranks:
        queries.setdefault(each.rows.get("W_k"), set()).add(each.rows.get("W_q"))
    return tuple(
        replace(each, kv_copied="W_k" in each.rows and len(queries[each.rows["W_k"]]) > 1)
        for each in sorted(ranks, key=lambda each: each.rank)
    )


def with_whole_shapes(trace: Trace, run: Run, module: nn.Module) -> Trace:
    """Return the trace with the shape over all ranks for each stage of which this rank has some heads."""
    parameters = parameters_of(module)
    if not any(map(piece_of, parameters.values())):
        return trace
    every = zip(trace.attentions, run.attentions, shards_of(run, parameters), strict=True)
    return replace(
        trace,
        attentions=tuple(
            replace(
                report,
                stages=tuple(
                    replace(stage, whole=_whole_shape(stage, shards) or _before_scattering(stage, attention, run))
                    for stage in report.stages
                ),
            )
            for report, (attention, _), shards in every
        ),
    )


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
        shards = {part.name: _shard(part, parameters[part.parameter.name]) for part in matrices}
        every.append({name: shard for name, shard in shards.items() if shard is not None and names.count(name) == 1})
    return every


def _shard(part: Part, parameter: Tensor) -> Shard | None:
    used, piece = part.parameter.tensor, piece_of(parameter)
    if len(used.shape) != 2 or part.inner is None:
        return None
    dim = int(part.inner[1] == used.stride[0] and part.inner[0] == used.shape[0])
    rows = torch.cat([*part.heads.values()])
    places = coordinates(rows[rows >= 0], used)[dim]
    size, start, whole = used.shape[dim], 0, used.shape[dim]
    if piece is not None:
        start, whole = piece.start[dim], piece.whole[dim]
        if local(parameter).shape[dim] < size:  # FSDP gathered the part of this rank's heads from several ranks
            start -= start % size
    return Shard((start + int(places.min()), start + int(places.max()) + 1), size, whole)


def waits_at(frame: FrameType | None) -> tuple[Site, str]:
    """Return the instructions of a frame and its callers, and the user's line; no line outside torch.distributed."""
    site: Site = []
    while frame is not None:
        site += [frame.f_code, frame.f_lasti]
        frame = frame.f_back
    is_inside = any(os.path.join("torch", "distributed", "") in code.co_filename for code in site[::2])
    return site, place_of_site(site)[0] if is_inside else ""

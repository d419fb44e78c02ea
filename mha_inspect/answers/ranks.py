"""Describe the part of the attentions that a rank of a process group has, and its place in the whole."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import blake2b
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..graph.attention import Attention
from ..naming.named_run import NamedRun
from ..naming.parameters import parts_of
from ..naming.pattern import dims_of
from ..naming.projection import Part, coordinates
from ..record.arguments import argument_names, tensors_in
from ..record.ranks import is_copied, local, needs_ranks, parameters_of, piece_of, wraps
from ..record.site import Site, place_of_site
from ..reports.check import Finding
from ..reports.trace import Rank, Stage, Trace
from ..running.subject import Run, Subject, run_and_record, wait_for_result
from ..text import first_few, spans

_SEED = "Seed it alike on every rank, or broadcast it from rank 0."
_UNLIKE = {
    "code": ("The code of {} on rank {} differs from rank 0.", "Copy one version to every rank."),
    "names": ("The {} of rank {} differ from rank 0.", ""),
    "weights": ("Every rank has a copy of {}, and the copy of rank {} differs from rank 0.", _SEED),
    "plain": ("{} of rank {} differs from rank 0. It is no DTensor, so it may be meant.", _SEED),
    "inputs": ("The ranks compute different heads of one input, and {} of rank {} differs from rank 0.", _SEED),
    "operations": (
        "The number of {} of rank {} differs from rank 0, on tensors of the same shapes.",
        "If a rank skips a collective, the other ranks wait for it forever.",
    ),
}
"""Kinds of digests, to the sentence about names and ranks that differ, and the fix."""
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
            "would have to run it too. Use trace or params, or give the module as it is before sharding."
        )


def digests_of(run: Run, subject: Subject) -> dict[str, Any]:
    """Return digests of what ranks should have alike, by kind and name, and the shapes and heads of this rank.

    Inputs that may be a piece of the whole are left out, and plain parameters where no parameter is a DTensor.
    """
    ops, parameters, kinds = run.recording.ops, parameters_of(subject.module), map(type, subject.module.modules())
    given = dict(tensors_in(argument_names(subject.module, subject.args, subject.kwargs)))
    copied = {name: parameter for name, parameter in parameters.items() if is_copied(parameter)}
    # Beside collectives a plain matrix and its bias may be cut by hand, e.g. a rank's own experts.
    plain = [name for name, each in copied.items() if not wraps([type(each)]) and any(op.is_collective for op in ops)]
    owners = {name.rpartition(".")[0] for name, each in parameters.items() if each.dim() > 1}
    plain = [name for name in plain if len(plain) == len(parameters) or name.rpartition(".")[0] in owners]
    begins = run.attentions[0][0].softmax.index if run.attentions else 0
    moves = (op for op in ops[:begins] if op.is_collective and "reduce" not in op.base_name)
    is_piece = any(run.graph.inputs_of(tensor) for op in moves for tensor in op.inputs)
    queries = next(iter(shards_of(run, parameters)), {}).get("W_q")
    return {
        "code": _digests_of_code(subject.module),
        "names": {"names of parameters": _digest_of(parameters), "classes": _digest_of(kinds)},
        "weights": {name: _digest(weight) for name, weight in copied.items() if name not in plain},
        "plain": {name: _digest(copied[name]) for name in plain if len(plain) < len(parameters)},
        "inputs": {name: _digest(each) for name, each in given.items() if is_copied(each) and not is_piece},
        "operations": {"operations": str(len(ops))},
        "shapes": [list(local(tensor).shape) for tensor in (*parameters.values(), *given.values())],
        "heads": None if queries is None else queries.rows,
    }


def _digests_of_code(module: nn.Module) -> dict[str, str]:
    """Return a digest of each file of Python code of the module's classes, and of the user's code, by module."""
    classes = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    loaded = {name: Path(getattr(each, "__file__", None) or "") for name, each in [*sys.modules.items()]}
    library = sysconfig.get_path("stdlib") + os.sep
    installed = {name for name, file in loaded.items() if "-packages" in str(file) or str(file).startswith(library)}
    compared = ((name, loaded[name]) for name in loaded if name in classes or name not in installed)
    return {name: _digest_of(file.read_bytes()) for name, file in compared if file.is_file()}


def _digest_of(content: Iterable[object]) -> str:
    content = content if isinstance(content, bytes) else str([*content]).encode()
    return blake2b(content, digest_size=8).hexdigest()


def _digest(tensor: Tensor) -> str:
    own = local(tensor, filled=True).detach()
    if own.is_meta or own.layout != torch.strided:
        return ""
    return blake2b(own.cpu().contiguous().flatten().view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def unlike(every: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield what other ranks have unlike rank 0 and should have alike, from the digests of all ranks.

    Raises `InputError` if a rank has other code: what it computed is no answer.
    """
    heads = [each["heads"] for each in every]
    has_one_shape = all(each["shapes"] == every[0]["shapes"] for each in every)

    def is_own(name: str, digest: str) -> bool:
        """Return whether the ranks with an input may have it alone: they have all heads among them."""
        with_it = [rank for rank, each in zip(heads, every, strict=True) if each["inputs"].get(name) == digest]
        return None in heads or all(each in with_it for each in heads)

    for kind, (sentence, fix) in _UNLIKE.items():
        first, *others = (each[kind] for each in every)
        differ = [{name for name in first if other.get(name, first[name]) != first[name]} for other in others]
        if kind == "inputs":
            pairs = zip(differ, others, strict=True)
            differ = [{name for name in names if not is_own(name, other[name])} for names, other in pairs]
        names = [name for name in first if any(name in other for other in differ)]
        if not names or (kind == "operations" and not has_one_shape):
            continue
        ranks = spans(rank for rank, other in enumerate(differ, 1) if other)
        evidence = f"{names[0]} by rank: {first_few([str(each[kind].get(names[0])) for each in every], 4)}."
        said = sentence.format(first_few(names, 4), ranks)
        if kind == "code":
            raise InputError(f"{said} {fix}")
        yield Finding("ranks", said, evidence, sure=kind not in ("names", "plain"), fix=fix)


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
    rows = torch.cat([*part.heads.values()])
    places = coordinates(rows[rows >= 0], used)[dim]
    size, start, whole = used.shape[dim], 0, used.shape[dim]
    if piece is not None:
        start, whole = piece.start[dim], piece.whole[dim]
        if local(parameter).shape[dim] < size:  # FSDP gathered the part of this rank's heads from several ranks
            start -= start % size
    return Shard((start + int(places.min()), start + int(places.max()) + 1), size, whole, dim)


def stands_at(frame: FrameType | None, sleep: str) -> tuple[object, str | None, bool]:
    """Return where a frame and its callers are, the user's line, and whether that waits for other ranks.

    No line outside torch.distributed and a recorded forward, unless there is a `sleep`. It is empty after the forward.
    """
    site: Site = []
    while frame is not None:
        site += [frame.f_code, frame.f_lasti]
        frame = frame.f_back
    if wait_for_result.__code__ in site[::2]:
        return site, "", True
    waits = any(os.path.join("torch", "distributed", "") in code.co_filename for code in site[::2])
    if waits or run_and_record.__code__ in site[::2]:
        return site, place_of_site(site)[0], waits
    return ((site, sleep), place_of_site(site)[0], False) if sleep else (site, None, False)

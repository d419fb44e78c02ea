"""params() of a file: the tensors of a checkpoint, read by their headers, and what they are for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SpecError
from ...files.attentions import StoredProjection, find_attentions
from ...files.checkpoint import Checkpoint, read_checkpoint
from ...files.stored import StoredTensor
from ...reports.common import Environment, LayerInfo
from ...reports.params import HeadNorms, HeadSlice, Parameter, ParametersTotal, ParamsReport, StoredAttention
from ...text import did_you_mean, first_few, listed, plural, shown
from .known import Known

if TYPE_CHECKING:
    from torch import nn

    from ...layers.spec import Show
    from ...running.subject import Subject
    from .heads import Numbers

_SHOWN = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What of config.json is said above the table."""


def params_of_checkpoint(
    path: Path,
    *,
    num_heads: int | None = None,
    per_head: bool = False,
    show: Show | None = None,
    norms: bool = False,
    module: str = "",
    like: Subject | nn.Module | None = None,
) -> ParamsReport:
    """Return the tensors of a checkpoint. None is read but for what `show` and `norms` ask, and one at a time for it.

    Args:
        path: a file, an index of shards, or a folder.
        num_heads: heads of its attentions, where it is known.
        per_head: whether to show each head's rows and columns, where the head count is known.
        show: whether statistics and values are shown.
        norms: whether to measure how large each head's part of each matrix is.
        module: path of the module whose tensors are meant; all where it is empty.
        like: what it is held against: a module, and where it comes with arguments its run tells what tensors are for.

    Raises:
        InputError: there are no tensors, a file is damaged, or no name in it is one of `like`.
        UnsafeFileError: a file is compressed, or could only be opened by running code in it.
        SpecError: the shapes do not allow the head count that was given, or there is no such module.
    """
    checkpoint = read_checkpoint(path)
    tensors = checkpoint.tensors
    known = _by_names(checkpoint, num_heads, per_head)
    if like is not None:
        known = _by_run(checkpoint, known, like)
    if module:
        tensors = _below(module, tensors)
        of = plural(len(checkpoint.tensors), "tensor")
        known = known.within(tensors, f"Those of {shown(module)} alone: {len(tensors)} of {of}.")
    whole = sum(tensor.numel for tensor in tensors.values())
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    sizes: tuple[HeadNorms, ...] = ()
    unusual: tuple[str, ...] = ()
    if norms or (show is not None and show.stats):
        from .heads import look_at

        sizes, unusual = look_at((own.module, read) for own, read in zip(known.attentions, known.reading, strict=True))
    return ParamsReport(
        environment=Environment(torch="", device="", dtype=dtypes.most_common(1)[0][0], seed=None),
        layer=LayerInfo(path.resolve().name, _numbers(checkpoint.config)),
        parameters=tuple(_parameter(name, tensor, known, whole, per_head, show) for name, tensor in tensors.items()),
        total=ParametersTotal(whole, sum(tensor.nbytes for tensor in tensors.values()), "", None),
        notes=(*checkpoint.notes, *known.notes, *unusual),
        head_norms=sizes if norms else None,
        stored_attentions=known.attentions,
        like=known.like,
    )


def _below(module: str, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return what is below one path. Raises `SpecError` where nothing is."""
    own = {name: tensor for name, tensor in tensors.items() if name == module or name.startswith(f"{module}.")}
    if not own:
        each = (name.split(".") for name in tensors)
        paths = dict.fromkeys(".".join(pieces[:at]) for pieces in each for at in range(1, len(pieces) + 1))
        there = first_few([path for path in paths if "." not in path], 8)
        raise SpecError(
            f"module {shown(module)} holds no tensor of the file, which has {there}.{did_you_mean(module, paths)}"
        )
    return own


def _by_names(checkpoint: Checkpoint, num_heads: int | None, per_head: bool) -> Known:
    found = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
    attentions = tuple(own.stored for own in found)
    if num_heads is not None and found and not any(own.num_heads == num_heads for own in attentions):
        allowed = sorted({n for own in attentions for n in (own.fits or (own.num_heads,)) if n is not None})
        where, counts = shown(checkpoint.path), listed(list(map(str, allowed)))
        raise SpecError(f"num_heads {num_heads} does not fit the shapes in {where}: {counts} do.")
    heads: dict[str, list[HeadSlice]] = {}
    for projection in (one for own in found for one in own.projections) if per_head else ():
        heads.setdefault(projection.tensor, []).extend(projection.slices(checkpoint.tensors[projection.tensor].shape))
    return Known(
        attentions,
        {name: role for own in found for name, role in own.roles.items()},
        {name: tuple(own) for name, own in heads.items() if own},
        tuple(_notes(checkpoint, attentions, num_heads)),
        tuple(partial(_read, own.projections, checkpoint.tensors) for own in found),
    )


def _read(projections: Sequence[StoredProjection], tensors: Mapping[str, StoredTensor]) -> Numbers:
    from .heads import numbers_of

    return numbers_of(projections, tensors)


def _by_run(checkpoint: Checkpoint, by_names: Known, like: Subject | nn.Module) -> Known:
    """Return what the run of a module tells, where it has arguments; else what names tell, and whether it fits."""
    import torch

    from ...running.subject import Subject
    from .like import held_against

    own = like if isinstance(like, Subject) else Subject(like, (), {})
    seen = None
    if own is like:
        with torch.no_grad(), own.replaying(own.state()):
            seen = own.recorded(keep=True)
    counts = {found.module: found.num_heads for found in by_names.attentions if found.num_heads is not None}
    found = held_against(checkpoint.tensors, own.module, seen, own.name, counts if checkpoint.config else {})
    return replace(by_names, like=found.like) if seen is None else found


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: config.get(name) for name in _SHOWN}
    return {name: shown(value) if isinstance(value, str) else value for name, value in found.items() if _plain(value)}


def _plain(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and 0 <= value < 2**63)


def _parameter(
    name: str, tensor: StoredTensor, known: Known, whole: int, per_head: bool, show: Show | None
) -> Parameter:
    role = known.roles.get(name)
    stats = values = None
    if show is not None and (show.stats or show.values) and tensor.numel and tensor.read is not None:
        from ...files.tensors import read_stored
        from ...measure.statistics import stats_of, values_of

        numbers = read_stored(tensor, shown(name))
        stats = stats_of(numbers) if show.stats and not numbers.is_complex() else None
        values = values_of(numbers, show) if show.values else None
    return Parameter(
        name=name,
        shape=tensor.shape,
        axes=(role.axes if role is not None else "") or " ".join(map(str, tensor.shape)),
        dtype=tensor.dtype,
        numel=tensor.numel,
        nbytes=tensor.nbytes,
        share=tensor.numel / whole if whole else 0.0,
        role="" if role is None else role.text,
        heads=known.heads.get(name) if per_head else None,
        stats=stats,
        values=values,
    )


def _notes(checkpoint: Checkpoint, attentions: Iterable[StoredAttention], asked: int | None) -> list[str]:
    attentions = list(attentions)
    if not attentions:
        return ["No tensors have the names of an attention's projections: what they are for is not known."]
    notes = ["What the tensors are for is told by their names and shapes: nothing was run."]
    for fits in dict.fromkeys(own.fits for own in attentions if own.fits):
        number = sum(own.fits == fits for own in attentions)
        notes.append(
            f"num_heads is not in the file: {listed(list(map(str, fits)))} fit the shapes of "
            f"{plural(number, 'attention')}, and it would load silently with any of them. Give it: --num-heads N."
        )
    if asked is None and checkpoint.config and any(own.num_heads for own in attentions):
        notes.append("Head counts are those of config.json, or the only ones that the shapes allow.")
    without = sum(not own.fits and own.num_heads is None for own in attentions)
    if without:
        notes.append(f"No number of heads fits the shapes of {plural(without, 'attention')}.")
    return notes

"""params() of a file: the tensors of a checkpoint, read by their headers, and what they are for by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..checkpoints.attentions import Role, find_attentions
from ..checkpoints.checkpoint import Checkpoint, read_checkpoint
from ..checkpoints.stored import StoredTensor
from ..errors import SpecError
from ..reports.common import Environment, LayerInfo, Stats
from ..reports.params import HeadNorms, Parameter, ParametersTotal, ParamsReport, StoredAttention
from ..text import listed, plural, shown, spans

_SHOWN = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What of config.json is said above the table."""


def params_of_checkpoint(
    path: Path, *, num_heads: int | None = None, per_head: bool = False, stats: bool = False, norms: bool = False
) -> ParamsReport:
    """Return the tensors of a checkpoint. None is read but for `stats` and `norms`, and one at a time for these.

    Args:
        path: a file, an index of shards, or a folder.
        num_heads: heads of its attentions, where it is known.
        per_head: whether to show each head's rows and columns, where the head count is known.
        stats: whether statistics are shown.
        norms: whether to measure how large each head's part of each matrix is.

    Raises:
        InputError: there are no tensors, or a file is damaged.
        UnsafeFileError: a file is compressed, or could only be opened by running code in it.
        SpecError: the shapes do not allow the head count that was given.
    """
    checkpoint = read_checkpoint(path)
    attentions, roles = find_attentions(checkpoint.tensors, checkpoint.config, num_heads)
    if num_heads is not None and attentions and not any(own.num_heads == num_heads for own in attentions):
        allowed = sorted({n for own in attentions for n in (own.fits or (own.num_heads,)) if n is not None})
        raise SpecError(
            f"num_heads {num_heads} does not fit the shapes in {shown(path)}: {listed(list(map(str, allowed)))} do."
        )
    tensors = checkpoint.tensors
    whole = sum(tensor.numel for tensor in tensors.values())
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    parameters = tuple(
        _parameter(name, tensor, roles.get(name), whole, per_head or norms, stats) for name, tensor in tensors.items()
    )
    measured = _norms(parameters, tensors) if norms else None
    return ParamsReport(
        environment=Environment(torch="", device="", dtype=dtypes.most_common(1)[0][0], seed=None),
        layer=LayerInfo(path.resolve().name, _numbers(checkpoint.config)),
        parameters=parameters if per_head else tuple(replace(parameter, heads=None) for parameter in parameters),
        total=ParametersTotal(whole, sum(tensor.nbytes for tensor in tensors.values()), "", None),
        notes=(*checkpoint.notes, *_notes(checkpoint, attentions, num_heads), *_unusual(measured or ())),
        head_norms=measured,
        stored_attentions=attentions,
    )


def _numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: config.get(name) for name in _SHOWN}
    return {name: shown(value) if isinstance(value, str) else value for name, value in found.items() if _plain(value)}


def _plain(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and 0 <= value < 2**63)


def _parameter(
    name: str, tensor: StoredTensor, role: Role | None, whole: int, per_head: bool, stats: bool
) -> Parameter:
    axes = role.axes if role is not None else ""
    return Parameter(
        name=name,
        shape=tensor.shape,
        axes=axes or " ".join(map(str, tensor.shape)),
        dtype=tensor.dtype,
        numel=tensor.numel,
        nbytes=tensor.nbytes,
        share=tensor.numel / whole if whole else 0.0,
        role="" if role is None else role.text,
        heads=role.heads if per_head and role is not None and role.axes else None,
        stats=_stats(name, tensor) if stats else None,
    )


def _stats(name: str, tensor: StoredTensor) -> Stats | None:
    if not tensor.numel or tensor.offset is None:
        return None
    from ..measure.statistics import stats_of
    from ..targets.files import read_stored

    numbers = read_stored(tensor, shown(name))
    return None if numbers.is_complex() else stats_of(numbers)


def _norms(parameters: tuple[Parameter, ...], tensors: Mapping[str, StoredTensor]) -> tuple[HeadNorms, ...]:
    from ..targets.files import read_stored
    from .head_norms import head_norms

    whole = [parameter for parameter in parameters if tensors[parameter.name].offset is not None]
    return head_norms(lambda name: read_stored(tensors[name], shown(name)), whole)


def _unusual(norms: tuple[HeadNorms, ...]) -> list[str]:
    """Return a sentence for each matrix with heads that are zero, or hold what is no number."""
    said = []
    for own in norms:
        for heads, what in (
            ([head for head, norm in enumerate(own.norms) if norm == 0], "zero: dead"),
            ([head for head, norm in enumerate(own.norms) if not isfinite(norm)], "not finite: NaN or inf is in them"),
        ):
            if heads:
                said.append(f"{own.part} of {shown(own.owner) or 'the file'}: heads {spans(heads)} are {what}.")
    return said


def _notes(checkpoint: Checkpoint, attentions: tuple[StoredAttention, ...], asked: int | None) -> list[str]:
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

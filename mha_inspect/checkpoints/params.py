"""List the tensors of a checkpoint from its headers: their roles, and on request their numbers.

Headers are read without torch. Functions that read numbers or run a module import it themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.attentions import Role
from ..files.checkpoint import read_checkpoint
from ..files.tensors import StoredTensor, read_stored
from ..reports.common import Environment, LayerInfo, Stats, Values
from ..reports.params import Parameter, ParametersTotal, ParamsReport
from ..text import shown
from .file_roles import FileRoles, roles_by_names

if TYPE_CHECKING:
    from torch import nn

    from ..layers.spec import Show
    from ..running.subject import Subject

_SHOWN = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Entries of config.json above the table."""
_NO_ROLE = Role("", "")


def params_of_checkpoint(
    path: Path,
    *,
    num_heads: int | None = None,
    per_head: bool = False,
    show: Show | None = None,
    like: Subject | nn.Module | None = None,
) -> ParamsReport:
    """Return the tensors of a checkpoint. Numbers are read only for `show`, one tensor at a time.

    The path is of a file, an index of shards, or a folder. `per_head` shows each head's rows and columns. `like` is
    a module to compare with; a subject is also run, to find the roles of tensors.

    Raises:
        InputError: there are no tensors, or a file is damaged.
        UnsafeFileError: a file is compressed, or could only be opened by running code in it.
        SpecError: the shapes do not allow the head count that was given.
    """
    checkpoint = read_checkpoint(path)
    tensors = checkpoint.tensors
    if like is None:
        file_roles = roles_by_names(checkpoint, num_heads)
    else:
        from .beside_module import roles_beside_module

        file_roles = roles_beside_module(checkpoint, num_heads, like)
    notes = [*checkpoint.notes, *file_roles.notes]
    if show is not None and show.stats:
        notes += _unusual_heads(file_roles, tensors)
    numel = 0
    nbytes = 0
    dtypes = Counter[str]()
    for tensor in tensors.values():
        numel += tensor.numel
        nbytes += tensor.nbytes
        dtypes[tensor.dtype] += 1
    most_frequent, _ = dtypes.most_common(1)[0]
    parameters = []
    for name, tensor in tensors.items():
        role = file_roles.roles.get(name, _NO_ROLE)
        parameters.append(_parameter(name, tensor, role, whole=numel, per_head=per_head, show=show))
    return ParamsReport(
        environment=Environment(torch="", device="", dtype=most_frequent, seed=None),
        layer=LayerInfo(path.resolve().name, dict(_shown_config(checkpoint.config))),
        parameters=tuple(parameters),
        total=ParametersTotal(numel, nbytes, "", None),
        notes=tuple(notes),
        stored_attentions=file_roles.attentions,
        like=file_roles.like,
    )


def _shown_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries above the table: texts, and numbers that fit into 64 bits."""
    for name in _SHOWN:
        value = config.get(name)
        if isinstance(value, str):
            yield name, shown(value)
        elif isinstance(value, int) and 0 <= value < 2**63:
            yield name, value


def _unusual_heads(file_roles: FileRoles, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield a sentence for each unusual finding in the heads of the attentions, one attention at a time."""
    from .head_numbers import numbers_of, unusual_heads

    for stored in file_roles.attentions:
        roles = {}
        for name in stored.parameters:
            if name in file_roles.roles:
                roles[name] = file_roles.roles[name]
        yield from unusual_heads(stored.module, numbers_of(roles, tensors))


def _parameter(
    name: str,
    tensor: StoredTensor,
    role: Role,
    *,
    whole: int,
    per_head: bool,
    show: Show | None,
) -> Parameter:
    """Return a tensor with its role. `whole` is the number of elements in the file."""
    stats, values = _content(name, tensor, show)
    return Parameter(
        name=name,
        shape=tensor.shape,
        axes=role.axes or " ".join(str(size) for size in tensor.shape),
        dtype=tensor.dtype,
        numel=tensor.numel,
        nbytes=tensor.nbytes,
        share=tensor.numel / whole if whole else 0.0,
        role=role.text,
        heads=role.heads if per_head and role.heads else None,
        stats=stats,
        values=values,
    )


def _content(name: str, tensor: StoredTensor, show: Show | None) -> tuple[Stats | None, Values | None]:
    """Return the statistics and the values of a tensor that were asked for; None for those that it has not."""
    if show is None or not (show.stats or show.values):
        return None, None
    if not tensor.numel or tensor.read is None:
        return None, None
    from ..measure.content import stats_of, values_of

    numbers = read_stored(tensor, shown(name))
    stats = stats_of(numbers) if show.stats and not numbers.is_complex() else None
    values = values_of(numbers, show) if show.values else None
    return stats, values

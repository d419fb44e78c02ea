"""A checkpoint held against a module: what it is for by the module's own run, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import InputError
from ...files.attentions import Role, fitting_counts
from ...files.tensors import StoredTensor
from ...reports.params import LikeModule, StoredAttention, StoredName
from ...text import shown

if TYPE_CHECKING:
    from torch import nn

    from ...naming.parameters import Projection
    from ...running.subject import Run


@dataclass(frozen=True)
class Known:
    """What the tensors of a file are for, by their names or by a run of the module that they are for."""

    attentions: tuple[StoredAttention, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By the names in the file."""
    notes: tuple[str, ...] = ()
    like: LikeModule | None = None


def held_against(
    tensors: Mapping[str, StoredTensor], module: nn.Module, run: Run | None, label: str, counts: Mapping[str, int]
) -> Known:
    """Compare the tensors of a file with those of a module, by name and shape, and name what they are for.

    Without a run of the module, which may be on meta, roles are not known. `label` is what it is called; `counts` are
    the head counts that names and config.json tell, by the path of the attention in the file.

    Raises `InputError` where no name of the module is in the file.
    """
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if hasattr(tensor, "data")}
    shapes = {name: tuple(tensor.data.shape) for name, tensor in state.items()}
    prefix = _prefix({*tensors}, {*state})
    inner = {name: prefix[1:] + name if prefix[:1] == "-" else name.removeprefix(prefix) for name in tensors}
    names = {name: of for name, of in inner.items() if of in state}
    if not names:
        there, wanted = (shown(next(iter(names), "none")) for names in (tensors, state))
        raise InputError(
            f"No name of {label} is among those of the file: it has {wanted}, the file {there}. "
            "Name the class that the file was saved from, or a part of it."
        )
    fits = {name: of for name, of in names.items() if tensors[name].shape == shapes[of]}
    tied = {id(state[of]) for of in names.values()}  # one that is tied to another need not be there itself
    like = LikeModule(
        label,
        prefix,
        len(fits),
        tuple(StoredName(of, shapes[of]) for of, tensor in state.items() if id(tensor) not in tied),
        tuple(StoredName(name, tensor.shape) for name, tensor in tensors.items() if name not in names),
        tuple(StoredName(name, tensors[name].shape, shapes[of]) for name, of in names.items() if name not in fits),
    )
    if run is None:
        return Known(like=like)
    from ...naming.parameter_words import roles_of
    from ...naming.parameters import projections

    in_file = {of: name for name, of in fits.items()}
    parameters = {id(parameter): of for of, parameter in module.named_parameters()}
    for name, of in fits.items():  # what is tied to another goes by the name that the run knows
        in_file.setdefault(parameters.get(id(state[of]), of), name)
    roles = {in_file[of]: role for of, role in roles_of(run).items() if of in in_file}
    notes = [f"What the tensors are for is read off a run of {label}."]
    if not run.attentions:
        notes.append("No attention was found in that run.")
    attentions = []
    for (attention, axes), parts in zip(run.attentions, projections(run), strict=True):
        used = dict.fromkeys(in_file[of] for part in parts for of in part.parameters if of in in_file)
        path = attention.module.removeprefix(prefix[1:]) if prefix[:1] == "-" else prefix + attention.module
        path, sizes = path.rstrip("."), (axes.num_heads, axes.num_kv_heads, axes.head_dim)
        stored = StoredAttention(path, tuple(used), *sizes, _fitting(parts))
        attentions.append(stored)
        if counts.get(path, axes.num_heads) != axes.num_heads:
            notes.append(f"{shown(path)} has {axes.num_heads} heads in {label}, and {counts[path]} by config.json.")
    if any(len(stored.fits) > 1 for stored in attentions):
        notes.append(f"Head counts are those of {label}: the file would load silently with any that fits.")
    return Known(
        tuple(attentions),
        {name: Role(role.axes, role.text, role.heads if role.is_part else ()) for name, role in roles.items()},
        tuple(notes),
        like,
    )


def _prefix(names: set[str], wanted: set[str]) -> str:
    """Return what stands before the names in the file and not in the module; with `-` before it the other way round.

    What makes most names agree, and of several the shortest: a model is saved alone, or inside of one with a head.
    """
    agreeing = {"": len(names & wanted)}
    for sign, longer, shorter in (("", names, wanted), ("-", wanted, names)):
        for name in longer:
            pieces = name.split(".")
            for at in range(1, min(len(pieces), 6)):
                if ".".join(pieces[at:]) in shorter:
                    prefix = f"{sign}{'.'.join(pieces[:at])}."
                    agreeing[prefix] = agreeing.get(prefix, 0) + 1
    return min(agreeing, key=lambda prefix: (-agreeing[prefix], len(prefix), prefix))


def _fitting(projections: list[Projection]) -> tuple[int, ...]:
    """Return the numbers of heads that the shapes of an attention allow."""
    widths = {own.part: own.shape[0] * own.shape[1] for own in projections if own.part.startswith("W")}
    if not {"W_q", "W_k", "W_v"} <= {*widths}:
        return ()
    return fitting_counts(widths["W_q"], widths["W_k"], widths["W_v"], widths.get("W_o", widths["W_q"]))

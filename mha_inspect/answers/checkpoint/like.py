"""Compare a checkpoint with a module: the roles of its tensors from the module's run, and the tensors that differ."""

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
    """The roles of a file's tensors, from their names or from a run of a module."""

    attentions: tuple[StoredAttention, ...] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    """By the names in the file."""
    notes: tuple[str, ...] = ()
    like: LikeModule | None = None


def compared_with(
    tensors: Mapping[str, StoredTensor], module: nn.Module, run: Run | None, label: str, counts: Mapping[str, int]
) -> Known:
    """Compare the tensors of a file with those of a module, by name and shape, and find their roles.

    Without a run of the module, roles are unknown. `label` is the module's name; `counts` are the head counts from
    names and config.json, by the path of the attention in the file.

    Raises `InputError` if no name of the module is in the file.
    """
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if hasattr(tensor, "data")}
    shapes = {name: tuple(tensor.data.shape) for name, tensor in state.items()}
    prefix = _prefix({*tensors}, {*state})
    inner = {name: prefix[1:] + name if prefix[:1] == "-" else name.removeprefix(prefix) for name in tensors}
    names = {name: of for name, of in inner.items() if of in state}
    if not names:
        there, wanted = (shown(next(iter(names), "none")) for names in (tensors, state))
        raise InputError(
            f"The file has no tensor name of {label}: the file has {there}, the module {wanted}. "
            "Give the class that the file was saved from, or a part of it."
        )
    fits = {name: of for name, of in names.items() if tensors[name].shape == shapes[of]}
    tied = {id(state[of]) for of in names.values()}  # of tied tensors, one in the file is enough
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
    for name, of in fits.items():  # a tied tensor gets the name that it has in the run
        in_file.setdefault(parameters.get(id(state[of]), of), name)
    roles = {in_file[of]: role for of, role in roles_of(run).items() if of in in_file}
    notes = [f"Roles come from a run of {label}."]
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
            notes.append(f"{shown(path)} has {axes.num_heads} heads in {label}, but {counts[path]} in config.json.")
    if any(len(stored.fits) > 1 for stored in attentions):
        notes.append(f"Head counts are from {label}. Every head count that fits would load without an error.")
    return Known(
        tuple(attentions),
        {name: Role(role.axes, role.text, role.heads if role.is_part else ()) for name, role in roles.items()},
        tuple(notes),
        like,
    )


def _prefix(names: set[str], wanted: set[str]) -> str:
    """Return the prefix of names in the file that the module's names lack; with `-` in front, the other way round.

    It is the prefix with most names in common, the shortest if several are equal. A model may be saved alone, or as a
    part of a larger one.
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
    widths = {each.part: each.shape[0] * each.shape[1] for each in projections if each.part.startswith("W")}
    if not {"W_q", "W_k", "W_v"} <= {*widths}:
        return ()
    return fitting_counts(widths["W_q"], widths["W_k"], widths["W_v"], widths.get("W_o", widths["W_q"]))

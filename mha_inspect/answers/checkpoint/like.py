"""A checkpoint held against a module: what it is for by the module's own run, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ...errors import InputError
from ...files.attentions import Role, fitting_counts
from ...files.stored import StoredTensor
from ...files.tensors import read_stored
from ...naming.parameter_words import roles_of
from ...naming.parameters import Projection, View, projections
from ...reports.params import LikeModule, StoredAttention, StoredName, WrongShape
from ...running.run import Run
from ...text import shown
from .heads import Numbers
from .known import Known


def held_against(
    tensors: Mapping[str, StoredTensor], module: nn.Module, seen: Run | None, label: str, counts: Mapping[str, int]
) -> Known:
    """Compare the tensors of a file with those of a module, by name and shape, and name what they are for.

    Args:
        tensors: of the file, by name.
        module: may be on meta.
        seen: a run of the module; without one roles are not known.
        label: what the module is called.
        counts: head counts that names and config.json tell, by the path of the attention in the file.

    Raises `InputError` where no name of the module is in the file.
    """
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if hasattr(tensor, "shape")}
    prefix = _prefix(list(tensors), list(state))
    inside = {name: _without(name, prefix) for name in tensors}
    report = _report(tensors, state, inside, prefix, label)
    if not report.matching and not report.wrong_shape:
        there, wanted = (shown(next(iter(names), "none")) for names in (tensors, state))
        raise InputError(
            f"No name of {label} is among those of the file: it has {wanted}, the file {there}. "
            "Name the class that the file was saved from, or a part of it."
        )
    if seen is None:
        return Known(like=report)
    primary = {id(parameter): name for name, parameter in module.named_parameters()}
    in_file = {of: name for name, of in inside.items() if of in state and _shape(state[of]) == tensors[name].shape}
    for name, tensor in state.items():  # what is tied to another goes by the name that the run knows
        if name in in_file and id(tensor) in primary:
            in_file.setdefault(primary[id(tensor)], in_file[name])
    known = {in_file[name]: role for name, role in roles_of(seen).items() if name in in_file}
    attentions, reading = [], []
    notes = [f"What the tensors are for is read off a run of {label}."]
    if not seen.attentions:
        notes.append("No attention was found in that run.")
    found = projections(seen)
    for number, (own_attention, names) in enumerate(seen.attentions):
        own = [one for one in found if one.attention == number]
        parameters = dict.fromkeys(in_file[name] for one in own for name in one.parameters if name in in_file)
        path = _with(own_attention.module, prefix)
        counted = (names.num_heads, names.num_kv_heads, names.head_dim)
        attentions.append(StoredAttention(path, tuple(parameters), *counted, _fits(own)))
        reading.append(partial(_read, own, in_file, tensors))
        if counts.get(path, names.num_heads) != names.num_heads:
            notes.append(f"{shown(path)} has {names.num_heads} heads in {label}, and {counts[path]} by config.json.")
    if any(len(own.fits) > 1 for own in attentions):
        notes.append(f"Head counts are those of {label}: the file would load silently with any that fits.")
    roles = {name: Role(role.axes, role.text) for name, role in known.items()}
    heads = {name: role.heads for name, role in known.items() if role.is_part}
    return Known(tuple(attentions), roles, heads, tuple(notes), tuple(reading), report)


def _report(
    tensors: Mapping[str, StoredTensor],
    state: Mapping[str, torch.Tensor],
    inside: Mapping[str, str],
    prefix: str,
    label: str,
) -> LikeModule:
    held = {own: name for name, own in inside.items()}
    there = {id(state[own]) for own in held if own in state}
    pairs = [(name, _shape(state[own])) for own, name in held.items() if own in state]
    return LikeModule(
        label,
        prefix,
        sum(tensors[name].shape == shape for name, shape in pairs),
        # One that is tied to another need not be there itself.
        tuple(
            StoredName(own, _shape(tensor))
            for own, tensor in state.items()
            if own not in held and id(tensor) not in there
        ),
        tuple(StoredName(name, tensors[name].shape) for own, name in held.items() if own not in state),
        tuple(WrongShape(name, tensors[name].shape, shape) for name, shape in pairs if tensors[name].shape != shape),
    )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def _prefix(names: list[str], own: list[str]) -> str:
    """Return what stands before the names in the file and not in the module; with `-` before it the other way round.

    What makes most names agree, and of several the shortest: a model is saved alone, or inside of one with a head.
    """
    there, wanted = set(names), set(own)
    candidates = {""}
    for longer, shorter, sign in ((names, wanted, ""), (own, there, "-")):
        for name in longer:
            pieces = name.split(".")
            candidates |= {
                sign + ".".join(pieces[:at]) + "."
                for at in range(1, min(len(pieces), 6))
                if ".".join(pieces[at:]) in shorter
            }
    return min(candidates, key=lambda prefix: (-sum(_without(name, prefix) in wanted for name in names), len(prefix)))


def _without(name: str, prefix: str) -> str:
    """Return the name in the module of a name in the file."""
    return prefix[1:] + name if prefix.startswith("-") else name.removeprefix(prefix)


def _with(path: str, prefix: str) -> str:
    """Return the path in the file of a path in the module."""
    return path.removeprefix(prefix[1:]) if prefix.startswith("-") else (prefix + path).rstrip(".")


def _fits(own: list[Projection]) -> tuple[int, ...]:
    """Return the numbers of heads that the shapes of an attention allow."""
    widths = {one.part: one.shape[0] * one.shape[1] for one in own if one.part in ("W_q", "W_k", "W_v", "W_o")}
    if not {"W_q", "W_k", "W_v"} <= {*widths}:
        return ()
    query, key, value = (widths[part] for part in ("W_q", "W_k", "W_v"))
    return fitting_counts(query, key, value, widths.get("W_o", query))


def _read(own: list[Projection], in_file: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> Numbers:
    """Read the parts of an attention by head, where the module's parameters have them."""
    contents: dict[str, torch.Tensor] = {}
    numbers: Numbers = {}
    for one in own:
        if one.is_whole and one.part != "b_o" and {*one.parameters} <= {*in_file}:
            for name in one.parameters:
                stored = tensors[in_file[name]]
                if name not in contents and stored.has_numbers:
                    contents[name] = read_stored(stored, shown(in_file[name]))
            if {*one.parameters} <= {*contents}:
                held = tuple((part, contents[part.parameter.name]) for part in one.parts)
                numbers[one.part] = View(one.shape, held).read()
    return numbers

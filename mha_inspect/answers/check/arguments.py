"""The arguments of a forward by name: which of them are tokens, with their batch and position dimensions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from inspect import BoundArguments, Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn

from ...call.guess import batch_axis_in_words, said_batch_first
from ...errors import InputError
from ...naming.named_run import NamedRun
from ...record.arguments import with_copies
from ...running.subject import Subject
from ...text import did_you_mean, shown
from .intent import Intent

_NO_SOURCE = re.compile(r"mask|position|type_ids|bias|cache|past|cos|sin|freqs", re.IGNORECASE)
"""Arguments of these names are not tokens."""
_OF_TARGET = re.compile(r"decoder|tgt|trg|target")
"""Arguments of these names are the sequence that an encoder-decoder continues."""
_POSITION = re.compile(r"(^|_)(pos|positions?|offset|past_len(gth)?)(_ids?)?$", re.IGNORECASE)
"""Arguments of these names are positions: `start_pos`, `input_pos`, `cache_position`, `position_ids`."""
_ROTATION = re.compile(r"cos|sin|freqs|rope|rotary|position_embeddings", re.IGNORECASE)
"""Arguments of these names are tables with a row for each position."""
CACHES = ("past_key_values", "past_key_value", "layer_past", "past", "kv_cache", "cache", "past_kv", "caches")
"""Usual names of the argument that takes the cache, which the forward returns second."""

_DECLARED = tuple(field.name for field in fields(Intent))
"""Names of what is declared in `Intent`, instead of given to the forward."""
_NOT_CACHE = re.compile(r"hidden_state|attention|pooler|logits|loss", re.IGNORECASE)
"""Outputs of these names are not caches."""


class Arguments:
    """The arguments of a forward by name, including those in **kwargs."""

    def __init__(self, subject: Subject) -> None:
        self._forward = f"{type(subject.module).__name__}.forward"
        bound = _bound(subject)
        self._signature = bound.signature
        self.parameters: Mapping[str, Parameter] = bound.signature.parameters
        self._others = next((name for name, p in self.parameters.items() if p.kind is Parameter.VAR_KEYWORD), "")
        self.values: dict[str, Any] = dict(bound.arguments)
        self.values |= self.values.pop(self._others, {})

    def require(self, name: str) -> None:
        """Raise `InputError`, listing the arguments of the forward, if the name is not one of them.

        A forward with `**kwargs` takes any name but one that looks like a typing mistake.
        """
        typo = not self._others or (name not in self.values and did_you_mean(name, self.parameters))
        if name not in self.parameters and typo:
            raise InputError(
                f"{self._forward} has no argument {shown(name)}. Its arguments: {', '.join(self.parameters) or 'none'}."
                f"{did_you_mean(name, self.parameters)}"
            )

    def is_missing(self, name: str) -> bool:
        """Return whether an argument that the forward requires is None in the call."""
        parameter = self.parameters.get(name)
        return parameter is not None and parameter.default is Parameter.empty and self.values.get(name) is None

    def is_free(self, name: str) -> bool:
        """Return whether an argument is None, in the call or by default."""
        return self.values.get(name, self.parameters[name].default) is None

    def of_call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with changes by name; every tensor is a copy that may be overwritten."""
        return with_copies(self.call(changes))

    def call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with changes by name."""
        values = {**self.values, **changes}
        given = {name: value for name, value in values.items() if name in self.parameters}
        if self._others:
            given[self._others] = {name: value for name, value in values.items() if name not in self.parameters}
        bound = BoundArguments(self._signature, given)
        return bound.args, bound.kwargs

    def piece(
        self,
        source: Source,
        start: int,
        stop: int,
        *,
        by_item: Collection[str] = (),
        first: int = 0,
        positions: str | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a call with the tokens from `start` to `stop` only.

        Masks keep the keys from `first` on. `by_item` names those that are `batch key`, as from `masks_by_item`: with
        as many items as tokens, masks of `query key` have the same sizes. Positions are advanced: those
        with a usual name, and the argument `positions`. A forward that takes `use_cache` is to return its cache.
        """
        values: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            is_position = name == positions or _POSITION.search(name) is not None
            if is_position and type(parameter.default) is int:
                values[name] = parameter.default
        values |= self.values
        if positions is not None and values.get(positions) is None:
            numbers = torch.arange(source.length, device=source.value.device)
            values[positions] = numbers[None] if "ids" in positions else numbers
        advanced = {name for name in values if _POSITION.search(name)} | {positions}
        changes = {}
        for name, value in values.items():
            cut = _advanced if name in advanced else partial(_part, name, is_by_item=name in by_item)
            changes[name] = cut(value, source, start, stop, first)
        if "use_cache" in self.parameters:
            changes["use_cache"] = True
        return changes

    def positions(self, *, unset: bool = False) -> dict[str, Any]:
        """Return the arguments that are positions by their names and have numbers; with `unset` those that are None."""
        positions = {}
        for name, parameter in self.parameters.items():
            value = self.values.get(name, parameter.default)
            is_wanted = value is None if unset else counts(value)
            if is_wanted and _POSITION.search(name):
                positions[name] = value
        return positions

    def starts_at_zero(self) -> bool:
        """Return whether an argument says that the first token has position 0."""
        return any(int(torch.as_tensor(value).min()) == 0 for value in self.positions().values())

    def from_start(self, source: Source, length: int) -> dict[str, Any]:
        """Return changes for a call without a past: with other tokens, `length` of them, at the first positions."""
        changes: dict[str, Any] = dict.fromkeys(name for name in CACHES if name in self.values)
        for name, value in self.positions().items():
            changes[name] = _first_positions(value, source.length, length)
        axis = source.positions or 0
        tokens = torch.cat([source.value] * (length // source.length + 1), axis).narrow(axis, 0, length)
        changes |= Source(source.names, tokens, source.batch, axis).others(slice(0, length), row=slice(None))
        return changes

    def uncut(self, source: Source) -> list[str]:
        """Return the arguments with a size for each token that `piece` leaves whole: no rule says how to cut them."""
        pieces = self.piece(source, 0, 1, by_item=())
        names = []
        for name, value in self.values.items():
            if not isinstance(value, Tensor) or source.length not in value.shape:
                continue
            if pieces[name].shape == value.shape:
                names.append(name)
        return names


def counts(value: Any) -> bool:
    """Return whether a value is a whole number or a tensor of whole numbers."""
    is_number = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return type(value) is int or (is_number and value.dtype != torch.bool)


def _bound(subject: Subject) -> BoundArguments:
    """Return the arguments by name, or by position if the signature has no names for them."""
    args, kwargs = subject.args, subject.kwargs
    try:
        bound = inspect.signature(subject.module.forward).bind(*args, **kwargs)
        if not any(bound.signature.parameters[name].kind is Parameter.VAR_POSITIONAL for name in bound.arguments):
            return bound
    except (TypeError, ValueError):
        pass
    places = [Parameter(f"input_{place}", Parameter.POSITIONAL_ONLY) for place in range(len(args))]
    return Signature([*places, *(Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs)]).bind(*args, **kwargs)


def require_apart(subject: Subject) -> None:
    """Raise `TypeError` if an argument of the call belongs into `Intent`: the forward does not take it."""
    stray = {name: value for name, value in subject.kwargs.items() if name in _DECLARED and _is_declared(value)}
    if not stray:
        return
    try:
        taken = inspect.signature(subject.module.forward).parameters
    except (TypeError, ValueError):  # a forward of C has no signature
        return
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    declared = {name: value for name, value in stray.items() if name not in taken}
    if declared:
        written = ", ".join(_written(name, value) for name, value in declared.items())
        raise TypeError(
            f"{type(subject.module).__name__}.forward takes no {' and no '.join(declared)}: "
            f"use intent=mha_inspect.Intent({written})."
        )


def _is_declared(value: object) -> bool:
    """Return whether `Intent` could have a value: a tensor is an argument of a forward."""
    return isinstance(value, (bool, int, str, nn.Module))


def _written(name: str, value: object) -> str:
    """Return a field as it is written in Python, `padding='mask'`; of a module its class."""
    return f"{name}={type(value).__name__ if isinstance(value, nn.Module) else repr(value)}"


class Source:
    """Arguments with the same tokens: their names, and their batch and position dimensions.

    `batch` is None without a batch; `positions` is None for an image.
    """

    def __init__(self, names: tuple[str, ...], value: Tensor, batch: int | None, positions: int | None) -> None:
        self.names, self.value, self.batch, self.positions = names, value, batch, positions
        self.length = 1 if positions is None else value.shape[positions]
        self.rows = 1 if batch is None else value.shape[batch]
        self.axes = [axis for axis in (batch, positions) if axis is not None]

    def at(self, row: int | slice, position: int | slice) -> tuple[Any, ...]:
        """Return the index of one token or a slice of tokens."""
        index = {self.batch: row, self.positions: position}
        return tuple(index.get(axis, slice(None)) for axis in range(self.value.dim()))

    def others(self, position: int | slice, *, by: float = 2.0, row: int | slice = 0) -> dict[str, Tensor]:
        """Return the arguments with other tokens in some batch items: random numbers of equal spread, or other ids.

        An image gets another corner.
        """
        value = self.value.detach()
        corner = (0, slice(None), slice(0, 2), slice(0, 2))[: value.dim()]
        index = corner if self.positions is None else self.at(row, position)
        changed = value.clone()
        if value.is_floating_point():
            spread = float(value.float().std()) or 1.0
            changed[index] = _random_numbers(value[index], spread, by)
        else:
            changed[index] = _exchanged_ids(value[index], torch.unique(value))
        return dict.fromkeys(self.names, changed)


def _random_numbers(like: Tensor, spread: float, by: float) -> Tensor:
    """Return random numbers of `by` times a spread in the form of a tensor, the same ones in every call."""
    draw = torch.Generator().manual_seed(1729)
    return (torch.randn(like.shape, generator=draw) * spread * by).to(like)


def _exchanged_ids(ids: Tensor, vocabulary: Tensor) -> Tensor:
    """Return another id of a vocabulary for each of these, the same ones in every call."""
    if len(vocabulary) < 2:
        vocabulary = torch.cat([vocabulary, vocabulary - 1])
    draw = torch.Generator().manual_seed(1729)
    place = torch.searchsorted(vocabulary, ids.contiguous())
    step = torch.randint(1, len(vocabulary), ids.shape, generator=draw).to(ids.device)
    return vocabulary[(place + step) % len(vocabulary)]


def sources_of(
    subject: Subject,
    values: Mapping[str, Any],
    intent: Intent,
    is_one_sequence: Callable[[Tensor], bool],
    embedded: Collection[str] = (),
) -> tuple[Source, ...]:
    """Return the arguments with tokens, equal ones grouped; the group that the output follows comes first.

    `is_one_sequence` is called only for a matrix of numbers: its result decides whether the matrix has a batch.
    `embedded` names the arguments that an embedding reads as ids.
    """
    groups: list[_Group] = []
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    flat = [value.dim() for value in tensors.values()][:1] == [2]
    for name, value in tensors.items():
        if name in (intent.padding, intent.cache):
            continue
        if not _has_tokens(name, value, first=not groups, flat=flat, is_embedded=name in embedded):
            continue
        group = next((group for group in groups if group.has(value)), None)
        if group is None:
            groups.append(_Group(value, [name]))
        else:
            group.names.append(name)
    sources = []
    for group in groups:
        batch, positions = _axes_of(group.value, subject, values, intent, is_one_sequence)
        sources.append(Source(tuple(group.names), group.value, batch, positions))
    return tuple(sorted(sources, key=_is_no_target))


@dataclass(frozen=True)
class _Group:
    """Arguments with equal tokens."""

    value: Tensor
    names: list[str]

    def has(self, value: Tensor) -> bool:
        """Return whether a tensor has the same tokens."""
        return self.value.shape == value.shape and torch.equal(self.value, value)


def _axes_of(
    value: Tensor,
    subject: Subject,
    values: Mapping[str, Any],
    intent: Intent,
    is_one_sequence: Callable[[Tensor], bool],
) -> tuple[int | None, int | None]:
    """Return the dimensions of the batch and of the positions of tokens; None where they have none."""
    if value.dim() > 3:
        return 0, None
    if value.dim() == 2 and value.is_floating_point() and intent.batch_axis is None:
        # A matrix out means tokens by features without a batch; otherwise these are batched sequences of samples.
        return (None, 0) if is_one_sequence(value) else (0, 1)
    batch, _ = batch_axis_of(subject, values, intent)
    return batch, 1 - batch


def _is_no_target(source: Source) -> bool:
    return not any(_OF_TARGET.match(name) for name in source.names)


def _first_positions(value: Any, before: int, length: int) -> Any:
    """Return the first positions in the form of others, which are for `before` tokens, or for the first of them."""
    if isinstance(value, Tensor) and value.shape[-1:] == (before,):
        return torch.arange(length).to(value).expand(*value.shape[:-1], -1).clone()
    return value * 0


def _advanced(value: Any, source: Source, start: int, stop: int, first: int) -> Any:
    """Return positions from `start` to `stop`, given those of all tokens, or that of the first; None stays None."""
    if isinstance(value, Tensor) and value.shape[-1:] == (source.length,):
        return value.narrow(-1, start, stop - start)
    return value + start - first if isinstance(value, Tensor) or type(value) is int else value


def masks_by_item(run: NamedRun) -> frozenset[str]:
    """Return the names of the inputs of a run that are `batch key`, by what its dataflow does with them."""
    names = set[str]()
    for named in run.recording.inputs:
        if len(named.tensor.shape) == 2 and any(axes.of(named.tensor) == "batch key" for _, axes in run.attentions):
            names.add(named.name)
    return frozenset(names)


def _part(name: str, value: Any, source: Source, start: int, stop: int, first: int, *, is_by_item: bool = False) -> Any:
    """Return the part of an argument for positions `start` to `stop`; a mask keeps the keys from `first` on."""
    is_rotation = _ROTATION.search(name) is not None
    if is_rotation and isinstance(value, (tuple, list)):
        return type(value)(_part(name, table, source, start, stop, first) for table in value)
    if not isinstance(value, Tensor):
        return value
    if name in source.names or ("type_ids" in name and value.shape == source.value.shape):
        return value[source.at(slice(None), slice(start, stop))]
    if "mask" in name or value.dtype == torch.bool or is_by_item:
        is_by_key = is_by_item and value.dim() == 2
        return _part_of_mask(value, source.length, slice(start, stop), first, has_queries=not is_by_key)
    return _rows_of_table(value, source.length, start, stop) if is_rotation else value


def _part_of_mask(mask: Tensor, length: int, queries: slice, first: int, *, has_queries: bool) -> Tensor:
    """Return a mask for some queries and the keys from `first` to the last of these queries: `... query key`.

    Dimensions of other sizes than the number of tokens stay whole.
    """
    if has_queries and mask.dim() > 1 and mask.shape[-2] == length:
        mask = mask[..., queries, :]
    return mask[..., first : queries.stop] if mask.shape[-1:] == (length,) else mask


def _rows_of_table(table: Tensor, length: int, start: int, stop: int) -> Tensor:
    """Return some rows of a table of rotations, `... position features`; the whole table if it has none for tokens."""
    for axis in reversed(range(table.dim() - 1)):
        if table.shape[axis] == length:
            return table.narrow(axis, start, stop - start)
    return table


def second_output(returned: Any) -> Any:
    """Return the second output of a forward, its cache; None without one."""
    for name in ("past_key_values", "past_key_value", "cache"):
        if getattr(returned, name, None) is not None:
            return getattr(returned, name)
    for value in _further_outputs(returned):
        # Without use_cache a layer may return None in place of its keys and values.
        is_blank = isinstance(value, (tuple, list)) and all(part is None for part in value)
        if value is not None and not is_blank:
            return value
    return None


def _further_outputs(returned: Any) -> list[Any]:
    """Return the outputs after the first; of a dict, those whose names are not of other things than a cache."""
    if isinstance(returned, dict):
        return [value for name, value in list(returned.items())[1:] if not _NOT_CACHE.search(name)]
    return list(returned[1:]) if isinstance(returned, (tuple, list)) else []


def _has_tokens(name: str, value: Tensor, *, first: bool, flat: bool, is_embedded: bool) -> bool:
    if _NO_SOURCE.search(name) or value.dim() < 2 or value.dtype == torch.bool:
        return False
    if value.is_floating_point():
        return value.dim() > 2 or first or flat
    return not value.is_complex() and value.dim() == 2 and (first or "id" in name or is_embedded)


def batch_axis_of(subject: Subject, values: Mapping[str, Any], intent: Intent) -> tuple[int, bool]:
    """Return the batch dimension of the tokens, and whether it is known rather than assumed."""
    if intent.batch_axis is not None:
        return intent.batch_axis, True
    if subject.batch_first is not None:
        return int(not subject.batch_first), True
    if (said := said_batch_first(subject.module)) is not None:  # of other modules it may be the layout inside
        return int(not said), type(subject.module).__module__.startswith("torch.nn.")
    if (in_words := batch_axis_in_words(subject.module, values)) is not None:
        return in_words[0], True
    return 0, any(isinstance(v, Tensor) and v.dim() == 2 and "ids" in name for name, v in values.items())

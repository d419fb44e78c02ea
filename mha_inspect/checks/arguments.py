"""The arguments of a forward by name: which of them are tokens, with their batch and position dimensions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import BoundArguments, Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn

from ..call.layout import batch_axis_in_words, said_batch_first
from ..errors import InputError
from ..naming.named_run import NamedRun
from ..record.arguments import with_copies
from ..running.subject import Subject
from ..text import did_you_mean, shown
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
        self._others = _name_of_kwargs(self.parameters)
        self.values: dict[str, Any] = dict(bound.arguments)
        self.values |= self.values.pop(self._others, {})

    def require(self, name: str) -> None:
        """Raise `InputError`, listing the arguments of the forward, if the name is not one of them.

        A forward with `**kwargs` takes any name but one that looks like a typing mistake.
        """
        if name in self.parameters:
            return
        meant = did_you_mean(name, self.parameters)
        is_new_name = name in self.values or not meant
        if self._others and is_new_name:
            return
        names = ", ".join(self.parameters) or "none"
        raise InputError(f"{self._forward} has no argument {shown(name)}. Its arguments: {names}.{meant}")

    def is_missing(self, name: str) -> bool:
        """Return whether an argument that the forward requires is None in the call."""
        parameter = self.parameters.get(name)
        if parameter is None or parameter.default is not Parameter.empty:
            return False
        return self.values.get(name) is None

    def is_free(self, name: str) -> bool:
        """Return whether an argument is None, in the call or by default."""
        return self.values.get(name, self.parameters[name].default) is None

    def of_call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with changes by name; every tensor is a copy that may be overwritten."""
        return with_copies(self.call(changes))

    def call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with changes by name."""
        given: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, value in {**self.values, **changes}.items():
            if name in self.parameters:
                given[name] = value
            else:
                others[name] = value
        if self._others:
            given[self._others] = others
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
        cut = _Cut(source, start, stop, first)
        changes = {}
        for name, value in self._with_positions(source, positions).items():
            if name == positions or _POSITION.search(name):
                changes[name] = cut.positions(value)
            else:
                changes[name] = cut.part(name, value, is_by_item=name in by_item)
        if "use_cache" in self.parameters:
            changes["use_cache"] = True
        return changes

    def _with_positions(self, source: Source, positions: str | None) -> dict[str, Any]:
        """Return the arguments of the call with all positions: default numbers, and those of `positions` from 0 on."""
        values: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            is_position = name == positions or _POSITION.search(name) is not None
            if is_position and type(parameter.default) is int:
                values[name] = parameter.default
        values |= self.values
        if positions is not None and values.get(positions) is None:
            numbers = torch.arange(source.length, device=source.value.device)
            values[positions] = numbers[None] if "ids" in positions else numbers
        return values

    def positions(self) -> dict[str, Any]:
        """Return the arguments that are positions by their names and have numbers."""
        positions = {}
        for name, value in self._named_as_positions().items():
            if counts(value):
                positions[name] = value
        return positions

    def unset_positions(self) -> list[str]:
        """Return the arguments that are positions by their names and are None."""
        return [name for name, value in self._named_as_positions().items() if value is None]

    def _named_as_positions(self) -> dict[str, Any]:
        """Return the arguments with a usual name of positions."""
        named = {}
        for name, parameter in self.parameters.items():
            if _POSITION.search(name):
                named[name] = self.values.get(name, parameter.default)
        return named

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


def _name_of_kwargs(parameters: Mapping[str, Parameter]) -> str:
    """Return the name of `**kwargs`; empty if the forward has none."""
    for name, parameter in parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            return name
    return ""


def counts(value: Any) -> bool:
    """Return whether a value is a whole number or a tensor of whole numbers."""
    if not isinstance(value, Tensor):
        return type(value) is int
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _bound(subject: Subject) -> BoundArguments:
    """Return the arguments by name, or by position if the signature has no names for them."""
    args, kwargs = subject.args, subject.kwargs
    try:
        bound = inspect.signature(subject.module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return _by_place(args, kwargs)
    parameters = bound.signature.parameters
    for name in bound.arguments:
        if parameters[name].kind is Parameter.VAR_POSITIONAL:
            return _by_place(args, kwargs)
    return bound


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
    """Return arguments that are named by their places, `input_0`, and those by keyword after them."""
    parameters = []
    for place in range(len(args)):
        parameters.append(Parameter(f"input_{place}", Parameter.POSITIONAL_ONLY))
    for name in kwargs:
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY))
    return Signature(parameters).bind(*args, **kwargs)


def require_apart(subject: Subject) -> None:
    """Raise `TypeError` if an argument of the call belongs into `Intent`: the forward does not take it."""
    stray: dict[str, Any] = {}
    for name, value in subject.kwargs.items():
        if name in _DECLARED and _is_declared(value):
            stray[name] = value
    if not stray:
        return
    try:
        taken = inspect.signature(subject.module.forward).parameters
    except (TypeError, ValueError):  # a forward of C has no signature
        return
    if _name_of_kwargs(taken):
        return
    declared = {name: value for name, value in stray.items() if name not in taken}
    if declared:
        names = " and no ".join(declared)
        written = ", ".join(_written(name, value) for name, value in declared.items())
        raise TypeError(
            f"{type(subject.module).__name__}.forward takes no {names}: use intent=mha_inspect.Intent({written})."
        )


def _is_declared(value: object) -> bool:
    """Return whether `Intent` could have a value: a tensor is an argument of a forward."""
    return isinstance(value, (bool, int, str, nn.Module))


def _written(name: str, value: object) -> str:
    """Return a field as it is written in Python, `padding='mask'`; of a module its class."""
    if isinstance(value, nn.Module):
        return f"{name}={type(value).__name__}"
    return f"{name}={value!r}"


class Source:
    """Arguments with the same tokens: their names, and their batch and position dimensions.

    `batch` is None without a batch; `positions` is None for an image.
    """

    def __init__(self, names: tuple[str, ...], value: Tensor, batch: int | None, positions: int | None) -> None:
        self.names = names
        self.value = value
        self.batch = batch
        self.positions = positions
        self.length = 1 if positions is None else value.shape[positions]
        self.rows = 1 if batch is None else value.shape[batch]
        self.axes = [axis for axis in (batch, positions) if axis is not None]

    def at(self, row: int | slice, position: int | slice) -> tuple[Any, ...]:
        """Return the index of one token or a slice of tokens."""
        index: list[Any] = [slice(None)] * self.value.dim()
        if self.batch is not None:
            index[self.batch] = row
        if self.positions is not None:
            index[self.positions] = position
        return tuple(index)

    def others(self, position: int | slice, *, by: float = 2.0, row: int | slice = 0) -> dict[str, Tensor]:
        """Return the arguments with other tokens in some batch items: random numbers of equal spread, or other ids.

        An image gets another corner.
        """
        value = self.value.detach()
        index = self._corner() if self.positions is None else self.at(row, position)
        changed = value.clone()
        if value.is_floating_point():
            spread = float(value.float().std()) or 1.0
            changed[index] = random_numbers(value[index], spread, by)
        else:
            changed[index] = exchanged_ids(value[index], torch.unique(value))
        return dict.fromkeys(self.names, changed)

    def _corner(self) -> tuple[Any, ...]:
        """Return the index of a corner of an image, `batch channels height width`, or of fewer dimensions."""
        corner = (0, slice(None), slice(0, 2), slice(0, 2))
        return corner[: self.value.dim()]


def random_numbers(like: Tensor, spread: float, by: float) -> Tensor:
    """Return random numbers of `by` times a spread in the form of a tensor, the same ones in every call."""
    draw = torch.Generator().manual_seed(1729)
    return (torch.randn(like.shape, generator=draw) * spread * by).to(like)


def exchanged_ids(ids: Tensor, vocabulary: Tensor) -> Tensor:
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
    first_is_flat = bool(tensors) and next(iter(tensors.values())).dim() == 2
    for name, value in tensors.items():
        if name in (intent.padding, intent.cache):
            continue
        if not _has_tokens(name, value, first=not groups, flat=first_is_flat, is_embedded=name in embedded):
            continue
        group = _group_with(groups, value)
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


def _group_with(groups: Sequence[_Group], value: Tensor) -> _Group | None:
    """Return the first group with the same tokens; None without one."""
    for group in groups:
        if group.has(value):
            return group
    return None


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


def masks_by_item(run: NamedRun) -> frozenset[str]:
    """Return the names of the inputs of a run that are `batch key`, by what its dataflow does with them."""
    names = set[str]()
    attentions = run.distinct.run.attentions
    for named in run.recording.inputs:
        if len(named.tensor.shape) != 2:
            continue
        if any(axes.of(named.tensor) == "batch key" for _, axes in attentions):
            names.add(named.name)
    return frozenset(names)


@dataclass(frozen=True)
class _Cut:
    """The cut of arguments to the tokens of a call that continues: from `start` to `stop`."""

    source: Source
    start: int
    stop: int
    first: int
    """The first key of the masks."""

    def positions(self, value: Any) -> Any:
        """Return the positions of these tokens, given those of all tokens, or that of the first; None stays None."""
        if isinstance(value, Tensor):
            if value.shape[-1:] == (self.source.length,):
                return value.narrow(-1, self.start, self.stop - self.start)
        elif type(value) is not int:
            return value
        return value + self.start - self.first

    def part(self, name: str, value: Any, *, is_by_item: bool = False) -> Any:
        """Return the part of an argument for these tokens; of a mask also the keys before them."""
        is_rotation = _ROTATION.search(name) is not None
        if is_rotation and isinstance(value, (tuple, list)):
            return type(value)(self.part(name, table) for table in value)
        if not isinstance(value, Tensor):
            return value
        if self._is_of_tokens(name, value):
            return value[self.source.at(slice(None), slice(self.start, self.stop))]
        if is_by_item and value.dim() == 2:
            return self._keys_of(value)
        if is_by_item or "mask" in name or value.dtype == torch.bool:
            return self._keys_of(self._queries_of(value))
        return self._rows_of_table(value) if is_rotation else value

    def _is_of_tokens(self, name: str, value: Tensor) -> bool:
        """Return whether an argument has the tokens, or a type for each of them."""
        if name in self.source.names:
            return True
        return "type_ids" in name and value.shape == self.source.value.shape

    def _queries_of(self, mask: Tensor) -> Tensor:
        """Return a mask of `... query key` for the tokens; the whole mask if it has other queries."""
        if mask.dim() > 1 and mask.shape[-2] == self.source.length:
            return mask[..., self.start : self.stop, :]
        return mask

    def _keys_of(self, mask: Tensor) -> Tensor:
        """Return a mask of `... key` up to the last of the tokens; the whole mask if it has other keys."""
        if mask.shape[-1:] == (self.source.length,):
            return mask[..., self.first : self.stop]
        return mask

    def _rows_of_table(self, table: Tensor) -> Tensor:
        """Return the rows of a table of rotations, `... position features`; the whole table if it has other rows."""
        for axis in reversed(range(table.dim() - 1)):
            if table.shape[axis] == self.source.length:
                return table.narrow(axis, self.start, self.stop - self.start)
        return table


def second_output(returned: Any) -> Any:
    """Return the second output of a forward, its cache; None without one."""
    for name in ("past_key_values", "past_key_value", "cache"):
        cache = getattr(returned, name, None)
        if cache is not None:
            return cache
    for value in _further_outputs(returned):
        if value is not None and not _is_blank(value):
            return value
    return None


def _is_blank(value: Any) -> bool:
    """Return whether None stands in the place of keys and values, as in a layer without `use_cache`."""
    return isinstance(value, (tuple, list)) and all(part is None for part in value)


def _further_outputs(returned: Any) -> list[Any]:
    """Return the outputs after the first; of a dict, those whose names are not of other things than a cache."""
    if isinstance(returned, dict):
        further = list(returned.items())[1:]
        return [value for name, value in further if not _NOT_CACHE.search(name)]
    if isinstance(returned, (tuple, list)):
        return list(returned[1:])
    return []


def _has_tokens(name: str, value: Tensor, *, first: bool, flat: bool, is_embedded: bool) -> bool:
    """Return whether an argument has tokens, by its name and its sizes.

    `first` says whether no argument before it has, and `flat` whether the first tensor of the call is a matrix.
    """
    if _NO_SOURCE.search(name) or value.dim() < 2:
        return False
    if value.dtype == torch.bool or value.is_complex():
        return False
    if value.is_floating_point():
        return value.dim() > 2 or first or flat
    if value.dim() != 2:
        return False
    return first or "id" in name or is_embedded


def batch_axis_of(subject: Subject, values: Mapping[str, Any], intent: Intent) -> tuple[int, bool]:
    """Return the batch dimension of the tokens, and whether it is known rather than assumed."""
    if intent.batch_axis is not None:
        return intent.batch_axis, True
    if subject.batch_first is not None:
        return int(not subject.batch_first), True
    said = said_batch_first(subject.module)
    if said is not None:
        # Of other modules it may be the layout inside.
        is_of_torch = type(subject.module).__module__.startswith("torch.nn.")
        return int(not said), is_of_torch
    in_words = batch_axis_in_words(subject.module, values)
    if in_words is not None:
        return in_words[0], True
    return 0, _has_matrix_of_ids(values)


def _has_matrix_of_ids(values: Mapping[str, Any]) -> bool:
    """Return whether an argument is a matrix that is named as ids: `input_ids`."""
    for name, value in values.items():
        is_matrix = isinstance(value, Tensor) and value.dim() == 2
        if is_matrix and "ids" in name:
            return True
    return False

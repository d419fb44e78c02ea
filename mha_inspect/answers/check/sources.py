"""The arguments of a forward by name: those that hold tokens, which dimensions are the batch and the positions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...call.layout import batch_axis_in_words
from ...errors import InputError
from ...record.arguments import with_copies
from ...running.subject import Subject
from ...text import did_you_mean, shown
from .intent import Intent

_ANY = inspect.signature(lambda *args, **kwargs: None)
"""Of a forward that does not tell its own."""


class Arguments:
    """What a forward was given, by name."""

    def __init__(self, subject: Subject) -> None:
        self._forward = f"{type(subject.module).__name__}.forward"
        try:
            self._bound = inspect.signature(subject.module.forward).bind(*subject.args, **subject.kwargs)
        except (TypeError, ValueError):
            self._bound = _ANY.bind(*subject.args, **subject.kwargs)
        self.parameters: Mapping[str, inspect.Parameter] = self._bound.signature.parameters
        """What the forward takes, by name."""

    @cached_property
    def values(self) -> dict[str, Any]:
        """The arguments by name, those of **kwargs among them, and `args.0` for the first of *args."""
        values: dict[str, Any] = {}
        for name, value in self._bound.arguments.items():
            kind = self.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                values |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                values |= {f"{name}.{place}": item for place, item in enumerate(value)}
            else:
                values[name] = value
        return values

    def require(self, name: str) -> None:
        """Raise `InputError`, with those that there are, for what is no argument of the forward."""
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self.parameters.values())
        if name in self.parameters or name in self.values or takes_any:
            return
        raise InputError(
            f"{shown(name)} is no argument of {self._forward}, which takes {', '.join(self.parameters) or 'none'}."
            f"{did_you_mean(name, self.parameters)}"
        )

    def of_call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with changes by name, every tensor a copy that may be written into."""
        given, left = dict(self._bound.arguments), dict(changes)
        for name, parameter in self.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given[name] = {**given.get(name, {}), **left}
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL and name in left:
                given[name] = left.pop(name)
            elif name in given and parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                given[name] = tuple(left.pop(f"{name}.{place}", item) for place, item in enumerate(given[name]))
        bound = inspect.BoundArguments(self._bound.signature, given)
        return with_copies((bound.args, bound.kwargs))


_NO_SOURCE = re.compile(r"mask|position|type_ids|bias|cache|past|cos|sin|freqs", re.IGNORECASE)
"""Arguments of these names hold no tokens."""


@dataclass(frozen=True)
class Source:
    """Arguments that hold the same tokens: their names, and where the batch and the positions are."""

    names: tuple[str, ...]
    value: Tensor
    batch: int | None
    """The dimension that counts sequences; None where there is none."""
    positions: int | None
    """The dimension that counts tokens; None for an image."""

    @property
    def length(self) -> int:
        """How many tokens there are in a row."""
        return 1 if self.positions is None else self.value.shape[self.positions]

    @property
    def rows(self) -> int:
        """How many sequences there are."""
        return 1 if self.batch is None else self.value.shape[self.batch]

    @property
    def axes(self) -> list[int]:
        """The dimensions that count sequences and tokens, those that there are."""
        return [axis for axis in (self.batch, self.positions) if axis is not None]

    def at(self, row: int | slice, position: int | slice | Tensor) -> tuple[Any, ...]:
        """Return the index of one token, or of some."""
        index: list[Any] = [slice(None)] * self.value.dim()
        if self.batch is not None:
            index[self.batch] = row
        if self.positions is not None:
            index[self.positions] = position
        return tuple(index)


def sources_of(
    module: nn.Module, values: Mapping[str, Any], intent: Intent, rank_of_output: Callable[[], int]
) -> tuple[Source, ...]:
    """Return the arguments with tokens, those that hold the same ones together, the one that the output follows first.

    The output's dimensions tell whether features of tokens come with a batch: they are asked for where that is open.
    """
    groups: list[tuple[list[str], Tensor]] = []
    rank = next((value.dim() for value in values.values() if isinstance(value, Tensor)), 0)
    for name, value in values.items():
        if name in (intent.padding, intent.cache) or not isinstance(value, Tensor):
            continue
        if not _has_tokens(name, value, first=not groups, flat=rank == 2):
            continue
        for names, other in groups:
            if other is value or (other.shape == value.shape and torch.equal(other, value)):
                names.append(name)
                break
        else:
            groups.append(([name], value))

    def layout(value: Tensor) -> tuple[int | None, int | None]:
        if value.dim() > 3:
            return 0, None
        if value.dim() == 2 and value.is_floating_point() and intent.batch_axis is None:
            # Features of tokens without a batch; or sequences of samples, of which something with features is made.
            return (None, 0) if rank_of_output() == 2 else (0, 1)
        batch, _ = batch_axis_of(module, values, intent)
        return batch, 1 - batch

    sources = [Source(tuple(names), value, *layout(value)) for names, value in groups]
    return tuple(sorted(sources, key=lambda source: not any(name.startswith("decoder") for name in source.names)))


def _has_tokens(name: str, value: Tensor, *, first: bool, flat: bool) -> bool:
    if _NO_SOURCE.search(name) or value.dim() < 2 or value.dtype == torch.bool:
        return False
    if value.is_floating_point():
        return value.dim() > 2 or first or flat
    return not value.is_complex() and value.dim() == 2 and (first or "id" in name)


def batch_axis_of(module: nn.Module, values: Mapping[str, Any], intent: Intent) -> tuple[int, bool]:
    """Return which dimension of the tokens counts sequences, and whether anything says so."""
    if intent.batch_axis is not None:
        return intent.batch_axis, True
    batch_first = getattr(module, "batch_first", None)
    if isinstance(batch_first, bool):
        return (0 if batch_first else 1), True
    in_words = batch_axis_in_words(module, values)
    if in_words is not None:
        return in_words[0], True
    return 0, any(isinstance(v, Tensor) and v.dim() == 2 and "ids" in name for name, v in values.items())

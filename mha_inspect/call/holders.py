"""Arguments that hold several tensors: a tuple, a list, a dictionary, or an object with a name for each.

A name with a dot says which entry is meant: `batch.input_ids`, `pair.0`.
"""

from __future__ import annotations

import dis
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import Parameter
from itertools import takewhile
from types import FrameType
from typing import Any, get_args, get_origin

from torch import Tensor

from ..build.arguments import signature_of
from ..build.importing import in_one_line
from ..errors import InputError
from ..text import shown

MOST_KEYS = 16
"""Entries that an argument is asked for by name, at most."""
_MOST_PLACES = 64
"""Entries of a tuple, more than any forward takes."""


class Entries(dict[str, Any]):
    """A dictionary of tensors that gives them as attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@dataclass(frozen=True)
class Holder:
    """How an argument holds its tensors."""

    kind: type = Entries
    """`Entries`, tuple, list, or the class that the argument is annotated with."""
    keys: tuple[str, ...] = ()
    """The entries that it is known to have; those of a tuple are numbers."""
    words: tuple[str, ...] = ()
    """What the code calls the entries of a tuple, in their order."""
    tells_masks: bool = False
    """Whether a mask that the forward may do without is asked for as well."""

    def word(self, key: str) -> str:
        """Return what the code calls an entry."""
        return self.words[int(key)] if key.isdecimal() and int(key) < len(self.words) else key

    def filled(self, held: Mapping[str, Any]) -> Any:
        """Return the argument with these entries; what it is known to have and is not there is None.

        Raises `InputError` where it has no such entry, or its class does not take them.
        """
        if self.kind in (tuple, list):
            places = [int(key) for key in (*self.keys, *held) if key.isdecimal()]
            strange = next((key for key in held if not key.isdecimal() or int(key) >= _MOST_PLACES), None)
            if strange is not None:
                raise InputError(
                    f"{shown(strange)} is no place in a {self.kind.__name__}: write a number below {_MOST_PLACES}, as "
                    "in x.0."
                )
            return self.kind([held.get(str(place)) for place in range(1 + max(places, default=-1))])
        if not is_dataclass(self.kind) and not hasattr(self.kind, "_fields"):
            return Entries({**dict.fromkeys(self.keys), **held})
        try:
            return self.kind(**{**dict.fromkeys(_required(self.kind)), **held})
        except Exception as error:  # whatever the making of somebody's objects may raise
            listed = ", ".join(held)
            raise InputError(f"no {self.kind.__name__} can be made of {shown(listed)}: {in_one_line(error)}.") from None


def annotated(annotation: Any) -> Holder | None:
    """Return what an annotation says of an argument that holds tensors; None where it says nothing of the kind."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation) and len(parts) == 1:
        return annotated(parts[0])
    origin = get_origin(annotation) or annotation
    if not isinstance(origin, type) or issubclass(origin, (str, Tensor)):
        return None
    if is_dataclass(origin) or hasattr(origin, "_fields"):
        return Holder(origin, _required(origin))
    if typing.is_typeddict(origin) or (issubclass(origin, Mapping) and _tensors(parts[1:])):
        return Holder(Entries, tuple(getattr(origin, "__annotations__", ())))
    if issubclass(origin, Sequence) and _tensors(parts):
        counted = len(parts) if issubclass(origin, tuple) and Ellipsis not in parts else 0
        return Holder(tuple if issubclass(origin, tuple) else list, tuple(map(str, range(counted))))
    return None


def _tensors(parts: Sequence[Any]) -> bool:
    return bool(parts) and all(part is Ellipsis or part is Tensor for part in parts)


def _required(kind: type) -> tuple[str, ...]:
    return tuple(name for name, own in signature_of(kind).items() if own.default is Parameter.empty)


# -- what a forward asks of it -----------------------------------------------------------------------------------------


class WantedError(BaseException):
    """Something was asked of an argument that it does not hold yet."""

    def __init__(self, kind: type, keys: Iterable[str], words: tuple[str, ...] = ()) -> None:
        self.holder = Holder(kind, tuple(keys), words)


class Questioned(tuple[Any, ...]):
    """Stands for an argument that holds tensors, and says what it is asked for.

    Raises `WantedError` for an entry that is not there.
    """

    held: dict[str, Any]
    kind: type
    tells_masks: bool

    def __new__(cls, holder: Holder, parts: Iterable[tuple[Any, Any]]) -> Questioned:
        """Return one with these entries, and None for the others that are known."""
        held = {**dict.fromkeys(holder.keys), **{str(key): part for key, part in parts}}
        own = super().__new__(cls, held.values())
        own.held, own.kind, own.tells_masks = held, holder.kind, holder.tells_masks
        return own

    def __iter__(self) -> Iterator[Any]:
        unpacked = unpacked_into(sys._getframe(1))
        count = max(2, len(self)) if unpacked is None else len(unpacked)
        if len(self) < count:
            raise WantedError(list if unpacked is None else tuple, map(str, range(count)), unpacked or ())
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._entry(key)
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise WantedError(tuple, map(str, range(max(2, key + 1))))
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items"):
            return getattr(self.held, name)
        if name not in self.held:
            if name.startswith("__") or (hasattr(Tensor, name) and name not in _ENTRIES_TOO):
                raise AttributeError(name)
            if hasattr(getattr(self.kind, name, None), "__get__"):
                return getattr(self.kind, name).__get__(self, self.kind)
        return self._entry(name)

    def _entry(self, name: str) -> Any:
        if name not in self.held:
            raise WantedError(Entries, [name])
        return self.held[name]

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return super().__contains__(key)
        if key not in self.held and self.tells_masks and "mask" in key:
            raise WantedError(Entries, [key])
        return key in self.held

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry, as a forward asks for one that it may do without: of a mask that is so."""
        is_mask = "mask" in key
        left_out = key not in self.held and (default is not None or is_mask) and not (is_mask and self.tells_masks)
        return default if left_out else self._entry(key)


_ENTRIES_TOO = ("data", "indices", "names", "index")
"""Names of entries that a tensor has too."""


def unpacked_into(frame: FrameType) -> tuple[str, ...] | None:
    """Return the names that the code at work takes a value apart into; None where it does something else with it.

    A place without a name is "".
    """
    steps = list(dis.get_instructions(frame.f_code))
    at = next((place for place, step in enumerate(steps) if step.offset == frame.f_lasti), len(steps))
    if at == len(steps) or steps[at].opname != "UNPACK_SEQUENCE":
        return None
    names: list[str] = []
    for step in takewhile(lambda step: step.opname.startswith("STORE_FAST"), steps[at + 1 :]):
        # Python 3.13 stores two at once, or stores one and loads another.
        stored = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        names += stored[: 1 if "LOAD" in step.opname else None]
    return (*names, *[""] * steps[at].argval)[: steps[at].argval]

"""The arguments of a forward by name, and calls with others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ...errors import InputError
from ...naming.subject import Subject
from ...record.arguments import with_copies
from ...text import did_you_mean

_ANY = inspect.signature(lambda *args, **kwargs: None)
"""Of a forward that does not tell its own."""


class Arguments:
    """What a forward was given, by name."""

    def __init__(self, own: Subject) -> None:
        self._forward = f"{type(own.module).__name__}.forward"
        try:
            self._bound = inspect.signature(own.module.forward).bind(*own.args, **own.kwargs)
        except (TypeError, ValueError):
            self._bound = _ANY.bind(*own.args, **own.kwargs)
        self.parameters: Mapping[str, inspect.Parameter] = self._bound.signature.parameters
        """What the forward takes, by name."""

    @cached_property
    def values(self) -> dict[str, Any]:
        """The arguments by name, those of **kwargs among them, and `args.0` for the first of *args."""
        found: dict[str, Any] = {}
        for name, value in self._bound.arguments.items():
            kind = self.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                found |= {f"{name}.{place}": item for place, item in enumerate(value)}
            else:
                found[name] = value
        return found

    def require(self, name: str) -> None:
        """Raise `InputError`, with those that there are, for what is no argument of the forward."""
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self.parameters.values())
        if name in self.parameters or name in self.values or takes_any:
            return
        raise InputError(
            f"{name} is no argument of {self._forward}, which takes {', '.join(self.parameters) or 'none'}."
            f"{did_you_mean(name, self.parameters)}"
        )

    def of_call(self, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with changes by name, every tensor a copy that the module may write into."""
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

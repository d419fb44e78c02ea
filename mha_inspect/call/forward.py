"""What a forward takes: its arguments, and what their names say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..build.arguments import signature_of
from ..build.vocabulary import Kind, kind_of, plain
from ..errors import SpecError
from ..record.arguments import described
from ..text import did_you_mean, shown
from .call import Call

_NO_TENSORS = ("setting", "mask", "lengths")
"""Kinds of arguments that say something of the others."""


@dataclass(frozen=True)
class Forward:
    """What a module's forward takes, as its signature says."""

    module: nn.Module
    label: str
    """What messages call it."""
    parameters: Mapping[str, Parameter]
    """Its arguments by name; `*args` where there is no other."""
    open_ended: bool
    """Whether it has `**kwargs`."""
    device: torch.device
    dtype: torch.dtype
    batch_first: bool = True

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Forward:
        """Return the forward of a module that messages call by this name."""
        every = signature_of(module.forward)
        parameters = {n: p for n, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        weights = [*module.parameters()]
        return cls(
            module,
            f"{name}.forward",
            parameters or {n: p for n, p in every.items() if p.kind is p.VAR_POSITIONAL},
            any(p.kind is Parameter.VAR_KEYWORD for p in every.values()),
            weights[0].device if weights else torch.device("cpu"),
            next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32),
        )

    @property
    def tensors(self) -> list[str]:
        """The arguments that are tensors and say nothing of others."""
        return [name for name in self.parameters if self.kind(name) not in _NO_TENSORS]

    @property
    def kinds(self) -> list[Kind]:
        """What its arguments are, in order."""
        return [*map(kind_of, self.parameters.values())]

    @property
    def encodes_and_decodes(self) -> bool:
        """Whether it takes what goes into a decoder beside what is encoded."""
        return any(plain(name) in ("tgt", "trg", "decoderinputids", "target") for name in self.parameters)

    def kind(self, name: str) -> Kind:
        """Return what an argument is, by its name."""
        if name in self.parameters:
            return kind_of(self.parameters[name])
        return kind_of(Parameter(name, Parameter.KEYWORD_ONLY)) if name.isidentifier() else "unknown"

    def needs(self, name: str) -> bool:
        """Return whether it cannot be called without an argument."""
        return self.parameters[name].default is Parameter.empty

    def named(self, given: Mapping[str, Any], flag: str) -> dict[str, Any]:
        """Return what a flag gave by the names of the forward; what has no name is the first argument's.

        Raises `SpecError` for a name that it does not have.
        """
        tensors = self.tensors or list(self.parameters)
        values = {}
        for name, value in given.items():
            if name == "" and not tensors:
                raise SpecError(f"{self.label} takes no argument: {flag} has nothing to give a tensor to.")
            if name and name not in self.parameters and not self.open_ended:
                listed = ", ".join(self.parameters)
                raise SpecError(
                    f"{flag} names {shown(name)}, which is no argument of {self.label}: {listed}."
                    f"{did_you_mean(name, self.parameters)}"
                )
            values[name or tensors[0]] = value
        return values

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names in the order of its arguments, what it does not name first."""
        order = list(self.parameters)
        return sorted(names, key=lambda name: order.index(name) if name in order else -1)

    def call(self, values: Mapping[str, Any]) -> Call:
        """Return a call with these values, and with None for what is needed and not there: no mask."""
        values = {**values, **{name: None for name in self.parameters if self.needs(name) and name not in values}}
        named = {name: values[name] for name in self.in_order(values)}
        text = described(named)
        places: list[Any] = []
        for name, parameter in self.parameters.items():
            if parameter.kind is Parameter.POSITIONAL_ONLY and name in named:
                places.append(named.pop(name))
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                value = named.pop(name, None)
                places += [value] if isinstance(value, Tensor) else value or ()
        return Call(tuple(places), named, text, batch_first=self.batch_first)

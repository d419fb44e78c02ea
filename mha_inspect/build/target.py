"""A module that was built, what it was built with, and what was said for its forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import DoesNotFitError, SpecError
from ..layers.catalog import MaskStyle
from ..layers.spec import AttentionSpec
from .arguments import signature_of, unknown_setting
from .values import convert
from .vocabulary import Flags

_MOST_PARAMETERS = 100_000
"""Tensors: a mixture of 256 experts in 61 layers, each matrix for itself, has half of it."""


@dataclass(frozen=True)
class TargetSpec:
    """What a target is built with, besides its name and what --set says."""

    flags: Flags = field(default_factory=Flags)
    dtype: str | None = None
    """None: as the target builds itself."""
    device: str = "cpu"
    training: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A module that was built, and how."""

    module: nn.Module
    made_from: str
    """The text that named it."""
    passed: dict[str, Any]
    """What its constructor was given, by name, as plain data."""
    notes: tuple[str, ...] = ()
    """What was passed without having been asked for by that name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Every argument of its constructor, defaults included."""
    forward_settings: dict[str, Any] = field(default_factory=dict)
    """What --set gave for arguments of the forward."""
    call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments of its forward, by place and by name, where the function that made it returns them as well."""
    spec: AttentionSpec | None = None
    """The sizes of a layer of the catalog, which are known before it runs."""
    masks: MaskStyle | None = None
    """How a layer of the catalog takes its masks."""

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.module).__qualname__


def settings_of_forward(
    module: nn.Module, left: Mapping[str, str], names: list[str], owner: str, namespace: Mapping[str, Any]
) -> dict[str, Any]:
    """What --set gives for arguments of the forward, where the constructor has none of that name.

    Raises `SpecError` for a name that neither has.
    """
    parameters = signature_of(module.forward)
    taken = [n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    chosen = {}
    for key, text in left.items():
        if key not in taken:
            known = [*names, *(n for n in taken if n not in names)]
            raise SpecError(
                unknown_setting(key, known, f"{owner} or of its forward" if names else f"{owner}'s forward")
            )
        chosen[key] = convert(key, text, parameters[key].annotation, parameters[key].default, namespace)
    return chosen


@contextmanager
def of_bounded_number(called: str) -> Iterator[None]:
    """Stop a constructor that makes more parameters than any model has, which take memory also where they have none.

    Raises `DoesNotFitError` inside of it.
    """
    left = _MOST_PARAMETERS

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is more than can be looked at. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()

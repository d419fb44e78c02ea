"""A module that a test called, as a target: copies of it, with the classes of the source that is tried."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..record.arguments import parts_of, with_parts
from ..running.subject import Subject
from .loading import is_own
from .trial import Deadline, Target


def live_target(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], until: float) -> Target | None:
    """Return a module with the arguments of a call as a target; None if its class is in no file of the user."""
    home = sys.modules.get(type(module).__module__)
    if home is None or not is_own(home):
        return None

    def make(seed: int) -> Subject:
        fresh = sys.modules[home.__name__]
        again = copy.deepcopy(module)
        for part in again.modules():
            if type(part).__module__ == home.__name__:
                part.__class__ = _class_in(fresh, type(part))
        if not seed:
            return Subject(again, args, dict(kwargs), seed=0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in again.parameters():
                weight.copy_(_shuffled(weight, generator))
        return Subject(again, _redrawn(args, generator), _redrawn(dict(kwargs), generator), seed=0)

    return Target(home, make, deadline=Deadline(until))


def _class_in(module: ModuleType, kind: type) -> type:
    """Return the class of this name in a module. Raises `AttributeError` for one that a function makes."""
    found: Any = module
    for name in kind.__qualname__.split("."):
        found = getattr(found, name)
    assert isinstance(found, type)
    return found


def _redrawn(arguments: Any, generator: torch.Generator) -> Any:
    """Return arguments with other numbers; ids and masks stay."""
    if not isinstance(arguments, Tensor):
        parts = [_redrawn(part, generator) for _, part in parts_of(arguments)]
        return with_parts(arguments, parts) if parts else arguments
    is_of_two = bool(((arguments == 0) | (arguments == 1)).all())
    if is_of_two or not arguments.is_floating_point():
        return arguments
    return _shuffled(arguments, generator)


def _shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor with its numbers in another order: other numbers of the same size."""
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.flatten()[order].view(tensor.shape)

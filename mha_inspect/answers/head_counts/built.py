"""A class or a function that takes a number of heads, called with each of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import nn

from ...errors import SpecError
from ...record.copying import copy_module
from ...record.subject import Subject
from ...reports.common import LayerInfo
from ...targets.aliases import flag_of
from ..sides.module_run import ModuleSide
from .modules import Counted


def build_each(
    make: Callable[..., nn.Module], counts: Sequence[int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Counted]:
    """A module for each head count, with the arguments of its forward. What `make` returns is copied, and not changed.

    The number goes to the argument that bears one of the names for it (num_heads, nhead, n_head), or else to the one
    argument that is needed.

    Raises `SpecError` when it takes no number of heads, returns no module, or there are not two counts to compare.
    """
    counts = tuple(dict.fromkeys(counts))
    if len(counts) < 2:
        raise SpecError(f"heads {list(counts)} leaves nothing to compare: give two or more, as in (1, 2, 4).")
    name = getattr(make, "__name__", type(make).__name__)
    if isinstance(make, nn.Module):
        raise SpecError(f"{name} has been made already, with one number of heads: give its class, or a function of it.")
    built = []
    for count in counts:
        module = _with_heads(make, name, count)
        if not isinstance(module, nn.Module):
            raise SpecError(f"{name} returned a {type(module).__name__} for {count} heads, and not a torch.nn.Module.")
        label = type(module).__name__
        own = Subject(copy_module(module), args, dict(kwargs))
        built.append(Counted(count, ModuleSide("left", label, own, LayerInfo(label, {}), seed=0)))
    return built


def _with_heads(make: Callable[..., nn.Module], name: str, count: int) -> nn.Module:
    try:
        parameters = signature(make).parameters
    except ValueError:  # what is written in C need not have one
        return make(count)
    named = next((n for n, p in parameters.items() if flag_of(n) == "num_heads" and p.kind in _BY_NAME), None)
    if named is not None:
        return make(**{named: count})
    needed = [p for p in parameters.values() if p.default is Parameter.empty and p.kind in _BY_PLACE]
    if len(needed) != 1:
        raise SpecError(
            f"{name} takes no number of heads (its arguments: {', '.join(parameters) or 'none'}), and is called with "
            "each. Name one num_heads, or give a function of it: lambda heads: MyAttention(64, heads)."
        )
    return make(count)


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

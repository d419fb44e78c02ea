"""A number in the code that does not fit into the dtype of a tensor, e.g. a mask of -1e10 in half precision.

energy.masked_fill(mask == 0, -1e10)        # energy is float16, whose smallest number is -65,504
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from .facts import Facts, Operand
from .suspect import Suspect
from .tried import Fix


@dataclass(frozen=True)
class _Limit:
    """The end of the range of a dtype that a number is beyond."""

    end: str
    """Its name in torch.finfo: `min` or `max`."""
    value: float
    adjective: str
    """`smallest` or `largest`."""


def number_too_large(facts: Facts) -> Suspect | None:
    """Return a finite number of the failing call that the dtype of its first operand lacks; None without one."""
    if not facts.operands:
        return None
    operand = facts.operands[0]
    if not operand.given.value.is_floating_point():
        return None
    arguments = (*facts.call.args, *facts.call.kwargs.values())
    for value in arguments:
        if not _is_number(value) or not math.isfinite(value):
            continue
        limit = _limit_before(value, operand.given.value.dtype)
        if limit is not None:
            return _too_large(facts, operand, value, limit)
    return None


def _limit_before(number: float, dtype: torch.dtype) -> _Limit | None:
    """Return the limit of a dtype that a number exceeds; None if the number fits."""
    limits = torch.finfo(dtype)
    if abs(number) <= limits.max:
        return None
    if number < 0:
        return _Limit("min", limits.min, "smallest")
    return _Limit("max", limits.max, "largest")


def _too_large(facts: Facts, operand: Operand, number: float, limit: _Limit) -> Suspect:
    """Return the cause of a number beyond the limit of an operand's dtype."""
    range_of_dtype = f"{operand.name} is {operand.dtype}, and its {limit.adjective} number is {limit.value:,.6g}"
    fix = Fix(
        f"torch.finfo({operand.name}.dtype).{limit.end} in place of {number:g}",
        function=_with_number(facts.call.function, number, limit.value),
    )
    return Suspect(
        "number_too_large",
        f"{range_of_dtype}: {number:g} does not fit.",
        (fix,),
    )


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float))


def _with_number(function: Callable[..., Any] | None, old: float, new: float) -> Callable[..., Any] | None:
    """Return a function that is called with another number; None without a function."""
    if function is None:
        return None

    def called(*args: Any, **kwargs: Any) -> Any:
        new_args = [_replaced(value, old, new) for value in args]
        new_kwargs = {}
        for name, value in kwargs.items():
            new_kwargs[name] = _replaced(value, old, new)
        return function(*new_args, **new_kwargs)

    return called


def _replaced(value: Any, old: float, new: float) -> Any:
    if isinstance(value, (int, float)) and value == old:
        return new
    return value

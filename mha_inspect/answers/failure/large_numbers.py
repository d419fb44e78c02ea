"""A number in the code that does not fit into the dtype of a tensor, e.g. a mask of -1e10 in half precision.

energy.masked_fill(mask == 0, -1e10)        # energy is float16, whose smallest number is -65,504
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .facts import Facts
from .suspect import Suspect
from .tried import Fix


def number_too_large(facts: Facts) -> Suspect | None:
    """Return a finite number of the failing call that the dtype of its first operand lacks; None without one."""
    operand = next(iter(facts.operands), None)
    if operand is None or not operand.given.value.is_floating_point():
        return None
    limits = torch.finfo(operand.given.value.dtype)
    for value in (*facts.call.args, *facts.call.kwargs.values()):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or abs(value) <= limits.max:
            continue
        bound, end = (limits.min, "min") if value < 0 else (limits.max, "max")
        return Suspect(
            "number_too_large",
            f"{operand.name} is {operand.dtype}, and its {'smallest' if value < 0 else 'largest'} number is "
            f"{bound:,.6g}: {value:g} does not fit.",
            (
                Fix(
                    f"torch.finfo({operand.name}.dtype).{end} in place of {value:g}",
                    function=_with_number(facts.call.function, value, bound),
                ),
            ),
        )
    return None


def _with_number(function: Callable[..., Any] | None, old: float, new: float) -> Callable[..., Any] | None:
    """Return a function that is called with another number; None without a function."""
    if function is None:
        return None

    def called(*args: Any, **kwargs: Any) -> Any:
        replaced = [_replaced(value, old, new) for value in args]
        return function(*replaced, **{name: _replaced(value, old, new) for name, value in kwargs.items()})

    return called


def _replaced(value: Any, old: float, new: float) -> Any:
    return new if isinstance(value, (int, float)) and value == old else value

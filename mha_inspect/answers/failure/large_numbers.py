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
        if _is_number(value) and math.isfinite(value) and abs(value) > limits.max:
            bound, end, extreme = (limits.min, "min", "smallest") if value < 0 else (limits.max, "max", "largest")
            function = _with_number(facts.call.function, value, bound)
            way = f"torch.finfo({operand.name}.dtype).{end} in place of {value:g}"
            what = f"{operand.name} is {operand.dtype}, and its {extreme} number is {bound:,.6g}"
            return Suspect("number_too_large", f"{what}: {value:g} does not fit.", (Fix(way, function=function),))
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_number(function: Callable[..., Any] | None, old: float, new: float) -> Callable[..., Any] | None:
    """Return a function that is called with another number; None without a function."""
    if function is None:
        return None

    def called(*args: Any, **kwargs: Any) -> Any:
        new_args = [_replaced(value, old, new) for value in args]
        new_kwargs = {name: _replaced(value, old, new) for name, value in kwargs.items()}
        return function(*new_args, **new_kwargs)

    return called


def _replaced(value: Any, old: float, new: float) -> Any:
    return new if isinstance(value, (int, float)) and value == old else value

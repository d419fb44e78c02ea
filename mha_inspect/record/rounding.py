"""How large rounding errors are in this computation and dtype, and what a difference means beside them.

A fixed tolerance is wrong both ways: it calls small outputs equal that are far apart, and large ones different that are
rounded alike. So the rounding error is measured, in the same run, against the same computation in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..measure.compare import parts
from ..reports.common import Verdict
from .arguments import tensors_in
from .copying import copy_module

DIFFERS_ABOVE = 10.0
"""A difference of more than this many times the noise floor is no rounding error."""
SAME_UP_TO = 2.0
"""Two results that are each one noise floor away from the exact one are at most this many apart."""


@dataclass(frozen=True)
class Rounding:
    """A difference beside a rounding error that was measured, and the verdict."""

    difference: float
    error: float
    times: float
    verdict: Verdict

    @classmethod
    def of(cls, difference: float, error: float) -> Rounding:
        """Judge a difference."""
        return cls(difference, error, *judge(difference, error))


def judge(max_abs_difference: float, noise_floor: float) -> tuple[float, Verdict]:
    """The difference in units of the noise floor, and what that means.

    No difference is 0 times any floor. A difference beside a floor of 0 is infinitely many times it. A NaN differs.
    """
    if max_abs_difference == 0:
        return 0.0, "same"
    times = max_abs_difference / noise_floor if noise_floor > 0 else math.inf
    if math.isnan(times) or times > DIFFERS_ABOVE:
        return times, "differs"
    return times, "same" if times <= SAME_UP_TO else "inconclusive"


def max_difference(left: Tensor, right: Tensor) -> float:
    """Largest difference between elements of two tensors of one shape, taken in float64.

    NaN beside NaN and an infinity beside the same infinity are no difference; beside anything else they are an
    infinite one.
    """
    quick = _largest_finite(left, right)
    if quick is not None:
        return quick
    left64, right64 = (side.detach().cpu().double() for side in (left, right))
    equal = (left64 == right64) | (left64.isnan() & right64.isnan())
    apart = (left64 - right64).abs().nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(equal, 0.0)
    return float(apart.max()) if apart.numel() else 0.0


def float64_output(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The module's first output, computed in float64 by a copy of it, on the CPU where the device has no float64.

    A module in training mode is run in eval mode: dropout draws other elements in another dtype.
    """
    return _first_output(module, args, kwargs, torch.float64)


def noise_floor(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Tensor | None = None
) -> float:
    """Largest rounding error of the module's first output, measured against float64.

    Elements that are not finite (a fully masked row) are left out. For a float64 module there is nothing finer to
    measure against: float32 is measured and scaled by the ratio of the two dtypes' rounding steps. `reference` is what
    `float64_output` gave, where it is already there. Nothing about the module changes, nor do the global generators.
    """
    dtype = _dtype_of(module, args)
    measured = torch.float32 if dtype == torch.float64 else dtype
    exact = float64_output(module, args, kwargs) if reference is None else reference
    floor = rounding_error(_first_output(module, args, kwargs, measured), exact)
    return floor * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if measured != dtype else floor


def rounding_error(output: Tensor, reference: Tensor) -> float:
    """Largest difference over the elements that are finite on both sides."""
    quick = _largest_finite(output, reference)
    if quick is not None:
        return quick
    left, right = output.detach().cpu().double(), reference.detach().cpu().double()
    finite = left.isfinite() & right.isfinite()
    return max_difference(left[finite], right[finite])


def _largest_finite(left: Tensor, right: Tensor) -> float | None:
    """Largest difference where every one is finite; None where one is not, and the elements must be looked at.

    Comparisons element by element take ten times as long as one subtraction, and are seldom needed.
    """
    if not left.numel():
        return None
    largest = 0.0
    for one, other in parts(left, right):
        low, high = map(float, torch.aminmax(one.double() - other.double()))
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        largest = max(largest, -low, high)
    return largest


def first_tensor(result: Any) -> Tensor:
    """The tensor that a module's result is, or begins with: `output` of `(output, weights)`.

    Raises `InputError` when there is none.
    """
    for _, tensor in tensors_in(result):
        return tensor
    raise InputError(
        f"the forward returned {'None' if result is None else f'a {type(result).__name__}'}, with no tensor in it to "
        "compare. Let it return its output."
    )


def _dtype_of(module: nn.Module, args: tuple[Any, ...]) -> torch.dtype:
    tensors = [*module.parameters(), *(arg for arg in args if isinstance(arg, Tensor))]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())


def _first_output(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    tensors = [*module.parameters(), *(arg for arg in args if isinstance(arg, Tensor))]
    no_float64 = any(tensor.device.type == "mps" for tensor in tensors) and dtype == torch.float64
    device = torch.device("cpu") if no_float64 else None
    if module.training or dtype != _dtype_of(module, args):
        module = copy_module(module).to(device=device, dtype=dtype)
        module.eval()  # what somebody's own train() returns may be nothing
    cast: dict[int, Tensor] = {}
    gpus = {tensor.device.index for tensor in tensors if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=gpus):
        result = module(
            *(cast_tensors(arg, dtype, device, cast) for arg in args),
            **{name: cast_tensors(arg, dtype, device, cast) for name, arg in kwargs.items()},
        )
    return first_tensor(result).detach()


def cast_tensors(value: Any, dtype: torch.dtype, device: torch.device | None, seen: dict[int, Tensor]) -> Any:
    """Tensors of floating-point numbers in `dtype`, through tuples, lists and dicts; one given twice stays one."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = value.detach().to(device=device, dtype=dtype if value.is_floating_point() else None)
        return seen[id(value)]
    if type(value) in (tuple, list):
        return type(value)(cast_tensors(part, dtype, device, seen) for part in value)
    if type(value) is dict:
        return {name: cast_tensors(part, dtype, device, seen) for name, part in value.items()}
    return value

"""What an operation of torch says of itself before it runs: its schema, tags and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .catalog import Fused, does, fused

_WEIGHS = frozenset({"_softmax", "_safe_softmax", "exp", "sigmoid"})
_UNTAGGED = frozenset({"leaky_relu", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu_", "selu_"})
"""Activations that torch 2.10 does not say to be pointwise."""


@dataclass(frozen=True, slots=True)
class About:
    """What does not change from one use of an operation to the next."""

    func: Any
    """It is held, so that no other has its id."""
    run: Any
    """Runs it; without the function of Python's around that."""
    name: str
    base_name: str
    pointwise: bool
    composite: bool
    makes_views: bool
    written: tuple[tuple[int, str], ...]
    """Place and name of each argument that it writes into."""
    fused: Fused | None = None
    copies: bool = False
    weighs: bool = False
    """Whether scores become weights by it."""

    adds: bool = False
    """Whether it is a product to which something is added, that may be a mask."""
    needs_care: bool = True
    """Whether it hides steps, writes, weighs, or may arrive whole: any of the above."""


ABOUT: dict[int, About] = {}
"""By the id of an operation, as to hash one takes longer."""


def about(func: Any) -> About:
    """Return what is known of an operation, read off its schema, tags and kernels."""
    known = ABOUT.get(id(func))
    if known is None:
        known = ABOUT[id(func)] = _read(func)
    return known


def _read(func: Any) -> About:
    name = str(func)
    if isinstance(func, torch._ops.HigherOrderOperator):  # flex_attention: it runs as a whole, and has no schema
        return About(
            func,
            func,
            f"higher_order.{name}",
            name,
            pointwise=False,
            composite=False,
            makes_views=False,
            written=(),
            fused=fused(f"higher_order.{name}"),
        )

    def has_kernel(operation: str, key: str) -> bool:
        try:
            return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))
        except RuntimeError:  # one that the dispatcher does not know: prim.device, asked of a fake tensor
            return False

    base_name = name.split(".")[1]
    kernel, composite = fused(name), has_kernel(func.name(), "CompositeImplicitAutograd")
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return About(
        func,
        func._op,
        name=name,
        base_name=base_name,
        pointwise=torch.Tag.pointwise in func.tags or base_name in _UNTAGGED,
        composite=composite,
        makes_views=has_kernel(func.name(), "ADInplaceOrView"),
        written=written,
        fused=kernel,
        copies=does(base_name, "copies"),
        weighs=base_name in _WEIGHS,
        adds=kernel is not None and kernel.way == "adding",
        needs_care=bool(kernel or composite or written or base_name in _WEIGHS),
    )


def adds_scores(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `baddbmm` or `addmm` may add a mask to a product that is scores, and no bias to one with a weight.

    A learned query or key is a parameter too, and so is a learned bias of the scores: both together look like a layer.
    So does one number for each column of a single matrix, whose weight and bias may be given as plain tensors.
    """
    added, left, right = args[:3]
    if kwargs.get("beta", 1) == 0:
        return False
    if added.dim() < 2:
        return left.dim() == 3 and not (_is_parameter(added) or _is_parameter(right))
    return not (_is_parameter(added) and (_is_parameter(left) or _is_parameter(right)))


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether this is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)

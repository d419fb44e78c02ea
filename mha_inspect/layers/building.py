"""Building a layer from a seed, the same bit for bit wherever and however often it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .spec import AttentionSpec

M = TypeVar("M", bound=nn.Module)

_DRAWING = frozenset({"uniform_", "normal_", "kaiming_uniform_"})
"""Methods of a tensor, and functions of `torch.nn.init`, that fill it; its other functions come down to these."""


@contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class blank(TorchFunctionMode):  # noqa: N801 - it is used as a function, as torch.no_grad is
    """Draw nothing inside the block: parameters that are built there hold whatever their memory held.

    For a layer that is given all of its numbers afterwards. To draw those of a large one takes longer than to run it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, unless it would fill a tensor with random numbers."""
        kwargs = kwargs or {}
        if func.__name__ in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def build_seeded(make: Callable[[], M], spec: AttentionSpec, device: str = "cpu") -> M:
    """What `make` returns, initialised from spec.seed, in spec.dtype, on `device`, in training or eval mode as asked.

    `make` builds the module with torch's defaults (no dtype, no device): it is drawn in float32 on the CPU and then
    cast and moved, so that every dtype rounds the same numbers and float64 holds float32's exactly. On `meta` nothing
    is drawn and nothing allocated. The global generators, default dtype and default device stay as they were.
    """
    where = torch.device("meta" if device == "meta" else "cpu")
    with _float32_by_default(), where, torch.random.fork_rng(devices=[]):
        # Not `torch.manual_seed`: it would seed the other devices too, and nothing would put those back. Generators
        # take 64 bits; any whole number is folded into them.
        torch.default_generator.manual_seed(spec.seed % 2**64)
        module = make()
    return module.to(device=device, dtype=getattr(torch, spec.dtype)).train(spec.training)


def mask_of_head(mask: torch.Tensor | None, head: int) -> torch.Tensor | None:
    """The part of a merged mask that one head sees: `query key` or `batch query key`."""
    if mask is None or mask.dim() == 2:
        return mask
    return mask.select(-3, head if mask.size(-3) > 1 else 0)

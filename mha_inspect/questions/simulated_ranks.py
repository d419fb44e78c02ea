"""Simulate all ranks of a process group in this process, and cut a module over them.

torch.distributed's simulation of ranks is private: `LocalTensorMode`, since torch 2.10.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from inspect import signature
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..errors import InputError
from .shard_plan import Plan

_NO_SIMULATION = "this torch cannot simulate ranks, which needs torch 2.10 or newer. Update torch."


@contextmanager
def process_group(ranks: int, device: str) -> Iterator[Any]:
    """Yield a device mesh of simulated ranks, of which this process is rank 0.

    Raises `InputError` if there is a process group already, or torch has none to simulate.
    """
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import debug
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise InputError(_NO_SIMULATION) from None
    if dist.is_initialized():
        raise InputError("--ranks simulates a process group, but one is already running. Drop --ranks.")
    # torch caches results of DTensors by the ranks of their mesh, with the groups of an earlier mesh of these ranks.
    forget = getattr(debug, "_clear_sharding_prop_cache", int)
    forget()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # torch logs a traceback where it cannot compute the shape of a DTensor's result; the error says the same.
        with patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
            yield init_device_mesh("cpu" if device == "meta" else device, (ranks,))
    finally:
        dist.destroy_process_group()
        forget()


def cut(module: nn.Module, mesh: Any, plan: Plan, *, keeps: bool = False) -> nn.Module:
    """Return a module whose parameters are cut by a plan; with `keeps` the projections return DTensors."""
    from torch.distributed.tensor import parallel

    if callable(plan.code):
        return plan.code(module, mesh) or module
    styles: Any = plan.code
    if styles is None:
        classes = {
            "colwise": parallel.ColwiseParallel(use_local_output=not keeps),
            "rowwise": parallel.RowwiseParallel(),
        }
        styles = {}
        for path, style in plan.styles.items():
            if style in classes:
                styles[path] = classes[style]
    # torch cuts a parameter into all parts again for each simulated rank, to take one.
    with patch.object(torch, "chunk", lru_cache(maxsize=1)(torch.chunk)):
        # Without a source rank each rank takes its part of the parameter that it has.
        return parallel.parallelize_module(module, mesh, styles, src_data_rank=None)


@contextmanager
def simulation(ranks: int, plan: Plan, *, keeps: bool, on_meta: bool) -> Iterator[None]:
    """Run the body on all ranks, or on meta on rank 0 alone; with `keeps` on DTensors."""
    from torch.distributed.tensor.experimental import implicit_replication

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if not on_meta:
            stack.enter_context(_all_ranks(ranks, answers=plan.code is None))
        if keeps and on_meta:
            stack.enter_context(_JoinedWithoutEmpty())
        if keeps:
            stack.enter_context(implicit_replication())
            # torch derives the placements of a fused kernel's result by trying all; with a mask that takes hours.
            stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        yield


class _JoinedWithoutEmpty(TorchFunctionMode):
    """Joins tensors without the empty ones: on meta a forward of transformers cannot do without its empty cache."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            joined, *options = args
            with_elements = [tensor for tensor in joined if tensor.numel()]
            args = (with_elements or joined, *options)
        return func(*args, **(kwargs or {}))


def takes_cache(module: nn.Module) -> bool:
    """Return whether a forward may cache: transformers joins keys to an empty tensor, which DTensors cannot be."""
    return "use_cache" in signature(module.forward).parameters


@contextmanager
def _all_ranks(ranks: int, *, answers: bool) -> Iterator[None]:
    """Simulate all ranks in the body. Without `answers`, user code that asks which rank it is raises.

    All ranks run at once: any number is wrong for some, and `rank == 0` is false for all.
    """
    try:
        from torch.distributed import _local_tensor as ranks_in_one_process
    except ImportError:
        raise InputError(_NO_SIMULATION) from None
    mesh = ranks_in_one_process._LocalDeviceMesh
    asks = (
        (torch.distributed.ProcessGroup, "rank"),  # get_rank may have been imported by its name
        (mesh, "get_rank"),
        (mesh, "get_local_rank"),
        (mesh, "get_coordinate"),
    )
    with ExitStack() as stack:
        if not answers:
            for owner, name in asks:
                guarded = _guarded(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, guarded))
        stack.enter_context(ranks_in_one_process.LocalTensorMode(ranks))
        if not answers:  # since torch 2.15 the simulation has a get_rank of its own
            guarded = _guarded(torch.distributed.get_rank)
            stack.enter_context(patch.object(torch.distributed, "get_rank", guarded))
        yield


def _guarded(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers torch's own code, and raises `RuntimeError` for any other caller."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller.f_code.co_name in ("get_rank", "asked"):
            caller = caller.f_back
        if caller is None or caller.f_globals.get("__name__", "").startswith("torch."):
            return answer(*args, **kwargs)
        raise RuntimeError(
            "the plan asks for its rank, but all ranks are simulated at once. Try it on real ranks, with "
            "torchrun -m mha_inspect trace FILE:function"
        )

    return asked

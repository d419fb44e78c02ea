"""Find a rank's own tensor inside the tensors of torch.distributed, and its place in the whole.

Nothing here imports torch.distributed: whoever has such a tensor has imported it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import tensors_in
from .ops import Recording

_WRAPPERS = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}
"""Classes of torch.distributed that wrap a rank's tensor, and the attribute with that tensor."""
_SHAPES = os.path.join("torch", "distributed", "tensor", "_sharding_prop.py")
"""The file in which torch computes the shapes of a DTensor's results, on tensors without numbers."""
_MODULE_CALL = nn.Module._call_impl.__code__
_SPREAD = ("torch.distributed.", "torch.nn.parallel.")


@cache
def _inner(kind: type) -> str:
    """Return the attribute with the rank's tensor, for a class that wraps it; empty for any other class."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.distributed.") and base.__name__ in _WRAPPERS:
            return _WRAPPERS[base.__name__]
    return ""


def wraps(kinds: Iterable[type]) -> bool:
    """Return whether one of the classes wraps a rank's tensor: the operations on that tensor are dispatched next."""
    return any(map(_inner, kinds))


def local(tensor: Tensor, *, filled: bool = False) -> Tensor:
    """Return the rank's own tensor inside a DTensor or the result of a collective; any other tensor unchanged.

    `filled` waits for the collective.
    """
    if filled and wraps([type(tensor)]):
        wait(tensor)
    name = _inner(type(tensor))
    while name:
        tensor = getattr(tensor, name)
        name = _inner(type(tensor))
    return tensor


def by_rank(tensor: Tensor) -> list[Tensor]:
    """Return the tensor of each rank, if torch simulates all of them in this process; else the tensor alone."""
    tensor = local(tensor, filled=True)
    of_ranks: dict[int, Tensor] = getattr(tensor, "_local_tensors", {})
    if not of_ranks:
        return [tensor]
    return [of_ranks[rank] for rank in sorted(of_ranks)]


def wait(result: Any) -> None:
    """Wait for the collectives that fill tensors, if there are any."""
    for _, tensor in tensors_in(result):
        torch.ops._c10d_functional.wait_tensor(local(tensor))


def runs_on_shapes(frame: FrameType | None) -> bool:
    """Return whether the code of a frame only computes the shape of a DTensor's result."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_SHAPES):
            return True
        if frame.f_code is _MODULE_CALL:
            return False
        frame = frame.f_back
    return False


def needs_ranks(module: nn.Module, recording: Recording | None = None) -> bool:
    """Return whether another run of a module would need the other ranks, which do not know of it."""
    if wraps(map(type, module.parameters())):
        return True
    for part in module.modules():
        if any(base.__module__.startswith(_SPREAD) for base in type(part).__mro__):
            return True
    return recording is not None and any(op.is_collective for op in recording.ops)


def gathered(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the parameters that FSDP gathers for a forward, each with its module and its name there."""
    for parameter in _of_fsdp(modules):
        with suppress(AttributeError):  # not gathered yet
            place = parameter._module_info
            yield place.module, place.param_name, local(parameter._unsharded_param)


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name; for a parameter that FSDP has gathered, the rank's own part."""
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    paths = {part: path for path, part in module.named_modules()}
    for parameter in _of_fsdp(paths):
        place = parameter._module_info
        path = paths.get(place.module)
        name = f"{path}.{place.param_name}" if path else place.param_name
        if path is not None and name in parameters:
            parameters[name] = parameter.sharded_param
    return parameters


def _of_fsdp(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield FSDP's descriptions of the parameters that it shards."""
    for module in modules:
        with suppress(AttributeError):  # private names, which another version of torch may not have
            state_of: Any = getattr(type(module), "_get_fsdp_state", None)
            state = None if state_of is None else state_of(module)
            if state is None:
                continue
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    yield from group.fsdp_params


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one rank has."""

    whole: tuple[int, ...]
    """Shape of the tensor over all ranks."""
    start: tuple[int, ...]
    """The index of the rank's first element in each dimension of the whole."""


def piece_of(tensor: Tensor) -> Piece | None:
    """Return which part of the whole the rank has; None if the tensor is whole, or the part is not one block."""
    if _inner(type(tensor)) != "_local_tensor" or local(tensor).shape == tensor.shape:
        return None
    spread: Any = tensor
    # The function is torch's own and may move; some placements have no single block.
    with suppress(ImportError, AttributeError, RuntimeError, NotImplementedError):
        places: Any = import_module("torch.distributed.tensor._utils")
        placed = places.compute_local_shape_and_global_offset
        shape, start = placed(tensor.shape, spread.device_mesh, spread.placements)
        if tuple(shape) == tuple(local(tensor).shape):
            return Piece(tuple(tensor.shape), tuple(start))
    return None

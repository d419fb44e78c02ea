"""Refuse what would not fit in memory before it is tried, and say what would.

A constructor is stopped before it makes more than there is room for: where the system promises more memory than there
is, such a process is killed without a word when it fills it. What a command does is rehearsed on less input. What
cannot be told so is let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..errors import DoesNotFitError
from ..files.memory import free_memory, freeing_at_scale, largest, require_memory
from ..layers.spec import AttentionSpec, InputSpec
from ..record.rehearsal import Extent, foresee, rehearsed

_SAFE = 8
"""A rough estimate that fits this many times is not looked at more closely."""
_STEADY = 0.95
"""Of what is free, as much as what is said to fit may take: no two rehearsals take quite the same."""
_HEADS = 64
"""More heads than most have."""
_MOST_PARAMETERS = 100_000
"""Tensors: a mixture of 256 experts in 61 layers, each matrix for itself, has half of it."""
_FACTORIES = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "randint", "eye", "normal"})


@dataclass(frozen=True)
class Planned:
    """A run that is to be made, and where."""

    asked: str
    """What is refused, as the sentence begins."""
    device: torch.device
    extent: Extent
    """How much input it has."""
    rough: int
    """More bytes than it takes, as far as that can be told without a look."""
    held: Callable[[], int]
    """Bytes of its parameters and buffers."""
    there: bool = False
    """Whether those are there already."""
    seq_len: int = 0
    """Length up to which another one is looked for; 0 where more than one length is asked for, or a file has them."""
    smaller: str = "Try a smaller batch, length or model."


@dataclass
class Room:
    """Room for all that a command does, which is foreseen as it loads what it runs."""

    again: Callable[[], object]
    """Does all of it once more."""
    copies: int = 1
    """How often the parameters of a run are there at one time, at least."""
    shapes_do: bool = False
    """Whether the command has an answer for shapes without numbers."""
    rough: int = 0
    """Bytes of the runs before this one, roughly."""
    known: bool = False
    """Whether all of it is known to fit."""

    def require(self, planned: Planned) -> None:
        """Let it pass where all that the command does fits beside one more run, or where that cannot be told.

        It is rehearsed only where a rough estimate comes near to what is free, and rehearsals are let pass.

        Raises `DoesNotFitError` where it takes more than is free.
        """
        self.rough += planned.rough
        free = None if self.known or rehearsed() is not None else free_memory(planned.device)
        if free is None or self.rough * _SAFE < free:
            return
        held = planned.held()
        there = held if planned.there else 0
        # A rehearsal has all of the parameters: what does not fit for these is not tried.
        least, foreseen = self.copies * held - there, None
        if least <= free:
            try:
                foreseen = foresee(self._rehearse, planned.extent, planned.device, free)
            except Exception:  # whatever somebody's code may raise on input that nobody asked for
                return
            least = foreseen(planned.extent) - there
        self.known = least <= free
        if not self.known:
            best, rows, bytes_of = 0, planned.extent.rows, foreseen
            if bytes_of is not None:
                fits = _STEADY * free + there
                best = largest(lambda length: bytes_of(Extent(rows, length)) <= fits, planned.seq_len)
            way_out = f"The largest seq_len that fits is {best}." if best else planned.smaller
            way_out += " --device meta shows every shape without memory." if self.shapes_do else ""
            require_memory(least, planned.device, planned.asked, way_out)

    def _rehearse(self) -> None:
        cut = rehearsed()
        assert cut is not None
        with freeing_at_scale(cut.left.terms[2] / cut.whole.terms[2]):
            self.again()


def rough_need_of_layer(spec: AttentionSpec, inputs: InputSpec) -> int:
    """More bytes than any layer of the catalog takes."""
    width = max(spec.embed_dim, spec.num_heads * int(spec.head_dim), spec.key_width, spec.value_width)
    scores = spec.num_heads * inputs.batch * inputs.seq_len * (inputs.keys + 2)
    rows = inputs.batch * (inputs.seq_len + inputs.keys) * width
    return 8 * (6 * scores + 16 * rows + 8 * width * max(width, spec.embed_dim))


def rough_need_of_module(module: nn.Module, extent: Extent) -> int:
    """More bytes than most modules take, by the sizes of their parameters and of the input."""
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    # Not the number of tokens: the other side of an embedding is as wide as what runs through.
    width = max((sorted(p.shape)[-2] for p in module.parameters() if p.dim() > 1), default=512)
    layers = sum(next(part.parameters(recurse=False), None) is not None for part in module.modules()) or 1
    _, positions, pairs = extent.terms
    return 3 * held + 8 * layers * (pairs * _HEADS // 4 + positions * width * 4)


class _NearError(BaseException):
    """A good part of the free memory has been asked for."""


class _Guard(TorchFunctionMode):
    """Counts the bytes of the tensors that are made, and stops before they are a good part of what is free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.left = free // _SAFE

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FACTORIES:
            self.left -= _bytes_of(args, kwargs)
            if self.left < 0:
                raise _NearError
        return func(*args, **kwargs)


def _bytes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of what a function makes that is given sizes; 0 where they are not among its arguments."""
    sizes = kwargs.get("size") or next((arg for arg in args if isinstance(arg, (tuple, list))), args)
    if str(kwargs.get("device", "cpu")).startswith("meta") or not all(type(size) is int for size in sizes):
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return prod(sizes) * int(dtype.itemsize)


@contextmanager
def of_bounded_number(called: str) -> Iterator[None]:
    """Stop a constructor that makes more parameters than any model has, which take memory also where they have none.

    Raises `DoesNotFitError` inside of it.
    """
    left = _MOST_PARAMETERS

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is more than can be looked at. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def with_room(build: Callable[[], Any], called: str) -> Any:
    """Return what `build` returns.

    It is run until it has asked for a good part of the free memory. Then it is run on meta, which tells what its
    parameters take, and once more from the start; it has to seed what it draws from.

    Raises `DoesNotFitError` where the parameters alone take more than is free.
    """
    free = free_memory("cpu")
    if free is None:
        return build()
    try:
        with _Guard(free):
            return build()
    except _NearError:
        pass
    need = 0
    with suppress(Exception), torch.device("meta"):  # somebody's constructor, where there are shapes and no numbers
        need = held_bytes(build())
    require_memory(need, "cpu", called, "Give it smaller sizes. --device meta shows every shape without memory.")
    return build()


def held_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers that have a shape."""
    made = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in made)

"""Refuse what would not fit in memory before it is tried, and say what would.

A constructor is stopped before it makes more than there is room for: where the system promises more memory than there
is, such a process is killed without a word when it fills it. A forward is run on meta first, which has shapes and no
memory. What cannot be told so is let pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..errors import DoesNotFitError
from ..layers.spec import AttentionSpec, InputSpec
from ..naming.subject import Subject
from ..record.footprint import given_bytes, kept_bytes, peak_bytes
from ..text import byte_size
from .memory import free_memory, largest, require_memory

_SAFE = 8
"""A rough estimate that fits this many times is not looked at more closely."""
HELD = 1.5
"""What a forward's own names hold on to after its last use, measured over the layers: up to half as much again."""
_BESIDE = 1.65
"""What a command that keeps tensors takes beside them, to compare or to sum them up: measured, from 1.1 to 2 times."""
_HEADS = 64
"""More heads than most have."""
_STATISTICS = 3 * 8
"""Bytes that statistics take for an element."""
_CHUNK = 1 << 20
"""Elements that they are worked out of at a time."""
_MOST_PARAMETERS = 100_000
"""Tensors: a mixture of 256 experts in 61 layers, each matrix for itself, has half of it."""
_FACTORIES = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "randint", "eye", "normal"})


@dataclass(frozen=True)
class Planned:
    """A run that is to be made, and where."""

    on_meta: Callable[[int | None], Subject]
    """Makes it without memory, at another seq_len where one is given."""
    device: torch.device
    rough: int
    """More bytes than it takes, as far as that can be told without a look."""
    asked: str = ""
    """What is refused, as the sentence begins; empty: the forward by its arguments."""
    seq_len: int = 0
    """Length up to which another one is looked for; 0 where the inputs are given."""
    there: int = 0
    """Bytes of it that are there already."""
    held: float = 1.0
    """How much of what has to be there at one time is counted: of code that nobody knows, what is sure."""
    smaller: str = "Try a smaller batch, length or model."


@dataclass
class Room:
    """What a command holds of its runs at one time, one after the other."""

    kept: bool = False
    """Whether every tensor of a run is kept, and not only what has to be there at one time."""
    statistics: bool = False
    """Whether statistics are worked out of what is kept."""
    exact: bool = False
    """Whether a run in float64 is kept beside it, to measure rounding against."""
    shapes_do: bool = False
    """Whether the command has an answer for shapes without numbers."""
    taken: int = 0
    """Bytes that the runs before this one will take."""

    def require(self, planned: Planned) -> None:
        """Let it pass where one more run fits, or where that cannot be told.

        Importing what meta needs takes a second: it is spent only where a rough estimate comes near to what is free.

        Raises `DoesNotFitError` where it takes more than is free.
        """
        free = free_memory(planned.device)
        if free is None or (self.taken + planned.rough) * _SAFE < free:
            return
        try:
            own = planned.on_meta(None)
            # Of a layer of ours it is known what a command takes beside what it keeps.
            factor = _BESIDE if self.kept and planned.held > 1 else 1.0
            need = int(factor * self.need(own, planned.there, planned.held))
        except Exception:  # whatever somebody's code may raise where there are shapes and no numbers
            return
        self.taken += need
        if self.taken <= free:
            return
        share = need / self.taken

        def fits(seq_len: int) -> bool:
            return factor * self.need(planned.on_meta(seq_len), planned.there, HELD) <= share * free

        best = 0
        with suppress(Exception):  # a length that it cannot take
            best = largest(fits, planned.seq_len)
        way_out = f"The largest seq_len that fits is {best}." if best else planned.smaller
        way_out += " --device meta shows every shape without memory." if self.shapes_do else ""
        beside = ", with what it is compared with," if self.taken > need else ""
        asked = planned.asked or f"{own.label} on {own.described}"
        require_memory(self.taken, planned.device, f"{asked}{beside}", way_out)

    def need(self, own: Subject, there: int = 0, held: float = HELD) -> int:
        """Bytes that a run takes at its peak, beside those that are there: its subject is on meta."""
        with torch.device("meta"), nullcontext() if self.kept else _FusedAttention():
            recording = own.recorded().recording
        given = given_bytes(recording)
        # What a backward pass would need is left behind by a run, as what is kept is.
        run = kept_bytes(recording) if self.kept or own.grad else int(held * peak_bytes(recording))
        first = next((p for p in own.module.parameters() if p.is_floating_point()), None)
        size = 8 if first is None else first.element_size()
        # In training mode, and of what is in float64 itself, it may do without.
        largest = max((t.numel for op in recording.ops for t in op.outputs), default=0)
        # Statistics are worked out of so many elements at a time, in float64.
        run += _STATISTICS * min(_CHUNK, largest) if self.statistics else 0
        exact = (given + run) * 8 // size if self.exact and size < 8 and not own.module.training else 0
        return max(0, given - there) + run + exact


class _FusedAttention(TorchFunctionMode):
    """Takes scaled-dot-product attention for one kernel, as it is where there is memory; meta writes it out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p")
            given = {"dropout_p": 0.0, **dict(zip(names, args, strict=False)), **kwargs}
            query = given["query"]
            if not given["dropout_p"] and query.dim() == 4 and query.shape[-1] == given["value"].shape[-1]:
                return query.new_empty(query.shape)
        return func(*args, **kwargs)


def rough_need_of_layer(spec: AttentionSpec, inputs: InputSpec) -> int:
    """More bytes than any layer of the catalog takes."""
    keys = inputs.seq_len if inputs.key_len is None else inputs.key_len
    heads = spec.num_heads * inputs.batch
    width = max(spec.embed_dim, spec.num_heads * int(spec.head_dim), spec.key_width, spec.value_width)
    scores = heads * inputs.seq_len * (keys + 2)
    rows = inputs.batch * (inputs.seq_len + keys) * width
    return 8 * (6 * scores + 16 * rows + 8 * width * max(width, spec.embed_dim))


def rough_need_of_module(module: nn.Module, rows: int, length: int) -> int:
    """More bytes than most modules take, by the sizes of their parameters, and of sequences of this length together."""
    parameters = list(module.parameters())
    held = sum(p.numel() * p.element_size() for p in parameters)
    # Not the number of tokens: the other side of an embedding is as wide as what runs through.
    width = max((sorted(p.shape)[-2] for p in parameters if p.dim() > 1), default=512)
    layers = sum(next(part.parameters(recurse=False), None) is not None for part in module.modules()) or 1
    return 3 * held + 8 * layers * (rows * length * _HEADS // 4 + rows * width * 4)


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
    sizes = kwargs.get("size")
    if sizes is None:
        sizes = next((arg for arg in args if isinstance(arg, (tuple, list))), args)
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
    need = _bytes_on_meta(build)
    if need is not None and need > free:
        raise DoesNotFitError(
            f"{called} needs about {byte_size(need)} and {byte_size(free)} are free on cpu. Give it smaller sizes. "
            "--device meta shows every shape without memory."
        )
    return build()


def _bytes_on_meta(build: Callable[[], Any]) -> int | None:
    """Bytes of the parameters and buffers; None where it cannot be built without memory."""
    try:
        with torch.device("meta"):
            module = build()
    except Exception:  # whatever somebody's constructor may raise where there are shapes and no numbers
        return None
    if not isinstance(module, nn.Module):
        return None
    return held_bytes(module)


def held_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers that have a shape."""
    made = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in made)

"""Which of the first two axes of a forward's inputs is the batch: by its code's words, or by what it does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..record.arguments import tensors_in
from .drawing import Plan, draw

_BATCH = ("b", "bs", "bsz", "batch", "batch_size", "bsize")
_UNPACKED = r"^\s*(\w+), *(\w+)(?:, *\w+)* *= *(\w+)\.(?:shape|size\(\)) *(?:#.*)?$"


def batch_axis_in_words(module: nn.Module, arguments: Collection[str]) -> tuple[int, str] | None:
    """Return the axis that the forward calls the batch where it takes a shape apart, and the words that say so.

    None where it does not, for any of these arguments as it comes in.
    """
    return next(((axis, words) for name, axis, words in _unpacked(module) if name in arguments), None)


def batch_axes_in_words(module: nn.Module) -> set[int]:
    """Return every axis that a forward inside of the module calls the batch of what comes in."""
    kinds = {type(part): part for part in module.modules()}
    return {axis for part in kinds.values() for _, axis, _ in _unpacked(part)}


def _unpacked(module: nn.Module) -> Iterator[tuple[str, int, str]]:
    """Yield each argument whose shape a forward takes apart as it comes in, which axis is its batch, and the words."""
    try:
        code = inspect.getsource(type(module).forward)
    except (OSError, TypeError, AttributeError):  # the class of what is scripted has no forward
        return
    for line in re.finditer(_UNPACKED, code, re.MULTILINE):
        if re.search(rf"\b{line[3]}\b[^=\n]*(?<![=!<>])=(?!=)", code[code.find(":\n") : line.start()]):
            continue  # something else by then
        for axis, name in enumerate(line.groups()[:2]):
            if name.lower() in _BATCH:
                yield line[3], axis, f"the forward unpacks {line[3]}.shape as {line[1]}, {line[2]}"


@dataclass(frozen=True)
class Layout:
    """Whether the batch comes first in what goes in, and how that is known."""

    batch_first: bool
    why: str
    """The end of a sentence."""


MISTAKEN = (
    " A change in one row of the batch moves other rows all the same: is batch_first=True missing? --seq-first lays it "
    "out the other way."
)
TURN = "--batch-first lays it out the other way."
_NEAR = 1e-4
"""Outputs that are as near as this, beside the largest, are the same."""


def layout_of(run: Callable[[Mapping[str, Tensor]], Any], tensors: Mapping[str, Tensor]) -> Layout | None:
    """Tell which of the first two axes of the inputs is the batch, from how the output follows them at small sizes.

    Args:
        run: runs the forward with other inputs.
        tensors: the inputs, batch first where nobody said how they are laid out.

    None where the forward does not take such inputs, or its output follows neither axis.
    """
    first, second = next(iter(tensors.values())).shape[:2]
    # Some take one length alone.
    tries = dict.fromkeys(((3, 5), (3, second), (second, 3), (first, 3)))
    return next(filter(None, (_layout_at(run, tensors, sizes) for sizes in tries if sizes[0] != sizes[1])), None)


def _layout_at(
    run: Callable[[Mapping[str, Tensor]], Any], tensors: Mapping[str, Tensor], sizes: tuple[int, int]
) -> Layout | None:
    generator = torch.Generator("cpu").manual_seed(0)
    plans = {n: Plan("unknown", (*sizes, *own.shape[2:]), below=_numbers_of(own)) for n, own in tensors.items()}
    inputs = {n: draw(plans[n], own.dtype, own.device, generator) for n, own in tensors.items()}
    try:
        output = _output(run(inputs))
        places = [[at for at, one in enumerate(output.shape[: max(1, output.dim() - 1)]) if one == n] for n in sizes]
        if [len(place) for place in places] in ([1, 0], [0, 1]):
            kept, gone = ("first", "second") if places[0] else ("second", "first")
            return Layout(bool(places[0]), f"the output keeps its {kept} axis, and not its {gone}.")
        if [len(place) for place in places] != [1, 1]:
            return None
        limit = _NEAR * float(output.abs().max())

        # Whether what stands at one place, the last, moves outputs at others of each axis.
        changed = _output(run({name: _changed(tensor) for name, tensor in inputs.items()}))
        moved = (changed - output).abs() > limit
        moves = tuple(bool(moved.narrow(places[axis][0], 0, sizes[axis] - 1).any()) for axis in (0, 1))

        def counts(axis: int) -> bool:
            """Whether it matters at which place of an axis something stands."""
            turned = _output(run({name: tensor.flip(axis) for name, tensor in inputs.items()}))
            return bool(((turned.flip(places[axis][0]) - output).abs() > limit).any())

        meets = Layout(True, "what stands along its second axis meets, as a sequence does.")
        if moves == (False, True):
            return meets
        matters = counts(0), counts(1)
    except Exception:  # whatever somebody's code may raise at sizes that nobody asked for
        return None
    if matters[0] != matters[1]:
        axis = "second" if matters[1] else "first"
        why = f"it matters where a token stands along its {axis} axis alone."
        return Layout(matters[1], why + (MISTAKEN if matters[1] and moves == (True, False) else ""))
    if moves == (True, False):
        if not any(tensor.is_floating_point() for tensor in tensors.values()):
            return Layout(True, f"so token ids come.{MISTAKEN}")
        return Layout(False, f"what stands along its first axis meets, as a sequence does. {TURN}")
    return meets if moves[1] else None


def _output(returned: Any) -> Tensor:
    """The first tensor of numbers that a forward returned, in float64."""
    return next(t for _, t in tensors_in(returned) if t.is_floating_point() and t.dim()).detach().double()


def _changed(tensor: Tensor) -> Tensor:
    """The same with something else at the last place of its first two axes."""
    other = tensor.clone()
    last = other[-1, -1]
    last.copy_(0.5 - last if tensor.is_floating_point() else (last + 1) % _numbers_of(tensor))
    return other


def _numbers_of(tensor: Tensor) -> int:
    """How many whole numbers there are up to the largest in a tensor."""
    return 0 if tensor.is_floating_point() else int(tensor.max()) + 1

"""Which axis of a forward's arguments is the batch: by its words, its `batch_first`, or the layers that it calls."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..record.arguments import tensors_in
from ..running.subject import Subject
from .guess import is_hugging_face

_BATCH = ("b", "bs", "bsz", "batch", "batch_size", "bsize")
_UNPACKED = r"^\s*(\w+), *(\w+)(?:, *\w+)* *= *(\w+)\.(?:shape|size\(\)) *(?:#.*)?$"


def batch_axis_in_words(module: nn.Module, arguments: Collection[str]) -> tuple[int, str] | None:
    """Return the axis that the forward names as the batch when it unpacks a shape, and the words for that.

    `T, B, C = x.shape` gives axis 1. None if it unpacks the shape of none of these arguments before changing it.
    """
    try:
        code = inspect.getsource(type(module).forward)
    except (OSError, TypeError, AttributeError):  # the class of a scripted module has no forward
        return None
    for line in re.finditer(_UNPACKED, code, re.MULTILINE):
        name = line[3]
        changed = rf"\b{name}\b[^=\n]*(?<![=!<>])=(?!=)"
        before = code[code.find(":\n") : line.start()]
        if name not in arguments or re.search(changed, before):
            continue
        for axis, word in enumerate(line.groups()[:2]):
            if word.lower() in _BATCH:
                return axis, f"the forward unpacks {name}.shape as {line[1]}, {line[2]}"
    return None


def said_batch_first(module: nn.Module) -> bool | None:
    """Return the `batch_first` of a module, or of a part of one of torch's; None if it has none."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    parts = module.modules() if is_of_torch else [module]
    for part in parts:
        batch_first = getattr(part, "batch_first", None)
        if isinstance(batch_first, bool):
            return batch_first
    return None


@dataclass(frozen=True)
class Layout:
    """Whether the batch comes first in the arguments of a forward."""

    batch_first: bool
    why: str = ""
    """The end of a sentence; empty if it is plain."""
    is_assumed: bool = False
    """Whether nothing that the module says shows it."""


def layout_of(module: nn.Module, arguments: Collection[str]) -> Layout:
    """Return the layout of these arguments. The batch is first, unless the module shows another layout.

    It shows that by `batch_first`, or its forward by `T, B, C = x.shape`.
    """
    if is_hugging_face(module):
        return Layout(batch_first=True)
    batch_first = said_batch_first(module)
    if batch_first is not None:
        return Layout(batch_first)
    unpacked = batch_axis_in_words(module, arguments)
    if unpacked is not None:
        axis, words = unpacked
        if axis == 0:
            return Layout(batch_first=True)
        return Layout(batch_first=False, why=f"{words}. Use --batch-first for the other layout.")
    return Layout(batch_first=True, is_assumed=True)


# -- by the layers inside, in one run ----------------------------------------------------------------------------------


def layout_by_layers(subject: Subject, batch: int, length: int) -> Layout:
    """Return the layout with which the layers that take the sequence first are given it, from one run of a copy.

    The subject's inputs are `batch length embed`. If such a layer gets them with their axes as they came, the forward
    takes the sequence first; not if its output is by batch item, because then the second axis is that of tokens.
    """
    kind = sequence_first(subject.module)
    if batch == length or not kind:
        return Layout(batch_first=True)
    given: set[tuple[int, ...]] = set()
    returned: Any = None
    with torch.no_grad(), warnings.catch_warnings(), subject.apart() as copied:
        warnings.simplefilter("ignore")  # the user did not ask for this call
        for layer in copied.module.modules():
            if getattr(layer, "batch_first", None) is False:
                layer.register_forward_pre_hook(partial(_note_axes, given), with_kwargs=True)
        with suppress(Exception):  # it is raised again when the forward is recorded
            returned = copied.plain()
    if given == {(batch, length)} and not _is_by_item(returned, batch, length):
        why = (
            f"the {kind} inside takes the sequence first, and nothing before it exchanges the axes. If yours are "
            "`batch seq`, it attends over the batch: --batch-first shows that."
        )
        return Layout(batch_first=False, why=why)
    if (batch, length) in given:
        why = f"the forward does not say, but its {kind} takes the sequence first. Use --seq-first for that layout."
        return Layout(batch_first=True, why=why)
    return Layout(batch_first=True)


def sequence_first(module: nn.Module) -> str:
    """Return the class of the first layer that takes `sequence batch embed`, as torch's do by default."""
    for layer in module.modules():
        if getattr(layer, "batch_first", None) is False:
            return type(layer).__name__
    return ""


def _note_axes(given: set[tuple[int, ...]], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add the first two sizes of a layer's first argument of three dimensions."""
    for _, tensor in tensors_in((args, kwargs)):
        if tensor.dim() == 3:
            sizes = tuple(tensor.shape[:2])
            given.add(sizes)
            return


def _is_by_item(returned: Any, batch: int, length: int) -> bool:
    """Return whether an output `batch classes` has lost the second axis of the inputs."""
    for _, tensor in tensors_in(returned):
        return tensor.shape[:1] == (batch,) and length not in tensor.shape
    return False

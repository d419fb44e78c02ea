"""Find the source line and the module that called an operation; switch dispatch modes on and off."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

RUNNING: ContextVar[tuple[object, ...]] = ContextVar("active blocks", default=())
"""The blocks that are recording in this context. torch's modes belong to a thread, so this is what keeps other tasks
and callbacks of the thread out of a recording."""


def put_on(mode: TorchDispatchMode) -> None:
    """Push a dispatch mode onto this thread's stack, without any other effect.

    A mode's own `__enter__` also sets global variables that say whether a mode is active. All threads share them, two
    threads that enter and leave concurrently corrupt them, and the recorder does not need them.
    """
    dispatch._push_mode(mode)


def take_off(mode: TorchDispatchMode) -> None:
    """Remove a mode from the stack, even below other modes; do nothing if it is not there.

    Concurrent tasks leave their blocks in any order, while torch always removes the top mode.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    places = [place for place, active in enumerate(stack) if active is mode]
    if not places:
        return
    above = stack[places[-1] + 1 :]
    for _ in above:
        dispatch._pop_mode()
    dispatch._pop_mode()
    for active in above:
        dispatch._push_mode(active)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PASS_ON = tuple(
    os.sep.join(("torch", *tail))
    for tail in (("nn", "modules", "module.py"), ("_ops.py",), ("utils", "_contextlib.py"))
)
_OWN = tuple(
    os.path.join(_PACKAGE, room, "")
    for room in ("record", "compare", "failures", "checks", "checkpoints", "fixes", "questions")
)
"""Folders of this package whose code only passes calls from the user's code on to torch."""
ATTENTION_FORWARD = nn.MultiheadAttention.forward.__code__
"""The function that chooses the fast path."""
_WRITTEN_OUT = {ATTENTION_FORWARD}
for _name in ("multi_head_attention_forward", "_in_projection", "_in_projection_packed"):
    _function = getattr(torch.nn.functional, _name, None)
    if _function is not None:  # two are private and may disappear
        _WRITTEN_OUT.add(_function.__code__)
"""torch functions that compute attention step by step: their lines are more informative than others of torch."""


class Place(NamedTuple):
    """The location of a function's code."""

    file: str
    """Path to show; empty for code that only passes calls on."""
    library: bool
    """Whether it is part of torch or of this package."""
    written_out: bool
    """Whether it is a torch function that computes attention step by step."""


def place_of(code: CodeType) -> Place:
    """Return the location of a function's code."""
    place = place_of_file(code.co_filename)
    return place._replace(written_out=True) if code in _WRITTEN_OUT and place.file else place


@cache
def place_of_file(path: str) -> Place:
    """Return the location of code in a file. Equal functions of two files are equal codes, so the path is the key."""
    if path.startswith(_OWN) or path.endswith(_PASS_ON):
        return Place("", library=True, written_out=False)
    if path.startswith(_TORCH):
        inside = path.removeprefix(_TORCH).replace(os.sep, "/")
        return Place(f"torch/{inside}", library=True, written_out=False)
    for root in sorted(sys.path, key=len, reverse=True):
        if root and "packages" in root and path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    else:
        here = os.getcwd() + os.sep
        parent = os.path.dirname(_PACKAGE) + os.sep
        path = path.removeprefix(parent) if path.startswith(parent + "mha_inspect") else path.removeprefix(here)
    return Place(path.replace(os.sep, "/"), library=False, written_out=False)


class _Line(NamedTuple):
    """The line of an instruction."""

    text: str
    """`attention.py:41`; empty for code that only passes calls on."""
    place: Place
    """The location of its function's code."""
    code: CodeType
    """Referenced so that its id stays unique."""


_LINES: dict[tuple[int, int], _Line] = {}
"""Id of the code and instruction to the line: hashing code is slower."""


def _line_at(code: CodeType, instruction: int) -> _Line:
    """Return the line of an instruction, and note it in `_LINES`."""
    place = place_of(code)
    text = f"{place.file}:{_number_of_line(code, instruction)}" if place.file else ""
    line = _LINES[id(code), instruction] = _Line(text, place, code)
    return line


def _number_of_line(code: CodeType, instruction: int) -> int:
    """Return the number of the line of an instruction; that of the function if the instruction has no line."""
    for start, end, line in code.co_lines():
        if start <= instruction < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


Site = list[Any]
"""Code and instruction of each frame, from the innermost to the nearest call of a module, then its `ModuleCall`; all
frames inside the recorded block if no module is called."""


class ModuleCall:
    """One call of a module, running or finished."""

    __slots__ = ("above", "numbers", "path")

    def __init__(self, path: str, above: Site, number: int) -> None:
        self.path = path
        self.above = above
        """The frames that called the module."""
        self.numbers: tuple[int, ...] = (*numbers_of_site(above), number)
        """Numbers of the module calls that this one runs in, the outermost first, and its own."""


def numbers_of_site(site: Site) -> tuple[int, ...]:
    """Return the numbers of the module calls that an operation ran in, the outermost first; empty outside of any."""
    if not site:
        return ()
    last = site[-1]
    return last.numbers if isinstance(last, ModuleCall) else ()


def place_of_site(site: Site) -> tuple[str, str]:
    """Return the line that called an operation, and the path of the module that it ran in.

    The line is the innermost one outside torch; if there is none, the innermost in torch, at best of a function that
    computes attention step by step; else empty.
    """
    path = site[-1].path if site and isinstance(site[-1], ModuleCall) else ""
    written_out = library = ""
    inner: Site | None = site
    while inner is not None:
        for place in range(0, len(inner) - 1, 2):
            code, instruction = inner[place], inner[place + 1]
            text, of, _ = _LINES.get((id(code), instruction)) or _line_at(code, instruction)
            if text and not of.library:
                return text, path
            if of.written_out:
                written_out = written_out or text
            library = library or text
        inner = inner[-1].above if inner and isinstance(inner[-1], ModuleCall) else None
    return written_out or library, path

"""Where Python stands when an operation is asked for: noted while it runs, told as lines and modules afterwards.

And whether that is in the code that a recorder is entered around: what other threads, tasks and generators run is not.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from inspect import CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

RUNNING: ContextVar[tuple[Block, ...]] = ContextVar("blocks that were entered", default=())
"""torch's modes belong to a thread. That a task or callback beside this one is not recorded is up to us."""


def put_on(mode: TorchDispatchMode) -> None:
    """Put a mode of torch's on top of the stack of this thread, and touch nothing else.

    A mode's own `__enter__` notes in variables of a module, which all threads share, whether any mode is on. Two
    threads that enter and leave beside each other leave those wrong, and the recorder needs none of what asks for them.
    """
    dispatch._push_mode(mode)


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off, also from under others; nothing where it is not on.

    Tasks and generators that take turns leave their blocks in any order, and torch would take off whatever is on top.
    """
    stack = dispatch._get_current_dispatch_mode_stack()
    places = [place for place, other in enumerate(stack) if other is mode]
    above = stack[places[-1] + 1 :] if places else []
    for _ in above:
        dispatch._pop_mode()
    if places:
        dispatch._pop_mode()
    for other in above:
        dispatch._push_mode(other)


class Block:
    """The code that a recorder was entered around."""

    __slots__ = ("frame", "is_generator", "within")

    def __init__(self, frame: FrameType, running: tuple[Block, ...]) -> None:
        self.frame: FrameType | None = frame
        """The frame that it stands in: whatever called that one did not ask for the operations. None at the end."""
        self.is_generator = bool(frame.f_code.co_flags & CO_GENERATOR)
        self.within = _around(frame, running)
        """The blocks that it was entered in."""

    def asks(self, frame: FrameType | None, running: tuple[Block, ...]) -> bool:
        """Return whether what a frame asks for belongs to this block.

        A generator that has stood still in its block is recorded with whoever goes on, as somebody's context manager
        is; but not where that is a block of its own that this one was not entered in, as another generator's.
        """
        around = _around(frame, running)
        return self in around or all(block in self.within for block in around)


def _around(frame: FrameType | None, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks whose frames are beneath a frame, or are it."""
    frames = set()
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    return tuple(block for block in blocks if block.frame in frames)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PASS_ON = tuple(
    os.sep.join(("torch", *tail))
    for tail in (("nn", "modules", "module.py"), ("_ops.py",), ("utils", "_contextlib.py"))
)
_OWN = (
    os.path.join(_PACKAGE, "record", ""),
    os.path.join(_PACKAGE, "answers", ""),
)
"""Folders of this package whose code runs between the user's and torch's, and asks for nothing itself."""
ATTENTION_FORWARD = nn.MultiheadAttention.forward.__code__
"""The function that decides on the fast path."""
_WRITTEN_OUT = {ATTENTION_FORWARD} | {
    function.__code__
    for name in ("multi_head_attention_forward", "_in_projection", "_in_projection_packed")
    if (function := getattr(torch.nn.functional, name, None)) is not None  # two are private: they may go
}
"""Functions of torch that write attention out step by step: their lines tell more than the line that called them."""


@dataclass(frozen=True)
class Place:
    """Where a function's code stands."""

    file: str
    """Path to show; empty for code that only passes calls on."""
    library: bool
    """Whether it belongs to torch or to this recorder."""
    written_out: bool
    """Whether it is a function of torch that writes attention out."""


@cache
def place_of(code: CodeType) -> Place:
    """Where a function's code stands."""
    path = code.co_filename
    if path.startswith(_OWN) or path.endswith(_PASS_ON):
        return Place("", library=True, written_out=False)
    if path.startswith(_TORCH):
        return Place(
            "torch/" + path[len(_TORCH) :].replace(os.sep, "/"), library=True, written_out=code in _WRITTEN_OUT
        )
    for root in sorted(sys.path, key=len, reverse=True):
        if root and "packages" in root and path.startswith(root + os.sep):
            path = path[len(root) + 1 :]
            break
    else:
        here = os.getcwd() + os.sep
        own = os.path.dirname(_PACKAGE) + os.sep
        path = path.removeprefix(own) if path.startswith(own + "mha_inspect") else path.removeprefix(here)
    return Place(path.replace(os.sep, "/"), library=False, written_out=False)


@dataclass(frozen=True)
class Line:
    """A line that some operation was asked for by, directly or further down."""

    text: str
    """`attention.py:41`; empty for code that only passes calls on."""
    library: bool
    """Whether it is a line of torch that says less than the line that called it."""


_LINES: dict[tuple[int, int], tuple[Line, CodeType]] = {}
"""By the code's address and the instruction in it, as to hash code takes longer. The code is held, so that no other
comes to stand at its address."""


def line_at(code: CodeType, instruction: int) -> Line:
    """Return the line of an instruction, given as `f_lasti` of a frame tells it."""
    known = _LINES.get((id(code), instruction))
    if known is None:
        place = place_of(code)
        number = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
        text = f"{place.file}:{number or code.co_firstlineno}" if place.file else ""
        known = _LINES[id(code), instruction] = Line(text, place.library and not place.written_out), code
    return known[0]


Site = list[Any]
"""Code and instruction of each frame from the innermost to the first call of a module, that one included, then its
`ModuleCall`; up to the boundary where no module is being called. One list stands for one place in one call."""


class ModuleCall:
    """One call of a module that is or was running."""

    __slots__ = ("above", "path", "refused_at")

    def __init__(self, path: str, above: Site) -> None:
        self.path = path
        self.above = above
        """Where it was called from."""
        self.refused_at = -1
        """Where torch's multi-head attention stood when it was last asked why it takes no fast path."""


def is_in_script(site: Site) -> bool:
    """Return whether no Python runs inside the innermost call of a module: what is called there was compiled."""
    return len(site) == 3 and isinstance(site[-1], ModuleCall)


def place_of_site(site: Site) -> tuple[str, str]:
    """Return the line that asked for an operation, and the path of the module that it ran in.

    The line is the innermost that is not torch's; one of torch where there is none, empty where there is neither.
    """
    path = site[-1].path if site and isinstance(site[-1], ModuleCall) else ""
    library = ""
    above: Site | None = site
    while above is not None:
        inner, above = above, None
        for place in range(0, len(inner) - 1, 2):
            line = line_at(inner[place], inner[place + 1])
            if not line.library:
                if line.text:
                    return line.text, path
            elif not library:
                library = line.text
        if inner and isinstance(inner[-1], ModuleCall):
            above = inner[-1].above
    return library, path

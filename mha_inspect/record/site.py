"""Where Python stands when an operation is asked for, as lines and modules; and the modes that are on."""

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

RUNNING: ContextVar[tuple[object, ...]] = ContextVar("blocks that were entered", default=())
"""torch's modes belong to a thread. That a task or callback beside this one is not recorded is up to us."""


def put_on(mode: TorchDispatchMode) -> None:
    """Put a mode of torch's on top of the stack of this thread, and touch nothing else.

    A mode's own `__enter__` notes in variables of a module, which all threads share, whether any mode is on. Two
    threads that enter and leave beside each other leave those wrong, and the recorder needs none of what asks for them.
    """
    dispatch._push_mode(mode)


def take_off(mode: TorchDispatchMode) -> None:
    """Take a mode off, also from under others; nothing where it is not on.

    Tasks that take turns leave their blocks in any order, and torch would take off whatever is on top.
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


class Place(NamedTuple):
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


_LINES: dict[tuple[int, int], tuple[str, bool, CodeType]] = {}
"""By the code's address and the instruction in it, as to hash code takes longer: the line, `attention.py:41`, empty for
code that only passes calls on; whether it is torch's and says less than the line that called it; and the code, held so
that no other comes to stand at its address."""


def _line_at(code: CodeType, instruction: int) -> tuple[str, bool, CodeType]:
    place = place_of(code)
    number = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    text = f"{place.file}:{number or code.co_firstlineno}" if place.file else ""
    return _LINES.setdefault((id(code), instruction), (text, place.library and not place.written_out, code))


Site = list[Any]
"""Code and instruction of each frame from the innermost to the first call of a module, that one included, then its
`ModuleCall`; up to the boundary where no module is being called."""


class ModuleCall:
    """One call of a module that is or was running."""

    __slots__ = ("above", "path")

    def __init__(self, path: str, above: Site) -> None:
        self.path = path
        self.above = above
        """Where it was called from."""


def place_of_site(site: Site) -> tuple[str, str]:
    """Return the line that asked for an operation, and the path of the module that it ran in.

    The line is the innermost that is not torch's; one of torch where there is none, empty where there is neither.
    """
    path = site[-1].path if site and isinstance(site[-1], ModuleCall) else ""
    library = ""
    inner: Site | None = site
    while inner is not None:
        for place in range(0, len(inner) - 1, 2):
            code, instruction = inner[place], inner[place + 1]
            text, tells_less, _ = _LINES.get((id(code), instruction)) or _line_at(code, instruction)
            if text and not tells_less:
                return text, path
            library = library or text
        inner = inner[-1].above if inner and isinstance(inner[-1], ModuleCall) else None
    return library, path

"""`--watch`: answer again on each save of a file, from a process that has imported torch once.

Each answer is a child of this process, forked from it: the user's modules are imported anew, and whatever they change,
or break, ends with the child.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from ..errors import ExitCode, InputError
from ..render import screen
from ..text import shown
from .messages import explain
from .output import write
from .process import import_torch, resume_collection

_SETTLED = 50
"""Milliseconds without another change after which a save is over."""
_ROOMS = (
    "record",
    "graph",
    "naming",
    "running",
    "measure",
    "compare",
    "failures",
    "checks",
    "call",
    "making",
    "render",
)
"""Packages that an answer needs, imported before the first with all that they import."""

Answer = Callable[[], str]
"""Prints a page, and returns its verdict; empty if there is none."""


def watched(answer: Answer, file: Path) -> ExitCode:
    """Answer now and after each save of a Python file in the folder of this one, until Ctrl-C.

    Raises `InputError` where processes cannot be forked, or the library that watches files is missing.
    """
    if not hasattr(os, "fork"):
        raise InputError("--watch needs a system that can fork a process, e.g. Linux or macOS. Run the command again.")
    changes = _changes_in(file.resolve().parent)
    _import_all()
    before = ""
    try:
        while True:
            screen.clear(sys.stdout)
            before = _in_child(answer, before) or before
            write(f"\nwatching {shown(file)}; Ctrl-C ends\n")
            if next(changes, None) is None:
                return ExitCode.OK
    except KeyboardInterrupt:
        return ExitCode.OK


def _changes_in(folder: Path) -> Iterator[object]:
    """Return an iterator that gives something whenever Python files of a folder were saved."""
    try:
        from watchfiles import PythonFilter, watch
    except ImportError:
        raise InputError("--watch needs watchfiles: pip install 'mha-inspect[watch]'") from None
    return watch(folder, watch_filter=PythonFilter(), recursive=False, debounce=400, step=_SETTLED)


def _import_all() -> None:
    """Import torch and what an answer needs: a child then only does the user's work."""
    resume_collection()
    import_torch()
    root = import_module(__package__.rpartition(".")[0])
    for room in _ROOMS:
        package = import_module(f"{root.__name__}.{room}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)


def _in_child(answer: Answer, before: str) -> str:
    """Answer in a process of its own, and return the verdict; empty if it has none.

    A verdict other than the one before is followed by that one.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        os._exit(_answer_and_tell(answer, before, writes))
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as pipe:
        verdict = pipe.read()
    os.waitpid(child, 0)
    return verdict


def _answer_and_tell(answer: Answer, before: str, writes: int) -> int:
    """Print the answer and what the verdict was before, write the verdict into a pipe, and return the exit code."""
    code = ExitCode.OK
    try:
        verdict = answer()
        if before and verdict and verdict != before:
            write(f"\nchanged; before: {before}\n")
        os.write(writes, verdict.encode())
    except (Exception, KeyboardInterrupt) as error:
        code = explain(error)
    sys.stdout.flush()
    return int(code)

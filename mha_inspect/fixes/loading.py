"""Run an edited source in memory in the place of its file: nothing is written to disk."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..making.importing import at_import


def is_own(module: ModuleType) -> bool:
    """Return whether a module is of a file of the user: one of Python, and of no installed package."""
    file = module.__file__ or ""
    return file.endswith(".py") and f"-packages{os.sep}" not in file


@contextmanager
def in_place_of(module: ModuleType, content: bytes) -> Iterator[ModuleType]:
    """Run the block with a module of this source in the place of `module`, under its name.

    Raises any error of the source: it may be no Python, or its code may raise.
    """
    file = module.__file__
    assert file is not None
    code = compile(content, file, "exec", dont_inherit=True)
    fresh = ModuleType(module.__name__)
    for name in ("__file__", "__package__", "__spec__", "__loader__"):
        setattr(fresh, name, getattr(module, name, None))
    before, lines = sys.modules.get(module.__name__, module), linecache.cache.get(file)
    text = content.decode("utf-8-sig")
    sys.modules[module.__name__] = fresh
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        with at_import(file):
            exec(code, vars(fresh))
        yield fresh
    finally:
        sys.modules[module.__name__] = before
        linecache.cache.pop(file, None)
        if lines is not None:
            linecache.cache[file] = lines

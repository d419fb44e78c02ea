"""Where a forward failed: the user's line, the variables there, and the module that was running."""

from __future__ import annotations

import dis
import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
from torch import nn

from ...record.site import place_of

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
MODULE_CALL = nn.Module._call_impl.__code__
ATTENTION_FORWARDS = {nn.MultiheadAttention.forward.__code__, nn.Transformer.forward.__code__}
_PASSES_ON = ("einops/", "mha_inspect/record", "mha_inspect/answers/failure")

Entry = tuple[FrameType, TracebackType]


@dataclass(frozen=True)
class Site:
    """The line that failed. It holds tensors: it must not outlive the error that it was read from."""

    source: str
    line: str
    variables: tuple[tuple[str, torch.Tensor], ...]
    """The tensors among the variables of the user's frame, with their names."""
    module: object
    """The innermost module whose forward was running; None without one."""
    by_user: bool
    """Whether the user's own code was the last to run."""
    raises: bool
    """Whether the user's own code raised by a `raise` or an `assert`."""

    def named_here(self) -> list[tuple[str, torch.Tensor]]:
        """Return the variables that the failing line names, in the order in which it does."""
        known = dict(self.variables)
        return [(name, known[name]) for name in dict.fromkeys(re.findall(r"\w+", self.line)) if name in known]


def site_of(error: BaseException, *, in_block: bool = False) -> Site | None:
    """Read the traceback of an error that came out of a forward, or of the body of a `with` block.

    Returns None where the forward was not entered: the call itself did not fit its signature.
    """
    entries = entries_inside(error, in_block=in_block)
    bodies = [entry for entry in entries if _file(entry[0])[0] and entry[0].f_code is not MODULE_CALL]
    if not bodies:
        return None
    by_user = [entry for entry in bodies if not _file(entry[0])[1]]
    frame, tb = (by_user or bodies)[-1]
    modules = [inside.f_locals["self"] for inside, _ in entries if inside.f_code is MODULE_CALL]
    is_last = bool(by_user) and bodies[-1] is by_user[-1]
    return Site(
        source=f"{_file(frame)[0]}:{tb.tb_lineno}",
        line=linecache.getline(frame.f_code.co_filename, tb.tb_lineno).strip(),
        variables=tuple((name, value) for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor))
        if by_user
        else (),
        module=modules[-1] if modules else None,
        by_user=is_last,
        raises=is_last and dis.opname[frame.f_code.co_code[max(tb.tb_lasti, 0)]] == "RAISE_VARARGS",
    )


def entries_of(error: BaseException) -> Iterator[Entry]:
    """Yield the frames of an error's traceback, outermost first."""
    tb = error.__traceback__
    while tb is not None:
        yield tb.tb_frame, tb
        tb = tb.tb_next


def entries_inside(error: BaseException, *, in_block: bool) -> list[Entry]:
    """Return the frames of a traceback from the first call of a module on; all of them where that was a block."""
    entries = list(entries_of(error))
    first = next((place for place, (frame, _) in enumerate(entries) if frame.f_code is MODULE_CALL), len(entries))
    return entries if in_block else entries[first:]


def _file(frame: FrameType) -> tuple[str, bool]:
    """Return the file of a frame as sources show it, empty for code that passes calls on; and whether a library's."""
    place = place_of(frame.f_code)
    stdlib = frame.f_code.co_filename.startswith(_STDLIB) and "-packages" not in frame.f_code.co_filename
    return ("", True) if stdlib or place.file.startswith(_PASSES_ON) else (place.file, place.library)

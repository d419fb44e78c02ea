"""The lines of a file that a finding names, and those that a run executes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any

from ..record.site import place_of_file


def named_line(module: ModuleType, source: str, count: int) -> int | None:
    """Return the number of the line that a finding names, `attention.py:41`; None if it is of another file."""
    file = place_of_file(module.__file__ or "").file
    for number in range(1, count + 1):
        if f"{file}:{number}" == source:
            return number
    return None


def executed_lines(module: ModuleType, run: Callable[[], Any]) -> set[int]:
    """Return the lines of a file that a call executes. Errors of the call are passed over."""
    lines: set[int] = set()
    watched: dict[CodeType, bool] = {}

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in watched:
            watched[code] = code.co_filename == module.__file__
        return on_line if watched[code] else None

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        lines.add(frame.f_lineno)
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    except Exception:  # a forward that raises is what may be fixed
        return lines
    finally:
        sys.settrace(before)
    return lines

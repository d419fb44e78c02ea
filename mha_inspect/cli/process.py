"""The process of the command line: when Python collects garbage, and what Ctrl-C does while torch is imported.

Start-up makes hundreds of thousands of objects and drops none, and looking for cycles in them takes a third of its
time. So collection begins with the work, and leaves the objects of start-up alone.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from types import FrameType

from ..errors import ExitCode


def resume_collection() -> None:
    """Turn on garbage collection, for objects made from here on. Does nothing if it is on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def import_torch() -> None:
    """Import torch, so that Ctrl-C ends the process at once: libraries in C may abort on an interrupted import."""
    is_main = threading.current_thread() is threading.main_thread()
    # Ctrl-C may be ignored, e.g. in the background of a shell.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if "torch" in sys.modules or not is_main or not is_heard:
        importlib.import_module("torch")
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        importlib.import_module("torch")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process as interrupted. The cursor, which a progress line hides, is shown again."""
    if sys.stderr is not None:
        cursor = "\x1b[?25h\r" if sys.stderr.isatty() else ""
        os.write(2, f"{cursor}mha-inspect: interrupted.\n".encode())
    os._exit(ExitCode.INTERRUPTED)

"""The process of the command line: when Python collects garbage, and how a signal ends it.

Start-up makes hundreds of thousands of objects and drops none, and looking for cycles in them takes a third of its
time. So collection begins with the work, and leaves the objects of start-up alone.

Python runs its signal handlers between two of its instructions, and a product of large matrices is one instruction
that lasts minutes. The signal itself writes a byte to the wakeup descriptor at once; torch works without the
interpreter's lock, so a thread that waits for this byte can end the process.
"""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def resume_collection() -> None:
    """Turn on garbage collection, for objects made from here on. Does nothing if it is on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def leave(number: int) -> None:
    """End the process by a signal, now: no handler, no flush, and no half-written file left behind."""
    export = sys.modules.get("mha_inspect.render.export")
    if export is not None:
        export.remove_unfinished()
    try:
        # The terminal has echoed ^C at the cursor: the word goes on the next line.
        screen = sys.modules.get("mha_inspect.render.screen")
        cursor = b"\x1b[?25h" if screen is not None and screen.waits else b""
        word = b"Interrupted.\n" if number == signal.SIGINT else b"Terminated.\n"
        os.write(2, cursor + b"\n" + word if os.isatty(2) else word)
        ranks = sys.modules.get("mha_inspect.cli.ranks")
        if number == signal.SIGTERM and ranks is not None and ranks.member is not None:
            ranks.member.terminated()
    finally:
        os._exit(128 + number)  # as in a shell: 130 for Ctrl-C


@contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process at once with exit code 130; SIGTERM with 143, SIGHUP with 129.

    A signal that is ignored on purpose (Ctrl-C in a background job, SIGHUP under nohup) stays ignored. Nothing changes
    on a platform where a pipe cannot be a wakeup descriptor.
    """
    usual = (signal.default_int_handler, signal.SIG_DFL)
    before = {number: handler for number in _ENDING if (handler := signal.getsignal(number)) in usual}
    if os.name != "posix" or not before:
        yield
        return
    waiting, woken = os.pipe()
    os.set_blocking(woken, False)

    def watch() -> None:
        while received := os.read(waiting, 64):
            for number in before:
                if number in received:
                    leave(number)
        os.close(waiting)

    descriptor = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    # Only the thread answers: an exception in the main thread would race with it, and could interrupt an import or a
    # destructor with noise.
    for number in before:
        signal.signal(number, lambda number, frame: None)
    _thread.start_new_thread(watch, ())
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)

"""Ctrl-C, and being told to end, while torch is inside one long product.

Python runs its signal handlers between two instructions of its own, and a product of large matrices is one instruction
that lasts minutes. The signal itself, though, arrives in C at once and writes a byte to the wakeup descriptor; torch
works without the interpreter's lock, so a thread that waits for this byte can end the process.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_end = os._exit
"""Held, because a target's own call of it is kept from ending the process."""
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that end the process; SIGHUP is not known everywhere."""


def leave(number: int) -> None:
    """End the process by a signal, now: no handler, no flush, and no half-written file left behind."""
    export = sys.modules.get(f"{__package__}.export")
    if export is not None:
        export.remove_unfinished()
    try:
        # A terminal has echoed ^C where the cursor was: the word goes on a line of its own.
        word = b"Interrupted.\n" if number == signal.SIGINT else b"Terminated.\n"
        os.write(2, b"\n" + word if os.isatty(2) else word)
    finally:
        _end(128 + number)  # as a shell tells it; 130 for Ctrl-C


@contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process with exit code 130 at once, wherever it is; SIGTERM with 143, SIGHUP with 129.

    A signal that is ignored on purpose (Ctrl-C in a background job, SIGHUP under nohup) stays so. Where this is not the
    main thread, or the platform has no pipe that can be a wakeup descriptor, everything stays as it is.
    """
    usual = (signal.default_int_handler, signal.SIG_DFL)
    known = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
    ending = {number: found for number in known if (found := signal.getsignal(number)) in usual}
    if os.name != "posix" or not ending:
        yield
        return
    waiting, woken = os.pipe()
    os.set_blocking(woken, False)

    def watch() -> None:
        while received := os.read(waiting, 64):
            for number in ending:
                if number in received:
                    leave(number)
        os.close(waiting)

    try:
        before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    except ValueError:
        os.close(woken)
        os.close(waiting)
        yield
        return
    # The thread answers alone: an exception in the main thread as well would race with it, and can end in the noise of
    # an import or a destructor that was cut in two.
    for number in ending:
        signal.signal(number, lambda number, frame: None)
    _thread.start_new_thread(watch, ())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        for number, found in ending.items():
            signal.signal(number, found)
        os.close(woken)

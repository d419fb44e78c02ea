"""A process of our own: when Python looks for cycles to free, and how a signal ends it.

To look for cycles in what start-up makes, hundreds of thousands of objects of which none is dropped, is a third of the
whole: nothing is collected until the work begins, and what was there by then is left alone.

Python runs its signal handlers between two instructions of its own, and a product of large matrices is one instruction
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
    """Collect where nothing was collected so far, and only what is made from here on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def leave(number: int) -> None:
    """End the process by a signal, now: no handler, no flush, and no half-written file left behind."""
    export = sys.modules.get("mha_inspect.render.export")
    if export is not None:
        export.remove_unfinished()
    try:
        # A terminal has echoed ^C where the cursor was: the word goes on a line of its own.
        screen = sys.modules.get("mha_inspect.render.screen")
        cursor = b"\x1b[?25h" if screen is not None and screen.waits else b""
        word = b"Interrupted.\n" if number == signal.SIGINT else b"Terminated.\n"
        os.write(2, cursor + b"\n" + word if os.isatty(2) else word)
    finally:
        os._exit(128 + number)  # as a shell tells it; 130 for Ctrl-C


@contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process with exit code 130 at once, wherever it is; SIGTERM with 143, SIGHUP with 129.

    A signal that is ignored on purpose (Ctrl-C in a background job, SIGHUP under nohup) stays so, as does everything
    where the platform has no pipe that can be a wakeup descriptor.
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
    # The thread answers alone: an exception in the main thread as well would race with it, and can end in the noise of
    # an import or a destructor that was cut in two.
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

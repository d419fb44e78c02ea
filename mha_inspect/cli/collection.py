"""When Python looks for cycles to free.

Start-up makes hundreds of thousands of objects (import torch alone) and drops none. To look through them for cycles,
again and again and once more at the end, is a third of the whole; so nothing is collected until the work begins, what
was there by then is left alone, and at the end all of it goes with the process.
"""

from __future__ import annotations

import gc

_held = False


def hold() -> None:
    """Collect nothing from here on: for a process of our own, at its start."""
    global _held
    if gc.isenabled():
        gc.disable()
        _held = True


def resume() -> None:
    """Import torch, and collect again what is made from here on. Nothing happens where `hold` was not called."""
    global _held
    if _held:
        _held = False
        import torch  # noqa: F401 - most of what is left alone

        gc.freeze()
        gc.enable()


def end() -> None:
    """Leave everything alone from here on: for a process of our own, at its end."""
    gc.freeze()

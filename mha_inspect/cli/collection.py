"""When Python looks for cycles to free.

Start-up makes hundreds of thousands of objects (import torch alone) and drops none. To look through them for cycles,
again and again and once more at the end, is a tenth of the whole; so nothing is collected until the work begins, and
what was there by then is left alone.
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
    """Collect again, and only what is made from here on. Nothing happens where `hold` was not called."""
    global _held
    if _held:
        _held = False
        gc.freeze()
        gc.enable()

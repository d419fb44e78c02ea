"""The process of the command line: when Python collects garbage.

Start-up makes hundreds of thousands of objects and drops none, and looking for cycles in them takes a third of its
time. So collection begins with the work, and leaves the objects of start-up alone.
"""

from __future__ import annotations

import gc


def resume_collection() -> None:
    """Turn on garbage collection, for objects made from here on. Does nothing if it is on."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()

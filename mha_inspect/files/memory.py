"""Limit the memory of this process: an allocation that exceeds the limit raises an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import DoesNotFitError, InputError
from ..text import byte_size

_TO_LOAD = 768 * 2**20
"""Bytes of address space that `import torch` needs, before any computation."""
_SHARE = 0.97
"""Share of the free memory that a command may use: the kernel needs pages of its own for the mapping."""
_STATUS = Path("/proc/self/status")


def require_loadable() -> None:
    """Check that torch can be imported. Without enough memory its C code ends the process with no Python error.

    Raise `DoesNotFitError` if a limit (ulimit -v) leaves too little address space, and `InputError` if the working
    folder no longer exists.
    """
    try:
        os.getcwd()
    except OSError:
        raise InputError(
            "the working folder no longer exists, and torch cannot be imported without one. Use another: cd ~"
        ) from None
    if "torch" in sys.modules or sys.platform != "linux":
        return
    from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

    limit, _ = getrlimit(RLIMIT_AS)
    used = _field(_STATUS, "VmSize:")
    if limit != RLIM_INFINITY and used is not None and limit - used * 1024 < _TO_LOAD:
        raise DoesNotFitError(
            f"importing torch needs {byte_size(_TO_LOAD)} of address space, but a limit leaves "
            f"{byte_size(max(0, limit - used * 1024))}. Raise the limit: ulimit -v unlimited"
        )


@contextmanager
def limited_to_what_is_free(device: str = "cpu") -> Iterator[None]:
    """Limit this process to the memory that is free now, so that a larger allocation raises instead of being killed.

    Nothing changes where the system has no such limit, and for CUDA, which maps far more than it uses. A lower
    existing limit stays.
    """
    free, used = free_memory(), _field(_STATUS, "VmData:")
    if free is None or used is None or device.startswith("cuda"):
        yield
        return
    from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit, setrlimit

    soft, hard = getrlimit(RLIMIT_DATA)
    most = 1024 * used + int(_SHARE * free)
    setrlimit(RLIMIT_DATA, (most if soft == RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_DATA, (soft, hard))


def free_memory() -> int | None:
    """Return the bytes that Linux could give to a process now; None on another system."""
    available = _field(Path("/proc/meminfo"), "MemAvailable:")
    return None if available is None else 1024 * available


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of names and numbers; None if the file or the name is missing."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return None

"""Find how many bytes of memory are free, and refuse a command that needs more before it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DoesNotFitError, InputError
from ..text import byte_size

if TYPE_CHECKING:
    import torch

_TO_LOAD = 768 * 2**20
"""Bytes of address space that `import torch` needs, before any computation."""
_SMALL = 1 << 24
"""Bytes below which free memory is not checked: the check takes as long as filling them."""
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
def limited_to_what_is_free(device: str = "cpu") -> Iterator[int | None]:
    """Limit this process to the memory that is free now, so that a larger allocation raises instead of being killed.

    Yield the free bytes; None if the system has no such limit, and for CUDA, which maps far more than it uses. A lower
    existing limit stays.
    """
    free = linux_free_memory() if sys.platform == "linux" and not device.startswith("cuda") else None
    used = _field(_STATUS, "VmData:")
    if free is None or used is None:
        yield None
        return
    from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit, setrlimit

    soft, hard = getrlimit(RLIMIT_DATA)
    most = 1024 * used + int(_SHARE * free)
    if soft == RLIM_INFINITY or most < soft:
        setrlimit(RLIMIT_DATA, (most, hard))
    else:
        free = max(0, soft - 1024 * used)
    try:
        yield free
    finally:
        setrlimit(RLIMIT_DATA, (soft, hard))


def require_memory(need: int, device: torch.device | str, request: str, way_out: str) -> None:
    """Raise `DoesNotFitError` if `need` bytes do not fit on the device. Return if the free memory is unknown.

    `request` is described with its numbers, e.g. `seq_len 131072 with 128 heads`; `way_out` is a request that would
    fit.
    """
    free = free_memory(device) if need > _SMALL else None
    if free is not None and need > free:
        raise DoesNotFitError(
            f"{request} needs about {byte_size(need)}, but only {byte_size(free)} is free on {device}. {way_out}"
        )


def free_memory(device: torch.device | str) -> int | None:
    """Return the bytes that can be allocated on the device; None if unknown, or on meta, which allocates no memory."""
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        # The caching allocator can reuse its own free blocks, which the driver counts as used.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if kind == "cpu" and sys.platform == "linux":
        return linux_free_memory()
    with suppress(ValueError, OSError, AttributeError):  # macOS gives its physical memory: an upper bound, for mps too
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kind != "meta" else None
    return None


def linux_free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free bytes: the minimum of MemAvailable and the rest of each control group; None if unknown.

    A container sees the whole machine's /proc/meminfo; its limit is in its control group (version 1 or 2).
    """
    available = _field(proc / "meminfo", "MemAvailable:")
    bounds = [] if available is None else [available * 1024]
    groups = (proc / "self" / "cgroup").read_text().splitlines() if (proc / "self" / "cgroup").exists() else []
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit, used, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        if controllers:  # version 1
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        group = root / path.lstrip("/")
        # Every ancestor may set a limit. Inside a container only the mounted root may be visible.
        for place in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # the file is missing, or contains `max`
                most, now = (int((place / name).read_text()) for name in (limit, used))
                # Unused pages of files count as used, but are freed on demand.
                bounds.append(max(0, most - now + (_field(place / "memory.stat", cache) or 0)))
    return min(bounds, default=None)


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` in a file of names and numbers; None if the file or the name is missing."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return None

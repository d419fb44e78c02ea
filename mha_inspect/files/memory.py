"""How much memory is free, and refusing what does not fit before it is tried."""

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
"""Address space that torch takes while it is loaded, before it computes anything."""
_SMALL = 1 << 24
"""Bytes for which nobody asks how much is free: that takes as long as to fill them."""
_SHARE = 0.97
"""Of what is free, how much a command may take: the kernel needs pages of its own to map them."""
_STATUS = Path("/proc/self/status")


def require_loadable() -> None:
    """Let it pass where torch can be loaded: it ends the process in C where it cannot, and no error can be caught.

    Raises `DoesNotFitError` where a limit (ulimit -v) leaves too little, `InputError` where the working folder is gone.
    """
    try:
        os.getcwd()
    except OSError:
        raise InputError(
            "the working folder is gone, and torch cannot be loaded without one. Go to another one: cd ~"
        ) from None
    if "torch" in sys.modules or sys.platform != "linux":
        return
    from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit

    limit, _ = getrlimit(RLIMIT_AS)
    used = _field(_STATUS, "VmSize:")
    if limit != RLIM_INFINITY and used is not None and limit - used * 1024 < _TO_LOAD:
        raise DoesNotFitError(
            f"torch takes {byte_size(_TO_LOAD)} of address space to load, and a limit leaves "
            f"{byte_size(max(0, limit - used * 1024))}. Raise it: ulimit -v unlimited"
        )


@contextmanager
def limited_to_what_is_free(device: str = "cpu") -> Iterator[int | None]:
    """Let this process take what memory is free now inside, so that more is an error, and nothing that is killed.

    Yields the bytes that are free; None where the system sets no such limit, and for CUDA, which maps far more than it
    uses. A limit that is there and lower stays.
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


def require_memory(need: int, device: torch.device | str, asked: str, way_out: str) -> None:
    """Raise `DoesNotFitError` where `need` bytes do not fit on the device; let it pass where that cannot be known.

    `asked` is what was asked for, with its numbers: `seq_len 131072 with 128 heads`; `way_out` what would fit.
    """
    free = free_memory(device) if need > _SMALL else None
    if free is not None and need > free:
        raise DoesNotFitError(
            f"{asked} needs about {byte_size(need)} and {byte_size(free)} are free on {device}. {way_out}"
        )


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on the device; None where it cannot be known or nothing is allocated (meta)."""
    kind = str(device).partition(":")[0]
    if kind == "cuda":
        import torch

        # What the caching allocator holds without using it is free to us, though not to the driver.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if kind == "cpu" and sys.platform == "linux":
        return linux_free_memory()
    with suppress(ValueError, OSError, AttributeError):  # macOS tells its physical memory: an upper bound, for mps too
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kind != "meta" else None
    return None


def linux_free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the kernel calls available and what each control group above this process has left.

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
            with suppress(OSError, ValueError):  # no such file, or it says `max`
                most, now = (int((place / name).read_text()) for name in (limit, used))
                # Pages of files that nobody uses are counted as used, and given up on demand.
                bounds.append(max(0, most - now + (_field(place / "memory.stat", cache) or 0)))
    return min(bounds, default=None)


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of names and numbers."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return None

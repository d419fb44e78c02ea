"""How much memory is free, and refusing what does not fit before it is tried."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DoesNotFitError, InputError
from ..text import byte_size

if TYPE_CHECKING:
    import torch


_TO_LOAD = 768 * 2**20
"""Address space that torch takes while it is loaded, before it computes anything."""

_LARGE = 4 * 2**20
"""Bytes of a tensor from which on it has pages of its own: for smaller ones these would take a third of the time."""
_LEAST = 1 << 16
"""Bytes below which nothing has: a page has 4096, and a process 65,530 such ranges of them."""
_frees_at_once = False
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers that malloc.h has for these two settings."""


def require_loadable() -> None:
    """Let it pass where torch can be loaded: it ends the process in C where it cannot, and no error can be caught.

    Raises:
        DoesNotFitError: a limit (ulimit -v) leaves less address space than it takes.
        InputError: the working folder is gone, which its libraries are looked up from.
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
    used = _field(Path("/proc/self/status"), "VmSize:")
    if limit != RLIM_INFINITY and used is not None and limit - used * 1024 < _TO_LOAD:
        raise DoesNotFitError(
            f"torch takes {byte_size(_TO_LOAD)} of address space to load, and a limit leaves "
            f"{byte_size(max(0, limit - used * 1024))}. Raise it: ulimit -v unlimited"
        )


def free_at_once() -> None:
    """Have this process give back what it frees, where its allocator is glibc's.

    That keeps blocks of up to 32 MiB for later, and the more of them it has seen: a run would take up to twice as much,
    and what it takes would hang on what ran before it.
    """
    global _frees_at_once
    _frees_at_once = sys.platform == "linux"
    _give_back_from(_LARGE)


@contextmanager
def freeing_at_scale(share: float) -> Iterator[None]:
    """Run the body, whose tensors are this share of those in a run for good: what is given back there is so in it too.

    Nothing changes in a process that `free_at_once` was not called in.
    """
    _give_back_from(max(_LEAST, int(_LARGE * share)))
    try:
        yield
    finally:
        _give_back_from(_LARGE)


def _give_back_from(size: int) -> None:
    if _frees_at_once:
        from ctypes import CDLL

        with suppress(AttributeError):
            mallopt = CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, size)
            mallopt(_M_TRIM_THRESHOLD, 4 * size)


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on the device; None where it cannot be known or nothing is allocated (meta)."""
    kind = str(device).partition(":")[0]
    if kind in ("cuda", "mps"):
        import torch
    if kind == "cuda":
        # What the caching allocator holds without using it is free to us, though not to the driver.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if kind == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if kind == "meta":
        return None
    return linux_free_memory() if sys.platform == "linux" else _sysconf_memory()


def _sysconf_memory() -> int | None:
    """Free pages where the system tells them (macOS does not: its physical memory stands in, an upper bound)."""
    sysconf = getattr(os, "sysconf", None)
    if sysconf is None:
        return None
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with suppress(ValueError, OSError):
            return int(sysconf(pages)) * int(sysconf("SC_PAGE_SIZE"))
    return None


def linux_free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least of what the kernel calls available and what each control group above this process has left.

    A container sees the whole machine's /proc/meminfo; its limit is in its control group (version 1 or 2).
    """
    available = _field(proc / "meminfo", "MemAvailable:")
    whole = [] if available is None else [available * 1024]
    return min((*whole, *_group_bounds(proc, cgroups)), default=None)


def _group_bounds(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path).parts[1:]
        # Every ancestor may set a limit. Inside a container only the mounted root may be visible.
        for depth in range(len(parts) + 1):
            group = root.joinpath(*parts[:depth])
            most, now = _number(group / limit), _number(group / used)
            if most is not None and now is not None:
                # Pages of files that nobody uses are counted as used, and given up on demand.
                reclaimable = _field(group / "memory.stat", cache) or 0
                yield max(0, most - now + reclaimable)


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is no file, or it says `max`."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of names and numbers."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    return None


def require_memory(need: int, device: torch.device | str, asked: str, way_out: str) -> None:
    """Let it pass when `need` bytes fit on the device, or when that cannot be known.

    Args:
        need: bytes that it would take at its peak.
        device: where.
        asked: what was asked, with its numbers: `seq_len 131072 with 128 heads`.
        way_out: what would fit, as a sentence.

    Raises:
        DoesNotFitError: with the need, what is free, and the way out.
    """
    free = free_memory(device)
    if free is not None and need > free:
        raise DoesNotFitError(
            f"{asked} needs about {byte_size(need)} and {byte_size(free)} are free on {device}. {way_out}"
        )


def largest(fits: Callable[[int], bool], upper: int) -> int:
    """The largest n in 1 to `upper` with fits(n), which is true up to some n and false from there on; else 0."""
    return bisect_left(range(1, upper + 1), True, key=lambda n: not fits(n))

"""Trace a module on every rank that torchrun started: rank 0 prints the answer, and torchrun ends the others.

Every command imports this file, so that modules which only several ranks need are imported where they are used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import InputError, SpecError

if TYPE_CHECKING:
    from ..reports.trace import Trace
    from ..running.subject import Run, Subject

T = TypeVar("T")


class Place(NamedTuple):
    """The place of this process among several ranks."""

    rank: int
    world: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world}"


def place() -> Place | None:
    """Return the place of this process among the ranks that torchrun started; None if it is alone."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank.isdecimal() or not world.isdecimal() or int(world) < 2:
        return None
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return None
    return Place(int(rank), int(world))


def prints_answer() -> bool:
    """Return whether this process prints the answer: it is alone, or rank 0."""
    here = place()
    return here is None or here.rank == 0


def require_one_process(command: str) -> None:
    """Raise `SpecError` if torchrun started a command that runs in one process."""
    if place() is not None:
        raise SpecError(f"{command} runs in one process. Start it without torchrun, or use trace.")


def with_group(build: Callable[[], T]) -> T:
    """Build a target among several ranks; where it makes no process group, make one, for its forward too.

    A target that needs the group is built again. Raises `InputError` with a way out if there is no group for it.
    """
    try:
        return build() if place() is None else _with_group(build)
    except InputError as error:
        way = _way_out(_calls_of(error))
        if way:
            raise InputError(f"{error}. {way}") from error
        raise


def _with_group(build: Callable[[], T]) -> T:
    from torch import distributed

    try:
        built = build()
    except InputError as error:
        if "init_process_group" in _calls_of(error) or distributed.is_initialized():
            raise
        with suppress(Exception):  # the target's own error says more
            distributed.init_process_group()
        if not distributed.is_initialized():
            raise
        return build()
    if not distributed.is_initialized():
        distributed.init_process_group()
    return built


def _calls_of(error: BaseException | None) -> dict[str, dict[str, Any]]:
    """Return the functions that were running when an error and its causes were raised, with their variables."""
    from traceback import walk_tb

    calls: dict[str, dict[str, Any]] = {}
    while error is not None:
        calls |= {frame.f_code.co_name: frame.f_locals for frame, _ in walk_tb(error.__traceback__)}
        error = error.__context__
    return calls


def _way_out(calls: dict[str, dict[str, Any]]) -> str:
    """Return the way out, as a further sentence, of a call that needs other ranks or a device that is missing."""
    if place() is None and calls.keys() & {"_env_rendezvous_handler", "_get_default_group"}:
        return "Only one process is running: start the command with torchrun --nproc-per-node 2 -m mha_inspect trace."
    device = calls.get("init_device_mesh", {}).get("device_type")
    if device is None:
        return ""
    backend = getattr(sys.modules["torch"], device, None)
    is_available = getattr(backend, "is_available", bool)
    if is_available():
        return ""
    return f"This machine has no {device}. Give init_device_mesh another device, e.g. cpu."


def of_all_ranks(trace: Trace, run: Run, subject: Subject) -> Trace:
    """Return the trace, on rank 0 with a description of every rank. Nothing changes in a process that is alone."""
    here = place()
    if here is None:
        return trace
    from torch import distributed

    from ..measure.ranks import rank_of, with_copies
    from ..reports.trace import Rank

    of_each: list[dict[str, Any]] | None = [{}] * here.world if here.rank == 0 else None
    distributed.gather_object(asdict(rank_of(here.rank, trace, run, subject.module)), of_each)
    if of_each is None:
        return trace
    return replace(trace, ranks=with_copies([Rank(**fields) for fields in of_each]))

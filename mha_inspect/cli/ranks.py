"""Trace a module on every rank that torchrun started: rank 0 prints the answer, and torchrun ends the others.

Every command imports this file, so that modules which only several ranks need are imported where they are used.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import SpecError

if TYPE_CHECKING:
    from ..reports.trace import Trace
    from ..running.subject import Run, Subject


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


def of_all_ranks(trace: Trace, run: Run, subject: Subject) -> Trace:
    """Return the trace, on rank 0 with a description of every rank of the process group that the target made."""
    here = place()
    if here is None:
        return trace
    from torch import distributed

    if not distributed.is_initialized():
        return trace
    from ..measure.ranks import rank_of, with_copies
    from ..reports.trace import Rank

    of_each: list[dict[str, Any]] | None = [{}] * here.world if here.rank == 0 else None
    distributed.gather_object(asdict(rank_of(here.rank, trace, run, subject.module)), of_each)
    if of_each is None:
        return trace
    return replace(trace, ranks=with_copies([Rank(**fields) for fields in of_each]))

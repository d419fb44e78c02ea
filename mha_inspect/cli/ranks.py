"""Run a command on every rank that torchrun started, where rank 0 answers for all.

Results, failures and waits go through a store, apart from the process group: a collective could wait forever.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from threading import Event, Thread, main_thread
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..reports.trace import Trace
    from ..running.subject import Run, Subject

T = TypeVar("T")
_PATIENCE = 60
"""Seconds to wait until every rank has started."""
_STALLED = 5.0
"""Seconds at one instruction after which a rank is stuck."""
_IDLE = 0.1
"""Most seconds of computing in that time."""
_GRACE = 1.5
"""Seconds in which rank 0 may print a failure of its own, before that of another rank is printed."""
_LONGEST = 1 << 20
"""Most bytes of another rank's output."""


class Member:
    """This process as one of several ranks."""

    def __init__(self) -> None:
        from tempfile import TemporaryFile

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._out, self._err = os.dup(1), os.dup(2)
        self._said = [TemporaryFile("w+") for _ in (1, 2) if self.rank]  # noqa: SIM115 - closed with the process
        if self.rank:
            os.dup2(self._said[0].fileno(), 1)
            sys.stderr = self._said[1]  # not its descriptor: a crash in C++ leaves no time to pass its message on
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._store: Any = None
        self._watching = Thread(target=self._watch, daemon=True)
        self._has_left = Event()
        self._done = [f"done/{rank}" for rank in range(self.world)]
        """The keys under which ranks that have finished store their results."""

    def join(self) -> None:
        """Connect to the store, and watch the other ranks."""
        if self._store is None:
            from torch.distributed.rendezvous import rendezvous

            try:
                self._store, *_ = next(iter(rendezvous("env://", timeout=timedelta(seconds=_PATIENCE))))
            except RuntimeError:
                raise InputError(
                    f"RANK is {self.rank} and WORLD_SIZE {self.world}, but not all ranks started within "
                    f"{_PATIENCE} s. Start the command with torchrun, or unset WORLD_SIZE to run it alone."
                ) from None
            self._watching.start()

    def leave(self, code: int) -> int:
        """Store how the command ended, and return the exit code. Rank 0 is the last to end, unless it failed."""
        if self._store is None:  # no module was run: every rank ended alike
            return 0 if self.rank else code
        try:
            if code and self.rank:
                time.sleep(_GRACE)
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                said = [os.pread(file.fileno(), _LONGEST, 0).decode(errors="replace") for file in self._said]
                self._store.compare_set("failed", "", json.dumps([self.rank, code, *said]))
            else:
                self._store.compare_set(self._done[self.rank], "", "{}")
            while self.rank or not (code or self._store.check(self._done)):
                time.sleep(0.02)  # the watching thread ends a rank other than 0
            self._store.set("end", "")
            self._has_left.set()
            self._watching.join()  # Python cannot end while the thread is in the store's code
        except RuntimeError:  # the store has ended, and with it the launcher or rank 0
            os._exit(0 if self.rank else code)
        return code

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the results of all ranks, on rank 0. Any other rank ends its command here."""
        self._store.set(self._done[self.rank], json.dumps(mine))
        if self.rank:
            raise typer.Exit
        while not self._store.check(self._done):
            time.sleep(0.02)
        return [json.loads(value) for value in self._store.multi_get(self._done)]

    def _watch(self) -> None:
        from ..answers.ranks import stands_at

        before: object = None
        since, computed, said = 0.0, 0.0, None
        with suppress(RuntimeError):  # the store has ended, and with it the launcher or rank 0
            while not (self._has_left.wait(0.2) or (self.rank and self._store.check(["end"]))):
                now, busy = time.monotonic(), time.process_time() - time.thread_time()
                at, *place = stands_at(sys._current_frames().get(main_thread().ident or 0))
                if at != before or busy - computed > _IDLE:
                    before, since, computed = at, now, busy
                if said != (said := json.dumps(place if now - since > _STALLED else [])):
                    self._store.set(f"stuck/{self.rank}", said)
                if self.rank == 0:
                    self._look_for_failures()
        if self.rank:
            os._exit(0)

    def _look_for_failures(self) -> None:
        """End the command if another rank failed, or if no rank goes on and one waits for the others."""
        if self._store.check(["failed"]):
            rank, code, out, err = json.loads(self._store.get("failed"))
            self._end(code, out, f"{err}mha-inspect: rank {rank} of {self.world} failed: see above.\n")
        others = [rank for rank in range(self.world) if not self._store.check([self._done[rank]])]
        keys = [f"stuck/{rank}" for rank in others]
        places = [*map(json.loads, self._store.multi_get(keys))] if keys and self._store.check(keys) else []
        if all(places) and any(waits for _, waits in places):
            from ..text import listed, spans

            said = []
            for line, waits in dict.fromkeys(map(tuple, places)):
                stuck = spans(rank for rank, place in zip(others, places, strict=True) if place == [line, waits])
                where = f"at {line}" if line else "for the result of its forward"
                said.append(f"rank {stuck} {'waits' if waits else 'stands still'} {where}")
            said += [f"rank {done} has finished"] if (done := spans({*range(self.world)}.difference(others))) else []
            self._end(1, "", f"mha-inspect: {listed(said)}. Every rank must run the same collectives in one order.\n")

    def _end(self, code: int, out: str, err: str) -> None:
        """Print the outputs instead of rank 0's own, and end all ranks."""
        os.write(self._out, out.encode())
        os.write(self._err, err.encode())
        self._store.set("end", "")
        os._exit(code)


member: Member | None = None
"""This process among several ranks; None if it is alone."""


def on_every_rank(run: Callable[[], int]) -> int:
    """Run a command line, and return its exit code; on a rank other than 0 of several, silently."""
    global member
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_given = rank.isdecimal() and world.isdecimal() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not is_given or int(world) < 2:
        return run()
    member = Member()
    return member.leave(run())


def join() -> None:
    """Watch the other ranks, if there are any, while a command runs a module."""
    if member is not None:
        member.join()


def with_group(build: Callable[[], T]) -> T:
    """Build a target among several ranks; where it makes no process group, make one, for its forward too.

    A target that needs the group is built again. If a target that makes the group fails, the group is undone.
    """
    if member is None:
        return build()
    from torch import distributed

    had_group = distributed.is_initialized()
    try:
        built = build()
        if not distributed.is_initialized():
            distributed.init_process_group()
        return built
    except InputError as error:
        if distributed.is_initialized():
            if not had_group:
                distributed.destroy_process_group()
            raise
        cause: BaseException | None = error
        while cause is not None:
            if any(frame.f_code.co_name == "init_process_group" for frame, _ in walk_tb(cause.__traceback__)):
                raise
            cause = cause.__context__
        with suppress(Exception):  # the target's own error says more
            distributed.init_process_group()
        if not distributed.is_initialized():
            raise
    return build()


def of_all_ranks(trace: Trace, run: Run, subject: Subject) -> Trace:
    """Return the trace of rank 0 with a description of every rank. Any other rank ends its command here."""
    if member is None:
        return trace
    from ..answers.ranks import digests_of, rank_of, unlike, with_copies
    from ..reports.trace import Rank

    mine = rank_of(member.rank, trace, run, subject.module)
    every = member.exchange({"rank": asdict(mine), "digests": digests_of(run, subject)})
    of_each = [each["rank"] for each in every]
    ranks = [Rank(**{**one, "rows": {name: tuple(rows) for name, rows in one["rows"].items()}}) for one in of_each]
    differ = (finding.sentence for finding in unlike([each["digests"] for each in every]))
    return replace(trace, ranks=with_copies(ranks), notes=(*trace.notes, *differ))

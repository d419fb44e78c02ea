"""Run a command on every rank that torchrun started, where rank 0 answers for all.

Results, failures and waits go through a store, apart from the process group: a collective could wait forever.
Every command imports this file, so that modules which only several ranks need are imported where they are used.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..reports.trace import Trace
    from ..running.subject import Run, Subject

T = TypeVar("T")
_PATIENCE = 60
"""Seconds to wait until every rank has started."""
_LOOK = 0.2
"""Seconds between two looks at where the command is."""
_STALLED = 25
"""Looks at one instruction after which a rank is stuck. A count, as a busy machine stretches the time between them."""
_GRACE = 8
"""Looks at one instruction after which rank 0 prints another rank's failure: it may come to the same failure itself."""
_LONGEST_GRACE = 40
"""Looks after which rank 0 prints another rank's failure, wherever it is."""
_IDLE = 0.1
"""Most seconds of computing at one instruction."""
_LONGEST = 1 << 20
"""Most bytes of another rank's output."""


class Member:
    """This process as one of several ranks."""

    def __init__(self) -> None:
        from tempfile import TemporaryFile
        from threading import Event, Thread

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._out, self._err = os.dup(1), os.dup(2)
        self._said = [TemporaryFile("w+") for _ in (1, 2) if self.rank]  # noqa: SIM115 - closed with the process
        if self.rank:
            os.dup2(self._said[0].fileno(), 1)
            sys.stderr = self._said[1]  # not its descriptor: a crash in C++ leaves no time to pass its message on
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._store: Any = None
        self._watching = Thread(target=self._watch, daemon=True)
        self._has_left, self._waits = Event(), 0
        self._done = [f"done/{rank}" for rank in range(self.world)]
        """The keys under which ranks that have finished store their results."""

    def join(self) -> None:
        """Connect to the store, and watch the other ranks."""
        if self._store is None:
            import json
            from datetime import timedelta
            from socket import gethostname

            from torch.distributed.rendezvous import rendezvous

            try:
                self._store, *_ = next(iter(rendezvous("env://", timeout=timedelta(seconds=_PATIENCE))))
            except RuntimeError:
                raise InputError(
                    f"RANK is {self.rank} and WORLD_SIZE {self.world}, but not all ranks started within "
                    f"{_PATIENCE} s. Start the command with torchrun, or unset WORLD_SIZE to run it alone."
                ) from None
            self._store.set(f"process/{self.rank}", json.dumps([gethostname(), os.getpid()]))
            self._watching.start()

    def leave(self, code: int) -> int:
        """Store how the command ended, and return the exit code. Rank 0 is the last to end, unless it failed."""
        import json

        if self._store is None:  # no module was run: every rank ended alike
            return 0 if self.rank else code
        try:
            if not code:
                self._store.compare_set(self._done[self.rank], "", "{}")
            elif self.rank:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                said = [os.pread(file.fileno(), _LONGEST, 0).decode(errors="replace") for file in self._said]
                self._store.compare_set("failed", "", json.dumps([self.rank, code, *said]))
            else:
                self._has_left.set()  # the failure of another rank is not printed too
                time.sleep(_LOOK)  # its connections break before it ends
                self._say_who_ended()
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
        import json

        self._store.set(self._done[self.rank], json.dumps(mine))
        if self.rank:
            raise typer.Exit
        while not self._store.check(self._done):
            time.sleep(0.02)
        return [json.loads(value) for value in self._store.multi_get(self._done)]

    def _say_who_ended(self) -> None:
        """Print a line on rank 0 that names the ranks that were killed or crashed, if there are any."""
        from ..text import spans

        ended = self._ended()
        said = f"mha-inspect: rank {spans(ended)} of {self.world} has ended: it was killed, or it crashed.\n"
        os.write(self._err, said.encode() if ended else b"")

    def _ended(self) -> list[int]:
        """Return the ranks whose process, on this machine, has ended before its command."""
        import json
        from socket import gethostname

        keys = {rank: f"process/{rank}" for rank in self._unfinished() if self._store.check([f"process/{rank}"])}
        values = map(json.loads, self._store.multi_get([*keys.values()]) if keys else [])
        processes = zip(keys, values, strict=True)
        return [rank for rank, (host, process) in processes if host == gethostname() and _has_ended(process)]

    def _unfinished(self) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([self._done[rank]])]

    def _watch(self) -> None:
        import json
        from threading import main_thread

        from ..answers.ranks import stands_at

        before: object = None
        looks, since_failure, computed = 0, 0, 0.0
        with suppress(RuntimeError):  # the store has ended, and with it the launcher or rank 0
            while not (self._has_left.wait(_LOOK) or (self.rank and self._store.check(["end"]))):
                busy = time.process_time() - time.thread_time()
                at, line, waits = stands_at(sys._current_frames().get(main_thread().ident or 0), _sleep())
                looks += 1
                if at != before or busy - computed > _IDLE:
                    before, looks, computed = at, 0, busy
                is_stuck = line is not None and looks > _STALLED
                self._store.set(f"place/{self.rank}", json.dumps([line, waits, is_stuck]))
                if self.rank == 0:
                    has_failed = self._store.check(["failed"])
                    since_failure += has_failed or bool(self._ended())
                    if since_failure > (_GRACE if looks > _GRACE else _LONGEST_GRACE):
                        rank, *end = json.loads(self._store.get("failed")) if has_failed else (0, 1, "", "")
                        failed = f"mha-inspect: rank {rank} of {self.world} failed: see above.\n" if has_failed else ""
                        self._end(*end, failed)
                    self._look_for_stuck_ranks()
        if self.rank:
            os._exit(0)

    def _look_for_stuck_ranks(self) -> None:
        """End the command if no rank goes on and one waits for the others; print the places if only one goes on."""
        import json

        others = self._unfinished()
        keys = [f"place/{rank}" for rank in others]
        places = [*map(tuple, map(json.loads, self._store.multi_get(keys)))] if keys and self._store.check(keys) else []
        self._waits = self._waits + 1 if any(waits and is_stuck for _, waits, is_stuck in places) else 0
        are_stuck = all(is_stuck for *_, is_stuck in places)
        if self._waits and (are_stuck or self._waits == _STALLED):
            from ..text import listed, spans

            said = []
            for place in dict.fromkeys(places):
                line, waits, is_stuck = place
                alike = spans(rank for rank, each in zip(others, places, strict=True) if each == place)
                how = "is still running" if not is_stuck else "waits" if waits else "stands still"
                where = f" at {line}" if line else " for the result of its forward" if waits else ""
                said.append(f"rank {alike} {how}{where}")
            said += [f"rank {done} has finished"] if (done := spans({*range(self.world)}.difference(others))) else []
            rule = " Every rank must run the same collectives in one order." if are_stuck else ""
            os.write(self._err, f"mha-inspect: {listed(said)}.{rule}\n".encode())
        if self._waits and are_stuck:
            self._end(1, "")

    def _end(self, code: int, out: str, *err: str) -> None:
        """Print the outputs instead of rank 0's own, and end all ranks."""
        os.write(self._out, out.encode())
        os.write(self._err, "".join(err).encode())
        self._say_who_ended()
        self._store.set("end", "")
        os._exit(code)


def _sleep() -> str:
    """Return what is another for each sleep of the main thread, where the system knows of it; empty if it is awake."""
    with suppress(OSError):
        thread = Path("/proc/self/task", str(os.getpid()))
        if (thread / "wchan").read_text() == "hrtimer_nanosleep":
            return (thread / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
    return ""


def _has_ended(process: int) -> bool:
    """Return whether a process has ended, where the system has files of processes; its parent may not know it yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] in "ZX"
    except OSError:
        return Path("/proc/self/stat").exists()


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


def is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    return member is not None


def join() -> None:
    """Watch the other ranks, if there are any, while a command runs a module."""
    if member is not None:
        member.join()


def with_group(build: Callable[[], T]) -> T:
    """Build a target among several ranks; where it makes no process group, make one, for its forward too.

    A target that needs the group is built again. Raises `InputError` with a way out if there is no group for it.
    """
    try:
        return build() if member is None else _with_group(build)
    except InputError as error:
        if way := _way_out(_calls_of(error)):
            raise InputError(f"{error}. {way}") from error
        raise


def _with_group(build: Callable[[], T]) -> T:
    from torch import distributed

    if distributed.is_initialized():  # built again, or beside another target: the group that it makes is there
        from unittest.mock import patch  # brings asyncio and ssl, which --help need not wait for

        with patch.object(distributed, "init_process_group"):
            return build()
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
    if member is None and calls.keys() & {"_env_rendezvous_handler", "_get_default_group"}:
        return "This is one process: start the command with torchrun --nproc-per-node 2 -m mha_inspect."
    device = calls.get("init_device_mesh", {}).get("device_type")
    if device is not None and not getattr(getattr(sys.modules["torch"], device, None), "is_available", bool)():
        return f"This machine has no {device}. Give init_device_mesh another device, e.g. cpu."
    return ""


def of_all_ranks(report: Any, trace: Trace, run: Run, subject: Subject) -> Any:
    """Return the report of rank 0 with a description of every rank. Any other rank ends its command here."""
    if member is None:
        return report
    from ..answers.ranks import digests_of, rank_of, unlike, with_copies
    from ..reports.trace import Rank

    mine = rank_of(member.rank, trace, run, subject.module)
    every = member.exchange({"rank": asdict(mine), "digests": digests_of(run, subject)})
    if not all(every):  # a rank could not run the module
        return report
    of_each = [each["rank"] for each in every]
    ranks = [Rank(**{**one, "rows": {name: tuple(rows) for name, rows in one["rows"].items()}}) for one in of_each]
    said = [*report.notes, *(finding.sentence for finding in unlike([each["digests"] for each in every]))]
    return replace(report, ranks=with_copies(ranks), notes=tuple(said))

"""Run the installed program from an interpreter that has imported torch: to import it takes longer than most answers.

`python warm.py SOCKET` serves; each request forks into the installed script, with the arguments, files, folder and
environment of its own that a process started from a shell would have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mha_inspect


class Answer(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


class Warm:
    """An interpreter that has imported torch and forks for each line."""

    def __init__(self, entry_point: Sequence[str], env: Mapping[str, str]) -> None:
        self.entry_point = entry_point
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()]
            )

    def run(self, *args: str, **settings: Any) -> Answer:
        """Return what the line answers, as `ask` does."""
        return self.ask([*self.entry_point, *args], **settings)

    def ask(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdout: int | None = None,
        before: str = "",
        timeout: float = 120,
    ) -> Answer:
        """Return what a command answers: the script, `python -m module` or `python -c code`.

        It writes to the descriptor `stdout`, if there is one; `before` is Python that its process runs first.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), out.fileno() if stdout is None else stdout, err.fileno()]
            request = [[*command], dict(env), str(cwd or Path.cwd()), before]
            self.socket.settimeout(timeout)
            socket.send_fds(self.socket, [b"."], files)
            self.socket.sendall(json.dumps(request).encode() + b"\n")
            code = int(self.socket.recv(16))
            out.seek(0)
            err.seek(0)
            return Answer(code, out.read().decode(), err.read().decode())

    def close(self) -> None:
        self.socket.close()
        self.process.wait(10)


def _become(request: list, files: list[int]) -> int:
    """Run the script of a request in this process, and return its exit code."""
    command, env, folder, before = request
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    exec(before)
    option = command[1] if command[1:2] in (["-m"], ["-c"]) else ""
    sys.argv = command[2:] if option == "-m" else command[1:2] + command[3:] if option else command
    try:
        if option == "-c":
            sys.path[0] = ""
            exec(compile(command[2], "<string>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
            return 0
        if option == "-m":
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as leaving:
        sys.stdout.flush()
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    return 99


def serve(number: int) -> None:
    """Fork for each request until the other side closes."""
    for module in pkgutil.walk_packages(mha_inspect.__path__, "mha_inspect."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.freeze()  # no fork looks through all of that

    with socket.socket(fileno=number) as requests:
        while True:
            _, files, _, _ = socket.recv_fds(requests, 1, 3)
            if not files:
                return
            with requests.makefile("rb") as lines:
                request = json.loads(lines.readline())
            pid = os.fork()
            if pid == 0:
                code = 99
                with contextlib.suppress(BaseException):
                    code = _become(request, files)
                # To take torch down takes longer than the line.
                os._exit(code)
            for file in files:
                os.close(file)
            requests.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    serve(int(sys.argv[1]))

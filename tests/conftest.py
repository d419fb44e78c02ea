"""What every test may use: the installed program, and the same command line inside this process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm import Answer, Warm

ROOT = Path(__file__).resolve().parent.parent
# What tests compute is small: with a thread for each core torch waits for threads longer than it computes, and takes
# two to three times the CPU time. It is read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
SETTINGS_OF_THE_USER = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PY_COLORS", "GITHUB_ACTIONS", "TERMINAL_WIDTH")


def pytest_configure() -> None:
    """Look for cycles less often than Python does: tests make many objects, and those that count them collect."""
    gc.set_threshold(10_000, 20, 10)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in a process for each core, at most four; files that are named run in this process."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    if config.option.dist == "no":
        config.option.dist = "worksteal"  # neighbours stay together, and share the fixtures of their file
    return min(os.cpu_count() or 1, 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-readme", action="store_true", help="write the transcripts of README.md and the checks' pages anew"
    )
    parser.addoption("--fuzz-cases", type=int, help="cases of each test in tests/fuzz, drawn at random")


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_left_alone() -> None:
    """Leave what earlier files and imports made out of every collection, as the program itself does."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def entry_point() -> list[str]:
    """The installed `mha-inspect`, or the module where the package is only on the path."""
    script = Path(sys.executable).with_name("mha-inspect")
    return [str(script)] if script.exists() else [sys.executable, "-m", "mha_inspect"]


def _environment(**changes: str | None) -> dict[str, str]:
    """The environment without what this machine's user has set for the program, and with the changes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MHA_INSPECT_") and name not in SETTINGS_OF_THE_USER
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {name: value for name, value in {**kept, "TERM": "xterm", **changes}.items() if value is not None}


@pytest.fixture(scope="session")
def environment() -> Callable[..., dict[str, str]]:
    """Make the environment for a run of the program: `environment(NO_COLOR="1")`."""
    return _environment


@pytest.fixture(scope="session")
def interruptible() -> Callable[[], None]:
    """A `preexec_fn` that lets a child be ended by signals also where this process has them ignored (nohup)."""

    def listen() -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_DFL)

    return listen


@pytest.fixture(scope="session")
def warm(entry_point: list[str]) -> Iterator[Warm]:
    """The installed program where torch is imported already."""
    if sys.platform != "linux":
        pytest.skip("a process that has imported torch may be forked on Linux")
    with contextlib.closing(Warm(entry_point, _environment())) as program:
        yield program


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Fill a folder in one of the processes that run tests, and return it in each: `once("ranks", launch)`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def filled(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        try:
            folder.mkdir()
        except FileExistsError:
            for _ in range(3000):
                if done.exists():
                    break
                time.sleep(0.1)
            return folder
        try:
            fill(folder)
        finally:
            done.touch()
        return folder

    return filled


@pytest.fixture
def program(warm: Warm) -> Callable[..., Answer]:
    """Run the installed program in a process of its own: `program("trace", "--causal", env={...})`."""

    def run(*args: str, env: dict[str, str | None] | None = None, **settings: Any) -> Answer:
        return warm.run(*args, env=_environment(**(env or {})), **settings)

    return run


@pytest.fixture(scope="session")
def fork(warm: Warm) -> Callable[..., Answer]:
    """Run Python in a process of its own that has imported torch: `fork(CODE, "an argument", env={...})`."""

    def run(code: str, *args: str, env: dict[str, str | None] | None = None, **settings: Any) -> Answer:
        return warm.ask([sys.executable, "-c", code, *args], env=_environment(**(env or {})), **settings)

    return run


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run the command line inside this process, where torch is imported already."""
    for name in os.environ:
        if name.startswith("MHA_INSPECT_") or name in SETTINGS_OF_THE_USER:
            monkeypatch.delenv(name)

    def run(*args: str) -> Answer:
        from mha_inspect.__main__ import run as run_command_line

        capsys.readouterr()
        code = run_command_line(args)
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run

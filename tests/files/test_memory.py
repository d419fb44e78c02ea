"""Free memory by what the kernel says, and the refusal of what does not fit."""

from __future__ import annotations

import sys
from pathlib import Path
from resource import RLIMIT_DATA, getrlimit, setrlimit

import pytest
import torch

from mha_inspect.errors import DoesNotFitError, ExitCode, is_out_of_memory
from mha_inspect.files import memory
from mha_inspect.files.memory import free_memory, limited_to_what_is_free, linux_free_memory, require_memory

MIB = 1024**2


V2 = {
    "box/memory.max": f"{500 * MIB}\n",
    "box/memory.current": f"{100 * MIB}\n",
    "box/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
    "box/run/memory.max": "max\n",
    "box/run/memory.current": f"{70 * MIB}\n",
}
"""An ancestor's limit, less its use, and its cache given back."""
V1 = {
    "memory/memory.limit_in_bytes": f"{300 * MIB}",
    "memory/memory.usage_in_bytes": f"{310 * MIB}",
    "memory/memory.stat": f"inactive_file {MIB}\ntotal_inactive_file {13 * MIB}",
}
"""Where only the root of the container is visible."""


@pytest.mark.parametrize(
    ("available", "groups", "files", "free"),
    [
        (7, "0::/\n", {}, 7),
        (1000, "0::/box/run\n", V2, 420),
        (1000, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n", V1, 3),
    ],
)
def test_free_memory_is_the_least_that_the_kernel_and_the_groups_leave(
    tmp_path, available, groups, files, free
) -> None:
    kernel = f"MemTotal: 99999999 kB\nMemAvailable:    {available * 1024} kB\nFree: 3 kB\n"
    every = {"proc/meminfo": kernel, "proc/self/cgroup": groups}
    for name, content in (every | {f"groups/{name}": content for name, content in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert linux_free_memory(tmp_path / "proc", tmp_path / "groups") == free * MIB


def test_where_nothing_is_known(tmp_path: Path) -> None:
    assert linux_free_memory(tmp_path / "a", tmp_path / "b") is None
    assert free_memory("meta") is None


def test_what_does_not_fit_is_refused_with_need_free_and_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 30 * MIB)
    require_memory(30 * MIB, "cpu", "seq_len 7", "Try less.")
    with pytest.raises(DoesNotFitError) as caught:
        require_memory(30 * MIB + 1, "cpu", "seq_len 7", "Try 5.")
    assert str(caught.value) == "seq_len 7 needs about 30.0 MiB, but only 30.0 MiB is free on cpu. Try 5."
    assert caught.value.exit_code == ExitCode.REFUSED


def test_where_free_memory_is_unknown_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    require_memory(2**80, "meta", "x", "y")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_more_than_is_free_is_an_error_inside_of_the_limit_and_no_longer_after_it(monkeypatch) -> None:
    before = getrlimit(RLIMIT_DATA)
    monkeypatch.setattr(memory, "linux_free_memory", lambda: 64 * MIB)
    with limited_to_what_is_free() as free:
        assert free == 64 * MIB
        assert torch.ones(10 * MIB).nbytes == 40 * MIB
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            torch.empty(50 * MIB)
        assert is_out_of_memory(caught.value)
        with pytest.raises(MemoryError):
            bytearray(200 * MIB)
        with limited_to_what_is_free("cuda:0") as free:
            assert free is None
    assert getrlimit(RLIMIT_DATA) == before
    setrlimit(RLIMIT_DATA, (1 << 40, before[1]))
    try:
        monkeypatch.setattr(memory, "linux_free_memory", lambda: 1 << 50)
        with limited_to_what_is_free() as free:
            assert getrlimit(RLIMIT_DATA)[0] == 1 << 40, "a limit that is lower stays"
            assert free < 1 << 40
    finally:
        setrlimit(RLIMIT_DATA, before)

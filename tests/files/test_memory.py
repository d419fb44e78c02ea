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


def machine(root: Path, available_kib: int, cgroup: str, **files: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup of our own; `__` in a name stands for a folder."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:    {available_kib} kB\nFree: 3 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root.joinpath("cgroup", *name.split("__")[:-1], name.split("__")[-1].replace("_DOT_", "."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root / "proc", root / "cgroup"


def test_without_a_group_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert linux_free_memory(*machine(tmp_path, 7 * 1024, "0::/\n")) == 7 * MIB


def test_version_2_counts_the_limit_less_the_use_and_gives_cache_back(tmp_path: Path) -> None:
    places = machine(
        tmp_path,
        1000 * 1024,
        "0::/box/run\n",
        box__memory_DOT_max=f"{500 * MIB}\n",
        box__memory_DOT_current=f"{100 * MIB}\n",
        box__memory_DOT_stat=f"anon 5\ninactive_file {20 * MIB}\n",
        box__run__memory_DOT_max="max\n",
        box__run__memory_DOT_current=f"{70 * MIB}\n",
    )
    assert linux_free_memory(*places) == 420 * MIB, "an ancestor's limit holds too"


def test_version_1_where_only_the_root_of_the_container_is_visible(tmp_path: Path) -> None:
    places = machine(
        tmp_path,
        1000 * 1024,
        "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        memory__memory_DOT_limit_in_bytes=f"{300 * MIB}",
        memory__memory_DOT_usage_in_bytes=f"{310 * MIB}",
        memory__memory_DOT_stat=f"inactive_file {MIB}\ntotal_inactive_file {13 * MIB}",
    )
    assert linux_free_memory(*places) == 3 * MIB


def test_where_nothing_is_known(tmp_path: Path) -> None:
    assert linux_free_memory(tmp_path / "a", tmp_path / "b") is None
    assert free_memory("meta") is None


def test_what_does_not_fit_is_refused_with_need_free_and_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 30 * MIB)
    require_memory(30 * MIB, "cpu", "seq_len 7", "Try less.")
    with pytest.raises(DoesNotFitError) as caught:
        require_memory(30 * MIB + 1, "cpu", "seq_len 7", "Try 5.")
    assert str(caught.value) == "seq_len 7 needs about 30.0 MiB and 30.0 MiB are free on cpu. Try 5."
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

"""Names of files, foreign files, signals: what must neither run, nor hang, nor be left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ..fuzz.files import saved

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files and signals")
LAYER = ("--embed-dim", "6", "--num-heads", "1", "--seq-len", "2")


@posix
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "loop", "device", "long"])
def test_what_is_no_plain_file_is_not_opened(invoke, tmp_path, monkeypatch, kind):
    path = tmp_path / "x.pt"
    if kind == "pipe":
        os.mkfifo(path)  # to open it would wait for a writer
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        socket.socket(socket.AF_UNIX).bind("x.pt")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    text = "y" * 5000 + ".pt" if kind == "long" else str(path)
    code, out, err = invoke("trace", *LAYER, "--input", text)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert len(err) < 500


def test_sizes_whose_product_no_number_holds(invoke):
    code, out, err = invoke("trace", "--embed-dim", str(2**40), "--device", "meta")
    assert (code, out) == (3, "")
    assert "overflowed" in err
    assert err.count("\n") == 1


def test_a_file_in_the_current_folder_is_not_run_for_a_target_elsewhere(entry_point, environment, tmp_path):
    for name in ("sympy", "unicodedata", "einops", "token"):
        (tmp_path / f"{name}.py").write_text(f"open({name!r}, 'w').close()\nraise SystemExit(9)\n")
    line = [*entry_point, "trace", "torch.nn:MultiheadAttention", *LAYER]
    env = environment()
    # The folder of the tests' own package goes by the way that the installed one is found.
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".py"] * 4


WRITES = """
import os, sys, time
from mha_inspect.__main__ import main
from mha_inspect.render import export
def wait(*_):
    print("waits", flush=True)
    time.sleep(60)
export.os.fsync = wait
sys.argv[1:] = ["layers", "--export", sys.argv[1]]
sys.exit(main())
"""


@posix
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", -15), ("SIGINT", 130)])
def test_a_signal_during_an_export_leaves_the_file_as_it_was(environment, tmp_path, number, code, interruptible):
    target = tmp_path / "a.txt"
    target.write_text("before")
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(target)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(getattr(signal, number))
        assert process.wait(5) == code
        assert "Traceback" not in process.stderr.read()
    assert target.read_text() == "before"
    if number == "SIGINT":
        assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path):
    import torch

    from mha_inspect.errors import InputError
    from mha_inspect.files.tensors import SUFFIXES, content_of, read_stored

    path = saved(tmp_path / "x.safetensors", {"x": torch.zeros(3, 7)})
    stored = content_of(path, SUFFIXES)["x"]
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(InputError, match="shorter"):
        read_stored(stored, "x")


def test_a_constructor_without_an_end_is_stopped(tmp_path, monkeypatch):
    from torch import nn

    from mha_inspect.errors import DoesNotFitError
    from mha_inspect.making import bounded

    monkeypatch.setattr(bounded, "_MOST_PARAMETERS", 10)
    with pytest.raises(DoesNotFitError, match="more than 10 parameter tensors"):
        bounded.built(lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(100))), "x", "")
    nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))  # nothing is left switched on


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 9000, "\x00"])
def test_a_configuration_that_is_none(tmp_path, content):
    from mha_inspect.errors import InputError
    from mha_inspect.making.hugging_face import read_config

    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError):
        read_config(tmp_path / "config.json", "hf:x")


@posix
def test_an_export_to_a_pipe_that_nobody_reads_is_not_waited_for(invoke, tmp_path):
    os.mkfifo(tmp_path / "x.json")
    code, out, err = invoke("layers", "--export", str(tmp_path / "x.json"))
    assert code == 2
    assert out
    assert "could not be written: No such device or address" in err


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits of address space")
def test_too_little_address_space_for_torch_is_said_in_a_line(environment):
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))

    line = [sys.executable, "-m", "mha_inspect", "trace", *LAYER]
    done = subprocess.run(
        line, env=environment(), capture_output=True, text=True, timeout=120, check=False, preexec_fn=limit
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert "importing torch needs 768 MiB of address space" in done.stderr

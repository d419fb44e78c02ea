"""How a command ends when it cannot answer: the exit code, and what is said."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from mha_inspect.__main__ import main
from mha_inspect.cli import app
from mha_inspect.errors import DoesNotFitError, ExitCode, InputError

SLEEPS = """
import time

from torch import nn


class Sleeps(nn.Module):
    def forward(self, x):
        print("begins", flush=True)
        time.sleep(60)
        return x
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_in_a_forward_ends_the_program_without_a_traceback(entry_point, environment, interruptible, tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with subprocess.Popen(
        [*entry_point, "trace", "sleeps.py:Sleeps", "--input-shape", "x=2x3"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    ) as child:
        assert child.stderr.readline() == "begins\n"
        child.send_signal(signal.SIGINT)
        try:
            child.wait(10)
        finally:
            child.kill()
        assert (child.returncode, child.stdout.read(), child.stderr.read()) == (130, "", "mha-inspect: interrupted.\n")


def test_ctrl_c_before_the_command_line_is_read(monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mha_inspect.__main__.run", interrupted)
    monkeypatch.setattr(sys, "argv", ["mha-inspect", "--version"])
    assert main() == 130


def ended_by(error: BaseException, monkeypatch: pytest.MonkeyPatch, invoke: object) -> tuple[int, str, str]:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(app.Commands, "get_command", fail)
    return invoke("trace")


def test_our_own_errors_are_one_line_and_carry_their_code(monkeypatch, invoke):
    assert ended_by(InputError("the mask is absent."), monkeypatch, invoke) == (
        2,
        "",
        "mha-inspect: the mask is absent.\n",
    )
    assert ended_by(DoesNotFitError("8 TiB."), monkeypatch, invoke) == (3, "", "mha-inspect: 8 TiB.\n")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch, invoke):
    code, out, err = ended_by(ZeroDivisionError("in our arithmetic"), monkeypatch, invoke)
    assert (code, out) == (70, "")
    assert err.startswith("Traceback (most recent call last):")
    assert "ZeroDivisionError: in our arithmetic" in err
    assert "Please report it" in err.splitlines()[-1]


def torch_out_of_memory() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**57, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch_out_of_memory(), f"tried to allocate {2**57} bytes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"), "Tried to allocate 2 GiB."),
        (MemoryError(), "an allocation failed"),
    ],
    ids=["cpu", "device", "python"],
)
def test_out_of_memory_is_refused_in_one_line(monkeypatch, invoke, error, said):
    code, out, err = ended_by(error, monkeypatch, invoke)
    assert (code, out) == (ExitCode.REFUSED, "")
    assert err.startswith("mha-inspect: out of memory: ")
    assert said in err
    assert err.count("\n") == 1

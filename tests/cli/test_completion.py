"""What shells complete: names in a file, a word with a colon in bash, and the first TAB in zsh."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from typer.completion import get_completion_script

from mha_inspect.cli.completion import improve_scripts, names_in_file

SOURCE = """
import torch
class Attention(torch.nn.Module):
    class Inner: pass
def build(): return Attention()
model, _hidden = build(), 1
layer = Attention()
_private = 2
"""


@pytest.fixture
def folder(tmp_path: Path, entry_point: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module in it, and the program on the path."""
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mha-inspect"
    program.write_text(f'#!/bin/sh\nexec {" ".join(entry_point)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_in_a_file(folder: Path) -> None:
    assert names_in_file("model.py:") == ["model.py:Attention", "model.py:build", "model.py:layer"]
    assert names_in_file("./model.py:b") == ["./model.py:build"]
    assert names_in_file(f"{folder}/model.py:A") == [f"{folder}/model.py:Attention"]


@pytest.mark.parametrize("typed", ["", "model.py", "absent.py:", "torch.nn:Mul", "bin:", "broken.py:", "null.py:"])
def test_no_name_where_there_is_none(folder: Path, typed: str) -> None:
    (folder / "broken.py").write_text("class A(:")
    (folder / "null.py").write_bytes(b"a = 1\0")
    assert names_in_file(typed) == []


def script(shell: str) -> str:
    improve_scripts()
    return get_completion_script(prog_name="mha-inspect", complete_var="_MHA_INSPECT_COMPLETE", shell=shell)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("mha-inspect tra", "trace"),
        ("mha-inspect trace model.py:b", "build"),  # what stands before the colon is there already
        ("mha-inspect diff torch model.py:l", "layer"),
        ("mha-inspect trace --dtype ", "float32 float64 bfloat16 float16"),
        ("mha-inspect trace --color n", "never"),
    ],
)
def test_bash(folder, environment, line, offered):
    asked = f"{script('bash')}\nCOMP_LINE='{line}' COMP_POINT={len(line)}\n_mha_inspect_completion mha-inspect\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{asked}echo "${{COMPREPLY[*]}}"'],
        env=environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout.split(), done.stderr) == (offered.split(), "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(
    ("typed", "completed"), [("mha-inspect tra", "mha-inspect trace "), ("mha-inspect trace model.py:b", ":build ")]
)
def test_zsh_completes_on_the_first_tab(folder, environment, typed, completed):
    (folder / "_mha-inspect").write_text(script("zsh"))
    (folder / ".zshrc").write_text("fpath=($ZDOTDIR $fpath); autoload -Uz compinit; compinit -u -D; PS1='ready> '\n")
    master, slave = os.openpty()
    variables = environment(ZDOTDIR=str(folder), PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=slave, stdout=slave, stderr=slave, env=variables, start_new_session=True
    )
    os.close(slave)

    def shown(until: str) -> str:
        text, end = "", time.monotonic() + 60
        while until not in text and time.monotonic() < end:
            if select.select([master], [], [], 1)[0]:
                text += re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", os.read(master, 65536).decode())
        return text

    try:
        shown("ready> ")
        os.write(master, f"{typed}\t".encode())
        assert completed in shown(completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(master)

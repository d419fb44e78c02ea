"""`mha-inspect fix`: a patch that was run, what is written, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RIGHT = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model=64, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def heads(self, x):
        b, n, c = x.shape
        return x.view(b, n, self.num_heads, -1).transpose(1, 2)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))
"""
WRONG = RIGHT.replace("softmax(-1)", "softmax(1)")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"attention_{tmp_path.name}.py"
    path.write_text(WRONG, encoding="utf-8")
    return path


def test_the_patch_is_printed_and_applies(invoke: Callable[..., Any], file: Path) -> None:
    code, out, err = invoke("fix", file.name)
    assert (code, err) == (0, "")
    assert out.startswith("was 1 problem, now none; outputs of the rest unchanged\n")
    assert file.read_text(encoding="utf-8") == WRONG
    done = subprocess.run(["git", "apply", "-"], input=out, text=True, cwd=file.parent, check=False)
    assert done.returncode == 0
    assert file.read_text(encoding="utf-8") == RIGHT


def test_write_keeps_the_old_file(invoke: Callable[..., Any], file: Path) -> None:
    file.chmod(0o640)
    (file.parent / f"{file.name}.orig").write_text("of someone", encoding="utf-8")
    code, out, err = invoke("fix", file.name, "--write")
    assert code == 0
    assert "+        weights = scores.softmax(-1)" in out
    assert f"the old file is {file.name}.orig2" in err
    assert file.read_text(encoding="utf-8") == RIGHT
    assert (file.parent / f"{file.name}.orig2").read_text(encoding="utf-8") == WRONG
    assert file.stat().st_mode & 0o777 == 0o640
    assert (file.parent / f"{file.name}.orig").read_text(encoding="utf-8") == "of someone"


def test_json_has_the_patch(invoke: Callable[..., Any], file: Path) -> None:
    data = json.loads(invoke("fix", file.name, "--json").out)
    assert data["patch"].startswith(f"--- a/{file.name}\n+++ b/{file.name}\n@@")
    assert data["remaining"] == []


@pytest.mark.parametrize("command", [["check"], ["trace"]])
def test_the_patch_stands_in_the_page(invoke: Callable[..., Any], file: Path, command: list[str]) -> None:
    out = invoke(*command, file.name).out
    assert "fix: a patch that was run: no check fails with it" in out
    assert "+        weights = scores.softmax(-1)" in out
    data = json.loads(invoke(*command, file.name, "--json").out)
    assert "+        weights = scores.softmax(-1)" in data["patch"].splitlines()
    assert file.read_text(encoding="utf-8") == WRONG


def test_a_page_without_a_problem_has_no_patch(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT, encoding="utf-8")
    assert "patch" not in json.loads(invoke("check", file.name, "--json").out)


def test_the_page_of_a_forward_that_raises_has_a_patch(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT.replace("k.transpose(-2, -1)", "k"), encoding="utf-8")
    code, out, _ = invoke("trace", file.name)
    assert code == 1
    assert "+        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5" in out


def test_a_forward_that_raises_is_fixed(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT.replace("k.transpose(-2, -1)", "k"), encoding="utf-8")
    code, out, _ = invoke("fix", file.name)
    assert code == 0
    assert "+        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5" in out


def test_nothing_wrong_is_nothing_to_fix(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT, encoding="utf-8")
    code, out, _ = invoke("fix", file.name, "--write")
    assert (code, out.splitlines()[0]) == (0, "nothing to fix: no check failed")
    assert not list(file.parent.glob("*.orig"))


def test_a_problem_without_a_patch_remains(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT, encoding="utf-8")
    code, out, _ = invoke("fix", file.name, "--window", "3", "--write")
    assert code == 1
    assert "no patch" in out.splitlines()[0]
    assert not list(file.parent.glob("*.orig"))


def test_edits_with_other_outputs_are_all_shown_and_none_is_written(invoke: Callable[..., Any], file: Path) -> None:
    wrong = RIGHT.replace("q @ k.transpose", "q @ q.transpose")
    file.write_text(wrong, encoding="utf-8")
    code, out, _ = invoke("fix", file.name, "--write")
    assert code == 1
    assert "+        scores = k @ q.transpose(-2, -1) / q.shape[-1] ** 0.5" in out
    assert "+        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5" in out
    assert "their outputs differ" in out
    assert file.read_text(encoding="utf-8") == wrong


def test_a_link_is_refused(invoke: Callable[..., Any], file: Path) -> None:
    link = file.with_name("link.py")
    link.symlink_to(file)
    code, out, err = invoke("fix", "link.py", "--write")
    assert (code, out) == (3, "")
    assert "is a link" in err
    assert file.read_text(encoding="utf-8") == WRONG


def test_a_file_elsewhere_is_refused(
    invoke: Callable[..., Any], file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    code, out, err = invoke("fix", str(file), "--write")
    assert (code, out) == (3, "")
    assert "not under the current folder" in err


def test_a_file_that_changed_meanwhile_is_refused(
    invoke: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mha_inspect.cli import fix

    def edited_meanwhile(*given: Any) -> None:
        file.write_text(f"{WRONG}# edited\n", encoding="utf-8")

    monkeypatch.setattr(fix, "print_and_export", edited_meanwhile)
    code, _, err = invoke("fix", file.name, "--write")
    assert code == 3
    assert "changed while the patch was made" in err
    assert file.read_text(encoding="utf-8").endswith("# edited\n")


def test_a_file_that_is_not_utf8_is_refused(invoke: Callable[..., Any], file: Path) -> None:
    file.write_bytes(f"# coding: latin-1\n# é\n{WRONG}".encode("latin-1"))
    code, out, err = invoke("fix", file.name)
    assert (code, out) == (2, "")
    assert "is not UTF-8" in err


@pytest.mark.parametrize("target", ["torch.nn:MultiheadAttention", "hf:bert"])
def test_an_installed_package_is_not_edited(invoke: Callable[..., Any], target: str) -> None:
    code, _, err = invoke("fix", target, "--set", "embed_dim=8")
    assert code == 2
    assert "nothing is edited" in err


def test_without_a_target_it_says_what_to_give(invoke: Callable[..., Any]) -> None:
    code, _, err = invoke("fix")
    assert code == 2
    assert "name a target" in err


def test_ctrl_c_leaves_the_file_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mha_inspect.cli.patch_file import write_patched

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_patched(file, WRONG.encode(), RIGHT.encode())
    assert file.read_text(encoding="utf-8") == WRONG
    assert [path.name for path in file.parent.iterdir()] == [file.name]


TRAINS = """
model = Attention()
for _ in range(2):
    model(torch.randn(2, 5, 64)).sum().backward()
    print("trained")
"""


@pytest.mark.parametrize("line", ["", "\nimport argparse\nargparse.ArgumentParser().parse_args()\n"])
def test_a_file_that_trains_when_it_is_imported_is_fixed(invoke: Callable[..., Any], file: Path, line: str) -> None:
    file.write_text(WRONG + line + TRAINS, encoding="utf-8")
    code, out, err = invoke("fix", f"{file.name}:Attention")
    assert code == 0
    assert "+        weights = scores.softmax(-1)" in out
    assert err == "trained\n" * 2


def test_a_file_that_cannot_be_run_again_is_refused(invoke: Callable[..., Any], file: Path) -> None:
    once = "\nimport builtins\nassert not hasattr(builtins, __name__), 'once only'\nsetattr(builtins, __name__, 1)\n"
    file.write_text(WRONG + once, encoding="utf-8")
    code, out, err = invoke("fix", file.name)
    assert (code, out) == (2, "")
    assert "cannot be run a second time, as fix does for every edit: AssertionError: once only" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("longest_import", [60.0, 0.0])
def test_a_file_that_runs_for_long_is_refused(
    invoke: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch, longest_import: float
) -> None:
    file.write_text(WRONG + "print('ran')\n", encoding="utf-8")
    monkeypatch.setattr("mha_inspect.questions.fix._LONGEST_RUN", 0.0)
    monkeypatch.setattr("mha_inspect.questions.fix._LONGEST_IMPORT", longest_import)
    code, out, err = invoke("fix", file.name)
    assert (code, out) == (2, "")
    assert "seconds whenever it is imported" in err
    assert err.count("ran") == 1


TWO_ERRORS = RIGHT.replace("k.transpose(-2, -1)", "k")


def test_two_errors_are_fixed_one_after_the_other(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(TWO_ERRORS.replace("reshape(b, n, c))", "view(b, n, c))"), encoding="utf-8")
    assert invoke("fix", file.name, "--write").code == 0
    assert file.read_text(encoding="utf-8") == RIGHT


def test_the_error_after_the_first_is_named(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(TWO_ERRORS.replace("reshape(b, n, c))", "reshape(b, n, 2 * c))"), encoding="utf-8")
    code, out, _ = invoke("fix", file.name)
    assert code == 1
    assert "Multiply by k.transpose(-2, -1)." in out
    edit = "`scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5`"
    assert f"With {edit} the forward gets further, and then fails at {file.name}:" in out
    assert "No edit fixes it" in out
    assert "failing call alone" not in out


def test_advice_that_no_edit_follows_is_of_the_call_alone(invoke: Callable[..., Any], file: Path) -> None:
    file.write_text(RIGHT.replace("reshape(b, n, c))", "reshape(b, n, 2 * c))"), encoding="utf-8")
    out = invoke("fix", file.name).out
    assert "The advice above is for the failing call alone." in out
    assert "gets further" not in out


def test_no_right_line_is_edited_for_an_input_that_was_left_out(invoke: Callable[..., Any], file: Path) -> None:
    masked = RIGHT.replace("def forward(self, x):", "def forward(self, x, mask):")
    weights = "weights = scores.masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1)"
    file.write_text(masked.replace("weights = scores.softmax(-1)", weights), encoding="utf-8")
    _, out, _ = invoke("fix", file.name)
    assert "+++" not in out


def test_a_patch_leaves_no_row_of_a_matrix_without_use(invoke: Callable[..., Any], file: Path) -> None:
    copied = RIGHT.replace(
        "q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))",
        "q, k, v = self.qkv(x).chunk(3, -1)\n        q, k, v = self.heads(q), self.heads(k), self.heads(k)",
    )
    file.write_text(copied, encoding="utf-8")
    _, out, _ = invoke("fix", file.name)
    assert "self.heads(x)" not in out
    if "+++" in out:
        assert "+        q, k, v = self.heads(q), self.heads(k), self.heads(v)" in out

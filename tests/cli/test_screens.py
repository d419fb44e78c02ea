"""What the eye meets on a terminal of 80 columns and 24 lines: the answer fits, and the verdict is the last line."""

from __future__ import annotations

import re

import pytest

from .code import ATTENTION

FILE = (
    ATTENTION
    + """

class Scrambled(Attention):
    def split(self, x):
        return x.view(x.shape[0], self.num_heads, x.shape[1], -1)


class Stack(nn.Sequential):
    def __init__(self):
        super().__init__(*(Attention(24, 4) for _ in range(12)))
"""
)


@pytest.fixture
def screen(invoke, tmp_path, monkeypatch):
    """Run a command on such a terminal; return the lines without colours."""
    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "80", "LINES": "24", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)

    def run(*args: str) -> list[str]:
        answer = invoke(*args)
        assert answer.code in (0, 1), answer.err
        return re.sub(r"\x1b\[[0-9;]*m", "", answer.out).splitlines()

    return run


@pytest.mark.parametrize(
    "command",
    [
        "trace",
        "trace mine.py:Attention --embed-dim 64 --num-heads 4",
        "trace mine.py:Stack --input-shape input=2x5x24",
        "check mine.py:Attention --embed-dim 64 --num-heads 4",
    ],
)
def test_a_default_answer_fits_the_screen(screen, command: str) -> None:
    lines = screen(*command.split())
    assert max(map(len, lines)) <= 80
    assert len(lines) < 24  # one is the prompt's


def test_a_finding_is_the_last_line_of_a_terminal_and_among_the_first_of_a_pipe(screen, invoke, monkeypatch) -> None:
    command = ("check", "mine.py:Scrambled", "--embed-dim", "64", "--num-heads", "4", "--seq-len", "6")
    lines = screen(*command)
    assert lines[0].startswith("1 problem: The heads of the query, key and value are split without transpose")
    monkeypatch.setenv("LINES", "10")
    line = 1 + FILE[: FILE.index("x.view(")].count("\n")
    *_, verdict, fix = screen(*command)
    assert verdict.endswith(f"(mine.py:{line})")
    assert fix.split()[:2] == ["fix", "Use"]
    skipped = [line for line in screen(*command) if line.startswith("skipped")]
    assert len(skipped) == 1
    monkeypatch.delenv("FORCE_COLOR")
    assert "1. heads" in invoke(*command).out.splitlines()[6]


def test_a_diff_names_stages_that_are_the_same_on_one_line_and_all_has_a_row_for_each(screen):
    sides = ["diff", "mine.py:Attention", "mine.py:Scrambled", "--embed-dim", "64", "--num-heads", "4"]
    lines = screen(*sides)
    assert "the same  query, key, value" in [line.rstrip() for line in lines]
    rows = [line.split()[0] for line in lines if line.rstrip().endswith("differs")]
    assert rows[:4] == ["q_heads", "k_heads", "v_heads", "scores"]
    rows = [line.split()[0] for line in screen(*sides, "--all") if line.rstrip().endswith("same")]
    assert rows == ["query", "key", "value"]

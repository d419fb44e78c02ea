"""The page of a check is its docstring: the module there is wrong by that check alone, and right with the fix."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from mha_inspect.checks.intent import CHECKS
from mha_inspect.checks.pages import claim_of, page_of
from tests.test_words import faults
from tests.warm import Answer

COLUMNS = 104
PARTS = re.compile(
    r"# (?P<name>\w+): (?P<claim>[^\n]*)\n\n(?P<prose>.*?)\n\n"
    r"## Wrong\n\n```python\n# mha-inspect (?P<command>[^\n]*)\n(?P<wrong>.*?)```\n\n"
    r"## Right\n\n```diff\n(?P<fix>.*?)```\n",
    re.S,
)
Invoke = Callable[..., Answer]
of_every_check = pytest.mark.parametrize("name", CHECKS)


def parts_of(name: str) -> dict[str, str]:
    parts = PARTS.fullmatch(page_of(name))
    assert parts is not None
    return parts.groupdict()


def made_right(parts: dict[str, str]) -> str:
    """The module with the lines of the fix in place of those that it removes."""
    lines = parts["fix"].splitlines(keepends=True)
    assert {line[0] for line in lines} == {"-", "+"}
    old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    assert parts["wrong"].count(old) == 1
    return parts["wrong"].replace(old, new)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)


@of_every_check
def test_a_page_says_what_is_checked_in_short_lines(name: str) -> None:
    parts = parts_of(name)
    assert (parts["name"], parts["claim"]) == (name, claim_of(name))
    prose = re.sub(r"`[^`]*`", "NAME", parts["prose"])
    assert [fault for paragraph in prose.split("\n\n") for fault in faults(" ".join(paragraph.split()))] == []
    assert [line for line in page_of(name).splitlines() if len(line) > COLUMNS] == []


@of_every_check
def test_the_module_is_wrong_and_with_the_fix_right(name: str, invoke: Invoke) -> None:
    parts = parts_of(name)
    command = shlex.split(parts["command"])
    Path("wrong.py").write_text(parts["wrong"], encoding="utf-8")
    report = json.loads(invoke(*command, "--json").out)
    sure = [finding["check"] for finding in report["findings"] if finding["sure"]]
    assert (sure or [finding["check"] for finding in report["findings"]]) == [name]
    Path("right.py").write_text(made_right(parts), encoding="utf-8")
    code, out, err = invoke(*(word.replace("wrong.py", "right.py") for word in command), "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["findings"] == []
    assert name in {passed["check"] for passed in report["passed"]}


@of_every_check
def test_explain_shows_the_page(name: str, invoke: Invoke) -> None:
    assert invoke("check", "--explain", name) == (0, page_of(name), "")


def test_a_terminal_gets_a_page_in_its_width(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_inspect.render.screen.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    plain = re.sub("\x1b\\[[0-9;]*m", "", invoke("check", "--explain", "heads").out)
    assert claim_of("heads") in " ".join(plain.split())
    assert max(map(len, plain.splitlines())) <= 80


def test_a_name_that_is_near_is_suggested(invoke: Invoke) -> None:
    code, out, err = invoke("check", "--explain", "head")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert ", ".join(CHECKS) in err
    assert "Did you mean heads?" in err


def test_a_required_mask_is_made_as_it_was_declared(invoke: Invoke) -> None:
    parts = parts_of("padding")
    over_heads = (
        parts["wrong"]
        .replace("x * mask[..., None]", "x")
        .replace("8**0.5).softmax(-1)", "8**0.5).masked_fill(mask[None, :, None] == 0, -1e9).softmax(-1)")
    )
    Path("wrong.py").write_text(over_heads, encoding="utf-8")
    command = shlex.split(parts["command"])
    report = json.loads(invoke(*command, "--json").out)
    (finding,) = [finding for finding in report["findings"] if finding["sure"]]
    assert "aligned with the heads" in finding["sentence"]

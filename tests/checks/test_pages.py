"""The pages of the checks: each module is wrong as its page says, by that check alone, and right with the fix."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import mha_inspect
from mha_inspect.checks.intent import CHECKS
from tests.test_readme import CUT, FILE, TRANSCRIPT, comparable
from tests.test_words import faults
from tests.warm import Answer

FOLDER = Path(mha_inspect.__file__).parent / "checks" / "pages"
COLUMNS = 78
LINES_OF_A_MODULE = 30
MEND = re.compile(r"^## Fix\n\n```diff\n(.*?)^```$", re.M | re.S)
Invoke = Callable[..., Answer]
of_every_check = pytest.mark.parametrize("name", CHECKS)


@dataclass(frozen=True)
class Page:
    """The page of a check, in its parts."""

    text: str

    @property
    def name(self) -> str:
        """The file of the module."""
        return self._module["name"]

    @property
    def wrong(self) -> str:
        return self._module[0]

    @property
    def mended(self) -> str:
        """The module with the lines of the fix in place of those that it removes."""
        mend = MEND.search(self.text)
        assert mend is not None
        lines = mend[1].splitlines(keepends=True)
        assert {line[0] for line in lines} == {"-", "+"}
        old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert self.wrong.count(old) == 1
        return self.wrong.replace(old, new)

    @property
    def transcript(self) -> re.Match[str]:
        (transcript,) = TRANSCRIPT.finditer(self.text)
        return transcript

    @property
    def command(self) -> list[str]:
        return shlex.split(self.transcript["command"])[1:]

    @property
    def prose(self) -> list[str]:
        """Its paragraphs; names between backticks are one word each."""
        text = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)
        return [" ".join(paragraph.split()) for paragraph in re.sub(r"`[^`]*`", "NAME", text).split("\n\n")]

    @property
    def _module(self) -> re.Match[str]:
        (module,) = FILE.finditer(self.text)
        return module


def page_of(name: str) -> Page:
    return Page((FOLDER / f"{name}.md").read_text(encoding="utf-8"))


def excerpt(name: str, out: str) -> str:
    """The verdict and the finding of what is printed, with marks for the lines between and after them."""
    verdict = out.partition("layer Attention\n")[0]
    finding = re.search(rf"^1\. {name}\b.*?(?=^$)", out, re.M | re.S)
    assert finding is not None, out
    return f"{verdict}{CUT}\n{finding[0]}{CUT}\n"


def steady(text: str) -> str:
    """The text as another version of torch or another processor would give it."""
    return re.sub(r"\(?torch/\S+:\d+\)?", "torch", comparable(text))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line as on a terminal of the width of a page, without colour."""
    for variable, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": str(COLUMNS)}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("LINES", "1000")
    return invoke


@of_every_check
def test_the_claim_is_the_title_and_the_parts_are_short(name: str) -> None:
    page = page_of(name)
    assert page.text.startswith(f"# {name}: {CHECKS[name]}\n\n")
    assert re.findall(r"^## (.*)", page.text, re.M) == ["Example", "Fix"]
    assert page.wrong.count("\n") <= LINES_OF_A_MODULE
    assert [fault for paragraph in page.prose for fault in faults(paragraph)] == []
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page.text, re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS] == []


def test_every_file_is_the_page_of_a_check() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CHECKS)


@of_every_check
def test_the_finding_is_printed_as_the_page_shows(name: str, terminal: Invoke, request: pytest.FixtureRequest) -> None:
    page = page_of(name)
    Path(page.name).write_text(page.wrong, encoding="utf-8")
    shown, printed = page.transcript, excerpt(name, terminal(*page.command).out)
    assert printed.startswith("1 problem: ")
    if request.config.getoption("--update-readme"):
        text = page.text[: shown.start("output")] + printed + page.text[shown.end() :]
        (FOLDER / f"{name}.md").write_text(text, encoding="utf-8")
    else:
        stale = "stale: pytest tests/checks/test_pages.py --update-readme"
        assert steady(shown["output"]) == steady(printed), stale


@of_every_check
def test_the_mended_module_has_no_finding(name: str, invoke: Invoke) -> None:
    page = page_of(name)
    Path(page.name).write_text(page.mended, encoding="utf-8")
    code, out, err = invoke(*page.command, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["findings"] == []
    assert name in {passed["check"] for passed in report["passed"]}


@of_every_check
def test_explain_shows_the_page(name: str, invoke: Invoke) -> None:
    assert invoke("check", "--explain", name) == (0, page_of(name).text, "")


def test_a_terminal_gets_a_page_in_its_width(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_inspect.render.screen.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    plain = re.sub("\x1b\\[[0-9;]*m", "", invoke("check", "--explain", "heads").out)
    assert CHECKS["heads"] in " ".join(plain.split())
    assert max(map(len, plain.splitlines())) <= 80


def test_a_name_that_is_near_is_suggested(invoke: Invoke) -> None:
    code, out, err = invoke("check", "--explain", "head")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert ", ".join(CHECKS) in err
    assert "Did you mean heads?" in err

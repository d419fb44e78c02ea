"""The README shows what the program prints: `pytest tests/test_readme.py --update-readme` writes it anew."""

from __future__ import annotations

import doctest
import html
import re
import shlex
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from mha_inspect.cli.help import COMMANDS, TOPICS
from tests.warm import Answer

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / ".github" / "broken.svg"
PICTURED = "mha-inspect attention.py"
COLUMNS = 100
CUT = "…"
"""A line that stands for the lines that are left out of a transcript."""
TRANSCRIPT = re.compile(r"(?<=^```console\n)\$ (?P<command>mha-inspect [^\n]*)\n(?P<output>.*?)(?=^```$)", re.M | re.S)
SHELL = re.compile(r"(?<=^```sh\n).*?(?=^```$)", re.M | re.S)
FILE = re.compile(r"(?<=^```python\n)# (?P<name>\w+\.py)\n.*?(?=^```$)", re.M | re.S)
VERSION = re.compile(r"torch \d\S*")
Invoke = Callable[..., Answer]


def transcripts() -> list[re.Match[str]]:
    return list(TRANSCRIPT.finditer(README.read_text(encoding="utf-8")))


def comparable(text: str) -> str:
    """The text without what another processor, which sums in another order, rounds otherwise, and without its columns.

    Those are differences of the size of rounding errors, and everything that is told in units of one.
    """
    text = VERSION.sub("torch", text)
    text = re.sub(r"\d+(\.\d+)?e-\d+|\d{1,3}(,\d{3})+", "~", text)
    text = re.sub(r"largest difference 0\b(?!\.)", "largest difference ~", text)
    return "\n".join(re.sub(r" +", " ", line).rstrip() for line in text.splitlines())


def cut(output: str, shown: str) -> str:
    r"""Return the parts of an output that are shown: each from its first line on, and as long as it is.

    >>> cut("a\nb\nc\nd\n", "a\n…\nc\n…\n")
    'a\n…\nc\n…\n'
    """
    lines, starts = output.splitlines(), comparable(output).splitlines()
    parts = []
    for part in shown.split(f"{CUT}\n"):
        size = part.count("\n")
        first = starts.index(comparable(part).partition("\n")[0]) if size else 0
        parts.append("".join(f"{line}\n" for line in lines[first : first + size]))
    return f"{CUT}\n".join(parts)


def commands() -> list[str]:
    """Those of the program that stand without what they print."""
    lines = [line for block in SHELL.findall(README.read_text(encoding="utf-8")) for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("mha-inspect ")]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the files are that the text shows."""
    for found in FILE.finditer(README.read_text(encoding="utf-8")):
        (tmp_path / found["name"]).write_text(found[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def terminal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line as on a terminal of 100 columns, in colour."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": "1000"}.items():
        monkeypatch.setenv(name, value)
    return invoke


@pytest.mark.parametrize("command", [found["command"] for found in transcripts()])
def test_transcript(
    command: str, terminal: Invoke, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    answer = terminal(*shlex.split(command)[1:])
    assert answer.code == 0, answer.err
    text = README.read_text(encoding="utf-8")
    found = next(found for found in TRANSCRIPT.finditer(text) if found["command"] == command)
    out, shown = cut(answer.out, found["output"]), found["output"]
    if request.config.getoption("--update-readme"):
        README.write_text(text[: found.start("output")] + out + text[found.end() :], encoding="utf-8")
        shown = out
    assert comparable(shown) == comparable(out), "stale: pytest tests/test_readme.py --update-readme"


def drawn(page: str) -> str:
    """Return a picture of a terminal that shows a page in colour, by Rich's own export."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="standard")
    console.print(Text.from_ansi(page), soft_wrap=True)
    return console.export_svg(title=PICTURED, unique_id="broken")


def read(picture: str) -> str:
    """Return the lines of text in a picture of a terminal."""
    lines: dict[str, str] = {}
    for place, words in re.findall(r'<text [^>]*clip-path="url\(#broken-line-(\d+)\)"[^>]*>(.*?)</text>', picture):
        lines[place] = lines.get(place, "") + html.unescape(words).replace("\xa0", " ")
    return "\n".join(lines.values())


def test_picture(terminal: Invoke, request: pytest.FixtureRequest) -> None:
    answer = terminal(*shlex.split(PICTURED)[1:])
    assert answer.code == 0, answer.err
    picture = drawn(answer.out)
    if request.config.getoption("--update-readme"):
        PICTURE.write_text(picture, encoding="utf-8")
    shown = read(PICTURE.read_text(encoding="utf-8"))
    assert shown.startswith("1 problem: ")
    assert comparable(shown) == comparable(read(picture)), "stale: pytest tests/test_readme.py --update-readme"
    readme = README.read_text(encoding="utf-8")
    assert f"\n{PICTURED}  # " in readme
    assert readme.index(f"]({PICTURE.relative_to(ROOT).as_posix()})") < readme.index("```sh")


@pytest.mark.parametrize("command", commands())
def test_command_without_a_transcript(command: str, invoke: Invoke) -> None:
    words = shlex.split(command, comments=True)[1:]
    code, out, err = invoke(*words)
    # The module of this page is wrong: check says so.
    assert code == (1 if words[0] == "check" and "--explain" not in words else 0), err
    assert out


def test_the_page_is_short_and_narrow() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120
    assert {shlex.split(line)[1] for line in commands()} >= {"trace", "params", "compare-heads"}
    assert transcripts()
    wide = [line for found in transcripts() for line in found[0].splitlines() if len(line) > COLUMNS]
    assert wide == []


def test_python_in_the_readme() -> None:
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert tried >= 6
    assert failed == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert f"mha-inspect {command}" in README.read_text(encoding="utf-8")


def test_every_page_of_the_manual_is_linked() -> None:
    links = re.findall(r"\]\(mha_inspect/manual/([\w-]+)\.md\)", README.read_text(encoding="utf-8"))
    assert sorted(links) == sorted(TOPICS)

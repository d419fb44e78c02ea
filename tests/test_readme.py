"""The README shows what the program prints: `pytest tests/test_readme.py --update-readme` writes it anew."""

from __future__ import annotations

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parent.parent / "README.md"
TRANSCRIPT = re.compile(r"(?<=^```console\n)\$ (?P<command>mha-inspect [^\n]*)\n(?P<output>.*?)(?=^```$)", re.M | re.S)
SHELL = re.compile(r"(?<=^```sh\n)mha-inspect .*?(?=^```$)", re.M | re.S)
FILE = re.compile(r"(?<=^```python\n)# (?P<name>\w+\.py)\n.*?(?=^```$)", re.M | re.S)
VERSION = re.compile(r"torch \d\S*")


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


def commands() -> list[str]:
    """Those that stand without what they print."""
    return [line for block in SHELL.findall(README.read_text(encoding="utf-8")) for line in block.splitlines()]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the files are that the text shows."""
    for found in FILE.finditer(README.read_text(encoding="utf-8")):
        (tmp_path / found["name"]).write_text(found[0], encoding="utf-8")
    weights = {f"layers.0.attn.{name}_proj.weight": torch.ones(16, 16) for name in "qkvo"}
    torch.save({"model": weights}, tmp_path / "checkpoint.pt")
    shape = {"dtype": "F32", "shape": [16, 16], "data_offsets": [0, 1024]}
    header = json.dumps(dict.fromkeys(weights, shape)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1024))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [found["command"] for found in transcripts()])
def test_transcript(command: str, invoke, request: pytest.FixtureRequest) -> None:
    line, *cut = re.split(r" \| (head|tail) -n ", command)
    answer = invoke(*shlex.split(line)[1:])
    assert answer.code == (1 if re.search(r"\nfailed: |\ncheck: \d", answer.out) else 0), answer.err
    if cut:
        lines = answer.out.splitlines(keepends=True)
        kept = lines[: int(cut[1])] if cut[0] == "head" else lines[-int(cut[1]) :]
        answer = answer._replace(out="".join(kept))
    if request.config.getoption("--update-readme"):
        text = README.read_text(encoding="utf-8")
        found = next(found for found in TRANSCRIPT.finditer(text) if found["command"] == command)
        text = text[: found.start()] + f"$ {command}\n{answer.out}" + text[found.end() :]
        README.write_text(text, encoding="utf-8")
    shown = next(found for found in transcripts() if found["command"] == command)["output"]
    assert comparable(shown) == comparable(answer.out), "stale: pytest tests/test_readme.py --update-readme"


@pytest.mark.parametrize("command", commands())
def test_command_without_a_transcript(command: str, invoke) -> None:
    if " hf:" in command:
        pytest.importorskip("transformers")
    code, out, err = invoke(*shlex.split(command, comments=True)[1:])
    assert code == 0, err
    assert out


def test_there_are_transcripts() -> None:
    assert {shlex.split(found["command"])[1] for found in transcripts()} >= {"trace", "params", "compare-heads"}
    assert len(commands()) >= 4


def test_python_in_the_readme() -> None:
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert tried >= 8
    assert failed == 0


def test_every_command_is_documented() -> None:
    from mha_inspect.cli.app import COMMANDS

    text = README.read_text(encoding="utf-8")
    for command in COMMANDS:
        assert re.search(rf"^### {command}:", text, re.M) or f"mha-inspect {command}" in text, command

"""The words of the program: every sentence that a user can meet is short, and free of words of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from mha_inspect.cli.app import COMMANDS

from .schemas import load_schema
from .sentences import PACKAGE, comments, docstrings, files, name_of, sentences, shown

README = PACKAGE.parent / "README.md"

LONGEST = 25
"""Words of a sentence that is read once."""
OURS = {
    r"bar|bars|barred|barring": "mask, masked out",
    r"carry|carries|carried|carrying": "copy, pass on",
    r"hold|holds|held|holding": "have, keep, pass; the tensors",
    r"tell|tells|told|telling": "say, find, show, know",
    r"hang|hangs|hung|hanging": "depend",
    r"reckon|reckons|reckoned|foresee|foreseen": "compute, estimate",
    r"nothing but|no less than|none that": "say what it is",
}
"""Words that nobody in the field uses so, with what to say."""


def ours(text: str) -> Iterator[str]:
    for word, say in OURS.items():
        for found in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE):
            yield f"{found[0]!r} in {text!r}: say {say}"


def is_hard(sentence: str) -> bool:
    """Whether a sentence is too long, or begins with a word that stands for a noun; a question may begin so."""
    return len(sentence.split()) > LONGEST or bool(re.match(r"(What|One that|Those)\b(?!.*\?$)", sentence))


def test_what_a_user_reads_is_in_the_words_of_the_field() -> None:
    assert [(name_of(path), fault) for path in files() for text in shown(path) for fault in ours(text)] == []


def test_docstrings_and_comments_are_too() -> None:
    texts = ((name_of(path), text) for path in files() for text in (*docstrings(path), *comments(path)))
    assert [(name, fault) for name, text in texts for fault in ours(text)] == []


def test_a_sentence_is_short_and_begins_with_a_noun() -> None:
    every = ((name_of(path), sentence) for path in files() for text in shown(path) for sentence in sentences(text))
    assert [(name, sentence) for name, sentence in every if is_hard(sentence)] == []


def faults(text: str) -> list[str]:
    return [*ours(text), *filter(is_hard, sentences(" ".join(text.split())))]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_too(command: str, invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # an option a line
    text = invoke(command, "--help").out.partition("\nExamples:")[0]
    assert [fault for line in text.splitlines() for fault in faults(line)] == []


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "help"])
def test_the_descriptions_of_a_schema_are_too(command: str) -> None:
    def descriptions(value: object) -> Iterator[str]:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if key == "description" and isinstance(inner, str):
                yield inner
            elif isinstance(inner, (dict, list)):
                yield from descriptions(inner)

    texts = list(descriptions(load_schema(command)))
    assert texts
    assert [fault for text in texts for fault in faults(text)] == []


def test_the_readme_is_too() -> None:
    prose = re.sub(r"```.*?```", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [fault for paragraph in prose.split("\n\n") for fault in faults(paragraph)] == []


def test_the_rules_find_what_they_refuse() -> None:
    assert [*ours("a key is barred, and nothing is told of it")]
    assert [is_hard(text) for text in ("What is kept.", "word " * 26, "What is kept?")] == [True, True, False]
    assert sentences("One: two. Three?") == ["One: two.", "Three?"]

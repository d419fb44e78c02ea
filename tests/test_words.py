"""The words of the program: every sentence that a user can meet is short, and free of words of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from mha_inspect.cli.app import COMMANDS

from .schemas import load_schema
from .sentences import PACKAGE, comments, docstrings, files, first_words_of_fixes, name_of, sentences, shown

README = PACKAGE.parent / "README.md"
PAGES = sorted([*PACKAGE.glob("manual/*.md"), README])

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
SHOWN = {
    r"looks? at|looked at|looking at": "attend to; use",
    r"lays?|laid|lies|lie": "apply, align, be",
    r"mends?|mended|mending": "fix",
    r"respectively": "a sentence for each",
    r"out of sight": "masked out",
    r"otherwise than|unlike": "differently from",
    r"inside of": "inside",
    r"in turns": "in order, interleaved",
    r"is there|are there|is gone|was gone|goes|went": "exist, occur, be missing",
    r"counts (?:fastest|slowest)": "varies",
    r"cuts?\b[^.;:]*\branks?": "shard",
}
"""The same for texts that a user meets; in the source these words may be apt."""
PRONOUN = re.compile(
    r"(?:What|One that|Those)\b(?!.*\?$)"
    r"|(?:It|They|Them|That)\b"
    r"|(?:This|These|Both)\s(?:is|are|was|were|has|have|had|may|can|must|should|does|do|did|ran|runs|happens?)\b"
)
"""A beginning that stands for a noun; a question may begin with `What`, and `This run` has its noun."""
TWO_NEGATIVES = re.compile(
    r"\b(?:no|not|never)\b[^.;:]*,(?: and| or)? (?:no|not|never|none|nothing|nor)\b", re.IGNORECASE
)
"""E.g. `is not a folder, and not a type`: `is neither a folder nor a type`."""
FIRST_OF_A_FIX = re.compile(
    r"(?:add|align|apply|build|change|check|convert|count|create|cut|divide|drop|give|invert|join|keep|leave|make|mask|merge|"
    r"multiply|pass|pool|put|read|remove|repeat|replace|return|rotate|run|scale|shard|split|swap|take|use|write)$",
    re.IGNORECASE,
)
"""A fix is an instruction, `Use …`, or code."""


def ours(text: str) -> Iterator[str]:
    yield from _replaceable(OURS, text)


@cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


def _replaceable(words: Mapping[str, str], text: str) -> Iterator[str]:
    if not _any_of(tuple(words)).search(text):
        return
    for word, say in words.items():
        for found in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE):
            yield f"{found[0]!r} in {text!r}: say {say}"


def is_hard(sentence: str) -> bool:
    """Whether a sentence is too long, begins with a word that stands for a noun, or negates twice."""
    is_long = len(sentence.split()) > LONGEST
    return is_long or PRONOUN.match(sentence) is not None or TWO_NEGATIVES.search(sentence) is not None


def test_what_a_user_reads_is_in_the_words_of_the_field() -> None:
    texts = [(name_of(path), text) for path in files() for text in shown(path)]
    assert [(name, fault) for name, text in texts for fault in (*ours(text), *_replaceable(SHOWN, text))] == []


def test_a_fix_begins_with_a_verb() -> None:
    words = [(name_of(path), word) for path in files() for word in first_words_of_fixes(path)]
    assert len(words) > 20
    assert [(name, word) for name, word in words if not FIRST_OF_A_FIX.match(word)] == []


def test_docstrings_and_comments_are_too() -> None:
    texts = ((name_of(path), text) for path in files() for text in (*docstrings(path), *comments(path)))
    assert [(name, fault) for name, text in texts for fault in ours(text)] == []


def test_a_sentence_is_short_and_begins_with_a_noun() -> None:
    every = ((name_of(path), sentence) for path in files() for text in shown(path) for sentence in sentences(text))
    assert [(name, sentence) for name, sentence in every if is_hard(sentence)] == []


def faults(text: str) -> list[str]:
    return [*ours(text), *_replaceable(SHOWN, text), *filter(is_hard, sentences(" ".join(text.split())))]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_readme_the_manual_and_the_pages_of_the_checks_are_too(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "`code`", prose).replace("|", " ")  # code is one word
    paragraphs = (piece for paragraph in prose.split("\n\n") for piece in re.split(r"\n(?=[-# ] ?)", paragraph))
    assert [fault for paragraph in paragraphs for fault in faults(paragraph)] == []


def test_the_rules_find_what_they_refuse() -> None:
    assert [*ours("a key is barred, and nothing is told of it")]
    assert [is_hard(text) for text in ("What is kept.", "word " * 26, "What is kept?")] == [True, True, False]
    assert [is_hard(text) for text in ("It changes x.", "This may be meant.", "This run has x.")] == [True, True, False]
    assert [is_hard(text) for text in ("x is not a, and not b.", "no x was found, so no y.")] == [True, False]
    assert [*_replaceable(SHOWN, "the head looks at key 2, and one is cut by ranks")]
    assert sentences("One: two. Three?") == ["One: two.", "Three?"]

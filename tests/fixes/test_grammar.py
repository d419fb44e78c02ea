"""Each row of the grammar makes the edits of its examples, and nothing that is no Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from mha_inspect.fixes.grammar import Row, all_rows
from mha_inspect.fixes.source import Source

ROWS = list(all_rows().values())


def parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def examples(row: Row) -> Iterator[tuple[str, str]]:
    """Yield what the user wrote and what a fix may be, from the lines of a doc comment; patterns have arrows too."""
    for line in (row.of.__doc__ or "").splitlines():
        for arrow in re.finditer(" -> ", line):
            wrong, right = line[: arrow.start()].strip(), line[arrow.end() :].strip()
            if parses(wrong) and parses(right):
                yield wrong, right


def edited(row: Row, code: str) -> set[str]:
    source = Source(code.encode())
    found = set[str]()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.expr, ast.AugAssign)):
            found |= {source.edited(way).content.decode() for way in row.of(node, source)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_makes_the_edits_of_its_examples(row: Row) -> None:
    made = list(examples(row))
    assert made
    for wrong, right in made:
        assert right in edited(row, wrong)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_edit_is_python_again(row: Row) -> None:
    for other in ROWS:
        for wrong, _ in examples(other):
            assert [code for code in edited(row, wrong) if not parses(code)] == []


def test_every_other_byte_stays() -> None:
    code = "x = 'é'; y = (s . softmax( 1 ))  # ünder\r\n\tif 1: pass".replace("\tif 1: pass", "")
    source = Source(code.encode())
    (softmax,) = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    (way,) = all_rows()["axis_of_softmax"].of(softmax, source)
    assert source.edited(way).content.decode() == code.replace("( 1 )", "( -1 )")

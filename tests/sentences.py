"""Reads every sentence of the package out of its source: those that a user can meet, docstrings, and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "mha_inspect"

_PROSE = re.compile(r"[a-z]{2,}[,:;.]? +[a-z(]|[a-z]+ \{\}|\{\} [a-z]")
"""Two words beside each other, or a word beside a value: names, patterns and flags have none."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def shown(path: Path) -> list[str]:
    """Every text with words in it that is no docstring, in order; `{}` stands for a value."""
    nodes = nodes_of(path)
    inside = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    passed_over = inside | {id(node) for node, _ in _docstrings(nodes)}
    texts = []
    for node in nodes:
        if id(node) in passed_over:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.col_offset, node.value))
        elif isinstance(node, ast.JoinedStr):
            pieces = (piece.value if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
            texts.append((node.lineno, node.col_offset, "".join(map(str, pieces))))
    return [" ".join(text.split()) for _, _, text in sorted(texts) if _PROSE.search(text)]


def docstrings(path: Path) -> list[str]:
    """Every docstring, those of fields included."""
    return [text for _, text in _docstrings(nodes_of(path))]


def comments(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


def _docstrings(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.Constant, str]]:
    for node in nodes:
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.value, item.value.value


def first_words_of_fixes(path: Path) -> list[str]:
    """The first word of each `fix=`, and of each way of an edit, that begins with a word: `Use` of `"Use .mT."`."""
    words = []
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        is_edit = isinstance(node.func, ast.Name) and node.func.id == "Edit"
        named = ("fix", "way") if is_edit else ("fix",)
        fixes = [keyword.value for keyword in node.keywords if keyword.arg in named]
        fixes += node.args[3:4] if is_edit else []
        for text in (text for fix in fixes for text in _beginnings(fix)):
            word = re.match(r"[A-Za-z]+(?= )", text)
            words += [word[0]] if word else []
    return words


def _beginnings(node: ast.expr) -> Iterator[str]:
    """Each constant that an expression may begin with."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr) and node.values:
        yield from _beginnings(node.values[0])
    elif isinstance(node, ast.IfExp):
        yield from (*_beginnings(node.body), *_beginnings(node.orelse))
    elif isinstance(node, ast.BinOp):
        yield from _beginnings(node.left)
    elif isinstance(node, ast.Call) and node.args:
        yield from _beginnings(node.args[0])  # e.g. of `_fix("Apply the mask to the keys", layout)`


def sentences(text: str) -> list[str]:
    """The sentences of a text: cut behind each full stop."""
    return [piece.strip() for piece in re.split(r"(?<=[.!?])\s+", text) if piece.strip()]

"""Reads every sentence of the package out of its source: those that a user can meet, docstrings, and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "mha_inspect"

_PROSE = re.compile(r"[a-z]{2,}[,:;.]? +[a-z(]|[a-z]+ \{\}|\{\} [a-z]")
"""Two words beside each other, or a word beside a value: names, patterns and flags have none."""


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def shown(path: Path) -> list[str]:
    """Every text with words in it that is no docstring, in order; `{}` stands for a value."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    documented = {id(node) for node, _ in _docstrings(tree)}
    texts = []
    for node in ast.walk(tree):
        if id(node) in inside | documented:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.col_offset, node.value))
        elif isinstance(node, ast.JoinedStr):
            pieces = (piece.value if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
            texts.append((node.lineno, node.col_offset, "".join(map(str, pieces))))
    return [" ".join(text.split()) for _, _, text in sorted(texts) if _PROSE.search(text)]


def docstrings(path: Path) -> list[str]:
    """Every docstring, those of fields included."""
    return [text for _, text in _docstrings(ast.parse(path.read_text(encoding="utf-8")))]


def comments(path: Path) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]


def _docstrings(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                yield item.value, item.value.value


def sentences(text: str) -> list[str]:
    """The sentences of a text: cut behind each full stop."""
    return [piece.strip() for piece in re.split(r"(?<=[.!?])\s+", text) if piece.strip()]

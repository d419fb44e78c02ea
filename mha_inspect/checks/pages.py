"""The pages of the checks: the docstrings of their functions, read without torch."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_RULES = Path(__file__).parent / "rules"


@cache
def _docstring_of(name: str) -> str:
    """Return the docstring of the function of a check: its file has the name of the check, and so has the function."""
    tree = ast.parse((_RULES / f"{name}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    return ""


def claim_in(docstring: str) -> str:
    """Return what is true if a check passes: the first line of its docstring, as a part of a sentence."""
    first = docstring.strip().partition("\n")[0].removesuffix(".")
    return first[:1].lower() + first[1:]


def claim_of(name: str) -> str:
    """Return what is true if a check passes."""
    return claim_in(_docstring_of(name))


def page_of(name: str) -> str:
    """Return the page of a check, as Markdown: what is measured and why, and a module that is wrong, and right."""
    page = _docstring_of(name).partition("\n")[2].strip()
    return f"# {name}: {claim_of(name)}\n\n{page}\n"

"""Show the docstrings below the fields of dataclasses where `help()` looks for them: in the docstring of the class.

    >>> from mha_inspect.reports.common import Stats
    >>> print(Stats.__doc__)
    Statistics of a tensor over its finite elements.
    <BLANKLINE>
    Fields:
        mean: Mean of the elements.
        ...

The source is read when a docstring is looked at, so an import costs nothing. Without a source there are no fields.
"""

from __future__ import annotations

import sys
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast

_WIDTH = 96
"""Columns of a docstring in `help()`, which indents it."""


class Explained:
    """The docstring of a dataclass, followed by its fields. It is a descriptor: `cls.__doc__` calls it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._whole = ""

    def __get__(self, instance: object, owner: type) -> str:
        if not self._whole:
            self._whole = _with_fields(self.text, field_docs(owner))
        return self._whole


def explain_fields(namespace: dict[str, Any]) -> None:
    """Let the docstring of each dataclass that a module defines, given its `globals()`, explain the fields."""
    for cls in namespace.values():
        is_defined_here = isinstance(cls, type) and cls.__module__ == namespace["__name__"]
        if is_defined_here and "__dataclass_fields__" in vars(cls):
            cls.__doc__ = Explained(cls.__doc__ or "")


def field_docs(cls: type) -> dict[str, str]:
    """Return each public field of a dataclass with the docstring below it, or below that of a base class; or empty."""
    from dataclasses import fields

    docs = {field.name: "" for field in fields(cls) if not field.name.startswith("_")}
    for base in reversed(cls.__mro__):
        for name, text in _docs_in_source(base).items():
            if name in docs:
                docs[name] = text
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields in the source of a class, without those of its base classes."""
    import ast
    from itertools import pairwise

    body = _body_of(cls)
    docs = dict[str, str]()
    for field, below in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not isinstance(below, ast.Expr) or not isinstance(below.value, ast.Constant):
            continue
        if isinstance(below.value.value, str):
            docs[field.target.id] = " ".join(below.value.value.split())
    return docs


def _body_of(cls: type) -> list[ast.stmt]:
    """Return the statements of a class; empty for a class of C, or without a source file."""
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    except (OSError, TypeError, SyntaxError):
        return []
    if not cls.__module__.startswith(f"{__package__}."):
        return []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__qualname__:
            return node.body
    return []


def _with_fields(text: str, docs: dict[str, str]) -> str:
    from textwrap import fill

    if not docs:
        return text
    lines = [
        fill(f"{name}: {doc}", _WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)
        for name, doc in docs.items()
    ]
    return "\n".join([*text.rstrip().splitlines(), "", "Fields:", *lines])

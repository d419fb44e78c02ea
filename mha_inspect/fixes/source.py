"""A Python file as bytes with its syntax tree, and edits of its expressions that keep every other byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

_BOM = b"\xef\xbb\xbf"
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)?")
TURNS = ("transpose", "swapaxes", "permute")
"""Methods that put axes in another order."""
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, order=True)
class Replacement:
    """A text in the place of the bytes from `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Edit:
    """A change of the source: one row of the grammar, applied at one place or several."""

    row: str
    """Name of the row."""
    replacements: tuple[Replacement, ...]
    cost: int = 1
    """The number of expressions that it changes."""


@dataclass(frozen=True)
class Source:
    """The bytes of a file in UTF-8."""

    content: bytes

    @cached_property
    def tree(self) -> ast.Module:
        """Return its syntax tree. Raises `SyntaxError` or `ValueError` if it is not Python."""
        return ast.parse(self.content)

    @cached_property
    def _starts(self) -> list[int]:
        """The offset of the first byte of each line, counted from 0."""
        lengths = [len(line) for line in _LINE.findall(self.content)]
        starts = [0, *accumulate(lengths)]
        if self.content.startswith(_BOM):
            starts[0] = len(_BOM)
        return starts

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of the first byte of an expression or a statement, and of the byte after its last."""
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]  # an expression has it
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]  # the same
        return start, end

    def code(self, node: ast.AST) -> str:
        """Return the text of an expression as the user wrote it."""
        start, end = self.span(node)
        return self.content[start:end].decode()

    def text(self, start: int, end: int) -> str:
        """Return the text between two offsets."""
        return self.content[start:end].decode()

    def put(self, nodes: Iterable[ast.expr], texts: Iterable[str]) -> list[Replacement]:
        """Return the replacements of expressions by these texts, of those that are others."""
        replacements = []
        for node, text in zip(nodes, texts, strict=True):
            if self.code(node) != text:
                replacements.append(self.instead(node, text))
        return replacements

    def line_at(self, offset: int) -> str:
        """Return the line that a byte is in, as the user wrote it."""
        start = self.content.rfind(b"\n", 0, offset) + 1
        end = self.content.find(b"\n", offset)
        return self.content[start : None if end < 0 else end].decode()

    def instead(self, node: ast.AST, text: str) -> Replacement:
        """Return the replacement of a whole expression."""
        return Replacement(*self.span(node), text)

    def exchanged(self, left: ast.AST, right: ast.AST) -> list[Replacement]:
        """Return the replacements of two expressions by each other."""
        return [self.instead(left, self.code(right)), self.instead(right, self.code(left))]

    def after(self, node: ast.AST, text: str) -> Replacement:
        """Return the replacement that adds a text behind an expression."""
        _, end = self.span(node)
        return Replacement(end, end, text)

    def before_method(self, node: ast.Attribute, text: str) -> Replacement:
        """Return the replacement that adds a text before the point of `x.name`, behind any brackets around `x`."""
        point = self.point(node)
        return Replacement(point, point, text)

    def point(self, node: ast.Attribute) -> int:
        """Return the offset of the point of `x.name`."""
        _, end = self.span(node)
        return self.content.rindex(b".", 0, end - len(node.attr.encode()))

    def without_method(self, call: ast.Call) -> Replacement:
        """Return the replacement that removes the call of a method: `x.flip(0)` becomes `x`."""
        assert isinstance(call.func, ast.Attribute)
        _, end = self.span(call)
        return Replacement(self.point(call.func), end, "")

    def renamed(self, node: ast.Attribute, name: str) -> Replacement:
        """Return the replacement of the name in `x.name`."""
        _, end = self.span(node)
        return Replacement(end - len(node.attr.encode()), end, name)

    def edited(self, replacements: Iterable[Replacement]) -> Source:
        """Return the source with these replacements. Raises `ValueError` if two of them overlap."""
        parts: list[bytes] = []
        done = 0
        for replacement in sorted(set(replacements)):
            if replacement.start < done:
                raise ValueError("two replacements overlap")
            parts += [self.content[done : replacement.start], replacement.text.encode()]
            done = replacement.end
        return Source(b"".join([*parts, self.content[done:]]))

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function with a parameter that an expression is in; None outside of any."""
        return self._functions.get(node)

    def attributes_of(self, name: str) -> list[str]:
        """Return the attributes that the file reads from a variable, each once: those of `self`."""
        attributes: dict[str, None] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == name:
                attributes[node.attr] = None
        return list(attributes)

    def target_of(self, node: ast.AST) -> str:
        """Return the variable that an expression, or what is made of it alone, is assigned to; empty for others."""
        return self._targets.get(node, "")

    @cached_property
    def _targets(self) -> dict[ast.AST, str]:
        targets: dict[ast.AST, str] = {}
        for statement in ast.walk(self.tree):
            if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                continue
            value: ast.AST | None = statement.value
            while value is not None:
                targets[value] = statement.targets[0].id
                owner = value.func if isinstance(value, ast.Call) else None
                value = owner.value if isinstance(owner, ast.Attribute) else None
        return targets

    def is_turned(self, node: ast.AST) -> bool:
        """Return whether the axes of what an expression makes are put in another order at once."""
        return node in self._turned

    @cached_property
    def _turned(self) -> set[ast.AST]:
        methods = [node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute) and node.attr in TURNS]
        return {method.value for method in methods}

    def is_of_constructor(self, node: ast.AST) -> bool:
        """Return whether an expression is in `__init__`, where other names make another module."""
        function = self.function_of(node)
        return isinstance(function, ast.FunctionDef) and function.name == "__init__"

    @cached_property
    def _functions(self) -> dict[ast.AST, Function]:
        functions: dict[ast.AST, Function] = {}
        for function in ast.walk(self.tree):
            if isinstance(function, Function) and function.args.args:
                functions.update(dict.fromkeys(ast.walk(function), function))  # inner functions come later
        return functions

    def nodes_on(self, lines: Sequence[int] | set[int]) -> Iterator[ast.AST]:
        """Yield the expressions of the simple statements that touch these lines, in the order of the file."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.expr, ast.AugAssign)) and self._statement_is_on(node, lines):
                yield node

    def _statement_is_on(self, node: ast.AST, lines: Sequence[int] | set[int]) -> bool:
        first, last = self._lines_of_statement.get(node, (0, -1))
        return any(line in lines for line in range(first, last + 1))

    @cached_property
    def _lines_of_statement(self) -> dict[ast.AST, tuple[int, int]]:
        """The first and the last line of the statement of each expression; in a lambda, or in a head, its own."""
        lines: dict[ast.AST, tuple[int, int]] = {}
        for owner in ast.walk(self.tree):
            if isinstance(owner, ast.stmt) and not _is_compound(owner):
                lines.update(dict.fromkeys(ast.walk(owner), _lines_of(owner)))
            elif isinstance(owner, ast.stmt):
                for part in _own_expressions(owner):
                    lines[part] = _lines_of(part)
            elif isinstance(owner, ast.Lambda):
                lines.update(dict.fromkeys(ast.walk(owner), _lines_of(owner)))
        return lines


def _lines_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _is_compound(statement: ast.stmt) -> bool:
    return isinstance(getattr(statement, "body", None), list)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, and none of the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            continue
        for part in ast.walk(child):
            if isinstance(part, ast.expr):
                yield part

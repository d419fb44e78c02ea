"""Read the numbers of an assert that failed: `assert width % heads == 0` with width 100 and heads 8.

No code of the user runs again: only what is stored under the names of the assert is read.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ..text import listed, shape

_MOST_COUNTS = 64
"""The largest number that is listed among those that divide a width."""


def asserted_numbers(error: BaseException) -> str:
    """Return the numbers behind the assert that raised an error, as sentences; empty for other errors.

    `width is 100 and heads is 8. 100 / 8 = 12.5; 1, 2, 4, 5, 10, 20, 25, 50 divide 100.`
    """
    frame, line = _innermost(error)
    if not isinstance(error, AssertionError) or frame is None:
        return ""
    test = _test_at(frame.f_code.co_filename, line)
    if test is None:
        return ""
    known = dict(_stored_in(test, frame.f_locals))
    if not known:
        return ""
    told = [f"{name} is {shape(value.shape) if isinstance(value, Tensor) else value}" for name, value in known.items()]
    return " ".join([f"{listed(told)}.", *_quotients(test, known)])


def divided(width: int) -> str:
    """Return a width with the numbers that divide it: `12: 1, 2, 3, 4, 6, 12`."""
    counts = ", ".join(str(count) for count in range(1, min(width, _MOST_COUNTS) + 1) if width % count == 0)
    return f"{width} (up to {_MOST_COUNTS}): {counts}" if width > _MOST_COUNTS else f"{width}: {counts}"


def _innermost(error: BaseException) -> tuple[FrameType | None, int]:
    """Return the frame that raised an error, and its line."""
    traceback = error.__traceback__
    if traceback is None:
        return None, 0
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame, traceback.tb_lineno


def _test_at(file: str, line: int) -> ast.expr | None:
    """Return the test of the assert that covers a line; None if there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or nested too deeply
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return node.test
    return None


def _stored_in(test: ast.expr, variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a test by their source: `self.heads` and `x` of `x.shape[1] % self.heads`."""
    for node in ast.walk(test):
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        value = _stored(node, variables)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or isinstance(value, Tensor):
            yield ast.unparse(node), value


def _stored(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return what is stored under a name, or under that of an attribute of a module: a property would run code."""
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _stored(node.value, variables)
    if not isinstance(owner, nn.Module):
        return None
    for kept in (vars(owner), owner._modules, owner._parameters, owner._buffers):
        if node.attr in kept:
            return kept[node.attr]
    return None


def _quotients(test: ast.expr, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield what divides a number of which a test asks for the remainder."""
    for node in ast.walk(test):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
            continue
        width, count = (_number(side, known) for side in (node.left, node.right))
        if isinstance(width, int) and isinstance(count, int) and width > 0 and count > 0 and width % count:
            yield f"{width} / {count} = {width / count:.4g}; these numbers divide {divided(width)}."


def _number(side: ast.expr, known: Mapping[str, Any]) -> Any:
    return side.value if isinstance(side, ast.Constant) else known.get(ast.unparse(side))

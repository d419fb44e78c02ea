"""Read the two sides of the comparison in an assert that failed: `assert mask.size(1) == tgt_len`.

Only names, attributes, sizes and arithmetic are evaluated: no code of the user runs again.
"""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ...text import listed

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIZES = ("shape", "ndim")
_METHODS = ("size", "dim", "numel")


class _UnknownError(Exception):
    """An expression cannot be evaluated without running code."""


def compared_numbers(frame: FrameType, line: int) -> str:
    """Return both sides of the comparison of an assert in this line, with their numbers; empty if unknown.

    `key_padding_mask.size(1) is 11 (dimension 0 of key) and tgt_len is 7 (dimension 0 of query).`
    """
    node = _assert_at(frame.f_code.co_filename, line)
    if node is None:
        return ""
    tests = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]
    for test in tests:
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return ""
        sides = (test.left, test.comparators[0])
        try:
            numbers = [_value(side, frame.f_locals) for side in sides]
        except _UnknownError:
            return ""
        if not all(_is_number(number) for number in numbers):
            return ""
        if _holds(test.ops[0], *numbers):
            continue
        said = [_said(side, number, frame.f_locals) for side, number in zip(sides, numbers, strict=True)]
        return f"{' and '.join(filter(None, said))}."
    return ""


def _assert_at(file: str, line: int) -> ast.Assert | None:
    """Return the assert statement that covers a line; None if there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or nested too deeply
        return None
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return next((node for node in nodes if node.lineno <= line <= (node.end_lineno or node.lineno)), None)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or the sizes of a tensor."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _holds(comparison: ast.cmpop, left: Any, right: Any) -> bool:
    known: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
    compare = known.get(type(comparison))
    try:
        return compare is None or bool(compare(left, right))
    except TypeError:  # a number and sizes
        return False


def _said(side: ast.expr, number: Any, variables: Mapping[str, Any]) -> str:
    """Return an expression with its number, and the dimensions of other tensors that have this size."""
    if isinstance(side, ast.Constant):
        return f"{ast.unparse(side)} is expected"
    shown = list(number) if isinstance(number, tuple) else number
    said = f"{ast.unparse(side)} is {shown}"
    used = {part.id for part in ast.walk(side) if isinstance(part, ast.Name)}
    sizes = [
        f"dimension {value.shape.index(number)} of {name}"
        for name, value in variables.items()
        if isinstance(value, Tensor) and name not in used and number in value.shape and number > 1
    ]
    return f"{said} ({listed(sizes[:3])})" if sizes else said


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression in a frame. Raises `_UnknownError` if code would have to run for it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, variables), node.attr)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(each, variables) for each in node.elts)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, variables), _value(node.slice, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_plain(_value(node.operand, variables))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = (_plain(_value(each, variables)) for each in (node.left, node.right))
        try:
            return _ARITHMETIC[type(node.op)](left, right)
        except ZeroDivisionError:
            raise _UnknownError from None
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(node, variables)
    raise _UnknownError


def _attribute(owner: Any, name: str) -> Any:
    """Return sizes of a tensor, or what is stored in a module under a name; a property would run code."""
    if isinstance(owner, Tensor):
        if name in _SIZES:
            return tuple(owner.shape) if name == "shape" else owner.dim()
        raise _UnknownError
    if isinstance(owner, nn.Module):
        for kept in (vars(owner), owner._modules, owner._parameters, owner._buffers):
            if name in kept:
                return kept[name]
    raise _UnknownError


def _item(owner: Any, index: Any) -> Any:
    if not isinstance(owner, tuple) or type(index) is not int or not -len(owner) <= index < len(owner):
        raise _UnknownError
    return owner[index]


def _plain(value: Any) -> Any:
    if not isinstance(value, (int, float)):
        raise _UnknownError
    return value


def _called(node: ast.Call, variables: Mapping[str, Any]) -> Any:
    """Return the result of `x.size(1)`, `x.dim()`, `x.numel()` or `len(x)` for a tensor."""
    args = [_value(arg, variables) for arg in node.args]
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        owner = _value(node.func.value, variables)
        if not isinstance(owner, Tensor):
            raise _UnknownError
        shape = tuple(owner.shape)
        if node.func.attr == "size":
            return _item(shape, args[0]) if args else shape
        return len(shape) if node.func.attr == "dim" else owner.numel()
    is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and "len" not in variables and len(args) == 1
    sizes = tuple(args[0].shape) if is_len and isinstance(args[0], Tensor) else ()
    if not sizes:
        raise _UnknownError
    return sizes[0]

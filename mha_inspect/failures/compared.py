"""Read the two sides of the comparison in an assert that failed: `assert mask.size(1) == tgt_len`.

Only names, attributes, sizes and arithmetic are evaluated: no code of the user runs again.
"""

from __future__ import annotations

import ast
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ..text import listed

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SIZES = ("shape", "ndim")
_METHODS = ("size", "dim", "numel")


class _UnknownError(Exception):
    """An expression cannot be evaluated without running code."""


def compared_numbers(frame: FrameType, line: int) -> str:
    """Return both sides of the comparison of an assert in this line, with their numbers; empty if unknown.

    `key_padding_mask.size(1) is 11 (dimension 0 of key) and tgt_len is 7 (dimension 0 of query).`
    """
    statement = _assert_at(frame.f_code.co_filename, line)
    if statement is None:
        return ""
    for test in _conditions(statement.test):
        comparison = _comparison_of(test, frame.f_locals)
        if comparison is None:
            return ""
        if not _is_true(comparison):
            left = _described(comparison.left, comparison.left_number, frame.f_locals)
            right = _described(comparison.right, comparison.right_number, frame.f_locals)
            return f"{left} and {right}."
    return ""


@dataclass(frozen=True)
class _Comparison:
    """The two sides of `mask.size(1) == length`, with their numbers."""

    operator: ast.cmpop
    left: ast.expr
    right: ast.expr
    left_number: Any
    """A number, or the sizes of a tensor."""
    right_number: Any


def _conditions(test: ast.expr) -> list[ast.expr]:
    """Return the conditions of `a and b`, in order."""
    is_and = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    return test.values if isinstance(test, ast.BoolOp) and is_and else [test]


def _comparison_of(test: ast.expr, variables: Mapping[str, Any]) -> _Comparison | None:
    """Return a comparison of two sides whose numbers are known; None for other conditions."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right = test.left, test.comparators[0]
    try:
        left_number, right_number = _value(left, variables), _value(right, variables)
    except _UnknownError:
        return None
    if not _is_number(left_number) or not _is_number(right_number):
        return None
    return _Comparison(test.ops[0], left, right, left_number, right_number)


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


def _is_true(comparison: _Comparison) -> bool:
    """Return whether a comparison is true; one by `in` or `is` counts as true, because numbers do not explain it."""
    compare = _COMPARES.get(type(comparison.operator))
    try:
        return compare is None or bool(compare(comparison.left_number, comparison.right_number))
    except TypeError:  # a number and sizes
        return False


def _described(side: ast.expr, number: Any, variables: Mapping[str, Any]) -> str:
    """Return an expression with its number, and the dimensions of other tensors that have this size."""
    if isinstance(side, ast.Constant):
        return f"{ast.unparse(side)} is expected"
    shown = list(number) if isinstance(number, tuple) else number
    used = {part.id for part in ast.walk(side) if isinstance(part, ast.Name)}
    sizes = []
    for name, value in variables.items():
        if isinstance(value, Tensor) and name not in used and number in value.shape and number > 1:
            sizes.append(f"dimension {value.shape.index(number)} of {name}")
    where = f" ({listed(sizes[:3])})" if sizes else ""
    return f"{ast.unparse(side)} is {shown}{where}"


def _value(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of an expression in a frame. Raises `_UnknownError` if code would have to run for it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, variables), node.attr)
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(element, variables) for element in node.elts)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, variables), _value(node.slice, variables))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_plain(_value(node.operand, variables))
    if isinstance(node, ast.BinOp):
        return _calculated(node, variables)
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(node, variables)
    raise _UnknownError


def _calculated(node: ast.BinOp, variables: Mapping[str, Any]) -> Any:
    """Return the result of arithmetic: `embed_dim // num_heads`."""
    calculate = _ARITHMETIC.get(type(node.op))
    if calculate is None:
        raise _UnknownError
    left, right = _plain(_value(node.left, variables)), _plain(_value(node.right, variables))
    try:
        return calculate(left, right)
    except ZeroDivisionError:
        raise _UnknownError from None


def _attribute(owner: Any, name: str) -> Any:
    """Return sizes of a tensor, or what is stored in a module under a name; a property would run code."""
    if isinstance(owner, Tensor):
        if name not in _SIZES:
            raise _UnknownError
        return tuple(owner.shape) if name == "shape" else owner.dim()
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
        return _method(_value(node.func.value, variables), node.func.attr, args)
    is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and "len" not in variables
    if not is_len or len(args) != 1 or not isinstance(args[0], Tensor) or not args[0].shape:
        raise _UnknownError
    return args[0].shape[0]


def _method(owner: Any, name: str, args: Sequence[Any]) -> Any:
    """Return the result of a method of a tensor that reads its sizes."""
    if not isinstance(owner, Tensor):
        raise _UnknownError
    if name == "dim":
        return owner.dim()
    if name == "numel":
        return owner.numel()
    return _item(tuple(owner.shape), args[0]) if args else tuple(owner.shape)

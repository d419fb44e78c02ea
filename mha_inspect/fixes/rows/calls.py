"""Read the call in an expression: its method or function, its tensor, and one of its arguments."""

from __future__ import annotations

import ast
from typing import TypeGuard

_OF_TORCH = ("torch", "F", "functional", "nn")


def name_of(node: ast.AST) -> str:
    """Return the name that is called: `softmax` of `F.softmax(x)` and `x.softmax(-1)`; empty for other expressions."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def is_method(node: ast.AST) -> bool:
    """Return whether a call is that of a method: `x.softmax(-1)`, in contrast to `F.softmax(x, -1)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    if isinstance(owner, ast.Attribute):
        return owner.attr not in _OF_TORCH
    return not isinstance(owner, ast.Name) or owner.id not in _OF_TORCH


class MethodCall(ast.Call):
    """The call of a method, for type checkers."""

    func: ast.Attribute


class Pair(ast.Tuple):
    """A tuple or a list of two, for type checkers."""


def calls(node: ast.AST | None, *names: str) -> TypeGuard[ast.Call]:
    """Return whether a method or a function of one of these names is called."""
    return node is not None and name_of(node) in names


def calls_method(node: ast.AST | None, *names: str) -> TypeGuard[MethodCall]:
    """Return whether a method of one of these names is called."""
    return calls(node, *names) and is_method(node)


def calls_function(node: ast.AST | None, *names: str) -> TypeGuard[ast.Call]:
    """Return whether a function of one of these names is called."""
    return calls(node, *names) and not is_method(node)


def is_operation(node: ast.AST | None, *signs: type[ast.operator]) -> TypeGuard[ast.BinOp]:
    """Return whether an expression is an operation with one of these signs."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, signs)


def is_pair(node: ast.AST | None) -> TypeGuard[Pair]:
    """Return whether an expression is a tuple or a list of two."""
    return isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == 2


def argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """Return an argument by its keyword or its place behind the tensor; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    at = place if is_method(call) else place + 1
    return call.args[at] if at < len(call.args) else None


def number_of(node: ast.AST | None) -> float | None:
    """Return the number that is written: `-1`, `1e9`; None for other expressions."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        positive = number_of(node.operand)
        return None if positive is None else -positive
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return None
    return float(node.value) if isinstance(node.value, (int, float)) else None


def is_whole(node: ast.AST | None) -> bool:
    """Return whether a whole number is written."""
    number = number_of(node)
    return number is not None and number.is_integer()


def is_simple(node: ast.AST) -> bool:
    """Return whether an expression may be followed by a point or a bracket as it stands."""
    return isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))


def starts_in(function: ast.AST | None) -> list[str]:
    """Return the names in a function that may say where a call begins; none outside of any function."""
    names: dict[str, None] = {}
    for part in () if function is None else ast.walk(function):
        name = part.arg if isinstance(part, ast.arg) else part.id if isinstance(part, ast.Name) else ""
        if any(word in name for word in ("start", "offset", "past", "pos")):
            names[name] = None
    return list(names)


def last_given(call: ast.Call) -> ast.expr:
    """Return the last argument of a call that has one, by keyword or by place."""
    if call.keywords:
        return call.keywords[-1].value
    return call.args[-1]

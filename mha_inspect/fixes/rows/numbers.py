"""Dropout in training alone, a dtype, positions behind a cache, signs of a rotation."""

from __future__ import annotations

import ast

from ..grammar import RAISES, Ways, row
from ..source import Source
from .calls import argument, is_method, is_simple, name_of, number_of


@row("repeat", "training")
def dropout_in_training(node: ast.AST, source: Source) -> Ways:
    """Drop weights in training alone.

    lambda self, w: F.dropout(w, 0.1) -> lambda self, w: F.dropout(w, 0.1, self.training)
    lambda self, w: F.dropout(w, 0.1, training=True) -> lambda self, w: F.dropout(w, 0.1, training=self.training)
    lambda self, q: attend(q, dropout_p=0.1) -> lambda self, q: attend(q, dropout_p=0.1 if self.training else 0.0)
    """
    function = source.function_of(node)
    if not isinstance(node, ast.Call) or function is None:
        return
    training = f"{function.args.args[0].arg}.training"
    for keyword in node.keywords:
        if keyword.arg == "dropout_p" and number_of(keyword.value):
            yield [source.after(keyword.value, f" if {training} else 0.0")]
    if name_of(node) != "dropout" or is_method(node):
        return
    given = argument(node, "training", 1)
    if given is not None:
        yield [source.instead(given, training)]
    elif len(node.args) == 2:
        yield [source.after(node.args[-1], f", {training}")]
    elif node.args:
        last = node.keywords[-1].value if node.keywords else node.args[-1]
        yield [source.after(last, f", training={training}")]


@row("rotary")
def sign_of_rotation(node: ast.AST, source: Source) -> Ways:
    """Give the first half of a rotation its minus.

    torch.cat((x2, x1), dim=-1) -> torch.cat((-x2, x1), dim=-1)
    """
    if name_of(node) not in ("cat", "concat", "stack"):
        return
    assert isinstance(node, ast.Call)
    parts = node.args[0] if node.args else None
    if isinstance(parts, (ast.Tuple, ast.List)) and len(parts.elts) == 2 and is_simple(parts.elts[0]):
        yield [source.instead(parts.elts[0], f"-{source.code(parts.elts[0])}")]


@row("cache", "rotary")
def positions_from_start(node: ast.AST, source: Source) -> Ways:
    """Count positions from where the call begins.

    lambda n, start: torch.arange(n) -> lambda n, start: torch.arange(start, start + n)
    lambda x, start: turned(x, 0) -> lambda x, start: turned(x, start)
    """
    function = source.function_of(node)
    if not isinstance(node, ast.Call) or function is None:
        return
    starts = _starts_in(function)
    if name_of(node) == "arange" and len(node.args) == 1:
        count = node.args[0]
        yield from ([source.instead(count, f"{start}, {start} + {source.code(count)}")] for start in starts)
        return
    for given in node.args:
        if number_of(given) == 0:
            yield from ([source.instead(given, start)] for start in starts)


def _starts_in(function: ast.AST) -> list[str]:
    """Return the names in a function that may say where a call begins."""
    names: dict[str, None] = {}
    for part in ast.walk(function):
        name = part.arg if isinstance(part, ast.arg) else part.id if isinstance(part, ast.Name) else ""
        if any(word in name for word in ("start", "offset", "past", "pos")):
            names[name] = None
    return list(names)


@row("cache")
def slice_of_cache(node: ast.AST, source: Source) -> Ways:
    """Drop a slice of what is kept.

    (k[:, :, -t:], v[:, :, -t:]) -> (k, v)
    """
    if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
        return
    if all(isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple) for part in node.elts):
        yield [source.instead(part, source.code(part.value)) for part in node.elts]  # type: ignore[attr-defined]


@row(RAISES)
def dtype_of_operand(node: ast.AST, source: Source) -> Ways:
    """Give an operand the dtype of the other.

    q @ k -> q @ k.to(q.dtype)
    self.q_proj(x) -> self.q_proj(x.to(self.q_proj.weight.dtype))
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        if isinstance(node.left, ast.Name) and is_simple(node.right):
            yield [source.after(node.right, f".to({node.left.id}.dtype)")]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        is_of_module = isinstance(node.func.value, ast.Name)
        if is_of_module and isinstance(node.args[0], ast.Name):
            yield [source.after(node.args[0], f".to({source.code(node.func)}.weight.dtype)")]

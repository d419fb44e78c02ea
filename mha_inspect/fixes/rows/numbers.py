"""Dropout in training alone, a dtype, positions behind a cache, signs of a rotation."""

from __future__ import annotations

import ast

from ..grammar import RAISES, Ways, row
from ..source import Source
from .calls import (
    argument,
    calls,
    is_method,
    is_operation,
    is_pair,
    is_simple,
    last_given,
    name_of,
    number_of,
    starts_in,
)


@row("repeat", "training")
def dropout_in_training(node: ast.AST, source: Source) -> Ways:
    """Drop weights in training alone.

    lambda self, w: F.dropout(w, 0.1) -> lambda self, w: F.dropout(w, 0.1, self.training)
    lambda self, w: F.dropout(w, 0.1, training=True) -> lambda self, w: F.dropout(w, 0.1, training=self.training)
    lambda self, q: attend(q, dropout_p=0.1) -> lambda self, q: attend(q, dropout_p=0.1 if self.training else 0.0)
    lambda self, w: nn.Dropout(0.1)(w) -> lambda self, w: nn.functional.dropout(w, 0.1, self.training)
    """
    function = source.function_of(node)
    if not isinstance(node, ast.Call) or function is None:
        return
    training = f"{function.args.args[0].arg}.training"
    for keyword in node.keywords:
        if keyword.arg == "dropout_p" and (number_of(keyword.value) or is_simple(keyword.value)):
            yield [source.after(keyword.value, f" if {training} else 0.0")]
    made = node.func
    if name_of(made) == "Dropout" and isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
        arguments = ", ".join(map(source.code, (*node.args, *made.args)))
        module = source.code(made.func.value)
        yield [source.instead(node, f"{module}.functional.dropout({arguments}, {training})")]
    if name_of(node) != "dropout" or is_method(node):
        return
    given = argument(node, "training", 1)
    if given is not None:
        yield [source.instead(given, training)]
    elif len(node.args) == 2:
        yield [source.after(node.args[-1], f", {training}")]
    elif node.args:
        last = last_given(node)
        yield [source.after(last, f", training={training}")]


@row("rotary")
def sign_of_rotation(node: ast.AST, source: Source) -> Ways:
    """Give the first half of a rotation its minus.

    torch.cat((x2, x1), dim=-1) -> torch.cat((-x2, x1), dim=-1)
    torch.cat((-x1, x2), dim=-1) -> torch.cat((-x2, x1), dim=-1)
    """
    if not calls(node, "cat", "concat", "stack"):
        return
    parts = node.args[0] if node.args else None
    if is_pair(parts) and is_simple(parts.elts[0]):
        yield [source.instead(parts.elts[0], f"-{source.code(parts.elts[0])}")]
    if not is_pair(parts):
        return
    first, second = parts.elts
    if isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.USub):
        negated = first.operand
        yield source.exchanged(negated, second)


@row("cache", "rotary")
def positions_from_start(node: ast.AST, source: Source) -> Ways:
    """Count positions from where the call begins.

    lambda n, start: torch.arange(n) -> lambda n, start: torch.arange(start, start + n)
    lambda x, start: turned(x, 0) -> lambda x, start: turned(x, start)
    lambda n, start: table[:n] -> lambda n, start: table[start : start + n]
    """
    function = source.function_of(node)
    if function is None:
        return
    starts = starts_in(function)
    if isinstance(node, ast.Slice) and node.lower is None and node.upper is not None:
        count = source.code(node.upper)
        for start in starts:
            if start != count:
                yield [source.instead(node, f"{start} : {start} + {count}")]
    if not isinstance(node, ast.Call):
        return
    if name_of(node) == "arange" and len(node.args) == 1:
        number = node.args[0]
        for start in starts:
            yield [source.instead(number, f"{start}, {start} + {source.code(number)}")]
        return
    for given in node.args:
        if number_of(given) != 0:
            continue
        for start in starts:
            yield [source.instead(given, start)]


@row("cache")
def slice_of_cache(node: ast.AST, source: Source) -> Ways:
    """Drop a slice of what is kept, unless it is as long as the module says.

    (k[:, :, -t:], v[:, :, -t:]) -> (k, v)
    """
    if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
        return
    whole = []
    for part in node.elts:
        if not isinstance(part, ast.Subscript) or not isinstance(part.slice, ast.Tuple):
            return
        if "self." in source.code(part.slice):
            return
        if not all(isinstance(index, ast.Slice) for index in part.slice.elts):
            return
        whole.append(source.instead(part, source.code(part.value)))
    yield whole


@row(RAISES)
def dtype_of_operand(node: ast.AST, source: Source) -> Ways:
    """Give an operand the dtype of the other.

    q @ k -> q @ k.to(q.dtype)
    self.q_proj(x) -> self.q_proj(x.to(self.q_proj.weight.dtype))
    """
    if is_operation(node, ast.MatMult):
        if isinstance(node.left, ast.Name) and is_simple(node.right):
            yield [source.after(node.right, f".to({node.left.id}.dtype)")]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        is_of_module = isinstance(node.func.value, ast.Name)
        if is_of_module and isinstance(node.args[0], ast.Name):
            yield [source.after(node.args[0], f".to({source.code(node.func)}.weight.dtype)")]

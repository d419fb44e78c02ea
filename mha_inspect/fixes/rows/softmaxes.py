"""The softmax: its axis, and whether the mask comes before it."""

from __future__ import annotations

import ast

from ..grammar import Ways, row
from ..source import Replacement, Source
from .calls import argument, calls, is_method, is_operation, is_simple, name_of, number_of

_HIDDEN = 'float("-inf")'


@row("softmax", "causal", "finite", "padding", "cache", "batch", "heads")
def axis_of_softmax(node: ast.AST, source: Source) -> Ways:
    """Take the softmax over the keys, which are the last axis.

    scores.softmax(1) -> scores.softmax(-1)
    F.softmax(scores, dim=-2) -> F.softmax(scores, dim=-1)
    nn.Softmax(dim=1) -> nn.Softmax(dim=-1)
    F.softmax(scores) -> F.softmax(scores, dim=-1)
    """
    name = name_of(node)
    if name not in ("softmax", "Softmax", "log_softmax"):
        return
    assert isinstance(node, ast.Call)
    dim = argument(node, "dim", -1 if name == "Softmax" else 0)
    if dim is not None and number_of(dim) != -1:
        yield [source.instead(dim, "-1")]
    if dim is None and node.args and not is_method(node):
        yield [source.after(node.args[-1], ", dim=-1")]


@row("softmax")
def softmax_once(node: ast.AST, source: Source) -> Ways:
    """Take one softmax.

    F.softmax(F.softmax(s, dim=-1), dim=-1) -> F.softmax(s, dim=-1)
    """
    if name_of(node) != "softmax" or not isinstance(node, ast.Call) or not node.args:
        return
    inner = node.args[0]
    if name_of(inner) == "softmax":
        yield [source.instead(node, source.code(inner))]


@row("causal", "softmax")
def causal_mask_put_in(node: ast.AST, source: Source) -> Ways:
    """Mask the later keys out.

    s.softmax(-1) -> s.masked_fill(torch.ones_like(s).tril() == 0, float("-inf")).softmax(-1)
    F.softmax(s, dim=-1) -> F.softmax(s.masked_fill(torch.ones_like(s).tril() == 0, float("-inf")), dim=-1)
    """
    if not calls(node, "softmax"):
        return
    if is_method(node) and isinstance(node.func, ast.Attribute):
        scores = node.func.value
    elif node.args:
        scores = node.args[0]
    else:
        return
    code = source.code(scores)
    masked = code if is_simple(scores) else f"({code})"
    yield [source.instead(scores, f"{masked}.masked_fill(torch.ones_like({code}).tril() == 0, {_HIDDEN})")]


def _softmax_of(node: ast.AST) -> ast.Call | None:
    """Return the softmax that is a method's tensor: `s.softmax(-1)` of `s.softmax(-1).tril()`; None without one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    owner = node.func.value
    if name_of(owner) == "softmax" and is_method(owner):
        assert isinstance(owner, ast.Call)
        return owner
    return None


@row("softmax", "causal")
def mask_before_softmax(node: ast.AST, source: Source) -> Ways:
    """Mask the scores, not the weights.

    s.softmax(-1).masked_fill(hidden, 0) -> s.masked_fill(hidden, float("-inf")).softmax(-1)
    s.softmax(-1).tril() -> s.masked_fill(torch.ones_like(s).tril() == 0, float("-inf")).softmax(-1)
    s.softmax(-1) * keep -> s.masked_fill(keep == 0, float("-inf")).softmax(-1)
    F.softmax(s, dim=-1) * keep -> F.softmax(s.masked_fill(keep == 0, float("-inf")), dim=-1)
    """
    yield from _of_function(node, source)
    hidden = _hidden_by(node, source)
    softmax = node.left if isinstance(node, ast.BinOp) else _softmax_of(node)
    if hidden is None or not isinstance(softmax, ast.Call):
        return
    assert isinstance(softmax.func, ast.Attribute)
    scores = softmax.func.value
    if is_simple(scores):
        method = source.content[source.point(softmax.func) : source.span(softmax)[1]].decode()
        yield [source.instead(node, f"{source.code(scores)}.masked_fill({hidden}, {_HIDDEN}){method}")]


def _of_function(node: ast.AST, source: Source) -> Ways:
    """Yield the mask before `F.softmax(scores)`, where its weights are multiplied by the mask."""
    if not is_operation(node, ast.Mult) or not is_simple(node.right):
        return
    softmax, keep = node.left, source.code(node.right)
    if name_of(softmax) != "softmax" or is_method(softmax):
        return
    assert isinstance(softmax, ast.Call)
    if softmax.args and is_simple(softmax.args[0]):
        _, end = source.span(softmax)
        removed = Replacement(end, source.span(node)[1], "")
        yield [source.after(softmax.args[0], f".masked_fill({keep} == 0, {_HIDDEN})"), removed]


def _hidden_by(node: ast.AST, source: Source) -> str | None:
    """Return the code of what is masked out after a softmax; None if nothing is."""
    if is_operation(node, ast.Mult):
        is_masked = name_of(node.left) == "softmax" and is_method(node.left) and is_simple(node.right)
        return f"{source.code(node.right)} == 0" if is_masked else None
    softmax = _softmax_of(node)
    if softmax is None:
        return None
    assert isinstance(node, ast.Call)
    assert isinstance(softmax.func, ast.Attribute)
    if name_of(node) == "masked_fill" and node.args:
        return source.code(node.args[0])
    if name_of(node) in ("tril", "triu"):
        ones = f"torch.ones_like({source.code(softmax.func.value)})"
        given = ", ".join(map(source.code, node.args))
        return f"{ones}.{name_of(node)}({given}) == 0"
    return None

"""The scale of the scores."""

from __future__ import annotations

import ast

from ..grammar import Ways, row
from ..source import Replacement, Source
from .calls import is_method, is_operation, is_simple, name_of

_SCALE = ("scale", "reference")
_PRODUCTS = ("matmul", "bmm", "einsum")


@row(*_SCALE)
def scale_put_in(node: ast.AST, source: Source) -> Ways:
    """Scale the scores by 1/√head_dim.

    q @ k.mT -> q @ k.mT * q.shape[-1] ** -0.5
    torch.matmul(q, k.mT) -> torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
    """
    if is_operation(node, ast.MatMult):
        first: ast.expr = node.left
    elif name_of(node) in _PRODUCTS and not is_method(node):
        assert isinstance(node, ast.Call)
        tensors = [given for given in node.args if not isinstance(given, ast.Constant)]
        if not tensors:
            return
        first = tensors[0]
    else:
        return
    if isinstance(first, ast.Name):
        yield [source.after(node, f" * {source.code(first)}.shape[-1] ** -0.5")]


@row(*_SCALE)
def scale_taken_out(node: ast.AST, source: Source) -> Ways:
    """Scale once.

    scores * self.scale -> scores
    k / math.sqrt(d) -> k
    """
    if is_operation(node, ast.Mult, ast.Div):
        start, _ = source.span(node.right)
        _, end = source.span(node)
        _, left = source.span(node.left)
        if source.content[left:start].strip() in (b"*", b"/"):
            yield [Replacement(left, end, "")]


@row(*_SCALE)
def product_or_quotient(node: ast.AST, source: Source) -> Ways:
    """Divide where it is multiplied, and the other way round.

    scores * math.sqrt(d) -> scores / math.sqrt(d)
    scores / self.scale -> scores * self.scale
    """
    if not is_operation(node, ast.Mult, ast.Div):
        return
    _, start = source.span(node.left)
    end, _ = source.span(node.right)
    between = source.text(start, end)
    sign, other = ("*", "/") if isinstance(node.op, ast.Mult) else ("/", "*")
    if between.count(sign) == 1:
        yield [Replacement(start, end, between.replace(sign, other))]


@row(*_SCALE)
def power_of_scale(node: ast.AST, source: Source) -> Ways:
    """Exchange a root and one over it.

    self.d ** 0.5 -> self.d ** -0.5
    d ** -0.5 -> d ** 0.5
    """
    if is_operation(node, ast.Pow):
        code = source.code(node.right)
        if code in ("0.5", "-0.5"):
            yield [source.instead(node.right, "-0.5" if code == "0.5" else "0.5")]


@row(*_SCALE)
def size_under_root(node: ast.AST, source: Source) -> Ways:
    """Take the root of another size: that of a head.

    [self.head_dim, math.sqrt(self.dim)] -> [self.head_dim, math.sqrt(self.head_dim)]
    [self.head_dim, self.dim ** -0.5] -> [self.head_dim, self.head_dim ** -0.5]
    [q @ k.mT * C ** -0.5] -> [q @ k.mT * q.shape[-1] ** -0.5]
    [self.dim // self.heads, self.dim ** 0.5] -> [self.dim // self.heads, (self.dim // self.heads) ** 0.5]
    """
    size = _under_root(node, source)
    if size is None:
        return
    of_module = [f"self.{name}" for name in source.attributes_of("self")]
    sizes = [*of_module, *_sizes_of_queries(source), *_quotients(source)]
    for name in sizes:
        if name == source.code(size):
            continue
        needs_brackets = "//" in name and isinstance(node, ast.BinOp)
        yield [source.instead(size, f"({name})" if needs_brackets else name)]


def _under_root(node: ast.AST, source: Source) -> ast.expr | None:
    if name_of(node) == "sqrt":
        assert isinstance(node, ast.Call)
        return node.args[0] if len(node.args) == 1 else None
    if is_operation(node, ast.Pow) and is_simple(node.left):
        return node.left if source.code(node.right) in ("0.5", "-0.5") else None
    return None


def _sizes_of_queries(source: Source) -> list[str]:
    """Return the last size of each left operand of a product: `q.shape[-1]` of `q @ k.mT` and of `q.bmm(k.mT)`."""
    names: dict[str, None] = {}
    for node in ast.walk(source.tree):
        left: ast.AST | None = None
        if is_operation(node, ast.MatMult):
            left = node.left
        elif name_of(node) in _PRODUCTS:
            assert isinstance(node, ast.Call)
            left = _first_factor(node)
        if isinstance(left, ast.Name):
            names[f"{left.id}.shape[-1]"] = None
    return list(names)


def _first_factor(product: ast.Call) -> ast.AST | None:
    """Return the left factor of a product that is a call: `q` of `q.bmm(k)`, and of `torch.bmm(q, k)`."""
    if is_method(product) and isinstance(product.func, ast.Attribute):
        return product.func.value
    for given in product.args:
        if isinstance(given, ast.Name):
            return given
    return None


def _quotients(source: Source) -> list[str]:
    """Return the whole quotients that a file divides, as `dim // heads`: the width of a head is one."""
    quotients: dict[str, None] = {}
    for node in ast.walk(source.tree):
        if is_operation(node, ast.FloorDiv):
            quotients[source.code(node)] = None
    return list(quotients)

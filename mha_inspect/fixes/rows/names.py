"""A name in the place of another: used twice, exchanged, or of another function."""

from __future__ import annotations

import ast

from ..grammar import RAISES, Ways, row
from ..source import Replacement, Source
from .calls import calls_method, is_operation, is_pair, name_of, number_of

_SIGNS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
}


@row("parameters", "heads", RAISES)
def name_used_twice(node: ast.AST, source: Source) -> Ways:
    """Read another tensor of the function.

    lambda q, k, v: q @ k -> lambda q, k, v: q @ v
    """
    function = source.function_of(node)
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    if function is None or source.is_of_constructor(node):
        return
    names: dict[str, None] = {}
    for part in ast.walk(function):
        if isinstance(part, ast.arg):
            names[part.arg] = None
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names[part.id] = None
    if node.id not in names:
        return
    for name in names:
        if name not in (node.id, "self", "cls"):
            yield [source.instead(node, name)]


@row("parameters", "reference")
def attribute_used_twice(node: ast.AST, source: Source) -> Ways:
    """Call another module of `self`.

    [self.key(x), self.value(x), self.key(x)] -> [self.key(x), self.value(x), self.value(x)]
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    owner = node.func.value
    if not isinstance(owner, ast.Name):
        return
    names = source.attributes_of(owner.id)
    target = source.target_of(node)
    if target and target[0].lower() in node.func.attr.lower():
        return  # it is called as the variable that it makes: `k = self.w_k(x)` is not the line with the mistake
    for name in names:
        if name != node.func.attr:
            yield [source.renamed(node.func, name)]


@row("parameters")
def next_of_several(node: ast.AST, source: Source) -> Ways:
    """Read the next part of a tensor.

    [qkv[0], qkv[1], qkv[1]] -> [qkv[0], qkv[1], qkv[2]]
    """
    if not isinstance(node, (ast.Tuple, ast.List)) or len(node.elts) < 2:
        return
    for before, after in zip(node.elts, node.elts[1:], strict=False):
        if source.code(before) == source.code(after) and isinstance(after, ast.Subscript):
            index = after.slice
            if isinstance(index, ast.Constant) and type(index.value) is int:
                yield [source.instead(index, str(index.value + 1))]


@row("rotary", "parameters")
def other_function(node: ast.AST, source: Source) -> Ways:
    """Call another function of the file.

    lambda q, k: half(q) @ pairs(k) -> lambda q, k: half(q) @ half(k)
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or source.is_of_constructor(node):
        return
    function = source.function_of(node)
    called = set()
    for part in ast.walk(function or node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
            called.add(part.func.id)
    called.discard(node.func.id)
    for name in sorted(called):
        yield [source.instead(node.func, name)]


@row("inputs")
def not_in_place(node: ast.AST, source: Source) -> Ways:
    """Compute a new tensor, and leave the argument as it is.

    x.add_(y) -> x.add(y)
    x += y -> x = x + y
    """
    name = name_of(node)
    if name.endswith("_") and calls_method(node, name):
        yield [source.renamed(node.func, name.rstrip("_"))]
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        sign = _SIGNS.get(type(node.op))
        value = node.value
        _, start = source.span(node.target)
        end, _ = source.span(value)
        if sign is not None and is_plain(value):
            yield [Replacement(start, end, f" = {node.target.id} {sign} ")]


def is_plain(node: ast.AST) -> bool:
    """Return whether an expression may be the right side of any operator as it stands."""
    return isinstance(node, (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant))


@row("rotary", "cache", "grouped")
def without_function(node: ast.AST, source: Source) -> Ways:
    """Pass a tensor on as it is.

    [q, rope(v, places)] -> [q, v]
    [q, self.rope(v, places)] -> [q, v]
    """
    if not isinstance(node, ast.Call) or source.is_of_constructor(node):
        return
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    is_own = isinstance(owner, ast.Name) and owner.id == "self"
    if not is_own and not isinstance(node.func, ast.Name):
        return
    if node.args and is_plain(node.args[0]) and not isinstance(node.args[0], ast.Starred):
        yield [source.instead(node, source.code(node.args[0]))]


@row("rotary", "cache")
def function_of_neighbour(node: ast.AST, source: Source) -> Ways:
    """Do with a tensor what is done with the one beside it.

    [turned(q, start), k] -> [turned(q, start), turned(k, start)]
    """
    if not isinstance(node, (ast.Tuple, ast.List)):
        return
    called = [part for part in node.elts if isinstance(part, ast.Call) and part.args]
    plain = [part for part in node.elts if isinstance(part, ast.Name)]
    for call in called:
        given = call.args[0] if isinstance(call, ast.Call) else None
        if not isinstance(given, ast.Name):
            continue
        start, end = source.span(given)
        first, last = source.span(call)
        before, after = source.text(first, start), source.text(end, last)
        for name in plain:
            yield [source.instead(name, f"{before}{name.id}{after}")]


@row("cache")
def exchanged_names(node: ast.AST, source: Source) -> Ways:
    """Keep two tensors in the other order.

    (v, k) -> (k, v)
    """
    if not is_pair(node):
        return
    left, right = node.elts
    if isinstance(left, ast.Name) and isinstance(right, ast.Name):
        yield source.exchanged(left, right)


@row("cache")
def other_of_two(node: ast.AST, source: Source) -> Ways:
    """Read the other one of two cached tensors.

    past[0] -> past[1]
    """
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        number = number_of(node.slice)
        if number in (0, 1):
            yield [source.instead(node.slice, str(1 - int(number)))]


@row(RAISES)
def other_size_of_shape(node: ast.AST, source: Source) -> Ways:
    """Read another size of a shape.

    x.shape[1] -> x.shape[-2]
    """
    if not isinstance(node, ast.Subscript):
        return
    number = number_of(node.slice)
    if number is None or not source.code(node.value).endswith(".shape"):
        return
    for other in (-2, -1, 0, 1):
        if number != other:
            yield [source.instead(node.slice, str(other))]


@row("batch", "mixing")
def without_term(node: ast.AST, source: Source) -> Ways:
    """Drop what is added of the same tensor.

    y + 0.1 * y.roll(1, 0) -> y
    """
    if not is_operation(node, ast.Add, ast.Sub):
        return
    left, right = node.left, node.right
    names = {part.id for part in ast.walk(right) if isinstance(part, ast.Name)}
    if isinstance(left, ast.Name) and left.id in names:
        yield [source.instead(node, left.id)]


@row("batch", "padding", "heads")
def each_of_its_own(node: ast.AST, source: Source) -> Ways:
    """Give each batch item its own numbers, not those of another one.

    memory[:1].expand_as(memory) -> memory
    k.mean(0, keepdim=True).expand_as(k) -> k
    """
    if calls_method(node, "expand_as"):
        yield [source.instead(node, source.code(node.args[0]))]

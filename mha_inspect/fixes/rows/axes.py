"""Order of axes: views, transposes, permutations, and where tensors are joined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations, permutations

from ..grammar import RAISES, Ways, row
from ..source import TURNS, Replacement, Source
from .calls import (
    argument,
    calls,
    calls_function,
    calls_method,
    is_method,
    is_operation,
    is_pair,
    is_simple,
    is_whole,
    last_given,
    name_of,
    number_of,
)

_VIEWS = ("view", "reshape")
_ORDER = ("heads", "batch", "mixing", "reference", "padding", "causal", "cache", RAISES)
_LAYERS = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")
_MOVES = ("transpose", "swapaxes", "permute", "flip", "roll", "repeat", "detach", "contiguous", "softmax", "mean")
"""Methods that a fix may remove."""


def _sizes(node: ast.AST) -> list[ast.expr]:
    """Return the sizes of a view that are written one by one; none for other calls."""
    if name_of(node) not in _VIEWS or not is_method(node):
        return []
    assert isinstance(node, ast.Call)
    sizes = node.args
    if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    return [] if any(isinstance(size, ast.Starred) for size in sizes) else list(sizes)


@row(*_ORDER)
def view_then_transpose(node: ast.AST, source: Source) -> Ways:
    """Split into the order that the memory has, and transpose then.

    x.view(b, h, n, d) -> x.view(b, n, h, d).transpose(1, 2)
    x.reshape(b * h, -1, d) -> x.reshape(-1, b * h, d).transpose(0, 1)
    """
    sizes = _sizes(node)
    first = {3: 0, 4: 1}.get(len(sizes))
    if first is None:
        return
    left, right = sizes[first], sizes[first + 1]
    yield [
        source.instead(left, source.code(right)),
        source.instead(right, source.code(left)),
        source.after(node, f".transpose({first}, {first + 1})"),
    ]


@row(*_ORDER)
def transpose_after_view(node: ast.AST, source: Source) -> Ways:
    """Transpose what was split, or joined by a method.

    x.view(b, n, h, d) -> x.view(b, n, h, d).transpose(1, 2)
    x.unflatten(-1, (h, d)) -> x.unflatten(-1, (h, d)).transpose(1, 2)
    """
    if source.is_turned(node):
        return
    if len(_sizes(node)) == 4 or calls_method(node, "unflatten"):
        yield [source.after(node, ".transpose(1, 2)")]


@row(*_ORDER)
def transpose_before_view(node: ast.AST, source: Source) -> Ways:
    """Transpose what is joined.

    out.reshape(b, n, c) -> out.transpose(1, 2).reshape(b, n, c)
    out.view(b, n, c) -> out.transpose(1, 2).reshape(b, n, c)
    out.flatten(2) -> out.transpose(1, 2).flatten(2)
    """
    joins = len(_sizes(node)) in (2, 3) or calls_method(node, "flatten")
    if not joins:
        return
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    if name_of(node.func.value) in TURNS:
        return  # its dimensions are to be changed
    renamed = [source.renamed(node.func, "reshape")] if node.func.attr == "view" else []
    yield [source.before_method(node.func, ".transpose(1, 2)"), *renamed]


@row("heads", "batch", RAISES)
def permute_before_view(node: ast.AST, source: Source) -> Ways:
    """Put the batch and the positions before the heads, and join then.

    out.view(b, n, -1) -> out.permute(1, 2, 0, 3).reshape(b, n, -1)
    """
    if len(_sizes(node)) not in (2, 3):
        return
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    for order in ("1, 2, 0, 3", "2, 0, 1, 3"):
        yield [source.before_method(node.func, f".permute({order})"), source.renamed(node.func, "reshape")]


@row("rotary", "heads")
def transpose_before_function(node: ast.AST, source: Source) -> Ways:
    """Transpose what a function is given, in the place of what it returns.

    rotary(q).transpose(1, 2) -> rotary(q.transpose(1, 2))
    """
    if not calls_method(node, "transpose", "swapaxes", "permute"):
        return
    called = node.func.value
    if not isinstance(called, ast.Call) or not called.args or not is_simple(called.args[0]):
        return
    start, end = source.point(node.func), source.span(node)[1]
    moved = source.text(start, end)
    yield [source.without_method(node), source.after(called.args[0], moved)]


@row("batch", "mixing")
def transpose_in_place_of_view(node: ast.AST, source: Source) -> Ways:
    """Exchange two axes by a transpose, in the place of a view.

    x.reshape(x.shape[1], -1, c) -> x.transpose(0, 1)
    """
    sizes = _sizes(node)
    if len(sizes) != 3:
        return
    assert isinstance(node, ast.Call)
    removed = source.without_method(node)
    yield [Replacement(removed.start, removed.end, ".transpose(0, 1)")]


@row(RAISES)
def reshape_in_place_of_view(node: ast.AST, source: Source) -> Ways:
    """Copy where a view needs another order in memory.

    x.transpose(1, 2).view(b, n, c) -> x.transpose(1, 2).reshape(b, n, c)
    """
    if calls_method(node, "view"):
        yield [source.renamed(node.func, "reshape")]


@row(*_ORDER, "softmax", "grouped", "rotary")
def other_dims_of_transpose(node: ast.AST, source: Source) -> Ways:
    """Exchange two other axes.

    x.transpose(2, 3) -> x.transpose(1, 2)
    k.transpose(1, 2) -> k.transpose(-2, -1)
    """
    if not calls_method(node, "transpose", "swapaxes"):
        return
    if len(node.args) != 2:
        return
    written = [number_of(dim) for dim in node.args]
    for dims in ((0, 1), (1, 2), (-2, -1)):
        if written in ([*dims], [*reversed(dims)]):
            continue
        yield source.put(node.args, map(str, dims))


@row(*_ORDER, "grouped", "rotary")
def other_order_of_permute(node: ast.AST, source: Source) -> Ways:
    """Put axes in another order.

    x.permute(0, 1, 3, 2) -> x.permute(0, 2, 1, 3)
    x.permute(2, 0, 1, 3) -> x.permute(2, 0, 3, 1)
    """
    if not calls_method(node, "permute"):
        return
    dims = node.args
    if not all(map(is_whole, dims)) or len(dims) > 5:
        return
    texts = [source.code(dim) for dim in dims]
    orders = permutations(texts) if len(dims) <= 4 else _swaps(texts)
    for order in orders:
        changed = source.put(dims, order)
        if changed:
            yield changed


def _swaps(texts: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield orders in which two texts are exchanged."""
    for first, second in combinations(range(len(texts)), 2):
        order = list(texts)
        order[first], order[second] = order[second], order[first]
        yield tuple(order)


@row(*_ORDER, "softmax", "parameters", "grouped", "rotary", "repeat", "finite", "window")
def without_method(node: ast.AST, source: Source) -> Ways:
    """Remove a call that moves, repeats or cuts off a tensor.

    q.transpose(1, 2) -> q
    s.softmax(-1).softmax(-1) -> s.softmax(-1)
    """
    if calls_method(node, *_MOVES):
        yield [source.without_method(node)]


@row(*_ORDER, "softmax")
def transpose_put_in(node: ast.AST, source: Source) -> Ways:
    """Transpose one operand of a product, or a tensor that is passed on.

    q @ k -> q @ k.transpose(-2, -1)
    torch.matmul(q, k) -> torch.matmul(q, k.transpose(-2, -1))
    F.scaled_dot_product_attention(q, k, v) -> F.scaled_dot_product_attention(q, k, v.transpose(1, 2))
    """
    operands: list[ast.expr] = []
    if is_operation(node, ast.MatMult):
        operands = [node.left, node.right]
    elif name_of(node) in ("matmul", "bmm", "scaled_dot_product_attention"):
        assert isinstance(node, ast.Call)
        operands = list(node.args[:3])
    for operand in filter(is_simple, operands):
        for dims in ("1, 2", "-2, -1"):
            yield [source.after(operand, f".transpose({dims})")]


@row("heads", "batch", "cache", "causal", "rotary", RAISES)
def dim_of_joining(node: ast.AST, source: Source) -> Ways:
    """Join tensors along another axis.

    torch.cat((past, k), dim=1) -> torch.cat((past, k), dim=2)
    torch.cat(heads, 1) -> torch.cat(heads, -1)
    torch.stack(heads, dim=-1) -> torch.cat(heads, dim=-1)
    """
    if not calls_function(node, "cat", "concat", "stack"):
        return
    dim = argument(node, "dim", 0)
    if dim is not None:
        for number in (-1, -2, 1, 2):
            if number_of(dim) != number:
                yield [source.instead(dim, str(number))]
    if name_of(node) == "stack" and isinstance(node.func, ast.Attribute):
        yield [source.renamed(node.func, "cat")]


@row("cache", "rotary")
def sides_of_joining(node: ast.AST, source: Source) -> Ways:
    """Join two tensors in the other order.

    torch.cat((new, past), 2) -> torch.cat((past, new), 2)
    """
    if not calls_function(node, "cat", "concat"):
        return
    parts = node.args[0] if node.args else None
    if is_pair(parts):
        left, right = parts.elts
        yield source.exchanged(left, right)


@row("heads", "batch", "mixing", RAISES)
def names_of_sizes(node: ast.AST, source: Source) -> Ways:
    """Unpack the sizes of a tensor in another order.

    [N, B, C] -> [B, N, C]
    """
    if not isinstance(node, (ast.Tuple, ast.List)) or len(node.elts) not in (3, 4):
        return
    names = node.elts
    if not all(isinstance(name, ast.Name) for name in names):
        return
    for first, second in combinations(names[:3], 2):
        yield source.exchanged(first, second)


@row("grouped", "padding")
def repeat_of_each(node: ast.AST, source: Source) -> Ways:
    """Repeat each head in turn, or all of them behind one another.

    k.repeat(1, 2, 1, 1) -> k.repeat_interleave(2, 1)
    mask.repeat(heads, 1) -> mask.repeat_interleave(heads, 0)
    mask.repeat_interleave(heads, 0) -> mask.repeat(heads, 1, 1)
    torch.cat([k] * times, dim=1) -> k.repeat_interleave(times, dim=1)
    """
    yield from _tiled_again(node, source)
    yield from _each_of_joined(node, source)
    if not calls_method(node, "repeat"):
        return
    repeated = [(place, times) for place, times in enumerate(node.args) if number_of(times) != 1]
    if len(repeated) != 1:
        return
    place, times = repeated[0]
    _, end = source.span(node)
    assert isinstance(node.func, ast.Attribute)
    start = source.point(node.func)
    code = f".repeat_interleave({source.code(times)}, {place})"
    yield [Replacement(start, end, code)]


def _tiled_again(node: ast.AST, source: Source) -> Ways:
    """Yield all items of a batch behind one another, where each was repeated in turn."""
    if not calls_method(node, "repeat_interleave"):
        return
    dim = argument(node, "dim", 1)
    if number_of(dim) != 0 or not node.args:
        return
    start, end = source.point(node.func), source.span(node)[1]
    times = source.code(node.args[0])
    for ones in (", 1", ", 1, 1", ", 1, 1, 1"):
        yield [Replacement(start, end, f".repeat({times}{ones})")]


def _each_of_joined(node: ast.AST, source: Source) -> Ways:
    """Yield each head in turn, where a list of one tensor several times is joined."""
    if not calls_function(node, "cat", "concat"):
        return
    parts = node.args[0] if node.args else None
    dim = argument(node, "dim", 0)
    if not is_operation(parts, ast.Mult) or dim is None:
        return
    if isinstance(parts.left, (ast.List, ast.Tuple)) and len(parts.left.elts) == 1:
        tensor, times = source.code(parts.left.elts[0]), source.code(parts.right)
        yield [source.instead(node, f"{tensor}.repeat_interleave({times}, dim={source.code(dim)})")]


@row("heads", "batch", "mixing", RAISES)
def order_of_sizes(node: ast.AST, source: Source) -> Ways:
    """View with the first two sizes in the other order.

    x.view(heads, batch, -1, d) -> x.view(batch, heads, -1, d)
    """
    sizes = _sizes(node)
    if len(sizes) == 4:
        first, second = sizes[:2]
        yield source.exchanged(first, second)


@row("grouped", "heads", RAISES)
def dim_of_repeat(node: ast.AST, source: Source) -> Ways:
    """Repeat along another axis.

    k.repeat_interleave(n, dim=1) -> k.repeat_interleave(n, dim=2)
    torch.repeat_interleave(k, n, 1) -> torch.repeat_interleave(k, n, 2)
    """
    if not calls(node, "repeat_interleave"):
        return
    dim = argument(node, "dim", 1)
    if dim is None:
        return
    for number in (1, 2, -2):
        if number_of(dim) != number:
            yield [source.instead(dim, str(number))]


@row(RAISES, "parameters")
def dim_of_split(node: ast.AST, source: Source) -> Ways:
    """Split the features, which are the last axis.

    x.split(c, dim=1) -> x.split(c, dim=-1)
    torch.chunk(x, 3, 1) -> torch.chunk(x, 3, -1)
    x.chunk(3) -> x.chunk(3, dim=-1)
    """
    if not calls(node, "split", "chunk"):
        return
    dim = argument(node, "dim", 1)
    if dim is not None and number_of(dim) != -1:
        yield [source.instead(dim, "-1")]
    elif dim is None and node.args:
        yield [source.after(node.args[-1], ", dim=-1")]


@row("heads", "batch")
def order_of_unflatten(node: ast.AST, source: Source) -> Ways:
    """Split an axis in the other order.

    x.unflatten(0, (H, -1)) -> x.unflatten(0, (-1, H))
    """
    if not calls_method(node, "unflatten"):
        return
    sizes = node.args[-1] if node.args else None
    if is_pair(sizes):
        left, right = sizes.elts
        yield source.exchanged(left, right)


@row("batch", "mixing", RAISES)
def batch_first(node: ast.AST, source: Source) -> Ways:
    """Say to a layer of torch that the batch is the first axis.

    nn.MultiheadAttention(d, h) -> nn.MultiheadAttention(d, h, batch_first=True)
    nn.MultiheadAttention(d, h, batch_first=False) -> nn.MultiheadAttention(d, h, batch_first=True)
    """
    if not calls(node, *_LAYERS):
        return
    for keyword in node.keywords:
        if keyword.arg == "batch_first":
            yield [source.instead(keyword.value, "True")]
            return
    if node.args or node.keywords:
        yield [source.after(last_given(node), ", batch_first=True")]

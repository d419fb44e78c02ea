"""Masks: what True means, the number that masks out, the diagonal, and the axis of padding."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import combinations

from ..grammar import RAISES, Ways, row
from ..source import Replacement, Source
from .calls import argument, calls, is_method, is_operation, is_simple, last_given, name_of, number_of, starts_in

_MASKS = ("causal", "window", "padding", "masking", "finite", "softmax", "cache")
_MASK_ARGUMENTS = ("attn_mask", "key_padding_mask", "src_key_padding_mask", "mask")
_LOWEST = 'float("-inf")'
_OPPOSITE = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">",
}  # fmt: skip
_WITH_EQUAL = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def _masks_of(node: ast.AST) -> list[ast.expr]:
    """Return the masks that a call is given."""
    if not isinstance(node, ast.Call):
        return []
    masks = [keyword.value for keyword in node.keywords if keyword.arg in _MASK_ARGUMENTS]
    if name_of(node) in ("masked_fill", "masked_fill_", "where"):
        first = argument(node, "mask", 0)
        masks += [first] if first is not None and is_method(node) else node.args[:1]
    if name_of(node) == "scaled_dot_product_attention":
        masks += node.args[3:4]
    return [part for mask in masks for part in _choices(mask)]


def _choices(mask: ast.expr) -> list[ast.expr]:
    """Return both values of `None if mask is None else mask`, else the mask itself."""
    return [mask.body, mask.orelse] if isinstance(mask, ast.IfExp) else [mask]


@row(*_MASKS)
def polarity_of_mask(node: ast.AST, source: Source) -> Ways:
    """Mask out where the mask keeps, and the other way round.

    scores.masked_fill(~mask, -1e9) -> scores.masked_fill(mask, -1e9)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask) -> F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)
    scores.masked_fill(mask == 1, -1e9) -> scores.masked_fill(mask != 1, -1e9)
    layer(x, key_padding_mask=mask) -> layer(x, key_padding_mask=mask.logical_not())
    """
    for mask in _masks_of(node):
        if isinstance(mask, ast.UnaryOp) and isinstance(mask.op, ast.Invert):
            yield [source.instead(mask, source.code(mask.operand))]
        elif isinstance(mask, ast.Compare):
            yield from _opposite(mask, source)
        elif is_simple(mask):
            yield [source.instead(mask, f"~{source.code(mask)}")]
            yield [source.after(mask, ".logical_not()")]


def _opposite(compare: ast.Compare, source: Source) -> Ways:
    operator = _operator(compare, source)
    if operator is not None:
        start, end = operator
        yield [Replacement(start, end, f" {_OPPOSITE[type(compare.ops[0])]} ")]


def _operator(compare: ast.Compare, source: Source) -> tuple[int, int] | None:
    """Return where the sign of a comparison is; None for a chain of them, for brackets and for `in`."""
    if len(compare.ops) != 1 or type(compare.ops[0]) not in _OPPOSITE:
        return None
    _, start = source.span(compare.left)
    end, _ = source.span(compare.comparators[0])
    between = source.content[start:end].strip()
    return (start, end) if between in (b"==", b"!=", b"<", b"<=", b">", b">=") else None


@row(*_MASKS)
def inverted_operand(node: ast.AST, source: Source) -> Ways:
    """Drop an inversion of a mask, or invert one that is indexed.

    ~keep[:, None, None, :] -> keep[:, None, None, :]
    keep[:, None, None, :] -> ~keep[:, None, None, :]
    """
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield [source.instead(node, source.code(node.operand))]
    if _index_with_new_axis(node):
        yield [source.instead(node, f"~{source.code(node)}")]


def _index_with_new_axis(node: ast.AST) -> list[ast.expr]:
    """Return the parts of an index that adds axes: `[:, None]`; none for other expressions."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return []
    parts = node.slice.elts
    adds = any(isinstance(part, ast.Constant) and part.value is None for part in parts)
    return list(parts) if adds else []


@row(*_MASKS, RAISES)
def axis_of_padding(node: ast.AST, source: Source) -> Ways:
    """Align the mask with the keys, which are the last axis.

    mask[:, None, :, None] -> mask[:, None, None, :]
    mask[:, None] -> mask[:, None, None]
    """
    parts = _index_with_new_axis(node)
    if not parts or len(parts) > 4:
        return
    texts = [source.code(part) for part in parts]
    kept = [text for text in texts if text != "None"]
    for places in combinations(range(len(texts)), len(kept)):
        order = ["None"] * len(texts)
        for place, text in zip(places, kept, strict=True):
            order[place] = text
        changed = source.put(parts, order)
        if changed:
            yield changed
            # What was cut to the queries has other places along the keys: all of it is taken.
            yield [part if part.text == "None" else replace(part, text=":") for part in changed]
    if len(parts) < 4:
        yield [source.after(parts[-1], ", None")]


@row(RAISES)
def axes_of_mask(node: ast.AST, source: Source) -> Ways:
    """Give a mask the axes of the scores, or the type that the call takes.

    scores.masked_fill(mask == 0, -1e9) -> scores.masked_fill(mask[:, None, None] == 0, -1e9)
    scores.masked_fill(mask, -1e9) -> scores.masked_fill(mask.bool(), -1e9)
    scores + mask -> scores + mask[:, None, None]
    """
    masks = [mask.left if isinstance(mask, ast.Compare) else mask for mask in _masks_of(node)]
    if is_operation(node, ast.Add):
        masks = [node.right]
    for mask in masks:
        if isinstance(mask, ast.Name):
            for way in ("[:, None, None]", "[:, None]", ".transpose(-2, -1)", ".bool()", " == 0"):
                yield [source.after(mask, way)]


@row(*_MASKS)
def number_of_mask(node: ast.AST, source: Source) -> Ways:
    """Mask out with the lowest number.

    scores.masked_fill(hidden, 1e9) -> scores.masked_fill(hidden, -1e9)
    scores.masked_fill(hidden, 0.0) -> scores.masked_fill(hidden, float("-inf"))
    (1 - mask) * 1e9 -> (1 - mask) * -1e9
    """
    numbers: list[ast.expr | None] = []
    if name_of(node) in ("masked_fill", "masked_fill_"):
        assert isinstance(node, ast.Call)
        numbers = [argument(node, "value", 1)]
    elif is_operation(node, ast.Mult):
        numbers = [node.right, node.left]
    for written in numbers:
        number = number_of(written)
        if written is None or number is None:
            continue
        if number > 1000:
            yield [source.instead(written, f"-{source.code(written)}")]
        elif not isinstance(node, ast.BinOp) and number > -1000:
            yield [source.instead(written, _LOWEST)]


@row(*_MASKS)
def diagonal_of_mask(node: ast.AST, source: Source) -> Ways:
    """Begin the triangle a diagonal earlier or later.

    ones.triu(0) -> ones.triu(1)
    torch.triu(ones, diagonal=2) -> torch.triu(ones, diagonal=1)
    ones.triu() -> ones.triu(1)
    ones.triu(offset) -> ones.triu(1 + offset)
    ones.triu(2 + offset) -> ones.triu(1 + offset)
    lambda ones, start: ones.triu(1) -> lambda ones, start: ones.triu(1 + start)
    """
    if not calls(node, "triu", "tril"):
        return
    diagonal = argument(node, "diagonal", 0)
    if diagonal is None:
        start = "" if is_method(node) else ", "
        _, end = source.span(node)
        for other in (1, -1):
            yield [Replacement(end - 1, end - 1, f"{start}{other}")]
        return
    number = number_of(diagonal)
    if number is not None:
        for nearby in (number - 1, number + 1):
            yield [source.instead(diagonal, str(int(nearby)))]
        for start in starts_in(source.function_of(node)):
            yield [source.instead(diagonal, f"{int(number)} + {start}")]
        return
    yield [source.instead(diagonal, f"1 + {source.code(diagonal)}")]
    if not is_operation(diagonal, ast.Add):
        return
    first = number_of(diagonal.left)
    if first == 1:
        yield [source.instead(diagonal, source.code(diagonal.right))]
    elif first is not None:
        yield [source.instead(diagonal.left, str(int(first) - 1))]


@row(*_MASKS)
def other_triangle(node: ast.AST, source: Source) -> Ways:
    """Take the other triangle.

    torch.tril(ones) -> torch.triu(ones, 1)
    ones.triu() -> ones.tril()
    """
    if not calls(node, "triu", "tril"):
        return
    if not isinstance(node.func, ast.Attribute):
        return
    other = "tril" if node.func.attr == "triu" else "triu"
    renamed = source.renamed(node.func, other)
    _, end = source.span(node)
    if argument(node, "diagonal", 0) is None:
        yield [renamed]
        start = "" if is_method(node) else ", "
        yield [renamed, Replacement(end - 1, end - 1, f"{start}1")]


@row("causal", "window", "padding", "cache")
def with_or_without_equal(node: ast.AST, source: Source) -> Ways:
    """See one position more, or one less.

    j < i -> j <= i
    distance > 4 -> distance >= 4
    """
    if not isinstance(node, ast.Compare) or type(node.ops[0]) not in _WITH_EQUAL:
        return
    operator = _operator(node, source)
    if operator is not None:
        start, end = operator
        yield [Replacement(start, end, f" {_WITH_EQUAL[type(node.ops[0])]} ")]


@row("causal", "window")
def other_direction(node: ast.AST, source: Source) -> Ways:
    """See the keys on the other side, or those that two conditions agree on.

    j >= i -> j <= i
    (j <= i) | (i - j < 4) -> (j <= i) & (i - j < 4)
    """
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _WITH_EQUAL:
        operator = _operator(node, source)
        if operator is not None:
            start, end = operator
            sign = source.text(start, end)
            turned = sign.replace("<", "\0").replace(">", "<").replace("\0", ">")
            yield [Replacement(start, end, turned)]
    elif is_operation(node, ast.BitOr):
        _, start = source.span(node.left)
        end, _ = source.span(node.right)
        yield [Replacement(start, end, source.text(start, end).replace("|", "&"))]


@row("padding", "masking", "batch")
def of_each_item(node: ast.AST, source: Source) -> Ways:
    """Take the mask of each item, not that of the first.

    mask[:1, None] -> mask[:, None]
    mask[:1] -> mask
    """
    if not isinstance(node, ast.Subscript):
        return
    first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    if not isinstance(first, ast.Slice) or first.lower is not None or number_of(first.upper) != 1:
        return
    if first is node.slice:
        yield [source.instead(node, source.code(node.value))]
    else:
        yield [source.instead(first, ":")]


@row("masking", "padding", "softmax")
def filled_with_lowest(node: ast.AST, source: Source) -> Ways:
    """Mask the scores out, where zeros and ones are added or multiplied.

    scores + mask[:, None] -> scores.masked_fill(mask[:, None] == 0, float("-inf"))
    scores * mask -> scores.masked_fill(mask == 0, float("-inf"))
    """
    if not is_operation(node, ast.Add, ast.Mult):
        return
    scores, mask = node.left, node.right
    if is_simple(scores) and isinstance(mask, (ast.Name, ast.Subscript, ast.Attribute)):
        yield [source.instead(node, f"{source.code(scores)}.masked_fill({source.code(mask)} == 0, {_LOWEST})")]


@row("causal", "window")
def number_of_positions(node: ast.AST, source: Source) -> Ways:
    """Count one position more, or one less.

    future(s, 0) -> future(s, 1)
    """
    numbers: list[ast.expr] = []
    if isinstance(node, ast.Call) and name_of(node) not in ("triu", "tril", "transpose", "softmax", "permute"):
        numbers = [*node.args]
    for written in numbers:
        number = number_of(written)
        if number is not None and number.is_integer() and abs(number) < 10:
            for other in (number - 1, number + 1):
                yield [source.instead(written, str(int(other)))]


@row("causal", "window")
def plus_one(node: ast.AST, source: Source) -> Ways:
    """Drop a position that was added.

    keys > 1 + at[:, None] -> keys > at[:, None]
    """
    if is_operation(node, ast.Add, ast.Sub):
        if number_of(node.left) == 1 and isinstance(node.op, ast.Add):
            yield [source.instead(node, source.code(node.right))]
        if number_of(node.right) == 1:
            yield [source.instead(node, source.code(node.left))]


@row("causal")
def causal_put_in(node: ast.AST, source: Source) -> Ways:
    """Ask the fused kernel for a causal mask.

    F.scaled_dot_product_attention(q, k, v) -> F.scaled_dot_product_attention(q, k, v, is_causal=True)
    F.scaled_dot_product_attention(q, k, v, is_causal=False) -> F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    if not calls(node, "scaled_dot_product_attention"):
        return
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if "is_causal" in given:
        yield [source.instead(given["is_causal"], "True")]
    elif "attn_mask" not in given and len(node.args) == 3:
        last = last_given(node)
        yield [source.after(last, ", is_causal=True")]


@row("padding", "causal")
def mask_of_another_call(node: ast.AST, source: Source) -> Ways:
    """Give a layer the mask that another layer of the function is given.

    lambda x, m: (a(x, attn_mask=m), b(x)) -> lambda x, m: (a(x, attn_mask=m), b(x, attn_mask=m))
    """
    function = source.function_of(node)
    if function is None or not isinstance(node, ast.Call) or not node.args:
        return
    given = {keyword.arg for keyword in node.keywords}
    for other in ast.walk(function):
        for keyword in other.keywords if isinstance(other, ast.Call) else []:
            if keyword.arg in _MASK_ARGUMENTS and keyword.arg not in given:
                yield [source.after(last_given(node), f", {source.code(keyword)}")]


@row("masking", "causal", "padding", RAISES)
def boolean_mask(node: ast.AST, source: Source) -> Ways:
    """Give the fused kernel a boolean mask.

    layer(q, k, v, attn_mask=keep.float()) -> layer(q, k, v, attn_mask=keep.bool())
    layer(x, attn_mask=mask) -> layer(x, attn_mask=mask.bool())
    torch.triu(torch.ones(n, n), diagonal=1) -> torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    """
    for mask in _masks_of(node):
        if name_of(mask) in ("float", "int", "long") and isinstance(mask, ast.Call):
            assert isinstance(mask.func, ast.Attribute)
            yield [source.renamed(mask.func, "bool")]
        elif is_simple(mask):
            yield [source.after(mask, ".bool()")]
    if not calls(node, "ones", "zeros", "full"):
        return
    if node.args and all(keyword.arg != "dtype" for keyword in node.keywords):
        last = last_given(node)
        yield [source.after(last, ", dtype=torch.bool")]


@row("masking", "padding", "causal")
def sign_of_mask(node: ast.AST, source: Source) -> Ways:
    """Add the mask to the scores.

    scores - mask -> scores + mask
    scores * mask -> scores + mask
    """
    if is_operation(node, ast.Sub, ast.Mult) and number_of(node.right) is None:
        _, start = source.span(node.left)
        end, _ = source.span(node.right)
        between = source.text(start, end)
        if between.strip() in ("-", "*"):
            yield [Replacement(start, end, between.replace(between.strip(), "+"))]

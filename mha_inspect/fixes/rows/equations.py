"""Letters of einsum, and names in the patterns of einops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import combinations

from ..grammar import RAISES, Ways, row
from ..source import Source
from .calls import name_of

_ORDER = ("heads", "batch", "mixing", "softmax", "grouped", "reference", "causal", RAISES)


def _pattern(node: ast.AST, *names: str) -> ast.Constant | None:
    """Return the text that a call of these names is given."""
    if name_of(node) not in names:
        return None
    assert isinstance(node, ast.Call)
    for argument in node.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument
    return None


def _spans(pattern: str) -> list[tuple[int, int]]:
    """Return where each letter or name of a pattern is."""
    names = r"[A-Za-z_]\w*" if " " in pattern.replace(", ", ",").replace(" -> ", "->") else "[A-Za-z]"
    return [found.span() for found in re.finditer(names, pattern)]


def _changes(pattern: str) -> Iterator[str]:
    """Yield the pattern with one name exchanged for another one of it, or with two of a term in the other order."""
    spans = _spans(pattern)
    names = list(dict.fromkeys(pattern[start:end] for start, end in spans))
    for start, end in spans:
        for name in names:
            if pattern[start:end] != name:
                yield pattern[:start] + name + pattern[end:]
    for (start, end), (other, last) in combinations(spans, 2):
        is_of_one_term = not re.search("[,>]", pattern[end:other])
        if is_of_one_term and pattern[start:end] != pattern[other:last]:
            yield pattern[:start] + pattern[other:last] + pattern[end:other] + pattern[start:end] + pattern[last:]


@row(*_ORDER)
def letters_of_einsum(node: ast.AST, source: Source) -> Ways:
    """Exchange a letter, or the order of two.

    torch.einsum("bhqk,ckhd->bqhd", w, v) -> torch.einsum("bhqk,bkhd->bqhd", w, v)
    """
    pattern = _pattern(node, "einsum")
    if pattern is not None:
        yield from _written(pattern, source)


@row(*_ORDER)
def names_of_einops(node: ast.AST, source: Source) -> Ways:
    """Exchange a name, or the order of two.

    rearrange(x, "b n (d h) -> b h n d", h=4) -> rearrange(x, "b n (h d) -> b h n d", h=4)
    """
    pattern = _pattern(node, "rearrange", "repeat", "Rearrange")
    if pattern is not None and "->" in source.code(pattern):
        yield from _written(pattern, source)


def _written(pattern: ast.Constant, source: Source) -> Ways:
    """Yield the replacements of a pattern that is written as it is: without escapes and in one piece."""
    code = source.code(pattern)
    assert isinstance(pattern.value, str)
    if code[1:-1] != pattern.value:
        return
    for changed in _changes(pattern.value):
        yield [source.instead(pattern, f"{code[0]}{changed}{code[0]}")]

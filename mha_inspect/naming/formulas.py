"""Closed formulas of parameter counts, as text that is read and as the number that the text gives. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..targets.spec import AttentionSpec

_TOKEN = re.compile(r"\d+|[A-Z]|[²³()+\-·]")
_POWERS = {"²": 2, "³": 3}


def symbols(spec: AttentionSpec) -> dict[str, int]:
    """The letters of a formula: E embed_dim, H num_heads, G num_kv_heads, D head_dim, K kdim, V vdim."""
    return {
        "E": spec.embed_dim,
        "H": spec.num_heads,
        "G": spec.kv_heads,
        "D": int(spec.head_dim),
        "K": spec.key_width,
        "V": spec.value_width,
    }


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """What a formula like `2E² + E(K + V) + 4E` gives. Factors stand side by side or with `·` between them.

    Raises `ValueError` for what is not such a formula, and for a letter that has no value.
    """
    tokens = _TOKEN.findall(formula)
    if "".join(tokens) != re.sub(r"\s", "", formula):
        raise ValueError(f"{formula!r} has characters that are not part of a formula")
    number, rest = _sum(tokens, values)
    if rest:
        raise ValueError(f"the formula {formula!r} goes on after its end: {' '.join(rest)}")
    return number


def _sum(tokens: list[str], values: Mapping[str, int]) -> tuple[int, list[str]]:
    number, tokens = _product(tokens, values)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        term, tokens = _product(tokens[1:], values)
        number += sign * term
    return number, tokens


def _product(tokens: list[str], values: Mapping[str, int]) -> tuple[int, list[str]]:
    number, tokens = _power(tokens, values)
    while tokens and tokens[0] not in "+-)":
        factor, tokens = _power(tokens[1:] if tokens[0] == "·" else tokens, values)
        number *= factor
    return number, tokens


def _power(tokens: list[str], values: Mapping[str, int]) -> tuple[int, list[str]]:
    if not tokens:
        raise ValueError("the formula ends where a number, a letter or a bracket is due")
    first, *tokens = tokens
    if first == "(":
        number, tokens = _sum(tokens, values)
        if not tokens or tokens[0] != ")":
            raise ValueError("the formula has a bracket that is not closed")
        tokens = tokens[1:]
    elif first.isdecimal():
        number = int(first)
    elif first in values:
        number = values[first]
    else:
        raise ValueError(f"{first!r} has no value in this formula")
    if tokens and tokens[0] in _POWERS:
        return number ** _POWERS[tokens[0]], tokens[1:]
    return number, tokens

"""Closed formulas of parameter counts, as text that is read and as the number that the text gives. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..layers.spec import AttentionSpec

_WRITTEN = {"²": "**2", "³": "**3", "·": "*"}
"""What Python writes otherwise."""


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
    if not re.fullmatch(r"[\dA-Z²³()+\-·\s]*", formula):
        raise ValueError(f"{formula!r} has characters that are not part of a formula")
    text = re.sub(r"(?<=[\dA-Z)²³])(?=[A-Z(])", "*", formula)
    for sign, written in _WRITTEN.items():
        text = text.replace(sign, written)
    try:
        return int(eval(text, {"__builtins__": {}}, dict(values)))  # of letters, digits and signs alone
    except (SyntaxError, NameError) as error:
        raise ValueError(f"{formula!r} is no formula of {', '.join(values)}: {error}") from None

"""Formulas are read as they are written."""

from __future__ import annotations

import pytest

from mha_inspect.layers.spec import AttentionSpec, evaluate, symbols

VALUES = {"E": 7, "H": 3, "K": 5}


@pytest.mark.parametrize(
    ("formula", "number"),
    [
        ("4E² + 4E", 4 * 49 + 28),
        ("EK", 35),
        ("E·K·2", 70),
        ("2E(K + H)² - 3", 14 * 64 - 3),
        ("E³", 343),
        ("12 - 3 - 4", 5),
        ("H(4E²/H)".replace("/H", ""), 3 * 4 * 49),
    ],
)
def test_evaluate(formula: str, number: int) -> None:
    assert evaluate(formula, VALUES) == number


@pytest.mark.parametrize("formula", ["", "4E² +", "(E", "E)", "Q", "E/2", "E ** 2", "e"])
def test_what_is_no_formula(formula: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        evaluate(formula, VALUES)


def test_letters_of_a_spec() -> None:
    spec = AttentionSpec(embed_dim=12, num_heads=6, num_kv_heads=2, kdim=5, vdim=7)
    assert symbols(spec) == {"E": 12, "H": 6, "G": 2, "D": 2, "K": 5, "V": 7}

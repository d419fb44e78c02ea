"""KEY=VALUE settings of one side: typed, validated, and answered with the way out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mha_inspect.cli.options import Options
from mha_inspect.cli.sides import SETTINGS, AskedSide
from mha_inspect.errors import SpecError
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec


def asked(*texts: str) -> Options:
    return AskedSide("left", "torch", [*texts], None).options(Options())


def test_every_field_of_the_specs_can_be_set():
    assert set(SETTINGS) == {field.name for cls in (AttentionSpec, InputSpec, RunSpec) for field in fields(cls)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("need-weights=false", {"need_weights": False}),
        ("padding=none", {"padding": ""}),
        ("kdim=none", {"kdim": None}),
        ("attn_mask=a=b.pt", {"attn_mask": Path("a=b.pt")}),
    ],
)
def test_a_setting_is_typed(text, expected):
    options = asked(text)
    values = {name: getattr(options, name) for name in expected}
    assert values == expected
    assert [type(value) for value in values.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["dtype"], "--left-set dtype is not NAME=VALUE"),
        (["embed_dim=" + "9" * 5000], "a whole number"),
        (["\x1b[2J=1"], "\\x1b"),
    ],
)
def test_a_setting_that_cannot_be_read(texts, said):
    with pytest.raises(SpecError) as caught:
        asked(*texts)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()

"""KEY=VALUE settings of one side: typed, validated, and answered with the way out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mha_inspect.cli.options import Options
from mha_inspect.cli.sides import SETTINGS, AskedSide, PlannedLayer, planned_layer
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
        (["dtype"], "--left-set dtype has no value"),
        (["embed_dim=" + "9" * 5000], "a whole number"),
        (["bias=true", "bias=false"], "gives bias twice"),
        (["\x1b[2J=1"], "\\x1b"),
    ],
)
def test_a_setting_that_cannot_be_read(texts, said):
    with pytest.raises(SpecError) as caught:
        asked(*texts)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def planned(left: str, right: str, *texts: str, **options: object) -> list[PlannedLayer]:
    on_left, on_right = AskedSide("left", left, [*texts], None), AskedSide("right", right, [], None)
    asked_of_both = Options(**options)
    return [planned_layer(asked_of_both, on_left, on_right.kind), planned_layer(asked_of_both, on_right, on_left.kind)]


def test_a_flag_that_one_layer_has_no_use_for_stays_with_the_other():
    sizes = {"embed_dim": 12, "num_heads": "4", "num_kv_heads": 2}
    left, right = planned("torch", "grouped-query", **sizes, need_weights=False)
    assert (left.spec.num_kv_heads, right.spec.num_kv_heads) == (None, 2)
    assert left.ignored == ("torch has no setting num_kv_heads: num_kv_heads 2 applies to the other side only.",)
    assert left.run.need_weights is right.run.need_weights is False


def test_a_setting_of_one_side_is_not_left_unheard():
    with pytest.raises(SpecError, match="layer torch does not take num_kv_heads 2"):
        planned("torch", "grouped-query", "num_kv_heads=2")

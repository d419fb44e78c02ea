"""KEY=VALUE settings of one side: typed, validated, and answered with the way out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from mha_inspect.cli.options import Options
from mha_inspect.cli.sides import SETTINGS, AskedSide
from mha_inspect.errors import SpecError
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

from ..built import planned_sides as make_sides


def asked(*texts: str) -> Options:
    return AskedSide("left", "torch", [*texts], None).options(Options())


def test_every_field_of_the_specs_can_be_set():
    assert set(SETTINGS) == {field.name for cls in (AttentionSpec, InputSpec, RunSpec) for field in fields(cls)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embed_dim=21", {"embed_dim": 21}),
        ("need-weights=false", {"need_weights": False}),
        ("NEED_WEIGHTS = No", {"need_weights": False}),
        ("train=true", {"train": True}),
        ("dropout=0.25", {"dropout": 0.25}),
        ("dtype=bfloat16", {"dtype": "bfloat16"}),
        ("padding=3,0", {"padding": "3,0"}),
        ("padding=none", {"padding": ""}),
        ("kdim=none", {"kdim": None}),
        ("attn_mask=a=b.pt", {"attn_mask": Path("a=b.pt")}),
        ("device=cuda:1", {"device": "cuda:1"}),
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
        (["dtyp=float16"], "Did you mean dtype?"),
        (["=3"], "is not a setting of a side"),
        (["embed_dim=wide"], "embed_dim=wide cannot be read: embed_dim must be a whole number"),
        (["embed_dim=" + "9" * 5000], "a whole number"),
        (["causal=maybe"], "true or false"),
        (["dropout=x"], "a number"),
        (["dtype=fp16"], "float32, float64, bfloat16, float16"),
        (["padding=1,x"], "a whole number"),
        (["bias=none"], "true or false"),
        (["bias=true", "bias=false"], "gives bias twice"),
        (["\x1b[2J=1"], "\\x1b"),
    ],
)
def test_a_setting_that_cannot_be_read(texts, said):
    with pytest.raises(SpecError) as caught:
        asked(*texts)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_unknown_one_is_answered_with_the_list():
    with pytest.raises(SpecError) as caught:
        asked("colour=red")
    assert all(name in str(caught.value) for name in SETTINGS)


def test_a_flag_that_one_layer_has_no_use_for_stays_with_the_other():
    spec = AttentionSpec(embed_dim=12, num_heads=4, num_kv_heads=2)
    left, right = make_sides("torch", "grouped-query", spec, InputSpec(), RunSpec(need_weights=False), {}, {})
    assert (left.spec.num_kv_heads, right.spec.num_kv_heads) == (None, 2)
    assert left.unheard == ("torch has no use for num_kv_heads 2, and is left as it is.",)
    assert left.run.need_weights is right.run.need_weights is False


def test_a_setting_of_one_side_is_not_left_unheard():
    with pytest.raises(SpecError, match="layer torch has no use for num_kv_heads 2"):
        make_sides("torch", "grouped-query", AttentionSpec(), *_plain(), {"num_kv_heads": 2}, {})


def test_wide_takes_the_whole_width_unless_it_is_told():
    spec = AttentionSpec(embed_dim=12, num_heads=4)
    left, right = make_sides("wide", "wide", spec, InputSpec(), RunSpec(), {}, {})
    assert (left.spec.head_dim, right.spec.head_dim) == (12, 12)
    sides = make_sides("torch", "wide", AttentionSpec(embed_dim=12, num_heads=4, head_dim=3), *_plain(), {}, {})
    assert [side.spec.head_dim for side in sides] == [3, 3]


def _plain() -> tuple[InputSpec, RunSpec]:
    return InputSpec(), RunSpec()

"""Text that was typed for an argument, and what becomes of it."""

from __future__ import annotations

from inspect import Parameter
from typing import Any, Literal

import pytest
import torch

from mha_inspect.errors import SpecError
from mha_inspect.making.settings import convert, parse_settings
from mha_inspect.making.vocabulary import flag_of

EMPTY = Parameter.empty


@pytest.mark.parametrize(
    ("text", "annotation", "default", "value"),
    [
        *[("7", int, EMPTY, 7), ("1_000", int, EMPTY, 1000), ("7", float, EMPTY, 7.0), ("1e-3", float, EMPTY, 0.001)],
        *[("yes", bool, EMPTY, True), ("0", bool, EMPTY, False), ("true", EMPTY, False, True), ("7", EMPTY, 3, 7)],
        *[("7", str, EMPTY, "7"), ("none", int | None, EMPTY, None), ("7", int | None, EMPTY, 7)],
        *[("seven", str | int, EMPTY, "seven"), ("pre", Literal["pre", "post"], EMPTY, "pre")],
        *[("2,3", tuple[int, ...], EMPTY, (2, 3)), ("[2, 3]", list[float], EMPTY, [2, 3]), ("2,5", EMPTY, [7], [2, 5])],
        *[("torch.float64", torch.dtype, EMPTY, torch.float64), ("bfloat16", EMPTY, EMPTY, torch.bfloat16)],
        *[
            ("0.5", EMPTY, EMPTY, 0.5),
            ("gelu", EMPTY, EMPTY, "gelu"),
            ("None", Any, EMPTY, None),
            ("7", EMPTY, None, 7),
        ],
        *[
            ("torch.nn.GELU", type, EMPTY, torch.nn.GELU),
            ("HERE", dict, EMPTY, {"a": 1}),
            ("{'a': 2}", dict, EMPTY, {"a": 2}),
        ],
    ],
)
def test_text_becomes_what_annotation_or_default_asks_for(text, annotation, default, value):
    made = convert("dtype" if isinstance(value, torch.dtype) else "size", text, annotation, default, {"HERE": {"a": 1}})
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [("x", int, "a whole number"), ("1.5", int, "--set size=8"), ("maybe", bool, "true or false"), ("9" * 99, int, "")],
)
def test_text_that_does_not_fit_is_refused_with_an_example(text, kind, said):
    for annotation, default in ((kind, EMPTY), (EMPTY, kind())):
        with pytest.raises(SpecError, match=f"--set size=.*{said}"):
            convert("size", text, annotation, default, {})


def test_nothing_is_evaluated():
    assert convert("size", "__import__('os').getcwd()", EMPTY, EMPTY, {}) == "__import__('os').getcwd()"
    assert convert("size", "torch", EMPTY, EMPTY, {}) == "torch"


def test_settings_are_names_and_values():
    assert parse_settings(["a=1", "b = x=y ", "a=2"]) == {"a": "2", "b": "x=y"}
    for wrong in ("a", "=1", "\x1b[2J"):
        with pytest.raises(SpecError, match="NAME=VALUE") as refused:
            parse_settings([wrong])
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("embed_dim", "d_model hiddenSize hidden_size n_embd dim emb_dim num_hiddens"),
        ("num_heads", "n_heads nHead nhead num_attention_heads heads n_head h"),
        ("num_kv_heads", "num_key_value_heads n_kv_heads"),
        ("seq_len", "block_size context_length n_positions max_position_embeddings"),
        (None, "depth"),
    ],
)
def test_names_that_well_known_models_and_tutorials_use(flag, names):
    assert {name: flag_of(name) for name in names.split()} == dict.fromkeys(names.split(), flag)

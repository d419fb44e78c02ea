"""Smaller configurations of Hugging Face models."""

from __future__ import annotations

from mha_inspect.build.hf_small import small_values


def test_keys_have_as_many_heads_as_the_queries_that_are_changed() -> None:
    sizes = {"hidden_size": 4608, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None}
    made = [values for values, said in small_values({**sizes, "num_hidden_layers": 2}) if "num_key_value_heads" in said]
    assert made
    assert all(values["num_key_value_heads"] == values["num_attention_heads"] != 32 for values in made)

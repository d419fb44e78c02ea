"""`mha-inspect layers`: every layer with what the catalog knows of it, and without torch."""

from __future__ import annotations

import json

import jsonschema

from mha_inspect.cli.options import SET_BY_TEXT
from mha_inspect.layers.catalog import LAYERS, LETTERS, evaluate
from mha_inspect.layers.spec import AttentionSpec

from ..schemas import load_schema


def test_every_layer_is_listed_with_its_formula_its_split_and_its_source(invoke):
    code, out, err = invoke("layers", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    jsonschema.Draft202012Validator(load_schema("layers")).validate(data)
    assert [layer["name"] for layer in data["layers"]] == list(LAYERS)
    for layer in data["layers"]:
        kind = LAYERS[layer["name"]]
        assert (layer["summary"], layer["formula"]) == (kind.summary, kind.parameter_formula)
        assert (layer["split"], layer["source"]) == (kind.split, kind.origin)
        of_set = {argument["name"] for argument in layer["arguments"]}
        every_layer = {"bias", "grad"} | ({"average_weights"} if "need_weights" in kind.takes else set())
        assert of_set == kind.takes & {*SET_BY_TEXT} | every_layer


def test_every_letter_of_a_formula_is_explained(invoke):
    letters = json.loads(invoke("layers", "--json").out)["letters"]
    used = {letter for kind in LAYERS.values() for letter in kind.parameter_formula if letter.isalpha()}
    assert set(letters) == used
    spec = AttentionSpec(embed_dim=22, num_heads=2, kdim=3, vdim=5)
    values = {"num_kv_heads": 2, "embed_dim": 22, "num_heads": 2, "head_dim": 11, "kdim": 3, "vdim": 5}
    assert [evaluate(letter, spec) for letter in LETTERS] == [values[name] for name in LETTERS.values()]
    assert evaluate("2E² + E(K + V) + 4E", spec) == 2 * 22**2 + 22 * 8 + 88


def test_a_layer_lists_its_arguments_and_takes_them(invoke):
    out = invoke("layers", "grouped-query").out
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert "true or false  false" in rows["rope"]
    assert "whole number   embed_dim / num_heads" in rows["head_dim"]
    assert "kdim" not in rows
    sizes = ("--embed-dim", "24", "--num-heads", "6", "--json")
    data = json.loads(invoke("params", "--layer", "grouped-query", *sizes, "--set", "head_dim=10").out)
    shapes = {parameter["name"]: parameter["shape"] for parameter in data["parameters"]}
    assert [60, 24] in shapes.values()
    err = invoke("layers", "torhc").err
    assert "Did you mean torch?" in err

"""The JSON output is what its schema says, the schemas are current, and strict enough to notice when it is not."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from mha_inspect.render.formats import to_text
from mha_inspect.reports.common import Stats, Values, to_data
from tests.schemas import FILE, commands, load_schema

from .samples import REPORTS, report, trace
from .schemas import schema_of_reports, written


def data_of(report: object) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(to_text(report, "json"), parse_constant=refuse)


@cache
def validator(command: str) -> jsonschema.Draft202012Validator:
    schema = load_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_is_that_of_the_reports(request):
    text = written(schema_of_reports()) + "\n"
    if request.config.getoption("--update-schemas", default=False):
        FILE.write_text(text, encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == text, "stale: pytest tests/render --update-schemas"


def test_every_command_has_a_schema():
    assert commands() == tuple(sorted({report(name).command for name in REPORTS}))
    with pytest.raises(KeyError):
        load_schema("../trace")


@pytest.mark.parametrize("name", REPORTS)
def test_json_follows_its_schema(name):
    data = data_of(report(name))
    validator(data["command"]).validate(data)
    assert data["schema_version"] == 3


FULL = ("trace-full", "compare-heads-learning", "diff-checkpoints", "layers")


def at(data: Any, path: str) -> Any:
    for step in filter(None, path.split(".")):
        data = data[int(step) if step.isdigit() else step]
    return data


def objects(data: Any, path: str = "") -> Iterator[str]:
    """Paths of every object whose keys are ours, the first of each list only."""
    if isinstance(data, dict):
        if not path.endswith(("spec", "shapes", "first_head", "settings", "letters")):
            yield path
            for key, value in data.items():
                yield from objects(value, f"{path}.{key}".strip("."))
    elif isinstance(data, list) and data:
        yield from objects(data[0], f"{path}.0")


OPTIONAL = {"ops", "stats", "values", "heads", "side_by_side"}
OPTIONAL |= {"training", "focus", "timing"}


@pytest.mark.parametrize("name", FULL)
def test_a_missing_a_misnamed_and_an_unknown_key_are_noticed(name):
    data = data_of(report(name))
    check = validator(data["command"])
    paths = list(objects(data))
    assert len(paths) > (1 if name == "layers" else 3)
    for path in paths:
        for key in at(data, path):
            changed = copy.deepcopy(data)
            content = at(changed, path).pop(key)
            assert check.is_valid(changed) == (key in OPTIONAL), f"{path}.{key} missing"
            at(changed, path)[f"{key}_"] = content
            assert not check.is_valid(changed), f"{path}.{key} misnamed"


@pytest.mark.parametrize(
    ("name", "path", "wrong"),
    [
        ("trace", "attentions.0.stages.0.name", "queries"),
        ("trace", "attentions.0.stages.0.nbytes", -1),
        ("trace", "attentions.0.stages.0.memory", "shared"),
        ("trace", "proof.noise_floor", "nan"),
        ("trace", "schema_version", 1),
        ("params", "parameters.0.share", 1.5),
        ("compare-heads", "outcome", "equal"),
        ("diff", "first_differing_stage", "nowhere"),
        ("diff-checkpoints", "tensors.0.verdict", "same"),
    ],
)
def test_a_wrong_value_is_noticed(name, path, wrong):
    data = data_of(report(name))
    *parents, last = path.split(".")
    at(data, ".".join(parents))[last] = wrong
    assert not validator(data["command"]).is_valid(data)


def test_what_was_not_asked_for_is_left_out_and_what_is_not_known_is_null():
    data = data_of(trace())
    assert "ops" not in data
    assert not {"stats", "values"} & set(data["attentions"][0]["stages"][0])
    assert data["path"]["reason"] is None
    assert data["attentions"][0]["stages"][0]["op"] is None


def test_numbers_that_json_has_not_are_strings():
    stats = Stats(math.nan, math.inf, -math.inf, 0.1 + 0.2, 1, 2, 3)
    values = Values("", [[math.nan, 1.5], [-math.inf, math.inf], [True, 7]])
    (attention,) = trace().attentions
    stage = replace(attention.stages[9], stats=stats, values=values)
    data = data_of(replace(trace(), attentions=(replace(attention, stages=(stage,)),)))
    validator("trace").validate(data)
    found = data["attentions"][0]["stages"][0]
    assert [found["stats"][key] for key in ("mean", "std", "min", "max")] == ["NaN", "Infinity", "-Infinity", 0.1 + 0.2]
    assert found["values"]["data"] == [["NaN", 1.5], ["-Infinity", "Infinity"], [True, 7]]


def test_what_is_no_plain_data_is_refused():
    with pytest.raises(TypeError, match="object has no place in a report"):
        to_data({"x": object()})

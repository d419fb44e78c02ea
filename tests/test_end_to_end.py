"""The commands' real answers: JSON held to its schema, and the cases that the program began with read off the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from .schemas import load_schema

LINES = {
    "trace everything": "trace --embed-dim 22 --num-heads 2 --batch 3 --seq-len 5 --causal --ops --stats --values",
    "trace cross": "trace --embed-dim 22 --num-heads 2 --seq-len 5 --key-len 7 --set kdim=11 --set vdim=13"
    " --set average_weights=false",
    "trace training": "trace --embed-dim 22 --num-heads 2 --train --set dropout=0.5 --set grad=true"
    " --set add_bias_kv=true --set add_zero_attn=true",
    "params": "params --embed-dim 22 --num-heads 2 --stats --values --per-head",
    "compare-heads": "compare-heads --embed-dim 22 --heads 1,2,11",
}


@pytest.mark.parametrize("name", LINES)
def test_json_follows_its_schema_and_comes_out_the_same_again(invoke: Callable[..., Any], name: str) -> None:
    first = invoke(*LINES[name].split(), "--json")
    assert (first.code, first.err) == (0, "")
    data = json.loads(first.out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    jsonschema.Draft202012Validator(load_schema(LINES[name].split()[0])).validate(data)
    assert data["schema_version"] == 3
    torch.manual_seed(5)  # nothing hangs on what ran before
    torch.randn(7)
    assert invoke(*LINES[name].split(), "--json").out == first.out


def test_json_is_the_same_in_another_process(invoke: Callable[..., Any], program: Callable[..., Any]) -> None:
    line = [*LINES["trace everything"].split(), "--json"]
    assert program(*line).out == invoke(*line).out


def rows(page: str) -> dict[str, tuple[list[int], str]]:
    """The first table of stages on a plain page: name to shape and axes."""
    found: dict[str, tuple[list[int], str]] = {}
    for line in page.splitlines():
        if row := re.match(r"(\w+)\*? +\[([\d, ]+)\] +(.+?)(?:  |$)", line):
            found[row[1]] = ([int(size) for size in row[2].split(",")], row[3])
    return found


def page(invoke: Callable[..., Any], line: str) -> str:
    code, out, err = invoke(*line.split())
    assert (code, err) == (0, "")
    return out


def test_the_case_it_began_with(invoke: Callable[..., Any]) -> None:
    text = page(invoke, "trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12")
    seen = rows(text)
    assert seen["q_proj"] == ([1, 12, 512], "batch query (heads head_dim)")
    assert seen["k_proj"] == seen["v_proj"] == ([1, 12, 512], "batch key (heads head_dim)")
    assert seen["q_heads"] == ([1, 2, 12, 256], "batch heads query head_dim")
    assert seen["scores"] == seen["weights"] == ([1, 2, 12, 12], "batch heads query key")
    assert seen["context"] == ([1, 2, 12, 256], "batch heads query head_dim")
    assert seen["concat"] == ([12, 512], "(batch query) (heads head_dim)")
    assert seen["output"] == ([1, 12, 512], "batch query embed")
    assert "\nreturns  output [1, 12, 512]; weights [1, 12, 12], the mean of 2 heads\n" in text
    assert "q_heads · k_headsᵀ / √256" in text
    assert text.splitlines()[-1].startswith("Opened stages agree with the kernel: difference ")
    text = page(invoke, "trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12 --set average_weights=false")
    assert "; weights [1, 2, 12, 12]\n" in text  # the stage weights has the same axes

"""Each spelling of one softmax and one product is that attention, and is read as that."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

import mha_inspect

from .spellings import HEAD_DIM, HEADS, SPELLINGS, Spelling, given, plain

NOT_YET = {"heads_added_after_their_output"}
"""Spellings that the program does not read right. One that it learns to read is taken off: the test says which."""


@pytest.mark.parametrize("name", SPELLINGS)
@torch.no_grad()
def test_a_spelling_computes_what_it_means(name: str) -> None:
    output = SPELLINGS[name].made()(given())
    torch.testing.assert_close(output.double(), plain(SPELLINGS[name]).output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_read_as_what_it_means(name: str) -> None:
    wrong = unlike(SPELLINGS[name])
    assert bool(wrong) == (name in NOT_YET), wrong or "It is read right: take it off NOT_YET."


def test_spellings_not_read_yet_exist() -> None:
    assert set(SPELLINGS) >= NOT_YET


@torch.no_grad()  # flex attention has no gradients on a CPU
def unlike(spelling: Spelling) -> list[str]:
    """Return each fact that a trace has wrong, with what it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trace = mha_inspect.trace(spelling.made(), given(), keep=True)
        except Exception as error:
            return [f"it raised {type(error).__name__}: {error}"]
    if len(trace.attentions) != 1:
        return [f"attentions: {len(trace.attentions)}"]
    (attention,), meaning = trace.attentions, spelling.meaning
    facts = {
        "heads": (attention.num_heads, HEADS),
        "kv heads": (attention.num_kv_heads, HEADS),
        "head_dim": (attention.head_dim, HEAD_DIM),
        "causal": ("causal" in attention.kind, meaning.causal),
        "bias": (attention.bias, bool(meaning.bias)),
        "findings": ({finding.check for finding in trace.findings if finding.sure}, faults_of(spelling)),
    }
    wrong = [f"{name}: {read}" for name, (read, truth) in facts.items() if read != truth]
    if not is_scale(attention.scale, meaning.scale):
        wrong.append(f"scale: {attention.scale}")
    return wrong + stages_unlike(attention, spelling)


def faults_of(spelling: Spelling) -> set[str]:
    return {"softmax"} if spelling.meaning.over == "query" else set()


def is_scale(read: float, truth: float | tuple[float, ...]) -> bool:
    """Return whether a scale is the true one; NaN stands for a scale of each head."""
    return math.isnan(read) if isinstance(truth, tuple) else math.isclose(read, truth, rel_tol=1e-4)


def stages_unlike(attention: Any, spelling: Spelling) -> list[str]:
    """Return the stages with other axes or numbers than the reference. A loop may show its first head alone.

    Keys may stand in an order of their own, and weights that are never formed are no stage.
    """
    reference, wrong = plain(spelling), []
    for stage in attention.stages:
        if stage.name == "weights":
            names, truth = "batch heads query key", reference.weights.sort(-1).values
        elif stage.name == "context":
            names, truth = "batch heads query head_dim", reference.context
        elif stage.name == "masked_scores" and not spelling.meaning.sinks:
            names, truth = "batch heads query key", reference.weights
        else:
            continue
        value = in_axes(stage, names, truth)
        if value is None:
            wrong.append(f"axes of {stage.name}: {stage.axes}")
            continue
        if stage.name == "weights":
            value = value.sort(-1).values
        elif stage.name == "masked_scores":
            value = value.softmax(-1 if spelling.meaning.over == "key" else -2)
        if not is_part(value, truth):
            wrong.append(f"{stage.name}: {tuple(value.shape)} with other numbers")
    return wrong


def in_axes(stage: Any, names: str, truth: Tensor) -> Tensor | None:
    """Return a stage in these axes, absent ones of size 1; None if it has others."""
    axes = re.findall(r"\w+", stage.axes)
    if not set(names.split()[2:]) <= set(axes) <= {*names.split(), "1"}:
        return None
    sizes = dict(zip(names.split(), truth.shape, strict=True))
    folded = {name: size for name, size in sizes.items() if name in axes and "(" in stage.axes}
    return rearrange(
        stage.tensor, f"{stage.axes} -> {' '.join(name if name in axes else '1' for name in sizes)}", **folded
    )


def is_part(value: Tensor, truth: Tensor) -> bool:
    """Return whether these are the first numbers of the truth along each axis."""
    expected = truth[tuple(slice(size) for size in value.shape)]
    return value.shape == expected.shape and torch.allclose(value.double(), expected, rtol=1e-4, atol=1e-5)

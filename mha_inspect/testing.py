"""Assertions for people's own tests, which fail with the table that shows where."""

from __future__ import annotations

from typing import Any

from torch import nn

from .library import LiveAttention, trace
from .stages import STAGES


def assert_stage_shapes(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Assert the shapes of stages: `assert_stage_shapes(layer, x, scores="b h q k", context="b h q d")`.

    A pattern has a word a dimension. A number is a size; a name is the same size wherever it stands, in this stage and
    in the others. `_` is any size. The stages must be so in every attention of the module, each for itself.

    Args:
        module: any module with attention in it.
        *args: arguments of its forward.
        **kwargs: patterns by stage name, as texts; anything else is an argument of its forward.

    Raises:
        AssertionError: with the stages that there are.
        ValueError: for a stage that no attention has by definition, or a call without a pattern.
    """
    patterns = {name: value for name, value in kwargs.items() if name in STAGES and isinstance(value, str)}
    if not patterns:
        raise ValueError(f"no stage was named: give a pattern for one of {', '.join(STAGES)}.")
    found = trace(module, *args, **{name: value for name, value in kwargs.items() if name not in patterns})
    if not found.attentions:
        raise AssertionError(f"{type(module).__name__} has no attention with a softmax in it")
    for attention in found.attentions:
        fault = _fault(attention, patterns)
        if fault:
            raise AssertionError(f"{fault}\n{attention!r}")


def _fault(attention: LiveAttention, patterns: dict[str, str]) -> str:
    """What does not hold, in one line; empty where everything does."""
    shapes = {stage.name: stage.shape for stage in attention.stages}
    sizes: dict[str, tuple[int, str]] = {}
    for stage, pattern in patterns.items():
        words = pattern.split()
        if stage not in shapes:
            return f"there is no stage {stage}: {', '.join(shapes)}"
        shape = list(shapes[stage])
        if len(words) != len(shape):
            return f"{stage} is {shape}, {len(shape)} dimensions, and {pattern!r} names {len(words)}"
        for word, size in zip(words, shape, strict=True):
            known = int(word) if word.isdigit() else sizes.setdefault(word, (size, stage))[0]
            if word != "_" and size != known:
                where = "" if word.isdigit() else f", which is {known} in {sizes[word][1]}"
                return f"{stage} is {shape}, and {pattern!r} says {word}{where} where it has {size}"
    return ""

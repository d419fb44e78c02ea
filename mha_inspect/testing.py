"""Provide assertions for the user's own tests, whose failures show a table of stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .api import require_module, trace
from .checks.check import check
from .checks.intent import Intent
from .compare.diff import Side, diff
from .naming.pattern import STAGES
from .notebook import LiveAttention
from .reports.trace import Trace
from .running.subject import Subject
from .text import did_you_mean, plural


def assert_stage_shapes(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Assert the shapes of stages: `assert_stage_shapes(layer, x, scores="b h q k", context="b h q d")`.

    A pattern has one word per dimension: a number is a size, `_` is any size, and a name must have the same size in
    every stage that uses it. Each attention of the module must match the patterns separately.

    Args:
        module: any module with attention.
        *args: arguments of its forward.
        **kwargs: stage names with patterns as strings; all others are arguments of its forward.

    Raises:
        AssertionError: a stage does not match; the first line is the mismatch, and the stages follow.
        ValueError: no pattern for a stage name was given.
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead
    patterns: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in STAGES and isinstance(value, str):
            patterns[name] = value
        else:
            arguments[name] = value
    if not patterns:
        stages = ", ".join(STAGES)
        raise ValueError(f"no stage was given. Give a pattern for one of {stages}.{_nearest_stage(kwargs)}")
    report = trace(module, *args, **arguments)
    if not report.attentions:
        raise AssertionError(f"{type(module).__name__} has no softmax attention")
    for attention in report.attentions:
        fault = _fault(attention, patterns)
        if fault:
            raise AssertionError(f"{fault}\n{attention}")


def _nearest_stage(names: Iterable[str]) -> str:
    """Return a sentence on the stage that the first misspelled name may mean; empty if none is near."""
    for name in names:
        hint = did_you_mean(name, STAGES)
        if hint:
            return hint
    return ""


def _fault(attention: LiveAttention, patterns: dict[str, str]) -> str:
    """Return the first mismatch in one line; empty if all patterns match."""
    shapes = {stage.name: stage.shape for stage in attention.stages}
    sizes: dict[str, _Size] = {}
    for stage, pattern in patterns.items():
        if stage not in shapes:
            return f"the attention has no {stage}. Its stages: {', '.join(shapes)}"
        words = pattern.split()
        shape = list(shapes[stage])
        if len(words) != len(shape):
            return f"{stage}: expected {len(words)} dimensions ({pattern}), got {len(shape)}: {shape}"
        for word, size in zip(words, shape, strict=True):
            expected = _expected(word, sizes.setdefault(word, _Size(size, stage)))
            if expected is not None and expected.size != size:
                return f"{stage}: expected {expected.in_words} ({pattern}), got {size}: {shape}"
    return ""


@dataclass(frozen=True)
class _Size:
    """The size that a name in a pattern had first."""

    size: int
    stage: str


@dataclass(frozen=True)
class _Expected:
    """The size that a word of a pattern asks for."""

    size: int
    in_words: str
    """`4`, or `b = 4 as in scores`."""


def _expected(word: str, first: _Size) -> _Expected | None:
    """Return the size that a word asks for: its number, or the size that it had first; None for `_`, any size."""
    if word == "_":
        return None
    if word.isdigit():
        return _Expected(int(word), word)
    return _Expected(first.size, f"{word} = {first.size} as in {first.stage}")


def assert_same_attention(left: nn.Module, right: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Assert that two modules compute the same attention from the same arguments, stage by stage.

    The stages of both modules are compared as in `mha_inspect.diff`: in canonical axes, for any layout, with the
    rounding error measured against float64 in the same run. The modules must have the same weights; no weights are
    copied.

    Args:
        left: any module with attention.
        right: a module with the same number of attentions.
        *args: arguments of both forwards.
        **kwargs: arguments of both forwards.

    Raises:
        AssertionError: the first line is the first stage that differs, and the report of `mha_inspect.diff` follows.
    """
    __tracebackhide__ = True
    require_module(left, "testing.assert_same_attention")
    require_module(right, "testing.assert_same_attention")
    left_side = Side("left", Subject(left, args, kwargs))
    right_side = Side("right", Subject(right, args, kwargs))
    left_count = len(left_side.attentions)
    right_count = len(right_side.attentions)
    if left_count == 0 or left_count != right_count:
        raise AssertionError(
            f"{plural(left_count, 'attention')} on the left, {plural(right_count, 'attention')} on the right"
        )
    report = diff(left_side, right_side, same_weights=False)
    for row in report.stages:
        if row.verdict == "differs":
            number = row.attention or 1
            attention = f"attention {number} {left_side.attentions[number - 1][0].module}".rstrip()
            raise AssertionError(f"{attention} differs, starting at {row.name}\n{report}")


def assert_attention_is_right(
    module: nn.Module, *args: Any, intent: Intent | None = None, strict: bool = False, **kwargs: Any
) -> None:
    """Assert that `mha_inspect.check` finds nothing wrong with the attention of a module.

    Args:
        module: any module with attention.
        *args: arguments of its forward.
        intent: its intended behavior.
        strict: whether a suspicion fails too, and a check that was not run, e.g. as no mask was given.
        **kwargs: arguments of its forward.

    Raises:
        AssertionError: the first line is the verdict; evidence, line, and fix of each finding follow.
        InputError: the module has no attention, or the intent names an argument that its forward does not have.
    """
    __tracebackhide__ = True
    require_module(module, "testing.assert_attention_is_right")
    report = check(Subject(module, args, kwargs), intent)
    if not report.ok or (strict and report.findings):
        raise AssertionError(str(report))
    if strict and report.left_out:
        skipped = "\n".join(f"{check.check}: {check.reason}" for check in report.left_out)
        raise AssertionError(f"{plural(len(report.left_out), 'check')} not run\n{skipped}")


def assert_stages_match(trace: Trace, snapshot: object) -> None:
    """Assert that stages, axes and shapes are those of a snapshot: `assert_stages_match(trace, snapshot)`.

    Args:
        trace: a trace of `mha_inspect.trace`, or of the fixture `attention`.
        snapshot: what compares with text, e.g. the fixture of syrupy, or the text itself:
            one line for each stage, `1 scores [2, 4, 9, 9] batch heads query key`, with the attention's number first.

    Raises:
        AssertionError: the stages are others.
    """
    __tracebackhide__ = True
    lines = []
    for number, attention in enumerate(trace.attentions, 1):
        for stage in attention.stages:
            lines.append(f"{number} {stage.name} {list(stage.shape)} {stage.axes}")
    stages = "\n".join(lines)
    assert stages == snapshot

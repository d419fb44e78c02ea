"""Assertions for people's own tests, which fail with the table that shows where."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import nn

from .answers.check.check import check
from .answers.check.intent import Intent
from .answers.diff import Side, diff
from .api import require_module, trace
from .naming.pattern import STAGES
from .notebook import LiveAttention
from .reports.diff import StageRow
from .running.subject import Subject
from .text import did_you_mean


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
        near = next(filter(None, (did_you_mean(name, STAGES) for name in kwargs)), "")
        raise ValueError(f"no stage was named: give a pattern for one of {', '.join(STAGES)}.{near}")
    report = trace(module, *args, **{name: value for name, value in kwargs.items() if name not in patterns})
    if not report.attentions:
        raise AssertionError(f"{type(module).__name__} has no attention with a softmax in it")
    for attention in report.attentions:
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


def assert_same_attention(left: nn.Module, right: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Assert that two modules compute the same attention from the same arguments, stage by stage.

    Stages that both have are compared as `mha_inspect.diff` compares them: in canonical axes, whatever the layout of
    each, and beside the rounding error that is measured against float64 in the same run. The modules must have the same
    weights: nothing is carried from one into the other.

    Args:
        left: any module with attention in it.
        right: another, with as many attentions.
        *args: arguments of both forwards.
        **kwargs: likewise.

    Raises:
        AssertionError: with a line a stage, the first that differs marked.
    """
    require_module(left, "testing.assert_same_attention")
    require_module(right, "testing.assert_same_attention")
    ours, theirs = Side("left", Subject(left, args, kwargs)), Side("right", Subject(right, args, kwargs))
    if len(ours.attentions) != len(theirs.attentions) or not ours.attentions:
        raise AssertionError(f"{len(ours.attentions)} attentions on the left and {len(theirs.attentions)} on the right")
    for number, rows in groupby(diff(ours, theirs, carry=False).stages, lambda row: row.attention or 1):
        compared = [row for row in rows if row.verdict is not None]
        if any(row.verdict == "differs" for row in compared):
            module = ours.attentions[number - 1][0].module
            raise AssertionError(_table(compared, f"attention {number} {module}".rstrip()))


def assert_attention_is_right(module: nn.Module, *args: Any, intent: Intent | None = None, **kwargs: Any) -> None:
    """Assert that `mha_inspect.check` finds nothing wrong with the attention of a module.

    Args:
        module: any module with attention in it.
        *args: of its forward.
        intent: what it is meant to do.
        **kwargs: of its forward.

    Raises:
        AssertionError: with each finding, its evidence, its line, and the fix where there is one.
        InputError: there is no attention in it, or the intent names no argument of its forward.
    """
    require_module(module, "testing.assert_attention_is_right")
    report = check(Subject(module, args, kwargs), intent)
    wrong = [finding for finding in report.findings if finding.sure]
    if wrong:
        lines = []
        for finding in wrong:
            where = ", ".join(filter(None, (finding.source, finding.module)))
            lines.append(f"{finding.check}: {finding.sentence}" + (f" ({where})" if where else ""))
            lines.append(f"  evidence: {finding.evidence}")
            lines += [f"  fix: {finding.fix}"] if finding.fix else []
        raise AssertionError("\n".join(lines))


def _table(rows: list[StageRow], attention: str) -> str:
    first = next(row.name for row in rows if row.verdict == "differs")
    lines = [f"{attention} differs from {first} on"]
    for row in rows:
        apart = "" if row.max_abs_difference is None else f"{row.max_abs_difference:.3g}"
        times = "" if row.times_noise is None else f"{row.times_noise:,.1f} times the rounding"
        mark = ">" if row.name == first else " "
        lines.append(f"{mark} {row.name:13}  {row.verdict:12}  {apart:>9}  {times}  {row.note}".rstrip())
    return "\n".join(lines)

"""Bring the stages of any implementation into one layout, the canonical axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import EinopsError, rearrange

from ..graph.attention import Attention
from ..record.ops import TensorRef
from .axes import AxisNames
from .named_run import NamedRun
from .pattern import CANONICAL_AXES, POSITIONS, WITHIN, at_size, dims_of


@dataclass(frozen=True)
class NamedAxes:
    """The axes of all stages and returned tensors of a run, as einops patterns."""

    stages: tuple[dict[str, str], ...]
    """For each attention, stage name to axes."""
    returned: tuple[str, ...]
    """Axes of each returned tensor, in order."""


def own_axes(run: NamedRun) -> NamedAxes:
    """Return the names of a run's axes, in its own layout; a wider run beside it helps to name axes of size one."""
    stages: list[dict[str, str]] = []
    for attention, names in run.attentions:
        stages.append({stage: names.of_stage(stage) for stage in attention.stages})
    if run.wider is None or _ranks(run) != _ranks(run.wider):
        return NamedAxes(tuple(stages), _returned(run.distinct.run))
    patterns = own_axes(run.wider).returned
    wider = run.wider.recording.outputs
    returned: list[str] = []
    for pattern, named, wide in zip(patterns, run.recording.outputs, wider, strict=True):
        returned.append(at_size(pattern, named.tensor.shape, wide.tensor.shape))
    return NamedAxes(tuple(stages), tuple(returned))


@dataclass(frozen=True)
class _Side:
    """The queries, keys or values of one attention."""

    names: AxisNames
    letter: str


def _returned(run: NamedRun) -> tuple[str, ...]:
    """Return the axes of each returned tensor; keys and values that are returned have those of their own attention."""
    sides = _keys_and_values(run) if len(run.recording.outputs) > 1 else {}
    patterns: list[str] = []
    for named in run.recording.outputs:
        pattern = _pattern_of(run, named.tensor, sides)
        patterns.append(_of_stream(run, named.tensor, pattern))
    return tuple(patterns)


def _pattern_of(run: NamedRun, tensor: TensorRef, sides: Mapping[int, _Side]) -> str:
    """Return the axes of a returned tensor; its sizes in a run without attention."""
    side = _side_of(run, tensor, sides)
    if side is None:
        return " ".join(map(str, tensor.shape))
    return side.names.of(tensor, side.letter)


def _keys_and_values(run: NamedRun) -> dict[int, _Side]:
    """Return the side of each tensor, by id, that is keys or values after their projection, and no queries."""
    sides: dict[int, _Side] = {}
    for attention, names in run.attentions:
        queries = _after_projection(run, attention.stages.get("q_heads"))
        for letter in "kv":
            for number in _after_projection(run, attention.stages.get(f"{letter}_heads")) - queries:
                sides[number] = _Side(names, letter)
    return sides


def _after_projection(run: NamedRun, tensor: TensorRef | None) -> set[int]:
    """Return the ids of the tensors that this one is made of, back to the nearest projections."""
    if tensor is None:
        return set()
    graph = run.graph
    steps = graph.back(tensor, lambda op: not graph.is_projection(op))
    return {step.tensor.id for step in steps}


def _side_of(run: NamedRun, tensor: TensorRef, sides: Mapping[int, _Side]) -> _Side | None:
    """Return the side that a returned tensor is, at most moved; otherwise the last attention, without a letter."""
    for step in run.graph.back(tensor, lambda op: op.kind != "compute"):
        if step.tensor.id in sides:
            return sides[step.tensor.id]
    return _Side(run.attentions[-1][1], "") if run.attentions else None


def _of_stream(run: NamedRun, tensor: TensorRef, pattern: str) -> str:
    """Return the axes of a returned tensor: those of the stage `output` where it is one of several joined streams.

    SD3 and Flux join two sequences, `batch positions embed` each, attend over all of them, and cut the context into
    streams again, each with a projection of its own. The stages are those of one stream.
    """
    if not run.attentions:
        return pattern
    attention, names = run.attentions[-1]
    output = names.of_stage("output") if "output" in attention.stages else ""
    words = pattern.split()
    has_three = len(words) == len(tensor.shape) == 3
    if output != f"batch {POSITIONS} embed" or not has_three or words[0] != "batch":
        return pattern
    return output if _is_projected_piece(run, attention, tensor) else pattern


def _is_projected_piece(run: NamedRun, attention: Attention, tensor: TensorRef) -> bool:
    """Return whether a tensor, `batch positions embed`, depends on a projection of as many positions of the context."""
    graph, context = run.graph, attention.stages["context"]
    batch, positions, width = tensor.shape
    for step in graph.back(tensor, lambda op: op is not attention.value_product.op):
        op = run.recording.producer(step.tensor)
        if op is None or not graph.is_projection(op):
            continue
        piece = graph.projected(op)
        has_positions = piece.numel == batch * positions * piece.shape[-1]
        if not has_positions or op.output.shape[-1] != width:
            continue
        if piece.numel < context.numel and _is_moved_from(run, piece, context):
            return True
    return False


def _is_moved_from(run: NamedRun, piece: TensorRef, whole: TensorRef) -> bool:
    """Return whether a tensor is a view or a copy of another one, or of a piece of it."""
    steps = run.graph.back(piece, run.graph.moves)
    return any(step.tensor.id == whole.id for step in steps)


def _ranks(run: NamedRun) -> list[tuple[str, int]]:
    """Return the names of a run's returned tensors, and their numbers of dimensions."""
    return [(named.name, len(named.tensor.shape)) for named in run.recording.outputs]


def contents_of(run: NamedRun, attention: Attention, names: AxisNames) -> dict[str, torch.Tensor]:
    """Return the stages of an attention in canonical axes; the turns of a loop over heads are concatenated.

    Stages with an unnamed axis are absent. The run must have been recorded with its tensors kept.
    """
    contents: dict[str, torch.Tensor] = {}
    for stage in attention.stages:
        content = content_of(run, attention, names, stage)
        if content is not None:
            contents[stage] = content
    return contents


def drawn_of(run: NamedRun, attention: Attention, names: AxisNames) -> dict[str, torch.Tensor]:
    """Return the stages of an attention in canonical axes, where each window counts as a batch item of its own.

    `(batch windows) heads query key` and `batch windows heads query key` become `batch heads query key`.
    """
    contents = contents_of(run, attention, names)
    for stage, tensor in attention.stages.items():
        value = run.recording.values.get(tensor.id)
        if stage in contents or value is None or attention.branches:
            continue
        sizes = sizes_in(attention, names, stage)
        content = _by_window(value, stage, names.of_stage(stage), sizes, names.head_order)
        if content is not None:
            contents[stage] = content
    return contents


def _by_window(
    value: torch.Tensor,
    stage: str,
    axes: str,
    sizes: Mapping[str, int],
    head_order: Sequence[str],
) -> torch.Tensor | None:
    """Return a stage of windows in canonical axes, with the windows of all items as its batch; None for other axes."""
    if axes.startswith("batch windows "):
        value = value.flatten(0, 1)
        axes = axes.replace("batch windows", "batch", 1)
    elif axes.startswith("(batch windows) "):
        axes = axes.replace("(batch windows)", "batch", 1)
    else:
        return None
    return canonical(value, stage, axes, sizes, head_order)


def content_of(
    run: NamedRun,
    attention: Attention,
    names: AxisNames,
    stage: str,
) -> torch.Tensor | None:
    """Return one stage in canonical axes; the turns of a loop over heads are concatenated.

    None if an axis has no name, or if the stage was never made because its kernel has too many scores.
    """
    is_in_turns = bool(attention.branches) and is_by_turn(attention, names, stage)
    turns = attention.branches if is_in_turns else (attention,)
    sizes = sizes_in(attention, names, stage)
    contents: list[torch.Tensor] = []
    for turn in turns:
        value = run.recording.values.get(turn.stages[stage].id)
        if value is None:
            return None
        content = canonical(value, stage, names.of_stage(stage), sizes, names.head_order)
        if content is None:
            return None
        contents.append(content)
    if len(contents) == 1:
        return contents[0]
    has_heads = "heads" in CANONICAL_AXES[stage].split()
    return torch.cat(contents, dim=1 if has_heads else -1)


def returned_content(run: NamedRun, value: torch.Tensor) -> torch.Tensor | None:
    """Return the first result of a run like this one as `batch query embed`; None if its axes could not be named."""
    pattern = next(iter(own_axes(run).returned), "")
    has_rank = "(" in pattern or len(pattern.split()) == value.dim()
    if not run.attentions or not has_rank:
        return None
    attention, names = run.attentions[-1]
    of_heads = {"heads": names.num_heads, "kv_heads": names.num_kv_heads, "head_dim": names.head_dim}
    for stage in ("output", "concat"):
        sizes = sizes_in(attention, names, stage) if stage in attention.stages else {}
        content = canonical(value, stage, pattern, {**sizes, **of_heads}, names.head_order)
        if content is not None:
            return content
    return None


def is_by_turn(attention: Attention, names: AxisNames, stage: str) -> bool:
    """Return whether each turn of a loop over heads makes this stage for its own heads.

    A projection to the features of all heads, sliced in each turn, is made once for the whole layer.
    """
    if len(attention.branches) < 2:
        return False
    if "heads" in CANONICAL_AXES[stage].split():
        return True
    has_all_heads = any("heads" in dim for dim in dims_of(names.of_stage(stage)))
    return stage in ("q_proj", "k_proj", "v_proj") and not has_all_heads


def sizes_in(attention: Attention, names: AxisNames, stage: str) -> dict[str, int]:
    """Return the sizes of axes that may share a dimension with others in a stage, or in one turn of a loop."""
    turns = 1
    if is_by_turn(attention, names, stage):
        turns = min(len(attention.branches), names.num_heads)
    sizes: dict[str, int] = {}
    # The size of an axis comes from a stage where it is alone in a dimension; einops solves for the rest.
    for whole in ("query", "output", "weights"):
        pattern = names.of_stage(whole) if whole in attention.stages else "("
        if "(" in pattern:
            continue
        shape = attention.stages[whole].shape
        for name, size in zip(pattern.split(), shape, strict=False):
            if name in ("batch", "query"):
                sizes[name] = size
    if names.num_windows > 1:
        sizes["windows"] = names.num_windows
    sizes["head_dim"] = names.head_dim
    sizes["heads"] = names.num_heads // turns
    sizes["kv_heads"] = names.num_kv_heads // turns or 1
    return sizes


def canonical(
    value: torch.Tensor,
    stage: str,
    axes: str,
    sizes: Mapping[str, int],
    head_order: Sequence[str] = ("kv_heads", "group"),
) -> torch.Tensor | None:
    """Return a stage's tensor in its canonical axes, from any layout; None if an axis has no name.

    Args:
        value: a tensor laid out as `axes`.
        stage: a stage of `pattern.STAGES`.
        axes: an einops pattern.
        sizes: sizes of axes by name, as from `sizes_in`; names outside the pattern are ignored.
        head_order: the names of head axes, in the order in which the heads are numbered.

    An axis that this implementation lacks (batch, when unbatched) gets size 1.
    """
    dims = dims_of(axes)
    # An axis of size one has no information: it is dropped.
    names = [name for dim in dims for name in dim if name != "1"]
    if not all(map(str.isidentifier, names)):
        return None
    if len(set(names)) < len(names):
        return None
    target = _canonical_pattern(stage, names, head_order)
    if set(target.split()) - {"(", ")", "1"} != set(names):
        return None
    # An axis alone in its dimension takes the size of that: in a loop over queries it differs from the whole layer's.
    given: dict[str, int] = {}
    for dim in dims:
        if len(dim) > 1:
            for name in dim:
                if name in sizes:
                    given[name] = sizes[name]
    try:
        return rearrange(value, f"{axes} -> {target}", **given)
    except EinopsError:  # the names do not fit the sizes
        return None


def _canonical_pattern(stage: str, names: Sequence[str], head_order: Sequence[str]) -> str:
    """Return the canonical pattern of a stage in the names of its own pattern: `batch ( kv_heads group ) key head_dim`.

    A name that the stage lacks becomes `1`.
    """
    words: list[str] = []
    is_in_brackets = False
    for word in CANONICAL_AXES[stage].replace("(", "( ").replace(")", " )").split():
        if word in ("(", ")"):
            is_in_brackets = word == "("
            words.append(word)
            continue
        text = _target(word, names, stage, head_order)
        # Two names for one axis get brackets, unless they are already inside of some.
        if " " in text and not is_in_brackets:
            text = f"( {text} )"
        words.append(text)
    return " ".join(words)


_ALIKE = {
    "embed": ("kdim", "vdim"),
    "heads": ("kv_heads",),
    "kv_heads": ("heads",),
    "head_dim": ("v_head_dim",),
}
"""Canonical name to names that may be in its place."""


def _target(
    word: str,
    names: Sequence[str],
    stage: str,
    head_order: Sequence[str],
) -> str:
    """Return the text for an axis of the canonical pattern, given the names of the stage's own pattern."""
    if "maps" in names and word in ("heads", "kv_heads"):
        return "heads maps"
    if word in names:
        return word
    alike = _ALIKE.get(word, ())
    if word in ("query", "key") and stage not in (*WITHIN, "context"):
        # Inputs and outputs may have other positions than the queries and keys of the weights.
        alike = (POSITIONS,)
    for name in alike:
        if name not in names:
            continue
        if name == "kv_heads" and "group" in names:
            return " ".join(head for head in head_order if head in names)
        return name
    return "1"

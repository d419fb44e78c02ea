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
    stages = tuple({stage: names.of_stage(stage) for stage in attention.stages} for attention, names in run.attentions)
    returned = _returned(run.distinct.run)
    if run.wider is not None and _ranks(run) == _ranks(run.wider):
        runs = zip(own_axes(run.wider).returned, run.recording.outputs, run.wider.recording.outputs, strict=True)
        returned = tuple(at_size(pattern, named.tensor.shape, wide.tensor.shape) for pattern, named, wide in runs)
    return NamedAxes(stages, returned)


def _returned(run: NamedRun) -> tuple[str, ...]:
    """Return the axes of each returned tensor; keys and values that are returned have those of their own attention."""
    graph, sides = run.graph, dict[int, tuple[AxisNames, str]]()
    for attention, names in run.attentions if len(run.recording.outputs) > 1 else ():
        reached = {
            side: {step.tensor.id for step in graph.back(tensor, lambda op: not graph.is_projection(op))}
            for side in "qkv"
            if (tensor := attention.stages.get(f"{side}_heads")) is not None
        }
        for side in reached.keys() - "q":
            sides |= dict.fromkeys(reached[side] - reached["q"], (names, side))
    patterns = []
    for named in run.recording.outputs:
        steps = graph.back(named.tensor, lambda op: op.kind != "compute")
        last = (run.attentions[-1][1], "") if run.attentions else None
        of_side = next((sides[step.tensor.id] for step in steps if step.tensor.id in sides), last)
        of_size = " ".join(map(str, named.tensor.shape))
        pattern = of_size if of_side is None else of_side[0].of(named.tensor, of_side[1])
        patterns.append(_of_stream(run, named.tensor, pattern))
    return tuple(patterns)


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
    is_sequence = output == f"batch {POSITIONS} embed" and len(words) == len(tensor.shape) == 3
    if not is_sequence or words[0] != "batch" or not _is_projected_piece(run, attention, tensor):
        return pattern
    return output


def _is_projected_piece(run: NamedRun, attention: Attention, tensor: TensorRef) -> bool:
    """Return whether a tensor, `batch positions embed`, depends on a projection of as many positions of the context."""
    graph, context = run.graph, attention.stages["context"]
    batch, positions, width = tensor.shape
    for step in graph.back(tensor, lambda op: op is not attention.value_product.op):
        op = run.recording.producer(step.tensor)
        if op is None or not graph.is_projection(op) or op.output.shape[-1] != width:
            continue
        piece = graph.projected(op)
        if piece.numel >= context.numel or piece.numel != batch * positions * piece.shape[-1]:
            continue
        if any(moved.tensor.id == context.id for moved in graph.back(piece, graph.moves)):
            return True
    return False


def _ranks(run: NamedRun) -> list[tuple[str, int]]:
    """Return the names of a run's returned tensors, and their numbers of dimensions."""
    return [(named.name, len(named.tensor.shape)) for named in run.recording.outputs]


def contents_of(run: NamedRun, attention: Attention, names: AxisNames) -> dict[str, torch.Tensor]:
    """Return the stages of an attention in canonical axes; the turns of a loop over heads are concatenated.

    Stages with an unnamed axis are absent. The run must have been recorded with its tensors kept.
    """
    contents = {stage: content_of(run, attention, names, stage) for stage in attention.stages}
    return {stage: content for stage, content in contents.items() if content is not None}


def drawn_of(run: NamedRun, attention: Attention, names: AxisNames) -> dict[str, torch.Tensor]:
    """Return the stages of an attention in canonical axes, where each window counts as a batch item of its own.

    `(batch windows) heads query key` and `batch windows heads query key` become `batch heads query key`.
    """
    contents = contents_of(run, attention, names)
    for stage, tensor in attention.stages.items():
        value = run.recording.values.get(tensor.id)
        if stage in contents or value is None or attention.branches:
            continue
        content = _by_window(value, stage, names.of_stage(stage), sizes_in(attention, names, stage), names.head_order)
        if content is not None:
            contents[stage] = content
    return contents


def _by_window(
    value: torch.Tensor, stage: str, axes: str, sizes: Mapping[str, int], head_order: Sequence[str]
) -> torch.Tensor | None:
    """Return a stage of windows in canonical axes, with the windows of all items as its batch; None for other axes."""
    if axes.startswith("batch windows "):
        value, axes = value.flatten(0, 1), axes.replace("batch windows", "batch", 1)
    elif axes.startswith("(batch windows) "):
        axes = axes.replace("(batch windows)", "batch", 1)
    else:
        return None
    return canonical(value, stage, axes, sizes, head_order)


def content_of(run: NamedRun, attention: Attention, names: AxisNames, stage: str) -> torch.Tensor | None:
    """Return one stage in canonical axes; the turns of a loop over heads are concatenated.

    None if an axis has no name, or if the stage was never made because its kernel has too many scores.
    """
    turns = attention.branches if attention.branches and is_by_turn(attention, names, stage) else (attention,)
    axes, sizes = CANONICAL_AXES[stage].split(), sizes_in(attention, names, stage)
    values = [run.recording.values.get(turn.stages[stage].id) for turn in turns]
    parts = [
        None if value is None else canonical(value, stage, names.of_stage(stage), sizes, names.head_order)
        for value in values
    ]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else torch.cat(known, dim=1 if "heads" in axes else -1)


def returned_content(run: NamedRun, value: torch.Tensor) -> torch.Tensor | None:
    """Return the first result of a run like this one as `batch query embed`; None if its axes could not be named."""
    pattern = next(iter(own_axes(run).returned), "")
    if not run.attentions or (len(pattern.split()) != value.dim() and "(" not in pattern):
        return None
    attention, names = run.attentions[-1]
    for stage in ("output", "concat"):
        sizes = sizes_in(attention, names, stage) if stage in attention.stages else {}
        sizes = {**sizes, "heads": names.num_heads, "kv_heads": names.num_kv_heads, "head_dim": names.head_dim}
        content = canonical(value, stage, pattern, sizes, names.head_order)
        if content is not None:
            return content
    return None


def is_by_turn(attention: Attention, names: AxisNames, stage: str) -> bool:
    """Return whether each turn of a loop over heads makes this stage for its own heads.

    A projection to the features of all heads, sliced in each turn, is made once for the whole layer.
    """
    whole = "heads" in [name for dim in dims_of(names.of_stage(stage)) for name in dim]
    by_head = "heads" in CANONICAL_AXES[stage].split() or (stage in ("q_proj", "k_proj", "v_proj") and not whole)
    return len(attention.branches) > 1 and by_head


def sizes_in(attention: Attention, names: AxisNames, stage: str) -> dict[str, int]:
    """Return the sizes of axes that may share a dimension with others in a stage, or in one turn of a loop."""
    turns = min(len(attention.branches), names.num_heads) if is_by_turn(attention, names, stage) else 1
    # The size of an axis comes from a stage where it is alone in a dimension; einops solves for the rest.
    alone = {
        name: size
        for other in ("query", "output", "weights")
        if other in attention.stages and "(" not in names.of_stage(other)
        for name, size in zip(names.of_stage(other).split(), attention.stages[other].shape, strict=False)
        if name in ("batch", "query")
    }
    heads = {"heads": names.num_heads // turns, "kv_heads": names.num_kv_heads // turns or 1}
    windows = {"windows": names.num_windows} if names.num_windows > 1 else {}
    return {**alone, **windows, "head_dim": names.head_dim, **heads}


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
    # An axis of size one has no information: it is dropped.
    names = [name for name in axes.replace("(", " ").replace(")", " ").split() if name != "1"]
    if any(not name.isidentifier() for name in names) or len(set(names)) < len(names):
        return None
    target: list[str] = []
    for word in CANONICAL_AXES[stage].replace("(", "( ").replace(")", " )").split():
        text = _target(word, names, stage, head_order)
        # Two names for one axis get brackets, unless they are already inside of some.
        target.append(f"( {text} )" if " " in text and target.count("(") == target.count(")") else text)
    if set(" ".join(target).split()) - {"(", ")", "1"} != set(names):
        return None
    # An axis alone in its dimension takes the size of that: in a loop over queries it differs from the whole layer's.
    shared = {name for dim in dims_of(axes) if len(dim) > 1 for name in dim}
    given = {name: sizes[name] for name in names if name in sizes and name in shared}
    try:
        return rearrange(value, f"{axes} -> {' '.join(target)}", **given)
    except EinopsError:  # the names do not fit the sizes
        return None


def _target(word: str, names: list[str], stage: str, head_order: Sequence[str]) -> str:
    """Return the text for an axis of the canonical pattern, given the names of the stage's own pattern."""
    if "maps" in names and word in ("heads", "kv_heads"):
        return "heads maps"
    if word in names or word in ("(", ")"):
        return word
    others = {
        "embed": ("kdim", "vdim"),
        "heads": ("kv_heads",),
        "kv_heads": ("heads",),
        "head_dim": ("v_head_dim",),
        # Inputs and outputs may have other positions than the queries and keys of the weights.
        "query": () if stage in (*WITHIN, "context") else (POSITIONS,),
        "key": () if stage in (*WITHIN, "context") else (POSITIONS,),
    }.get(word, ())
    match = next((name for name in others if name in names), None)
    if match == "kv_heads" and "group" in names:
        return " ".join(name for name in head_order if name in names)
    return match or "1"

"""One layout for every implementation: the axes of each stage, and its content in the canonical axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import EinopsError, rearrange

from ..graph.attention import Attention
from .axes import AxisNames
from .named_run import NamedRun
from .pattern import CANONICAL_AXES, POSITIONS, WITHIN, at_size, dims_of


@dataclass(frozen=True)
class NamedAxes:
    """The axes of everything that a run shows, as einops patterns."""

    stages: tuple[dict[str, str], ...]
    """For each attention, stage name to axes."""
    returned: tuple[str, ...]
    """Axes of each returned tensor, in order."""


def own_axes(run: NamedRun) -> NamedAxes:
    """Name the axes of a run from that run alone, and from the wider one that it may have beside it."""
    stages = tuple({stage: names.of_stage(stage) for stage in attention.stages} for attention, names in run.attentions)
    returned = tuple(
        run.attentions[-1][1].of(named.tensor) if run.attentions else " ".join(map(str, named.tensor.shape))
        for named in run.recording.outputs
    )
    if run.wider is not None and _ranks(run) == _ranks(run.wider):
        runs = zip(own_axes(run.wider).returned, run.recording.outputs, run.wider.recording.outputs, strict=True)
        returned = tuple(at_size(pattern, own.tensor.shape, like.tensor.shape) for pattern, own, like in runs)
    return NamedAxes(stages, returned)


def _ranks(run: NamedRun) -> list[tuple[str, int]]:
    """What a run returned: names, and numbers of dimensions."""
    return [(named.name, len(named.tensor.shape)) for named in run.recording.outputs]


def contents_of(run: NamedRun, attention: Attention, names: AxisNames) -> dict[str, torch.Tensor]:
    """The stages of an attention in canonical axes, the turns of a loop over heads side by side.

    Those of which an axis has no name are left out. The run must have been recorded with its tensors kept.
    """
    contents = {stage: content_of(run, attention, names, stage) for stage in attention.stages}
    return {stage: content for stage, content in contents.items() if content is not None}


def content_of(run: NamedRun, attention: Attention, names: AxisNames, stage: str) -> torch.Tensor | None:
    """Return one stage in canonical axes, the turns of a loop over heads side by side.

    None as `canonical` does, and where it was never made, its kernel having too many scores to make them.
    """
    turns = attention.branches if attention.branches and is_by_turn(attention, names, stage) else (attention,)
    sizes = sizes_in(attention, names, stage)
    values = [run.recording.values.get(turn.stages[stage].id) for turn in turns]
    parts = [None if value is None else canonical(value, stage, names.of_stage(stage), sizes) for value in values]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if len(known) == 1:
        return known[0]
    return torch.cat(known, dim=1 if "heads" in CANONICAL_AXES[stage].split() else -1)


def returned_content(run: NamedRun, value: torch.Tensor) -> torch.Tensor | None:
    """Return what a run like this one returned first as `batch query embed`; None where its axes are not known."""
    pattern = next(iter(own_axes(run).returned), "")
    if not run.attentions or (len(pattern.split()) != value.dim() and "(" not in pattern):
        return None
    found, names = run.attentions[-1]
    for stage in ("output", "concat"):
        sizes = sizes_in(found, names, stage) if stage in found.stages else {}
        sizes = {**sizes, "heads": names.num_heads, "kv_heads": names.num_kv_heads, "head_dim": names.head_dim}
        content = canonical(value, stage, pattern, sizes)
        if content is not None:
            return content
    return None


def is_by_turn(attention: Attention, names: AxisNames, stage: str) -> bool:
    """Whether each turn of a loop over heads has this stage for itself, with its own heads in it.

    Where a projection gives the features of all heads, and each turn takes a slice, it is the whole layer's.
    """
    whole = "heads" in [name for dim in dims_of(names.of_stage(stage)) for name in dim]
    own = "heads" in CANONICAL_AXES[stage].split() or (stage in ("q_proj", "k_proj", "v_proj") and not whole)
    return len(attention.branches) > 1 and own


def sizes_in(attention: Attention, names: AxisNames, stage: str) -> dict[str, int]:
    """The sizes of the axes that share a dimension with others in a stage, or in one turn of it."""
    turns = min(len(attention.branches), names.num_heads) if is_by_turn(attention, names, stage) else 1
    # An axis that has a dimension to itself somewhere has its size from there; einops solves for the rest.
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


def canonical(value: torch.Tensor, stage: str, axes: str, sizes: Mapping[str, int]) -> torch.Tensor | None:
    """A stage's tensor in its canonical axes, whatever its own layout; None where an axis has no name.

    Args:
        value: laid out as `axes` says.
        stage: a stage of `pattern.STAGES`.
        axes: an einops pattern.
        sizes: of axes by name, as `sizes_in` gives them; those that the pattern does not have are passed over.

    An axis that this implementation does not have (batch, when unbatched) has size 1.
    """
    # An axis of one has nothing to tell: it is dropped.
    own = [name for name in axes.replace("(", " ").replace(")", " ").split() if name != "1"]
    if any(not name.isidentifier() for name in own) or len(set(own)) < len(own):
        return None
    target: list[str] = []
    for word in CANONICAL_AXES[stage].replace("(", "( ").replace(")", " )").split():
        found = _target(word, own, stage)
        # Two names for one axis are a dimension of their own, unless they stand inside of one.
        target.append(f"( {found} )" if " " in found and target.count("(") == target.count(")") else found)
    if set(" ".join(target).split()) - {"(", ")", "1"} != set(own):
        return None
    # What has a dimension to itself has its size, which in a loop over queries is another than the whole layer's.
    shared = {name for dim in dims_of(axes) if len(dim) > 1 for name in dim}
    told = {name: sizes[name] for name in own if name in sizes and name in shared}
    try:
        return rearrange(value, f"{axes} -> {' '.join(target)}", **told)
    except EinopsError:  # names that do not fit their sizes are none
        return None


def _target(word: str, own: list[str], stage: str) -> str:
    """What stands for an axis of the canonical pattern, given the names that the own pattern has."""
    if "maps" in own and word in ("heads", "kv_heads"):
        return "heads maps"
    if word in own or word in ("(", ")"):
        return word
    others = {
        "embed": ("kdim", "vdim"),
        "heads": ("kv_heads",),
        "kv_heads": ("heads",),
        # What comes in and goes out has its positions, whatever becomes of them in between.
        "query": () if stage in (*WITHIN, "context") else (POSITIONS,),
        "key": () if stage in (*WITHIN, "context") else (POSITIONS,),
    }.get(word, ())
    found = next((name for name in others if name in own), None)
    if found == "kv_heads" and "group" in own:
        return "kv_heads group"
    return found or "1"

"""What the stages of a kept run hold, in canonical axes; and the same run in float64, to measure rounding against."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ..graph.attention import Attention
from ..naming.canonical import NamedAxes, canonical_stage, own_axes
from ..naming.stages import CANONICAL_AXES, STAGES
from ..record.copying import copy_module
from ..record.rounding import cast_tensors
from ..record.subject import Run
from ..targets.load import Layer
from ..targets.spec import DTYPES


@dataclass
class Known:
    """What was found in earlier runs of one layer: another head count, or dtype, mostly runs the same steps."""

    found: dict[Hashable, tuple[Attention, ...]] = field(default_factory=dict)
    axes: dict[Hashable, NamedAxes] = field(default_factory=dict)


class StageContents:
    """The stages of a run that was recorded with its tensors kept.

    A layer that loops over its heads has an attention for each: here their heads stand side by side, as one attention.
    """

    def __init__(self, forward: Layer, seen: Run, known: Known | None = None) -> None:
        self.forward = forward
        self.seen = seen
        self._known = Known() if known is None else known
        self._sizes = sizes_of(forward)

    @cached_property
    def axes(self) -> NamedAxes:
        """The axes of each stage as this implementation lays it out."""
        spec, known = self.forward.spec, self._known.axes
        ranks = (tuple((stage, len(tensor.shape)) for stage, tensor in found.stages.items()) for found in self.found)
        # What decides on names: whether heads share keys, the stages, and how many dimensions each has.
        kind = (spec.kv_heads == spec.num_heads, spec.kv_heads == 1 < spec.num_heads, *ranks)
        if kind not in known:
            known[kind] = own_axes(replace(self.seen, wider=self.forward.wider_run(self.seen)))
        return known[kind]

    @cached_property
    def found(self) -> tuple[Attention, ...]:
        """The attentions that make up this layer, with the sizes of the first run that took these steps."""
        known, steps = self._known.found, _steps(self.seen)
        if steps not in known:
            known[steps] = tuple(found for found, _ in self.seen.attentions)
        return known[steps]

    @cached_property
    def parts(self) -> tuple[Attention, ...]:
        """The turns of a loop over heads, or the attentions themselves."""
        turns = self.found[0].branches if len(self.found) == 1 else ()
        return turns or self.found

    @property
    def by_head(self) -> bool:
        """Whether each head is computed on its own."""
        return len(self.parts) > 1 and len(self.parts) == self.forward.spec.num_heads

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The stages that there are, in order."""
        return tuple(stage for stage in STAGES if self.found and stage in self.found[0].stages)

    def get(self, stage: str) -> Tensor | None:
        """The content of a stage in its canonical axes; None where there is no such stage, or an axis has no name."""
        if stage not in self.stages:
            return None
        words = CANONICAL_AXES[stage].split()
        joined = "heads" in words or stage in ("q_proj", "k_proj", "v_proj")
        if not self.by_head or not joined:
            return self._one(0, stage)
        parts = [self._one(place, stage) for place in range(len(self.parts))]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts):
            return None
        return torch.cat(known, dim=1 if "heads" in words else -1)

    def _one(self, place: int, stage: str) -> Tensor | None:
        found = self.found[place] if stage == "concat" or len(self.found) > 1 else self.parts[place]
        if stage not in found.stages:
            return None
        sizes = self._sizes
        # The turns of one loop are laid out alike.
        axes = self.axes.stages[min(place, len(self.found) - 1)][stage]
        if self.by_head and stage not in ("concat", "output"):
            # The attention of one head: a feature dimension that the whole layer splits is that head's alone.
            sizes = {**sizes, "heads": 1, "kv_heads": 1, "group": 1}
        if self.by_head and stage == "concat" and "heads" not in axes:
            axes = " ".join([*axes.split()[:2], "(heads head_dim)"]) if axes.count(" ") == 2 else axes
        return canonical_stage(self.seen, found, stage, axes, sizes)


def _steps(seen: Run) -> Hashable:
    """Which operation made which tensor out of which, whatever their sizes."""
    ops = seen.recording.ops
    return tuple((op.name, *((t.id, len(t.shape)) for t in (*op.inputs, *op.outputs))) for op in ops)


def sizes_of(forward: Layer) -> dict[str, int]:
    """The sizes of the axes that share a dimension with others in some layout."""
    spec = forward.spec
    return {
        "batch": forward.inputs.batch,
        "heads": spec.num_heads,
        "kv_heads": spec.kv_heads,
        "group": spec.num_heads // spec.kv_heads,
        "head_dim": int(spec.head_dim),
    }


def exact_forward(forward: Layer, module: nn.Module | None = None) -> Layer:
    """The same layer, weights and inputs in float64, without gradients; on the CPU where the device has no float64.

    Dropout draws other elements in another dtype: a module in training mode is run in eval mode. `module` is what an
    earlier call made of the same module.
    """
    return in_dtype(forward, torch.float64, module)


def in_dtype(forward: Layer, dtype: torch.dtype, module: nn.Module | None = None) -> Layer:
    """The same layer, weights and inputs in another dtype, in eval mode, without gradients."""
    device = "cpu" if torch.device(forward.run.device).type == "mps" else forward.run.device
    if module is None:
        module = copy_module(forward.module).to(device=device, dtype=dtype).eval()
    seen: dict[int, Tensor] = {}
    args = cast_tensors(forward.args, dtype, torch.device(device), seen)
    kwargs = cast_tensors(forward.kwargs, dtype, torch.device(device), seen)
    name = next(name for name in DTYPES if getattr(torch, name) == dtype)
    spec = replace(forward.spec, dtype=name, training=False)
    run = replace(forward.run, device=device, grad=False)
    return replace(forward, spec=spec, run=run, grad=False, module=module, args=args, kwargs=kwargs)

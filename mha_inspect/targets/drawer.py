"""The tensors of one call: each drawn by its plan, one for several arguments where nothing tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .drawing import Plan, draw
from .forward import Forward
from .vocabulary import Kind

_ORDER: dict[Kind, int] = {"key": 1, "value": 2, "mask": 3}
"""Kinds that may be the tensor of an earlier one are drawn after it."""


@dataclass(frozen=True)
class Drawer:
    """Draws what a forward is called with."""

    forward: Forward
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator
    apart: bool
    """Whether keys are another sequence than queries."""
    shaped: Collection[str]
    """Arguments of which somebody said the shape: each is drawn for itself."""

    def draw(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors; query, key and value are one tensor where nothing tells them apart."""
        drawn: dict[str, Tensor] = {}
        has_key = "key" in self.forward.kinds.values()
        for name, plan in sorted(plans.items(), key=lambda item: _ORDER.get(item[1].kind, 0)):
            like: Kind | None = "key" if plan.kind == "value" and has_key else "query"
            if plan.kind not in ("key", "value") or name in self.shaped or (self.apart and like == "query"):
                like = None
            same = [
                tensor
                for other, tensor in {**given, **drawn}.items()
                if isinstance(tensor, Tensor) and self.forward.kind(other) == like
                if tensor.shape[-1] == plan.shape[-1] and tensor.dim() == len(plan.shape)
            ]
            if same:
                drawn[name] = same[0]
                continue
            tensor = draw(plan, self.dtype, self.device, self.generator)
            # Always drawn batch first: the content of a row does not hang on the layout.
            turned = plan.sequence and self.forward.batch_first is False
            drawn[name] = tensor.transpose(0, 1).contiguous() if turned else tensor
        return drawn

    def tried(self, plans: Mapping[str, Plan], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is given and what is drawn, for a run before the real one: that draws the same again."""
        state = self.generator.get_state()
        values = {**given, **self.draw(plans, given)}
        self.generator.set_state(state)
        return values

"""The attention layers that can be built by name.

This table imports no torch: it serves `--help`, completion and "did you mean". A layer's code is imported when it is
built.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import SpecError

if TYPE_CHECKING:
    from torch import nn

    from ..inputs import Inputs
    from ..spec import AttentionSpec, RunSpec


class LayerModule(Protocol):
    """What the module of a layer defines at its top level."""

    def build(self, spec: AttentionSpec, device: str = "cpu") -> nn.Module:
        """The layer in spec.dtype, in training or eval mode as asked.

        Its parameters are drawn from spec.seed on the CPU and then moved, so that they are the same on every device; on
        `meta` they have shapes and no content.
        """

    def arguments(self, inputs: Inputs, run: RunSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of its forward for these inputs."""


@dataclass(frozen=True)
class LayerKind:
    """One way to write attention."""

    name: str
    """Name on the command line."""
    summary: str
    """One line: how it is written."""
    parameter_formula: str
    """Closed formula of the parameter count, with E the embed_dim and H the num_heads."""
    split: str
    """How the heads are split, as an einops pattern or a phrase."""
    origin: str
    """Where this style comes from."""
    module: str
    """Module under mha_inspect.layers that builds it."""

    def load(self) -> LayerModule:
        """Import the layer's code (this imports torch)."""
        return cast(LayerModule, import_module(f"{__package__}.{self.module}"))


LAYERS: dict[str, LayerKind] = {
    kind.name: kind
    for kind in (
        LayerKind(
            name="torch",
            summary="torch.nn.MultiheadAttention: one packed projection, heads folded into the batch",
            parameter_formula="4E² + 4E",
            split="query batch (heads head_dim) -> (batch heads) query head_dim",
            origin="PyTorch",
            module="torch_mha",
        ),
    )
}


def find_layer(name: str) -> LayerKind:
    """The layer of this name. Raises `SpecError`, with the nearest name, when there is none."""
    if name in LAYERS:
        return LAYERS[name]
    near = get_close_matches(name, LAYERS, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise SpecError(f"layer {name!r} is not one that can be built: {', '.join(LAYERS)}.{guess}")

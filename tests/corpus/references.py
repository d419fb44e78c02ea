"""Modules beside a reference, with weights under other names, of other sizes, or none."""

from __future__ import annotations

from torch import Tensor, nn

from .planted import D, E, H, Right


class Fused(nn.Module):
    """The same attention under other names, in one matrix."""

    scale = D**-0.5

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.norm = nn.LayerNorm(E) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return self.norm(self.out(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2)))


class Unscaled(Fused):
    scale = 1.0


class Grouped(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, *(t.repeat_interleave(H // t.shape[1], 1) for t in (k, v)))


class Elsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1]

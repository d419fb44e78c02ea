"""Layers one after another, equal ones and unlike ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .entry import E

LAYERS, DIFFERENT = 6, 3


class Stack(nn.Module):
    """Several layers of one class, with or without a residual."""

    def __init__(self, make: Callable[[], nn.Module], residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(LAYERS))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = layer(x)
            y = y[0] if isinstance(y, tuple) else y
            x = norm(x + y) if self.residual else y
        return x


class Layer(nn.Module):
    """An attention whose scale, mask, bias or projection may be those of no other layer."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.scale, self.kernel = heads, 0.5, False
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("mask", torch.ones(7, 7, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        self.keys = k
        if self.kernel:
            context = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        else:
            scores = q @ k.mT * self.scale + self.bias
            context = scores.masked_fill(~self.mask, -torch.inf).softmax(-1) @ v
        return x + self.o(context.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Picking(Layer):
    """A layer that picks the heads of its queries by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x)[..., self.order], self.k(x), self.v(x))
        )
        return x + self.o(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Returning(Model):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        states, keys = [], []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
            keys.append(layer.keys)
        return x, states, keys


class Skipping(Model):
    def forward(self, x: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        last: Tensor = self.layers[0](x + states[3])
        return last


class Inner(Model):
    """The last layer attends over the state before the last equal layer."""

    def forward(self, x: Tensor) -> Tensor:
        *equal, last = self.layers
        states = [x]
        for layer in equal:
            states.append(layer(states[-1]))
        final: Tensor = last(states[-2])
        return final


class TwoBack(Model):
    """Each layer attends over the state two layers before."""

    def forward(self, x: Tensor) -> Tensor:
        before, state = x, x.sin()
        for layer in self.layers:
            before, state = state, layer(before) + state
        return state


class Pieces(nn.Module):
    """Equal operations on pieces that were made before them, of which three are query, key and value."""

    def forward(self, x: Tensor) -> Tensor:
        pieces = [piece.clone() for piece in x.chunk(6, -1)]
        for piece in pieces:
            piece.sin()
        query, key, value = pieces[5], pieces[2], pieces[0]
        return (query @ key.mT / 8**0.5).softmax(-1) @ value

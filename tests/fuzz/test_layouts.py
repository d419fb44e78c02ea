"""Attention in the layouts that people use: positions first, features first, images, and a memory of other sizes.

The truth is the choices themselves; the weights are those that the module computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from hypothesis import strategies as st
from torch import Tensor, nn

import mha_inspect

LAYOUTS = {
    "batch first": "b n e -> b n e",
    "positions first": "b n e -> n b e",
    "features first": "b n e -> b e n",
    "no batch": "1 n e -> n e",
}


@dataclass(frozen=True)
class Layout:
    layout: str
    cross: str
    project: str
    kernel: bool
    padding: bool
    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    v_head_dim: int
    embed: int
    memory: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    layout, cross = one_of(*LAYOUTS), one_of("", "", "memory", "keys and values")
    queries, head_dim, embed = one_of(3, 4, 5, 6, 9), one_of(4, 5, 6, 8), one_of(10, 12, 35)
    return Layout(
        layout=layout,
        cross=cross,
        project="convolution" if layout == "features first" else one_of("linear", "packed"),
        kernel=one_of(False, True),
        padding=one_of(False, True),
        batch=1 if layout == "no batch" else one_of(1, 2, 4, 6),
        queries=queries,
        keys=one_of(4, 6, 7, queries) if cross else queries,
        heads=one_of(1, 2, 4, 6),
        head_dim=head_dim,
        v_head_dim=one_of(head_dim, head_dim, 7),
        embed=embed,
        memory=one_of(embed, 14) if cross else embed,
    )


class Attention(nn.Module):
    """Attention in one layout. `weights` are those of its last forward, unless a fused kernel computed them."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        inner, values = layout.heads * layout.head_dim, layout.heads * layout.v_head_dim
        sizes = [(layout.embed, inner), (layout.memory, inner), (layout.memory, values)]
        self.widths = [inner, values]
        if layout.project == "packed":
            sizes = [(layout.embed, inner), (layout.memory, inner + values)]
        if layout.project == "convolution":
            self.makers = nn.ModuleList(nn.Conv1d(*size, 1) for size in sizes)
        else:
            self.makers = nn.ModuleList(nn.Linear(*size) for size in sizes)
        self.o = nn.Linear(values, layout.embed)
        self.weights: Tensor | None = None

    def projected(self, x: Tensor, *memory: Tensor) -> list[Tensor]:
        """Return queries, keys and values, `batch position feature`."""
        layout = self.layout
        key = memory[0] if memory else x
        value = memory[-1] if memory else x
        if layout.project == "convolution":  # it has the features first, as its input has
            return [make(given).mT for make, given in zip(self.makers, (x, key, value), strict=True)]
        q, k, v = (self.batch_first(given) for given in (x, key, value))
        if layout.project == "packed":
            return [self.makers[0](q), *self.makers[1](k).split(self.widths, -1)]
        return [make(given) for make, given in zip(self.makers, (q, k, v), strict=True)]

    def batch_first(self, x: Tensor) -> Tensor:
        """Return `batch position feature`."""
        if self.layout.layout == "no batch":
            return x[None]
        there, back = LAYOUTS[self.layout.layout].split(" -> ")
        return rearrange(x, f"{back} -> {there}")

    def forward(self, x: Tensor, *memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        layout = self.layout
        parts = self.projected(x, *memory)
        q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=layout.heads) for part in parts)
        if layout.kernel:
            seen = None if hidden is None else ~hidden[:, None, None]
            context = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        else:
            scores = q @ k.mT * layout.head_dim**-0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
            self.weights = scores.softmax(-1)
            context = self.weights @ v
        merged = self.o(rearrange(context, "b h n d -> b n (h d)"))
        return merged[0] if layout.layout == "no batch" else rearrange(merged, LAYOUTS[layout.layout])


def inputs_of(layout: Layout) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the arguments of a forward."""
    shapes = [(layout.queries, layout.embed)]
    shapes += [(layout.keys, layout.memory)] * {"memory": 1, "keys and values": 2}.get(layout.cross, 0)
    given = tuple(rearrange(torch.randn(layout.batch, *shape), LAYOUTS[layout.layout]) for shape in shapes)
    hidden = torch.zeros(layout.batch, layout.keys, dtype=torch.bool)
    hidden[0, -1] = True
    return given, {"hidden": hidden} if layout.padding else {}


def said(attention: Any) -> dict[str, object]:
    """What a report says of the choices."""
    return {
        "heads": (attention.num_heads, attention.num_kv_heads, attention.head_dim),
        "kind": set(attention.kind),
        "scale": round(attention.scale, 5),
        "extras": (attention.position, attention.qk_norm, attention.cache, attention.window, attention.bias),
    }


def truth(layout: Layout) -> dict[str, object]:
    """What the choices say."""
    return {
        "heads": (layout.heads, layout.heads, layout.head_dim),
        "kind": {"cross" if layout.cross else "self"},
        "scale": round(layout.head_dim**-0.5, 5),
        "extras": (None, None, None, None, False),
    }


def axes_of(layout: Layout) -> dict[str, str]:
    """The axes of the stages that have one name each."""
    first = {"positions first": "{} batch embed", "features first": "batch embed {}", "no batch": "{} embed"}
    query = first.get(layout.layout, "batch {} embed").format("query")
    return {"query": query}


def test_layouts(try_all: Callable[..., None]) -> None:
    def check(layout: Layout) -> None:
        torch.manual_seed(0)
        module = Attention(layout).eval()
        args, kwargs = inputs_of(layout)
        trace = mha_inspect.trace(module, *args, keep=True, **kwargs)
        (attention,) = trace.attentions
        assert said(attention) == truth(layout)
        formulas = " ".join(stage.formula for stage in attention.stages)
        assert all(matrix in formulas for matrix in ("W_q", "W_k", "W_v", "W_o")), formulas
        if module.weights is not None:
            weights = attention.weights.tensor
            assert torch.equal(weights.reshape(module.weights.shape), module.weights)
        named = {stage.name: stage.axes for stage in attention.stages}
        assert axes_of(layout).items() <= named.items(), named
        assert all(parameter.role for parameter in mha_inspect.params(module, *args, **kwargs).parameters)
        intent = mha_inspect.Intent(batch_axis=1 if layout.layout == "positions first" else None)
        assert mha_inspect.check(module, *args, intent=intent, **kwargs).findings == ()

    try_all(check, layouts(), 20)

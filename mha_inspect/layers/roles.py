"""What a parameter is for, and which part of it belongs to which head: how a layer declares that. No torch here.

A layer's module may define two functions beside `build` and `arguments`:

    def roles(spec: AttentionSpec) -> dict[str, Role]        # by the parameter's name
    def formula(spec: AttentionSpec) -> str                  # of the parameter count; see mha_inspect.naming.formulas

A layer with three plain projections declares itself in four lines:

    heads, embed = spec.num_heads, spec.embed_dim
    return {
        "wq.weight": Role("(heads head_dim) embed", "W_q", (Part("W_q", (0, embed), (0, embed), heads=heads),)),
        "wq.bias": Role("(heads head_dim)", "b_q", (Part("b_q", (0, embed), heads=heads),)),
        ...
    }
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..reports.params import HeadSlice

Bounds = tuple[int, int]
"""Start included, stop not."""


@dataclass(frozen=True)
class Part:
    """A matrix or bias that is a part of a parameter, or the whole of it."""

    name: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q`, `b_k`, `b_v`, `b_o`; `bias_k`, `bias_v` for a learned key and value."""
    rows: Bounds
    """For a bias: its elements, counted along its one dimension that is not 1."""
    columns: Bounds | None = None
    """None for a bias."""
    split: Literal["rows", "columns"] | None = "rows"
    """Along what the heads lie in it, one after the other, in equal runs; None where it belongs to no head."""
    heads: int = 1
    """How many heads it is split over (key/value heads for W_k and W_v)."""
    first_head: int = 0
    """The number of the first of them: a parameter of its own for each head has `heads=1, first_head=h`."""

    def slices(self) -> tuple[HeadSlice, ...]:
        """The run of each head, in order; together they are the whole part, each element once."""
        if self.split is None:
            return ()
        if self.split == "rows":
            return tuple(HeadSlice(head, self.name, run, self.columns) for head, run in self._runs(self.rows))
        assert self.columns is not None, "a bias has no columns to split"
        return tuple(HeadSlice(head, self.name, self.rows, run) for head, run in self._runs(self.columns))

    def _runs(self, bounds: Bounds) -> list[tuple[int, Bounds]]:
        start, stop = bounds
        width, rest = divmod(stop - start, self.heads)
        assert rest == 0, f"{self.name}: {stop - start} cannot be split over {self.heads} heads"
        return [(self.first_head + n, (start + n * width, start + (n + 1) * width)) for n in range(self.heads)]


@dataclass(frozen=True)
class Role:
    """What one parameter is for."""

    axes: str
    """What its dimensions are, as an einops pattern."""
    text: str
    """In words, with the real numbers."""
    parts: tuple[Part, ...] = ()

    def slices(self) -> tuple[HeadSlice, ...]:
        """Which rows and columns belong to each head, part by part."""
        return tuple(piece for part in self.parts for piece in part.slices())


def stacked(names: tuple[str, ...], sizes: tuple[int, ...], columns: Bounds | None, heads: int) -> tuple[Part, ...]:
    """Parts one above the other, each split over the heads by rows."""
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(Part(name, (start, start + size), columns, heads=heads))
        start += size
    return tuple(parts)


def ranges(parts: tuple[Part, ...]) -> str:
    """Their rows as people count them, both ends included: `0–511, 512–1023`."""
    return ", ".join(f"{part.rows[0]}–{part.rows[1] - 1}" for part in parts)

"""Find a view with -1 that makes positions of features: 24 positions of 12 tokens, where heads are too narrow.

Such a view succeeds, and the forward fails later. It is the cause if the failing call runs with as many positions as
there are tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ...graph.dataflow import Graph
from ...record.ops import Op
from ..edit import Change, Edit, runs
from ..facts import Facts, Operand, Shape
from ..reached import behind_of


@dataclass(frozen=True, eq=False)
class _View:
    """A view of `… tokens width` as `… positions heads head_dim`, with more or fewer positions than tokens."""

    op: Op
    projection: str
    """The module of the projection whose output is split."""
    tokens: int
    width: int
    positions: int
    heads: int
    head_dim: int

    @property
    def is_packed(self) -> bool:
        """Whether the width may be that of two or three projections: no width of a head is then right."""
        return self.width in (2 * self.heads * self.head_dim, 3 * self.heads * self.head_dim)


def split_positions(facts: Facts) -> Edit | None:
    """Return the view that explains the sizes which clash in the failing call; None if there is none."""
    views = list(_views(facts.reached.graph))
    for view in views:
        alike = {other.op.output.id for other in views if other.positions == view.positions}
        behind = [operand for operand in facts.operands if _is_behind(facts, operand, alike)]
        behind = [operand for operand in behind if view.positions in operand.shape]
        if not behind:
            continue
        for keeps_width in (True, False):
            changes = [
                Change(operand, (("new_zeros", _mended(operand.shape, view, keeps_width)),)) for operand in behind
            ]
            edit = Edit("wrong_head_dim", _said(facts, view), changes, _way(view, packs=keeps_width and view.is_packed))
            if runs(facts.call, edit):
                return edit if edit.way else Edit(edit.cause, edit.why)
    return None


def _mended(shape: Shape, view: _View, keeps_width: bool) -> Shape:
    """Return a shape with tokens in the place of positions; the other way, with the features of all positions."""
    sizes = tuple(view.tokens if size == view.positions else size for size in shape)
    if keeps_width or len(shape) < 2:
        return sizes
    return (*sizes[:-1], shape[-1] * view.positions // view.tokens)


def _said(facts: Facts, view: _View) -> str:
    name = facts.variables.get(view.op.inputs[0].id) or f"{view.projection or 'the projection'}(...)"
    return (
        f"{name} has {view.tokens} tokens of {view.width} features, and the view at {view.op.source} makes "
        f"{view.positions} positions of them: {view.heads} heads of {view.head_dim} are "
        f"{view.heads * view.head_dim} features."
    )


def _way(view: _View, *, packs: bool) -> str:
    if packs or view.width % view.heads:
        return ""
    return f"use head_dim {view.width // view.heads} in that view ({view.heads} heads, width {view.width})"


def _is_behind(facts: Facts, operand: Operand, views: Collection[int]) -> bool:
    sources = behind_of(facts.reached.graph, operand.given.tensor)
    return any(source.id in views for source in sources)


def _views(graph: Graph) -> Iterator[_View]:
    """Yield the views that split a projection into heads and change the number of its positions."""
    for op in graph.recording.ops:
        if op.base_name not in ("view", "_unsafe_view", "reshape") or not op.inputs:
            continue
        before, after = op.inputs[0].shape, op.output.shape
        if len(before) < 2 or len(after) != len(before) + 1 or before[:-2] != after[:-3]:
            continue
        tokens, width = before[-2:]
        positions, heads, head_dim = after[-3:]
        smaller, larger = sorted((tokens, positions))
        # A product flattens its input, and its own view gives the positions back.
        if smaller == larger or larger % smaller or head_dim == width:
            continue
        projection = graph.recording.producer(graph.before_moves(op.inputs[0]))
        if projection is not None and graph.is_projection(projection):
            yield _View(op, projection.module, tokens, width, positions, heads, head_dim)

"""Find a view with -1 that makes positions of features: 24 positions of 12 tokens, where heads are too narrow.

Such a view succeeds, and the forward fails later. The numbers of positions before and after the view show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...graph.dataflow import Graph
from ...record.ops import Op, TensorRef
from .facts import BROADCASTS, Facts, Operand
from .reached import SDPA, behind_of
from .suspect import Shape, Suspect
from .tried import Fix, of_shape


@dataclass(frozen=True, eq=False)
class _View:
    """A view of `… tokens width` as `… positions heads head_dim`, with more or fewer positions than tokens."""

    op: Op
    projection: Op
    """The projection whose output is split."""
    tokens: int
    width: int
    positions: int
    heads: int
    head_dim: int

    @property
    def source(self) -> TensorRef:
        """The tensor that the view reads."""
        return self.op.inputs[0]


def split_positions(facts: Facts) -> Suspect | None:
    """Return the view that explains the sizes which clash in the failing call; None if there is none."""
    for view in _views(facts.reached.graph):
        for operand in _operands_behind(facts, view):
            right_shape = _right_shape(facts, view, operand)
            if right_shape is not None:
                return _suspect(facts, view, operand, right_shape)
    return None


def _suspect(facts: Facts, view: _View, operand: Operand, right_shape: Shape) -> Suspect:
    name = facts.variables.get(view.source.id) or f"{view.projection.module or 'the projection'}(...)"
    what = (
        f"{name} has {view.tokens} tokens of {view.width} features, and the view at {view.op.source} makes "
        f"{view.positions} positions of them: {view.heads} heads of {view.head_dim} are "
        f"{view.heads * view.head_dim} features."
    )
    if not _divides_width(view, _features_expected(facts, operand)):
        return Suspect("wrong_head_dim", what)
    way = f"use head_dim {view.width // view.heads} in that view ({view.heads} heads, width {view.width})"
    return Suspect("wrong_head_dim", what, (Fix(way, [(operand, of_shape(right_shape))]),))


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
        if tokens == positions or max(tokens, positions) % min(tokens, positions):
            continue
        projection = graph.recording.producer(graph.before_moves(op.inputs[0]))
        if projection is not None and graph.is_projection(projection):
            yield _View(op, projection, tokens, width, positions, heads, head_dim)


def _operands_behind(facts: Facts, view: _View) -> Iterator[Operand]:
    """Yield the operands of the failing call that are computed from a view."""
    for operand in facts.operands:
        sources = behind_of(facts.reached.graph, operand.given.tensor)
        if any(source.id == view.op.output.id for source in sources):
            yield operand


def _right_shape(facts: Facts, view: _View, operand: Operand) -> Shape | None:
    """Return the shape that an operand has with a right view; None if the view does not explain what clashes."""
    shape, positions, tokens = operand.shape, view.positions, view.tokens
    if len(shape) < 2:
        return None
    features = _features_expected(facts, operand)
    if features and shape[-2] == positions and shape[-1] * positions == features * tokens:
        return (*shape[:-2], tokens, features)
    behind = list(_operands_behind(facts, view))
    for beside in facts.operands:
        if beside not in behind and _clashes(facts, view, operand, beside):
            return tuple(tokens if size == positions else size for size in shape)
    return None


def _features_expected(facts: Facts, operand: Operand) -> int:
    """Return the features that a weight expects of an operand; 0 if the call is no projection."""
    if facts.base == "linear" and len(facts.operands) >= 2 and operand.role == "input":
        return facts.operands[1].shape[-1]
    if facts.pair is not None and facts.pair[0] is operand and facts.pair[1].is_parameter:
        return facts.pair[1].shape[0]
    return 0


def _clashes(facts: Facts, view: _View, operand: Operand, beside: Operand) -> bool:
    """Return whether the positions of an operand meet the tokens of another in one dimension."""
    positions, tokens = view.positions, view.tokens
    if facts.base in BROADCASTS:
        sizes = zip(reversed(operand.shape), reversed(beside.shape), strict=False)
        return (positions, tokens) in sizes
    if facts.base == SDPA:
        return beside.role == "attn_mask" and operand.shape[-2] == positions and tokens in beside.shape[-2:]
    if facts.pair is None or len(operand.shape) < 2 or len(beside.shape) < 2:
        return False
    # A product sums over the last dimension of its left factor, and over the rows of its right one.
    left, right = facts.pair
    if operand is left and beside is right:
        return left.shape[-1] == positions and right.shape[-2] == tokens
    if operand is right and beside is left:
        return right.shape[-2] == positions and left.shape[-1] == tokens
    return False


def _divides_width(view: _View, features: int) -> bool:
    """Return whether a right view may have the same number of heads; a packed projection may need another."""
    if view.width % view.heads:
        return False
    split = view.heads * view.head_dim
    is_packed = view.width in (2 * split, 3 * split) and features != view.width
    return not is_packed

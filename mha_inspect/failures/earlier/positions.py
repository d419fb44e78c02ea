"""Find a view with -1 that makes positions of features: 24 positions of 12 tokens, where heads are too narrow.

Such a view succeeds, and the forward fails later. The numbers of positions before and after the view show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...graph.dataflow import Graph
from ...record.ops import Op, TensorRef
from ..edit import Change, Edit
from ..facts import BROADCASTS, Facts, Operand, Shape
from ..reached import SDPA, behind_of


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

    @property
    def split_width(self) -> int:
        """The features of all heads of one position."""
        return self.heads * self.head_dim


def split_positions(facts: Facts) -> Edit | None:
    """Return the view that explains the sizes which clash in the failing call; None if there is none."""
    for view in _views(facts.reached.graph):
        for operand in _operands_behind(facts, view):
            right_shape = _right_shape(facts, view, operand)
            if right_shape is not None:
                return _suspect(facts, view, operand, right_shape)
    return None


def _suspect(facts: Facts, view: _View, operand: Operand, right_shape: Shape) -> Edit:
    name = _name_of_source(facts, view)
    what = (
        f"{name} has {view.tokens} tokens of {view.width} features, and the view at {view.op.source} makes "
        f"{view.positions} positions of them: {view.heads} heads of {view.head_dim} are "
        f"{view.split_width} features."
    )
    if not _divides_width(view, _features_expected(facts, operand)):
        return Edit("wrong_head_dim", what)
    head_dim = view.width // view.heads
    way = f"use head_dim {head_dim} in that view ({view.heads} heads, width {view.width})"
    return Edit("wrong_head_dim", what, (Change(operand, (("new_zeros", right_shape),)),), way)


def _name_of_source(facts: Facts, view: _View) -> str:
    """Return the variable that a view splits, or the call of its projection: `q_proj(...)`."""
    variable = facts.variables.get(view.source.id)
    if variable:
        return variable
    if view.projection.module:
        return f"{view.projection.module}(...)"
    return "the projection(...)"


def _views(graph: Graph) -> Iterator[_View]:
    """Yield the views that split a projection into heads and change the number of its positions."""
    for op in graph.recording.ops:
        if op.base_name not in ("view", "_unsafe_view", "reshape"):
            continue
        if not op.inputs or not _splits_last(op):
            continue
        tokens, width = op.inputs[0].shape[-2:]
        positions, heads, head_dim = op.output.shape[-3:]
        if not _is_multiple(tokens, positions):
            continue
        projection = graph.recording.producer(graph.before_moves(op.inputs[0]))
        if projection is None or not graph.is_projection(projection):
            continue
        yield _View(
            op=op,
            projection=projection,
            tokens=tokens,
            width=width,
            positions=positions,
            heads=heads,
            head_dim=head_dim,
        )


def _splits_last(view: Op) -> bool:
    """Return whether a view makes `… positions heads head_dim` of `… tokens width`."""
    before = view.inputs[0].shape
    after = view.output.shape
    if len(before) < 2 or len(after) != len(before) + 1:
        return False
    return before[:-2] == after[:-3]


def _is_multiple(tokens: int, positions: int) -> bool:
    """Return whether two different numbers are such that the larger is a multiple of the smaller."""
    if tokens == positions:
        return False
    smaller, larger = sorted((tokens, positions))
    return larger % smaller == 0


def _operands_behind(facts: Facts, view: _View) -> Iterator[Operand]:
    """Yield the operands of the failing call that are computed from a view."""
    for operand in facts.operands:
        sources = behind_of(facts.reached.graph, operand.given.tensor)
        if any(source.id == view.op.output.id for source in sources):
            yield operand


def _right_shape(facts: Facts, view: _View, operand: Operand) -> Shape | None:
    """Return the shape that an operand has with a right view; None if the view does not explain what clashes."""
    shape = operand.shape
    if len(shape) < 2:
        return None
    rows, width = shape[-2:]
    features = _features_expected(facts, operand)
    has_all_features = width * view.positions == features * view.tokens
    if features and rows == view.positions and has_all_features:
        return (*shape[:-2], view.tokens, features)
    if _meets_tokens(facts, view, operand):
        return _with_tokens(shape, view)
    return None


def _meets_tokens(facts: Facts, view: _View, operand: Operand) -> bool:
    """Return whether the positions of an operand clash with the tokens of one that is not computed from the view."""
    behind = list(_operands_behind(facts, view))
    not_behind = [near for near in facts.operands if near not in behind]
    return any(_clashes(facts, view, operand, near) for near in not_behind)


def _with_tokens(shape: Shape, view: _View) -> Shape:
    """Return a shape with the number of tokens in the place of the number of positions."""
    sizes = []
    for size in shape:
        if size == view.positions:
            sizes.append(view.tokens)
        else:
            sizes.append(size)
    return tuple(sizes)


def _features_expected(facts: Facts, operand: Operand) -> int:
    """Return the features that a weight expects of an operand; 0 if the call is no projection."""
    if facts.base == "linear" and operand.role == "input" and len(facts.operands) >= 2:
        weight = facts.operands[1]
        return weight.shape[-1]
    if facts.pair is None:
        return 0
    left, right = facts.pair
    if left is operand and right.is_parameter:
        return right.shape[0]
    return 0


def _clashes(facts: Facts, view: _View, operand: Operand, beside: Operand) -> bool:
    """Return whether the positions of an operand meet the tokens of another in one dimension."""
    if facts.base in BROADCASTS:
        sizes = zip(reversed(operand.shape), reversed(beside.shape), strict=False)
        return (view.positions, view.tokens) in sizes
    if facts.base == SDPA:
        return _clashes_with_mask(view, operand, beside)
    if facts.pair is None:
        return False
    if len(operand.shape) < 2 or len(beside.shape) < 2:
        return False
    # A product sums over the last dimension of its left factor, and over the rows of its right one.
    left, right = facts.pair
    if operand is left and beside is right:
        return left.shape[-1] == view.positions and right.shape[-2] == view.tokens
    if operand is right and beside is left:
        return right.shape[-2] == view.positions and left.shape[-1] == view.tokens
    return False


def _clashes_with_mask(view: _View, operand: Operand, beside: Operand) -> bool:
    """Return whether an operand has positions of a view, where the mask beside it has tokens."""
    if beside.role != "attn_mask":
        return False
    return operand.shape[-2] == view.positions and view.tokens in beside.shape[-2:]


def _divides_width(view: _View, features: int) -> bool:
    """Return whether a right view may have the same number of heads; a packed projection may need another."""
    if view.width % view.heads:
        return False
    packed_widths = (2 * view.split_width, 3 * view.split_width)
    is_packed = view.width in packed_widths and features != view.width
    return not is_packed

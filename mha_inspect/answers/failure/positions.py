"""Find a view with -1 that makes positions of features: 24 positions of 12 tokens, where heads are too narrow.

Such a view succeeds, and the forward fails later. The numbers of positions before and after the view show it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...graph.dataflow import Graph
from ...record.ops import Op
from .facts import BROADCASTS, Facts, Operand
from .reached import SDPA, behind_of
from .suspect import Suspect
from .tried import Fix, of_shape


def split_positions(facts: Facts) -> Suspect | None:
    """Return the view that explains the sizes which clash in the failing call; None if there is none."""
    graph = facts.reached.graph
    for op in _splits(graph):
        tokens, width = op.inputs[0].shape[-2:]
        positions, heads, head_dim = op.output.shape[-3:]
        for operand, stand_in in _explained(facts, op):
            name = _name_of(facts, op)
            says = (
                f"{name} has {tokens} tokens of {width} features, and the view at {op.source} makes {positions} "
                f"positions of them: {heads} heads of {head_dim} are {heads * head_dim} features."
            )
            return Suspect("wrong_head_dim", says, tuple(_fixes(facts, op, operand, stand_in)))
    return None


def _splits(graph: Graph) -> Iterator[Op]:
    """Yield the views of a projection, `… tokens width` to `… positions heads head_dim`, with other positions."""
    for op in graph.recording.ops:
        if op.base_name not in ("view", "_unsafe_view", "reshape") or not op.inputs:
            continue
        before, after = op.inputs[0].shape, op.output.shape
        if len(before) < 2 or len(after) != len(before) + 1 or before[:-2] != after[:-3]:
            continue
        tokens, positions = before[-2], after[-3]
        if tokens == positions or max(tokens, positions) % min(tokens, positions):
            continue
        projected = graph.recording.producer(graph.before_moves(op.inputs[0]))
        if projected is not None and graph.is_projection(projected):
            yield op


def _explained(facts: Facts, op: Op) -> Iterator[tuple[Operand, tuple[int, ...]]]:
    """Yield an operand made of a view whose sizes clash as the view explains, and its shape with a right view."""
    graph, tokens, positions = facts.reached.graph, op.inputs[0].shape[-2], op.output.shape[-3]
    made = [o for o in facts.operands if any(step.id == op.output.id for step in behind_of(graph, o.given.tensor))]
    others = [o for o in facts.operands if o not in made]
    for operand in made:
        if len(operand.shape) < 2:
            continue
        takes = _features_expected(facts, operand)
        if takes and operand.shape[-1] * positions == takes * tokens and operand.shape[-2] == positions:
            yield operand, (*operand.shape[:-2], tokens, takes)
        if any(_clashes(facts, operand, other, positions, tokens) for other in others):
            yield operand, tuple(tokens if size == positions else size for size in operand.shape)


def _features_expected(facts: Facts, operand: Operand) -> int:
    """Return the features that a weight expects of an operand; 0 if the call is no projection."""
    if facts.base == "linear" and len(facts.operands) >= 2 and operand.role == "input":
        return facts.operands[1].shape[-1]
    if facts.pair is not None and facts.pair[0] is operand and facts.pair[1].is_parameter:
        return facts.pair[1].shape[0]
    return 0


def _clashes(facts: Facts, operand: Operand, other: Operand, positions: int, tokens: int) -> bool:
    """Return whether the positions of an operand meet the tokens of another in one dimension."""
    if facts.base in BROADCASTS:
        sizes = zip(reversed(operand.shape), reversed(other.shape), strict=False)
        return any(pair == (positions, tokens) for pair in sizes)
    if facts.base == SDPA:
        return other.role == "attn_mask" and operand.shape[-2] == positions and tokens in other.shape[-2:]
    if facts.pair is None or min(len(operand.shape), len(other.shape)) < 2:
        return False
    left, right = facts.pair
    met = {id(left): left.shape[-1], id(right): right.shape[-2]}
    return met.get(id(operand)) == positions and met.get(id(other)) == tokens


def _fixes(facts: Facts, op: Op, operand: Operand, stand_in: tuple[int, ...]) -> Iterator[Fix]:
    width, (heads, head_dim) = op.inputs[0].shape[-1], op.output.shape[-2:]
    takes = _features_expected(facts, operand)
    is_packed = width in (2 * heads * head_dim, 3 * heads * head_dim) and takes != width
    if width % heads == 0 and not is_packed:
        text = f"use head_dim {width // heads} in that view ({heads} heads, width {width})"
        yield Fix(text, [(operand, of_shape(stand_in))])


def _name_of(facts: Facts, op: Op) -> str:
    """Return the variable that the view reads, or the module that made it."""
    graph = facts.reached.graph
    projected = graph.recording.producer(graph.before_moves(op.inputs[0]))
    module = "" if projected is None else projected.module
    return facts.variables.get(op.inputs[0].id) or f"{module or 'the projection'}(...)"

"""Compare the turns of a loop: one attention stands for all only if what is said of it is true for each.

    for head in range(heads):
        scores = q[:, head] @ k[:, head].mT * scale[head]           # batch query key, of this head
        contexts.append(scores.softmax(-2 if head == 1 else -1) @ v[:, head])

Heads whose scales or softmaxes differ stay attentions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..record.ops import Op, TensorRef
from .attention import Attention
from .axis import plain_name
from .dataflow import Graph, made_of
from .ids import ids_of
from .indices import counted
from .label import Axis, Label, Span
from .labels import Labels, shape_of
from .replay import region
from .rerun import Constants

_OF_ALL = ("concat", "output")
"""Stages that belong to all turns: only the last turn leads to them."""
_MASKS = frozenset(("add", "fill", "times", "bias", "made"))
"""Steps that a mask or a bias takes, which some pieces may not need."""
_HIDDEN = -1e4
"""A number of at most this masks its key out."""


def sources_of(graph: Graph, turn: Attention) -> list[TensorRef]:
    """Return what queries, keys and values are made of, before any projection and view."""
    sources = []
    for side in ("query", "key", "value"):
        source = turn.stages.get(side, turn.stages[f"{side[0]}_heads"])
        sources.append(graph.before_moves(source))
    return sources


def read_same_tokens(graph: Graph, turns: Sequence[Attention]) -> bool:
    """Return whether all turns read the same items and tokens of their sources, as heads do; unlike pieces of these."""
    for side, source in zip("qkv", sources_of(graph, turns[0]), strict=True):
        shape = shape_of(source)
        # An axis of its own for each dimension: a projection sums over the features alone.
        axes = [Axis((source.id, dim)) for dim in range(len(shape))]
        spans = {}
        for dim, axis in enumerate(axes):
            spans[axis] = Span.of(counted(len(shape), dim, shape[dim]))
        labels = Labels(graph, [(source, Label(shape, spans))])
        read = []
        for turn in turns:
            heads = turn.stages[f"{side}_heads"]
            labels.follow(region(graph, (source,), heads).ops)
            read.append(_tokens_of(labels, axes, heads))
        if not _all_equal(read):
            return False
    return True


def _tokens_of(labels: Labels, axes: Sequence[Axis], heads: TensorRef) -> list[object]:
    """Return where heads have which index of these axes; None for an axis along their features, or that is summed."""
    spans = labels.of(heads).spans
    places: list[object] = []
    for axis in axes:
        span = spans.get(axis)
        if span is None or span.varies([-1]):
            places.append(None)
        else:
            places.append((span.low.shape, span.low.tobytes()))
    return places


def heads_agree(graph: Graph, turns: Sequence[Attention], constants: Constants) -> bool:
    """Return whether all turns of a loop over heads compute alike, on tensors of equal sizes.

    Each head may have numbers of its own in its mask or bias: which keys are seen is read from every turn.
    """
    facts = []
    for turn in turns:
        facts.append(
            (
                _facts(turn),
                _sizes(turn),
                _masking(turn),
                _biases(graph, turn, constants),
                _on_the_way(graph, turn),
            )
        )
    return _all_equal(facts)


def pieces_agree(turns: Sequence[Attention]) -> bool:
    """Return whether all pieces of one attention compute alike. Their scales, sizes and masks may differ."""
    return _all_equal([_facts(turn)[1:] for turn in turns])


def _all_equal(facts: Sequence[object]) -> bool:
    return all(of_turn == facts[0] for of_turn in facts)


def common_scale(scales: Sequence[float | None]) -> float | None:
    """Return the scale of all pieces; None if they differ, or one is unknown."""
    return scales[0] if len(set(map(_digits, scales))) == 1 else None


def _facts(turn: Attention) -> tuple[object, ...]:
    """Return what is said about an attention as a whole, apart from its sizes and masks; the scale comes first."""
    scales = turn.scale, turn.scores_scale, *turn.early_scales.values()
    steps = []
    for kind, number in turn.scoring:
        if kind not in _MASKS:
            steps.append((kind, _digits(number)))
    return (
        tuple(map(_digits, scales)),
        turn.is_dot,
        turn.key_first,
        turn.value_first,
        turn.over_queries,
        turn.softmax_dim - len(turn.softmax.output.shape) if turn.softmax_dim >= 0 else turn.softmax_dim,
        plain_name(turn.softmax),
        turn.softmax.kernel is None,
        _names(turn.weighing),
        _names(turn.weights_path),
        tuple(steps),
        turn.sinks is None,
        turn.divided is None,
        turn.average_of_ones is None,
        len(turn.mixed_scores),
        len(turn.mixed_weights),
        _digits(turn.weights_scale),
        turn.is_over_memory,
    )


def _masking(turn: Attention) -> tuple[object, ...]:
    """Return how many masks an attention has, and in which order they and the other steps come."""
    steps = tuple(kind for kind, _ in turn.scoring)
    return len(turn.masks), len(turn.shifts), turn.has_factors, turn.seen is None, steps


def _biases(graph: Graph, turn: Attention, constants: Constants) -> list[bool | None]:
    """Return of each tensor that is added to the scores whether it is a bias and no mask; None if unknown."""
    product = turn.score_product.op
    ops = graph.recording.ops[product.index + 1 : turn.softmax.index + 1]
    scores = made_of({product.output.id}, ops)
    biases: list[bool | None] = []
    for op in turn.masks:
        if op.does("fills") or op.index > turn.softmax.index:
            continue
        for tensor in op.inputs:
            if tensor.id not in scores and tensor.numel > 1 and tensor.dtype != "bool":
                biases.append(_is_bias(constants.value(tensor)))
    return biases


def _is_bias(value: Tensor | None) -> bool | None:
    """Return whether numbers that are added to scores do more than mask keys out; None for unknown numbers."""
    if value is None:
        return None
    return bool(((value != 0) & (value > _HIDDEN)).any())


def _sizes(turn: Attention) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stage that a turn has of its own."""
    sizes = {}
    for name, tensor in turn.stages.items():
        if name not in _OF_ALL:
            sizes[name] = tensor.shape
    return sizes


def _on_the_way(graph: Graph, turn: Attention) -> tuple[object, ...]:
    """Return the names of the operations that compute heads: the projections, and what follows, e.g. a norm."""
    ways: list[object] = []
    for side in ("query", "key", "value"):
        projections = list(turn.earlier.get(side, ()))
        if side in turn.projections:
            projections.append(turn.projections[side])
        for op in projections:
            ways.append((op.base_name, graph.has_bias(op)))
        letter = side[0]
        projected = turn.stages.get(f"{letter}_proj")
        heads = turn.stages[f"{letter}_heads"]
        if projected is not None and projected.id != heads.id:
            ops = region(graph, (projected,), heads).ops
            ways.append(_names(ops))
        ways.append(side)
    return tuple(ways)


def _names(ops: Sequence[Op]) -> tuple[str, ...]:
    """Return the names of the operations that compute something, in order."""
    return tuple(plain_name(op) for op in ops if op.kind == "compute")


def _digits(number: float | None) -> str:
    """Return a number without its rounding error; empty for an unknown one."""
    return "" if number is None else f"{number:.6g}"


# -- what is joined ---------------------------------------------------------------------------------------------------


class Joined:
    """The contexts that are joined by a concatenation, a stack, or writes into one buffer, of all attentions."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._contexts: dict[int, list[TensorRef]] = {}

    def add(self, joint: Op, context: TensorRef) -> None:
        """Note that an operation joins a context with others."""
        self._contexts.setdefault(place_of_join(joint), []).append(context)

    def has_others(self, joint: Op) -> bool:
        """Return whether what is joined with contexts, and has the shape of one, is no context."""
        contexts = self._contexts.get(place_of_join(joint), [])
        ids = ids_of(contexts)
        shapes = {context.shape for context in contexts}
        pieces = self._written(joint) if joint.base_name == "copy_" else joint.inputs
        return any(piece.id not in ids and piece.shape in shapes for piece in pieces)

    def _written(self, joint: Op) -> list[TensorRef]:
        """Return all that is written into slices of the buffer that one context is written into."""
        storage = joint.output.storage
        written = []
        for op in self._graph.recording.ops:
            if op.base_name != "copy_" or len(op.inputs) < 2:
                continue
            if op.output.storage == storage:
                written.append(op.inputs[-1])
        return written


def place_of_join(joint: Op) -> int:
    """Return equal numbers for the operations that join the same contexts: writes into one buffer are several."""
    return joint.output.storage if joint.base_name == "copy_" else -1 - joint.index

"""Say what happens to queries, keys and scores inside an attention: positions, norms, a cache, a window, a bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..graph.attention import Attention
from ..graph.equal_layers import Layer
from ..graph.rerun import Constants
from ..reports.trace import Cache, Position, QKNorm
from .axes import AxisNames
from .named_run import NamedRun
from .operand_path import CacheSteps, NormSteps, OperandPath, cache_of, norm_of
from .positions import Added, Rotation, Turned, added_by, rotation_of
from .visibility import filled_slots, masks_of, noted, visibility, window_of

_STAGES = {"query": "q_heads", "key": "k_heads", "value": "v_heads"}


@dataclass(frozen=True)
class OperandSteps:
    """What becomes of queries, keys or values between their projection and the product."""

    norm: QKNorm | None = None
    cache: Cache | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    """Index of an operation that computes all this to `rms_norm`, `rotary`, or an empty text for the cache."""


@dataclass(frozen=True)
class InnerSteps:
    """What happens to queries, keys and scores inside one attention."""

    position: Position | None = None
    qk_norm: QKNorm | None = None
    cache: Cache | None = None
    window: int | None = None
    bias: bool = False
    operands: Mapping[str, OperandSteps] = field(default_factory=dict)
    """`q_heads`, `k_heads`, `v_heads` to their steps; a stage without any is absent."""
    added: Mapping[int, Added] = field(default_factory=dict)
    """Index of an operation that masks scores to what it adds."""
    frequencies: tuple[float, ...] = ()
    """The angle between neighbours in each pair of features that is rotated; empty if nothing is, or it is unknown."""


class InnerStepsReader:
    """Reads the inner steps of each attention of a run; `leaves` are values of inputs, parameters and buffers."""

    def __init__(self, run: NamedRun, leaves: Mapping[int, Tensor]) -> None:
        self._run = run
        self._graph = run.graph
        self._constants = Constants(run.graph, leaves)
        self._rotations: dict[Any, Rotation | None] = {}

    def read_the_same_in(self, layer: Layer) -> bool:
        """Return whether the constants that were read so far have the same content in an equal layer."""
        return self._constants.are_in(layer)

    def of(self, attention: Attention, names: AxisNames) -> InnerSteps:
        """Return the inner steps of an attention."""
        turn = attention.turns[0]
        paths = {side: OperandPath(self._graph, turn, side) for side in _STAGES}
        norms = {side: norm_of(path, names) for side, path in paths.items()}
        turned: dict[str, Turned | None] = {}
        for side in ("query", "key"):
            turned[side] = self._turned(turn, names, side)
        who_sees = partial(self._seen, attention, names)
        caches: dict[str, CacheSteps | None] = {}
        for side in ("key", "value"):
            path = paths[side]
            if turn.earlier.get(side):
                path = OperandPath(self._graph, turn, side, from_first=True)
            caches[side] = cache_of(path, names, who_sees)
        operands: dict[str, OperandSteps] = {}
        for side, stage in _STAGES.items():
            steps = _operand_steps(
                paths[side],
                norms[side],
                turned.get(side),
                caches.get(side),
            )
            if steps != OperandSteps():
                operands[stage] = steps
        masks = partial(masks_of, self._graph, turn)
        added = added_by(self._graph, self._constants, turn, masks)
        rotary = _rotary(turned["query"], turned["key"])
        if rotary is None:
            added, rotary = self._with_rotated_products(added, turn, names)
        norm = norms["query"] or norms["key"]
        cache = caches["key"]
        return InnerSteps(
            position=rotary or _first_position(added),
            qk_norm=None if norm is None else norm.norm,
            cache=None if cache is None else cache.cache,
            window=self._window(attention, names),
            bias=turn.has_factors or any(part.bias for part in added.values()),
            operands=operands,
            added=added,
            frequencies=_frequencies(turned["query"], turned["key"]),
        )

    def _turned(self, attention: Attention, names: AxisNames, side: str) -> Turned | None:
        """Return the rotation of queries or keys, after or before the last of their projections; None without one."""
        for from_first in (False, True):
            path = OperandPath(self._graph, attention, side, from_first=from_first)
            turned = rotation_of(path, names, constants=self._constants, rotations=self._rotations)
            if turned is not None:
                return turned
        return None

    def _with_rotated_products(
        self, added: Mapping[int, Added], turn: Attention, names: AxisNames
    ) -> tuple[dict[int, Added], Position | None]:
        """Return what is added to scores, with the rotation in each second product, and the last such rotation.

        Example: the features that are rotated have a product of their own, beside that of the others.
        """
        rotary: Position | None = None
        changed = dict(added)
        for index, part in added.items():
            if part.product is not None:
                like = replace(turn, score_product=part.product)
                query = self._turned(like, names, "query")
                key = self._turned(like, names, "key")
                rotary = _rotary(query, key)
                side = "key" if query is None else "query"
                rotated = "both" if query and key else side
                changed[index] = replace(part, position=rotary, rotated=rotated if rotary else "")
        return changed, rotary

    def _seen(self, attention: Attention, names: AxisNames) -> Tensor | None:
        """Return which query sees which key; None if unknown."""
        visible = visibility(self._graph, attention, names)
        return None if visible is None else visible.seen

    def _window(self, attention: Attention, names: AxisNames) -> int | None:
        """Return how many keys a query sees back; None without a limit, or if it is unknown."""
        sight = noted(self._graph, attention)
        if sight is None or not sight.pairs or names.num_windows > 1:
            return None
        visible = visibility(self._graph, attention, names)
        # Heads with windows of their own have no window together.
        if visible is None or visible.seen is None or not visible.is_alike:
            return None
        return window_of(filled_slots(self._graph, attention, visible.seen))


def _operand_steps(
    path: OperandPath,
    norm: NormSteps | None,
    turned: Turned | None,
    cached: CacheSteps | None,
) -> OperandSteps:
    """Return the norm, the rotation and the cache on the way of one side, with the names of their operations."""
    names: dict[int, str] = {}
    if cached is not None:
        names.update(dict.fromkeys(cached.ops, ""))
    if norm is not None:
        for index in _in_span(path, norm.span):
            names[index] = f"{norm.norm.kind}_norm"
    if turned is not None:
        for index in _in_span(path, turned.span):
            names[index] = "rotary"
    return OperandSteps(
        norm=None if norm is None else norm.norm,
        cache=None if cached is None else cached.cache,
        names=names,
    )


def _in_span(path: OperandPath, span: range) -> Iterator[int]:
    """Yield the indices of the operations of a path in a span, and its first one, which may be beside the path."""
    yield span.start
    for op in path.ops:
        if op.index in span:
            yield op.index


def _rotary(query: Turned | None, key: Turned | None) -> Position | None:
    """Return the rotation of queries and keys as a position; None if neither is rotated."""
    either = query or key
    if either is None:
        return None
    return Position(
        "rotary",
        layout=either.rotation.layout,
        dims=either.rotation.dims,
        query_offset=None if query is None else query.rotation.offset,
        key_offset=None if key is None else key.rotation.offset,
    )


def _frequencies(query: Turned | None, key: Turned | None) -> tuple[float, ...]:
    """Return the angles between neighbours of the queries; of the keys if only these are rotated."""
    either = query or key
    return () if either is None else either.rotation.frequencies


def _first_position(added: Mapping[int, Added]) -> Position | None:
    """Return the position in the first number that is added to scores with one."""
    for part in added.values():
        if part.position is not None:
            return part.position
    return None


def bias_steps(
    attention: Attention,
    added: Mapping[int, Added],
) -> tuple[tuple[str, float | None], ...]:
    """Return `attention.scoring` with what an `add` adds that is no mask.

    This is a `bias`, a further `product` of queries and keys or a `rotary` one, or is `made` of the scores.
    """
    ops = list(attention.masks)
    steps: list[tuple[str, float | None]] = []
    for kind, number in attention.scoring:
        op = ops.pop(0) if ops and kind in ("add", "fill", "times") else None
        part = added.get(op.index) if op is not None and kind == "add" else None
        names = [] if part is None else _kinds_added(part)
        if op in attention.shifts:
            names = ["bias"]
        if names:
            steps += [(name, None) for name in names]
        else:
            steps.append((kind, number))
    return tuple(steps)


def _kinds_added(part: Added) -> list[str]:
    """Return the kinds of step in what is added: `bias` and `add` for a bias with a mask; empty for a mask alone."""
    if part.product is not None:
        return [f"rotated {part.rotated}" if part.rotated else "product"]
    if part.of_scores:
        return ["made"]
    if not part.bias:
        return []
    return ["bias", "add"] if part.mask else ["bias"]

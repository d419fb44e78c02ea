"""Measure whether a whole part of a run, from projections to their common result, is one attention.

An attention may be written so that no product of it is to be seen: key by key, of distances, in chunks of the keys
whose sums are merged. What it computes is the same. With queries, keys and values drawn at random,

    context = softmax(scale · q · kᵀ + bias) · v                # batch query (heads head_dim)

- it is twice as large when the values are twice as large;
- values that are zero but for one token show the weights that this token gets, feature by feature;
- features with the same weights are a head;
- `log weights = scale · q · kᵀ + bias - a number for each query`, with one scale and one bias in all answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .dataflow import Graph
from .ids import by_id, ids_of, in_order
from .replay import NotReplayedError, Region, Replay, in_layout, measuring, region
from .rerun import Constants

_MOST_OPS = 4000
"""Operations between projections and their common result; with more it is not looked at."""
_MOST_TOKENS = 64
"""Keys up to which the weights of each are measured."""
_MOST_WORK = 1 << 28
"""Numbers that are computed for all keys together; with more it is not measured."""
_EXACT = 1e-6
"""The largest difference of the logarithm of a weight from the formula."""
_NOTHING = 1e-12


_ORDER = ("batch", "token", "heads", "head_dim", "features")
"""The order of the names of dimensions in `batch token features`."""


@dataclass(frozen=True)
class Layout:
    """How the dimensions of a tensor are those of `batch token heads head_dim`."""

    dims: tuple[str, ...]
    """For each dimension `batch`, `token`, `heads`, `head_dim` or `features`."""

    @property
    def _places(self) -> list[int]:
        """The dimensions in the order of `batch token heads head_dim`."""
        places = range(len(self.dims))
        return sorted(places, key=lambda place: _ORDER.index(self.dims[place]))

    def features_last(self, numbers: Tensor) -> Tensor:
        """Return numbers as `batch token features`."""
        moved = numbers.permute(self._places)
        if "batch" not in self.dims:
            moved = moved.unsqueeze(0)
        return moved.flatten(2)

    def as_given(self, numbers: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `batch token features` in the dimensions of the tensor."""
        places = self._places
        moved = numbers.reshape([shape[place] for place in places])
        return moved.permute([places.index(place) for place in range(len(places))])


@dataclass(frozen=True)
class Operand:
    """The queries, the keys or the values of a measured attention."""

    tensor: TensorRef
    layout: Layout


@dataclass(frozen=True, eq=False)
class WholeAttention:
    """One attention, as it was measured."""

    query: Operand
    key: Operand
    value: Operand
    context: Operand
    heads: int
    key_heads: int
    scale: float
    unit: bool
    """Whether queries and keys are divided by their length."""
    seen: Tensor | None
    """Which query sees which key: a bool `query key`; None if each sees all."""
    bias: Tensor | None
    """Finite numbers that are added to the scores: `heads query key` or `query key`; None if there are none."""
    ops: tuple[Op, ...]
    """The operations that compute it."""


def whole_attention(
    graph: Graph,
    context: TensorRef,
    constants: Constants,
) -> WholeAttention | None:
    """Return the attention that gives a tensor; None if it is no attention, or if that cannot be measured."""
    for operands in _operands(graph, context, constants):
        part = region(graph, operands, context)
        if any(op.does("draws") for op in part.ops):
            continue  # what is dropped in the run is in its numbers
        numbers = sum(op.output.numel for op in part.ops)
        if numbers * max(operands[0].shape) > _MOST_WORK:
            continue
        try:
            with measuring():
                replay = Replay(graph, part, constants)
                attention = None if replay.unknown else _Measurement(part, replay).attention()
        except NotReplayedError:
            continue
        if attention is not None:
            return attention
    return None


# -- operands ---------------------------------------------------------------------------------------------------------


Triple = tuple[TensorRef, TensorRef, TensorRef]


def _operands(graph: Graph, context: TensorRef, constants: Constants) -> list[Triple]:
    """Return what may be the queries, keys and values of a context, in any order.

    First the last tensors that only one projection has a part in, e.g. after a rotation; then the first that are read
    more than once, e.g. before their lengths are taken.
    """
    ops = operations_behind(graph, context)
    if ops is None:
        return []
    sources = _sources(graph, ops, constants)
    if len(sources) < 3:
        sources = _sliced(graph, ops, sources)
    if len(sources) != 3:
        return []
    ways = _Ways(graph, ops, sources)
    triples: list[Triple] = []
    first, second, third = (ways.last_alone(source) for source in sources)
    if first is not None and second is not None and third is not None:
        triples.append((first, second, third))
    first, second, third = (ways.read_once(source) for source in sources)
    if (first, second, third) not in triples:
        triples.append((first, second, third))
    return triples


def operations_behind(graph: Graph, context: TensorRef) -> list[Op] | None:
    """Return the operations behind a tensor that depend on inputs, up to projections; None if there are too many."""
    needed: dict[int, Op] = {}
    queue = [context]
    while queue:
        tensor = queue.pop()
        op = graph.producer(tensor)
        if op is None or op.index in needed:
            continue
        if graph.is_projection(op) or not graph.comes_from_inputs(tensor):
            continue
        needed[op.index] = op
        queue += op.inputs
        if len(needed) > _MOST_OPS:
            return None
    return in_order(needed)


def _sources(graph: Graph, ops: Sequence[Op], constants: Constants) -> list[TensorRef]:
    """Return the results of projections, and the inputs, that operations read."""
    results: set[int] = set()
    for op in ops:
        results.update(ids_of(op.outputs))
        if op.kind == "write":
            results.update(ids_of(graph.results(op)))
    sources: dict[int, TensorRef] = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.id in results or not graph.comes_from_inputs(tensor):
                continue
            if constants.value(tensor) is None:
                sources[tensor.id] = tensor
    return list(sources.values())


def _sliced(graph: Graph, ops: Sequence[Op], sources: list[TensorRef]) -> list[TensorRef]:
    """Return the slices that packed queries, keys and values are cut into, in the place of the packed ones."""
    inside = {op.index for op in ops}
    slices: list[TensorRef] = []
    for source in sources:
        slices += _slices_of(graph, source, inside) or [source]
    return slices


def _slices_of(graph: Graph, source: TensorRef, inside: set[int]) -> list[TensorRef]:
    """Return the slices that a tensor is cut into, at most moved and with a bias before; empty if it is not cut."""
    tensor = source
    while True:
        readers = _readers(graph, tensor, inside)
        if readers and all(map(_cuts, readers)):
            pieces: dict[int, TensorRef] = {}
            for op in readers:
                pieces.update(by_id(op.outputs))
            return list(pieces.values())
        if len(readers) != 1:
            return []
        reader = readers[0]
        if not graph.moves(reader) and not graph.adds_bias(reader):
            return []
        tensor = reader.output


def _readers(graph: Graph, tensor: TensorRef, inside: set[int]) -> list[Op]:
    """Return the operations with these indices that read a tensor."""
    return [op for op in graph.readers(tensor) if op.index in inside]


def _cuts(op: Op) -> bool:
    return op.does("cuts") or op.base_name in ("select", "unbind")


class _Ways:
    """The operations behind a context, and which sources each of their tensors is computed from."""

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[Op],
        sources: Sequence[TensorRef],
    ) -> None:
        self._graph = graph
        self._ops = ops
        self._inside = {op.index for op in ops}
        self._behind: dict[int, frozenset[int]] = {}
        for source in sources:
            self._behind[source.id] = frozenset({source.id})
        for op in ops:
            read = self._read_by(op)
            for output in op.outputs:
                self._behind.setdefault(output.id, read)
            if op.kind == "write":
                for tensor in graph.results(op):
                    self._behind[tensor.id] = read | self._behind.get(tensor.id, frozenset())

    def _read_by(self, op: Op) -> frozenset[int]:
        """Return the sources that the inputs of an operation are computed from."""
        read: set[int] = set()
        for tensor in op.inputs:
            read |= self._behind.get(tensor.id, frozenset())
        return frozenset(read)

    def last_alone(self, source: TensorRef) -> TensorRef | None:
        """Return the last tensor of one source alone, that all that meets other sources is moved from; else None."""
        alone = frozenset({source.id})

        def moves_alone(op: Op) -> bool:
            return self._graph.moves(op) and self._behind.get(op.inputs[0].id) == alone

        roots: dict[int, TensorRef] = {}
        for op in self._ops:
            if all(self._behind.get(output.id) == alone for output in op.outputs):
                continue
            for tensor in op.inputs:
                if self._behind.get(tensor.id) == alone:
                    root = self._graph.before(tensor, moves_alone)
                    roots[root.id] = root
        if len(roots) != 1:
            return None
        (root,) = roots.values()
        return self._in_dimensions(root, alone) if root.numel == source.numel else None

    def read_once(self, source: TensorRef) -> TensorRef:
        """Return the end of the operations that each are alone in reading the result of the one before."""
        alone = frozenset({source.id})
        tensor = source
        while True:
            reader = self._reader(tensor, alone)
            if reader is None or self._graph.moves(reader):
                return self._in_dimensions(tensor, alone)
            tensor = reader.output

    def _reader(self, tensor: TensorRef, alone: frozenset[int]) -> Op | None:
        """Return the one operation that reads a tensor, and nothing of other sources; None if there are several."""
        readers = _readers(self._graph, tensor, self._inside)
        if len(readers) != 1:
            return None
        reader = readers[0]
        if len(reader.outputs) != 1:
            return None
        output = reader.output
        keeps_size = output.numel == tensor.numel and output.id != tensor.id
        return reader if keeps_size and self._behind.get(output.id) == alone else None

    def _in_dimensions(self, tensor: TensorRef, alone: frozenset[int]) -> TensorRef:
        """Return a tensor after the view that gives its rows the dimensions of batch and tokens."""
        while len(tensor.shape) < 3:
            reader = self._reader(tensor, alone)
            if reader is None or not self._graph.moves(reader):
                break
            tensor = reader.output
        return tensor


# -- the measurement --------------------------------------------------------------------------------------------------


_LAYOUTS_OF_CONTEXT: dict[int, tuple[Layout, ...]] = {
    2: (Layout(("token", "features")),),
    3: (
        Layout(("batch", "token", "features")),
        Layout(("token", "batch", "features")),
        Layout(("heads", "token", "head_dim")),
    ),
    4: (Layout(("batch", "heads", "token", "head_dim")), Layout(("batch", "token", "heads", "head_dim"))),
}
"""The number of dimensions of a context to the layouts that it may have."""


@dataclass(frozen=True)
class _Run:
    """A run with drawn operands."""

    drawn: Mapping[int, Tensor]
    """The id of each operand to its numbers."""
    answer: Tensor
    """The context."""


@dataclass(frozen=True)
class _Operands:
    """The operands of an attention, and its context."""

    query: Operand
    key: Operand
    value: Operand
    context: Operand


@dataclass(frozen=True)
class _Draw:
    """Drawn queries and keys, and the weights that they give."""

    query: Tensor
    key: Tensor
    weights: _Weights


@dataclass(frozen=True)
class _Fit:
    """The formula of the weights."""

    scale: float
    seen: Tensor
    """Which query sees which key: `query key`."""
    bias: Tensor | None
    """`heads query key` or `query key`; None if there is none."""
    key_heads: int


class _Measurement:
    """Asks a part of a run with three operands whether it is an attention."""

    def __init__(self, part: Region, replay: Replay) -> None:
        self._part = part
        self._replay = replay
        self._context = part.target
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self, tensor: TensorRef) -> Tensor:
        return torch.randn(tensor.shape, generator=self._generator, dtype=torch.float64)

    def _laid(self, given: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the content of sources in the memory layout that they were recorded with."""
        tensors = by_id(self._part.sources)
        return {number: in_layout(value, tensors[number]) for number, value in given.items()}

    def _run(self, given: Mapping[int, Tensor]) -> Tensor:
        return self._replay.run(self._laid(given))[self._context.id]

    def attention(self) -> WholeAttention | None:
        """Return the attention; None if it is none."""
        drawn = {source.id: self._draw(source) for source in self._part.sources}
        run = _Run(drawn, self._run(drawn))
        if not bool(run.answer.isfinite().all()):
            return None
        if len(run.answer.shape) not in _LAYOUTS_OF_CONTEXT:
            return None
        operands = self._operands(run)
        return None if operands is None else self._fitted(operands)

    def _operands(self, run: _Run) -> _Operands | None:
        """Return which of the sources is the queries, the keys and the values; None if that is unclear."""
        values = [source for source in self._part.sources if self._is_value(source, run)]
        if len(values) != 1:
            return None
        value = values[0]
        out = self._layout_of_context(value, run)
        if out is None:
            return None
        operands: dict[int, Operand] = {}
        for source in self._part.sources:
            layout = self._layout(source, run, out)
            if layout is None:
                return None
            operands[source.id] = Operand(source, layout)
        of_values = operands.pop(value.id)
        queries = [operand for operand in operands.values() if self._is_query(operand, run, out)]
        if len(queries) != 1:
            return None
        query = queries[0]
        del operands[query.tensor.id]
        key = next(iter(operands.values()))
        return _Operands(query, key, of_values, Operand(self._context, out))

    def _is_value(self, source: TensorRef, run: _Run) -> bool:
        """Return whether the answer is twice as large when this is twice as large, and else unchanged."""
        doubled = run.drawn[source.id] * 2
        twice = self._run({**run.drawn, source.id: doubled})
        return _is_near(twice, run.answer * 2)

    def _touched(self, source: TensorRef, run: _Run, place: int, index: int) -> Tensor:
        """Return where the answer changes when one index of a dimension changes."""
        changed = run.drawn[source.id].clone()
        part = changed.select(place, index)
        part.copy_(torch.randn(part.shape, generator=self._generator, dtype=torch.float64))
        again = self._run({**run.drawn, source.id: changed})
        return (again - run.answer).abs() > _NOTHING

    def _layout_of_context(self, value: TensorRef, run: _Run) -> Layout | None:
        """Return the dimensions of the answer, as every answer of an attention in these layouts has them."""
        for layout in _LAYOUTS_OF_CONTEXT[len(run.answer.shape)]:
            if self._keeps_apart(layout, value, run):
                return layout
        return None

    def _keeps_apart(self, layout: Layout, value: TensorRef, run: _Run) -> bool:
        """Return whether items of the batch, and features, of the values reach the answer apart, and tokens do not."""
        if len(value.shape) != len(layout.dims):
            return True
        for place, name in enumerate(layout.dims):
            size = value.shape[place]
            if size != run.answer.shape[place] or size < 2:
                continue
            index = size - 1 if name in ("features", "head_dim") else 0
            touched = self._touched(value, run, place, index)
            reached = int(touched.movedim(place, 0).flatten(1).any(1).sum())
            if name in ("batch", "heads", "head_dim") and reached != 1:
                return False
            # The first token reaches other ones too, also where later ones are masked out.
            if name == "token" and reached < 2:
                return False
        return True

    def _layout(self, source: TensorRef, run: _Run, out: Layout) -> Layout | None:
        """Return the dimensions of an operand, by what changes in the answer when the last index of each changes."""
        rank = len(source.shape)
        if rank == 2 and "batch" not in out.dims:
            return Layout(("token", "features"))
        if rank not in (3, 4):
            return None
        names: list[str] = []
        for place in range(rank - 1):
            names.append(self._name_of(source, place, names, run, out))
        names.append("features" if rank == 3 else "head_dim")
        if len(set(names)) != rank or "token" not in names:
            return None
        return Layout(tuple(names))

    def _name_of(
        self,
        source: TensorRef,
        place: int,
        before: Sequence[str],
        run: _Run,
        out: Layout,
    ) -> str:
        """Return the name of a dimension of an operand, given the names of those before."""
        may_be_batch = "batch" in out.dims and "batch" not in before
        items = run.answer.shape[out.dims.index("batch")] if may_be_batch else 0
        if items == 1 and source.shape[place] == 1:
            return "batch"
        touched = self._touched(source, run, place, source.shape[place] - 1)
        if items > 1:
            changed = touched.movedim(out.dims.index("batch"), 0).flatten(1).any(1)
            if int(changed.sum()) == 1:
                return "batch"
        features = out.features_last(touched).flatten(0, 1).any(0)
        is_of_heads = len(source.shape) == 4 and not bool(features.all())
        return "heads" if is_of_heads else "token"

    def _is_query(self, operand: Operand, run: _Run, out: Layout) -> bool:
        """Return whether each token of an operand changes the answer of that token alone."""
        source = operand.tensor
        place = operand.layout.dims.index("token")
        count = source.shape[place]
        is_any = False
        for token in sorted({0, min(1, count - 1), count // 2, count - 1}):
            touched = out.features_last(self._touched(source, run, place, token))
            reached = touched.any(2).any(0).nonzero().flatten().tolist()
            if reached not in ([], [token]):
                return False
            is_any = is_any or bool(reached)
        return is_any

    # -- weights ------------------------------------------------------------------------------------------------------

    def _fitted(self, operands: _Operands) -> WholeAttention | None:
        value = operands.value
        tokens = value.layout.features_last(torch.zeros(value.tensor.shape)).shape[1]
        if tokens > _MOST_TOKENS or tokens < 2:
            return None
        numbers = []
        for _ in range(2):
            query = self._draw(operands.query.tensor)
            key = self._draw(operands.key.tensor)
            numbers.append((query, key))
        draws = []
        for query, key in numbers:
            weights = self._weights(operands, query, key)
            if weights is None:
                return None
            draws.append(_Draw(query, key, weights))
        heads = draws[0].weights.heads
        if draws[1].weights.heads != heads:
            return None
        for unit in (False, True):
            fit = _fit(operands, draws, unit=unit)
            if fit is None:
                continue
            return WholeAttention(
                query=operands.query,
                key=operands.key,
                value=value,
                context=operands.context,
                heads=heads,
                key_heads=fit.key_heads,
                scale=fit.scale,
                unit=unit,
                seen=None if bool(fit.seen.all()) else fit.seen,
                bias=fit.bias,
                ops=self._part.ops,
            )
        return None

    def _weights(
        self,
        operands: _Operands,
        query: Tensor,
        key: Tensor,
    ) -> _Weights | None:
        """Return the weights of each token: the answers to values that are zero but for that token."""
        value = operands.value
        nothing = torch.zeros(value.tensor.shape, dtype=torch.float64)
        batch, tokens, features = value.layout.features_last(nothing).shape
        unit = 1 + torch.rand(features, generator=self._generator, dtype=torch.float64)
        given = {
            operands.query.tensor.id: query,
            operands.key.tensor.id: key,
            value.tensor.id: nothing,
        }
        content = self._replay.run(self._laid(given))
        columns = []
        for token in range(tokens):
            numbers = torch.zeros(batch, tokens, features, dtype=torch.float64)
            numbers[:, token] = unit
            alone = in_layout(value.layout.as_given(numbers, value.tensor.shape), value.tensor)
            content_of_token = self._replay.run_again(content, value.tensor, alone)
            answer = operands.context.layout.features_last(content_of_token[self._context.id])
            if answer.shape[0] != batch or answer.shape[2] != features:
                return None
            columns.append(answer / unit)
        by_feature = torch.stack(columns, -1).permute(0, 2, 1, 3)  # batch features query key
        sums = by_feature.sum(-1)
        return _heads_of(by_feature) if _is_near(sums, torch.ones_like(sums)) else None


def _fit(operands: _Operands, draws: Sequence[_Draw], *, unit: bool) -> _Fit | None:
    """Return the scale, who sees whom, the bias, and the heads of the keys; None if no scale and bias fit."""
    products = []
    for draw in draws:
        product = _product(operands, draw, unit=unit)
        if product is None:
            return None
        products.append(product)
    first, second = draws
    seen = _seen(first.weights)
    pattern = seen[0, 0]
    is_one_pattern = bool((seen == pattern).all())
    if not is_one_pattern or not torch.equal(seen, _seen(second.weights)):
        return None
    logs = [_centred(draw.weights.by_head.log(), seen) for draw in draws]
    scores = [_centred(product.numbers, seen) for product in products]
    scale = _scale(
        _centred(second.weights.by_head.log() - first.weights.by_head.log(), seen),
        _centred(products[1].numbers - products[0].numbers, seen),
    )
    if scale is None:
        return None
    rest = logs[0] - scale * scores[0]
    again = logs[1] - scale * scores[1]
    if not _is_near(rest, again, _EXACT) or not _is_alike(rest):
        return None
    bias: Tensor | None = rest[0]
    if float(rest[0].abs().max()) <= _EXACT:
        bias = None
    elif _is_alike(rest[0]):
        bias = rest[0, 0]
    return _Fit(scale, pattern, bias, products[0].key_heads)


def _scale(difference: Tensor, given: Tensor) -> float | None:
    """Return the number that the differences of products are multiplied by; None if there is none, or it is zero."""
    square = (given * given).sum().clamp(min=_NOTHING)
    scale = float(f"{float((difference * given).sum() / square):.9g}")
    rest = (difference - scale * given).abs().max()
    return None if float(rest) > _EXACT or not scale else scale


def _seen(weights: _Weights) -> Tensor:
    """Return which query sees which key: `batch heads query key`."""
    return weights.by_head.log().isfinite() & (weights.by_head > _NOTHING)


def _is_alike(numbers: Tensor) -> bool:
    """Return whether all parts along the first dimension have the same numbers."""
    return _is_near(numbers, numbers[:1].expand_as(numbers), _EXACT)


@dataclass(frozen=True)
class _Products:
    """The products of queries and keys."""

    numbers: Tensor
    """`batch heads query key`."""
    key_heads: int


def _product(operands: _Operands, draw: _Draw, *, unit: bool) -> _Products | None:
    """Return the products of drawn queries and keys; None if they have no whole number of heads, or other batches."""
    batch, heads = draw.weights.by_head.shape[:2]
    given = operands.query.layout.features_last(draw.query)
    features = operands.key.layout.features_last(draw.key)
    # Heads may be folded into the batch of one operand and not of another.
    if not batch == len(given) == len(features) or given.shape[2] % heads:
        return None
    queries = split(given, heads)
    size = queries.shape[-1]
    key_heads, rest = divmod(features.shape[2], size)
    if rest or not key_heads or heads % key_heads:
        return None
    keys = split(features, key_heads)
    if unit:
        queries = queries / queries.norm(dim=-1, keepdim=True)
        keys = keys / keys.norm(dim=-1, keepdim=True)
    repeated = keys.repeat_interleave(heads // key_heads, 1)
    return _Products(queries @ repeated.transpose(-1, -2), key_heads)


@dataclass(frozen=True, eq=False)
class _Weights:
    by_head: Tensor
    """`batch heads query key`."""

    @property
    def heads(self) -> int:
        return self.by_head.shape[1]


def _heads_of(by_feature: Tensor) -> _Weights | None:
    """Return the weights of heads, given those of features: neighbours with the same weights, as many in each head."""
    features = by_feature.shape[1]
    starts = [0]
    for feature in range(1, features):
        if not _is_near(by_feature[:, feature], by_feature[:, starts[-1]]):
            starts.append(feature)
    size = features // len(starts)
    is_even = size * len(starts) == features
    if not is_even or starts != list(range(0, features, size)):
        return None
    return _Weights(by_feature[:, ::size])


def split(numbers: Tensor, heads: int) -> Tensor:
    """Return `batch token (heads head_dim)` as `batch heads token head_dim`."""
    return numbers.reshape(*numbers.shape[:2], heads, -1).transpose(1, 2)


def _centred(numbers: Tensor, seen: Tensor) -> Tensor:
    """Return numbers less the mean of what each query sees: `batch heads query key`."""
    kept = torch.where(seen, numbers, 0.0)
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    mean = kept.sum(-1, keepdim=True) / count
    return torch.where(seen, kept - mean, 0.0)


def _is_near(left: Tensor, right: Tensor, error: float = 1e-9) -> bool:
    return bool(torch.allclose(left, right, rtol=error, atol=error))

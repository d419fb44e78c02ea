"""Find where attention may be: scores are where the positions of two sides meet, values where one of them is summed.

    scores = q @ k.transpose(-1, -2)            # batch heads query key
    context = weights_of(scores) @ v            # the sum over the keys

Queries and keys may be added, subtracted or concatenated in place of a product. How the weights are made of the scores
is not looked at here: `response` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .axis import Axis, plain_name, size_of, wide
from .dataflow import Graph, inside
from .mixing import mixings_of
from .products import Joint, Product, ProductPath, product_of, sides_of
from .replay import region
from .response import cuts_of

_FAR = 300
"""Operations between scores and weights after which two products are no pair."""
_TRIED = 4
"""The most scores that are tried for one product with values."""
_LOOKED = 12
"""The most products that are looked at for them."""
_JOINS = ("add", "sub", "cat", "distance")
"""The operations beside products in which queries and keys meet."""
_BATCHED = ("bmm", "baddbmm")
"""Products of two batches of matrices. A projection is never one of them: its weight has no batch."""


class Meeting(NamedTuple):
    """Scores and a product with values that may be one attention."""

    scores: Product
    values: ProductPath
    """The product with the values, and its factor that is the weights, or moved from them."""
    over: frozenset[Axis]
    """The axes that the product with the values sums over."""


class Meetings:
    """The scores that may be behind each product with values of a run."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._products = list(graph.products.values())
        self._behind = _products_behind(graph)
        self._learned = _with_learned_factor(graph)

    def averages(self) -> Iterator[ProductPath]:
        """Yield each product of activations with the factor that may be weights, in the order of the run."""
        for product in self._products:
            yield ProductPath(product, (), product.left)
            yield ProductPath(product, (), product.right)
        yield from _averages_over_one(self._graph)

    def products(self, values: ProductPath) -> list[Meeting]:
        """Return the products that may be the scores behind weights, the most likely first."""
        over = frozenset(wide(values.averaged(self._graph.dimensions)))
        scores = self._nearest(values.tensor, over) or self._of_learned_queries(values, over)
        return [Meeting(product, values, over) for product in scores]

    def joins(self, values: ProductPath) -> Iterator[Meeting]:
        """Yield the operations behind weights that join queries and keys otherwise, the nearest first."""
        graph = self._graph
        over = frozenset(wide(values.averaged(graph.dimensions)))
        size = values.tensor.numel
        if not over or not size or not graph.comes_from_inputs(values.tensor):
            return

        def through(op: Op) -> bool:
            if not op.outputs or op.output.numel < size:
                return False
            return graph.passes_on(op) or graph.reduces(op) or op.does("softmax")

        for step in graph.back(values.tensor, through):
            op = graph.producer(step.tensor)
            joint = None if op is None else _joint(graph, op, values.tensor, over)
            if joint is not None:
                yield Meeting(joint, values, over)

    def memories(self) -> Iterator[Meeting]:
        """Yield the meetings of queries with a memory: the keys and the values are parameters.

            q = self.to_q(x)                                            # x: batch query embed
            return (q @ self.keys.mT).softmax(-1) @ self.values         # keys, values: memory embed

        Two layers with a softmax between them are the same arithmetic. They are no attention: the memory has no bias,
        is multiplied where the scores are, and is read by queries that were projected before.
        """
        graph = self._graph
        scored: list[tuple[Product, set[Axis]]] = []
        for product, given in self._learned:
            if not _is_memory(graph, product, given):
                continue
            values = ProductPath(product, (), given)
            over = frozenset(wide(values.averaged(graph.dimensions)))
            for scores, slots in scored:
                is_of_module = scores.multiply.module == product.multiply.module
                if over and is_of_module and over <= slots:
                    yield Meeting(scores, values, over)
            slots = _slots(graph, product, given)
            if slots and _is_projected(graph, given, product.multiply.module):
                scored.append((product, slots))

    def nearest_to(self, tensor: TensorRef, over: frozenset[Axis]) -> Product | None:
        """Return the most likely scores behind a tensor, e.g. behind a softmax of a run that raised."""
        return next(iter(self._nearest(tensor, over)), None)

    def _nearest(self, weights: TensorRef, over: frozenset[Axis]) -> list[Product]:
        """Return the products behind weights that no other candidate depends on, the most likely scores first.

        These are of two inputs, are not gathered on the way, and sum over most features: a position may have a product
        of its own.
        """
        graph = self._graph
        nearest: list[_Scores] = []
        remaining = self._behind.get(weights.id, 0)
        looked = 0
        while remaining and looked < _LOOKED and len(nearest) < _TRIED:
            place = remaining.bit_length() - 1
            remaining ^= 1 << place
            looked += 1
            product = self._products[place]
            if not _may_be_scores(graph, product, over):
                continue
            remaining &= ~self._behind[product.op.output.id]
            ops = region(graph, (product.op.output,), weights).ops
            if len(ops) <= _FAR and _mixes_heads_alone(graph, product, ops, over):
                is_of_inputs = graph.comes_from_inputs(product.left, product.right)
                is_unlikely = not is_of_inputs or any(op.does("gathers") for op in ops)
                has_keys = not over.isdisjoint(_compared(graph, product))
                nearest.append(
                    _Scores(is_unlikely, not has_keys, -_features(graph, product), product.op.index, product)
                )
        nearest.sort(key=lambda scores: scores[:4])
        return [scores.product for scores in nearest]

    def _of_learned_queries(self, values: ProductPath, over: frozenset[Axis]) -> list[Product]:
        """Return the last product of keys with learned queries behind weights; none if there is no such product.

            scores = self.query @ k.transpose(-1, -2)            # query: slots head_dim, k: batch key head_dim

        The weights are summed over positions of the keys: over output features a projection is a router. A layer
        outside of the module that multiplies by the values is a scorer.
        """
        graph = self._graph
        module = values.product.multiply.module
        for product, keys in reversed(self._learned):
            op = product.op
            if op.index >= values.product.op.index:
                continue
            is_of_module = op.base_name in _BATCHED or inside(module, op.module)
            if not is_of_module or not _has_positions(graph, product, keys, over):
                continue
            ops = region(graph, (op.output,), values.tensor).ops
            if 0 < len(ops) <= _FAR and not _is_of_pairs(graph, keys):
                return [product]
        return []


def _products_behind(graph: Graph) -> dict[int, int]:
    """Return the id of each tensor to the products that it depends on, as bits: bit n is the n-th product.

    What is read from memory depends on all that was written into it before.
    """
    behind: dict[int, int] = {}
    written: dict[int, int] = {}
    places = {index: place for place, index in enumerate(graph.products)}
    for op in graph.recording.ops:
        bits = 1 << places[op.index] if op.index in places else 0
        for tensor in op.inputs:
            bits |= behind.get(tensor.id, 0) | written.get(tensor.storage, 0)
        if not bits:
            continue
        for output in op.outputs:
            behind[output.id] = bits
        if op.kind == "write":
            written[op.output.storage] = written.get(op.output.storage, 0) | bits
            for tensor in graph.results(op):
                behind[tensor.id] = behind.get(tensor.id, 0) | bits
    return behind


def _averages_over_one(graph: Graph) -> Iterator[ProductPath]:
    """Yield the multiplications of values by the weights of a single key, which need no sum: einsum multiplies."""
    for op in graph.recording.ops:
        if op.base_name != "mul" or len(op.inputs) != 2:
            continue
        for weights, values in (op.inputs, op.inputs[::-1]):
            is_wider = op.output.numel > weights.numel
            if is_wider and graph.comes_from_inputs(values) and _has_one_key(graph, weights):
                yield ProductPath(Product(op, op, *op.inputs), (), weights)


def _has_one_key(graph: Graph, weights: TensorRef) -> bool:
    """Return whether a tensor is moved from a softmax over a single score."""
    maker = graph.producer(graph.before_moves(weights))
    if maker is None or not maker.does("softmax"):
        return False
    return maker.output.shape[int(maker.args[1])] == 1


class _Scores(NamedTuple):
    """A product that may be the scores, in the order of likelihood."""

    is_unlikely: bool
    """Whether it is not of two inputs, or is gathered on the way."""
    lacks_keys: bool
    """Whether the axis that the values are summed along is none of its own."""
    features: int
    """How many products are summed for each score, with a minus: many come first."""
    place: int
    """The index of its operation."""
    product: Product


def _may_be_scores(graph: Graph, scores: Product, over: frozenset[Axis]) -> bool:
    """Return whether a product compares positions, among them those that are averaged over."""
    if not any(map(graph.is_activation, (scores.left, scores.right))):
        return False
    axes = scores.axes(graph.dimensions)
    compared = _compared(graph, scores)
    summed = {*axes.left_inner, *axes.right_inner}
    if over.isdisjoint(compared | summed | set(axes.batch)):
        return True  # the axis was lost on the way, e.g. in a sort: only a measurement can say
    return not over.isdisjoint(compared) and over.isdisjoint(summed - compared)


def _compared(graph: Graph, scores: Product) -> set[Axis]:
    """Return the axes of the positions that a product compares."""
    axes = scores.axes(graph.dimensions)
    return {*axes.rows, *axes.columns}


def _features(graph: Graph, scores: Product) -> int:
    """Return how many products are summed for each score."""
    return size_of(scores.axes(graph.dimensions).left_inner)


def _mixes_heads_alone(graph: Graph, scores: Product, ops: tuple[Op, ...], over: frozenset[Axis]) -> bool:
    """Return whether every projection among operations sums over heads: batch axes of the scores product.

    The output features of such a projection are heads too, and no keys: what averages over features that a projection
    made is a gate, e.g. over the branches of a convolution.
    """
    heads = set(wide(scores.axes(graph.dimensions).batch))
    for mixing in mixings_of(graph, ops):
        if not graph.dimensions.along(mixing.source, mixing.place) <= heads:
            return False
        made = graph.dimensions.along(mixing.op.output, mixing.place)
        if not over.isdisjoint(made):
            return False
        heads |= made
    return True


# -- learned queries and memories -------------------------------------------------------------------------------------


def _with_learned_factor(graph: Graph) -> list[tuple[Product, TensorRef]]:
    """Return the products of an activation with a parameter, each with its activation."""
    products = []
    for op in graph.recording.ops:
        product = None if op.base_name == "addmm" else product_of(graph.recording, op)
        if product is None:
            continue
        activation = only_activation(graph, product)
        if activation is not None and graph.comes_from_inputs(activation):
            products.append((product, activation))
    return products


def only_activation(graph: Graph, product: Product) -> TensorRef | None:
    """Return the factor of a product that is an activation, if the other is a weight; otherwise None."""
    if graph.is_weight(product.left) == graph.is_weight(product.right):
        return None
    return product.right if graph.is_weight(product.left) else product.left


def _has_positions(graph: Graph, product: Product, keys: TensorRef, over: frozenset[Axis]) -> bool:
    """Return whether the weights are summed over an axis of the keys, apart from those of a batch and of features."""
    dims = graph.dimensions.of(keys)
    if product.multiply.does("product"):
        dims = dims[-2:]  # without those that the factors of a batched product have in common
    axes = product.axes(graph.dimensions)
    features = {*axes.left_inner, *axes.right_inner}
    return not over.isdisjoint(set(wide(*dims)) - features)


def _is_of_pairs(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor is computed of each query with each key, as in `(q[:, :, None] + k[:, None]).tanh()`."""

    def through(op: Op) -> bool:
        return op.pointwise or graph.moves(op) or graph.is_projection(op) or op.does("joins")

    for step in graph.back(tensor, through):
        op = graph.producer(step.tensor)
        if op is None or len(op.inputs) != 2 or graph.is_projection(op):
            continue
        sizes = [graph.before_repeats(factor).numel for factor in op.inputs]
        whole = sum(factor.numel for factor in op.inputs) if op.does("joins") else op.output.numel
        if graph.comes_from_inputs(*op.inputs) and max(sizes) * 2 <= whole:
            return True
    return False


def _is_memory(graph: Graph, product: Product, given: TensorRef) -> bool:
    """Return whether the learned factor of a product may be the keys or the values of a memory: it has no bias."""
    memory = product.right if given is product.left else product.left
    return memory.id in graph.learned and not graph.has_bias(product.op)


def _slots(graph: Graph, product: Product, given: TensorRef) -> set[Axis]:
    """Return the axes of a memory that its keys are counted along."""
    memory = product.right if given is product.left else product.left
    axes = product.axes(graph.dimensions)
    return set(wide(*graph.dimensions.of(memory))).difference(axes.left_inner, axes.right_inner)


def _is_projected(graph: Graph, query: TensorRef, module: str) -> bool:
    """Return whether the module of the scores projects the queries, and may scale, bias or norm them."""

    def through(op: Op) -> bool:
        if not inside(op.module, module):
            return False
        return graph.moves(op) or op.pointwise or op.does("norms")

    for step in graph.back(query, through):
        op = graph.producer(step.tensor)
        if op is not None and graph.is_projection(op) and inside(op.module, module):
            return True
    return False


# -- scores without a dot product -------------------------------------------------------------------------------------


def _joint(graph: Graph, op: Op, weights: TensorRef, over: frozenset[Axis]) -> Joint | None:
    """Return the scores of queries and keys that an operation joins; None if it joins none of them.

    The scores are the first tensor with a number for each query and key, after the bias of the call that gives it:

        scores = linear(tanh(q[:, :, None] + k[:, None]))           # batch query key
    """
    name = "distance" if op.does("distances") else plain_name(op)
    if name not in _JOINS or len(op.inputs) != 2:
        return None
    if not graph.comes_from_inputs(*op.inputs) or not _has_keys_on_one_side(graph, op, over):
        return None
    cuts = cuts_of(graph, region(graph, (op.output,), weights))
    between: list[Op] = []
    for place, cut in enumerate(cuts):
        between += cut.ops
        following = cuts[place + 1].op if place + 1 < len(cuts) else None
        is_of_call = following is not None and between and following.call == between[-1].call
        if cut.tensor.numel <= weights.numel and not is_of_call:
            break
    left, right = op.inputs
    return Joint(
        op=between[-1] if between else op,
        multiply=op,
        left=_before_broadcast(graph, left),
        right=_before_broadcast(graph, right),
        between=tuple(between),
    )


def _has_keys_on_one_side(graph: Graph, op: Op, over: frozenset[Axis]) -> bool:
    """Return whether one factor of a join alone has the axes that the values are summed over."""
    left, right = False, False
    for side in sides_of(graph.dimensions, op):
        if not over.isdisjoint(side.whole):
            left = left or bool(side.left)
            right = right or bool(side.right)
    return left != right


def _before_broadcast(graph: Graph, factor: TensorRef) -> TensorRef:
    """Return a factor of a join before it was repeated, and before dimensions of size one were added to it."""
    once = graph.before_repeats(factor)
    return graph.before(once, lambda op: op.does("broadcasts") and _keeps_sizes(op))


def _keeps_sizes(op: Op) -> bool:
    """Return whether input and output have the same sizes, apart from sizes of 1."""
    return _sizes_above_one(op.inputs[0]) == _sizes_above_one(op.output)


def _sizes_above_one(tensor: TensorRef) -> list[int]:
    return [size for size in tensor.shape if size != 1]


# -- factors ----------------------------------------------------------------------------------------------------------


def moved_for(graph: Graph, op: Op, product: Product) -> bool:
    """Return whether an operation only rearranges a factor for the product: in the same call, or to broadcast it.

    torch.einsum permutes its operands before `bmm`; `q[:, :, None] * k[:, None]` adds dimensions before `mul`.
    """
    if not graph.moves(op):
        return False
    if op.call == product.multiply.call:
        return True
    if product.multiply is product.op or not op.does("broadcasts"):
        return False
    return op.base_name == "expand" or _keeps_sizes(op)


def as_written(graph: Graph, product: Product, factor: TensorRef) -> TensorRef:
    """Return a factor as the user wrote it: before it was rearranged for the product."""
    return graph.before(factor, lambda op: moved_for(graph, op, product))

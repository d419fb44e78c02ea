"""Say what was found of products that follow one another without a softmax: their shapes, their axes, what is between.

Which axis is which is told by what the products sum over. Features are what projections give; the rest of what comes
in is batch or sequence. Where the first product sums over features it compares queries with keys; where it sums over
what is no feature it sums over the sequence, keys with values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..graph.dimensions import Axis, size_of, wide
from ..graph.found import Attention
from ..graph.linear import Chain, features_of, find_chains
from ..graph.products import Product, ProductAxes
from ..graph.softmax import is_guard
from ..graph.walk import Graph
from ..record.ops import Op, TensorRef
from ..reports.trace import Factor, Form, ProductPair, Role
from ..reports.trace import Product as Shown
from .roles import Group
from .tokens import name_dimension, write_dimension

_NAMES = {"native_layer_norm": "layer norm", "native_group_norm": "group norm", "native_dropout": "dropout"}
_IN_SUM = {"sum", "abs"}
"""What a sum is made with that something is divided by, beside what keeps it from zero."""


def product_pairs(graph: Graph, attentions: Iterable[Attention]) -> tuple[ProductPair, ...]:
    """Every pair that is no part of an attention, in order; those that are alike, once, with their number."""
    chains = find_chains(graph, attentions)
    features = features_of(graph) if chains else set()
    counts: dict[ProductPair, int] = {}
    for chain in chains:
        pair = _Writer(graph, chain, features).pair()
        counts[pair] = counts.get(pair, 0) + 1
    return tuple(replace(pair, count=count) for pair, count in counts.items())


@dataclass(frozen=True)
class _Side:
    """A factor: what it would be in attention, and the names of its axes."""

    tensor: TensorRef
    role: Role = ""
    groups: tuple[Group, ...] = ()


class _Writer:
    """Writes one pair."""

    def __init__(self, graph: Graph, chain: Chain, features: set[Axis]) -> None:
        self._graph = graph
        self._chain = chain
        self._features = features
        self._first = chain.first.axes(graph.dimensions)
        self._second = chain.second.axes(graph.dimensions)
        self._form = self._read_form()

    def pair(self) -> ProductPair:
        """The pair as plain data."""
        left, right, other = self._sides()
        return ProductPair(
            module=self._chain.first.op.module,
            form=self._form,
            first=self._product(self._chain.first, (left, right), (*left.groups, *right.groups)),
            between=tuple(self._between()),
            second=self._product(self._chain.second, (other,), self._result(other)),
            count=1,
        )

    def _read_form(self) -> Form:
        """What the first product compares, where there is evidence."""
        first = self._first
        rows, columns, inner = (
            bool({*wide(dim)} & self._features) for dim in (first.rows, first.columns, first.left_inner)
        )
        if inner and not rows and not columns:
            return "scores"
        return "state" if rows and columns and not inner else ""

    def _sides(self) -> tuple[_Side, _Side, _Side]:
        """The two factors of the first product, and the other factor of the second."""
        chain, first, second = self._chain, self._first, self._second
        carried_left = chain.carried is chain.second.left
        beside = chain.second.right if carried_left else chain.second.left
        if not self._form:
            return _Side(chain.first.left), _Side(chain.first.right), _Side(beside)
        met, other_met = second.left_inner, second.right_inner
        free = second.right_columns
        if not carried_left:
            met, other_met, free = second.right_inner, second.left_inner, second.left_rows
        rows_meet = bool({*wide(met)} & {*first.rows}) and not {*wide(met)} & {*first.columns}
        if self._form == "scores":
            shared, names, last = "head_dim", ("query", "key"), ("key", "head_dim")
            roles: tuple[Role, Role, Role] = ("q", "k", "v")
            if size_of(free) != size_of(first.left_inner):
                last = ("key", "v_head_dim")
        else:
            shared, names, last = "key", ("v_head_dim", "head_dim"), ("head_dim", "query")
            roles = ("v", "k", "q")
        if rows_meet:
            names, roles = (names[1], names[0]), (roles[1], roles[0], roles[2])
        outer, other_outer = self._outer(first, "key"), self._outer(second, "query")
        left = ((names[0], first.left_rows), (names[0], first.rows), (shared, first.left_inner))
        right = ((names[1], first.right_columns), (names[1], first.columns), (shared, first.right_inner))
        other = ((last[0], other_met), (last[0], met), (last[1], free))
        return (
            _Side(chain.first.left, roles[0], (*left, *outer)),
            _Side(chain.first.right, roles[1], (*right, *outer)),
            _Side(beside, roles[2], (*other, *other_outer)),
        )

    def _outer(self, axes: ProductAxes, position: str) -> tuple[Group, ...]:
        """What a product runs over: heads are features, and the rest is batch, where it is one axis.

        A state for each position stands beside the batch; what the states are summed up along tells which is which.
        """
        heads = tuple(atom for atom in wide(axes.batch) if atom in self._features)
        running = self._running() if self._form == "state" else set()
        rest = tuple(atom for atom in axes.batch if atom not in self._features and atom not in running)
        rest = wide(rest) or rest
        along = tuple(atom for atom in axes.batch if atom in running)
        return ("heads", heads), (position, along), ("batch", rest if len(rest) == 1 else ())

    def _running(self) -> set[Axis]:
        """The axis along which the first product is summed up on its way to the second."""
        sums = [op for op in self._chain.between if op.base_name.rstrip("_") == "cumsum"]
        return {atom for op in sums for atom in wide(self._graph.dimensions.of(op.inputs[0])[int(op.args[1])])}

    def _result(self, other: _Side) -> tuple[Group, ...]:
        """Names of the axes of what the second product gives."""
        if not self._form:
            return ()
        second, first = self._second, self._first
        free = second.rows if self._chain.carried is self._chain.second.left else second.columns
        kept = first.left_rows if {*wide(free)} & {*first.rows} else first.right_columns
        name = "query" if self._form == "scores" else "v_head_dim"
        return (name, free), (name, kept), *other.groups

    def _product(self, product: Product, sides: tuple[_Side, ...], groups: tuple[Group, ...]) -> Shown:
        result = self._graph.after_call(product.op)
        factors = []
        for side in sides:
            tensor = self._graph.before_call(product.multiply, side.tensor)
            factors.append(Factor(side.role, tensor.shape, self._axes(tensor, side.groups)))
        return Shown(
            factors=tuple(factors),
            shape=result.shape,
            axes=self._axes(result, groups),
            name=product.multiply.name,
            source=product.multiply.source,
        )

    def _axes(self, tensor: TensorRef, groups: tuple[Group, ...]) -> str:
        # A view puts axes of size one beside any other: only a batch of one is told by where it is.
        known = [(name, dim if name == "batch" else wide(dim)) for name, dim in groups]
        return " ".join(write_dimension(name_dimension(dim, known)) for dim in self._graph.dimensions.of(tensor))

    def _between(self) -> Iterator[str]:
        """What is done to the first product on its way to the second."""
        tensor = self._chain.first.op.output
        for op in self._chain.between:
            if not self._graph.moves(op) and op.base_name != "_to_copy":
                yield self._said(op, tensor)
            tensor = op.output if op.outputs else tensor

    def _said(self, op: Op, tensor: TensorRef) -> str:
        """One operation: what it is, and the shapes of what else goes into it."""
        number = self._graph.scale_of(op) if self._graph.is_scale(op) else None
        if number is not None:
            return f"scale {number:.4g}"
        name = _NAMES.get(op.base_name, op.base_name.strip("_"))
        others = [other for other in op.inputs if other.id != tensor.id and other.numel > 1]
        if name == "div" and len(others) == 1 and self._is_sum_of(others[0], tensor):
            return "div by its sum"
        return " ".join([name, *(str(list(other.shape)) for other in others)]) if op.pointwise else name

    def _is_sum_of(self, total: TensorRef, tensor: TensorRef) -> bool:
        """Whether a tensor is the sum of another, kept from zero at most."""
        graph = self._graph
        steps = graph.back(total, lambda op: graph.moves(op) or op.base_name in _IN_SUM or is_guard(op))
        return any(step.tensor.id == tensor.id and any(op.base_name == "sum" for op in step.path) for step in steps)

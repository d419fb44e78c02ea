"""Find the role of each axis of an attention's products: batch, heads, windows, query, key or features of a head.

An example, torch's layer with 3 heads. The product of scores is `[6, 5, 4] @ [6, 4, 5]`:

>>> import torch
>>> from mha_inspect.running.subject import Subject
>>> layer, x = torch.nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
>>> run = Subject(layer, (x, x, x), {}).recorded()
>>> roles = Roles(run.attentions[0][0], run.graph.dimensions)
>>> {name: size_of(getattr(roles, name)) for name in ("batch", "heads", "query", "key", "head_dim")}
{'batch': 2, 'heads': 3, 'query': 5, 'key': 5, 'head_dim': 4}

The product sums over head_dim; its rows are queries, its columns keys. Its dimension of 6 consists of two axes, 2 and 3
(`graph.dimensions`). The axis of 2 is also in the input, outside the features, so it is the batch. The axis of 3 is
not, so it is the heads.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ..graph.attention import Attention, positions_of
from ..graph.dimensions import Axis, Dim, Dimensions, resolve, size_of, wide

Group = tuple[str, Dim]
"""A name and its atoms, in row-major order."""


@dataclass(frozen=True)
class _Folded:
    """The axes that a product runs over, by role."""

    batch: Dim
    heads: Dim = ()
    windows: Dim = ()


class Roles:
    """The axes of the two products of an attention, by role."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._attention = attention
        self._dimensions = dimensions
        self._averaged = attention.value_product.axes(dimensions)
        axes = attention.score_product.axes(dimensions)
        query, key = axes.rows, axes.columns
        # The axes of the factors, before the product unifies them.
        self._source_query, self._source_key = axes.left_rows, axes.right_columns
        if attention.key_first:
            query, key = key, query
            self._source_query, self._source_key = self._source_key, self._source_query
        self.head_dim: Dim = axes.left_inner
        # Usually the same axis as in the left factor; different if the two could not be unified.
        self._right_head_dim: Dim = axes.right_inner
        # Key axes that the softmax does not run over count as axes that the product runs over.
        beside = self._beside_keys(key)
        self.key = _without(key, beside)
        self._source_key = _without(self._source_key, beside)
        batch_rows = self._batch_of_queries(query)
        query = _without(query, batch_rows)
        self._source_query = _without(self._source_query, batch_rows)
        folded = (*batch_rows, *axes.batch, *beside)
        outside = self._outside()
        self.over_features = self._is_over_features(outside, query)
        """Whether features attend to features: the product of scores sums over positions."""
        self.within_tokens = self._is_within_tokens(outside, query, folded)
        """Whether the heads of one token attend to one another: they are the rows and the columns of its scores."""
        head_rows = query if self.within_tokens else self._head_rows(outside, query)
        self.mixes_positions = not self.within_tokens and self._mixes_positions(outside, head_rows, query)
        """Whether a view without a transpose splits the heads, so that each head sees features of a few positions."""
        if self.mixes_positions:
            head_rows = ()
        self.query = _without(query, head_rows)
        self._source_query = _without(self._source_query, head_rows)
        # A product with a single query per step gathers separate keys for each query.
        self.own_keys: Dim = () if wide(self.query) else self._apart(folded)
        """The query axes if every query has its own gathered keys, e.g. unfolded windows; otherwise empty."""
        if self.own_keys:
            self.query = self._source_query = self.own_keys
        split = self._split(_without(folded, self.own_keys), outside, head_rows)
        self.batch = split.batch
        self.windows = split.windows
        self.maps = self._maps_of_a_head(split.heads)
        """The axes that count several weight maps of one head, e.g. in differential attention; otherwise empty."""
        self.heads = _without(split.heads, self.maps)
        if self.mixes_positions:
            self.heads = (*self.windows, *self.heads)
            self.windows = ()
        self._read_values()

    def _read_values(self) -> None:
        """Take the axes of the product of weights and values."""
        averaged = self._averaged
        value_query, self.value_dim = averaged.rows, averaged.columns
        self._value_key = averaged.right_inner
        if self._attention.value_first:
            value_query, self.value_dim = self.value_dim, value_query
            self._value_key = averaged.left_inner
        # The query axes of the context.
        beside = {*self.heads, *self.batch, *self.windows}
        self._value_query = self.own_keys or _without(value_query, beside)
        self.own_value_width = size_of(self.value_dim) != size_of(self.head_dim)
        if self.over_features:  # features and positions are exchanged in the product of scores
            self.query, self.head_dim = self.head_dim, self.query
            self.key, self._right_head_dim = self._right_head_dim, self.key
            self.value_dim, self._value_key = self._value_key, self.value_dim
            self.own_value_width = False

    # -- axes of the input --------------------------------------------------------------------------------------------

    def _atoms(self, stage: str) -> set[Axis]:
        """Return the atoms of a stage; empty if the stage is absent."""
        tensor = self._attention.stages.get(stage)
        if tensor is None:
            return set()
        return set(chain(*self._dimensions.of(tensor)))

    def _beside_keys(self, key: Dim) -> Dim:
        """Return axes beside the keys in the product of scores that are a batch of the softmax and of the values."""
        attention = self._attention
        if attention.over_queries:
            return ()
        over = self._dimensions.along(attention.softmax.output, attention.softmax_dim)
        beside = _without(wide(key), over)
        return _within(beside, self._averaged.batch)

    def _batch_of_queries(self, query: Dim) -> Dim:
        """Return the batch among the rows of `batch query embed` times the keys of a memory, which have no batch."""
        if not self._attention.is_over_memory or "query" not in self._attention.stages:
            return ()
        dims = positions_of(self._attention, self._dimensions, "query")
        if len(dims) < 2:
            return ()
        return _within(wide(query), wide(dims[0]))

    def _outside(self) -> set[Axis]:
        """Return the atoms of the inputs before their projections, except those of their features.

        The keys may have a batch that learned queries lack.
        """
        stages = self._attention.stages
        outside: set[Axis] = set()
        for side in ("query", "key"):
            if side not in stages:
                continue
            dims = positions_of(self._attention, self._dimensions, side)
            op = self._attention.projections.get(side)
            if op is not None and op.base_name == "convolution":  # a strided convolution has new positions
                dims += self._dimensions.of(op.output)[2:]
            outside.update(*dims)
        if outside and "key" not in stages:
            # Keys that are given without a projection have their batch first.
            first = self._dimensions.of(stages["k_heads"])[0]
            outside |= set(first) & self._dimensions.given_whole
        return outside

    def _features(self, *sides: str, by_head: bool = False) -> set[Axis]:
        """Return the atoms of the dimensions in which projections of these sides put heads and their features.

        With `by_head` also outside the last, where a projection gives the heads a dimension.
        """
        features: set[Axis] = set()
        for stage, side in (("q_proj", "query"), ("k_proj", "key"), ("concat", "output")):
            tensor = self._attention.stages.get(stage)
            if tensor is None or not tensor.shape:
                continue
            if sides and side not in sides:
                continue
            # A projection that gives the heads a dimension (einsum) may put them anywhere outside the queries.
            may_be_anywhere = by_head or (stage == "q_proj" and not sides)
            if len(tensor.shape) > 3 and may_be_anywhere:
                features |= self._atoms(stage)
            else:
                place = self._attention.feature_place(side, len(tensor.shape))
                features.update(self._dimensions.of(tensor)[place])
        return features

    # -- kinds of attention -------------------------------------------------------------------------------------------

    def _is_over_features(self, outside: set[Axis], query: Dim) -> bool:
        """Return whether the product of scores sums over positions, and its rows are features."""
        rows = set(wide(query))
        summed = set(wide(self.head_dim))
        if not rows or not summed or not summed <= outside:
            return False
        return rows <= self._features() - outside

    def _head_rows(self, outside: set[Axis], query: Dim) -> Dim:
        """Return the query heads that are rows of one product, beside the queries: those of a single key head."""
        if not outside or self.over_features:
            return ()
        if len(wide(query)) > 1:
            features = self._features()
        else:
            has_queries = "query" in self._attention.stages
            is_step = has_queries and not wide(*self._after_first_dim())
            of_queries = self._features("query", by_head=is_step)
            of_output = self._features("output", by_head=is_step)
            features = of_queries & of_output
        return _without(_within(query, features), outside)

    def _after_first_dim(self) -> list[Dim]:
        """Return the positions of the queries that are given, without their first dimension: the batch, usually."""
        return list(positions_of(self._attention, self._dimensions, "query")[1:])

    def _mixes_positions(self, outside: set[Axis], head_rows: Dim, query: Dim) -> bool:
        """Return whether queries and keys mix positions with features, or the view to heads cuts across features."""
        features = self._features() - outside
        if head_rows and not features.isdisjoint(wide(self._source_key)):
            return not outside.isdisjoint(wide(query))
        stages = self._attention.stages
        if "q_proj" not in stages:
            return False
        ranks = [len(stages[stage].shape) for stage in ("q_proj", "q_heads", "k_heads")]
        if ranks != [3, 4, 4]:
            return False
        # Queries that are columns of a product of one sequence with itself have another axis in it than before.
        _, *dims = self._dimensions.of(stages["q_proj"])
        projected = set(chain(*dims))
        if not projected.isdisjoint((*query, *self._source_query, *self.head_dim)):
            return False
        batch, heads, length, head_dim = stages["q_heads"].shape
        *rows, width = stages["q_proj"].shape
        if rows != [batch, length]:
            return False
        width_of_side = heads * head_dim
        return width in (width_of_side, width_of_side * self._sides_in_matrix())

    def _sides_in_matrix(self) -> int:
        """Return how many sides the projection of the queries gives: 3 if keys and values are packed with them."""
        projections = self._attention.projections
        same = [op for op in projections.values() if op is projections["query"]]
        return len(same)

    def _is_within_tokens(self, outside: set[Axis], query: Dim, folded: Dim) -> bool:
        """Return whether rows and columns of the scores are features of one token, and each token has its own scores.

        The features of a vector, `batch embed`, may be split into tokens on purpose: in front of the projections.
        """
        stages = self._attention.stages
        if "q_proj" not in stages or "k_proj" not in stages:
            return False
        if len(stages["q_proj"].shape) < 2:
            return False
        rows = set(wide(self._source_query))
        columns = set(wide(self._source_key))
        if not rows or not columns or not rows.issuperset(wide(query)):
            return False
        if not rows <= self._features("query") - outside:
            return False
        if not columns <= self._features("key") - outside:
            return False
        return set(wide(folded)) == set(wide(tuple(outside)))

    def _apart(self, folded: Dim) -> Dim:
        """Return the axes of the input's positions that the product of scores runs over; otherwise empty."""
        keys = set(wide(self._source_key))
        if "query" not in self._attention.stages or not keys:  # one query and one key
            return ()
        positions = set(chain(*self._after_first_dim()))
        apart = _within(wide(folded), positions)
        if keys.isdisjoint(self._atoms("k_proj")):
            return apart
        dims = self._dimensions.of(self._attention.stages["k_heads"])
        heads = list(chain(*dims))
        for atom in apart:
            if heads.count(atom) < 2 or atom not in self._source_key:
                return ()  # the single query has all keys
        return apart

    # -- batch, heads and windows -------------------------------------------------------------------------------------

    def _split(self, folded: Dim, outside: set[Axis], head_rows: Dim) -> _Folded:
        """Return the batch, the heads and the windows among the axes that the product of scores runs over."""
        if self.within_tokens:
            return _Folded(_within(folded, outside), heads=head_rows)
        if not outside:
            return self._split_by_order(folded)
        return self._split_by_input(folded, outside, head_rows)

    def _split_by_order(self, folded: Dim) -> _Folded:
        """Return the batch, the heads and the windows without a projection: batch comes before heads."""
        q_heads = self._dimensions.of(self._attention.stages["q_heads"])
        rank = len(q_heads)
        is_single = rank <= 3 and len(folded) < 2
        if is_single or (rank < 3 and not self._attention.is_dot):
            return _Folded(folded)
        batch: Dim = ()
        if rank > 3:
            batch = _within(folded, q_heads[0])
        elif rank == 3:
            batch = _within(folded, folded[:-1])
        rest = _without(folded, batch)
        in_dims = [dim for dim in q_heads[1:] if _within(wide(dim), rest)]
        if len(in_dims) > 1 and self._given_keys().issuperset(wide(rest)):
            return _Folded(batch)  # nothing shows which of them are heads
        return _Folded(batch, heads=wide(rest) or rest[:1])

    def _split_by_input(self, folded: Dim, outside: set[Axis], head_rows: Dim) -> _Folded:
        """Return the batch, the heads and the windows: the batch and the windows are axes of the input's positions."""
        batch, rest = _within(folded, outside), _without(folded, outside)
        windows = self._windows_in(batch)
        heads = wide(rest)
        features = self._features()
        has_features = not features.isdisjoint((*heads, *head_rows))
        if has_features and "query" in self._attention.stages:
            windows = (*windows, *_without(heads, features))
            heads = _within(heads, features)
        heads += head_rows
        if not heads and not self._attention.branches:
            heads = self._single_head(rest, outside)
        return _Folded(_without(batch, windows), heads, windows)

    def _windows_in(self, batch: Dim) -> Dim:
        """Return the windows among axes of the input.

        They are cut from the sequence, so they are next to the rest of it somewhere; the batch never is.
        """
        not_cut = {*batch[:1], *self._dimensions.given_whole}
        left = _without(batch, not_cut)
        if not left:
            return ()
        rows = set(wide(self.query, self.key))
        return _within(left, self._dimensions.beside(rows, apart_from=not_cut))

    def _single_head(self, rest: Dim, outside: set[Axis]) -> Dim:
        """Return the axis of a single head: it shows only as a dimension of size one, if there is exactly one such."""
        ones = list(rest)
        for dim in self._dimensions.of(self._attention.stages["q_heads"]):
            if len(dim) == 1 and dim[0].size == 1:
                ones.append(dim[0])
        heads = _without(tuple(ones), outside)
        return heads[:1] if len(set(heads)) == 1 else ()

    def _given_keys(self) -> set[Axis]:
        """Return the axes of the keys before any repeat."""
        keys = self._attention.before_repeats["key"]
        return set(wide(*self._dimensions.of(keys)))

    @property
    def own_values(self) -> Dim:
        """Query axes if every query averages its own gathered values (top-k attention); otherwise empty."""
        batch = set(self._averaged.batch)
        if self.own_keys or not batch.issuperset(wide(self.query)):
            return ()
        return self.query

    def _maps_of_a_head(self, heads: Dim) -> Dim:
        """Return head axes of the scores whose weights are combined before the values; otherwise empty."""
        attention = self._attention
        if attention.mixed_weights:
            return ()
        names = {op.base_name.rstrip("_") for op in attention.weights_path}
        if names.isdisjoint(("add", "sub", "sum")):
            return ()
        axes = self._averaged
        averaged = {*axes.batch, *axes.rows, *axes.columns}
        if averaged.isdisjoint(wide(heads)):
            return ()
        return _without(wide(heads), averaged)

    # -- heads of keys ------------------------------------------------------------------------------------------------

    @cached_property
    def kv_heads(self) -> Dim:
        """The head axes that keys and values were projected to."""
        is_dot = self._attention.is_dot
        if self.mixes_positions or self.within_tokens:
            return self.heads
        given = self._given_keys()
        heads = wide(self.heads)
        fewer = _within(heads, given)
        if "k_proj" not in self._attention.stages:
            return fewer if is_dot else self.heads
        projected = _within(self.heads, self._atoms("k_proj"))
        shared = projected or self._cut_heads(given)
        if shared:
            return shared
        # Otherwise the heads before they are repeated, if they could not be followed to the projection.
        if fewer:
            return fewer
        if not is_dot and not _within(self.heads, wide(self._atoms("k_heads"))):
            return self.heads  # the reduction of the features gives the heads
        return ()

    def _cut_heads(self, given: set[Axis]) -> Dim:
        """Return the head axes that are cut from the projection of the keys.

        They are pieces of an axis, if one projection gives different numbers of query and key heads, or if a few heads
        are computed at a time.
        """
        projected = self._atoms("k_proj")
        count = size_of(self.heads)
        cut: list[Axis] = []
        for atom in self.heads:
            is_piece = 1 < atom.size < count
            is_all = atom.size == count and atom in given
            origin, _ = atom.origins.get(atom.size, ((), 0))
            if (is_piece or is_all) and not projected.isdisjoint(resolve(origin)):
                cut.append(atom)
        return tuple(cut)

    @cached_property
    def group_first(self) -> bool:
        """Whether neighbouring query heads, in the rows of W_q, use different key heads."""
        tensor = self._attention.stages.get("q_proj", self._attention.stages["q_heads"])
        shared = set(wide(self.kv_heads))
        atoms = tuple(chain(*self._dimensions.of(tensor)))
        heads = _within(atoms, self.heads)
        if not heads or heads[0] in shared:
            return False
        return not shared.isdisjoint(heads)

    # -- groups -------------------------------------------------------------------------------------------------------

    def groups(self, side: str) -> list[Group]:
        """Return names and atoms of one side: `q`, `k`, `v`, `s` for scores and weights, `o` for context and output."""
        groups: list[Group] = [("batch", self.batch), ("heads", self.heads)]
        groups += self._groups_in_heads(side)
        groups.append(("windows", self.windows))
        if self.over_features:
            groups += self._groups_over_features(side)
        else:
            groups += self._groups_over_positions(side)
        # Axes of size one are dropped beside others: a view puts them next to any axis.
        return [(name, wide(dim) or dim) for name, dim in groups]

    def _groups_in_heads(self, side: str) -> list[Group]:
        """Return names and atoms of parts of the heads."""
        if self.maps:
            return [("maps", self.maps)] if side in "qks" else []
        if not self.heads or wide(self.kv_heads) == wide(self.heads):
            return []
        group = _without(self.heads, self.kv_heads)
        return [("kv_heads", self.kv_heads), ("group", group)]

    def _groups_over_positions(self, side: str) -> list[Group]:
        """Return names and atoms of one side of an attention in which positions attend to positions."""
        left = ("head_dim", self.head_dim)
        right = ("head_dim", self._right_head_dim)
        value_width = "v_head_dim" if self.own_value_width else "head_dim"
        values = (value_width, self.value_dim)
        queries = ("query", self.query)
        keys = ("key", self.key)
        given_queries = ("query", self._source_query)
        by_side: dict[str, list[Group]] = {
            "q": [left, right, given_queries, queries],
            "k": [left, right, ("key", self._source_key), keys],
            "v": [values, left, right, ("key", self._value_key), keys],
            "s": [left, right, queries, keys],
            "o": [values, ("query", self._value_query), queries, given_queries],
        }
        return by_side[side]

    def _groups_over_features(self, side: str) -> list[Group]:
        """Return names and atoms of one side of an attention in which features attend to features."""
        left = ("head_dim", self.head_dim)
        right = ("head_dim", self._right_head_dim)
        by_side: dict[str, list[Group]] = {
            "q": [left, ("query", self.query)],
            "k": [right, ("key", self.key)],
            "v": [right, ("head_dim", self.value_dim), ("key", self._value_key)],
            "s": [left, ("key_head_dim", self._right_head_dim), ("key_head_dim", self.value_dim)],
            "o": [left, ("head_dim", self._value_query), ("query", self._value_key)],
        }
        return by_side[side]


def _within(dim: Dim, atoms: Container[Axis]) -> Dim:
    """Return the atoms of a dimension that are among these."""
    return tuple([atom for atom in dim if atom in atoms])


def _without(dim: Dim, atoms: Container[Axis]) -> Dim:
    """Return the atoms of a dimension that are not among these."""
    return tuple([atom for atom in dim if atom not in atoms])

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
from functools import cached_property

from ..graph.attention import Attention, positions_of
from ..graph.dimensions import Axis, Dim, Dimensions, resolve, size_of, wide

Group = tuple[str, Dim]
"""A name and its atoms, in row-major order."""


class Roles:
    """The axes of the two products of an attention, by role."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._attention, self._dimensions = attention, dimensions
        self._averaged = attention.value_product.axes(dimensions)
        axes = attention.score_product.axes(dimensions)
        query, key = (axes.columns, axes.rows) if attention.key_first else (axes.rows, axes.columns)
        # The axes of the factors, before the product unifies them.
        sources = (axes.left_rows, axes.right_columns)
        self._source_query, self._source_key = sources[:: -1 if attention.key_first else 1]
        self.head_dim: Dim = axes.left_inner
        # Usually the same axis as in the left factor; different if the two could not be unified.
        self._other_dim: Dim = axes.right_inner
        beside = self._beside_keys(key)
        # Key axes that the softmax does not run over count as axes that the product runs over.
        folded, self.key = (*axes.batch, *beside), _without(key, beside)
        self._source_key = _without(self._source_key, beside)
        batch_rows = self._batch_of_queries(query)
        folded, query = (*batch_rows, *folded), _without(query, batch_rows)
        self._source_query = _without(self._source_query, batch_rows)
        outside = self._outside()
        rows, summed = set(wide(query)), set(wide(self.head_dim))
        self.over_features = bool(rows and summed) and summed <= outside and rows <= self._features() - outside
        """Whether features attend to features: the product of scores sums over positions."""
        head_rows: Dim = ()
        if outside and not self.over_features:
            # With a single key head, the query heads are rows of one product, beside the queries.
            many_rows = len(wide(query)) > 1
            step = "query" in attention.stages and not wide(*positions_of(attention, dimensions, "query")[1:])
            of_queries, of_output = (self._features(side, by_head=step) for side in ("query", "output"))
            features = self._features() if many_rows else of_queries & of_output
            head_rows = _without(_within(query, features), outside)
        self.within_tokens = self._is_within_tokens(outside, query, folded)
        """Whether the heads of one token attend to one another: they are the rows and the columns of its scores."""
        if self.within_tokens:
            head_rows = query
        self.mixes_positions = not self.within_tokens and self._mixes_positions(outside, head_rows, query)
        """Whether a view without a transpose splits the heads, so that each head sees features of a few positions."""
        head_rows = () if self.mixes_positions else head_rows
        self.query, self._source_query = _without(query, head_rows), _without(self._source_query, head_rows)
        # A product with a single query per step gathers separate keys for each query.
        self.own_keys: Dim = () if wide(self.query) else self._apart(folded)
        """The query axes if every query has its own gathered keys, e.g. unfolded windows; otherwise empty."""
        if self.own_keys:
            self.query = self._source_query = self.own_keys
        self.batch, heads, self.windows = self._split(_without(folded, self.own_keys), outside, head_rows)
        self.maps = self._maps_of_a_head(heads)
        """The axes that count several weight maps of one head, e.g. in differential attention; otherwise empty."""
        self.heads = _without(heads, self.maps)
        if self.mixes_positions:
            self.heads, self.windows = (*self.windows, *self.heads), ()
        sides = (self._averaged.rows, self._averaged.columns)
        value_query, self.value_dim = sides[:: -1 if attention.value_first else 1]
        self._value_key = self._averaged.left_inner if attention.value_first else self._averaged.right_inner
        # The query axes of the context.
        self._value_query = self.own_keys or _without(value_query, {*self.heads, *self.batch, *self.windows})
        self.own_value_width = size_of(self.value_dim) != size_of(self.head_dim)
        if self.over_features:  # features and positions are exchanged in the product of scores
            self.query, self.head_dim = self.head_dim, self.query
            self.key, self._other_dim = self._other_dim, self.key
            self.value_dim, self._value_key = self._value_key, self.value_dim
            self.own_value_width = False

    def _atoms(self, stage: str) -> set[Axis]:
        """Return the atoms of a stage; empty if the stage is absent."""
        tensor = self._attention.stages.get(stage)
        return set() if tensor is None else {atom for dim in self._dimensions.of(tensor) for atom in dim}

    def _beside_keys(self, key: Dim) -> Dim:
        """Return axes beside the keys in the product of scores that are a batch of the softmax and of the values."""
        attention = self._attention
        over = self._dimensions.along(attention.softmax.output, attention.softmax_dim)
        return () if attention.over_queries else _within(_without(wide(key), over), {*self._averaged.batch})

    def _batch_of_queries(self, query: Dim) -> Dim:
        """Return the batch among the rows of `batch query embed` times the keys of a memory, which have no batch."""
        if not self._attention.is_over_memory or "query" not in self._attention.stages:
            return ()
        dims = positions_of(self._attention, self._dimensions, "query")
        if len(dims) < 2:
            return ()
        return _within(wide(query), set(wide(dims[0])))

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
            outside |= {atom for dim in dims for atom in dim}
        if outside and "key" not in stages:
            # Keys that are given without a projection have their batch first.
            outside |= {*self._dimensions.of(stages["k_heads"])[0]} & self._dimensions.given_whole
        return outside

    def _mixes_positions(self, outside: set[Axis], head_rows: Dim, query: Dim) -> bool:
        """Return whether queries and keys mix positions with features, or the view to heads cuts across features."""
        if head_rows and set(wide(self._source_key)) & self._features() - outside:
            return bool(outside & set(wide(query)))
        stages, projections = self._attention.stages, self._attention.projections
        shapes = [stages[stage].shape for stage in ("q_proj", "q_heads", "k_heads") if stage in stages]
        if [len(shape) for shape in shapes] != [3, 4, 4]:
            return False
        projected = {atom for dim in self._dimensions.of(stages["q_proj"])[1:] for atom in dim}
        # Queries that are columns of a product of one sequence with itself have another axis in it than before.
        lost = not projected & {*query, *self._source_query, *self.head_dim}
        width, (batch, heads, length, head_dim) = shapes[0][-1], shapes[1]
        packed = sum(op is projections["query"] for op in projections.values())
        return lost and shapes[0] == (batch, length, width) and width in (heads * head_dim, heads * head_dim * packed)

    def _is_within_tokens(self, outside: set[Axis], query: Dim, folded: Dim) -> bool:
        """Return whether rows and columns of the scores are features of one token, and each token has its own scores.

        The features of a vector, `batch embed`, may be split into tokens on purpose: in front of the projections.
        """
        stages = self._attention.stages
        if "q_proj" not in stages or "k_proj" not in stages or len(stages["q_proj"].shape) < 2:
            return False
        rows, columns = set(wide(self._source_query)), set(wide(self._source_key))
        if not rows or not columns or not set(wide(query)) <= rows:
            return False
        of_features = rows <= self._features("query") - outside and columns <= self._features("key") - outside
        return of_features and set(wide(folded)) == set(wide(tuple(outside)))

    def _apart(self, folded: Dim) -> Dim:
        """Return the axes of the input's positions that the product of scores runs over; otherwise empty."""
        given = "query" in self._attention.stages and wide(self._source_key)  # otherwise one query and one key
        dims = positions_of(self._attention, self._dimensions, "query") if given else []
        apart = _within(wide(folded), {atom for dim in dims[1:] for atom in dim})
        heads = [atom for dim in self._dimensions.of(self._attention.stages["k_heads"]) for atom in dim]
        twice = all(heads.count(atom) > 1 and atom in self._source_key for atom in apart)
        # Otherwise the single query has all keys.
        return apart if twice or not self._atoms("k_proj") & set(wide(self._source_key)) else ()

    def _features(self, *sides: str, by_head: bool = False) -> set[Axis]:
        """Return the atoms of the dimensions in which projections of these sides put heads and their features.

        With `by_head` also outside the last, where a projection gives the heads a dimension.
        """
        features: set[Axis] = set()
        for stage, side in (("q_proj", "query"), ("k_proj", "key"), ("concat", "output")):
            tensor = self._attention.stages.get(stage)
            if tensor is not None and tensor.shape and (not sides or side in sides):
                place = self._attention.feature_place(side, len(tensor.shape))
                # A projection that gives the heads a dimension (einsum) may put them anywhere outside the queries.
                anywhere = len(tensor.shape) > 3 and (by_head or (stage == "q_proj" and not sides))
                features |= self._atoms(stage) if anywhere else {*self._dimensions.of(tensor)[place]}
        return features

    def _split(self, folded: Dim, outside: set[Axis], head_rows: Dim) -> tuple[Dim, Dim, Dim]:
        """Return the batch, the heads and the windows among the axes that the product of scores runs over."""
        q_heads = self._dimensions.of(self._attention.stages["q_heads"])
        if self.within_tokens:
            return _within(folded, outside), head_rows, ()
        if not outside:  # without a projection: batch comes before heads
            rank, windows = len(q_heads), self._cut_from_sequence(folded)
            if windows:
                whole = _without(folded, windows)
                return whole[:1], wide(whole[1:]), windows
            if (rank <= 3 and len(folded) < 2) or (rank < 3 and not self._attention.is_dot):
                return folded, (), ()
            batch = _within(folded, q_heads[0] if rank > 3 else folded[:-1] if rank == 3 else ())
            rest = _without(folded, batch)
            several = sum(bool({*wide(dim)} & {*rest}) for dim in q_heads[1:]) > 1
            if several and {*wide(rest)} <= self._given_keys():
                return batch, (), ()  # nothing shows which of them are heads
            return batch, wide(rest) or rest[:1], ()
        batch, rest = _within(folded, outside), _without(folded, outside)
        # Windows are cut from the sequence, so they are next to the rest of it somewhere; the batch never is.
        not_cut = {*batch[:1], *self._dimensions.given_whole}
        rows = set(wide(self.query, self.key))
        cut = self._dimensions.beside(rows, apart_from=not_cut) if not set(batch) <= not_cut else set()
        windows = _within(_without(batch, not_cut), cut)
        batch, heads, features = _without(batch, windows), wide(rest), self._features()
        if "query" in self._attention.stages and features & {*heads, *head_rows}:
            windows, heads = (*windows, *_without(heads, features)), _within(heads, features)
        heads += head_rows
        # A single head shows only as a dimension of size one, if there is exactly one such dimension.
        if not heads and not self._attention.branches:
            ones = _without((*rest, *(dim[0] for dim in q_heads if size_of(dim) == len(dim) == 1)), outside)
            heads = ones[:1] if len(set(ones)) == 1 else ()
        return batch, heads, windows

    def _given_keys(self) -> set[Axis]:
        """Return the axes of the keys before any repeat."""
        return {*wide(*self._dimensions.of(self._attention.before_repeats["key"]))}

    def _cut_from_sequence(self, folded: Dim) -> Dim:
        """Return the axes that the product of scores runs over and that are cut from the sequence: the windows."""
        rows = set(wide(self.query, self.key))
        cut = self._dimensions.beside(rows, apart_from=self._dimensions.given_whole)
        return _within(_without(wide(folded), self._dimensions.given_whole), cut)

    @property
    def own_values(self) -> Dim:
        """Query axes if every query averages its own gathered values (top-k attention); otherwise empty."""
        return self.query if {*wide(self.query)} <= {*self._averaged.batch} and not self.own_keys else ()

    def _maps_of_a_head(self, heads: Dim) -> Dim:
        """Return head axes of the scores whose weights are combined before the values; otherwise empty."""
        averaged = {*self._averaged.batch, *self._averaged.rows, *self._averaged.columns}
        combined = any(op.base_name.rstrip("_") in ("add", "sub", "sum") for op in self._attention.weights_path)
        known = combined and not self._attention.mixed_weights and averaged & set(wide(heads))
        return _without(wide(heads), averaged) if known else ()

    @cached_property
    def kv_heads(self) -> Dim:
        """The head axes that keys and values were projected to."""
        if self.mixes_positions or self.within_tokens:
            return self.heads
        if "k_proj" not in self._attention.stages:
            return _within(wide(self.heads), self._given_keys()) if self._attention.is_dot else self.heads
        projected = self._atoms("k_proj")
        once = set(wide(*self._dimensions.of(self._attention.before_repeats["key"])))
        count = size_of(self.heads)
        pieces = (atom for atom in self.heads if 1 < atom.size < count or (atom.size == count and atom in once))
        shared = _within(self.heads, projected) or tuple(
            # A piece of an axis, if one projection gives different numbers of query and key heads, or if a few heads
            # are computed at a time.
            atom
            for atom in pieces
            if projected & {*resolve(atom.origins.get(atom.size, ((), 0))[0])}
        )
        # Otherwise the heads before they are repeated, if they could not be followed to the projection.
        fewer = _within(wide(self.heads), once)
        shared = shared or (fewer if len(fewer) < len(wide(self.heads)) else ())
        if not shared and fewer:  # picked by index
            features = self._features("key") - {*self.head_dim, *self._other_dim}
            picked = tuple(atom for atom in features if 1 < atom.size < count and count % atom.size == 0)
            # Keys that are split into all heads have them, where more than queries, keys and values are packed.
            shared = picked if len(picked) == 1 else fewer
        if not shared and not self._attention.is_dot and not {*self.heads} & {*wide(tuple(self._atoms("k_heads")))}:
            return self.heads  # the reduction of the features gives the heads
        return shared

    @cached_property
    def group_first(self) -> bool:
        """Whether neighbouring query heads, in the rows of W_q, use different key heads."""
        tensor = self._attention.stages.get("q_proj", self._attention.stages["q_heads"])
        shared = set(wide(self.kv_heads))
        heads = [atom in shared for dim in self._dimensions.of(tensor) for atom in dim if atom in self.heads]
        return True in heads[1:] and not heads[0]

    def groups(self, side: str) -> list[Group]:
        """Return names and atoms of one side: `q`, `k`, `v`, `s` for scores and weights, `o` for context and output."""
        shared, heads = self.kv_heads, self.heads
        groups: list[Group] = [("batch", self.batch), ("heads", heads)]
        if self.maps:
            groups += [("maps", self.maps)] if side in "qks" else []
        elif heads and wide(shared) != wide(heads):
            groups += [("kv_heads", shared), ("group", _without(heads, shared))]
        value_dim = "v_head_dim" if self.own_value_width else "head_dim"
        left, right, values = ("head_dim", self.head_dim), ("head_dim", self._other_dim), (value_dim, self.value_dim)
        queries, keys = ("query", self.query), ("key", self.key)
        sources = {"q": ("query", self._source_query), "k": ("key", self._source_key)}
        by_side: dict[str, list[Group]] = {
            "q": [left, right, sources["q"], queries],
            "k": [left, right, sources["k"], keys],
            "v": [values, left, right, ("key", self._value_key), keys],
            "s": [left, right, queries, keys],
            "o": [values, ("query", self._value_query), queries, sources["q"]],
        }
        if self.over_features:
            by_side = {
                "q": [left, queries],
                "k": [right, keys],
                "v": [right, values, ("key", self._value_key)],
                "s": [left, ("key_head_dim", self._other_dim), ("key_head_dim", self.value_dim)],
                "o": [left, ("head_dim", self._value_query), ("query", self._value_key)],
            }
        # Axes of size one are dropped beside others: a view puts them next to any axis.
        return [(name, wide(dim) or dim) for name, dim in (*groups, ("windows", self.windows), *by_side[side])]


def _within(dim: Dim, atoms: Container[Axis]) -> Dim:
    return tuple([atom for atom in dim if atom in atoms])


def _without(dim: Dim, atoms: Container[Axis]) -> Dim:
    return tuple([atom for atom in dim if atom not in atoms])

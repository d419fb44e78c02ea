"""What each axis of an attention's products is: batch, heads, windows, query, key or the features of a head."""

from __future__ import annotations

from functools import cached_property

from ..graph.attention import Attention, positions_of
from ..graph.dimensions import Axis, Dim, Dimensions, resolve, size_of, wide

Group = tuple[str, Dim]
"""A name and the atoms that it stands for, in row-major order."""


class Roles:
    """The axes of the two products of an attention, by role."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._attention = attention
        self._dimensions = dimensions
        axes = attention.score_product.axes(dimensions)
        query, key = (axes.columns, axes.rows) if attention.key_first else (axes.rows, axes.columns)
        sources = (axes.left_rows, axes.right_columns)
        self._source_query: Dim = sources[attention.key_first]
        self._source_key: Dim = sources[not attention.key_first]
        self.head_dim: Dim = axes.left_inner
        # The same axis as the left factor's, but where the two were not recognised as one.
        self._other_dim: Dim = axes.right_inner
        folded = axes.batch
        if apart := self._beside_keys(key):
            # Every query meets these keys too, and the softmax runs over each of their rows by itself.
            folded, key = (*folded, *apart), tuple(atom for atom in key if atom not in apart)
            self._source_key = tuple(atom for atom in self._source_key if atom not in apart)
        outside = self._outside()
        self.over_features = self._is_over_features(outside, query)
        """Whether features attend to features: the product of scores sums over the positions."""
        head_rows: Dim = ()
        if outside and not self.over_features:
            # One key head for all: the query heads stand beside the queries, in the rows of one product.
            several = len(wide(query)) > 1
            features = self._features() if several else self._features("query") & self._features("output")
            head_rows = tuple(a for a in query if a not in outside and a in features)
        self.mixes_positions = self._mixes_positions(outside, head_rows, query)
        """Whether a view splits the heads without a transpose, so that each has the features of some positions."""
        if self.mixes_positions:
            head_rows = ()
        if head_rows:
            query = tuple(atom for atom in query if atom not in head_rows)
            self._source_query = tuple(atom for atom in self._source_query if atom not in head_rows)
        self.query, self.key = query, key
        self.own_keys: Dim = ()
        """The queries, where each of them has keys of its own: windows that were unfolded."""
        if all(atom.size == 1 for atom in query):
            # Every query has keys of its own: the queries are among what the product runs over.
            self.own_keys = self._apart(folded)
            folded = tuple(atom for atom in folded if atom not in self.own_keys)
            if self.own_keys:
                self.query = self._source_query = query = self.own_keys
        self.batch, self.heads, self.windows = self._split(folded, outside, query, head_rows)
        self.maps = self._maps_of_a_head()
        """What counts the weights of one head, where they are put together before they meet the values."""
        self.heads = tuple(atom for atom in self.heads if atom not in self.maps)
        if self.mixes_positions:
            self.heads, self.windows = (*self.windows, *self.heads), ()
        self._value_roles()
        if self.over_features:
            self._swap_features_and_positions()

    def _beside_keys(self, key: Dim) -> Dim:
        """What stands beside the keys in the product of scores, and is a batch to the softmax and to the values."""
        found, dimensions = self._attention, self._dimensions
        weights = dimensions.of(found.softmax.output)
        over = set(wide(weights[found.softmax_dim])) if weights else set()
        beside = {*found.value_product.axes(dimensions).batch}
        known = over & set(key) and not found.over_queries
        return tuple(atom for atom in key if known and atom not in over and atom in beside and atom.size > 1)

    def _is_over_features(self, outside: set[Axis], query: Dim) -> bool:
        """Whether the product of scores sums over positions of what comes in, and has features for its rows."""
        rows, summed = (set(wide(dim)) for dim in (query, self.head_dim))
        return bool(rows and summed) and summed <= outside and rows <= self._features() - outside

    def _outside(self) -> set[Axis]:
        """The atoms of what comes in, before it is projected: all but its features, which something else may split."""
        stages = self._attention.stages
        side = "query" if "query" in stages else "key"
        dims = positions_of(self._attention, self._dimensions, side) if side in stages else []
        op = self._attention.projections.get(side)
        if op is not None and op.base_name == "convolution":  # one that is strided makes positions of its own
            dims += self._dimensions.of(op.output)[2:]
        return {atom for dim in dims for atom in dim}

    def _mixes_positions(self, outside: set[Axis], head_rows: Dim, query: Dim) -> bool:
        """Whether queries, and keys, are positions beside features, or the view to heads cuts across the features."""
        inside = set(wide(self._source_key)) & self._features() - outside
        if head_rows and inside:
            return bool(outside & set(wide(query)))
        stages = self._attention.stages
        shapes = [stages[stage].shape for stage in ("q_proj", "q_heads", "k_heads") if stage in stages]
        if len(shapes) < 3 or len(shapes[0]) != 3 or any(len(heads) != 4 for heads in shapes[1:]):
            return False
        lost = not {a for dim in self._dimensions.of(stages["q_proj"])[1:] for a in dim} & {*query, *self.head_dim}
        width, (batch, heads, length, head_dim) = shapes[0][-1], shapes[1]
        packed = sum(op is self._attention.projections["query"] for op in self._attention.projections.values())
        return lost and shapes[0] == (batch, length, width) and width in (heads * head_dim, heads * head_dim * packed)

    def _apart(self, folded: Dim) -> Dim:
        """The axes of positions in what comes in, where the product of scores runs over them."""
        stages = self._attention.stages
        if not wide(self._source_key):
            return ()  # one query and one key
        dims = positions_of(self._attention, self._dimensions, "query") if "query" in stages else []
        places = {atom for dim in (dims[1:] if len(dims) > 2 else dims[-1:]) for atom in dim}
        apart = tuple(atom for atom in wide(folded) if atom in places) if len(dims) > 1 else ()
        keys = {atom for dim in self._dimensions.of(stages["k_proj"]) for atom in dim} if "k_proj" in stages else set()
        heads = [atom for dim in self._dimensions.of(stages["k_heads"]) for atom in dim]
        twice = all(heads.count(atom) > 1 and atom in self._source_key for atom in apart)
        if not twice and keys & set(wide(self._source_key)):
            return ()  # the keys are all there for every query: there is only one
        return apart

    def _features(self, *sides: str) -> set[Axis]:
        """The atoms of the dimensions in which a projection, on these sides, puts heads and their features."""
        found: set[Axis] = set()
        for stage, side in (("q_proj", "query"), ("k_proj", "key"), ("concat", "output")):
            tensor = self._attention.stages.get(stage)
            if tensor is not None and tensor.shape and (not sides or side in sides):
                found |= set(self._dimensions.of(tensor)[self._attention.feature_place(side, len(tensor.shape))])
        # A projection that gives every head its own dimension (einsum) puts them anywhere but where the queries are.
        tensor = self._attention.stages.get("q_proj")
        if tensor is not None and len(tensor.shape) > 3 and not sides:
            found |= {atom for dim in self._dimensions.of(tensor) for atom in dim}
        return found

    def _split(self, folded: Dim, outside: set[Axis], query: Dim, head_rows: Dim) -> tuple[Dim, Dim, Dim]:
        """Which of the axes that the product of scores runs over are batch, which are heads, and which are windows."""
        if not outside:
            return self._split_by_place(folded)
        batch = tuple(atom for atom in folded if atom in outside)
        # Windows are cut out of the sequence: somewhere they stand beside its rest, and the batch does not.
        whole = {*batch[:1], *self._dimensions.given_whole}
        rows = set(wide(query, self.key))
        cut = self._dimensions.beside(rows, apart_from=whole) if not set(batch) <= whole else set()
        windows = tuple(atom for atom in batch if atom in cut and atom not in whole)
        batch = tuple(atom for atom in batch if atom not in windows)
        rest = tuple(atom for atom in folded if atom not in outside)
        heads = wide(rest)
        features = self._features()
        if "query" in self._attention.stages and any(atom in features for atom in (*heads, *head_rows)):
            windows += tuple(atom for atom in heads if atom not in features)
            heads = tuple(atom for atom in heads if atom in features)
        heads += head_rows
        # A single head leaves no trace but a dimension of size one, and that only where it is the only one.
        if not heads and not self._attention.branches:
            ones = [
                dim[0]
                for dim in self._dimensions.of(self._attention.stages["q_heads"])
                if size_of(dim) == len(dim) == 1
            ]
            ones = [atom for atom in (*rest, *ones) if atom not in outside]
            heads = tuple(ones[:1]) if len(set(ones)) == 1 else ()
        return batch, heads, windows

    def _split_by_place(self, folded: Dim) -> tuple[Dim, Dim, Dim]:
        """Without a projection: by the layout of the heads, batch before heads."""
        if not self._attention.is_dot and len(self._dimensions.of(self._attention.stages["q_heads"])) < 3:
            return folded, (), ()
        batch, heads = folded[:-1], folded[-1:]
        return (batch, heads, ()) if batch else (heads, (), ())

    @property
    def own_values(self) -> Dim:
        """The queries, where each of them has values of its own: those of the keys that it picked."""
        apart = set(wide(self.query)) <= {*self._attention.value_product.axes(self._dimensions).batch}
        return self.query if apart and not self.own_keys else ()

    def _maps_of_a_head(self) -> Dim:
        """Heads of the scores that are no heads to the values: the weights of several become those of one."""
        axes = self._attention.value_product.axes(self._dimensions)
        averaged = {*axes.batch, *axes.rows, *axes.columns}
        combined = any(op.base_name.rstrip("_") in ("add", "sub", "sum") for op in self._attention.weights_path)
        if not combined or self._attention.mixed_weights or not averaged & set(wide(self.heads)):
            return ()
        return tuple(atom for atom in wide(self.heads) if atom not in averaged)

    def _value_roles(self) -> None:
        """The sequence and the features of the values."""
        axes = self._attention.value_product.axes(self._dimensions)
        value_first = self._attention.value_first
        self._value_query: Dim = axes.columns if value_first else axes.rows
        self._value_key: Dim = axes.left_inner if value_first else axes.right_inner
        self.value_dim: Dim = axes.rows if value_first else axes.columns
        # What the context has for queries, where it does not have the features.
        beside = {*self.heads, *self.batch, *self.windows}
        self._value_query = self.own_keys or tuple(atom for atom in self._value_query if atom not in beside)
        self.own_value_width = size_of(self.value_dim) != size_of(self.head_dim)

    def _swap_features_and_positions(self) -> None:
        """Call features and positions what they are, where the product of scores has them in each other's place."""
        self.query, self.head_dim = self.head_dim, self.query
        self.key, self._other_dim = self._other_dim, self.key
        positions, self.value_dim = self.value_dim, self._value_key
        self._value_key = positions
        self._source_query, self._source_key = self.query, self.key
        self.own_value_width = False

    @cached_property
    def kv_heads(self) -> Dim:
        """The heads that keys and values were projected to."""
        stages = self._attention.stages
        if "k_proj" not in stages or self.mixes_positions:
            return self.heads
        atoms = {atom for dim in self._dimensions.of(stages["k_proj"]) for atom in dim}
        shared = tuple(atom for atom in self.heads if atom in atoms)
        pieces = tuple(atom for atom in self.heads if self._is_piece(atom, atoms))
        found = shared or pieces or self._repeated()
        if not found and not self._attention.is_dot:
            held = set(wide(*self._dimensions.of(self._attention.stages["k_heads"])))
            return () if held & set(self.heads) else self.heads  # what reduces the features gives the heads
        return found

    def _repeated(self) -> Dim:
        """Heads of the keys before they are repeated, where nothing leads from them to what a projection gave."""
        once = set(wide(*self._dimensions.of(self._attention.before_repeats["key"])))
        fewer = tuple(atom for atom in wide(self.heads) if atom in once)
        return fewer if len(fewer) < len(wide(self.heads)) else ()

    def _is_piece(self, atom: Axis, whole: set[Axis]) -> bool:
        """Whether some of the heads are a piece of an axis, where one projection gives unlike numbers of heads."""
        cut_from, _ = atom.origins.get(atom.size, ((), 0))
        return 1 < atom.size < size_of(self.heads) and bool(set(resolve(cut_from)) & whole)

    def groups(self, side: str) -> list[Group]:
        """Names and atoms of one side: `q`, `k`, `v`, `s` for scores and weights, `o` for what comes after them."""
        found: list[Group] = [("batch", self.batch), *self._head_groups(side), ("windows", self.windows)]
        found += self._of_features(side) if self.over_features else self._of_positions(side)
        # Without axes of size one, where there are others: a view puts them beside any axis.
        return [(name, wide(group) or group) for name, group in found]

    def _of_positions(self, side: str) -> list[Group]:
        """Names and atoms of features and positions."""
        features = [("head_dim", self.head_dim), ("head_dim", self._other_dim)]
        values = [("v_head_dim" if self.own_value_width else "head_dim", self.value_dim)]
        return {
            "q": [*features, ("query", self._source_query), ("query", self.query)],
            "k": [*features, ("key", self._source_key), ("key", self.key)],
            "v": [*values, *features, ("key", self._value_key), ("key", self.key)],
            "s": [*features, ("query", self.query), ("key", self.key)],
            "o": [*values, ("query", self._value_query), ("query", self.query), ("query", self._source_query)],
        }[side]

    def _of_features(self, side: str) -> list[Group]:
        """Names and atoms of features and positions, where features attend to features."""
        queries, keys = ("head_dim", self.head_dim), ("head_dim", self._other_dim)
        return {
            "q": [queries, ("query", self.query)],
            "k": [keys, ("key", self.key)],
            "v": [keys, ("head_dim", self.value_dim), ("key", self._value_key)],
            "s": [queries, ("key_head_dim", self._other_dim), ("key_head_dim", self.value_dim)],
            "o": [queries, ("head_dim", self._value_query), ("query", self._value_key)],
        }[side]

    def _head_groups(self, side: str) -> list[Group]:
        shared, heads = self.kv_heads, self.heads
        if self.maps and side in "qks":
            return [("heads", heads), ("maps", self.maps)]
        if not heads or shared == heads:
            return [("heads", heads)]
        group = tuple(atom for atom in heads if atom not in shared)
        return [("heads", heads), ("kv_heads", shared), ("group", group)]

"""Name the dimensions of an attention's tensors, from evidence, as einops patterns.

The evidence is `graph.dimensions`: which parts of which tensors are the same axis. `roles` finds batch, heads, query,
key and head_dim. Any other axis is named if exactly one name and one axis are left; otherwise it stays a number.

An example, torch's layer with 3 heads:

>>> import torch
>>> from mha_inspect.running.subject import Subject
>>> layer, x = torch.nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
>>> attention, names = Subject(layer, (x, x, x), {}).recorded().attentions[0]
>>> for stage in ("q_proj", "q_heads", "weights", "concat", "output"):
...     print(stage, list(attention.stages[stage].shape), names.of_stage(stage))
q_proj [5, 2, 12] query batch (heads head_dim)
q_heads [6, 5, 4] (batch heads) query head_dim
weights [6, 5, 5] (batch heads) query key
concat [10, 12] (query batch) (heads head_dim)
output [2, 5, 12] batch query embed

The 12 of `q_proj` consists of the same two axes as the heads and features of `q_heads`. The 12 of `output` is a new
axis of the last projection: it is the one axis without a name, and `embed` is the one name left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ..graph.attention import Attention, given_features
from ..graph.axis import setting, unify
from ..graph.dimensions import Axis, Dim, Dimensions, DimensionsOf, resolve, size_of, wide
from ..record.ops import Op, TensorRef
from .pattern import CANONICAL_AXES, PLACES, POSITIONS, WITHIN, one_size_a_name
from .roles import Group, Roles

_INPUTS = ("query", "key", "value")
_MADE_BY = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "concat": "output", "output": "output"}
"""Stage to the projection that decides the place of its features."""
_WIDTHS = {"head_dim", "v_head_dim"}
_HEADS = ("heads", "kv_heads")
_OWN_WIDTH = {"key": "kdim", "value": "vdim"}
"""Names of a key's or value's width that differs from the query's."""
_SIDES = {
    **{"query": "q", "key": "k", "value": "v"},
    **dict.fromkeys(("scores", "masked_scores", "weights"), "s"),
    **dict.fromkeys(("context", "concat", "output"), "o"),
}
"""Stage to its side. Any other stage begins with the letter of its side: `q_proj`."""
_PACKED = {("query", "key", "value"): "qkv", ("key", "value"): "kv", ("query", "key"): "qk"}
"""Names of the axis that counts the projections in one matrix."""
_FIRST = ("q_heads", "k_heads", "v_heads", "q_proj", "k_proj", "v_proj")
"""The stages that are named first: their names help to name the others of their side."""

Token = str | Axis
"""A name, or an atom without one."""
Tokens = list[list[Token]]
"""The dimensions of a tensor, each as names and unnamed atoms."""


@dataclass(frozen=True, eq=False)
class _Run:
    """Neighbours in a dimension: of `batch 3 4 head_dim`, the places from 1 to 3 have no names."""

    dim: list[Token]
    start: int
    stop: int

    @property
    def atoms(self) -> Dim:
        """The axes without a name."""
        return _atoms_in(self.dim[self.start : self.stop])

    @property
    def size(self) -> int:
        """The number of elements of the axes without a name."""
        return size_of(self.atoms)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole dimension."""
        return self.start == 0 and self.stop == len(self.dim)

    def rename(self, name: str) -> None:
        """Write a name in the place of this run."""
        self.dim[self.start : self.stop] = [name]

    def name(self, name: str, groups: list[Group]) -> None:
        """Write a name in the place of this run, and add its axes to the groups."""
        atoms = self.atoms
        self.rename(name)
        if size_of(atoms) > 1:
            groups.append((name, atoms))


@dataclass(frozen=True)
class _Matrix:
    """The matrix of a projection, which may project several sides at once."""

    sides: tuple[str, ...]
    """The sides that it projects, of `query`, `key` and `value`."""
    is_slice: bool
    """Whether the stage is one piece of the result."""
    place_of_features: int
    """The dimension of its features in the stage."""

    @property
    def name(self) -> str:
        """The name of the axis that counts the sides: `qkv`, `kv`, `qk`, else `packed`."""
        return _PACKED.get(self.sides, "packed")

    @property
    def count(self) -> int:
        """The number of sides in the stage."""
        return 1 if self.is_slice else len(self.sides)


class AxisNames:
    """The names of the axes of one attention."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._dimensions: DimensionsOf = dimensions
        self._attention = attention
        for mixing in (*attention.mixed_scores, *attention.mixed_weights):
            # A mixing of heads has the same axis before and after it, if the sizes agree.
            before = dimensions.of(mixing.source)
            after = dimensions.of(mixing.op.output)
            unify(before[mixing.place], after[mixing.place])
        self._roles = roles = Roles(attention, dimensions)
        turns = max(1, len(attention.branches))
        self.num_heads = size_of(roles.heads) * turns
        keys_of_turns = {_place_of(turn.stages["k_heads"]) for turn in attention.branches}
        self.num_kv_heads = size_of(roles.kv_heads) * max(1, len(keys_of_turns))
        """Number of heads of keys and values, before any repeat."""
        pair = ("group", "kv_heads") if roles.group_first else ("kv_heads", "group")
        self.head_order = ("heads", *pair)
        """The names of head axes, in the order in which the heads are numbered: that of the rows of W_q."""
        self.head_dim = size_of(roles.head_dim)
        self.maps = size_of(roles.maps)
        """Number of weight maps that one head combines, e.g. 2 in differential attention."""
        queries = 1 if roles.own_keys else size_of(roles.query)
        self.lengths = (queries, size_of(roles.key))
        """Numbers of queries and of keys of one softmax; with windows, of one window."""
        self.mixes_positions = roles.mixes_positions
        """Whether a view without a transpose splits the heads, so that each head sees features of a few positions."""
        self.within_tokens = roles.within_tokens
        """Whether the heads of one token attend to one another, and no token to another token."""
        self.over_features = roles.over_features
        """Whether the features of a head attend to one another, instead of positions."""
        self.num_windows = size_of(roles.windows)
        """Number of windows in the sequence; 1 without windows."""
        self._sides: dict[str, list[Group]] = {}
        for letter in "qkvso":
            self._sides[letter] = roles.groups(letter)
        self._stages = self._name_stages()

    def _name_stages(self) -> dict[str, str]:
        """Return the pattern of each stage."""
        stages = self._attention.stages
        in_order = [stage for stage in _FIRST if stage in stages]
        in_order += [stage for stage in stages if stage not in _FIRST]
        patterns: dict[str, str] = {}
        for stage in in_order:
            patterns[stage] = self._pattern_of(stage)
        shapes = {stage: tensor.shape for stage, tensor in stages.items()}
        patterns = one_size_a_name(patterns, shapes)
        if self.mixes_positions:
            patterns.update(_as_meant(shapes))
        return patterns

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage in this implementation's layout."""
        return self._stages[stage]

    def taking(self, stages: Mapping[str, str]) -> AxisNames:
        """Return a copy with other axes for these stages."""
        names = copy.copy(self)
        names._stages = {**self._stages, **stages}
        return names

    def of(self, tensor: TensorRef, side: str = "") -> str:
        """Return the axes of any other tensor of this attention, e.g. of the returned weights, or of a `k` or `v`."""
        output = self._attention.stages.get("output")
        if self.mixes_positions and output is not None and output.id == tensor.id:
            return self._stages["output"]
        groups: list[Group] = []
        for letter in (*side, "s", "o", "q"):
            groups += self._sides[letter]
        # A loop over heads concatenates them along a new axis, which is in no product.
        expected = ("heads",) if self._attention.branches else ()
        return _written(self._named(tensor, groups, expected))

    # -- one stage ----------------------------------------------------------------------------------------------------

    def _pattern_of(self, stage: str) -> str:
        """Return the pattern of a stage, and add new names to its side."""
        expected = self._expected(stage)
        groups = self._groups_of(stage)
        dims = self._named(self._attention.stages[stage], groups, expected, stage)
        is_context_of_windows = bool(self._roles.windows) and stage == "context"
        if dims and stage not in WITHIN and not is_context_of_windows:
            self._name_outside(dims, stage, expected)
        self._name_single_head(dims, stage)
        return _written(dims)

    def _expected(self, stage: str) -> list[str]:
        """Return the names that the open axes of a stage may get: `query head_dim` of `q_heads`."""
        roles = self._roles
        # Batch and heads are named by evidence only.
        by_evidence = ["batch", *_HEADS]
        if roles.within_tokens:
            by_evidence.append("query")
        words = CANONICAL_AXES[stage].replace("(", "").replace(")", "").split()
        expected = [name for name in words if name not in by_evidence]
        if stage in _OWN_WIDTH and self._has_own_width(stage):
            expected[-1] = _OWN_WIDTH[stage]
        if roles.own_value_width and _side_of(stage) in "vo" and "head_dim" in expected:
            expected[expected.index("head_dim")] = "v_head_dim"
        return expected

    def _has_own_width(self, stage: str) -> bool:
        """Return whether the keys or values that are given have another width than the queries."""
        width = self._width("query") or self._width("output")
        if not width:
            return False
        return self._width(stage) not in (0, width)

    def _groups_of(self, stage: str) -> list[Group]:
        """Return the groups of the side of a stage, with the queries that have keys or values of their own."""
        letter = _side_of(stage)
        groups = self._sides[letter]
        roles = self._roles
        if roles.own_keys and letter in "kv":
            tensor = self._attention.stages[stage]
            atoms = list(chain(*self._dimensions.of(tensor)))
            if stage.endswith("heads") or atoms.count(roles.own_keys[0]) > 1:
                groups = [*groups, ("query", roles.own_keys)]
        if stage == "v_heads" and roles.own_values:
            groups = [*groups, ("query", roles.own_values)]
        return groups

    def _width(self, stage: str) -> int:
        """Return the number of features of an input stage or of the output; 0 if the stage is absent."""
        tensor = self._attention.stages.get(stage)
        if tensor is None or not tensor.shape:
            return 0
        return tensor.shape[self._place(stage, len(tensor.shape))]

    def _place(self, stage: str, rank: int) -> int:
        """Return the dimension of the features of an input stage or of the output."""
        if self._attention.earlier.get(stage):
            return given_features(self._attention, self._dimensions, stage)
        return self._attention.feature_place(stage, rank)

    def _width_place(self, stage: str) -> int | None:
        """Return the dimension of a stage that a matrix reads or makes; None if it could not be determined."""
        op = self._attention.first_projection(stage)
        if op is None:
            return None
        dims = self._dimensions.of(self._attention.stages[stage])
        if not dims:
            return None
        place = self._place(stage, len(dims))
        if op.base_name == "convolution":
            tensor = op.output if stage == "output" else op.inputs[0]
            reads_all_channels = setting(op, 8, "groups", 1) == 1
            is_channels = size_of(dims[place]) == tensor.shape[1]
            return place if is_channels and reads_all_channels else None
        if stage == "output":
            has_queries = not set(self._roles.query).isdisjoint(wide(dims[place]))
            return None if has_queries else place
        # The input may have been moved before its projection.
        for tensor in op.inputs:
            for dim in self._dimensions.of(tensor)[-2:]:
                if wide(dims[place]) == wide(dim):
                    return place
        return None

    def _named(
        self,
        tensor: TensorRef,
        groups: list[Group],
        expected: Sequence[str],
        stage: str = "",
    ) -> Tokens:
        """Return the dimensions of a tensor with the names of these groups; open axes get the expected names."""
        resolved: list[Group] = []
        for name, group in groups:
            if group:
                resolved.append((name, resolve(group)))
        atoms = self._dimensions.of(tensor)
        dims = [name_dimension(dim, resolved) for dim in atoms]
        self._tell_apart(dims, groups)
        self._name_packed(dims, tensor, stage)
        place = self._width_place(stage)
        if place is not None:
            # The input and output features of a matrix are one axis, even if another operation splits it.
            dims[place] = list(atoms[place])
            _whole(dims[place]).name(expected[-1], groups)
        _name_batch_of_one(dims)
        self._name_the_last(dims, groups, expected)
        return dims

    def _tell_apart(self, dims: Tokens, groups: list[Group]) -> None:
        """Name query and key apart if they are one axis of the dataflow: the softmax runs over the second one.

        `query query` becomes `query key`.
        """
        sides: dict[str, Dim] = {}
        for name, group in groups:
            if name in ("query", "key"):
                sides.setdefault(name, resolve(group))
        if len(sides) < 2 or sides["query"] != sides["key"]:
            return
        name = next(iter(sides))
        places: list[_Run] = []
        for dim in dims:
            for place, token in enumerate(dim):
                if token == name:
                    places.append(_Run(dim, place, place + 1))
        if len(places) != 2:
            return
        names = ("key", "query") if self._attention.key_first else ("query", "key")
        for run, renamed in zip(places, names, strict=True):
            run.rename(renamed)

    # -- several projections in one matrix ----------------------------------------------------------------------------

    def _name_packed(self, dims: Tokens, tensor: TensorRef, stage: str) -> None:
        """Name the axis that counts the projections in one matrix: `qkv` if it has equal pieces for each.

        `batch query (3 heads head_dim)` becomes `batch query (qkv heads head_dim)`. It is `packed` if the pieces
        differ, e.g. a single key/value head beside many query heads.
        """
        matrix = self._matrix_of(tensor, stage) if dims else None
        if matrix is None:
            return
        features = dims[matrix.place_of_features]
        self._name_turns(features, stage)
        self._name_moved_width(features, stage)
        self._name_rest(features, matrix, stage)
        if matrix.count < 2 or not _has(dims, "head_dim"):
            return
        counters = [dim for dim in dims if _is_one_axis(dim, matrix.count)]
        is_named = _has(dims, matrix.name) or _has(dims, "packed")
        if len(counters) == 1 and not is_named:
            counters[0][:] = [matrix.name]

    def _matrix_of(self, tensor: TensorRef, stage: str) -> _Matrix | None:
        """Return the matrix that makes this stage; None if there is none, or the stage is a part of its result.

        An input counts only before a convolution of each channel by itself, which keeps the axes of its features.
        """
        is_input = stage in _INPUTS
        if not is_input and not stage.endswith("_proj"):
            return None
        op = self._attention.projections.get(_MADE_BY.get(stage, stage))
        if op is None:
            return None
        whole = op.inputs[0] if is_input else op.output
        is_convolution = op.base_name == "convolution"
        is_slice = tensor.numel != whole.numel
        if is_slice and (is_input or is_convolution):
            return None
        if is_input and not (is_convolution and _is_by_channel(op, whole)):
            return None
        has_channels = is_convolution and whole.shape == tensor.shape
        return _Matrix(self._sides_of(op), is_slice=is_slice, place_of_features=1 if has_channels else -1)

    def _sides_of(self, op: Op) -> tuple[str, ...]:
        """Return the sides that a matrix projects, itself or before another: `query`, `key`, `value`."""
        attention = self._attention
        sides: list[str] = []
        for side in _INPUTS:
            earlier = attention.earlier.get(side, ())
            if attention.projections.get(side) is op or op in earlier:
                sides.append(side)
        return tuple(sides)

    def _name_moved_width(self, dim: list[Token], stage: str) -> None:
        """Name the last axes of a dimension that have the width of a head, if they were moved beyond following."""
        width = self._width_of_head(stage)
        if width < 2 or _has_width(dim):
            return
        for start in range(1, len(dim)):
            run = _Run(dim, start, len(dim))
            if _is_unnamed(dim[start:]) and run.size == width:
                is_of_values = stage == "v_proj" and self._roles.own_value_width
                run.rename("v_head_dim" if is_of_values else "head_dim")
                return

    def _name_rest(self, dim: list[Token], matrix: _Matrix, stage: str) -> None:
        """Name the one run of a dimension without a name by its size: `qkv`, `heads`, or `packed` for another size."""
        runs = _unnamed(dim)
        if len(runs) != 1:
            return
        (run,) = runs
        if run.size == 1:
            return
        if run.size == self._width_of_head(stage) and not _has_width(dim):
            return  # it may be the features of a head
        if matrix.count > 1:
            size, name = matrix.count, matrix.name
        elif self._shares_heads(stage):
            size, name = self.num_kv_heads, "kv_heads"
        else:
            size, name = self.num_heads, "heads"
        if run.size == size:
            run.rename(name)
        elif not matrix.is_slice:
            run.rename("packed")

    def _width_of_head(self, stage: str) -> int:
        """Return the number of features of one head in a stage; values may have another number."""
        roles = self._roles
        return size_of(roles.value_dim if stage == "v_proj" else roles.head_dim)

    def _shares_heads(self, stage: str) -> bool:
        """Return whether a stage has the heads of keys and values, and these are fewer than those of the queries."""
        return _side_of(stage) in "kv" and self.num_kv_heads < self.num_heads

    def _name_turns(self, dim: list[Token], stage: str) -> None:
        """Name the axis that a loop over heads slices, one piece per turn."""
        large = wide(_atoms_in(dim))
        if len(large) != 1 or _size(large) != len(self._attention.branches):
            return
        roles = self._roles
        width = roles.value_dim if _side_of(stage) == "v" else roles.head_dim
        if size_of(width) == 1 or _has_width(dim):
            dim[dim.index(large[0])] = "heads"

    # -- axes without evidence ----------------------------------------------------------------------------------------

    def _name_the_last(self, dims: Tokens, groups: list[Group], expected: Sequence[str]) -> None:
        """Give the one missing name to the one unnamed axis, if there is one of each, and add it to the groups."""
        is_packed = _has(dims, "packed")
        missing: list[str] = []
        for name in expected:
            # The features of a head are a part of what is packed.
            is_inside = is_packed and name in _WIDTHS
            if not is_inside and not _has(dims, name):
                missing.append(name)
        runs = _runs_to_name(dims)
        if len(missing) > 1 or len(runs) > 1:
            # Axes of size one are no evidence beside others.
            runs = [run for run in runs if run.size > 1]
        if len(missing) != 1 or len(runs) != 1:
            return
        (name,), (run,) = missing, runs
        if is_packed and run.size > size_of(self._roles.key):
            return  # positions that are pooled or cut are no keys; of fewer, the others are cached
        sizes = {
            "head_dim": self.head_dim,
            "v_head_dim": size_of(self._roles.value_dim),
            "heads": self.num_heads,
        }
        if sizes.get(name, run.size) == run.size:
            run.name(name, groups)

    def _name_outside(self, dims: Tokens, stage: str, expected: Sequence[str]) -> None:
        """Name open axes of a stage outside the heads: its width, and positions that are no queries or keys."""
        features = self._features_among(dims, stage)
        if self._is_open_width(features, dims, stage):
            width = expected[-1] if stage in _INPUTS else "embed"
            _whole(features).rename(width)
        self._name_turns(features, stage)
        if stage in ("q_proj", "k_proj", "v_proj", "concat") and _has_width(features):
            # One matrix may also have several queries or keys of each head, or several attentions.
            runs = [run for run in _unnamed(features) if run.size > 1]
            if len(runs) == 1:
                runs[0].rename("packed")
        others = [dim for dim in dims if dim is not features]
        runs = _open_positions(dims, others, expected[0])
        runs += _beside_places(others)
        if len(runs) == 1:
            runs[0].rename(POSITIONS)
            return
        for number, run in enumerate(runs, start=1):
            run.rename(f"{POSITIONS}_{number}")

    def _features_among(self, dims: Tokens, stage: str) -> list[Token]:
        """Return the dimension of a stage that has its features."""
        for dim in dims:
            if _has_width(dim):
                return dim
        if stage in _INPUTS:
            return dims[given_features(self._attention, self._dimensions, stage)]
        projection = _MADE_BY.get(stage, "")
        return dims[self._attention.feature_place(projection, len(dims))]

    def _is_open_width(self, features: list[Token], dims: Tokens, stage: str) -> bool:
        """Return whether a dimension has the features of an input or of the output, without a name."""
        is_after_heads = stage in ("concat", "output") and "output" in self._attention.projections
        if stage not in _INPUTS and not is_after_heads:
            return False
        return _is_open(features) and not _has(dims, "embed")

    def _name_single_head(self, dims: Tokens, stage: str) -> None:
        """Name the dimension of a single head of queries, or of keys and values, and its place in their projection."""
        is_shared = self._shares_heads(stage)
        count = self.num_kv_heads if is_shared else self.num_heads
        if count > 1 or _has(dims, "heads") or _has(dims, "kv_heads"):
            return
        name = "kv_heads" if is_shared else "heads"
        if stage.endswith("_heads") and self._roles.heads:
            unnamed = [dim for dim in dims if _is_unnamed(dim)]
            ones = [dim for dim in unnamed if _size(dim) == 1]
            if len(ones) == 1:
                ones[0][:] = [name]
        if stage.endswith("_proj") or stage == "concat":
            for dim in dims:
                if "packed" not in dim:
                    _put_before_width(dim, name)


def _side_of(stage: str) -> str:
    """Return the letter of the side of a stage: `q` for `q_proj`, `s` for the weights, `o` for the context."""
    return _SIDES.get(stage, stage[0])


def _place_of(tensor: TensorRef) -> tuple[object, ...]:
    """Return the place of a tensor in memory: turns of a loop that slice the same key head have different tensors."""
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride


def _is_by_channel(op: Op, tensor: TensorRef) -> bool:
    """Return whether a convolution is of each channel by itself; its tensor is `batch channels ...`."""
    channels = tensor.shape[1]
    groups = setting(op, 8, "groups", 1)
    return channels > 1 and bool(groups == channels)


def _as_meant(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the axes that a view without a transpose was meant to have: those of the textbook layout."""
    width = shapes["q_heads"][1] * shapes["q_heads"][-1]
    patterns: dict[str, str] = {}
    for stage, shape in shapes.items():
        pattern = CANONICAL_AXES[stage]
        is_packed = stage.endswith("_proj") and shape[-1] != width
        for heads in _HEADS:
            pattern = pattern.replace(f"({heads} head_dim)", "packed" if is_packed else "embed")
        if len(shape) == len(pattern.split()):
            patterns[stage] = pattern
    return patterns


# -- one dimension ----------------------------------------------------------------------------------------------------


def name_dimension(dim: Dim, groups: Sequence[Group]) -> list[Token]:
    """Return a dimension as names and unnamed atoms; the groups are resolved.

    An axis that is split into several dimensions, e.g. height and width of an image, gets a number after its name.
    """
    atoms = list(resolve(dim))
    tokens: list[Token] = []
    while atoms:
        first = _first_group(atoms, dim, groups)
        if first is None:
            tokens.append(_part_of_group(atoms.pop(0), groups))
        else:
            name, group = first
            tokens.append(name)
            del atoms[: len(group)]
    return tokens


def _first_group(atoms: Sequence[Axis], dim: Dim, groups: Sequence[Group]) -> Group | None:
    """Return the group that the first atoms of a dimension are; None if they are no whole group."""
    for name, group in groups:
        run = tuple(atoms[: len(group)])
        is_width = name.endswith("head_dim")
        if run != group and not (is_width and _are_all_of(run, group, groups)):
            continue
        # A single query or key leaves no trace beside other axes, so its place is unknown.
        is_single = name in ("query", "key") and size_of(group) == 1
        if not is_single or len(dim) == len(group):
            return name, group
    return None


def _part_of_group(atom: Axis, groups: Sequence[Group]) -> Token:
    """Return the name of an atom that is a part of an axis, `query_1`; the atom itself if it is none."""
    if atom.size == 1:
        return atom
    for name, group in groups:
        if len(group) > 1 and atom in group:
            return f"{name}_{group.index(atom) + 1}"
    return atom


def _are_all_of(atoms: Sequence[Axis], group: Dim, groups: Sequence[Group]) -> bool:
    """Return whether these atoms are the parts of an axis, complete and in order.

    If only some features are rotated, one part may be a new axis. It counts if it has the place and the size of the
    part, and no other name.
    """
    if len(atoms) != len(group) or set(group).isdisjoint(atoms):
        return False
    named: set[Axis] = set()
    for _, axes in groups:
        named.update(axes)
    for atom, part in zip(atoms, group, strict=True):
        if atom is part:
            continue
        if atom.size != part.size or atom in named:
            return False
    return True


def write_dimension(dim: list[Token]) -> str:
    """Return one dimension of an einops pattern. Neighbours without a name become one number.

    `batch` and axes of 2 and 3 become `(batch 6)`.
    """
    words: list[str] = []
    number = 1
    for token in dim:
        if isinstance(token, Axis):
            number *= token.size
            continue
        if number > 1:
            words.append(str(number))
            number = 1
        words.append(token)
    if number > 1 or not words:
        words.append(str(number))
    return words[0] if len(words) == 1 else f"({' '.join(words)})"


def _written(dims: Tokens) -> str:
    """Return the einops pattern of all dimensions."""
    return " ".join(map(write_dimension, dims))


def _put_before_width(dim: list[Token], name: str) -> None:
    """Put the name of a single head before its features: `head_dim` becomes `heads head_dim`."""
    tokens: list[Token] = []
    for token in dim:
        if token in _WIDTHS:
            tokens.append(name)
        tokens.append(token)
    dim[:] = tokens


def _name_batch_of_one(dims: Tokens) -> None:
    """Name the one dimension that is a single axis of size one: `1 query embed` has a batch of one."""
    ones = [dim for dim in dims if _is_one_axis(dim, 1)]
    if len(ones) == 1 and not _has(dims, "batch"):
        ones[0][:] = ["batch"]


def _open_positions(dims: Tokens, others: Tokens, place: str) -> list[_Run]:
    """Return the dimensions beside the features that are positions: those without a name."""
    runs = [_whole(dim) for dim in others if _is_open(dim)]
    is_sure = _has(dims, "batch") or len(runs) < 2
    return runs if is_sure and not _has(dims, place) else []


def _beside_places(dims: Tokens) -> list[_Run]:
    """Return the axes beside queries or windows in one dimension: several positions share one query."""
    runs: list[_Run] = []
    for dim in dims:
        large = [run for run in _unnamed(dim) if run.size > 1]
        if len(large) != 1 or not any(map(_is_place, dim)):
            continue
        runs += large
    return runs


def _runs_to_name(dims: Tokens) -> list[_Run]:
    """Return the runs without a name; those of size one only where they are a whole dimension."""
    runs: list[_Run] = []
    for dim in dims:
        for run in _unnamed(dim):
            if run.is_whole or run.size != 1:
                runs.append(run)
    return runs


def _unnamed(dim: list[Token]) -> list[_Run]:
    """Return the runs of neighbouring atoms without a name."""
    runs: list[_Run] = []
    for place, token in enumerate(dim):
        if isinstance(token, str):
            continue
        start = place
        if runs and runs[-1].stop == place:
            start = runs.pop().start
        runs.append(_Run(dim, start, place + 1))
    return runs


def _whole(dim: list[Token]) -> _Run:
    """Return a whole dimension as a run."""
    return _Run(dim, 0, len(dim))


def _has(dims: Tokens, name: str) -> bool:
    """Return whether the dimensions already have a name, or its numbered parts."""
    return any(name in dim or _has_part(dim, name) for dim in dims)


def _has_part(dim: Sequence[Token], name: str) -> bool:
    """Return whether a dimension has a numbered part of a name: `query_1`."""
    names = [token for token in dim if isinstance(token, str)]
    return any(token.startswith(f"{name}_") for token in names)


def _is_place(token: Token) -> bool:
    """Return whether a token is a name of positions, or a part of one: `key_2`."""
    return isinstance(token, str) and token.split("_")[0] in PLACES


def _is_unnamed(dim: Sequence[Token]) -> bool:
    """Return whether a dimension has no name at all."""
    return all(isinstance(token, Axis) for token in dim)


def _is_open(dim: Sequence[Token]) -> bool:
    """Return whether a dimension larger than one has no name at all."""
    return _is_unnamed(dim) and _size(dim) > 1


def _is_one_axis(dim: Sequence[Token], size: int) -> bool:
    """Return whether a dimension is a single axis of this size, without a name."""
    if len(dim) != 1:
        return False
    token = dim[0]
    return isinstance(token, Axis) and token.size == size


def _has_width(dim: Sequence[Token]) -> bool:
    """Return whether a dimension has the features of a head."""
    return not _WIDTHS.isdisjoint(dim)


def _atoms_in(dim: Sequence[Token]) -> Dim:
    """Return the axes without a name."""
    return tuple(token for token in dim if isinstance(token, Axis))


def _size(dim: Sequence[Token]) -> int:
    """Return the number of elements of the axes without a name."""
    return prod(atom.size for atom in _atoms_in(dim))

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
from math import prod

from ..graph.attention import Attention, given_features
from ..graph.axis import setting, unify
from ..graph.dimensions import Axis, Dim, Dimensions, DimensionsOf, resolve, size_of, wide
from ..record.ops import TensorRef
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

Tokens = list[list[str | Axis]]
"""The dimensions of a tensor, each as names and unnamed atoms."""


class AxisNames:
    """The names of the axes of one attention."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._dimensions: DimensionsOf = dimensions
        self._attention = attention
        for mixing in (*attention.mixed_scores, *attention.mixed_weights):
            # A mixing of heads has the same axis before and after it, if the sizes agree.
            tensors = (mixing.source, mixing.op.output)
            unify(*(dimensions.of(tensor)[mixing.place] for tensor in tensors))
        self._roles = roles = Roles(attention, dimensions)
        branches = attention.branches
        self.num_heads = size_of(roles.heads) * max(1, len(branches))
        self.num_kv_heads = size_of(roles.kv_heads) * max(
            1, len({_place_of(turn.stages["k_heads"]) for turn in branches})
        )
        """Number of heads of keys and values, before any repeat."""
        self.head_order = ("heads", *(("group", "kv_heads") if roles.group_first else ("kv_heads", "group")))
        """The names of head axes, in the order in which the heads are numbered: that of the rows of W_q."""
        self.head_dim = size_of(roles.head_dim)
        self.maps = size_of(roles.maps)
        """Number of weight maps that one head combines, e.g. 2 in differential attention."""
        self.lengths = (1 if roles.own_keys else size_of(roles.query)), size_of(roles.key)
        """Numbers of queries and of keys of one softmax; with windows, of one window."""
        self.mixes_positions = roles.mixes_positions
        """Whether a view without a transpose splits the heads, so that each head sees features of a few positions."""
        self.within_tokens = roles.within_tokens
        """Whether the heads of one token attend to one another, and no token to another token."""
        self.over_features = roles.over_features
        """Whether the features of a head attend to one another, instead of positions."""
        self.num_windows = size_of(roles.windows)
        """Number of windows in the sequence; 1 without windows."""
        self._sides: dict[str, list[Group]] = {letter: roles.groups(letter) for letter in "qkvso"}
        stages = dict.fromkeys((*(stage for stage in _FIRST if stage in attention.stages), *attention.stages))
        shapes = {stage: tensor.shape for stage, tensor in attention.stages.items()}
        self._stages = one_size_a_name({stage: self._of_stage(stage) for stage in stages}, shapes)
        if roles.mixes_positions:
            self._stages.update(_as_meant(shapes))

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage in this implementation's layout."""
        return self._stages[stage]

    def taking(self, stages: Mapping[str, str]) -> AxisNames:
        """Return a copy with other axes for these stages."""
        other = copy.copy(self)
        other._stages = {**self._stages, **stages}
        return other

    def translated(self, attention: Attention, dimensions: DimensionsOf) -> AxisNames:
        """Return the names of an equal attention, with the dimensions of its tensors."""
        other = copy.copy(self)
        other._attention, other._dimensions = attention, dimensions
        return other

    def of(self, tensor: TensorRef, side: str = "") -> str:
        """Return the axes of any other tensor of this attention, e.g. of the returned weights, or of a `k` or `v`."""
        output = self._attention.stages.get("output")
        if self.mixes_positions and output is not None and output.id == tensor.id:
            return self._stages["output"]
        # A loop over heads concatenates them along a new axis, which is in no product.
        joined = ("heads",) if self._attention.branches else ()
        groups = [group for letter in (*side, "s", "o", "q") for group in self._sides[letter]]
        return " ".join(map(write_dimension, self._named(tensor, groups, joined)))

    def _of_stage(self, stage: str) -> str:
        """Return the pattern of a stage, and add new names to its side."""
        roles, tensor, letter = self._roles, self._attention.stages[stage], _SIDES.get(stage, stage[0])
        # Batch and heads are named by evidence only.
        words = CANONICAL_AXES[stage].replace("(", "").replace(")", "").split()
        expected = [name for name in words if name not in ("heads", "kv_heads", "batch")]
        if roles.within_tokens:
            expected = [name for name in expected if name != "query"]
        side = self._sides[letter]
        atoms = [atom for dim in self._dimensions.of(tensor) for atom in dim]
        own_keys = roles.own_keys
        if own_keys and letter in "kv" and (stage.endswith("heads") or atoms.count(own_keys[0]) > 1):
            side = [*side, ("query", own_keys)]
        if stage == "v_heads" and roles.own_values:
            side = [*side, ("query", roles.own_values)]
        width = self._width("query") or self._width("output")
        if stage in _OWN_WIDTH and width and self._width(stage) not in (0, width):
            expected[-1] = _OWN_WIDTH[stage]
        if roles.own_value_width and letter in "vo":
            expected = ["v_head_dim" if name == "head_dim" else name for name in expected]
        dims = self._named(tensor, side, expected, stage)
        if stage not in WITHIN and dims and not (roles.windows and stage == "context"):
            self._name_outside(dims, stage, expected)
        self._name_single_head(dims, stage)
        return " ".join(map(write_dimension, dims))

    def _width(self, stage: str) -> int:
        """Return the number of features of an input stage or of the output; 0 if the stage is absent."""
        shape = self._attention.stages[stage].shape if stage in self._attention.stages else ()
        return shape[self._place(stage, len(shape))] if shape else 0

    def _place(self, stage: str, rank: int) -> int:
        """Return the dimension of the features of an input stage or of the output."""
        if self._attention.earlier.get(stage):
            return given_features(self._attention, self._dimensions, stage)
        return self._attention.feature_place(stage, rank)

    def _width_place(self, stage: str) -> int | None:
        """Return the dimension of a stage that a matrix reads or makes; None if it could not be determined."""
        op = self._attention.first_projection(stage)
        dims = self._dimensions.of(self._attention.stages[stage]) if op is not None else ()
        if op is None or not dims:
            return None
        place = self._place(stage, len(dims))
        if op.base_name == "convolution":
            channels = (op.output if stage == "output" else op.inputs[0]).shape[1]
            return place if size_of(dims[place]) == channels and setting(op, 8, "groups", 1) == 1 else None
        if stage == "output":
            others = {*self._roles.batch, *self._roles.query, *self._roles.windows}
            if len(dims) > 3 and not wide(dims[-1]) and wide(dims[-2]) and not others & {*dims[-2]}:
                place = -2  # single columns that a matrix multiplies from the left
            return None if {*wide(dims[place])} & {*self._roles.query} else place
        # The input may have been moved before its projection.
        read = (dim for tensor in op.inputs for dim in self._dimensions.of(tensor)[-2:])
        return place if any(wide(dims[place]) == wide(dim) for dim in read) else None

    def _named(self, tensor: TensorRef, groups: list[Group], expected: Sequence[str], stage: str = "") -> Tokens:
        """Return the dimensions of a tensor with the names of these groups; open axes get the expected names."""
        known = [(name, resolve(group)) for name, group in groups if group]
        dims = [name_dimension(dim, known) for dim in self._dimensions.of(tensor)]
        self._tell_apart(dims, groups)
        self._name_packed(dims, tensor, stage)
        place = self._width_place(stage)
        if place is not None:
            # The input and output features of a matrix are one axis, even if another operation splits it.
            dims[place] = [*self._dimensions.of(tensor)[place]]
            _assign(dims[place], groups, (0, len(dims[place])), expected[-1])
        self._name_the_last(dims, groups, ["batch"], only_ones=True)
        self._name_the_last(dims, groups, expected)
        return dims

    def _tell_apart(self, dims: Tokens, groups: list[Group]) -> None:
        """Name query and key apart if they are one axis of the dataflow: the softmax runs over the second one."""
        known = dict(reversed(groups))
        if "key" not in known or "query" not in known or resolve(known["query"]) != resolve(known["key"]):
            return
        name = next(name for name, _ in groups if name in ("query", "key"))
        places = [(at, i) for at, dim in enumerate(dims) for i, token in enumerate(dim) if token == name]
        if len(places) == 2:
            order = ("key", "query") if self._attention.key_first else ("query", "key")
            for (at, i), renamed in zip(places, order, strict=True):
                dims[at][i] = renamed

    def _name_packed(self, dims: Tokens, tensor: TensorRef, stage: str) -> None:
        """Name the axis that counts the projections in one matrix: `qkv` if it has equal pieces for each.

        It is `packed` if the pieces differ, e.g. a single key/value head beside many query heads.
        """
        attention, is_given = self._attention, stage in _INPUTS
        op = attention.projections.get(_MADE_BY.get(stage, stage)) if is_given or stage.endswith("_proj") else None
        if op is None or not dims:
            return
        convolved, made = op.base_name == "convolution", op.inputs[0] if is_given else op.output
        by_channel = convolved and setting(op, 8, "groups", 1) == made.shape[1] > 1
        is_slice = tensor.numel != made.numel
        if (is_slice and (is_given or convolved)) or (is_given and not by_channel):
            return
        sides = [
            name for name in _INPUTS if attention.projections.get(name) is op or op in attention.earlier.get(name, ())
        ]
        name, count = _PACKED.get(tuple(sides), "packed"), 1 if is_slice else len(sides)
        dim = dims[1 if convolved and made.shape == tensor.shape else -1]
        self._name_turns(dim, stage)
        width = size_of(self._roles.value_dim if stage == "v_proj" else self._roles.head_dim)
        for start in range(1, len(dim)) if not _WIDTHS & set(dim) else ():  # features that were moved beyond following
            if len(_atoms_in(dim[start:])) == len(dim) - start and size_of(_atoms_in(dim[start:])) == width > 1:
                dim[start:] = ["v_head_dim" if stage == "v_proj" and self._roles.own_value_width else "head_dim"]
        runs = _unnamed(dim)
        if (
            len(runs) == 1
            and _size_of_run(dim, runs[0]) > 1
            and (_WIDTHS & set(dim) or _size_of_run(dim, runs[0]) != width)
        ):
            shared = stage[0] in "kv" and self.num_kv_heads < self.num_heads
            own = {count: name} if count > 1 else {(self.num_kv_heads, self.num_heads)[not shared]: _HEADS[shared]}
            word = own.get(_size_of_run(dim, runs[0]), "" if is_slice else "packed")
            dim[slice(*runs[0])] = [word] if word else dim[slice(*runs[0])]
        apart = [dim for dim in dims if len(dim) == 1 and isinstance(dim[0], Axis) and dim[0].size == count > 1]
        if len(apart) == 1 and _has(dims, "head_dim") and not (_has(dims, name) or _has(dims, "packed")):
            apart[0][:] = [name]

    def _name_turns(self, dim: list[str | Axis], stage: str) -> None:
        """Name the axis that a loop over heads slices, one piece per turn."""
        width = self._roles.value_dim if stage in ("value", "v_proj") else self._roles.head_dim
        left = [at for at, token in enumerate(dim) if isinstance(token, Axis) and token.size > 1]
        turns = [at for at in left if _size_of_run(dim, (at, at + 1)) == len(self._attention.branches)]
        if len(left) == 1 == len(turns) and (size_of(width) == 1 or _WIDTHS & set(dim)):
            dim[turns[0]] = "heads"

    def _name_the_last(
        self, dims: Tokens, groups: list[Group], expected: Sequence[str], *, only_ones: bool = False
    ) -> None:
        """Give the one missing name to the one unnamed axis, if there is one of each, and add it to the groups."""
        left = [
            (dim, run) for dim in dims for run in _unnamed(dim) if run == (0, len(dim)) or _size_of_run(dim, run) != 1
        ]
        if not left:
            return
        there = _WIDTHS if _has(dims, "packed") else ()  # the features of a head are a part of what is packed
        missing = [name for name in expected if not _has(dims, name) and name not in there]
        if only_ones:
            left = [(dim, run) for dim, run in left if len(dim) == 1 == _size_of_run(dim, run)]
        elif len(missing) > 1 or len(left) > 1:
            # Axes of size one are no evidence beside others.
            left = [(dim, run) for dim, run in left if _size_of_run(dim, run) > 1]
        sizes = {"head_dim": self.head_dim, "v_head_dim": size_of(self._roles.value_dim), "heads": self.num_heads}
        if there and left and _size_of_run(*left[0]) > size_of(self._roles.key):
            return  # positions that are pooled or cut are no keys; of fewer, the others are cached
        if len(missing) == 1 == len(left) and sizes.get(missing[0]) in (None, _size_of_run(*left[0])):
            _assign(left[0][0], groups, left[0][1], missing[0])

    def _name_outside(self, dims: Tokens, stage: str, expected: Sequence[str]) -> None:
        """Name open axes of a stage outside the heads: its width, and positions that are no queries or keys."""
        for name in PLACES if stage in _INPUTS else ():  # new keys may be the second part, behind cached ones
            parts = [dim for dim in dims if any(isinstance(part, str) and part.startswith(f"{name}_") for part in dim)]
            if len(parts) == 1 == len(parts[0]):
                parts[0][:] = [name]
        if stage in _INPUTS:
            place = given_features(self._attention, self._dimensions, stage)
        else:
            place = self._attention.feature_place(_MADE_BY.get(stage, ""), len(dims))
        features = next((dim for dim in dims if _WIDTHS & set(dim)), dims[place])
        projected = stage in _INPUTS or (stage in ("concat", "output") and "output" in self._attention.projections)
        if projected and not _has(dims, "embed") and _is_open(features):
            features[:] = [expected[-1] if stage in _INPUTS else "embed"]
        self._name_turns(features, stage)
        if stage in ("q_proj", "k_proj", "v_proj", "concat") and _WIDTHS & set(features):
            # One matrix may also have several queries or keys of each head, or several attentions.
            open_runs = [run for run in _unnamed(features) if _size_of_run(features, run) > 1]
            for run in open_runs[:1] if len(open_runs) == 1 else ():
                features[slice(*run)] = ["packed"]
        others = [dim for dim in dims if dim is not features]
        left = [(dim, (0, len(dim))) for dim in others if _is_open(dim)]
        if _has(dims, expected[0]) or (len(left) > 1 and not _has(dims, "batch")):
            if len(left) == 1 and stage in self._attention.projections and not _has(dims, "batch"):
                left[0][0][:] = ["batch"]  # the rows of this batch are processed one by one
            left = []
        # Axes beside queries or windows: several positions share one query, or queries are processed in pieces.
        for dim in others:
            runs = [run for run in _unnamed(dim) if _size_of_run(dim, run) > 1]
            if len(runs) == 1 and any(isinstance(token, str) and token.split("_")[0] in PLACES for token in dim):
                left.append((dim, (0, len(dim)) if self._counts_pieces(dim[slice(*runs[0])]) else runs[0]))
        for number, (dim, run) in enumerate(left, start=1):
            dim[slice(*run)] = [POSITIONS if len(left) == 1 else f"{POSITIONS}_{number}"]

    def _name_single_head(self, dims: Tokens, stage: str) -> None:
        """Name the dimension of a single head of queries, or of keys and values, and its place in their projection."""
        shared = _SIDES.get(stage, stage[0]) in "kv" and self.num_kv_heads < self.num_heads
        if (self.num_kv_heads if shared else self.num_heads) > 1 or any(_has(dims, name) for name in _HEADS):
            return
        if stage.endswith("_heads") and self._roles.heads:
            ones = [dim for dim in dims if len(_atoms_in(dim)) == len(dim) and size_of(_atoms_in(dim)) == 1]
            if len(ones) == 1:
                ones[0][:] = [_HEADS[shared]]
        if stage.endswith("_proj") or stage == "concat":
            for dim in (dim for dim in dims if "packed" not in dim):
                dim[:] = [word for token in dim for word in ((_HEADS[shared], token) if token in _WIDTHS else (token,))]

    def _counts_pieces(self, tokens: Sequence[str | Axis]) -> bool:
        """Return whether these axes count the pieces of the queries or of the keys."""
        pieces = [atoms[0] for atoms in map(resolve, (self._roles.query, self._roles.key)) if atoms]
        return any(resolve(counter) == tuple(tokens) for piece in pieces for counter in piece.counters.values())


def _place_of(tensor: TensorRef) -> tuple[object, ...]:
    """Return the place of a tensor in memory: turns of a loop that slice the same key head have different tensors."""
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride


def _assign(dim: list[str | Axis], groups: list[Group], run: tuple[int, int], name: str) -> None:
    """Name a run of a dimension's axes, and add the name to the groups."""
    atoms = _atoms_in(dim[slice(*run)])
    dim[slice(*run)] = [name]
    if size_of(atoms) > 1:
        groups.append((name, atoms))


def _as_meant(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the axes that a view without a transpose was meant to have: those of the textbook layout."""
    meant = {stage: axes.replace("(kv_heads head_dim)", "embed") for stage, axes in CANONICAL_AXES.items()}
    meant = {stage: axes.replace("(heads head_dim)", "embed") for stage, axes in meant.items()}
    width = shapes["q_heads"][1] * shapes["q_heads"][-1]
    for stage in ("q_proj", "k_proj", "v_proj"):
        if stage in shapes and shapes[stage][-1] != width:
            meant[stage] = meant[stage].replace("embed", "packed")
    return {stage: meant[stage] for stage, shape in shapes.items() if len(shape) == len(meant[stage].split())}


# -- one dimension ----------------------------------------------------------------------------------------------------


def name_dimension(dim: Dim, known: Sequence[Group]) -> list[str | Axis]:
    """Return a dimension as names and unnamed atoms; `known` are the groups, resolved.

    An axis that is split into several dimensions, e.g. height and width of an image, gets a number after its name.
    """
    atoms = list(resolve(dim))
    tokens: list[str | Axis] = []
    while atoms:
        for name, group in known:
            run = tuple(atoms[: len(group)])
            if run != group and not (name.endswith("head_dim") and _are_all_of(run, group, known)):
                continue
            # A single query or key leaves no trace beside other axes, so its place is unknown.
            if len(dim) == len(group) or name not in ("query", "key") or size_of(group) > 1:
                tokens.append(name)
                del atoms[: len(group)]
                break
        else:
            atom = atoms.pop(0)
            parts = (f"{name}_{group.index(atom) + 1}" for name, group in known if len(group) > 1 and atom in group)
            tokens.append(next(parts, atom) if atom.size > 1 else atom)
    return tokens


def _are_all_of(atoms: Sequence[Axis], group: Dim, known: Sequence[Group]) -> bool:
    """Return whether these atoms are the parts of an axis, complete and in order.

    If only some features are rotated, one part may be a new axis. It counts if it has the place and the size of the
    part, and no other name.
    """
    if len(atoms) != len(group) or not any(atom in group for atom in atoms):
        return False
    named = {atom for _, others in known for atom in others}
    pairs = zip(atoms, group, strict=True)
    return all(atom is part or (atom.size == part.size and atom not in named) for atom, part in pairs)


def _has(dims: Tokens, name: str) -> bool:
    """Return whether the dimensions already have a name, or its numbered parts."""
    return any(isinstance(token, str) and (token == name or token.startswith(f"{name}_")) for d in dims for token in d)


def _is_open(dim: list[str | Axis]) -> bool:
    """Return whether a dimension larger than one has no name at all."""
    return not any(isinstance(token, str) for token in dim) and _size_of_run(dim, (0, len(dim))) > 1


def _unnamed(dim: list[str | Axis]) -> list[tuple[int, int]]:
    """Return the runs (start, stop) of neighbouring atoms without a name."""
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(dim):
        if isinstance(token, str):
            continue
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


def write_dimension(dim: list[str | Axis]) -> str:
    """Return one dimension of an einops pattern. Neighbours without a name become one number."""
    words: list[str] = []
    number = 1
    for token in [*dim, ""]:
        if isinstance(token, Axis):
            number *= token.size
            continue
        if number > 1 or (not token and not words):
            words.append(str(number))
        number = 1
        if token:
            words.append(token)
    return words[0] if len(words) == 1 else f"({' '.join(words)})"


def _atoms_in(dim: Sequence[str | Axis]) -> Dim:
    return tuple(token for token in dim if isinstance(token, Axis))


def _size_of_run(dim: Sequence[str | Axis], run: tuple[int, int]) -> int:
    """Return the number of elements of the unnamed axes in a run."""
    return prod(token.size for token in dim[run[0] : run[1]] if isinstance(token, Axis))

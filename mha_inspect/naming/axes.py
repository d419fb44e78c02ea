"""Name the dimensions of an attention's tensors, from evidence, as einops patterns.

The evidence is `dimensions`: which parts of which tensors are the same axis. The product of the scores says which axes
are query, key and head_dim; what the query's projection takes in says which are batch; the other axes of that product
are the heads. An axis that this leaves open is named when one name and one axis are left; otherwise it stays a number.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from ..graph.attention import Attention, given_features
from ..graph.axis import setting
from ..graph.dimensions import Axis, Dimensions, resolve, size_of, wide
from ..record.ops import TensorRef
from .roles import Group, Roles
from .sizes import POSITIONS, WITHIN, one_size_a_name
from .stages import CANONICAL_AXES
from .tokens import has, is_open, name_dimension, name_packed, name_turns, size_of_run, unnamed, write_dimension

_INPUTS = ("query", "key", "value")
_PROJECTED = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "concat": "output", "output": "output"}
"""By which projection the features of a stage are where they are."""
_PLACES = ("query", "key", "windows")
_OWN_WIDTH = {"key": "kdim", "value": "vdim"}
"""What a width other than the query's is called."""
_SIDES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "scores": "s",
    "masked_scores": "s",
    "weights": "s",
    "context": "o",
    "concat": "o",
    "output": "o",
}
"""Which side a stage belongs to; the others have it for a letter: `q_proj`."""
_PACKED = {("query", "key", "value"): "qkv", ("key", "value"): "kv", ("query", "key"): "qk"}
"""What the axis is called that counts the projections in one matrix."""


class AxisNames:
    """The names of the axes of one attention."""

    def __init__(self, attention: Attention, dimensions: Dimensions) -> None:
        self._dimensions = dimensions
        self._attention = attention
        for mixing in (*attention.mixed_scores, *attention.mixed_weights):
            # From heads to heads, where there are as many.
            tensors = (mixing.source, mixing.op.output)
            dimensions.same(*(dimensions.of(tensor)[mixing.place] for tensor in tensors))
        self._roles = roles = Roles(attention, dimensions)
        self._heads = roles.heads
        self._sides: dict[str, list[Group]] = {letter: list(roles.groups(letter)) for letter in "qkvso"}
        self._stages = {stage: self._of_stage(stage) for stage in sorted(attention.stages, key=_from_heads_outward)}
        shapes = {stage: tensor.shape for stage, tensor in attention.stages.items()}
        self._stages = one_size_a_name(self._stages, shapes)
        if roles.mixes_positions:
            self._stages.update(_as_meant(shapes))

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return size_of(self._heads) * max(1, len(self._attention.branches))

    @property
    def num_kv_heads(self) -> int:
        """Number of heads that keys and values were projected to, before they were repeated."""
        branches = self._attention.branches
        shared = len({branch.stages["k_heads"].id for branch in branches}) if branches else 1
        return size_of(self._roles.kv_heads) * shared

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return size_of(self._roles.head_dim)

    @property
    def maps(self) -> int:
        """Number of softmaxes of a head whose weights are put together, as in differential attention."""
        return size_of(self._roles.maps)

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and of keys of one softmax: of each window, where there are windows."""
        if self._roles.own_keys:
            return 1, size_of(self._roles.key)
        return size_of(self._roles.query), size_of(self._roles.key)

    @property
    def mixes_positions(self) -> bool:
        """Whether a view splits the heads without a transpose, so that each has the features of some positions."""
        return self._roles.mixes_positions

    @property
    def over_features(self) -> bool:
        """Whether the features of a head attend to one another, and not positions to positions."""
        return self._roles.over_features

    @property
    def num_windows(self) -> int:
        """Number of windows that the sequence was cut into; 1 where it was not."""
        return size_of(self._roles.windows)

    def of_stage(self, stage: str) -> str:
        """The axes of a stage, as this implementation lays it out."""
        return self._stages[stage]

    def taking(self, stages: Mapping[str, str]) -> AxisNames:
        """The same with other axes of these stages."""
        other = copy.copy(self)
        other._stages = {**self._stages, **stages}
        return other

    def of(self, tensor: TensorRef) -> str:
        """The axes of any other tensor of this attention, such as the weights that it returns."""
        output = self._attention.stages.get("output")
        if self._roles.mixes_positions and output is not None and output.id == tensor.id:
            return self._stages["output"]
        # The heads of a loop stand side by side in what it returns, along an axis that no product knows.
        joined = ("heads",) if self._attention.branches else ()
        return self._write(tensor, [*self._sides["s"], *self._sides["o"], *self._sides["q"]], joined)

    def _of_stage(self, stage: str) -> str:
        """Name a stage, and remember what the naming taught about its side."""
        expected = _expected(stage)
        if self._roles.over_features and _side(stage) == "s":
            expected = ["head_dim", "key_head_dim"]
        tensor = self._attention.stages[stage]
        side = self._sides[_side(stage)]
        own_keys = self._roles.own_keys
        held = [atom for dim in self._dimensions.of(tensor) for atom in dim]
        if own_keys and _side(stage) in "kv" and (stage.endswith("heads") or held.count(own_keys[0]) > 1):
            side = [*side, ("query", own_keys)]
        if stage == "v_heads" and self._roles.own_values:
            side = [*side, ("query", self._roles.own_values)]
        width = self._width("query") or self._width("output")
        if stage in _OWN_WIDTH and width and self._width(stage) not in (0, width):
            expected[-1] = _OWN_WIDTH[stage]
        if self._roles.own_value_width and _side(stage) in "vo":
            expected = ["v_head_dim" if name == "head_dim" else name for name in expected]
        return self._write(tensor, side, expected, stage)

    def _width(self, stage: str) -> int:
        """How many features a stage that is given, or the output, has; 0 where it is not there."""
        shape = self._attention.stages[stage].shape if stage in self._attention.stages else ()
        return shape[self._place(stage, len(shape))] if shape else 0

    def _place(self, stage: str, rank: int) -> int:
        """Which dimension of a stage that is given, or of the output, the features are."""
        if self._attention.earlier.get(stage):
            return given_features(self._attention, self._dimensions, stage)
        return self._attention.feature_place(stage, rank)

    def _width_place(self, stage: str) -> int | None:
        """Which dimension of a stage is what a matrix takes in or gives; None where that is not known."""
        op = self._attention.first_projection(stage)
        dims = self._dimensions.of(self._attention.stages[stage]) if op is not None else ()
        if op is None or not dims:
            return None
        place = self._place(stage, len(dims))
        if op.base_name == "convolution":
            channels = (op.output if stage == "output" else op.inputs[0]).shape[1]
            return place if size_of(dims[place]) == channels and setting(op, 8, "groups", 1) == 1 else None
        others = {*self._roles.batch, *self._roles.query, *self._roles.windows}
        if stage == "output" and len(dims) > 3 and not wide(dims[-1]) and wide(dims[-2]) and not others & {*dims[-2]}:
            place = -2  # columns of one, which a matrix multiplies from the left
        last = wide(dims[place])
        if stage == "output":
            return None if set(last) & {*self._roles.query} else place
        # What was given to the forward may have been moved before it is projected.
        return place if any(last == wide(dim) for read in op.inputs for dim in self._dimensions.of(read)[-2:]) else None

    def _packed(self, stage: str) -> tuple[str, int, int]:
        """Name, size and place of the axis that counts projections, where a stage is one product for several of them.

        A convolution's features are behind the batch. One of each channel by itself is given as many as it makes.
        """
        names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
        own = self._attention.projections.get(names.get(stage, stage if stage in _INPUTS else ""))
        if own is None:
            return "", 0, -1
        convolved = own.base_name == "convolution"
        made = own.output if stage in names else own.inputs[0]
        if stage not in names and not (convolved and setting(own, 8, "groups", 1) == own.inputs[0].shape[1] > 1):
            return "", 0, -1
        found = self._attention
        sharing = tuple(
            name for name in _INPUTS if found.projections.get(name) is own or own in found.earlier.get(name, ())
        )
        tensor = self._attention.stages[stage]
        place = 1 if convolved and made.shape == tensor.shape else -1
        return (_PACKED.get(sharing, "packed"), len(sharing), place) if tensor.numel == made.numel else ("", 0, -1)

    def _write(
        self,
        tensor: TensorRef,
        groups: list[Group],
        expected: Sequence[str],
        stage: str = "",
    ) -> str:
        dims = [name_dimension(dim, groups) for dim in self._dimensions.of(tensor)]
        self._tell_apart(dims, groups)
        packed, value, place = self._packed(stage), stage == "v_proj", self._width_place(stage)
        if packed[1]:
            width = self._roles.value_dim if value else self._roles.head_dim
            features = dims[-1:] if packed[2] < 0 else dims[packed[2] : packed[2] + 1]
            name_turns(features, len(self._attention.branches), size_of(width))
            name_packed(features, packed[:2], self._roles, value=value)
            apart = [dim for dim in dims if len(dim) == 1 and isinstance(dim[0], Axis) and dim[0].size == packed[1] > 1]
            if len(apart) == 1 and has(dims, "head_dim"):
                apart[0][:] = [packed[0]]
        if place is not None:
            # What a matrix takes in and gives is one axis, also where something else splits it.
            dims[place] = [*self._dimensions.of(tensor)[place]]
            self._assign(dims, groups, place, (0, len(dims[place])), expected[-1])
        self._name_the_last(dims, groups, ["batch"], only_ones=True)
        self._name_the_last(dims, groups, expected)
        if stage and stage not in WITHIN and dims and not (self._roles.windows and stage == "context"):
            self._name_outside(dims, stage, expected)
        return " ".join(write_dimension(dim) for dim in dims)

    def _tell_apart(self, dims: list[list[str | Axis]], groups: list[Group]) -> None:
        """Where the dataflow took query and key for one axis, the second is the one that the softmax runs over."""
        known = dict(reversed(groups))
        if "key" not in known or "query" not in known or resolve(known["query"]) != resolve(known["key"]):
            return
        name = next((name for name, _ in groups if name in ("query", "key")), "")
        places = [(at, i) for at, dim in enumerate(dims) for i, token in enumerate(dim) if token == name]
        if len(places) == 2:
            order = ("key", "query") if self._attention.key_first else ("query", "key")
            for (at, i), own in zip(places, order, strict=True):
                dims[at][i] = own

    def _name_the_last(
        self, dims: list[list[str | Axis]], groups: list[Group], expected: Sequence[str], *, only_ones: bool = False
    ) -> None:
        """Where one expected name and one axis are left, they belong together; remember it for the other stages."""
        missing = [name for name in expected if not has(dims, name)]
        left = [
            (place, run)
            for place, dim in enumerate(dims)
            for run in unnamed(dim)
            if run == (0, len(dim)) or size_of_run(dim, run) != 1
        ]
        if only_ones:
            left = [(place, run) for place, run in left if len(dims[place]) == 1 == size_of_run(dims[place], run)]
        if len(missing) > 1 or len(left) > 1:
            # Axes of size one tell nothing beside others.
            left = [(place, run) for place, run in left if size_of_run(dims[place], run) > 1] if not only_ones else left
        if len(missing) != 1 or len(left) != 1:
            return
        place, run = left[0]
        name = missing[0]
        known = {"head_dim": self.head_dim, "v_head_dim": size_of(self._roles.value_dim), "heads": self.num_heads}
        if name in known and size_of_run(dims[place], run) != known[name]:
            return
        self._assign(dims, groups, place, run, name)

    def _name_outside(self, dims: list[list[str | Axis]], stage: str, expected: Sequence[str]) -> None:
        """Name what is left of a stage outside the heads: its width, and positions that are no queries or keys."""
        if stage in _INPUTS:
            place = given_features(self._attention, self._dimensions, stage)
        else:
            place = self._attention.feature_place(_PROJECTED.get(stage, ""), len(dims))
        heads = [dim for dim in dims if {"head_dim", "v_head_dim"} & set(dim)]
        features = [*heads, dims[place]][0]
        projected = stage in _INPUTS or (stage in ("concat", "output") and "output" in self._attention.projections)
        if projected and not has(dims, "embed") and is_open(features):
            features[:] = [expected[-1] if stage in _INPUTS else "embed"]
        width = self._roles.value_dim if stage in ("value", "v_proj") else self._roles.head_dim
        name_turns([features], len(self._attention.branches), size_of(width))
        if stage in ("q_proj", "k_proj", "v_proj", "concat") and {"head_dim", "v_head_dim"} & set(features):
            # Beside heads and their features: several queries, or keys, of each head in one matrix; several attentions.
            open_runs = [run for run in unnamed(features) if size_of_run(features, run) > 1]
            for run in open_runs[:1] if len(open_runs) == 1 else ():
                features[slice(*run)] = ["packed"]
        others = [dim for dim in dims if dim is not features]
        left = [(dim, (0, len(dim))) for dim in others if is_open(dim)]
        if has(dims, expected[0]) or (len(left) > 1 and not has(dims, "batch")):
            if len(left) == 1 and stage in self._attention.projections and not has(dims, "batch"):
                left[0][0][:] = ["batch"]  # whose rows are taken one after the other
            left = []
        # Those beside queries, or windows: of several positions there is one query, or they are asked piece by piece.
        for dim in others:
            runs = [run for run in unnamed(dim) if size_of_run(dim, run) > 1]
            if len(runs) == 1 and any(isinstance(token, str) and token.split("_")[0] in _PLACES for token in dim):
                left.append((dim, (0, len(dim)) if self._counts_pieces(dim[slice(*runs[0])]) else runs[0]))
        for number, (dim, run) in enumerate(left, start=1):
            dim[slice(*run)] = [POSITIONS if len(left) == 1 else f"{POSITIONS}_{number}"]

    def _counts_pieces(self, tokens: Sequence[str | Axis]) -> bool:
        """Whether these count the pieces that queries, or keys, were cut into."""
        pieces = [atoms[0] for atoms in map(resolve, (self._roles.query, self._roles.key)) if atoms]
        return any(resolve(counter) == tuple(tokens) for piece in pieces for counter in piece.counters.values())

    def _assign(
        self, dims: list[list[str | Axis]], groups: list[Group], place: int, run: tuple[int, int], name: str
    ) -> None:
        start, stop = run
        atoms = tuple(token for token in dims[place][start:stop] if isinstance(token, Axis))
        dims[place][start:stop] = [name]
        if size_of(atoms) > 1:
            groups.append((name, atoms))


def _as_meant(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the axes that a view which mixes positions is taken for, of stages laid out as textbooks have it."""
    meant = {stage: axes.replace("(kv_heads head_dim)", "embed") for stage, axes in CANONICAL_AXES.items()}
    meant = {stage: axes.replace("(heads head_dim)", "embed") for stage, axes in meant.items()}
    width = shapes["q_heads"][1] * shapes["q_heads"][-1]
    for stage in ("q_proj", "k_proj", "v_proj"):
        if stage in shapes and shapes[stage][-1] != width:
            meant[stage] = meant[stage].replace("embed", "packed")
    return {stage: meant[stage] for stage, shape in shapes.items() if len(shape) == len(meant[stage].split())}


def _side(stage: str) -> str:
    """Which of query, key, value, scores and output a stage belongs to."""
    return _SIDES.get(stage, stage[0])


def _from_heads_outward(stage: str) -> int:
    """An order in which each stage is named after those that teach about it."""
    order = ("q_heads", "k_heads", "v_heads", "q_proj", "k_proj", "v_proj", "query", "key", "value")
    return order.index(stage) if stage in order else len(order)


def _expected(stage: str) -> list[str]:
    """The names that a stage's canonical axes have; batch and heads are there by evidence or not at all."""
    names = CANONICAL_AXES[stage].replace("(", " ").replace(")", " ").split()
    return [name for name in names if name not in ("heads", "kv_heads", "batch")]

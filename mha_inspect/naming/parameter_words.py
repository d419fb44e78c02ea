"""Describe what each parameter of a recorded module is for: in words, as an einops pattern, with the rows of each head.

The text of `in_proj_weight` of torch's layer with 3 heads of 4 features is
`W_q, W_k, W_v stacked: rows 0–11, 12–23, 24–35`, its pattern `(qkv heads head_dim) embed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import nn

from ..graph.attention import Attention
from ..graph.dataflow import moves
from ..graph.equal_layers import Layer
from ..record.ops import Op, TensorRef
from ..reports.params import HeadSlice
from .axes import AxisNames
from .named_run import NamedRun
from .parameters import FACTORS, SIDES, Serves, num_heads, parameters_behind, parts_in
from .pattern import dims_of, in_words
from .placement import Placement, are_in_blocks, axes_of, blocks_of, varying_dim
from .projection import Part

_MADE_INTO = {"q": "queries", "k": "keys", "v": "values", "g": "gates"}
_SAID = {
    "norm": "scales the {made} after their projection",
    "shift": "added to the {made} after their projection",
    "filter": "convolves the {made} after their projection, each channel by itself",
    "before": "projects the input down, before the {made}",
    "beside": "another projection used for the {made}",
    "factor": "a factor of {matrices}",
    "added factor": "a factor of what is added to {matrices}",
    "computed": "{matrices} is computed from it",
    "gate": "gates the {made}",
    "absorbed": "{others} by head, absorbed into the {made}",
    "norm before": "scales the input of the projection to the {made}",
    "shift before": "added to the input of the projection to the {made}",
    "filter before": "convolves the input of the projection to the {made}, each channel by itself",
    "learned": "the {made} themselves: learned, the same for every input",
    "appended": "learned, and appended to the {made}",
    "prepended": "learned, and prepended to the {made}",
    "scores": "added to the scores",
    "in scores": "used in the scores",
    "in weights": "used in the weights, after the softmax",
    "sinks": "attention sinks: scores without a value",
}
"""Kind of use to its text, for parameters other than the matrices and biases of projections."""
_JOINED = {"joined W": "W", "joined b": "b"}
"""Kinds of use for tokens that have projections of their own, beside those of the query."""
_EARLY = ("norm before", "shift before", "filter before")
"""Kinds of use before the projection; in the slices of heads they are called `norm`, `shift` and `filter`."""
_BESIDE = ("scores", "in scores", "in weights", "sinks", "learned")
"""Kinds of use outside the queries, keys, values and output of the heads."""
_TRANSPOSED = {
    "rows are the heads stacked": "columns are the heads side by side",
    "columns are the heads side by side": "rows are the heads stacked",
    "stacked: rows": "side by side: columns",
    "side by side: columns": "stacked: rows",
    "rows": "columns",
    "columns": "rows",
    "one row per head": "one column per head",
}
"""Words about a matrix to those about its transpose; longer ones come first."""
_PACKED = ("qkv", "kv", "qk")
"""Names of the axis that counts the parts in one parameter."""


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter in a recording."""

    axes: str
    """The dimensions as an einops pattern; empty if they could not be named."""
    text: str
    heads: tuple[HeadSlice, ...] = ()
    is_part: bool = False
    """Whether the head of each element is known, including elements that belong to no head."""

    def transposed(self) -> ParameterRole:
        """Return the role of the transposed matrix: `stacked: rows 0–63` becomes `side by side: columns 0–63`."""
        dims = dims_of(self.axes)
        if len(dims) != 2:
            return self
        text = re.sub("|".join(_TRANSPOSED), lambda word: _TRANSPOSED[word[0]], self.text)
        heads: list[HeadSlice] = []
        for piece in self.heads:
            if piece.columns is not None:
                heads.append(replace(piece, rows=piece.columns, columns=piece.rows))
        return replace(self, axes=in_words(dims[::-1]), text=text, heads=tuple(heads))


@dataclass
class _Use:
    """The use of a parameter in one attention."""

    kind: str
    letters: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def roles_of(run: NamedRun, module: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of each parameter of a module that was run, by name.

    The role of a parameter outside attentions is the class of its layer, `LayerNorm`, or else the first operation that
    uses it, e.g. of a table of positions.
    """
    in_attentions: dict[str, list[ParameterRole]] = {}
    for of_attention in run.read_parameters(_roles_in, _in_layer):
        for name, role in of_attention.items():
            in_attentions.setdefault(name, []).append(role)
    roles = {name: _joined_role(of_name) for name, of_name in in_attentions.items()}
    readers = _readers(run)
    for named in run.recording.parameters:
        if named.name not in roles:
            text = _outside(layer_class(module, named.name), readers.get(named.name, ""))
            roles[named.name] = ParameterRole("", text)
    return roles


def _joined_role(roles: Sequence[ParameterRole]) -> ParameterRole:
    """Return the role of a parameter in several attentions: the slices of the most detailed one, the texts of all."""
    detailed = max(roles, key=lambda role: len(role.heads))
    texts = dict.fromkeys(role.text for role in roles)
    return replace(detailed, text="; ".join(texts))


def _roles_in(run: NamedRun, place: int) -> dict[str, ParameterRole]:
    """Return the roles of the parameters of one attention of a run, by name."""
    attention, names = run.attentions[place]
    parts, serves = parts_in(run, place)
    words = _Words(attention, names, serves)
    uses = _uses(run, attention, parts)
    return {name: words.role(use) for name, use in uses.items()}


def _in_layer(roles: dict[str, ParameterRole], layer: Layer) -> dict[str, ParameterRole]:
    """Return the roles with the names of the parameters of an equal layer."""
    return {layer.parameter(name).name: role for name, role in roles.items()}


def _outside(layer: str, reader: str) -> str:
    """Return the role of a parameter outside attentions: `LayerNorm`, `Linear, not used by this forward`."""
    if not reader:
        return f"{layer}, not used by this forward" if layer else "not used by this forward"
    return layer or f"used by {reader}"


def layer_class(module: nn.Module, parameter: str) -> str:
    """Return the class of the layer with a parameter, `Linear`; empty for a module that has modules inside."""
    try:
        layer = module.get_submodule(parameter.rpartition(".")[0])
    except AttributeError:  # a module may name its parameters as it likes
        return ""
    if next(layer.children(), None) is not None:
        return ""
    for cls in type(layer).__mro__:
        # torch has classes that are not public: NonDynamicallyQuantizableLinear is a Linear.
        if not cls.__module__.startswith("torch.nn.") or hasattr(nn, cls.__name__):
            return cls.__name__
    return ""


def _readers(run: NamedRun) -> dict[str, str]:
    """Return for each parameter the first operation that computes with it; views, copies and casts do not count."""
    readers: dict[str, str] = {}
    in_memory: dict[int, set[str]] = {}  # storage to the parameters that it contains, or copies of them
    for named in run.recording.parameters:
        in_memory.setdefault(named.tensor.storage, set()).add(named.name)
    for op in run.recording.ops:
        names = _parameters_read(op, in_memory)
        if not names:
            continue
        if moves(op):
            for tensor in op.outputs:
                in_memory.setdefault(tensor.storage, set()).update(names)
        else:
            for name in names:
                readers.setdefault(name, op.base_name)
    return readers


def _parameters_read(op: Op, in_memory: Mapping[int, set[str]]) -> set[str]:
    """Return the names of the parameters that an operation reads; memory that it only writes to is not read."""
    in_place = op.inputs[:1] if op.kind == "write" else ()
    written = op.kwargs.get("out", in_place)  # FSDP gathers into its parameters
    if not isinstance(written, tuple):
        written = (written,)
    names: set[str] = set()
    for tensor in op.inputs:
        if tensor.storage in in_memory and tensor not in written:
            names |= in_memory[tensor.storage]
    return names


# -- which parameters -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Tensors that are made of parameters, which all have one kind of use."""

    kind: str
    letter: str
    tensors: Sequence[TensorRef]
    passes: Callable[[Op], bool] = lambda op: True
    """Whether an operation between the parameters and the tensors belongs to the use."""


def _uses(
    run: NamedRun,
    attention: Attention,
    parts: Sequence[Part],
) -> dict[str, _Use]:
    """Return the use of each parameter of an attention, by name; the first use if there are several."""
    uses: dict[str, _Use] = {}
    for part in sorted(parts, key=_rank_of_kind):
        use = uses.setdefault(part.parameter.name, _Use(part.kind))
        if use.kind == part.kind and part.letter not in use.letters:
            use.letters.append(part.letter)
            use.parts.append(part)
    for source in (*_learned_sides(run, attention), *_around_scores(run, attention)):
        for named in parameters_behind(run, source.tensors, source.passes):
            use = uses.setdefault(named.name, _Use(source.kind))
            if use.kind == source.kind and source.letter not in use.letters:
                use.letters.append(source.letter)
    return uses


def _rank_of_kind(part: Part) -> int:
    """Return the order of uses: matrices first, then biases, then any others."""
    return {"W": 0, "b": 1}.get(part.kind, 2)


def _learned_sides(run: NamedRun, attention: Attention) -> Iterator[_Source]:
    """Yield queries, keys and values that are parameters themselves."""
    for letter in "qkv":
        tensor = attention.stages.get(SIDES[letter])
        if tensor is not None and run.graph.is_weight(tensor):
            yield _Source("learned", letter, [tensor])


def _around_scores(run: NamedRun, attention: Attention) -> Iterator[_Source]:
    """Yield the tensors that are added to the scores, or that scores and weights are computed with."""
    graph, stages, softmax = run.graph, attention.stages, attention.softmax
    masks: list[TensorRef] = []
    for op in attention.masks:
        for tensor in op.inputs:
            if not graph.comes_from_inputs(tensor):
                masks.append(tensor)
    yield _Source("scores", "", masks)
    if attention.sinks is not None:
        yield _Source("sinks", "", _weights_read(run, [attention.sinks]))
    heads = (stages["q_heads"], stages["k_heads"])
    yield _Source("in scores", "", [softmax.inputs[0]], _is_after(run, heads))
    product = attention.value_product
    weights = product.right if attention.value_first else product.left
    # Weights that are put together from pieces were made by none of the run's operations.
    made = [turn.softmax.output for turn in attention.turns]
    yield _Source("in weights", "", [weights], _is_after(run, made))


def _weights_read(run: NamedRun, ops: Iterable[Op]) -> list[TensorRef]:
    """Return the parameters that operations read."""
    weights: list[TensorRef] = []
    for op in ops:
        for tensor in op.inputs:
            if run.graph.is_weight(tensor):
                weights.append(tensor)
    return weights


def _is_after(run: NamedRun, tensors: Sequence[TensorRef]) -> Callable[[Op], bool]:
    """Return a test whether an operation came after these tensors, or reads only parameters."""
    stops = {tensor.id for tensor in tensors}
    producers = run.recording.producers
    start = min(producers.get(number, -1) for number in stops)

    def passes(op: Op) -> bool:
        if any(tensor.id in stops for tensor in op.outputs):
            return False
        if op.index > start:
            return True
        return all(map(run.graph.is_weight, op.inputs))

    return passes


# -- slices -----------------------------------------------------------------------------------------------------------


def _slices(kind: str, parts: Sequence[Part]) -> tuple[HeadSlice, ...]:
    """Return the rows and columns of each head; empty if they do not cover exactly its elements."""
    dims = _dims_of_slices(kind, parts[0])
    slices: list[HeadSlice] = []
    for part in parts:
        is_bias_of_output = part.letter == "o" and kind == "b"
        if part.is_shared or is_bias_of_output:
            continue
        blocks = blocks_of(part.placement, dims)
        if blocks is None:
            return ()
        word = kind.removesuffix(" before").removeprefix("added ")
        name = part.name or f"{word}_{part.letter}"
        for head, (rows, *columns) in blocks:
            slices.append(HeadSlice(head, name, rows, columns[0] if columns else None))
    return tuple(slices)


def _dims_of_slices(kind: str, part: Part) -> tuple[int, ...]:
    """Return the dimensions that are cut into heads: rows and columns of a matrix, otherwise those larger than one."""
    shape = part.parameter.tensor.shape
    channels = len(shape) - part.taps
    if kind == "W" and channels == 2:
        return (0, 1)
    large = [dim for dim in range(channels) if shape[dim] > 1]
    return tuple(large) or (0,)


# -- text -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Words:
    """The texts for the parameters of one attention."""

    attention: Attention
    names: AxisNames
    serves: Serves

    def role(self, use: _Use) -> ParameterRole:
        """Return the role of a parameter."""
        if use.kind in _JOINED:
            role = self.role(replace(use, kind=_JOINED[use.kind]))
            side = SIDES[use.letters[0]]
            return replace(role, text=f"{role.text}; for other tokens than those in {side}")
        parts = _in_order(use.parts)
        if not parts or use.kind in _BESIDE or parts[0].is_vector:
            is_named = use.kind in ("W", "b")
            return ParameterRole("", _listed(use.kind, use.letters) if is_named else _plain(use))
        distinct = _without_twins(parts)
        axes = self._axes_of(use.kind, distinct)
        letters = [part.letter for part in parts]
        text = self._text(use, letters, distinct, axes)
        if use.kind == "W" and "g" in letters:
            text += "; W_g gates the context before W_o"
        return ParameterRole(" ".join(axes), text, _slices(use.kind, parts), is_part=True)

    # -- axes ---------------------------------------------------------------------------------------------------------

    def _axes_of(self, kind: str, parts: list[Part]) -> list[str]:
        """Return the name of each dimension of a parameter."""
        first = parts[0]
        shape = first.parameter.tensor.shape
        if first.letter == "o" and kind == "b" and len(shape) == 1:
            return ["embed"]
        if not _are_shared(parts):
            axes = self._axes_by_head(parts)
        elif shape == (self.names.head_dim,) and _is_beside_heads(kind, first.letter):
            return ["head_dim"]
        else:
            axes = _axes_of_shared(kind, first)
        inside = self._inside(kind, parts)
        if inside and _are_read_alike(parts):
            for dim in first.placement.inner_dims:
                if dim < len(shape) - first.taps:
                    axes[dim] = self._of_stacked(parts, dim, inside)
        return axes

    def _of_stacked(self, parts: list[Part], dim: int, inside: str) -> str:
        """Return the name of a dimension outside heads, `(kv embed)` if the parts are stacked along it."""
        shape = parts[0].parameter.tensor.shape
        letters = "".join(part.letter for part in parts)
        count, _ = parts[0].inner or (shape[dim], 1)
        if count == shape[dim]:
            return inside
        is_whole = letters in _PACKED and len(parts) * count == shape[dim]
        return f"({letters} {inside})" if is_whole else "packed"

    def _axes_by_head(self, parts: list[Part]) -> list[str]:
        """Return the name of each dimension of a parameter with heads: `(qkv heads head_dim) embed`."""
        first = parts[0]
        stacked = _stacked_inside(parts)
        if stacked is not None and not _are_read_alike(parts):
            sizes = list(map(str, first.placement.shape))
            sizes[stacked] = "packed"
            return sizes
        if stacked is not None:
            parts = [first]
        heads, width = self._words_of_heads(parts)
        letters = "".join(part.letter for part in parts)
        packed = letters if letters in _PACKED else "packed"
        ones: list[str] = []
        is_single = len(first.heads) == 1 < num_heads(self.names, first.letter)
        if not is_single:
            ones.append(heads)
        if self.names.head_dim == 1:
            ones.append(width)
        axes = axes_of(tuple(_placements_of(parts)), packed, (heads, width), tuple(ones))
        return self._by_blocks(parts, heads) if axes is None else [*axes]

    def _words_of_heads(self, parts: list[Part]) -> tuple[str, str]:
        """Return the names of the axes of heads and of features."""
        names = self.names
        has_fewer = names.num_kv_heads < names.num_heads
        for part in parts:
            # In a loop over heads, heads with one key may have values of their own.
            if part.letter not in "kv" or len(part.heads) > names.num_kv_heads:
                has_fewer = False
        of_values = all(part.letter in "vo" for part in parts)
        has_own_width = of_values and "v_head_dim" in names.of_stage("context")
        return "kv_heads" if has_fewer else "heads", "v_head_dim" if has_own_width else "head_dim"

    def _inside(self, kind: str, parts: list[Part]) -> str:
        """Return the name of the dimension of a matrix outside heads and their features; empty if it has none."""
        part, stages = parts[0], self.attention.stages
        if part.inner is None or kind not in ("W", "before", *FACTORS):
            return ""
        width = part.inner[0]
        side = SIDES.get(part.letter, "query")
        is_of_latents = kind == "W" and bool(self.attention.earlier.get(side))
        if kind in FACTORS or is_of_latents:
            return "latent"
        if "query" in stages:
            width_of_query = stages["query"].shape[-1]
            has_own_width = width_of_query != width
            is_of_keys = part.letter in "kv" and len(parts) == 1 and side in stages
            if is_of_keys and has_own_width and stages[side].shape[-1] == width:
                return "kdim" if part.letter == "k" else "vdim"
            if part.letter == "g" and has_own_width:
                return str(width)
        return str(width) if part.reads else "embed"

    def _by_blocks(self, parts: list[Part], heads: str) -> list[str]:
        """Return the name of each dimension, where parts with different numbers or widths are `packed`."""
        placements = _placements_of(parts)
        axes = list(map(str, placements[0].shape))
        dim = varying_dim(placements)
        if dim is None or len(parts) == 1:
            return axes
        counts = [len(part.heads) for part in parts]
        if min(counts) == 1 or not are_in_blocks(placements, dim):
            axes[dim] = "packed"
        elif max(counts) > min(counts):
            axes[dim] = "(kv_heads packed)"
        else:
            axes[dim] = f"({heads} packed)"
        return axes

    # -- sentences ----------------------------------------------------------------------------------------------------

    def _text(
        self,
        use: _Use,
        letters: list[str],
        parts: list[Part],
        axes: list[str],
    ) -> str:
        """Return the text for a parameter with heads, or one that all heads share."""
        is_shared = _are_shared(parts)
        if is_shared and use.kind in ("norm", "shift", "before", *FACTORS, *_EARLY):
            return f"{_plain(use)}; not split by head"
        if use.kind in FACTORS:
            return self._of_factor(use.kind, parts, axes)
        if use.kind not in ("W", "b"):
            return _plain(use)
        if use.kind == "b" and parts[0].letter == "o":
            return "b_o: added once, not split by head"
        matrices = _listed(use.kind, letters)
        if is_shared:
            return f"{matrices}: shared by the heads"
        if len(parts) > 1:
            return self._of_several(matrices, parts)
        return self._of_single(matrices, use.kind, parts[0], axes)

    def _of_several(self, matrices: str, parts: list[Part]) -> str:
        """Return the text for a parameter with several matrices: `W_q, W_k, W_v stacked: rows 0–11, 12–23, 24–35`."""
        placements = _placements_of(parts)
        stacked = _stacked_inside(parts)
        dim = varying_dim(placements) if stacked is None else stacked
        if dim is None:
            return matrices
        unit = _unit(parts[0].parameter.tensor, dim)
        spans: list[str] = []
        for placement in placements:
            runs = placement.used(dim)
            if len(runs) > 1:
                return f"{matrices} {_by_head(parts, dim, unit)}"
            spans.append(_span(runs[0]))
        where = ", ".join(spans)
        way = {"rows": "stacked", "columns": "side by side", "elements": "concatenated"}[unit]
        text = f"{matrices} {way}: {unit} {where}"
        users = self._users()
        if users and any(part.letter in "kv" for part in parts):
            text += f"; the first key/value head is for query heads {users}"
        if stacked is not None and len(placements[0].shape) == 2:
            text += f"; {_ways_to_read(parts)}"
        return text

    def _of_single(
        self,
        matrices: str,
        kind: str,
        part: Part,
        axes: list[str],
    ) -> str:
        """Return the text for a parameter with one matrix or bias, of all heads or of some."""
        heads = sorted(part.heads)
        count = num_heads(self.names, part.letter)
        if len(heads) == 1 < count:
            return f"{matrices} of head {heads[0]}{_read_by(part)}"
        if len(heads) < count:
            matrices += f" of heads {_ranges(heads)}"
        dim = varying_dim([part.placement])
        if dim is None:
            return matrices
        return f"{matrices}{self._of_one(part, dim, axes[dim], kind)}"

    def _of_factor(self, kind: str, parts: list[Part], axes: list[str]) -> str:
        """Return the text for a factor with rows of heads: `a factor of what is added to W_q of heads 0–5`."""
        matrices: list[str] = []
        for part in sorted(parts, key=lambda part: "qkvog".index(part.letter)):
            heads = sorted(part.heads)
            text = f"W_{part.letter}"
            if len(heads) != num_heads(self.names, part.letter):
                word = "heads" if len(heads) > 1 else "head"
                text += f" of {word} {_ranges(heads)}"
            matrices.append(text)
        text = _SAID[kind].format(matrices=", ".join(matrices))
        first = parts[0]
        dim = varying_dim([first.placement])
        if dim is None or len(parts) > 1 or len(first.heads) == 1:
            return text
        return text + self._of_one(first, dim, axes[dim], kind)

    def _of_one(
        self,
        part: Part,
        dim: int,
        axis: str,
        kind: str,
    ) -> str:
        """Return the text for a parameter that is one matrix or bias."""
        placement, tensor = part.placement, part.parameter.tensor
        if kind == "W" and axis in ("heads", "kv_heads"):
            return f": one {'matrix' if len(tensor.shape) > 2 else 'row'} per head"
        unit = _unit(tensor, dim)
        runs = placement.used(dim)
        used = sum(stop - start for start, stop in runs)
        if used < tensor.shape[dim]:
            more = ", …" if len(runs) > 3 else ""
            first = ", ".join(map(_span, runs[:3]))
            return f": only {unit} {first}{more}"
        shared = self._shared_by(part)
        if kind == "b":
            return shared
        of_heads = placement.runs[dim]
        if any(len(of_head) != 1 for of_head in of_heads.values()):
            return f": {unit} of its heads are interleaved{shared}"
        way = "rows are the heads stacked" if unit == "rows" else "columns are the heads side by side"
        in_order = [of_heads[head][0] for head in sorted(of_heads)]
        order = "" if in_order == sorted(in_order) else " in another order"
        start, stop = in_order[0]
        return f": {way}{order}, {stop - start} each{shared}"

    def _shared_by(self, part: Part) -> str:
        """Return how many query heads use each head of a matrix of keys or values; empty for one."""
        users = self._users()
        shared = self.names.num_kv_heads
        group = self.names.num_heads // max(shared, 1)
        is_of_group = part.letter in "kv" and len(part.heads) <= shared
        if not is_of_group or group < 2:
            return ""
        text = f", each for {group} query heads"
        return f"{text}: the first for {users}" if users else text

    def _users(self) -> str:
        """Return the query heads that use the first key/value head; empty if every group is consecutive heads."""
        if all(map(_are_consecutive, self.serves)):
            return ""
        first = self.serves[0]
        more = ", …" if len(first) > 3 else ""
        return ", ".join(map(str, first[:3])) + more


# -- parts ------------------------------------------------------------------------------------------------------------


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """Return parts by their first places in memory; empty if the heads of one are unknown."""
    for part in parts:
        if not part.heads and not part.is_shared:
            return []
    return sorted(parts, key=_first_place)


def _placements_of(parts: Sequence[Part]) -> list[Placement]:
    """Return where the heads of each part lie along the dimensions of the parameter."""
    return [part.placement for part in parts]


def _first_place(part: Part) -> int:
    """Return the lowest place of a part in the memory of its parameter."""
    return min((int(row.min()) for row in part.heads.values()), default=0)


def _without_twins(parts: Sequence[Part]) -> list[Part]:
    """Return the parts without those that have the same elements in every head as one before.

    Keys that are also the values are one matrix with two names.
    """
    distinct: list[Part] = []
    placements: set[int] = set()
    for part in parts:
        number = id(part.placement)
        if not part.heads or number not in placements:
            distinct.append(part)
        placements.add(number)
    return distinct


def _stacked_inside(parts: Sequence[Part]) -> int | None:
    """Return the dimension of the inputs of a matrix if several are stacked along it: 0 for x @ w[:n], x @ w[n:]."""
    first = parts[0].placement
    for dim in range(len(first.shape) - first.taps):
        is_of_inputs = any(dim in part.placement.inner_dims for part in parts)
        used = {part.placement.used(dim) for part in parts}
        if is_of_inputs and len(used) == len(parts) > 1:
            return dim
    return None


def _are_read_alike(parts: Sequence[Part]) -> bool:
    """Return whether the inputs of all matrices lie along the same dimensions."""
    return len({part.placement.inner_dims for part in parts}) == 1


def _ways_to_read(parts: Sequence[Part]) -> str:
    """Return `each is read as (in, out)`, or which matrix is read in which way."""
    ways: dict[str, list[str]] = {}
    for part in parts:
        way = "(in, out)" if 0 in part.placement.inner_dims else "(out, in)"
        ways.setdefault(way, []).append(f"W_{part.letter}")
    if len(ways) == 1:
        return f"each is read as {next(iter(ways))}"
    return ", ".join(f"{' and '.join(names)} read as {way}" for way, names in ways.items())


def _are_shared(parts: Sequence[Part]) -> bool:
    """Return whether heads have elements of one of the parts in common."""
    return any(part.is_shared for part in parts)


def _is_beside_heads(kind: str, letter: str) -> bool:
    """Return whether a use is of heads that are split already: a norm after the projection, or before the output."""
    return kind in ("norm", "shift") or (letter == "o" and kind in _EARLY)


def _axes_of_shared(kind: str, part: Part) -> list[str]:
    """Return the name of each dimension of a parameter that all heads share: `latent` before the projection."""
    shape = part.parameter.tensor.shape
    axes = list(map(str, shape))
    if kind in ("before", *_EARLY):
        for dim in range(len(shape) - part.taps):
            if shape[dim] > 1:
                axes[dim] = "latent"
    return axes


def _are_consecutive(numbers: Sequence[int]) -> bool:
    """Return whether each number is one more than that before it."""
    if not numbers:
        return True
    first = numbers[0]
    return list(numbers) == list(range(first, first + len(numbers)))


# -- words ------------------------------------------------------------------------------------------------------------


def _plain(use: _Use) -> str:
    """Return the text of a kind of use, for all heads: `scales the queries and keys after their projection`."""
    letters = dict.fromkeys(use.letters)
    results = dict.fromkeys(_MADE_INTO.get(letter, "output") for letter in letters)
    absorbed = ["W_v" if letter == "o" else "W_k" for letter in letters]
    return _SAID[use.kind].format(
        made=" and ".join(results),
        others=" and ".join(absorbed),
        matrices=_listed("W", use.letters),
    )


def _read_by(part: Part) -> str:
    """Return the features that the head of a part reads: `: reads only features 0–3 of the embedding`; or nothing."""
    if not part.reads or part.inner is None:
        return ""
    start = next(iter(part.reads.values()))
    number, _ = part.inner
    features = _span((start, start + number))
    return f": reads only features {features} of the embedding"


def _span(run: tuple[int, int]) -> str:
    """Return the first and the last index of a run: `0–11`."""
    start, stop = run
    return f"{start}–{stop - 1}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as `0–2, 5`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        start = number
        if runs and runs[-1][1] == number:
            start, _ = runs.pop()
        runs.append((start, number + 1))
    texts: list[str] = []
    for start, stop in runs:
        is_single = stop - start == 1
        texts.append(str(start) if is_single else _span((start, stop)))
    return ", ".join(texts)


def _unit(tensor: TensorRef, dim: int) -> str:
    """Return what the indices of a dimension count: `rows`, `columns`, or `elements` of a vector."""
    dims = list(range(len(tensor.shape)))
    if len(dims) > 2:
        dims = [place for place in dims if tensor.shape[place] > 1]
    if len(dims) < 2:
        return "elements"
    return "columns" if dim == dims[-1] else "rows"


def _by_head(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts head by head, or group by group if query heads share a key and a value."""
    placements = _placements_of(parts)
    if not are_in_blocks(placements, dim):
        return f"in one, {unit} interleaved: --per-head lists them"
    for placement in placements:
        of_heads = placement.runs[dim].values()
        if any(len(runs) > 1 for runs in of_heads):
            return _in_turn(parts, dim, unit)
    counts = [len(part.heads) for part in parts]
    widths: list[str] = []
    for part, count in zip(parts, counts, strict=True):
        first_head = next(iter(part.placement.indices[dim].values()))
        width = str(len(first_head))
        number = count // min(counts)
        if number > 1:
            width = f"{number}·{width}"
        if not widths:
            width = f"{width} {unit}"
        widths.append(f"{width} of {part.letter}")
    way = "head by head" if max(counts) == min(counts) else "group by group"
    return f"{way}: {', '.join(widths)} each"


def _in_turn(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts that alternate within each head: `(heads head_dim qkv)` has q, k, v row by row."""
    widths: set[int] = set()
    for part in parts:
        for start, stop in chain(*part.placement.runs[dim].values()):
            widths.add(stop - start)
    if len(widths) > 1:
        return f"head by head, {unit} interleaved: --per-head lists them"
    (width,) = widths
    at_a_time = f"single {unit}" if width == 1 else f"{width} {unit}"
    letters = {_first_place(part): part.letter for part in parts}
    order = ", ".join(letters[place] for place in sorted(letters))
    return f"head by head, {at_a_time} in turn: {order}, {order}, …"


def _listed(kind: str, letters: Iterable[str]) -> str:
    """Return `W_q, W_k, W_v`."""
    return ", ".join(f"{kind}_{letter}" for letter in letters)

"""Describe what each parameter of a recorded module is for: in words, as an einops pattern, with the rows of each head.

The text of `in_proj_weight` of torch's layer with 3 heads of 4 features is
`W_q, W_k, W_v stacked: rows 0–11, 12–23, 24–35`, its pattern `(qkv heads head_dim) embed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod

import torch
from torch import Tensor, nn

from ..graph.attention import Attention
from ..graph.products import Joint
from ..graph.projections import reduction_of
from ..graph.scores import further_term
from ..record.ops import Op, TensorRef
from ..reports.params import HeadSlice
from .axes import AxisNames
from .named_run import NamedRun
from .parameters import SIDES, Serves, num_heads, parameters_behind, parts_of
from .pattern import dims_of, in_words
from .projection import Part, coordinates

_MADE_INTO = {"q": "queries", "k": "keys", "v": "values", "g": "gates"}
_SAID = {
    "norm": "scales the {made} after their projection",
    "shift": "added to the {made} after their projection",
    "filter": "convolves the {made} after their projection, each channel by itself",
    "before": "projects the input down, before the {made}",
    "beside": "another projection used for the {made}",
    "gate": "gates the {made}",
    "reduction": "used before the projection to the {made}",
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
_BESIDE = ("reduction", "scores", "in scores", "in weights", "sinks", "learned")
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
        heads = tuple(
            replace(piece, rows=piece.columns, columns=piece.rows) for piece in self.heads if piece.columns is not None
        )
        return replace(self, axes=in_words(dims[::-1]), text=text, heads=heads)


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
    roles: dict[str, list[ParameterRole]] = {}
    for (attention, names), (parts, serves) in zip(run.attentions, parts_of(run), strict=True):
        words = _Words(attention, names, serves)
        for name, use in _uses(run, attention, parts).items():
            roles.setdefault(name, []).append(words.role(use))
    # Used by several attentions: the slices of the most detailed role, the texts of all.
    texts = {name: "; ".join(dict.fromkeys(role.text for role in of_name)) for name, of_name in roles.items()}
    merged = {n: replace(max(of, key=lambda role: len(role.heads)), text=texts[n]) for n, of in roles.items()}
    readers = _readers(run)
    for name in {named.name for named in run.recording.parameters} - merged.keys():
        merged[name] = ParameterRole("", _outside(layer_class(module, name), readers.get(name, "")))
    return merged


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
    recording, readers, moved = run.recording, dict[str, str](), dict[int, set[str]]()
    for op in recording.ops:
        written = op.kwargs.get("out", op.inputs[:1] if op.kind == "write" else ())  # FSDP gathers into its parameters
        read = [tensor for tensor in op.inputs if tensor not in (written if isinstance(written, tuple) else (written,))]
        names = set().union(*(moved.get(tensor.id, ()) for tensor in read))
        parameters = (recording.parameter_storages.get(tensor.storage) for tensor in read)
        names |= {named.name for named in parameters if named is not None}
        if names and run.graph.moves(op):
            moved.update((tensor.id, names) for tensor in op.outputs)
        else:
            readers = dict.fromkeys(names, op.base_name) | readers
    return readers


# -- which parameters -------------------------------------------------------------------------------------------------


def _uses(run: NamedRun, attention: Attention, parts: Sequence[Part]) -> dict[str, _Use]:
    """Return the use of each parameter of an attention, by name; the first use if there are several."""
    graph, uses = run.graph, dict[str, _Use]()

    def add(kind: str, letter: str, name: str, part: Part | None = None) -> None:
        use = uses.setdefault(name, _Use(kind))
        if use.kind == kind and letter not in use.letters:
            use.letters.append(letter)
            use.parts += [part] if part is not None else []

    for part in sorted(parts, key=lambda part: ("W", "b", part.kind).index(part.kind)):
        add(part.kind, part.letter, part.parameter.name, part)
    stages, product = attention.stages, attention.value_product
    given = {letter: stages[side] for letter, side in SIDES.items() if letter != "o" and side in stages}
    reduced = {letter: reduction_of(graph, attention, side)[1] for letter, side in SIDES.items() if letter != "o"}
    weights_of = {letter: [t for op in ops for t in op.inputs if graph.is_weight(t)] for letter, ops in reduced.items()}
    added = [t for op in attention.masks for t in op.inputs if not graph.comes_from_inputs(t)]
    sinks = [t for t in (attention.sinks.inputs if attention.sinks is not None else ()) if graph.is_weight(t)]
    heads, weights = (stages["q_heads"], stages["k_heads"]), product.right if attention.value_first else product.left
    scored = attention.score_product
    terms = [further_term(graph, scored, op) for op in scored.between] if isinstance(scored, Joint) else []
    projecting = [
        op
        for term in terms
        for step in (graph.back(term, lambda op: not graph.is_projection(op)) if term is not None else ())
        if (op := run.recording.producer(step.tensor)) is not None and graph.is_projection(op)
    ]
    for kind, letter, tensors, passes in (
        *(("learned", letter, [tensor], ()) for letter, tensor in given.items() if graph.is_weight(tensor)),
        *(("reduction", letter, tensors, ()) for letter, tensors in weights_of.items()),
        ("scores", "", added, ()),
        ("sinks", "", sinks, ()),
        ("in scores", "", [attention.softmax.inputs[0]], (_made_since(run, heads),)),
        ("in scores", "", [t for op in projecting for t in op.inputs if graph.is_weight(t)], ()),
        ("in weights", "", [weights], (_made_since(run, (attention.softmax.output,)),)),
    ):
        for named in parameters_behind(run, tensors, *passes):
            add(kind, letter, named.name)
    return uses


def _made_since(run: NamedRun, tensors: Sequence[TensorRef]) -> Callable[[Op], bool]:
    """Return a test whether an operation came after these tensors, or reads only parameters."""
    stops = {tensor.id for tensor in tensors}
    start = min(run.recording.producers.get(id_, -1) for id_ in stops)

    def passes(op: Op) -> bool:
        inside = op.index > start or all(map(run.graph.is_weight, op.inputs))
        return inside and not any(tensor.id in stops for tensor in op.outputs)

    return passes


# -- layout -----------------------------------------------------------------------------------------------------------


def _inner_dims(part: Part) -> list[int]:
    """Return the dimensions of a matrix outside heads and their features."""
    number, step = part.inner or (1, 1)
    ends = coordinates(torch.tensor([0, (number - 1) * step]), part.parameter.tensor)
    return [dim for dim, at in enumerate(ends) if int(at[0]) != int(at[1]) or dim >= len(ends) - part.taps]


def _indices(part: Part) -> list[dict[int, Tensor]]:
    """Return for each dimension, and each head, the sorted indices of its elements."""
    shape, inner = part.parameter.tensor.shape, _inner_dims(part)
    of_heads = {head: coordinates(row[row >= 0], part.parameter.tensor) for head, row in part.heads.items()}
    return [
        {head: torch.arange(size) if dim in inner else torch.unique(at[dim]) for head, at in of_heads.items()}
        for dim, size in enumerate(shape)
    ]


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    """Return sorted indices as runs (start, stop) with Python's bounds."""
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    pieces = torch.tensor_split(indices, breaks.tolist()) if len(indices) else ()
    return [(int(run[0]), int(run[-1]) + 1) for run in pieces]


def _slices(kind: str, parts: Sequence[Part]) -> tuple[HeadSlice, ...]:
    """Return the rows and columns of each head; empty if they do not cover exactly its elements."""
    shape, taps = parts[0].parameter.tensor.shape, parts[0].taps
    large = [dim for dim, size in enumerate(shape[: len(shape) - taps]) if size > 1] or [0]
    if kind == "W" and len(shape) - taps == 2:
        large = [0, 1]
    slices = []
    for part in parts:
        if part.is_shared or (part.letter == "o" and kind == "b"):
            continue
        name = part.name or f"{kind.removesuffix(' before')}_{part.letter}"
        indices = _indices(part)
        for head, row in part.heads.items():
            number = len(torch.unique(row[row >= 0])) * (1 if part.inner is None else part.inner[0])
            number *= prod(shape[len(shape) - taps :])
            if len(large) > 2 or prod(len(of_dim[head]) for of_dim in indices) != number:
                return ()
            columns = _runs(indices[large[1]][head]) if len(large) > 1 else [None]
            slices += [
                HeadSlice(head, name, run, column) for run in _runs(indices[large[0]][head]) for column in columns
            ]
    return tuple(slices)


def _axes(parts: Sequence[Part], words: tuple[str, str], ones: Sequence[str]) -> list[str] | None:
    """Return the name of each dimension, `1` or its size without heads; None if no pattern describes the layout.

    Args:
        parts: the parts in the parameter, in order.
        words: the names of the axes of heads and of features.
        ones: the names that an axis of size one gets too.
    """
    shape, inner = parts[0].parameter.tensor.shape, _inner_dims(parts[0])
    rows = [row for part in parts for row in part.heads.values()]
    if len({len(part.heads) for part in parts}) > 1 or len({len(row) for row in rows}) > 1:
        return None
    # The place of each part, head and feature along the outer dimensions.
    table = torch.stack(rows).view(len(parts), -1, len(rows[0]))
    at, place = coordinates(table, parts[0].parameter.tensor), torch.zeros_like(table)
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    for dim in outer:
        place = place * shape[dim] + at[dim]
    if place.numel() != prod(shape[dim] for dim in outer) or any(bool((row < 0).any()) for row in rows):
        return None
    letters = "".join(part.letter for part in parts)
    names = (letters if letters in _PACKED else "packed", *words)
    for order in permutations(range(3)):
        sizes, back = [(names[axis], place.shape[axis]) for axis in order], [order.index(axis) for axis in range(3)]
        if torch.equal(torch.arange(place.numel()).view([size for _, size in sizes]).permute(back), place):
            return _in_dims(shape, outer, [(name, size) for name, size in sizes if size > 1 or name in ones])
    return None


def _in_dims(shape: Sequence[int], outer: Sequence[int], axes: list[tuple[str, int]]) -> list[str] | None:
    """Return the name of each dimension, filled with the axes in order; None if an axis lies across two dimensions."""
    dims: dict[int, list[str]] = {}
    last = max((dim for dim in outer if shape[dim] > 1), default=max(outer, default=0))
    for dim in outer:
        size, dims[dim] = 1, []
        while axes and (size < shape[dim] or dim == last):
            name, number = axes.pop(0)
            dims[dim].append(name)
            size *= number
        if size != shape[dim]:
            return None
    return [in_words([dims[dim] or ["1"]]) if dim in dims else str(size) for dim, size in enumerate(shape)]


def _dimension(parts: Sequence[Part]) -> int | None:
    """Return the dimension along which parts and heads lie; None if there are several."""
    shape, inner = parts[0].parameter.tensor.shape, _inner_dims(parts[0])
    of_dims = [[row for of_dim in dims for row in of_dim.values()] for dims in zip(*map(_indices, parts), strict=True)]
    varying = [dim for dim, rows in enumerate(of_dims) if any(not torch.equal(rows[0], other) for other in rows[1:])]
    varying = varying or [dim for dim, size in enumerate(shape) if size > 1 and dim not in inner]
    return varying[0] if len(varying) == 1 else None


def _in_blocks(parts: Sequence[Part], dim: int) -> bool:
    """Return whether each head, or each group of heads with one key, has one block of the dimension, in order."""
    size, count = parts[0].parameter.tensor.shape[dim], min(len(part.heads) for part in parts)
    return size % count == 0 and all(
        bool((indices // (size // count) == head // (len(part.heads) // count)).all())
        for part in parts
        for head, indices in _indices(part)[dim].items()
    )


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
            return replace(role, text=f"{role.text}; for other tokens than those in {SIDES[use.letters[0]]}")
        known = use.parts if all(part.heads or part.is_shared for part in use.parts) else []
        parts = sorted(known, key=lambda part: min((int(row.min()) for row in part.heads.values()), default=0))
        if use.kind in _BESIDE or not parts or parts[0].is_vector:
            text = _listed(use.kind, use.letters) if use.kind in ("W", "b") else _plain(use)
            return ParameterRole("", text)
        # Keys that are also the values are one matrix with two names.
        apart = [part for place, part in enumerate(parts) if not any(_is_same(part, other) for other in parts[:place])]
        axes = self._axes_of(use.kind, apart)
        letters = [part.letter for part in parts]
        text = self._text(use, letters, apart, axes)
        text += "; W_g gates the context before W_o" if use.kind == "W" and "g" in letters else ""
        return ParameterRole(" ".join(axes), text, _slices(use.kind, parts), is_part=True)

    def _axes_of(self, kind: str, parts: list[Part]) -> list[str]:
        """Return the name of each dimension of a parameter."""
        names, letter, shape = self.names, parts[0].letter, parts[0].parameter.tensor.shape
        fewer = names.num_kv_heads < names.num_heads and all(part.letter in "kv" for part in parts)
        v_width = "v_head_dim" in names.of_stage("context") and all(part.letter in "vo" for part in parts)
        words = ("kv_heads" if fewer else "heads", "v_head_dim" if v_width else "head_dim")
        if letter == "o" and kind == "b" and len(shape) == 1:
            return ["embed"]
        axes: list[str] | None
        if any(part.is_shared for part in parts):
            if (kind in ("norm", "shift") or (letter == "o" and kind in _EARLY)) and shape == (names.head_dim,):
                return ["head_dim"]
            features = shape[: len(shape) - parts[0].taps] if kind in ("before", *_EARLY) else ()
            axes = ["latent" if dim < len(features) and size > 1 else str(size) for dim, size in enumerate(shape)]
        else:
            single = len(parts[0].heads) == 1 < num_heads(names, letter)
            axes = _axes(parts, words, words[single : 1 + (names.head_dim == 1)])
            axes = axes or self._by_blocks(parts, words[0])
        inside, inner, channels = self._inside(kind, parts), _inner_dims(parts[0]), len(shape) - parts[0].taps
        return [inside if dim in inner and dim < channels and inside else word for dim, word in enumerate(axes)]

    def _inside(self, kind: str, parts: list[Part]) -> str:
        """Return the name of the dimension of a matrix outside heads and their features; empty if it has none."""
        part, stages = parts[0], self.attention.stages
        side, inner = SIDES.get(part.letter, "query"), part.inner
        if kind not in ("W", "before") or inner is None:
            return ""
        if kind == "W" and self.attention.earlier.get(side):
            return "latent"
        if part.letter in "kv" and len(parts) == 1 and "query" in stages and side in stages:
            width = stages[side].shape[-1]
            if width != stages["query"].shape[-1] and width == inner[0]:
                return "kdim" if part.letter == "k" else "vdim"
        elsewhere = part.letter == "g" and "query" in stages and stages["query"].shape[-1:] != inner[:1]
        return str(inner[0]) if part.reads or elsewhere else "embed"

    def _by_blocks(self, parts: list[Part], heads: str) -> list[str]:
        """Return the name of each dimension, where parts with different numbers or widths are `packed`."""
        shape, dim = parts[0].parameter.tensor.shape, _dimension(parts)
        axes = [str(size) for size in shape]
        if dim is not None and len(parts) > 1:
            fewest = min(len(part.heads) for part in parts)
            shared = any(len(part.heads) > fewest for part in parts)
            grouped = fewest > 1 and _in_blocks(parts, dim)
            axes[dim] = f"({'kv_heads' if shared else heads} packed)" if grouped else "packed"
        return axes

    def _text(self, use: _Use, letters: list[str], parts: list[Part], axes: list[str]) -> str:
        first, is_shared = parts[0], any(part.is_shared for part in parts)
        if use.kind in ("norm", "shift", "before", *_EARLY) and is_shared:
            return f"{_plain(use)}; not split by head"
        if use.kind not in ("W", "b"):
            return _plain(use)
        matrices = _listed(use.kind, letters)
        if use.kind == "b" and first.letter == "o":
            return "b_o: added once, not split by head"
        if is_shared:
            return f"{matrices}: shared by the heads"
        if len(parts) == len(first.heads) == 1 < num_heads(self.names, first.letter):
            start, number = next(iter((first.reads or {}).values()), 0), (first.inner or (0, 0))[0]
            reads = f": reads only features {start}–{start + number - 1} of the embedding"
            return f"{matrices} of head {next(iter(first.heads))}{reads if first.reads else ''}"
        dim = _dimension(parts)
        if dim is None:
            return matrices
        unit = _unit(first.parameter.tensor, dim)
        if len(parts) == 1:
            return f"{matrices}{self._of_one(first, unit, dim, axes[dim], use.kind)}"
        runs = [_runs(torch.unique(torch.cat([*_indices(part)[dim].values()]))) for part in parts]
        if any(len(run) > 1 for run in runs):
            return f"{matrices} {_by_head(parts, dim, unit)}"
        where = ", ".join(f"{run[0][0]}–{run[0][1] - 1}" for run in runs)
        way = {"rows": "stacked", "columns": "side by side", "elements": "concatenated"}[unit]
        users = self._users() if any(part.letter in "kv" for part in parts) else ""
        served = f"; the first key/value head is for query heads {users}" if users else ""
        return f"{matrices} {way}: {unit} {where}{served}"

    def _of_one(self, part: Part, unit: str, dim: int, axis: str, kind: str) -> str:
        """Return the text for a parameter that is one matrix or bias."""
        indices = _indices(part)[dim]
        used = torch.unique(torch.cat([*indices.values()]))
        if axis in ("heads", "kv_heads") and kind == "W":
            return f": one {'matrix' if len(part.parameter.tensor.shape) > 2 else 'row'} per head"
        if len(used) < part.parameter.tensor.shape[dim]:
            runs = _runs(used)
            where = ", ".join(f"{start}–{stop - 1}" for start, stop in runs[:3]) + (", …" if len(runs) > 3 else "")
            return f": only {unit} {where}"
        group, users = self.names.num_heads // max(self.names.num_kv_heads, 1), self._users()
        shared = f", each for {group} query heads" if part.letter in "kv" and group > 1 else ""
        shared += f": the first for {users}" if shared and users else ""
        if kind == "b":
            return shared
        if any(len(_runs(of_head)) != 1 for of_head in indices.values()):
            return f": {unit} of its heads are interleaved{shared}"
        way = "rows are the heads stacked" if unit == "rows" else "columns are the heads side by side"
        return f": {way}, {len(next(iter(indices.values())))} each{shared}"

    def _users(self) -> str:
        """Return the query heads that use the first key/value head; empty if every group is consecutive heads."""
        if not any(list(users) != list(range(users[0], users[0] + len(users))) for users in self.serves if users):
            return ""
        return ", ".join(map(str, self.serves[0][:3])) + (", …" if len(self.serves[0]) > 3 else "")


def _is_same(part: Part, other: Part) -> bool:
    """Return whether two parts have the same elements in every head, along the same dimension."""
    heads = [{head: row.tolist() for head, row in each.heads.items()} for each in (part, other)]
    return bool(part.heads) and heads[0] == heads[1] and part.inner == other.inner


def _plain(use: _Use) -> str:
    made = " and ".join(dict.fromkeys(_MADE_INTO.get(letter, "output") for letter in use.letters))
    others = " and ".join("W_v" if letter == "o" else "W_k" for letter in dict.fromkeys(use.letters))
    return _SAID[use.kind].format(made=made, others=others)


def _unit(tensor: TensorRef, dim: int) -> str:
    large = [place for place, size in enumerate(tensor.shape) if size > 1 or len(tensor.shape) < 3]
    return "elements" if len(large) < 2 else "columns" if dim == large[-1] else "rows"


def _by_head(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts head by head, or group by group if query heads share a key and a value."""
    fewest = min(len(part.heads) for part in parts)
    if not _in_blocks(parts, dim):
        return f"in one, {unit} interleaved: --per-head lists them"
    if any(len(_runs(indices)) > 1 for part in parts for indices in _indices(part)[dim].values()):
        return _in_turn(parts, dim, unit)
    widths: list[str] = []
    for part in parts:
        number, width = len(part.heads) // fewest, len(next(iter(_indices(part)[dim].values())))
        times, rows = f"{number}·" if number > 1 else "", "" if widths else f" {unit}"
        widths.append(f"{times}{width}{rows} of {part.letter}")
    grouped = any(len(part.heads) != fewest for part in parts)
    return f"{'group by group' if grouped else 'head by head'}: {', '.join(widths)} each"


def _in_turn(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts that alternate within each head: `(heads head_dim qkv)` has q, k, v row by row."""
    runs = [run for part in parts for indices in _indices(part)[dim].values() for run in _runs(indices)]
    widths = {stop - start for start, stop in runs}
    if len(widths) > 1:
        return f"head by head, {unit} interleaved: --per-head lists them"
    (width,) = widths
    at_a_time = f"single {unit}" if width == 1 else f"{width} {unit}"
    firsts = {min(int(row.min()) for row in part.heads.values()): part.letter for part in parts}
    order = ", ".join(firsts[first] for first in sorted(firsts))
    return f"head by head, {at_a_time} in turn: {order}, {order}, …"


def _listed(kind: str, letters: Iterable[str]) -> str:
    """Return `W_q, W_k, W_v`."""
    return ", ".join(f"{kind}_{letter}" for letter in letters)

"""Describe what each parameter of a recorded module is for: in words, as an einops pattern, with the rows of each head.

The text of `in_proj_weight` of torch's layer with 3 heads of 4 features is
`W_q, W_k, W_v stacked: rows 0–11, 12–23, 24–35`, its pattern `(qkv heads head_dim) embed`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from ..graph.attention import Attention
from ..graph.dataflow import moves
from ..graph.instances import UnlikeError
from ..graph.products import Joint
from ..graph.projections import reduction_of
from ..graph.scores import further_term
from ..record.ops import Op, TensorRef
from ..reports.params import HeadSlice
from .axes import AxisNames
from .named_run import NamedRun
from .parameters import FACTORS, SIDES, Serves, num_heads, parameters_behind, parts_at
from .pattern import dims_of, in_words
from .placement import are_in_blocks, axes_of, blocks_of, varying_dim
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
    for of_attention in _roles_by_attention(run):
        for name, role in of_attention.items():
            roles.setdefault(name, []).append(role)
    # Used by several attentions: the slices of the most detailed role, the texts of all.
    texts = {name: "; ".join(dict.fromkeys(role.text for role in of_name)) for name, of_name in roles.items()}
    merged = {n: replace(max(of, key=lambda role: len(role.heads)), text=texts[n]) for n, of in roles.items()}
    readers = _readers(run)
    for name in {named.name for named in run.recording.parameters} - merged.keys():
        merged[name] = ParameterRole("", _outside(layer_class(module, name), readers.get(name, "")))
    return merged


def _roles_by_attention(run: NamedRun) -> Iterator[dict[str, ParameterRole]]:
    """Yield for each attention the roles of its parameters, by name; those of equal layers are read once."""
    distinct, once = run.distinct, dict[int, dict[str, ParameterRole]]()
    for place, instance in enumerate(distinct.instances):
        if not instance.has_same_tables():
            yield _roles_in(run, place)
            continue
        if instance.place not in once:
            once[instance.place] = _roles_in(distinct.run, instance.place)
        try:
            names = {name: instance.parameter(name) for name in once[instance.place]}
        except UnlikeError:  # it is viewed outside the run
            yield _roles_in(run, place)
            continue
        yield {names[name]: role for name, role in once[instance.place].items()}


def _roles_in(run: NamedRun, place: int) -> dict[str, ParameterRole]:
    """Return the roles of the parameters of one attention of a run, by name."""
    (attention, names), (parts, serves) = run.attentions[place], parts_at(run, place)
    words = _Words(attention, names, serves)
    return {name: words.role(use) for name, use in _uses(run, attention, parts).items()}


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
        names: set[str] = set()
        written = op.kwargs.get("out", op.inputs[:1] if op.kind == "write" else ())  # FSDP gathers into its parameters
        for tensor in op.inputs:
            if tensor.storage in in_memory and tensor not in (written if isinstance(written, tuple) else (written,)):
                names |= in_memory[tensor.storage]
        if not names:
            continue
        if moves(op):
            for tensor in op.outputs:
                in_memory[tensor.storage] = in_memory.get(tensor.storage, set()) | names
        else:
            for name in names:
                readers.setdefault(name, op.base_name)
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


# -- slices -----------------------------------------------------------------------------------------------------------


def _slices(kind: str, parts: Sequence[Part]) -> tuple[HeadSlice, ...]:
    """Return the rows and columns of each head; empty if they do not cover exactly its elements."""
    shape, taps = parts[0].parameter.tensor.shape, parts[0].taps
    large = [dim for dim, size in enumerate(shape[: len(shape) - taps]) if size > 1] or [0]
    if kind == "W" and len(shape) - taps == 2:
        large = [0, 1]
    slices: list[HeadSlice] = []
    for part in parts:
        if part.is_shared or (part.letter == "o" and kind == "b"):
            continue
        name = part.name or f"{kind.removesuffix(' before').removeprefix('added ')}_{part.letter}"
        blocks = blocks_of(part.placement, tuple(large))
        if blocks is None:
            return ()
        slices += [HeadSlice(head, name, rows, columns[0] if columns else None) for head, (rows, *columns) in blocks]
    return tuple(slices)


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
        # In a loop over heads, heads with one key may have values of their own.
        shared = all(part.letter in "kv" and len(part.heads) <= names.num_kv_heads for part in parts)
        fewer = names.num_kv_heads < names.num_heads and shared
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
            letters = "".join(part.letter for part in parts)
            packed, ones = letters if letters in _PACKED else "packed", words[single : 1 + (names.head_dim == 1)]
            axes = axes_of(tuple(part.placement for part in parts), packed, words, ones)
            axes = axes or self._by_blocks(parts, words[0])
        inside, inner = self._inside(kind, parts), parts[0].placement.inner_dims
        channels = len(shape) - parts[0].taps
        return [inside if dim in inner and dim < channels and inside else word for dim, word in enumerate(axes)]

    def _inside(self, kind: str, parts: list[Part]) -> str:
        """Return the name of the dimension of a matrix outside heads and their features; empty if it has none."""
        part, stages = parts[0], self.attention.stages
        side, inner = SIDES.get(part.letter, "query"), part.inner
        if kind not in ("W", "before", *FACTORS) or inner is None:
            return ""
        if kind in FACTORS:
            return "latent"
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
        placements = [part.placement for part in parts]
        shape, dim = placements[0].shape, varying_dim(placements)
        axes = [str(size) for size in shape]
        if dim is not None and len(parts) > 1:
            fewest = min(len(part.heads) for part in parts)
            shared = any(len(part.heads) > fewest for part in parts)
            grouped = fewest > 1 and are_in_blocks(placements, dim)
            axes[dim] = f"({'kv_heads' if shared else heads} packed)" if grouped else "packed"
        return axes

    def _text(self, use: _Use, letters: list[str], parts: list[Part], axes: list[str]) -> str:
        first, is_shared = parts[0], any(part.is_shared for part in parts)
        if use.kind in ("norm", "shift", "before", *FACTORS, *_EARLY) and is_shared:
            return f"{_plain(use)}; not split by head"
        if use.kind in FACTORS:
            return self._of_factor(use.kind, parts, axes)
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
        if len(parts) == 1 and len(first.heads) < num_heads(self.names, first.letter):
            matrices += f" of heads {_ranges(sorted(first.heads))}"
        placements = [part.placement for part in parts]
        dim = varying_dim(placements)
        if dim is None:
            return matrices
        unit = _unit(first.parameter.tensor, dim)
        if len(parts) == 1:
            return f"{matrices}{self._of_one(first, unit, dim, axes[dim], use.kind)}"
        runs = [placement.used(dim) for placement in placements]
        if any(len(run) > 1 for run in runs):
            return f"{matrices} {_by_head(parts, dim, unit)}"
        where = ", ".join(f"{run[0][0]}–{run[0][1] - 1}" for run in runs)
        way = {"rows": "stacked", "columns": "side by side", "elements": "concatenated"}[unit]
        users = self._users() if any(part.letter in "kv" for part in parts) else ""
        served = f"; the first key/value head is for query heads {users}" if users else ""
        return f"{matrices} {way}: {unit} {where}{served}"

    def _of_factor(self, kind: str, parts: list[Part], axes: list[str]) -> str:
        """Return the text for a factor with rows of heads: `a factor of what is added to W_q of heads 0–5`."""
        matrices = []
        for part in sorted(parts, key=lambda part: "qkvog".index(part.letter)):
            heads = sorted(part.heads)
            of_heads = f" of head{'s' if len(heads) > 1 else ''} {_ranges(heads)}"
            is_whole = len(heads) == num_heads(self.names, part.letter)
            matrices.append(f"W_{part.letter}{'' if is_whole else of_heads}")
        text = _SAID[kind].format(matrices=", ".join(matrices))
        dim = varying_dim([parts[0].placement])
        if len(parts) > 1 or len(parts[0].heads) == 1 or dim is None:
            return text
        return text + self._of_one(parts[0], _unit(parts[0].parameter.tensor, dim), dim, axes[dim], kind)

    def _of_one(self, part: Part, unit: str, dim: int, axis: str, kind: str) -> str:
        """Return the text for a parameter that is one matrix or bias."""
        placement = part.placement
        runs = placement.used(dim)
        if axis in ("heads", "kv_heads") and kind == "W":
            return f": one {'matrix' if len(part.parameter.tensor.shape) > 2 else 'row'} per head"
        if sum(stop - start for start, stop in runs) < part.parameter.tensor.shape[dim]:
            where = ", ".join(f"{start}–{stop - 1}" for start, stop in runs[:3]) + (", …" if len(runs) > 3 else "")
            return f": only {unit} {where}"
        group, users = self.names.num_heads // max(self.names.num_kv_heads, 1), self._users()
        is_fewer = part.letter in "kv" and len(part.heads) <= self.names.num_kv_heads
        shared = f", each for {group} query heads" if is_fewer and group > 1 else ""
        shared += f": the first for {users}" if shared and users else ""
        if kind == "b":
            return shared
        of_heads = placement.runs[dim].values()
        if any(len(of_head) != 1 for of_head in of_heads):
            return f": {unit} of its heads are interleaved{shared}"
        way = "rows are the heads stacked" if unit == "rows" else "columns are the heads side by side"
        runs_in_order = [of_head[0] for _, of_head in sorted(placement.runs[dim].items())]
        order = "" if runs_in_order == sorted(runs_in_order) else " in another order"
        start, stop = runs_in_order[0]
        return f": {way}{order}, {stop - start} each{shared}"

    def _users(self) -> str:
        """Return the query heads that use the first key/value head; empty if every group is consecutive heads."""
        if not any(list(users) != list(range(users[0], users[0] + len(users))) for users in self.serves if users):
            return ""
        return ", ".join(map(str, self.serves[0][:3])) + (", …" if len(self.serves[0]) > 3 else "")


def _is_same(part: Part, other: Part) -> bool:
    """Return whether two parts have the same elements in every head, along the same dimension."""
    return bool(part.heads) and part.placement is other.placement


def _plain(use: _Use) -> str:
    made = " and ".join(dict.fromkeys(_MADE_INTO.get(letter, "output") for letter in use.letters))
    others = " and ".join("W_v" if letter == "o" else "W_k" for letter in dict.fromkeys(use.letters))
    return _SAID[use.kind].format(made=made, others=others, matrices=_listed("W", use.letters))


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as `0–2, 5`."""
    texts: list[str] = []
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1:
            continue
        first, last = numbers[start], numbers[stop - 1]
        texts.append(str(first) if first == last else f"{first}–{last}")
        start = stop
    return ", ".join(texts)


def _unit(tensor: TensorRef, dim: int) -> str:
    large = [place for place, size in enumerate(tensor.shape) if size > 1 or len(tensor.shape) < 3]
    return "elements" if len(large) < 2 else "columns" if dim == large[-1] else "rows"


def _by_head(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts head by head, or group by group if query heads share a key and a value."""
    fewest = min(len(part.heads) for part in parts)
    placements = [part.placement for part in parts]
    if not are_in_blocks(placements, dim):
        return f"in one, {unit} interleaved: --per-head lists them"
    if any(len(runs) > 1 for placement in placements for runs in placement.runs[dim].values()):
        return _in_turn(parts, dim, unit)
    widths: list[str] = []
    for part, placement in zip(parts, placements, strict=True):
        number, width = len(part.heads) // fewest, len(next(iter(placement.indices[dim].values())))
        times, rows = f"{number}·" if number > 1 else "", "" if widths else f" {unit}"
        widths.append(f"{times}{width}{rows} of {part.letter}")
    grouped = any(len(part.heads) != fewest for part in parts)
    return f"{'group by group' if grouped else 'head by head'}: {', '.join(widths)} each"


def _in_turn(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Return the order of parts that alternate within each head: `(heads head_dim qkv)` has q, k, v row by row."""
    runs = [run for part in parts for of_head in part.placement.runs[dim].values() for run in of_head]
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

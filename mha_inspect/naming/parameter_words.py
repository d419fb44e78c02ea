"""What each parameter of a recorded module is for, in words and as an einops pattern, with the rows of each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..record.ops import Op, TensorRef
from ..reports.params import HeadSlice
from .named_run import NamedRun
from .parameters import axes_of, dimension_of, indices_of, outside_of, runs_of, slices_of
from .parts import SIDES, Part, PartFinder, parts_of

_MADE_INTO = {"q": "queries", "k": "keys", "v": "values"}
_SAID = {
    "norm": "scales the {made} after their projection",
    "before": "a projection to something narrower, on the way to the {made}",
    "beside": "another projection that the {made} are made of",
    "scale before": "scales what is on the way to the {made}, before they are projected",
    "learned": "the {made} themselves: learned, the same for every input",
    "appended": "one learned {one}, appended to the {made}",
    "scores": "added to the scores",
    "in scores": "has a part in the scores",
    "in weights": "has a part in the weights, after the softmax",
    "sinks": "sinks, beside the scores: they have no value",
}
"""What a parameter does that is no matrix and no bias of a projection."""
_BESIDE = frozenset({"scores", "in scores", "in weights", "sinks", "learned"})
"""Those that have no part in what heads are made of."""


@dataclass(frozen=True)
class ParameterRole:
    """What one parameter is for, as a recording shows it."""

    axes: str
    """What its dimensions are, as an einops pattern; empty where that is not known."""
    text: str
    heads: tuple[HeadSlice, ...] = ()
    is_part: bool = False
    """Whether it was found out which of its elements belong to which head, be it to none."""


@dataclass
class _Held:
    """What a parameter holds for one attention."""

    kind: str
    letters: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def roles_of(run: NamedRun) -> dict[str, ParameterRole]:
    """Return the role of each parameter, by name.

    A parameter that is no part of an attention has the operation that reads it first for a role.
    """
    readers = _readers(run)
    found: dict[str, list[ParameterRole]] = {}
    for finder, parts in parts_of(run):
        for name, role in _OfAttention(run, finder, parts, readers).roles().items():
            found.setdefault(name, []).append(role)
    merged = {name: _merged(several) for name, several in found.items()}
    names = {named.name for named in run.recording.parameters}
    return merged | _others(readers, names - merged.keys())


def _merged(roles: list[ParameterRole]) -> ParameterRole:
    """One role of a parameter that several attentions share: the one that tells most, in the words of all."""
    texts = dict.fromkeys(role.text for role in roles)
    return replace(max(roles, key=lambda role: len(role.heads)), text="; ".join(texts))


class _OfAttention:
    """Says what the parameters of one attention are for."""

    def __init__(self, run: NamedRun, finder: PartFinder, parts: list[Part], readers: dict[str, list[Op]]) -> None:
        self._run, self._finder, self._parts, self._readers = run, finder, parts, readers
        self._graph, self._attention, self._names = run.graph, finder.attention, finder.names

    def roles(self) -> dict[str, ParameterRole]:
        """The role of each parameter that has a part in this attention."""
        shapes = {named.name: named.tensor for named in self._run.recording.parameters}
        return {name: self._role(held, shapes[name]) for name, held in self._held().items()}

    # -- which parameters -----------------------------------------------------------------------------------------

    def _held(self) -> dict[str, _Held]:
        held: dict[str, _Held] = {}

        def hold(kind: str, letter: str, name: str, part: Part | None = None) -> None:
            own = held.setdefault(name, _Held(kind))
            if own.kind == kind and letter not in own.letters:
                own.letters.append(letter)
                own.parts += [part] if part is not None else []

        kinds = [(self._kind_of(part), part) for part in self._parts]
        for wanted in ("W", "b", ""):
            for kind, part in kinds:
                if kind == wanted or not wanted:
                    hold(kind, part.letter, part.parameter.name, part)
        for letter, side in SIDES.items():
            given = self._attention.stages.get(side) if letter != "o" else None
            if given is not None and self._graph.is_weight(given):
                for name in self._behind([given], lambda op: True):
                    hold("learned", letter, name)
        for kind, tensors in (("scores", self._added_to_scores()), ("sinks", self._sinks())):
            for name in self._behind(tensors, lambda op: True):
                hold(kind, "", name)
        for kind, names in self._around_softmax().items():
            for name in names:
                hold(kind, "", name)
        return held

    def _kind_of(self, part: Part) -> str:
        """What a parameter does that is no matrix of a projection: it is added, appended, or scales."""
        projection, op = self._attention.projections.get(SIDES[part.letter]), part.operation
        late = projection is None or op is None or op.index > projection.index
        if part.kind == "before" and op is not None:
            narrower = op in self._attention.earlier.get(SIDES[part.letter], ())
            return part.kind if narrower or projection is None else "beside"
        return part.kind if part.kind not in ("norm", "before") else "norm" if late else "scale before"

    def _behind(self, tensors: Iterable[TensorRef], through: Callable[[Op], bool]) -> list[str]:
        names = self._run.recording.parameter_storages
        steps = (step for tensor in tensors for step in self._graph.back(tensor, through))
        storages = (step.tensor.storage for step in steps if self._run.recording.producer(step.tensor) is None)
        return list(dict.fromkeys(names[storage].name for storage in storages if storage in names))

    def _added_to_scores(self) -> list[TensorRef]:
        """What biases of positions are: nothing in them comes from what the forward was given."""
        every = [tensor for op in self._attention.masks for tensor in op.inputs]
        return [tensor for tensor in every if not self._graph.comes_from_inputs(tensor)]

    def _sinks(self) -> list[TensorRef]:
        sinks = self._attention.sinks
        return [] if sinks is None else [tensor for tensor in sinks.inputs if self._graph.is_weight(tensor)]

    def _around_softmax(self) -> dict[str, list[str]]:
        """The parameters that are met between the heads and the softmax, and between that and the values."""
        found = self._attention
        product = found.value_product
        weights = product.right if found.value_first else product.left
        ways = {
            "in scores": ((found.stages["q_heads"], found.stages["k_heads"]), found.softmax.inputs[:1]),
            "in weights": ((found.softmax.output,), (weights,)),
        }
        names = {}
        for kind, (sources, targets) in ways.items():
            stops = {tensor.id for tensor in sources}
            start = min(self._run.recording.producers.get(id_, -1) for id_ in stops)

            def through(op: Op, stops: set[int] = stops, start: int = start) -> bool:
                inside = op.index > start or all(map(self._graph.is_weight, op.inputs))
                return inside and not any(tensor.id in stops for tensor in op.outputs)

            names[kind] = self._behind(targets, through)
        return names

    # -- what they are --------------------------------------------------------------------------------------------

    def _role(self, held: _Held, tensor: TensorRef) -> ParameterRole:
        shape = tensor.shape
        if held.kind in _BESIDE:
            return ParameterRole("", self._plain(held))
        known = held.parts if all(part.heads for part in held.parts) else []
        parts = sorted(known, key=lambda part: min(int(own.min()) for own in part.heads.values()))
        if held.kind == "W" and len(shape) == 1:
            parts = []
        if not parts:
            text = _listed(held.kind, held.letters) if held.kind in ("W", "b") else self._plain(held)
            return ParameterRole("", text)
        axes = self._axes(held, parts, tensor)
        return ParameterRole(" ".join(axes), self._text(held, parts, tensor, axes), slices_of(held.kind, parts), True)

    def _axes(self, held: _Held, parts: list[Part], tensor: TensorRef) -> list[str]:
        fewer = self._names.num_kv_heads < self._names.num_heads and all(part.letter in "kv" for part in parts)
        own_width = "v_head_dim" in self._names.of_stage("context") and all(part.letter in "vo" for part in parts)
        words = {"heads": "kv_heads" if fewer else "heads", "head_dim": "v_head_dim" if own_width else "head_dim"}
        letter, shape = parts[0].letter, tensor.shape
        inside = self._inside(held, parts)
        if letter == "o" and held.kind == "b" and len(shape) == 1:
            return ["embed"]
        outside = outside_of(parts[0])
        if any(part.is_shared for part in parts):
            if held.kind == "norm" and shape == (self._names.head_dim,):
                return ["head_dim"]
            sizes = ["latent" if held.kind in ("before", "scale before") and size > 1 else str(size) for size in shape]
            return [inside if dim in outside and inside else word for dim, word in enumerate(sizes)]
        found = axes_of(parts, words, single=len(parts[0].heads) == 1 < self._finder.num_heads(parts[0].letter))
        if found is None:
            found = self._by_blocks(parts, words)
        return [inside if dim in outside and inside else word for dim, word in enumerate(found)]

    def _inside(self, held: _Held, parts: list[Part]) -> str:
        """What the dimension of a matrix is called that is not of heads and their features; empty for a bias."""
        letter, stages = parts[0].letter, self._attention.stages
        if held.kind not in ("W", "before"):
            return ""
        if held.kind == "W" and self._attention.earlier.get(SIDES[letter]):
            return "latent"
        inner = parts[0].inner
        if letter in "kv" and len(parts) == 1 and "query" in stages and SIDES[letter] in stages and inner is not None:
            width = stages[SIDES[letter]].shape[-1]
            if width != stages["query"].shape[-1] and width == inner[0]:
                return "kdim" if letter == "k" else "vdim"
        return str(inner[0]) if inner is not None and parts[0].reads else "embed"

    def _by_blocks(self, parts: list[Part], words: dict[str, str]) -> list[str]:
        """Where parts have heads of their own numbers or widths: what can be said of the dimension they lie along."""
        shape, dim = parts[0].parameter.tensor.shape, dimension_of(parts)
        found = [str(size) for size in shape]
        if dim is not None and len(parts) > 1:
            fewest = min(len(part.heads) for part in parts)
            shared = any(len(part.heads) > fewest for part in parts)
            grouped = fewest > 1 and _in_blocks(parts, dim)
            found[dim] = f"({'kv_heads' if shared else words['heads']} packed)" if grouped else "packed"
        return found

    def _plain(self, held: _Held) -> str:
        made = " and ".join(dict.fromkeys(_MADE_INTO.get(letter, "output") for letter in held.letters))
        one = {"keys": "key", "values": "value"}.get(made, made)
        return _SAID.get(held.kind, "on the way to the {made}").format(made=made, one=one)

    def _text(self, held: _Held, parts: list[Part], tensor: TensorRef, axes: list[str]) -> str:
        shared = any(part.is_shared for part in parts)
        if held.kind in ("norm", "before", "scale before") and shared:
            return f"{self._plain(held)}: it belongs to no head"
        if held.kind not in ("W", "b"):
            return self._plain(held)
        matrices = _listed(held.kind, [part.letter for part in parts])
        if held.kind == "b" and parts[0].letter == "o":
            return "b_o: added once, it belongs to no head"
        if shared:
            return f"{matrices}: the heads have no part of it for themselves"
        if len(parts) == len(parts[0].heads) == 1 < self._finder.num_heads(parts[0].letter):
            return f"{matrices} of head {next(iter(parts[0].heads))}{self._of_features(parts[0])}"
        dim = dimension_of(parts)
        if dim is None:
            return matrices
        unit = _unit(tensor.shape, dim)
        if len(parts) == 1:
            return self._of_one(matrices, parts[0], unit, dim, axes, held.kind)
        runs = [runs_of(torch.cat([*indices_of(part, dim).values()])) for part in parts]
        if all(len(run) == 1 for run in runs):
            where = ", ".join(f"{run[0][0]}–{run[0][1] - 1}" for run in runs)
            way = {"rows": "one above the other", "columns": "side by side", "elements": "one after the other"}[unit]
            users = self._users() if any(part.letter in "kv" for part in parts) else ""
            served = f"; the first head of keys and values is for the query heads {users}" if users else ""
            return f"{matrices} {way}: {unit} {where}{served}"
        return f"{matrices} {_by_head(parts, dim, unit)}"

    def _of_features(self, part: Part) -> str:
        if not part.reads or part.inner is None:
            return ""
        start = next(iter(part.reads.values()))
        return f": it reads features {start}–{start + part.inner[0] - 1} of the embedding and no others"

    def _of_one(self, matrices: str, part: Part, unit: str, dim: int, axes: list[str], kind: str) -> str:
        indices = indices_of(part, dim)
        used = torch.cat([*indices.values()])
        each = len(indices[next(iter(indices))])
        if axes[dim] in ("heads", "kv_heads") and kind == "W":
            return f"{matrices}: a matrix for each head"
        if len(used) < part.parameter.tensor.shape[dim]:
            runs = runs_of(used)
            where = ", ".join(f"{start}–{stop - 1}" for start, stop in runs[:3]) + (", …" if len(runs) > 3 else "")
            return f"{matrices}: {unit} {where}; the others have no part in it"
        shared = self._shared_by(part)
        if kind == "b":
            return f"{matrices}{shared}"
        if any(len(runs_of(own)) != 1 for own in indices.values()):
            return f"{matrices}: the {unit} of its heads lie between one another{shared}"
        way = (
            "its rows are the heads one above the other" if unit == "rows" else "its columns are the heads side by side"
        )
        return f"{matrices}: {way}, {each} each{shared}"

    def _shared_by(self, part: Part) -> str:
        """Who uses the heads of keys and values, where several query heads share one."""
        group = self._names.num_heads // max(self._names.num_kv_heads, 1)
        if part.letter not in "kv" or group < 2:
            return ""
        users = self._users()
        return f", each for {group} query heads" + (f": the first for {users}" if users else "")

    def _users(self) -> str:
        """The query heads that use the first head of keys and values; empty where they are neighbours."""
        serves = self._finder.serves
        if not any(list(users) != list(range(users[0], users[0] + len(users))) for users in serves if users):
            return ""
        return ", ".join(map(str, serves[0][:3])) + (", …" if len(serves[0]) > 3 else "")


def _unit(shape: Sequence[int], dim: int) -> str:
    large = [place for place, size in enumerate(shape) if size > 1 or len(shape) < 3]
    across = len(large) > 1 and dim == large[-1]
    return "elements" if len(large) < 2 else "columns" if across else "rows"


def _in_blocks(parts: Sequence[Part], dim: int) -> bool:
    """Whether all that belongs to a head, or to those that share a key and a value, lies in one block, in order."""
    size = parts[0].parameter.tensor.shape[dim]
    count = min(len(part.heads) for part in parts)
    block = size // count
    return size % count == 0 and all(
        bool((own // block == head // (len(part.heads) // count)).all())
        for part in parts
        for head, own in indices_of(part, dim).items()
    )


def _by_head(parts: Sequence[Part], dim: int, unit: str) -> str:
    """Parts that lie head by head, or group by group where several query heads share a key and a value."""
    fewest = min(len(part.heads) for part in parts)
    if not _in_blocks(parts, dim):
        return f"in one, their {unit} between one another: --per-head says which"
    widths: list[str] = []
    for part in parts:
        number, width = len(part.heads) // fewest, len(next(iter(indices_of(part, dim).values())))
        rows = "" if widths else f" {unit}"
        widths.append(f"{f'{number}·' if number > 1 else ''}{width}{rows} of {part.letter}")
    grouped = any(len(part.heads) != fewest for part in parts)
    return f"{'group by group' if grouped else 'head by head'}: {', '.join(widths)} each"


def _listed(kind: str, letters: Iterable[str]) -> str:
    """`W_q, W_k, W_v`."""
    return ", ".join(f"{kind}_{letter}" for letter in letters)


def _readers(run: NamedRun) -> dict[str, list[Op]]:
    """For each parameter, the operations that read it, moved or cast at most, first to last."""
    recording, graph = run.recording, run.graph
    found: dict[str, list[Op]] = {named.name: [] for named in recording.parameters}
    moved: dict[int, set[str]] = {}
    for op in recording.ops:
        names = set().union(*(moved.get(tensor.id, ()) for tensor in op.inputs))
        held = (recording.parameter_storages.get(tensor.storage) for tensor in op.inputs)
        names |= {named.name for named in held if named is not None}
        for name in names:
            if not graph.moves(op):
                found[name].append(op)
        if names and graph.moves(op):
            moved.update((tensor.id, names) for tensor in op.outputs)
    return found


def _others(readers: dict[str, list[Op]], names: Iterable[str]) -> dict[str, ParameterRole]:
    """What reads each parameter first that is no part of an attention."""
    roles = {}
    for name in names:
        reader = next(iter(readers.get(name, ())), None)
        roles[name] = ParameterRole("", "not read by this forward" if reader is None else f"read by {reader.base_name}")
    return roles

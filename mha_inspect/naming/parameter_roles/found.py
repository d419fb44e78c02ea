"""What each parameter of a recorded module is for: roles, axes, and the rows and columns of each head."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from torch import nn

from ...graph.attention import Attention
from ...graph.evaluate import CannotReplayError
from ...record.ops import Op, TensorRef
from ...record.subject import Run
from ...reports.params import HeadSlice
from ..axes import AxisNames
from .influence import Path, parameters_behind
from .naming import Part, axes_of, structured
from .owned import LETTERS, OwnedParameters, Side
from .wording import by_head, listed, runs_of, slices_of

_SIDES = {**LETTERS, "o": "output"}
_MADE_INTO = {"q": "queries", "k": "keys", "v": "values"}


_SAID = {
    "norm": "scales the {made} after their projection",
    "before": "a projection to something narrower, on the way to the {made}",
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
class FoundRole:
    """What one parameter is for, as a recording shows it."""

    axes: str
    """What its dimensions are, as an einops pattern; empty where that is not known."""
    text: str
    heads: tuple[HeadSlice, ...] = ()
    is_part: bool = False
    """Whether it was found out which of its elements belong to which head, be it to none."""


@dataclass
class _Held:
    """What a parameter holds for one attention: matrices (`W`), biases (`b`), norms, or what is appended."""

    kind: str
    letters: list[str] = field(default_factory=list)


def found_roles(module: nn.Module, seen: Run) -> dict[str, FoundRole]:
    """The role of each parameter, by name, of a run that was recorded with its tensors kept.

    A parameter that is no part of an attention has the operation that reads it first for a role.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    owned, readers = OwnedParameters(seen), _readers(seen)
    roles: dict[str, list[FoundRole]] = {}
    for found, names in seen.attentions:
        reader = _Reader(seen, found, names, owned, readers)
        for name, role in reader.roles(shapes).items():
            roles.setdefault(name, []).append(role)
    merged = {name: _merged(several) for name, several in roles.items()}
    return merged | _others(readers, shapes.keys() - merged.keys())


def _merged(roles: list[FoundRole]) -> FoundRole:
    """One role of a parameter that several attentions share."""
    texts = list(dict.fromkeys(role.text for role in roles))
    first = roles[0]
    return first if len(texts) == 1 else replace(first, text="; ".join(texts))


class _Reader:
    """Reads off what the parameters of one attention are for."""

    def __init__(
        self, seen: Run, found: Attention, names: AxisNames, owned: OwnedParameters, readers: dict[str, list[Op]]
    ) -> None:
        self._seen, self._found, self._names, self._readers = seen, found, names, readers
        self._graph = seen.graph
        self._turns = found.branches or (found,)
        self._sides: dict[str, Side] = {letter: owned.of(letter, found, names) for letter in "qkvo"}

    def roles(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, FoundRole]:
        """The role of each parameter that has a part in this attention."""
        return {name: self._role(name, held, shapes[name]) for name, held in self._held().items() if name in shapes}

    # -- which parameters -----------------------------------------------------------------------------------------

    def _held(self) -> dict[str, _Held]:
        held: dict[str, _Held] = {}

        def hold(kind: str, letter: str, names: Iterable[str]) -> None:
            for name in names:
                own = held.setdefault(name, _Held(kind))
                if own.kind == kind and letter not in own.letters:
                    own.letters.append(letter)

        for letter, side in _SIDES.items():
            products = [turn.projections[side] for turn in self._turns if side in turn.projections]
            products += [self._found.projections[side]] if side in self._found.projections else []
            earlier = self._found.earlier.get(side, ())
            for op in {op.index: op for op in products}.values():
                hold("W", letter, parameters_behind(self._graph, [self._matrix(op)]))
                hold("b", letter, parameters_behind(self._graph, op.inputs[:1] if len(op.inputs) == 3 else ()))
            given = self._found.stages.get(side) if letter != "o" else None
            if given is not None and self._graph.is_weight(given):
                hold("learned", letter, parameters_behind(self._graph, [given]))
            for op in earlier:
                hold("before", letter, parameters_behind(self._graph, op.inputs))
        for letter, side_parameters in self._sides.items():
            for name in side_parameters:
                hold(self._kind_of(name, letter), letter, [name])
        for op in self._found.masks:
            hold("scores", "", self._in_scores(op))
        if self._found.sinks is not None:
            hold("sinks", "", parameters_behind(self._graph, self._found.sinks.inputs))
        for kind, names in self._around_softmax().items():
            hold(kind, "", names)
        return held

    def _around_softmax(self) -> dict[str, list[str]]:
        """The parameters that are met between the heads and the softmax, and between that and the values."""
        found = self._found
        factors = self._graph.operands(found.value_product.op) or ()
        weights = factors[1:] if found.value_first else factors[:1]
        ways = {
            "in scores": ((found.stages["q_heads"], found.stages["k_heads"]), found.softmax.inputs[:1]),
            "in weights": ((found.softmax.output,), weights),
        }
        names = {}
        for kind, (sources, targets) in ways.items():
            with suppress(CannotReplayError):
                names[kind] = [name for target in targets for name in Path(self._graph, sources, target).parameters]
        return names

    def _matrix(self, op: Op) -> TensorRef:
        if op.base_name == "convolution":
            return op.inputs[1]
        left, right = self._graph.operands(op) or op.inputs[:2]
        return right if self._graph.is_weight(right) else left

    def _kind_of(self, name: str, letter: str) -> str:
        """What a parameter does that is no matrix of a projection: it is added, appended, or scales."""
        for op in self._readers.get(name, ()):
            base = op.base_name.rstrip("_")
            beside = any(not self._graph.is_weight(tensor) for tensor in op.inputs)
            projection = self._found.projections.get(_SIDES[letter])
            if op.does("norms") or (base in ("mul", "div") and beside):
                return "norm" if projection is None or op.index > projection.index else "scale before"
            if base in ("cat", "copy"):
                return "appended"
            if self._graph.operands(op) is not None or base == "convolution":
                return "before"
            if base in ("add", "sub") and beside:
                return "b"
        return "learned"

    def _in_scores(self, op: Op) -> list[str]:
        """The parameters of which a bias of positions is made: nothing in it comes from what the forward was given."""
        parameters = self._seen.recording.parameter_storages
        found: list[str] = []
        for tensor in op.inputs:
            if not self._graph.comes_from_inputs(tensor):
                steps = self._graph.back(tensor, lambda passed: True)
                found += [parameters[s.tensor.storage].name for s in steps if s.tensor.storage in parameters]
        return found

    # -- what they are --------------------------------------------------------------------------------------------

    def _role(self, name: str, held: _Held, shape: tuple[int, ...]) -> FoundRole:
        if held.kind in _BESIDE:
            return FoundRole("", self._plain(held))
        parts = [
            Part(letter, self._sides[letter][name], self._count(letter))
            for letter in held.letters
            if name in self._sides.get(letter, {})
        ]
        if held.kind == "W" and len(shape) == 1:
            parts = []
        if not parts:
            return FoundRole("", self._bare(held))
        # In the order in which they lie there.
        parts = sorted(parts, key=lambda part: min(touch.places for touch in part.touches))
        axes = axes_of(shape, parts, self._axis_names(parts), self._inside(held, parts, shape))
        axes = self._without_heads(axes, held, parts, shape)
        text = self._text(held, parts, shape, axes)
        return FoundRole(" ".join(axes), text, slices_of(held.kind, parts, shape), is_part=True)

    def _count(self, letter: str) -> int:
        return self._names.num_kv_heads if letter in "kv" else self._names.num_heads

    def _axis_names(self, parts: list[Part]) -> dict[str, str]:
        fewer = self._names.num_kv_heads < self._names.num_heads and all(part.letter in "kv" for part in parts)
        pattern = self._names.of_stage("context")
        own_width = "v_head_dim" in pattern and all(part.letter in "vo" for part in parts)
        return {"heads": "kv_heads" if fewer else "heads", "head_dim": "v_head_dim" if own_width else "head_dim"}

    def _inside(self, held: _Held, parts: list[Part], shape: tuple[int, ...]) -> str:
        letter, stages = parts[0].letter, self._found.stages
        if held.kind not in ("W", "before"):
            return ""
        if held.kind == "W" and self._found.earlier.get(_SIDES[letter]):
            return "latent"
        if letter in "kv" and len(parts) == 1 and "query" in stages and _SIDES[letter] in stages:
            width = stages[_SIDES[letter]].shape[-1]
            if width != stages["query"].shape[-1] and width in shape:
                return "kdim" if letter == "k" else "vdim"
        read, features = self._read(held, parts, shape)
        return str(read) if read < features else "embed"

    def _read(self, held: _Held, parts: list[Part], shape: tuple[int, ...]) -> tuple[int, int]:
        """How many features a matrix of heads reads, and of how many."""
        side = _SIDES[parts[0].letter]
        op, given = self._found.projections.get(side), self._found.stages.get(side)
        if held.kind != "W" or op is None or given is None or side == "output" or op.base_name == "convolution":
            return 0, 0
        projected = self._graph.projected(op)
        features = projected.shape[-1] if self._found.earlier.get(side) else given.shape[-1]
        return (projected.shape[-1], features) if projected.shape[-1] in shape else (0, 0)

    def _without_heads(self, axes: list[str], held: _Held, parts: list[Part], shape: tuple[int, ...]) -> list[str]:
        """A parameter that belongs to no head: by its widths."""
        letter = parts[0].letter
        if letter == "o" and held.kind == "b" and len(shape) == 1:
            return ["embed"]
        if any(part.owned.shared for part in parts) and held.kind == "norm" and shape == (self._names.head_dim,):
            return ["head_dim"]
        if any(part.owned.shared for part in parts) and held.kind in ("before", "scale before"):
            return ["latent" if word.isdigit() and word != "1" else word for word in axes]
        return axes

    def _bare(self, held: _Held) -> str:
        return listed(held.kind, held.letters) if held.kind in ("W", "b") else self._plain(held)

    def _plain(self, held: _Held) -> str:
        made = " and ".join(dict.fromkeys(_MADE_INTO.get(letter, "output") for letter in held.letters))
        one = {"keys": "key", "values": "value"}.get(made, made)
        return _SAID.get(held.kind, "on the way to the {made}").format(made=made, one=one)

    def _text(self, held: _Held, parts: list[Part], shape: tuple[int, ...], axes: list[str]) -> str:
        if held.kind in ("norm", "before", "scale before") and any(part.owned.shared for part in parts):
            return f"{self._plain(held)}: it belongs to no head"
        if held.kind not in ("W", "b"):
            return self._plain(held)
        matrices = listed(held.kind, [part.letter for part in parts])
        if held.kind == "b" and parts[0].letter == "o":
            return "b_o: added once, it belongs to no head"
        if any(part.owned.shared for part in parts):
            return f"{matrices}: the heads have no part of it for themselves"
        dim = structured(shape, parts)
        if len(parts[0].touches) == 1 < parts[0].whole and len(parts) == 1:
            read, features = self._read(held, parts, shape)
            reads = f": it reads {read} of the {features} features" if read < features else ""
            return f"{matrices} of head {next(iter(parts[0].owned.heads))}{reads}"
        if dim is None:
            return matrices
        large = [place for place, size in enumerate(shape) if size > 1 or len(shape) < 3]
        across = len(large) > 1 and dim == large[-1]
        unit = "elements" if len(large) < 2 else "columns" if across else "rows"
        if len(parts) == 1:
            return self._of_one(matrices, parts[0], unit, dim, axes, held.kind, shape)
        runs = [runs_of({i for touch in part.touches for i in touch.places[dim]}) for part in parts]
        if all(len(run) == 1 for run in runs):
            where = ", ".join(f"{run[0][0]}–{run[0][1] - 1}" for run in runs)
            way = {"rows": "one above the other", "columns": "side by side", "elements": "one after the other"}[unit]
            return f"{matrices} {way}: {unit} {where}"
        return f"{matrices} {by_head(parts, dim, shape[dim], unit)}"

    def _of_one(
        self, matrices: str, part: Part, unit: str, dim: int, axes: list[str], kind: str, shape: tuple[int, ...]
    ) -> str:
        each = len(part.touches[0].places[dim])
        used = sum(len(touch.places[dim]) for touch in part.touches)
        if axes[dim] == "heads" and kind == "W":
            return f"{matrices}: a matrix for each head"
        if used < shape[dim]:
            runs = runs_of({index for touch in part.touches for index in touch.places[dim]})
            where = ", ".join(f"{start}–{stop - 1}" for start, stop in runs[:3]) + (", …" if len(runs) > 3 else "")
            return f"{matrices}: {unit} {where}; the others have no part in it"
        ordered = all(len(runs_of(set(touch.places[dim]))) == 1 for touch in part.touches)
        group = self._names.num_heads // max(self._names.num_kv_heads, 1)
        shared = f", each for {group} query heads" if part.letter in "kv" and group > 1 else ""
        if kind == "b":
            return f"{matrices}{shared}"
        if not ordered:
            return f"{matrices}: the {unit} of its heads lie between one another"
        way = (
            "its rows are the heads one above the other" if unit == "rows" else "its columns are the heads side by side"
        )
        return f"{matrices}: {way}, {each} each{shared}"


def _readers(seen: Run) -> dict[str, list[Op]]:
    """For each parameter, the operations that read it, moved or cast at most, first to last."""
    recording, graph = seen.recording, seen.graph
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


def _others(readers: dict[str, list[Op]], names: Iterable[str]) -> dict[str, FoundRole]:
    """What reads each parameter first that is no part of an attention."""
    roles = {}
    for name in names:
        reader = next(iter(readers.get(name, ())), None)
        roles[name] = FoundRole("", "not read by this forward" if reader is None else f"read by {reader.base_name}")
    return roles

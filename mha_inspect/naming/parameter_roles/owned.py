"""Which elements of which parameters belong to which head of an attention: its projections, run again head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange

from ...graph.attention import Attention
from ...graph.evaluate import CannotReplayError
from ...record.ops import TensorRef
from ...record.subject import Run
from ..axes import AxisNames
from ..canonical import sizes_in
from ..pattern import dims_of
from .influence import Influence, Path, Touch, numbers_like, only, only_first_feature

LETTERS = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Owned:
    """A parameter on the way to the heads of one side, or from them to the output."""

    heads: dict[int, Touch]
    """Head to the elements that have a part in it; heads that share a key and value count as one."""
    shared: bool
    """Whether some elements have a part in several heads: then it belongs to none."""
    outside: int | None
    """The dimension that is not of heads and their features: what a matrix takes in, or gives as output."""


Side = dict[str, Owned]
"""By the name of the parameter."""


class OwnedParameters:
    """Finds out for each side of an attention; alike ones are looked at once."""

    def __init__(self, seen: Run) -> None:
        self._seen = seen
        self._known: dict[object, list[Owned | None]] = {}

    def of(self, letter: str, found: Attention, names: AxisNames) -> Side:
        """The parameters of `q`, `k`, `v` or `o`; those that no operation on the way can be run again for are missing.

        What is known of the run is its recording alone: it must have been kept.
        """
        try:
            with torch.inference_mode(False), torch.enable_grad():
                return self._of(letter, found, names)
        except CannotReplayError:
            return {}

    def _of(self, letter: str, found: Attention, names: AxisNames) -> Side:
        paths = self._paths(letter, found)
        parameters = list(dict.fromkeys(name for path in paths for name in path.parameters))
        pattern = names.of_stage("context" if letter == "o" else f"{letter}_heads")
        alike = tuple(path.signature() for path in paths)
        key = (letter, pattern, alike, names.num_heads, names.num_kv_heads)
        if key not in self._known:
            side = self._output(found, names, paths) if letter == "o" else self._heads(letter, found, names, paths)
            self._known[key] = [side.get(name) for name in parameters]
        owned = zip(parameters, self._known[key], strict=True)
        return {name: one for name, one in owned if one is not None}

    def _paths(self, letter: str, found: Attention) -> list[Path]:
        graph, turns = self._seen.graph, found.branches or (found,)
        if letter == "o":
            # Where a loop runs over pieces of the sequence, each is an attention, and one product projects them all.
            op = found.projections.get("output")
            beside = [other for other, _ in self._seen.attentions if op and other.projections.get("output") is op]
            every = (turn for other in (found, *beside) for turn in other.branches or (other,))
            contexts = {turn.stages["context"].id: turn.stages["context"] for turn in every}
            return [Path(graph, tuple(contexts.values()), found.stages["output"])] if "output" in found.stages else []
        sources = tuple({found.stages[s].id: found.stages[s] for s in LETTERS.values() if s in found.stages}.values())
        targets = {turn.stages[f"{letter}_heads"].id: turn.stages[f"{letter}_heads"] for turn in turns}
        return [Path(graph, sources, target) for target in targets.values()]

    def _heads(self, letter: str, found: Attention, names: AxisNames, paths: list[Path]) -> Side:
        recording = self._seen.recording
        stage = f"{letter}_heads"
        touches: list[dict[str, Touch]] = []
        taken_in: dict[str, Touch] = {}
        for path in paths:
            run = Influence(path, numbers_like(recording))
            heads = heads_first(run.result, names.of_stage(stage), sizes_in(found, names, stage))
            if heads is None:
                raise CannotReplayError("its heads have no name")
            touches += [run.of(head) for head in heads]
            narrow = Influence(path, only_first_feature(recording))
            taken_in |= narrow.of(narrow.result)
        return _side(touches, taken_in, names.num_heads if letter == "q" else names.num_kv_heads)

    def _output(self, found: Attention, names: AxisNames, paths: list[Path]) -> Side:
        recording, turns = self._seen.recording, found.branches or (found,)
        touches: list[dict[str, Touch]] = []
        given: dict[str, Touch] = {}
        for path in paths:
            for context in {turn.stages["context"].id: turn.stages["context"] for turn in turns}.values():
                for mask in self._masks_of_heads(context, found, names):
                    run = Influence(path, only({context.id: mask}, recording))
                    touches.append(run.of(run.result))
            whole = Influence(path, numbers_like(recording))
            given |= whole.of(whole.result[..., :1])
        return _side(touches, given, names.num_heads)

    def _masks_of_heads(self, context: TensorRef, found: Attention, names: AxisNames) -> list[torch.Tensor]:
        """For each head, 1 where an element of the context is of it, and else 0."""
        value = self._seen.recording.values[context.id]
        ones = torch.ones_like(value, dtype=torch.float32, requires_grad=True)
        heads = heads_first(ones, names.of_stage("context"), sizes_in(found, names, "context"))
        if heads is None or value.is_meta:
            raise CannotReplayError("its heads have no name")
        masks = [torch.autograd.grad(head.sum(), ones, retain_graph=True)[0] for head in heads]
        return [mask.to(value.dtype) for mask in masks]


def heads_first(value: torch.Tensor, axes: str, sizes: dict[str, int]) -> torch.Tensor | None:
    """`heads rest` of a tensor laid out as `axes` says; None where that cannot be told.

    Heads that the pattern has no axis for are one head.
    """
    dims = [[f"n{place}_{i}" if n.isdigit() else n for i, n in enumerate(d)] for place, d in enumerate(dims_of(axes))]
    own = [name for names in dims for name in names]
    first = [name for name in ("heads", "kv_heads", "group") if name in own]
    rest = [name for name in own if name not in first]
    left = " ".join(f"({' '.join(names)})" for names in dims)
    shared = {name: sizes[name] for name in own if name in sizes and any(name in d and len(d) > 1 for d in dims)}
    if len(set(own)) != len(own):
        return None
    try:
        return rearrange(value, f"{left} -> ({' '.join(first)}) ({' '.join(rest)})", **shared)
    except RuntimeError:  # einops' own error is one: sizes that are not told
        return None


def _side(touches: list[dict[str, Touch]], outside: dict[str, Touch], heads: int) -> Side:
    side: Side = {}
    for name in dict.fromkeys(name for touch in touches for name in touch):
        found = [touch.get(name) for touch in touches]
        # Heads that share a key and value have the very same elements.
        apart = list(dict.fromkeys(touch for touch in found if touch is not None))
        same = apart if len(apart) == heads else found
        by_head = {head: touch for head, touch in enumerate(same) if touch is not None}
        side[name] = Owned(by_head, len(by_head) > 1 and _overlap(list(by_head.values())), _outside(outside.get(name)))
    return side


def _overlap(touches: list[Touch]) -> bool:
    """Whether two heads have an element in common."""
    first, second = touches[0], touches[1]
    return all(set(a) & set(b) for a, b in zip(first.places, second.places, strict=True))


def _outside(touch: Touch | None) -> int | None:
    """The dimension in which a single feature has a single place."""
    if touch is None or len(touch.places) < 2:
        return None
    single = [dim for dim, places in enumerate(touch.places) if len(places) == 1]
    return single[0] if len(single) == 1 else None

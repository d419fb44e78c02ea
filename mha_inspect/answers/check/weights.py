"""Faults of parameters: a projection of which nothing is made, that serves twice, or that gets no gradient."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property

import torch

from ...graph.attention import Attention
from ...record.ops import Op, Recording, TensorRef
from ...reports.check import Finding, SkippedCheck
from ...text import shortened, spans
from .bench import Bench, each_kind, kinds
from .gradients import gradients_of, weight_of
from .runner import NotPossibleError
from .tokens import Tokens

_SIDES = ("query", "key", "value")
_EXACT = (torch.float32, torch.float64)
"""What is small does not come out as zero in these."""
_LARGEST = 1 << 24
"""Elements of what a projection gives up to which it is looked at which of them are read."""


class UnreadFinding(Finding):
    """Something that nothing reads: no fault elsewhere is the reason."""


class Living:
    """What a recording's outputs hang on."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.shapes = {named.name: named.tensor.shape for named in recording.parameters}
        self.mentioned: set[str] = set()
        """Parameters, and modules of such, of which something has been said."""
        ids, storages = {named.tensor.id for named in recording.outputs}, set[int]()
        written = {named.tensor.storage for named in (*recording.inputs, *recording.buffers)}
        self.ops: list[Op] = []
        for op in reversed(recording.ops):
            into = {op.inputs[0].storage} if op.kind == "write" and op.inputs else set()
            if any(tensor.id in ids for tensor in op.outputs) or into & (storages | written):
                self.ops.append(op)
                ids |= {tensor.id for tensor in op.inputs}
                storages |= {tensor.storage for tensor in op.inputs}

    @cached_property
    def readers(self) -> dict[int, list[Op]]:
        """Storage to the operations that compute with what is in it, each call once."""
        attention: dict[int, dict[int, Op]] = defaultdict(dict)
        for op in self.ops:
            for tensor in op.inputs if op.kind != "view" else ():
                attention[tensor.storage].setdefault(op.call, op)
        return {storage: list(calls.values()) for storage, calls in attention.items()}

    @cached_property
    def reads(self) -> dict[str, list[Op]]:
        """Parameter to the operations that compute with it."""
        return {named.name: self.readers.get(named.tensor.storage, []) for named in self.recording.parameters}

    @property
    def spare(self) -> list[str]:
        """Parameters that nothing computes with, and of which nothing has been said."""
        known = [name for name in self.shapes if any(f"{name}.".startswith(f"{path}.") for path in self.mentioned)]
        return [name for name, ops in self.reads.items() if not ops and name not in known]

    def unread(self, result: TensorRef) -> set[int]:
        """Return the features of a projection's output that no operation reads; all of them where none does."""
        features = result.shape[-1]
        if result.numel > _LARGEST or result.stride != torch.empty(result.shape, device="meta").stride():
            return set()
        read = torch.zeros(result.offset + result.numel, dtype=torch.bool)
        refs = [t for op in self.ops if op.kind != "view" for t in op.inputs if t.storage == result.storage]
        refs += [named.tensor for named in self.recording.outputs if named.tensor.storage == result.storage]
        for ref in refs:
            if ref.shape and ref.numel:
                read.as_strided(ref.shape, ref.stride, ref.offset).fill_(True)
        by_feature = read[result.offset :].reshape(-1, features).any(0)
        return {int(place) for place in (~by_feature).nonzero().flatten()}

    def unread_of(self, projection: Op) -> set[int]:
        """Return the features that a projection gives, its bias added, and that no operation reads."""
        result = projection.output
        unread, readers = self.unread(result), self.readers.get(result.storage, [])
        if not unread and len(readers) == 1 and readers[0].pointwise and readers[0].output.numel == result.numel:
            return self.unread(readers[0].output)
        return unread


def parameters(bench: Bench) -> Iterator[Finding | SkippedCheck]:
    """Yield projections that serve twice, of which nothing is made, or that get no gradient."""
    if not bench.recorded.recording.outputs:
        raise NotPossibleError("the forward returns no tensor, and nothing is known to hang on its parameters")
    living = Living(bench.recorded.recording)
    yield from _twice(bench, living)
    yield from _copied_heads(bench)
    for attention, _, _ in kinds(bench.recorded):
        yield from _unused(living, attention)
        yield from _unread_features(bench, living, attention)
    if bench.on_meta:
        yield SkippedCheck("parameters", "on meta nothing tells whether each gets a gradient: use --device cpu")
    else:
        yield from _without_gradient(bench, living)


def _twice(bench: Bench, living: Living) -> Iterator[Finding]:
    """Yield parameters that serve twice beside one of the same shape and place that serves nowhere."""
    sides: dict[str, dict[str, Op]] = defaultdict(dict)
    inside = set()
    for attention, _ in bench.recorded.attentions:
        for turn in (attention, *attention.branches):
            inside.add(turn.module)
            for side, op in turn.projections.items():
                if _is_whole(bench, op):
                    sides[weight_of(bench, op)].setdefault(side, op)
    served = [name for name, ops in living.reads.items() if len(ops) > 1 or len(sides[name]) > 1]
    for name in served:
        if name not in sides and not any(name.startswith(f"{path}." if path else "") for path in inside):
            continue
        spare = [n for n in living.spare if living.shapes[n] == living.shapes[name] and _beside(n, name)]
        if not spare:
            continue
        living.mentioned |= {_beside(other, name) for other in spare}
        uses = " and the ".join(sides[name]) if len(sides[name]) > 1 else ""
        ops = living.reads[name]
        others = f"{', '.join(spare[:2])}{' and more' if len(spare) > 2 else ''}"
        yield UnreadFinding(
            "parameters",
            (f"{name} projects the {uses}" if uses else f"{name} serves {len(ops)} times")
            + f", and {others} {'is' if len(spare) == 1 else 'are'} read by nothing.",
            "What has the same shape and stands beside it gets no gradient.",
            source=(list(sides[name].values()) or ops)[-1].source,
            module=ops[-1].module if ops else "",
            fix=f"use {spare[0]} where it belongs.",
        )


def _beside(name: str, other: str) -> str:
    """Return the module that one parameter is of and that stands beside the other's; empty where none does.

    `k_norm` for `k_norm.weight` beside `q_norm.weight`, `heads.1` for `heads.1.key.weight` beside `heads.0.key.weight`.
    """
    left, right = name.split("."), other.split(".")
    differ = [place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]]
    if len(left) != len(right) or len(differ) != 1 or (differ[0] == len(left) - 1 and len(left) > 1):
        return ""
    return ".".join(left[: differ[0] + 1])


def _is_whole(bench: Bench, op: Op) -> bool:
    """Whether a projection multiplies by all of a parameter, and not by a piece."""
    name = weight_of(bench, op)
    sizes = {named.name: named.tensor.numel for named in bench.recorded.recording.parameters}
    return bool(name) and any(tensor.numel == sizes[name] for tensor in op.inputs)


@each_kind()
def _copied_heads(_: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield where two turns of a loop over heads have the same weights and the same inputs."""
    signs: dict[tuple[object, ...], int] = {}
    turns = tokens.attention.branches
    for place, turn in enumerate(turns):
        sign = tuple(
            (side, tensor.storage, tensor.offset, tensor.shape, turn.stages[f"{side[0]}_heads"].offset)
            for side in _SIDES
            if side in turn.projections
            for tensor in turn.projections[side].inputs
        )
        first = signs.setdefault(sign, place)
        anew = all(turns[first].projections.get(side) is not turn.projections.get(side) for side in _SIDES)
        if len(sign) >= 2 * len(_SIDES) and first != place and anew:
            yield Finding(
                "parameters",
                f"Heads {first} and {place} are one: they have the same weights, and give the same.",
                "W_q, W_k and W_v of both turns of the loop lie in the same memory.",
                source=turn.score_product.op.source,
                fix="make each head anew: [Head() for _ in range(heads)], not [Head()] * heads.",
            )
            return


def _unused(living: Living, attention: Attention) -> Iterator[Finding]:
    """Yield weights of an attention's module of which nothing is made."""
    # `self_attn` holds the projection of `self_attn.q_proj.weight`.
    spare = [n for n in living.spare if len(living.shapes[n]) > 1 and ".".join(n.split(".")[:-2]) == attention.module]
    living.mentioned |= set(spare)
    width = attention.stages["concat"].shape[-1] if "concat" in attention.stages else None
    missed = [name for name in spare if "output" not in attention.projections and width in living.shapes[name]]
    for names, sure in ((missed, len(missed) == 1), ([n for n in spare if n not in missed], False)):
        if names:
            yield UnreadFinding(
                "parameters",
                f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} "
                f"{'is' if len(names) == 1 else 'are'} read by nothing"
                + (": the heads are never projected back." if sure else "."),
                "The output hangs on no operation that reads it.",
                sure=sure,
                module=attention.module,
            )


def _unread_features(bench: Bench, living: Living, attention: Attention) -> Iterator[Finding]:
    """Yield projections of whose output a part is read by nothing: one of q, k and v is made of another's part."""
    packed = Counter(op.index for side, op in attention.projections.items() if side in _SIDES)
    for side in _SIDES:
        op = attention.projections.get(side)
        if op is None or packed.pop(op.index, 0) < 2 or attention.branches:
            continue
        unread, features = living.unread_of(op), op.output.shape[-1]
        heads = attention.stages[f"{side[0]}_heads"].shape[-1]
        if heads <= len(unread) < features:
            name = weight_of(bench, op)
            living.mentioned.add(name)
            yield UnreadFinding(
                "parameters",
                f"{len(unread)} of the {features} features that {name or 'the projection'} gives are read by nothing: "
                "query, key and value are not three parts of it.",
                f"No operation that the output hangs on reads features {shortened(spans(unread), 60)}.",
                source=op.source,
                module=attention.module,
                fix="take query, key and value from their own parts.",
            )


def _without_gradient(bench: Bench, living: Living) -> Iterator[Finding]:
    """Yield projections that the output hangs on and that get no gradient, in whole or for the parts of some heads."""
    gradients = gradients_of(bench)
    # Where tokens are few or far apart in an image, what a softmax hangs on may be nothing, and not cut off.
    saturated = not bench.follows or not any(bool((sight.heavy.sum(-1) > 1).any()) for sight in bench.sights)
    for attention, _, _ in kinds(bench.recorded):
        for side, op in attention.projections.items():
            name = weight_of(bench, op)
            if name in living.mentioned or name not in gradients:
                continue
            gradient, part = gradients[name], ""
            if gradient is None:
                part = "gets no gradient" if _is_whole(bench, op) else ""
            elif side in _SIDES and not saturated and gradient.dim() == 2 and gradient.dtype in _EXACT:
                # A square matrix is taken for nn.Linear's, which has the features that come out first.
                out = 0 if gradient.shape[0] == op.output.shape[-1] else 1
                dead = (gradient == 0).all(1 - out)
                dead[sorted(living.unread_of(op))] = False
                number = int(dead.sum())
                if attention.stages[f"{side[0]}_heads"].shape[-1] <= number < dead.numel():
                    part = f"gets no gradient for {number} of its {dead.numel()} features"
            if part:
                living.mentioned.add(name)
                yield Finding(
                    "parameters",
                    f"{name} projects the {side}, and {part}: the graph is cut behind it.",
                    "A sum of the output was taken back through the module.",
                    source=op.source,
                    module=attention.module,
                    fix="take detach(), no_grad() or .data out of the way.",
                )

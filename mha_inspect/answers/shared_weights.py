"""The same weights for two sides: one state dict, drawn for two layers, or read off one and written into the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import WeightsError
from ..measure.weights import PARTS, CopiedParts, NotCopied, Weights, copy_by_head, draw
from ..record.rounding import same_bits
from ..reports.diff import SharedWeights
from ..text import first_few, listed
from .comparable_run import ComparableRun


@dataclass(frozen=True)
class Shared:
    """How both sides came to their weights."""

    report: SharedWeights
    are_carried: bool = True
    """Whether any numbers are the same on both sides by our doing."""
    are_comparable: bool = True
    """Whether a difference of numbers means anything: False if each side has random weights of its own."""
    are_drawn: bool = False
    """Whether both have what they can hold of numbers that were drawn for them."""


AS_THEY_ARE = Shared(
    SharedWeights(False, "not carried: each side has the weights that it came with.", ()), are_carried=False
)


class _Direction(NamedTuple):
    """From which side into which the weights went, and what went of each attention."""

    source: ComparableRun
    target: ComparableRun
    carried: tuple[CopiedParts, ...]

    @property
    def left_out(self) -> list[NotCopied]:
        return [out for of_attention in self.carried for out in of_attention.not_copied]


def share(left: ComparableRun, right: ComparableRun) -> Shared:
    """Give both sides the same weights as far as that can be done, and say how it was done.

    Two layers get weights that are drawn for both. Of any others, where names and shapes agree, it is one state dict;
    else the weights of each attention are carried by head, in the direction in which all of them can be, or else as far
    as they fit.

    Raises `WeightsError` where two layers have no weights that both could compute with.
    """
    # The coarser of two dtypes rounds the numbers: the finer one can hold them.
    source, target = sorted((left, right), key=lambda run: -torch.finfo(getattr(torch, run.dtype)).eps)
    if left.subject.layer and right.subject.layer:
        return _drawn(left, right, getattr(torch, target.dtype))
    given, before = (_numbers(side) for side in (source, target))
    if given and {name: t.shape for name, t in given.items()} == {name: t.shape for name, t in before.items()}:
        target.subject.module.load_state_dict(given)
        if any(not same_bits(tensor, before[name]) for name, tensor in target.subject.module.state_dict().items()):
            target.forget()  # what was run with the same numbers stays
        return Shared(SharedWeights(True, "one state dict in both: names and shapes agree.", ()))
    direction = _direction(target, source) if source.subject.layer else _direction(source, target)
    if isinstance(direction, str):
        if not any(side.subject.module.state_dict() for side in (left, right)):
            return Shared(SharedWeights(True, "neither side has weights.", ()))
        sentence = f"not copied: each side has its own weights, as it was built from seed {left.subject.seed}."
        return Shared(SharedWeights(False, sentence, (direction,)), are_carried=False, are_comparable=False)
    source, target = direction.source, direction.target
    lacking = _why_not(direction.left_out, target.label, source.label)
    left_out = (*lacking, *_rest(source), *_rest(target))
    filled = {part for carried in direction.carried for part in carried.filled}
    how = f"read off the products of {source.label} and written into the parameters of {target.label}"
    how += ", the identity for W_o" if "W_o" in filled else ""
    how += ", zeros for the biases" if filled - {"W_o"} else ""
    how += ", as far as they fit" if lacking else ""
    return Shared(SharedWeights(not left_out, f"{how}.", left_out))


def _numbers(side: ComparableRun) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in side.subject.module.state_dict().items()}


def _direction(source: ComparableRun, target: ComparableRun) -> _Direction | str:
    """Carry the weights of all attentions in one direction; return which, or why they cannot be."""
    for side in (source, target):
        missing = next((weights.missing[0] for weights in side.weights if weights.missing), "")
        if missing or not side.weights:
            return f"{side.label}: {missing or 'no attention was found in it.'}"
        if not all(weights.projections for weights in side.weights):
            return f"{side.label}: its attention has no projections."
    if len(source.weights) != len(target.weights):
        return f"{source.label} has {len(source.weights)} attentions, and {target.label} has {len(target.weights)}."
    before = _numbers(target), _numbers(source)
    there = _carried(source, target)
    if not there.left_out:
        return there
    # What has no place for some numbers can still give its own to what has a place for all; a layer takes what it can,
    # and gives its own to what is of other sizes.
    if not target.subject.layer or there.left_out[0].sizes:
        target.subject.module.load_state_dict(before[0])
        back = _carried(target, source)
        if not back.left_out:
            return back
        source.subject.module.load_state_dict(before[1])
        there = _carried(source, target)
    if any(of_attention.copied for of_attention in there.carried):
        return there
    return _why_not(there.left_out[:1], target.label, source.label)[0]


def _carried(source: ComparableRun, target: ComparableRun) -> _Direction:
    """Write the weights of each attention into the one in the same place, as far as it has a place for them."""
    target.forget()
    pairs = zip(source.weights, target.weights, strict=True)
    return _Direction(source, target, tuple(copy_by_head(given, taken) for given, taken in pairs))


def _why_not(left_out: Iterable[NotCopied], label: str, source: str) -> tuple[str, ...]:
    """Return a sentence for each reason for which parts were left out, of all attentions together."""
    parts: dict[str, dict[str, NotCopied]] = {}
    for out in left_out:
        sizes = out.sizes and f"{list(out.sizes[0])} in {source} and {list(out.sizes[1])} in {label}"
        parts.setdefault(sizes or f"fit into {label}: {out.reason}", {})[out.part] = out
    verbs = {True: ("is", "are"), False: ("does not", "do not")}
    return tuple(
        f"{listed(list(outs))} {verbs[any(out.sizes for out in outs.values())][len(outs) > 1]} {why}."
        for why, outs in parts.items()
    )


def _rest(side: ComparableRun) -> Iterator[str]:
    """Yield a sentence where a module has parameters that belong to no projection of an attention."""
    projections = [projection for weights in side.weights for projection in weights.projections.values()]
    known = {name for projection in projections for name in projection.parameters}
    others = {name: p.numel() for name, p in side.subject.module.named_parameters() if name not in known}
    if others:
        what = f"{first_few(list(others), 1)}, {sum(others.values()):,} numbers that project nothing for an attention"
        yield f"{side.label}: {what}, stay as they were built."


def _drawn(left: ComparableRun, right: ComparableRun, dtype: torch.dtype) -> Shared:
    """Draw weights for two layers, all that one or the other has a place for, and give each what it can hold.

    Raises `WeightsError` where key/value heads are shared and the head counts differ.
    """
    (ours,), (theirs,) = left.weights, right.weights
    shapes: dict[str, tuple[int, ...]] = {}
    for part in PARTS:
        every = [weights.shapes[part] for weights in (ours, theirs) if part in weights.shapes]
        if every:
            shapes[part] = min(every, key=math.prod)  # fewer key/value heads can be repeated for more
    kv_heads = shapes["W_k"][0]
    if kv_heads != ours.num_heads != theirs.num_heads:
        raise WeightsError(
            f"num_kv_heads {kv_heads} is below num_heads {ours.num_heads}: the rows of W_k and W_v belong to groups of "
            "heads, and another head count is another layer. Take weights with one key/value head a head."
        )
    numbers = draw(shapes, left.subject.seed or 0, dtype)
    source = Weights(left.subject.module, {}, ours.num_heads, kv_heads)
    lacking: dict[str, None] = {}
    for side, weights in ((left, ours), (right, theirs)):
        side.forget()
        carried = copy_by_head(source, weights, numbers)
        if side.finer is not None:
            copy_by_head(source, replace(weights, module=side.finer.module), numbers)
        lacking |= dict.fromkeys(_why_not(carried.not_copied, side.label, "the drawn weights"))
    if not lacking:
        return Shared(SharedWeights(True, "every number of the one is in the other.", ()), are_drawn=True)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    return Shared(SharedWeights(False, sentence, tuple(lacking)), are_drawn=True)

"""The same weights for two sides: one state dict, drawn for two layers, or read off one and written into the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..errors import WeightsError
from ..measure.weights import PARTS, Carried, LeftOut, Weights, carry, draw
from ..record.rounding import same_bits
from ..reports.diff import SharedWeights
from ..text import first_few, listed
from .side import Side


@dataclass(frozen=True)
class Shared:
    """How both sides came to their weights."""

    report: SharedWeights
    are_carried: bool = True
    """Whether any numbers are the same on both sides by our doing."""
    are_drawn: bool = False
    """Whether both have what they can hold of numbers that were drawn for them."""


AS_THEY_ARE = Shared(
    SharedWeights(False, "not carried: each side has the weights that it came with.", ()), are_carried=False
)


@dataclass(frozen=True)
class _Direction:
    """From which side into which the weights went, and what went of each attention."""

    source: Side
    target: Side
    carried: tuple[Carried, ...]


def share(left: Side, right: Side) -> Shared:
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
    if _agree(source.subject.module, target.subject.module):
        _load(target, source.subject.module.state_dict())
        return Shared(SharedWeights(True, "one state dict in both: names and shapes agree.", ()))
    if source.subject.layer:
        source, target = target, source
    direction = _direction(source, target)
    if isinstance(direction, _Direction):
        return _told(direction)
    sentence = f"not carried: each side has its own weights, as it was built from seed {left.subject.seed}."
    return Shared(SharedWeights(False, sentence, (direction,)), are_carried=False)


def _direction(source: Side, target: Side) -> _Direction | str:
    """Carry the weights of all attentions in one direction; return which, or why they cannot be."""
    why = _unreadable(source) or _unreadable(target)
    if why:
        return why
    if len(source.weights) != len(target.weights):
        return f"{source.label} has {len(source.weights)} attentions, and {target.label} has {len(target.weights)}."
    carried = _all_or_none(source, target)
    if isinstance(carried, tuple):
        return _Direction(source, target, carried)
    # What has no place for some numbers can still give its own to what has a place for all; a layer takes what it can,
    # and gives its own to what is of other sizes.
    if not target.subject.layer or carried.sizes:
        back = _all_or_none(target, source)
        if isinstance(back, tuple):
            return _Direction(target, source, back)
    partly = _carried(source, target)
    if any(of_attention.went for of_attention in partly):
        return _Direction(source, target, partly)
    return _why_not([carried], target.label, source.label)[0]


def _all_or_none(source: Side, target: Side) -> tuple[Carried, ...] | LeftOut:
    """Carry all weights of all attentions into a side; where one has no place, none: return that."""
    before = {name: tensor.detach().clone() for name, tensor in target.subject.module.state_dict().items()}
    carried = _carried(source, target)
    left_out = [out for of_attention in carried for out in of_attention.left_out]
    if not left_out:
        return carried
    target.subject.module.load_state_dict(before)
    return left_out[0]


def _unreadable(side: Side) -> str:
    """Return why the weights of a side cannot be told by head; empty where they can."""
    if not side.weights:
        return f"{side.label}: no attention was found in it."
    missing = next((weights.missing[0] for weights in side.weights if weights.missing), "")
    if missing:
        return f"{side.label}: {missing}"
    projects = all(weights.projections for weights in side.weights)
    return "" if projects else f"{side.label}: its attention has no projections."


def _carried(source: Side, target: Side) -> tuple[Carried, ...]:
    """Write the weights of each attention into the one in the same place, as far as it has a place for them."""
    target.forget()
    return tuple(carry(given, taken) for given, taken in zip(source.weights, target.weights, strict=True))


def _load(side: Side, numbers: dict[str, torch.Tensor]) -> None:
    """Load a state dict; what was run with the same numbers stays."""
    before = {name: tensor.detach().clone() for name, tensor in side.subject.module.state_dict().items()}
    side.subject.module.load_state_dict(numbers)
    if any(not same_bits(tensor, before[name]) for name, tensor in side.subject.module.state_dict().items()):
        side.forget()


def _agree(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = ({name: tensor.shape for name, tensor in side.state_dict().items()} for side in (left, right))
    return bool(ours) and ours == theirs


def _told(direction: _Direction) -> Shared:
    """Say what was carried, and what was not and why."""
    source, target = direction.source, direction.target
    lacking = _lacking(direction.carried, target.label, source.label)
    left_out = (*lacking, *_rest(source), *_rest(target))
    filled = {part for carried in direction.carried for part in carried.filled}
    how = f"read off the products of {source.label} and written into the parameters of {target.label}"
    how += ", the identity for W_o" if "W_o" in filled else ""
    how += ", zeros for the biases" if filled - {"W_o"} else ""
    how += ", as far as they fit" if lacking else ""
    return Shared(SharedWeights(not left_out, f"{how}.", left_out))


def _lacking(carried: Sequence[Carried], label: str, source: str) -> tuple[str, ...]:
    """Return a sentence for each reason for which parts were left out, of all attentions together."""
    return _why_not([out for of_attention in carried for out in of_attention.left_out], label, source)


def _why_not(left_out: Sequence[LeftOut], label: str, source: str) -> tuple[str, ...]:
    parts: dict[str, dict[str, LeftOut]] = {}
    for out in left_out:
        sizes = out.sizes and f"{list(out.sizes[0])} in {source} and {list(out.sizes[1])} in {label}"
        parts.setdefault(sizes or f"fit into {label}: {out.reason}", {})[out.part] = out
    verbs = {True: ("is", "are"), False: ("does not", "do not")}
    return tuple(
        f"{listed(list(outs))} {verbs[any(out.sizes for out in outs.values())][len(outs) > 1]} {why}."
        for why, outs in parts.items()
    )


def _rest(side: Side) -> Iterator[str]:
    """Yield a sentence where a module has parameters that belong to no projection of an attention."""
    projections = [projection for weights in side.weights for projection in weights.projections.values()]
    known = {name for projection in projections for name in projection.parameters}
    others = {name: p.numel() for name, p in side.subject.module.named_parameters() if name not in known}
    if others:
        what = f"{first_few(list(others), 1)}, {sum(others.values()):,} numbers that project nothing for an attention"
        yield f"{side.label}: {what}, stay as they were built."


def _drawn(left: Side, right: Side, dtype: torch.dtype) -> Shared:
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
        carried = carry(source, weights, numbers)
        if side.finer is not None:
            carry(source, replace(weights, module=side.finer.module), numbers)
        lacking |= dict.fromkeys(_lacking([carried], side.label, "the drawn weights"))
    if not lacking:
        return Shared(SharedWeights(True, "every number of the one is in the other.", ()), are_drawn=True)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    return Shared(SharedWeights(False, sentence, tuple(lacking)), are_drawn=True)

"""Give two sides the same weights: one state dict, random weights for two layers, or a copy by head."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..measure.weights import PARTS, CopiedParts, NotCopied, Weights, copy_by_head, draw
from ..record.rounding import same_bits
from ..reports.diff import SharedWeights
from ..text import first_few, listed, plural
from .comparable_run import ComparableRun

Shared = tuple[SharedWeights, str]
"""How both sides got their weights, and what both are given; empty if their weights are unrelated."""

_SAME = "the same weights and input"
AS_THEY_ARE: Shared = (
    SharedWeights(False, "Not copied: each side keeps its own weights.", ()),
    "each side's own weights and the same input",
)


class _Direction(NamedTuple):
    """The source and the target of a copy, and the copied parts of each attention."""

    source: ComparableRun
    target: ComparableRun
    copied: tuple[CopiedParts, ...]

    @property
    def not_copied(self) -> list[NotCopied]:
        return [part for of_attention in self.copied for part in of_attention.not_copied]


def share(left: ComparableRun, right: ComparableRun) -> Shared:
    """Give both sides the same weights as far as possible, and return how.

    Two layers get the same random weights. Other modules share one state dict if its names and shapes agree. Otherwise
    the weights of each attention are copied by head, in the direction in which all of them fit, or as far as they fit.

    Raises `WeightsError` if no weights fit both of two layers.
    """
    # The coarser of two dtypes rounds the numbers: the finer one can represent them.
    source, target = sorted((left, right), key=lambda run: -torch.finfo(getattr(torch, run.dtype)).eps)
    if left.subject.layer and right.subject.layer:
        return _drawn(left, right, getattr(torch, target.dtype))
    numbers, before = (_numbers(side) for side in (source, target))
    if numbers and _agree(numbers, before):
        target.subject.module.load_state_dict(numbers)
        if any(not same_bits(tensor, before[name]) for name, tensor in target.subject.module.state_dict().items()):
            target.forget()  # a run with the same numbers stays valid
        return SharedWeights(True, "Both sides have the same state dict: names and shapes agree.", ()), _SAME
    direction = _direction(target, source) if source.subject.layer else _direction(source, target)
    if isinstance(direction, str):
        if not any(side.subject.module.state_dict() for side in (left, right)):
            return SharedWeights(True, "Neither side has weights.", ()), _SAME
        sentence = f"The weights could not be copied; each side keeps its own, built from seed {left.subject.seed}."
        return SharedWeights(False, sentence, (direction,)), ""
    source, target = direction.source, direction.target
    lacking = _why_not(direction.not_copied, target.label, source.label)
    named = _copied_by_name(source, target)
    left_out = (*lacking, *_rest(source, named), *_rest(target, named))
    filled = {part for copied in direction.copied for part in copied.filled}
    how = f"Copied by head from {source.label} to {target.label}"
    added = ["the identity as W_o"] if "W_o" in filled else []
    added += ["zeros as biases"] if filled - {"W_o"} else []
    how += f", with {listed(added)}" if added else ""
    how += ", as far as they fit" if lacking else ""
    how += f", and {plural(len(named), 'other tensor')} by name and shape" if named else ""
    given = "weights copied as far as they fit and the same input" if left_out else _SAME
    return SharedWeights(not left_out, f"{how}.", left_out), given


def copy_all(source: ComparableRun, target: ComparableRun) -> str:
    """Copy every weight of one side into the other, by name or else by head; return why not, empty if all were copied.

    Buffers are not copied: a mask or a table of rotations is part of what is compared. Statistics of batch norms are.
    """
    given, taken = _weights_by_name(source), _weights_by_name(target)
    if not _agree(given, taken):
        reason = _unreadable(source, target)
        if reason:
            return reason
        copied = _copied(source, target)
        if copied.not_copied:
            return _why_not(copied.not_copied[:1], target.label, source.label)[0]
        given, taken = _outside(source), _outside(target)
        if not _agree(given, taken):
            return next(iter((*_rest(target), *_rest(source))))
    with torch.no_grad():
        for name, tensor in taken.items():
            tensor.copy_(given[name])
    target.forget()
    return ""


def _agree(given: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> bool:
    """Return whether names and shapes are the same."""
    return {name: t.shape for name, t in given.items()} == {name: t.shape for name, t in taken.items()}


def _weights_by_name(side: ComparableRun) -> dict[str, Tensor]:
    module = side.subject.module
    norms = [path for path, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    buffers = {name: buffer for name, buffer in module.named_buffers() if name.rpartition(".")[0] in norms}
    return {**dict(module.named_parameters()), **buffers}


def _numbers(side: ComparableRun) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in side.subject.module.state_dict().items()}


def _direction(source: ComparableRun, target: ComparableRun) -> _Direction | str:
    """Copy the weights of all attentions in one direction; return the direction, or why they cannot be copied."""
    reason = _unreadable(source, target)
    if reason:
        return reason
    before = _numbers(target), _numbers(source)
    there = _copied(source, target)
    if not there.not_copied:
        return there
    # The other direction may work: a target without room for some parts may fit into the source. A layer only tries it
    # if sizes differ.
    if not target.subject.layer or there.not_copied[0].sizes:
        target.subject.module.load_state_dict(before[0])
        back = _copied(target, source)
        if not back.not_copied:
            return back
        source.subject.module.load_state_dict(before[1])
        there = _copied(source, target)
    if any(of_attention.copied for of_attention in there.copied):
        return there
    return _why_not(there.not_copied[:1], target.label, source.label)[0]


def _unreadable(source: ComparableRun, target: ComparableRun) -> str:
    """Return why the weights of two sides cannot be copied by head; empty if they can be read on both."""
    for side in (source, target):
        missing = next((weights.missing[0] for weights in side.weights if weights.missing), "")
        if missing or not side.weights:
            return f"{side.label}: {missing or 'no attention was found.'}"
        if not all(weights.projections for weights in side.weights):
            return f"{side.label}: its attention has no projections."
    if len(source.weights) != len(target.weights):
        return f"{source.label} has {len(source.weights)} attentions, but {target.label} has {len(target.weights)}."
    return ""


def _copied(source: ComparableRun, target: ComparableRun) -> _Direction:
    """Copy the weights of each attention into the attention in the same place, as far as they fit."""
    target.forget()
    pairs = zip(source.weights, target.weights, strict=True)
    return _Direction(source, target, tuple(copy_by_head(given, taken) for given, taken in pairs))


def _why_not(not_copied: Iterable[NotCopied], label: str, source: str) -> tuple[str, ...]:
    """Return a sentence for each reason why parts were not copied, for all attentions together."""
    by_reason: dict[str, dict[str, NotCopied]] = {}
    for part in not_copied:
        sizes = part.sizes and f"{list(part.sizes[0])} in {source} and {list(part.sizes[1])} in {label}"
        by_reason.setdefault(sizes or f"fit into {label}: {part.reason}", {})[part.part] = part
    verbs = {True: ("is", "are"), False: ("does not", "do not")}
    return tuple(
        f"{listed(list(parts))} {verbs[any(part.sizes for part in parts.values())][len(parts) > 1]} {why}."
        for why, parts in by_reason.items()
    )


def _copied_by_name(source: ComparableRun, target: ComparableRun) -> frozenset[str]:
    """Copy the weights outside the projections that have the same name and shape on both sides; return their names."""
    given, taken = _outside(source), _outside(target)
    same = frozenset(name for name, tensor in taken.items() if name in given and given[name].shape == tensor.shape)
    with torch.no_grad():
        for name in same:
            taken[name].copy_(given[name])
    if same:
        target.forget()
    return same


def _rest(side: ComparableRun, copied: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence if a module has parameters outside the projections that were not `copied`, by name."""
    others = {name: tensor for name, tensor in _outside(side).items() if name not in copied}
    if others:
        names, count = first_few(list(others), 1), sum(tensor.numel() for tensor in others.values())
        yield f"{side.label}: not copied, outside the projections: {names} ({count:,} numbers)."


def _outside(side: ComparableRun) -> dict[str, Tensor]:
    """Return the weights outside the projections of the attentions, by name."""
    projections = [projection for weights in side.weights for projection in weights.projections.values()]
    known = {name for projection in projections for name in projection.parameters}
    return {name: tensor for name, tensor in _weights_by_name(side).items() if name not in known}


def _drawn(left: ComparableRun, right: ComparableRun, dtype: torch.dtype) -> Shared:
    """Draw random weights for two layers, and copy them into both as far as they fit.

    Raises `WeightsError` if key/value heads are shared and the head counts differ.
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
            f"num_kv_heads {kv_heads} is below num_heads {ours.num_heads}, so rows of W_k and W_v belong to groups of "
            "heads. Other head counts cannot use them. Use one key/value head per head."
        )
    numbers = draw(shapes, left.subject.seed or 0, dtype)
    source = Weights(left.subject.module, {}, ours.num_heads, kv_heads)
    lacking: dict[str, None] = {}
    for side, weights in ((left, ours), (right, theirs)):
        side.forget()
        copied = copy_by_head(source, weights, numbers)
        if side.finer is not None:
            copy_by_head(source, replace(weights, module=side.finer.module), numbers)
        lacking |= dict.fromkeys(_why_not(copied.not_copied, side.label, "the drawn weights"))
    sentence = "Every weight of one side is in the other."
    if lacking:
        sentence = "Both sides have the same random weights, as far as their shapes allow."
    return SharedWeights(not lacking, sentence, tuple(lacking)), _SAME

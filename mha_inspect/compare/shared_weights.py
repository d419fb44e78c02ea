"""Give two sides the same weights: all by name, random weights for two layers, or a copy by head."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..measure.weights import PARTS, CopiedParts, NotCopied, Weights, copy_by_head, draw
from ..record.rounding import max_difference, same_bits
from ..reports.diff import SharedWeights
from ..text import first_few, listed, plural
from .comparable_run import ComparableRun, unreadable
from .merged import Merged, merged_in

_DRAWN = 0.1
"""The spread of the numbers that are added to a parameter of zeros or ones."""
_SAME = "the same weights and input"


@dataclass(frozen=True)
class Shared:
    """How both sides got their weights, and what both are given."""

    weights: SharedWeights
    given: str = _SAME
    """The weights and the input in words; empty if the weights are unrelated."""
    is_merged: bool = False
    """Whether each side keeps its weights, because one has an adapter merged into them.

    A projection and its adapter are then one stage, whose parts differ in form alone.
    """


AS_THEY_ARE = Shared(
    SharedWeights(False, "Not copied: each side keeps its own weights.", ()),
    given="each side's own weights and the same input",
)


class _ByName(Enum):
    """Whether all weights of two sides are the same by name."""

    NOT_SHARED = auto()
    """Names, shapes or ties differ."""
    EQUAL = auto()
    """The numbers were the same before."""
    COPIED = auto()
    """The numbers were copied."""


@dataclass(frozen=True, eq=False)
class _Direction:
    """The source and the target of a copy, and the copied parts of each attention."""

    source: ComparableRun
    target: ComparableRun
    copied: tuple[CopiedParts, ...]

    @property
    def not_copied(self) -> list[NotCopied]:
        """The parts of all attentions that could not be copied."""
        parts: list[NotCopied] = []
        for of_attention in self.copied:
            parts += of_attention.not_copied
        return parts

    @property
    def filled(self) -> set[str]:
        """The parts that the source lacks, of all attentions: they were filled with no effect."""
        parts: set[str] = set()
        for of_attention in self.copied:
            parts.update(of_attention.filled)
        return parts

    @property
    def why_not(self) -> str:
        """Why the first part that was not copied does not fit."""
        return _why_not(self.not_copied[:1], self.target.label, self.source.label)[0]


def share(left: ComparableRun, right: ComparableRun) -> Shared:
    """Give both sides the same weights as far as possible, and return how.

    Two layers get the same random weights. Other modules share all weights if names and shapes agree. Otherwise the
    weights of each attention are copied by head, in the direction in which all of them fit, or as far as they fit.

    Raises `WeightsError` if no weights fit both of two layers.
    """
    source, target = _in_order_of_dtypes(left, right)
    if left.subject.layer and right.subject.layer:
        return _drawn(left, right, getattr(torch, target.dtype))
    for plain, adapted in ((left, right), (right, left)):
        merged = merged_in(weights_by_name(plain), weights_by_name(adapted))
        if merged:
            return _as_merged(merged, plain, adapted)
    transposed = _read_transposed(source, target)
    if not transposed:
        exchanged = _exchanged(weights_by_name(source), weights_by_name(target))
        by_name = _share_by_name(source, target)
        if by_name is _ByName.EQUAL:
            sentence = "Both sides have the same parameters: names, shapes and numbers agree."
            return Shared(SharedWeights(True, sentence + with_drawn_constants(source, target), ()))
        if by_name is _ByName.COPIED:
            given, taken = ("left", "right") if source is left else ("right", "left")
            sentence = f"Copied by name from {given} to {taken}: names and shapes agree."
            more = _before_the_copy(exchanged, given, taken) + with_drawn_constants(source, target)
            return Shared(SharedWeights(True, sentence + more, ()))
    if source.subject.layer:
        source, target = target, source
    direction = _direction(source, target)
    if isinstance(direction, _Direction):
        return _shared_by_head(direction, transposed)
    if not weights_by_name(left) and not weights_by_name(right):
        return Shared(SharedWeights(True, "Neither side has weights.", ()))
    sentence = "The weights could not be copied; each side keeps its own."
    return Shared(SharedWeights(False, sentence, (direction,)), given="")


def _as_merged(merged: Sequence[Merged], plain: ComparableRun, adapted: ComparableRun) -> Shared:
    """Return that each side keeps its weights: a copy would add the adapter to weights that have it already."""
    first, *others = merged
    more = f", and {plural(len(others), 'other')} likewise" if others else ""
    sentence = (
        f"Not copied: {first.name} of {plain.label} is that of {adapted.label} with {first.product.words} added{more}. "
        "An adapter is merged there, so each side keeps its own weights."
    )
    given = "each side's own weights and the same input"
    return Shared(SharedWeights(False, sentence, ()), given, is_merged=True)


def _in_order_of_dtypes(left: ComparableRun, right: ComparableRun) -> tuple[ComparableRun, ComparableRun]:
    """Return the side with the coarser dtype first, or the left: the finer dtype can represent its numbers."""
    if _step_of(right) > _step_of(left):
        return right, left
    return left, right


def _step_of(side: ComparableRun) -> float:
    """Return the distance from 1 to the next number in the dtype of a side: 1.19e-07 in float32."""
    return torch.finfo(getattr(torch, side.dtype)).eps


def _shared_by_head(direction: _Direction, transposed: Sequence[str]) -> Shared:
    """Copy the weights outside the projections too, by name, and return how everything was copied."""
    source = direction.source
    target = direction.target
    lacking = _why_not(direction.not_copied, target.label, source.label)
    named = _copied_by_name(source, target)
    left_out = (*lacking, *_rest(source, named), *_rest(target, named))
    added = []
    if "W_o" in direction.filled:
        added.append("the identity as W_o")
    if direction.filled - {"W_o"}:
        added.append("zeros as biases")
    how = f"Copied by head from {source.label} to {target.label}"
    if added:
        how += f", with {listed(added)}"
    if transposed:
        how += f", with {first_few(transposed, 3)} transposed"
    if lacking:
        how += ", as far as they fit"
    if named:
        how += f", and {plural(len(named), 'other tensor')} by name and shape"
    given = "weights copied as far as they fit and the same input" if left_out else _SAME
    return Shared(SharedWeights(not left_out, f"{how}.", left_out), given)


def copy_all(source: ComparableRun, target: ComparableRun) -> str:
    """Copy every weight of one side into the other, by name or else by head; return why not, empty if all were copied.

    Buffers are not copied: a mask or a table of rotations is part of what is compared. Statistics of batch norms are.
    """
    given = weights_by_name(source)
    taken = weights_by_name(target)
    if not _agree(given, taken) or _read_transposed(source, target):
        reason = unreadable(source, target)
        if reason:
            return reason
        direction = _copied(source, target)
        if direction.not_copied:
            return direction.why_not
        given = _outside(source)
        taken = _outside(target)
        if not _agree(given, taken):
            return next(chain(_rest(target), _rest(source)))
    with torch.no_grad():
        for name, tensor in taken.items():
            tensor.copy_(given[name])
    target.forget()
    for name, tensor in taken.items():
        if not same_bits(tensor, given[name].to(tensor)):
            return f"{target.label} ties {name} to another weight, and {source.label} does not."
    return ""


def _agree(given: Mapping[str, Tensor], taken: Mapping[str, Tensor]) -> bool:
    """Return whether names and shapes are the same."""
    if given.keys() != taken.keys():
        return False
    return all(tensor.shape == taken[name].shape for name, tensor in given.items())


def _read_transposed(left: ComparableRun, right: ComparableRun) -> tuple[str, ...]:
    """Return the square weights that are `out in` on one side and `in out` on the other, of names that both have.

    nn.Linear has `out in`, and `x @ weight` reads `in out`: the same numbers give other projections.
    """
    ours = left.subject.module
    theirs = right.subject.module
    square = _square_weights(ours, theirs)
    if all(_is_of_linear(ours, name) and _is_of_linear(theirs, name) for name in square):
        return ()
    their_steps = _inner_steps(right)
    differing = set()
    for (part, name), step in _inner_steps(left).items():
        if their_steps.get((part, name), step) != step:
            differing.add(name)
    return tuple(name for name in square if name in differing)


def _square_weights(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Return the names that both modules have, of matrices with as many rows as columns in the first."""
    names_of_theirs = {name for name, _ in theirs.named_parameters()}
    square = []
    for name, weight in ours.named_parameters():
        if name not in names_of_theirs or weight.dim() != 2:
            continue
        rows, columns = weight.shape
        if rows == columns:
            square.append(name)
    return square


def _is_of_linear(module: nn.Module, name: str) -> bool:
    owner, _, _ = name.rpartition(".")
    return isinstance(module.get_submodule(owner), nn.Linear)


def _inner_steps(side: ComparableRun) -> dict[tuple[str, str], int]:
    """Return for each part of a projection, `W_q` in `q.weight`, the step in memory from one input feature to the next.

    The step is 1 in a weight that is `out in`, and the number of output features in one that is `in out`. For W_o the
    output features are counted.
    """
    steps: dict[tuple[str, str], int] = {}
    for weights in side.weights:
        for name, projection in weights.projections.items():
            for part in projection.parts:
                if part.inner is not None and part.inner[0] > 1:
                    steps[name, part.parameter.name] = part.inner[1]
    return steps


def weights_by_name(side: ComparableRun) -> dict[str, Tensor]:
    """Return the parameters of a side, each tied one by all its names, and the statistics of its batch norms.

    Other buffers are no weights: a mask or a table of rotations is part of what is compared.
    """
    module = side.subject.module
    return dict(module.named_parameters(remove_duplicate=False)) | _statistics(module)


def _statistics(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that training fills: the running means and variances of batch norms."""
    statistics: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            statistics.update(part.named_buffers(prefix=path, recurse=False))
    return statistics


def differing_buffers(left: nn.Module, right: nn.Module) -> tuple[str, ...]:
    """Return the names of buffers that both modules have with different shapes or numbers, without batch statistics."""
    theirs = _buffers(right)
    differing = []
    for name, buffer in _buffers(left).items():
        if name in theirs and not _same_numbers(buffer, theirs[name]):
            differing.append(name)
    return tuple(differing)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers with numbers, without the statistics of batch norms."""
    statistics = _statistics(module)
    buffers: dict[str, Tensor] = {}
    for name, buffer in module.named_buffers():
        if name not in statistics and not buffer.is_meta:
            buffers[name] = buffer
    return buffers


def _same_numbers(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have one shape and the same numbers, up to the rounding of the coarser dtype."""
    if left.shape != right.shape:
        return False
    if left.is_floating_point() and right.is_floating_point():
        if torch.finfo(left.dtype).eps < torch.finfo(right.dtype).eps:
            left = left.to(right.dtype)
        else:
            right = right.to(left.dtype)
    return max_difference(left, right) == 0


def _numbers(side: ComparableRun) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights_by_name(side).items()}


def _exchanged(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, str]:
    """Return their weights that have the numbers of ours of another name: `{"q.weight": "k.weight"}`.

    A seed gives them so where the layers are made in another order.
    """
    exchanged: dict[str, str] = {}
    for name, tensor in theirs.items():
        if name not in ours or tensor.dim() < 2:
            continue
        if same_bits(tensor, ours[name].to(tensor)):
            continue
        for candidate, numbers in ours.items():
            if candidate == name or numbers.shape != tensor.shape:
                continue
            if same_bits(tensor, numbers.to(tensor)):
                exchanged[name] = candidate
                break
    return exchanged


def _before_the_copy(exchanged: Mapping[str, str], source: str, target: str) -> str:
    """Return which weights were those of other names before the copy: they were drawn in another order."""
    if not exchanged:
        return ""
    (name, name_in_source), *others = exchanged.items()
    more = f", and {plural(len(others), 'other')} alike" if others else ""
    return (
        f" Before the copy, {name} of the {target} equalled {name_in_source} of the {source}{more}. "
        "Layers that are created in another order get different random numbers from one seed."
    )


def write_by_name(side: ComparableRun, numbers: Mapping[str, Tensor]) -> None:
    """Copy numbers into the weights of a side, by name."""
    weights = weights_by_name(side)
    with torch.no_grad():
        for name, tensor in numbers.items():
            weights[name].copy_(tensor)


def _share_by_name(source: ComparableRun, target: ComparableRun) -> _ByName:
    """Copy all weights by name if names and shapes agree; return whether both sides have the same numbers then.

    They do not if names of the target are one tied tensor, and the source has a tensor for each: then nothing changes.
    """
    numbers = _numbers(source)
    before = _numbers(target)
    if not numbers or not _agree(numbers, before):
        return _ByName.NOT_SHARED
    write_by_name(target, numbers)
    after = weights_by_name(target)
    if not _have_the_same_bits(after, numbers):
        write_by_name(target, before)
        return _ByName.NOT_SHARED
    if _have_the_same_bits(after, before):
        return _ByName.EQUAL  # a run with the same numbers stays valid
    target.forget()
    return _ByName.COPIED


def with_drawn_constants(source: ComparableRun, target: ComparableRun) -> str:
    """Give both sides drawn numbers where a parameter is 0 or 1 throughout, and return a sentence on it.

    A bias of zeros and a gain of ones have no effect, whatever the code does with them.
    """
    before, numbers = _numbers(source), {}
    drawn: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights_by_name(source).items():
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        if not bool((tensor == 0).all()) and not bool((tensor == 1).all()):
            continue
        if id(tensor) not in drawn:  # a tied one has several names
            drawn[id(tensor)] = before[name] + torch.randn(tensor.shape, generator=generator).to(before[name]) * _DRAWN
        numbers[name] = drawn[id(tensor)]
    if not numbers:
        return ""
    for side in (source, target):
        write_by_name(side, numbers)
        side.forget()
    if not _have_the_same_bits(weights_by_name(target), _numbers(source)):  # other names are tied there
        for side in (source, target):
            write_by_name(side, before)
        return ""
    return f" {plural(len(drawn), 'parameter')} of zeros or ones got drawn numbers, to have an effect."


def _have_the_same_bits(weights: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> bool:
    """Return whether the weights are these numbers, after a cast to the dtype of each weight."""
    return all(same_bits(tensor, numbers[name].to(tensor)) for name, tensor in weights.items())


def _direction(source: ComparableRun, target: ComparableRun) -> _Direction | str:
    """Copy the weights of all attentions in one direction; return the direction, or why they cannot be copied."""
    reason = unreadable(source, target)
    if reason:
        return reason
    target_before = _numbers(target)
    source_before = _numbers(source)
    there = _copied(source, target)
    if not there.not_copied:
        return there
    # The other direction may work: a target without room for some parts may fit into the source. A layer only tries it
    # if sizes differ.
    if not target.subject.layer or there.not_copied[0].sizes:
        write_by_name(target, target_before)
        back = _copied(target, source)
        if not back.not_copied:
            return back
        write_by_name(source, source_before)
        there = _copied(source, target)
    if any(of_attention.copied for of_attention in there.copied):
        return there
    return there.why_not


def _copied(source: ComparableRun, target: ComparableRun) -> _Direction:
    """Copy the weights of each attention into the attention in the same place, as far as they fit."""
    target.forget()
    copied = []
    for given, taken in zip(source.weights, target.weights, strict=True):
        copied.append(copy_by_head(given, taken))
    return _Direction(source, target, tuple(copied))


def _why_not(not_copied: Iterable[NotCopied], label: str, source: str) -> tuple[str, ...]:
    """Return a sentence for each reason why parts were not copied, for all attentions together."""
    by_reason: dict[tuple[str, bool], dict[str, None]] = {}
    for part in not_copied:
        reason = f"fit into {label}: {part.reason}"
        if part.sizes:
            in_source, in_target = map(list, part.sizes)
            reason = f"{in_source} in {source} and {in_target} in {label}"
        parts = by_reason.setdefault((reason, bool(part.sizes)), {})
        parts[part.part] = None
    sentences = []
    for (reason, has_sizes), parts in by_reason.items():
        is_single = len(parts) == 1
        verb = "does not" if is_single else "do not"
        if has_sizes:
            verb = "is" if is_single else "are"
        sentences.append(f"{listed([*parts])} {verb} {reason}.")
    return tuple(sentences)


def _copied_by_name(source: ComparableRun, target: ComparableRun) -> frozenset[str]:
    """Copy the weights outside the projections that have the same name and shape on both sides.

    Return the names of those that have the same numbers then: a tied tensor has those of one of its names.
    """
    given = _outside(source)
    taken = _outside(target)
    fitting = [name for name, tensor in taken.items() if name in given and given[name].shape == tensor.shape]
    with torch.no_grad():
        for name in fitting:
            taken[name].copy_(given[name])
    if fitting:
        target.forget()
    equal = set()
    for name in fitting:
        if same_bits(taken[name], given[name].to(taken[name])):
            equal.add(name)
    return frozenset(equal)


def _rest(side: ComparableRun, copied: Collection[str] = ()) -> Iterator[str]:
    """Yield a sentence if a module has parameters outside the projections that were not `copied`, by name."""
    rest = {name: tensor for name, tensor in _outside(side).items() if name not in copied}
    if not rest:
        return
    names = first_few(list(rest), 1)
    distinct = {id(tensor): tensor for tensor in rest.values()}  # a tied tensor has several names
    count = sum(tensor.numel() for tensor in distinct.values())
    yield f"{side.label}: not copied, outside the projections: {names} ({count:,} numbers)."


def _outside(side: ComparableRun) -> dict[str, Tensor]:
    """Return the weights outside the projections of the attentions, by name."""
    projected: set[str] = set()
    for weights in side.weights:
        for projection in weights.projections.values():
            projected.update(projection.parameters)
    return {name: tensor for name, tensor in weights_by_name(side).items() if name not in projected}


def _shapes_for_both(left: Weights, right: Weights) -> dict[str, tuple[int, ...]]:
    """Return the shape of each part, the smaller of two: fewer key/value heads can be repeated for more."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in PARTS:
        of_sides = [weights.shapes[part] for weights in (left, right) if part in weights.shapes]
        if of_sides:
            shapes[part] = min(of_sides, key=math.prod)
    return shapes


def _shared_heads(kv_heads: int, num_heads: int) -> WeightsError:
    """Return the error for other head counts of layers whose key/value heads are shared."""
    return WeightsError(
        f"num_kv_heads {kv_heads} is below num_heads {num_heads}, so rows of W_k and W_v belong to groups of "
        "heads. Other head counts cannot use them. Use one key/value head per head."
    )


def _drawn(left: ComparableRun, right: ComparableRun, dtype: torch.dtype) -> Shared:
    """Draw random weights for two layers, and copy them into both as far as they fit.

    Raises `WeightsError` if key/value heads are shared and the head counts differ.
    """
    (ours,) = left.weights
    (theirs,) = right.weights
    shapes = _shapes_for_both(ours, theirs)
    kv_heads = shapes["W_k"][0]
    if kv_heads != ours.num_heads != theirs.num_heads:
        raise _shared_heads(kv_heads, ours.num_heads)
    numbers = draw(shapes, left.subject.seed or 0, dtype)
    source = Weights(left.subject.module, {}, ours.num_heads, kv_heads)
    lacking: dict[str, None] = {}
    for side, weights in ((left, ours), (right, theirs)):
        side.forget()
        copied = copy_by_head(source, weights, numbers)
        if side.finer is not None:
            in_finer_dtype = replace(weights, module=side.finer.module)
            copy_by_head(source, in_finer_dtype, numbers)
        for sentence in _why_not(copied.not_copied, side.label, "the drawn weights"):
            lacking[sentence] = None
    if lacking:
        how = "Both sides have the same random weights, as far as their shapes allow."
        return Shared(SharedWeights(False, how, tuple(lacking)))
    return Shared(SharedWeights(True, "Every weight of one side is in the other.", ()))

"""The numbers of each head out of a checkpoint, and what is unusual in them: dead heads, twins, what never learned.

And how far apart the same tensor of two checkpoints is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from ...files.attentions import StoredProjection
from ...files.stored import StoredTensor
from ...files.tensors import read_stored
from ...record.rounding import parts, same_bits
from ...reports.params import HeadNorms
from ...text import listed, shown, spans

Numbers = dict[str, Tensor]
"""A part, `W_q` to `b_v`, to its numbers: `heads head_dim embed`, `heads head_dim` of a bias."""
_ENOUGH = 1000
"""Numbers from which their distribution can be told."""
_STD = 0.02
"""Of the normal distribution that most language models are drawn from."""


def numbers_of(projections: Sequence[StoredProjection], tensors: Mapping[str, StoredTensor]) -> Numbers:
    """Read the parts of an attention by head."""
    numbers: Numbers = {}
    for name in dict.fromkeys(own.tensor for own in projections):
        if tensors[name].has_numbers:
            content = read_stored(tensors[name], shown(name))
            numbers |= {own.part: _by_head(own, content) for own in projections if own.tensor == name}
    return numbers


def _by_head(own: StoredProjection, content: Tensor) -> Tensor:
    if own.heads_axis is not None:
        return content.movedim((own.heads_axis, own.axis), (0, 1))
    features = content if own.axis == 0 else content.T
    return torch.stack([features[start : start + own.width] for start in own.starts])


def look_at(
    attentions: Iterable[tuple[str, Callable[[], Numbers]]],
) -> tuple[tuple[HeadNorms, ...], tuple[str, ...]]:
    """Read attentions one after the other, each by its path and what reads it.

    Returns how large their heads are, and a sentence for each thing in them that is unusual.
    """
    norms: list[HeadNorms] = []
    notes: list[str] = []
    for module, read in attentions:
        numbers = read()
        matrices = {part: own for part, own in numbers.items() if part.startswith("W")}
        for part, own in sorted(matrices.items(), key=lambda item: "qkvo".find(item[0][-1])):
            norms.append(HeadNorms(module, part, tuple(own.double().flatten(1).norm(dim=1).tolist())))
            notes += _of_heads(own, f"{part} of {shown(module) or 'the file'}")
        notes += _as_drawn(numbers, shown(module) or "the attention")
    return tuple(norms), tuple(notes)


def _of_heads(own: Tensor, called: str) -> Iterator[str]:
    """Yield a sentence for heads that are zero, are not finite, or are the same numbers."""
    flat = own.flatten(1)
    zero = [head for head in range(len(flat)) if not bool(flat[head].any())]
    broken = [head for head in range(len(flat)) if not bool(flat[head].isfinite().all())]
    if zero:
        yield f"{called}: {_heads(zero)} zero: dead."
    if broken:
        yield f"{called}: {_heads(broken)} not finite: NaN or inf is in them."
    same: dict[bytes, list[int]] = {}
    for head in set(range(len(flat))) - {*zero, *broken}:
        same.setdefault(flat[head].contiguous().view(torch.uint8).numpy().tobytes(), []).append(head)
    for heads in sorted(own for own in same.values() if len(own) > 1):
        yield f"{called}: {_heads(heads)} twins: they hold the same numbers."


def _heads(heads: list[int]) -> str:
    return f"head {heads[0]} is" if len(heads) == 1 else f"heads {spans(heads)} are"


def _as_drawn(numbers: Numbers, called: str) -> Iterator[str]:
    """Yield a sentence where the matrices look as layers draw them before any training, and no bias was moved."""
    matrices = {part: own for part, own in numbers.items() if part.startswith("W")}
    biases = [own for part, own in numbers.items() if part.startswith("b")]
    ways = {part: _drawn(own.double()) for part, own in matrices.items()}
    if not ways or not all(ways.values()):
        return
    way = " and ".join(dict.fromkeys(filter(None, ways.values())))
    if way.startswith("normally") and any(bool(own.any()) for own in biases):
        return
    are = "are" if len(ways) > 1 else "is"
    yield f"{called}: {listed(list(ways))} {are} {way}, as layers are drawn: never trained, or hardly."


def _drawn(matrix: Tensor) -> str:
    """Return how a matrix seems to have been drawn, in words; empty where it does not.

    Evenly up to the bound of nn.Linear or of Xavier, for itself or stacked with two others; or normally, with the usual
    deviation. What has learned keeps to no such bound.
    """
    number = matrix.numel()
    if number < _ENOUGH or not bool(matrix.isfinite().all()):
        return ""
    largest, deviation = float(matrix.abs().max()), float(matrix.std())
    inside, outside = matrix.shape[-1], matrix.shape[0] * matrix.shape[1]
    if largest == 0 or deviation == 0:
        return ""
    even = abs(deviation * sqrt(3) / largest - 1) < 4 / sqrt(number)
    bounds = [1 / sqrt(inside), 1 / sqrt(outside)]
    bounds += [sqrt(6 / (inside + times * outside)) for times in (1, 2, 3)]
    if even and any(bound * (1 - 20 / number) <= largest <= bound * 1.005 for bound in bounds):
        return f"evenly spread up to ±{largest:.4g}"
    kurtosis = float(((matrix - matrix.mean()) / deviation).pow(4).mean())
    if abs(deviation / _STD - 1) < 3 / sqrt(2 * number) and abs(kurtosis - 3) < 4 * sqrt(24 / number):
        return f"normally spread with a deviation of {_STD}"
    return ""


@dataclass(frozen=True)
class Distance:
    """How far apart two tensors of one shape are."""

    same_bits: bool
    within_rounding: bool
    largest: float
    relative: float
    """‖left - right‖ / ‖left‖, of the numbers that are finite."""


def distance(left: Tensor, right: Tensor) -> Distance:
    """Return how far apart two tensors of one shape are: a NaN is equal to a NaN, and infinitely far from a number."""
    if same_bits(left, right):
        return Distance(True, True, 0.0, 0.0)
    slack = (_step(left.dtype) + _step(right.dtype)) / 2
    lowest = _smallest(left.dtype) + _smallest(right.dtype)
    within_rounding, largest, squares, left_squares = True, 0.0, 0.0, 0.0
    for ours, theirs in parts(left, right):
        a, b = ours.double(), theirs.double()
        equal = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(equal, 0, (a - b).abs().nan_to_num(inf, inf, inf))
        allowed = slack * torch.maximum(a.abs(), b.abs()) + lowest
        within_rounding &= bool((equal | (apart <= allowed.nan_to_num(0, 0, 0))).all())
        largest = max(largest, float(apart.max()))
        squares += float(apart.square().sum())
        left_squares += float(a.nan_to_num(0, 0, 0).square().sum())
    relative = sqrt(squares / left_squares) if left_squares else (inf if squares else 0.0)
    return Distance(False, within_rounding, largest, relative)


def _step(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype) if dtype.is_floating_point else None
    return 0.0 if info is None else info.tiny * info.eps

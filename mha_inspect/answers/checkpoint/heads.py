"""The numbers of each head out of a checkpoint, and what is unusual in them: dead heads, twins, what never learned.

And whether the heads of two checkpoints hold the same numbers, also in another order, and how far apart they are.
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
        if has_numbers(tensors[name]):
            content = read_stored(tensors[name], shown(name))
            numbers |= {own.part: _by_head(own, content) for own in projections if own.tensor == name}
    return numbers


def has_numbers(tensor: StoredTensor) -> bool:
    """Return whether a tensor has real numbers in the file."""
    return tensor.numel > 0 and tensor.offset is not None and not tensor.dtype.startswith("complex")


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


_PROJECTED = 4
"""Numbers that stand for a head while heads are looked for."""


@dataclass
class Distance:
    """How far apart two tensors of one shape are, added up over their pieces."""

    same_bits: bool = True
    within_rounding: bool = True
    largest: float = 0.0
    squares: float = 0.0
    left_squares: float = 0.0

    def add(self, left: Tensor, right: Tensor) -> None:
        """Take in a piece of both. A NaN is equal to a NaN, and infinitely far from any number."""
        self.left_squares += _squares(left)
        if same_bits(left, right):
            return
        self.same_bits = False
        slack = (_step(left.dtype) + _step(right.dtype)) / 2
        lowest = _smallest(left.dtype) + _smallest(right.dtype)
        for ours, theirs in parts(left, right):
            one, other = ours.double(), theirs.double()
            equal = (one == other) | (one.isnan() & other.isnan())
            apart = torch.where(equal, 0, (one - other).abs().nan_to_num(inf, inf, inf))
            allowed = slack * torch.maximum(one.abs(), other.abs()) + lowest
            self.within_rounding &= bool((equal | (apart <= allowed.nan_to_num(0, 0, 0))).all())
            self.largest = max(self.largest, float(apart.max()))
            self.squares += float(apart.square().sum())

    @property
    def relative(self) -> float:
        """Return ‖left - right‖ / ‖left‖."""
        return sqrt(self.squares / self.left_squares) if self.left_squares else (inf if self.squares else 0.0)


def _squares(numbers: Tensor) -> float:
    """Return the sum of the squares of those that are finite."""
    return float(numbers.double().nan_to_num(0, 0, 0).square().sum())


def _step(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype) if dtype.is_floating_point else None
    return 0.0 if info is None else info.tiny * info.eps


def distance(left: Tensor, right: Tensor) -> Distance:
    """Return how far apart two tensors of one shape are."""
    found = Distance()
    found.add(left, right)
    return found


def matched(part: str, left: Numbers, right: Numbers) -> tuple[str, tuple[int, ...], str] | None:
    """Return which part of the left side holds the numbers of this one of the right, and in which order.

    The part, for each head on the right the one on the left, and how the features that a rotary embedding turns lie.
    None where no order of heads, of q, k and v, or of such features makes them the same.
    """
    kind, letter = part.split("_")
    others = [f"{kind}_{other}" for other in "qkv" if other != letter] if letter in "qkv" else []
    for source in (part, *others):
        if source not in left or left[source].shape != right[part].shape:
            continue
        norms = [sqrt(sum(map(_squares, numbers))) for numbers in (left[source], right[part])]
        if abs(norms[0] - norms[1]) > _tolerance(left[source], right[part]) * max(norms):
            continue  # a permutation keeps the norm
        ways = _rotary_orders(left[source].shape[1]) if letter in "qk" and source[-1] in "qk" else [("", None)]
        for rotary, order in ways:
            own = left[source] if order is None else left[source][:, order]
            heads = _heads_matched(own, right[part])
            if heads is not None and distance(own[list(heads)], right[part]).within_rounding:
                return source, heads, rotary
    return None


def _tolerance(left: Tensor, right: Tensor) -> float:
    """Return how far apart sums may be, of numbers that are the same but for the rounding of their dtypes."""
    return 1e-9 if left.dtype == right.dtype else 4 * max(_step(left.dtype), _step(right.dtype))


def _heads_matched(left: Tensor, right: Tensor) -> tuple[int, ...] | None:
    """Return for each head on the right one on the left that holds the same numbers; None where one has none."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(left[0].numel(), _PROJECTED, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.stack([head.flatten().double() @ directions for head in side]) for side in (left, right))
    sizes = torch.stack([head.double().norm() for head in right])
    allowed = _tolerance(left, right) * sizes + 1e-300
    near = ((ours[None] - theirs[:, None]).abs() <= allowed[:, None, None]).all(-1)
    found: list[int] = []
    for head in range(len(right)):
        candidates = [own for own in torch.nonzero(near[head]).flatten().tolist() if own not in found]
        if not candidates:
            return None
        found.append(head if head in candidates else candidates[0])
    return tuple(found)


def _rotary_orders(width: int) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the orders of a head's features in which a rotary embedding may have them: pairs, or halves."""
    yield "", None
    for turned in dict.fromkeys((width, width // 2, width // 4, 64, 32)):
        if turned < 4 or turned % 2 or turned > width:
            continue
        places, rest = torch.arange(turned), torch.arange(turned, width)
        among = "" if turned == width else f" among the first {turned} features"
        halves = places.view(-1, 2).T.flatten()
        yield f"pairs on the left, halves on the right{among}", torch.cat([halves, rest])
        yield f"halves on the left, pairs on the right{among}", torch.cat([places.view(2, -1).T.flatten(), rest])

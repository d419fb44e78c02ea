"""Compare tensors of two checkpoints: bit for bit, within rounding, transposed, and under another name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..record.rounding import distances, parts, same_bits
from ..reports.diff import TensorPair, TensorVerdict
from .transposed import block_of, is_transposed
from .two_files import FileSide, TwoFiles

SAME: tuple[TensorVerdict, ...] = ("same bits", "same within rounding")
_FIRST = 64
"""Elements that are compared first, before two tensors are compared completely."""


@dataclass(frozen=True)
class Distance:
    """The distance of two tensors of one shape."""

    verdict: TensorVerdict
    largest: float
    relative: float
    """‖left - right‖ / ‖left‖, of the finite numbers."""


def distance(left: Tensor, right: Tensor) -> Distance:
    """Return the distance of two tensors of one shape; NaN equals NaN and is infinitely far from any number."""
    if same_bits(left, right):
        return Distance("same bits", 0.0, 0.0)
    largest, relative = distances(left, right)
    return Distance("same within rounding" if _is_rounding(left, right) else "differs", largest, relative)


def _is_rounding(left: Tensor, right: Tensor) -> bool:
    """Return whether no element differs by more than the rounding of both dtypes."""
    slack = lowest = 0.0
    for side in (left, right):
        if side.dtype.is_floating_point:
            info = torch.finfo(side.dtype)
            slack += info.eps / 2
            lowest += info.tiny * info.eps
    for left_part, right_part in parts(left, right):
        a, b = left_part.double(), right_part.double()
        allowed = slack * torch.maximum(a.abs(), b.abs()) + lowest
        is_near = (a - b).abs() <= allowed.nan_to_num(0, 0, 0)
        is_equal = (a == b) | (a.isnan() & b.isnan())
        if not bool((is_equal | is_near).all()):
            return False
    return True


def pair_of_other_shape(files: TwoFiles, name: str, right_name: str) -> TensorPair:
    """Return two tensors that were not compared, as of another shape."""
    left, right = files.left.tensors[name], files.right.tensors[right_name]
    return TensorPair(
        name=name,
        right_name=right_name,
        left_shape=left.shape,
        right_shape=right.shape,
        left_dtype=left.dtype,
        right_dtype=right.dtype,
        verdict="other shape",
        max_abs_difference=None,
        relative_difference=None,
    )


ZEROS_LEFT, ZEROS_RIGHT = "all zeros on the left", "all zeros on the right"
"""Notes on tensors of which one side has no numbers but zeros, as a conversion leaves those that it did not find."""
TRANSPOSED = "transposed"
"""The note on tensors that are each other's transpose."""
NOT_TRANSPOSED = "not transposed"
"""The note on a square matrix that is the same, where every other matrix of its block is transposed."""


def tensor_pair(files: TwoFiles, name: str, right_name: str) -> TensorPair:
    """Compare two tensors."""
    pair = pair_of_other_shape(files, name, right_name)
    is_turned = pair.left_shape != pair.right_shape
    if is_turned and not is_transposed(pair.left_shape, pair.right_shape):
        return pair
    stored_left, stored_right = files.left.tensors[name], files.right.tensors[right_name]
    if not stored_left.numel:
        return replace(pair, verdict="same bits")
    if stored_left.read is None or stored_right.read is None:
        return replace(pair, verdict="differs", note="the file has no numbers for it")
    if not (stored_left.has_numbers and stored_right.has_numbers):
        return replace(pair, verdict="differs", note="complex numbers")
    left, right = files.left.read(name), files.right.read(right_name)
    if is_turned:
        return _as_transposed(pair) if is_same(left.T, right) else pair
    difference = distance(left, right)
    if difference.verdict == "differs" and left.dim() == 2 and is_same(left.T, right):
        return _as_transposed(pair)
    return replace(
        pair,
        verdict=difference.verdict,
        max_abs_difference=difference.largest,
        relative_difference=difference.relative,
        note=_zeros(left, right),
    )


def _zeros(left: Tensor, right: Tensor) -> str:
    """Return which side has zeros alone; empty if both have, or none."""
    is_left, is_right = not bool(left.any()), not bool(right.any())
    if is_left == is_right:
        return ""
    return ZEROS_LEFT if is_left else ZEROS_RIGHT


def _as_transposed(pair: TensorPair) -> TensorPair:
    return replace(pair, verdict="same, permuted", note=TRANSPOSED)


def is_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same numbers; most that differ do so in their first row."""
    if left.shape != right.shape:
        return False
    if distance(left[:1].contiguous(), right[:1].contiguous()).verdict not in SAME:
        return False
    return distance(left.contiguous(), right.contiguous()).verdict in SAME


def with_untransposed(pairs: Iterable[TensorPair], files: TwoFiles) -> Iterator[TensorPair]:
    """Yield pairs with a note on square matrices that are the same where the rest of their block is transposed."""
    pairs = list(pairs)
    blocks: dict[str, list[TensorPair]] = {}
    for pair in pairs:
        if len(pair.left_shape) == 2:
            blocks.setdefault(_block(pair), []).append(pair)
    transposed = {block for block, matrices in blocks.items() if _are_transposed(matrices)}
    for pair in pairs:
        is_alone = _is_same_square(pair) and _block(pair) in transposed
        if is_alone and not _is_symmetric(files.left.read(pair.name)):
            yield replace(pair, note=NOT_TRANSPOSED)
        else:
            yield pair


def _are_transposed(matrices: Sequence[TensorPair]) -> bool:
    """Return whether the matrices of a block are transposed, beside square ones that are the same."""
    rest = [pair for pair in matrices if not _is_same_square(pair)]
    return bool(rest) and all(pair.note == TRANSPOSED for pair in rest)


def _block(pair: TensorPair) -> str:
    return block_of(pair.name.rpartition(".")[0])


def _is_same_square(pair: TensorPair) -> bool:
    is_square = len(pair.left_shape) == 2 and len({*pair.left_shape}) == 1
    return is_square and pair.verdict in SAME and pair.note != TRANSPOSED


def _is_symmetric(tensor: Tensor) -> bool:
    return is_same(tensor, tensor.T)


# -- other names ------------------------------------------------------------------------------------------------------


def moved_pairs(files: TwoFiles, left_paired: Collection[str], right_paired: Collection[str]) -> Iterator[TensorPair]:
    """Yield pairs of tensors with the same numbers under different names, without the tensors paired before."""
    candidates = _first_numbers(files.right, right_paired)
    for name, stored in files.left.tensors.items():
        if name in left_paired or not stored.has_numbers or stored.shape not in candidates:
            continue
        pair = _same_under_another_name(files, name, candidates[stored.shape])
        if pair is not None:
            del candidates[stored.shape][pair.right_name]
            yield pair


def _first_numbers(side: FileSide, paired: Collection[str]) -> dict[tuple[int, ...], dict[str, Tensor]]:
    """Return the first numbers of the tensors that are not paired yet, by shape and by name."""
    by_shape: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for name, stored in side.tensors.items():
        if name in paired or not stored.has_numbers:
            continue
        first = side.read(name).flatten()[:_FIRST]
        of_shape = by_shape.setdefault(stored.shape, {})
        of_shape[name] = first.clone()
    return by_shape


def _same_under_another_name(files: TwoFiles, name: str, candidates: Mapping[str, Tensor]) -> TensorPair | None:
    """Return a tensor of the left with the first tensor of the right that has its numbers.

    `candidates` has the first numbers of tensors of its shape.
    """
    numbers = files.left.read(name).flatten()
    first = numbers[:_FIRST]
    # Equality of constants, as in an untrained norm, is no proof.
    is_constant = bool((numbers == numbers[0]).all())
    end = _end_of(name)
    for right_name, right_first in candidates.items():
        if is_constant and end != _end_of(right_name):
            continue
        if not is_same(first, right_first):
            continue
        pair = tensor_pair(files, name, right_name)
        if pair.verdict in SAME:
            return pair
    return None


def _end_of(name: str) -> list[str]:
    """Return the layer and the kind of a tensor: `norm` and `weight` of `layers.0.norm.weight`."""
    return name.rsplit(".", 2)[-2:]

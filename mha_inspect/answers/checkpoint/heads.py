"""The numbers of each head out of a checkpoint, how large they are, and what is unusual in them: dead heads, twins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...files.attentions import StoredProjection
from ...files.tensors import StoredTensor, read_stored
from ...reports.params import HeadNorms
from ...text import shown, spans


def numbers_of(projections: Sequence[StoredProjection], tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read the parts of an attention by head.

    Returns `W_q` to `b_v`, with the numbers of each: `heads head_dim embed`, and `heads head_dim` of a bias.
    """
    numbers: dict[str, Tensor] = {}
    for name in dict.fromkeys(
        projection.tensor for projection in projections if tensors[projection.tensor].has_numbers
    ):
        content = read_stored(tensors[name], shown(name))
        for projection in (projection for projection in projections if projection.tensor == name):
            features, width = content.movedim(projection.axis, 0), projection.width
            parts = [features[start : start + width] for start in projection.starts]
            numbers[projection.part] = torch.stack(parts) if parts else features.movedim(0, 1)
    return numbers


def norms_of(module: str, numbers: Mapping[str, Tensor]) -> tuple[list[HeadNorms], list[str]]:
    """Return how large the heads of an attention are, and a sentence for each thing in them that is unusual."""
    norms: list[HeadNorms] = []
    notes: list[str] = []
    for part, matrix in sorted(numbers.items(), key=lambda item: "qkvo".find(item[0][-1])):
        if part.startswith("W"):
            norms.append(HeadNorms(module, part, tuple(matrix.double().flatten(1).norm(dim=1).tolist())))
            notes += _unusual(matrix.flatten(1), f"{part} of {shown(module) or 'the file'}")
    return norms, notes


def _unusual(heads: Tensor, called: str) -> Iterator[str]:
    """Yield a sentence for heads that are zero, are not finite, or are the same numbers."""
    zero = [number for number, head in enumerate(heads) if not bool(head.any())]
    broken = [number for number, head in enumerate(heads) if not bool(head.isfinite().all())]
    if zero:
        yield f"{called}: {_listed(zero)} zero: dead."
    if broken:
        yield f"{called}: {_listed(broken)} not finite: NaN or inf is in them."
    same: dict[bytes, list[int]] = {}
    for number in set(range(len(heads))) - {*zero, *broken}:
        same.setdefault(heads[number].contiguous().view(torch.uint8).numpy().tobytes(), []).append(number)
    for twins in sorted(twins for twins in same.values() if len(twins) > 1):
        yield f"{called}: {_listed(twins)} twins: they hold the same numbers."


def _listed(heads: list[int]) -> str:
    return f"head {heads[0]} is" if len(heads) == 1 else f"heads {spans(heads)} are"

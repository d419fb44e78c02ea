"""The numbers of each head out of a checkpoint, how large they are, and what is unusual in them: dead heads, twins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...files.attentions import Role
from ...files.tensors import StoredTensor, read_stored
from ...reports.params import HeadNorms
from ...text import shown, spans


def numbers_of(roles: Mapping[str, Role], tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Read the parts of an attention by head, where it is known of its tensors.

    Returns `W_q` to `b_v`, with the numbers of each: `heads head_dim embed`, and `heads head_dim` of a bias.
    """
    pieces: dict[str, dict[int, list[Tensor]]] = {}
    for name, role in roles.items():
        if role.heads and tensors[name].has_numbers:
            content = read_stored(tensors[name], shown(name))
            for piece in role.heads:
                bounds = [slice(*bound) for bound in (piece.rows, piece.columns) if bound is not None]
                numbers = content if content.dim() == len(bounds) else content.squeeze()
                heads = pieces.setdefault(piece.part, {})
                heads.setdefault(piece.head, []).append(numbers[tuple(bounds)].movedim(role.axis, 0))
    whole = {part: [torch.cat(heads[head]) for head in sorted(heads)] for part, heads in pieces.items()}
    return {part: torch.stack(heads) for part, heads in whole.items() if len({head.shape for head in heads}) == 1}


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

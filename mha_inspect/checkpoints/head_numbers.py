"""Read the numbers of an attention in a checkpoint head by head, and find heads that are unusual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..files.attentions import Role
from ..files.tensors import StoredTensor, read_stored
from ..reports.params import HeadSlice
from ..text import shown, spans


def numbers_of(roles: Mapping[str, Role], tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return the parts of an attention by head, `W_q` to `b_v`, as far as the heads of its tensors are known.

    A matrix is `heads head_dim embed`, a bias `heads head_dim`.
    """
    pieces_by_part: dict[str, dict[int, list[Tensor]]] = {}
    for name, role in roles.items():
        if not role.heads or not tensors[name].has_numbers:
            continue
        content = read_stored(tensors[name], shown(name))
        for piece in role.heads:
            by_head = pieces_by_part.setdefault(piece.part, {})
            numbers = _numbers_at(content, piece).movedim(role.axis, 0)
            by_head.setdefault(piece.head, []).append(numbers)
    parts = {}
    for part, by_head in pieces_by_part.items():
        numbers_by_head = _stacked(by_head)
        if numbers_by_head is not None:
            parts[part] = numbers_by_head
    return parts


def _stacked(pieces: Mapping[int, list[Tensor]]) -> Tensor | None:
    """Return the pieces of all heads, `heads head_dim embed`; None if the heads have different shapes."""
    heads = []
    for number in sorted(pieces):
        heads.append(torch.cat(pieces[number]))
    for head in heads:
        if head.shape != heads[0].shape:
            return None
    return torch.stack(heads)


def _numbers_at(content: Tensor, piece: HeadSlice) -> Tensor:
    """Return the rows and columns of one head; a bias with further dimensions of size 1 is a vector first."""
    start, stop = piece.rows
    if piece.columns is None:
        vector = _with_dimensions(content, 1)
        return vector[start:stop]
    matrix = _with_dimensions(content, 2)
    first, end = piece.columns
    return matrix[start:stop, first:end]


def _with_dimensions(content: Tensor, count: int) -> Tensor:
    """Return a tensor with this many dimensions: without those of size 1, if it has more."""
    if content.dim() == count:
        return content
    return content.squeeze()


def unusual_heads(module: str, numbers: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each unusual finding in the matrices of an attention."""
    where = shown(module) or "the file"
    matrices = [part for part in numbers if part.startswith("W")]
    matrices.sort(key=lambda part: "qkvo".find(part[-1]))
    for part in matrices:
        # From `heads head_dim embed` to one row a head.
        rows = numbers[part].flatten(1)
        yield from _unusual(rows, f"{part} of {where}")


def _unusual(heads: Tensor, label: str) -> Iterator[str]:
    """Yield a sentence about heads that are zero, not finite, or equal to each other; a head is a row."""
    zero: list[int] = []
    broken: list[int] = []
    by_bits: dict[bytes, list[int]] = {}
    for number, head in enumerate(heads):
        if not bool(head.any()):
            zero.append(number)
        elif not bool(head.isfinite().all()):
            broken.append(number)
        else:
            by_bits.setdefault(_bits(head), []).append(number)
    if zero:
        yield f"{label}: {_heads_are(zero)} all zero."
    if broken:
        yield f"{label}: {_heads_are(broken)} not finite (NaN or inf)."
    for twins in by_bits.values():
        if len(twins) > 1:
            yield f"{label}: {_heads_are(twins)} identical."


def _bits(numbers: Tensor) -> bytes:
    as_bytes = numbers.contiguous().view(torch.uint8)
    return as_bytes.numpy().tobytes()


def _heads_are(heads: list[int]) -> str:
    """Return the subject of a sentence: `head 2 is` or `heads 0–3, 6 are`."""
    if len(heads) == 1:
        return f"head {heads[0]} is"
    return f"heads {spans(heads)} are"

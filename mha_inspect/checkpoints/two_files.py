"""Two checkpoints side by side, and the pairs of their attentions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ..errors import SpecError
from ..files.attentions import NamedAttention, find_attentions
from ..files.checkpoint import Checkpoint, read_checkpoint
from ..files.tensors import StoredTensor, read_stored
from ..reports.diff import CheckpointSide
from ..text import shown


@dataclass(frozen=True)
class FileSide:
    """One of the two checkpoints, and its attentions."""

    file: Checkpoint
    attentions: dict[str, NamedAttention]
    """By the path of the module."""

    @classmethod
    def of(cls, path: Path, num_heads: int | None) -> FileSide:
        """Read the header of a checkpoint, and find its attentions by names and shapes."""
        file = read_checkpoint(path)
        attentions = {}
        for attention in find_attentions(file.tensors, file.config, num_heads):
            attentions[attention.stored.module] = attention
        return cls(file, attentions)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name, in the order of the layers."""
        return self.file.tensors

    def head_counts(self) -> list[int | None]:
        """Return the number of heads of each attention; None where it is unknown."""
        return [attention.stored.num_heads for attention in self.attentions.values()]

    def report(self) -> CheckpointSide:
        """Return the sizes of the checkpoint."""
        dtypes = Counter[str]()
        numel = 0
        nbytes = 0
        for tensor in self.tensors.values():
            dtypes[tensor.dtype] += 1
            numel += tensor.numel
            nbytes += tensor.nbytes
        return CheckpointSide(
            name=self.file.path.resolve().name,
            tensors=len(self.tensors),
            numel=numel,
            nbytes=nbytes,
            dtypes=tuple(dtype for dtype, _ in dtypes.most_common()),
        )

    def with_heads(self, attention: NamedAttention, count: int) -> NamedAttention:
        """Return an attention with this number of heads; unchanged if it does not fit."""
        tensors = {name: self.tensors[name] for name in attention.stored.parameters}
        attentions = find_attentions(tensors, self.file.config, count)
        return attentions[0] if attentions else attention

    def read(self, name: str) -> Tensor:
        """Return the numbers of a tensor."""
        return read_stored(self.tensors[name], shown(name))


@dataclass(frozen=True)
class AttentionPair:
    """An attention of the left checkpoint, and the one of the right that it is compared with."""

    left: NamedAttention
    right: NamedAttention

    @property
    def num_heads(self) -> int | None:
        """The number of heads, from the side that has it."""
        return self.left.stored.num_heads or self.right.stored.num_heads

    @property
    def has_same_names(self) -> bool:
        """Whether the tensors have the same names on both sides."""
        return {*self.left.stored.parameters} == {*self.right.stored.parameters}

    def as_one_head(self) -> AttentionPair:
        """Return both with each part as one head: a comparison of whole parts needs no head count."""
        return AttentionPair(_as_one_head(self.left), _as_one_head(self.right))


def _as_one_head(attention: NamedAttention) -> NamedAttention:
    roles = {}
    for name, role in attention.roles.items():
        roles[name] = replace(role, heads=role.blocks)
    return replace(attention, roles=roles)


@dataclass(frozen=True)
class TwoFiles:
    """The two checkpoints that are compared."""

    left: FileSide
    right: FileSide

    @classmethod
    def of(cls, left: Path, right: Path, num_heads: int | None) -> TwoFiles:
        """Read both headers. Raises `SpecError` if there are attentions, and none has this number of heads."""
        files = cls(FileSide.of(left, num_heads), FileSide.of(right, num_heads))
        counts = {*files.left.head_counts(), *files.right.head_counts()}
        if num_heads is not None and counts and num_heads not in counts:
            raise SpecError(f"num_heads {num_heads} does not fit the shapes of any attention in the two files.")
        return files

    def attentions(self) -> Iterator[AttentionPair]:
        """Yield attentions with the same path; by order if no path is common and both have equally many."""
        left, right = self.left.attentions, self.right.attentions
        if not left.keys() & right.keys() and len(left) == len(right):
            yield from map(AttentionPair, left.values(), right.values())
            return
        for path, attention in left.items():
            if path in right:
                yield AttentionPair(attention, right[path])

    def with_heads(self, pair: AttentionPair, count: int) -> AttentionPair:
        """Return two attentions with this number of heads; a side that it does not fit is unchanged."""
        return AttentionPair(
            self.left.with_heads(pair.left, count),
            self.right.with_heads(pair.right, count),
        )

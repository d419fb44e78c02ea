"""Who sees whom differs by batch item: packed documents, padding on either side."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mha_inspect import Intent

from .base import Base
from .entry import Arguments, D, E, attends


def documents(batch: int, length: int) -> Arguments:
    """Return `batch query embed`, and the number of each token's document: item 0 has those of 3 tokens."""
    sizes = torch.arange(3, 3 + batch)[:, None]
    return (torch.randn(batch, length, E), torch.arange(length)[None] // sizes), {}


def padded(batch: int, length: int) -> Arguments:
    """Return `batch query embed`, and 1 for a token: the first items lack their first tokens, the others the last."""
    keep = torch.ones(batch, length, dtype=torch.long)
    keep[: batch // 2, :2] = 0
    keep[batch // 2 :, -3:] = 0
    return (torch.randn(batch, length, E), keep), {}


BY_ITEM: dict[str, Any] = {"ones": False, "reads_arguments": False, "masked": True}


class Masked(Base):
    def seen(self, marks: Tensor) -> Tensor:
        """Return `batch 1 query key`, True where a query sees a key."""
        raise NotImplementedError

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(~self.seen(marks), -torch.inf)
        return self.o(self.join(scores.softmax(-1) @ v))


@attends(given=documents, kind=("self", "causal"), intent=Intent(causal=True), **BY_ITEM)
class Documents(Masked):
    """Packed documents: a token sees its own document up to itself."""

    def seen(self, marks: Tensor) -> Tensor:
        own = marks[:, :, None] == marks[:, None]
        return (own & torch.ones(own.shape[1:], dtype=torch.bool).tril())[:, None]


@attends(given=documents, **BY_ITEM)
class DocumentsBothWays(Masked):
    """Packed documents: a token sees all of its own document."""

    def seen(self, marks: Tensor) -> Tensor:
        return (marks[:, :, None] == marks[:, None])[:, None]


@attends(given=padded, intent=Intent(padding="marks", padding_true="keep"), **BY_ITEM)
class PaddedByItem(Masked):
    """The keys of padding are masked out, on the left in some items and on the right in others."""

    def seen(self, marks: Tensor) -> Tensor:
        return marks[:, None, None].bool()


@attends(intent=Intent(padding="keep"), masked=False)
class KeepNumbers(Base):
    """A mask of whole numbers that nobody need give: 1 keeps a key."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        added = None if keep is None else (1.0 - keep[:, None, None]) * -10_000.0
        return self.o(self.join(F.scaled_dot_product_attention(q, k, v, added)))

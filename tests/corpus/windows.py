"""Windows, and keys that are unfolded for each query."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from .base import Base
from .entry import D, H, attends


@attends(
    split="batch heads windows token head_dim",
    pairs="batch heads windows query key",
    projected="batch (windows token) (heads head_dim)",
    axes={
        "query": "batch (windows query) embed",
        "key": "batch (windows key) embed",
        "value": "batch (windows key) embed",
        "concat": "batch (windows query) (heads head_dim)",
        "output": "batch (windows query) embed",
    },
    lengths={"query": 4, "key": 4},
    ones=False,
)
class Windows(Base):
    """Attention within windows of four, cut out of the sequence after the projection."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, 4, H, D).permute(0, 3, 1, 2, 4)

    def join(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1, 4).reshape(x.shape[0], -1, H * D)


@attends(
    pairs="batch heads query 1 key",
    axes={
        "q_heads": "batch heads query 1 head_dim",
        "k_heads": "batch heads query head_dim key",
        "v_heads": "batch heads query key head_dim",
        "context": "batch heads query 1 head_dim",
    },
    lengths={"key": None},
)
class Unfolded(Base):
    """Each query sees the five positions around it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.pad(t, (0, 0, 2, 2)).unfold(2, 5, 1) for t in (k, v))
        weights = (q.unsqueeze(-2) @ k / math.sqrt(D)).softmax(-1)
        return (weights @ v.transpose(-1, -2)).squeeze(-2)


@attends(
    axes={"k_heads": "batch heads query head_dim key", "v_heads": "batch heads query head_dim key"},
    lengths={"key": None},
)
class BroadcastWindows(Base):
    """Each query with the five keys around it, which nothing has multiplied out before."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (nn.functional.pad(t, (0, 0, 2, 2)).unfold(2, 5, 1) for t in (k, v))
        weights = ((q.unsqueeze(-1) * k).sum(-2) / math.sqrt(D)).softmax(-1)
        return (weights.unsqueeze(-2) * v).sum(-1)

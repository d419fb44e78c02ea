"""Failures that are no mistake in attention: they get facts and no guess. `# fails` marks the line that raises."""

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class OwnCheck(nn.Module):
    def forward(self, x):
        if x.shape[1] > 3:
            raise ValueError(f"at most 3 positions, got {x.shape[1]}")  # fails
        return x


class OwnAssert(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(24, 24)

    def forward(self, x):
        q = self.proj(x)
        assert q.shape[-1] % 7 == 0, "width must be a multiple of 7"  # fails
        return q


class Vocabulary(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 24)

    def forward(self, tokens):
        return self.embed(tokens)  # fails


class Missing(nn.Module):
    def forward(self, x):
        return {"x": x}["y"]  # fails


class Attribute(nn.Module):
    def forward(self, x):
        return self.q_proj(x)  # fails


class TupleIndex(nn.Module):
    def forward(self, x):
        return x.chunk(3, dim=-1)[3]  # fails


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 5, 24))

    def forward(self, x):
        return x + self.positions  # fails


class Joined(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y], dim=1)  # fails


class Convolved(nn.Module):
    def forward(self, x):
        return F.conv1d(x, torch.zeros(3, 5, 3))  # fails


class Recovered(nn.Module):
    """An error that was caught is not the one that ended it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(24, 24)

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.proj(x.transpose(1, 2))
        raise NotImplementedError("no fallback")  # fails


class WrongAxis(nn.Module):
    def forward(self, x):
        return x.transpose(1, 5)  # fails


class Residual(nn.Module):
    """A sum after an attention that is right is no sum of scores and mask."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x):
        y = self.attn(x, x, x)[0]
        return y + torch.zeros(2, 5, 24)  # fails


class Reused(nn.Module):
    """Heads of the right layout, and a sum of positions that is wrong."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(24, 24)

    def forward(self, x):
        q = self.q(x).view(2, 7, 3, 8).transpose(1, 2)
        return q * torch.ones(11, 8)  # fails


class ContextAndMore(nn.Module):
    """What is added to a context is no mask, whatever its shape."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(24, 24)

    def forward(self, x):
        q = self.q(x).view(2, 7, 3, 8).transpose(1, 2)
        context = (q @ q.transpose(-2, -1)).softmax(-1) @ q
        return context + torch.zeros(2, 8)  # fails

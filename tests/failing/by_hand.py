"""Attention written by hand with one mistake each, as people post them. `# fails` marks the line that raises."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange


class Base(nn.Module):
    def __init__(self, d_model=24, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.d_model = d_model
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)


class KeyNotTransposed(Base):
    def forward(self, x):
        B, L, _ = x.shape
        q = self.q_proj(x).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, L, self.num_heads, self.head_dim)  # split here
        v = self.v_proj(x).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # fails
        return F.softmax(scores, dim=-1) @ v


class QueryNotTransposed(Base):
    def forward(self, x):
        B, L, _ = x.shape
        query = self.q_proj(x).view(B, L, self.num_heads, self.head_dim)  # split here
        key = self.split(self.k_proj(x))
        energy = torch.matmul(query, key.transpose(2, 3))  # fails
        return energy


class ValueNotTransposed(Base):
    def forward(self, x):
        B, L, _ = x.shape
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        v = self.v_proj(x).view(B, L, self.num_heads, self.head_dim)  # split here
        attn = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / self.head_dim**0.5, dim=-1)
        out = torch.matmul(attn, v)  # fails
        return out


class NoneTransposed(Base):
    """Scores between heads: the first to notice is the mask."""

    def forward(self, x):
        B, L, _ = x.shape
        q = self.q_proj(x).view(B, L, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(B, L, self.num_heads, self.head_dim)
        scores = q @ k.transpose(-2, -1)
        mask = torch.tril(torch.ones(L, L, device=x.device))
        scores = scores.masked_fill(mask == 0, float("-inf"))  # fails
        return scores


class ValueNotTransposedInSdpa(Base):
    def forward(self, x):
        B, L, _ = x.shape
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        v = self.v_proj(x).view(B, L, self.num_heads, self.head_dim)  # split here
        return F.scaled_dot_product_attention(q, k, v)  # fails


class NoKeyTranspose(Base):
    def forward(self, x):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        return torch.matmul(q, k) / math.sqrt(self.head_dim)  # fails


class KeyDotT(Base):
    def forward(self, x):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        return q @ k.permute(3, 2, 1, 0)  # fails


class KeySwapsWrongDims(Base):
    def forward(self, x):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        return q @ k.transpose(1, 2)  # fails


class SingleHeadNoTranspose(Base):
    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        return torch.bmm(q, k)  # fails


class KeyNotSplit(Base):
    def forward(self, x):
        q = self.split(self.q_proj(x))
        k = self.k_proj(x)
        return torch.matmul(q, k.transpose(-2, -1))  # fails


class FewerKeyHeads(Base):
    """Grouped queries without repeating the keys."""

    def __init__(self):
        super().__init__(d_model=20, num_heads=4)
        self.k_proj = nn.Linear(20, 10)

    def forward(self, x):
        B, L, _ = x.shape
        q = self.split(self.q_proj(x))
        k = self.k_proj(x).view(B, L, 2, self.head_dim).transpose(1, 2)
        return q @ k.transpose(-2, -1)  # fails


class CrossBatch(Base):
    def forward(self, x, memory):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(memory))
        return q @ k.transpose(-2, -1)  # fails


class ValueOfOtherLength(Base):
    def forward(self, x, memory):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(memory))
        w = (q @ k.transpose(-2, -1)).softmax(-1)
        return w @ v  # fails


class HeadDimDiffers(Base):
    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(24, 33)

    def forward(self, x):
        B, L, _ = x.shape
        q = self.split(self.q_proj(x))
        k = self.k_proj(x).view(B, L, self.num_heads, -1).transpose(1, 2)
        return q @ k.transpose(-2, -1)  # fails


class HeadsDoNotDivide(Base):
    def __init__(self):
        super().__init__(d_model=32, num_heads=3)

    def forward(self, x):
        B, L, _ = x.shape
        q = self.q_proj(x).view(B, L, self.num_heads, self.head_dim)  # fails
        return q


class HeadsDoNotDivideRest(Base):
    def forward(self, x):
        B, L, _ = x.shape
        return self.q_proj(x).reshape(B, L, 5, -1).transpose(1, 2)  # fails


class HeadsUnflatten(Base):
    def forward(self, x):
        return self.q_proj(x).unflatten(-1, (5, 5))  # fails


class WrongHeadDim(Base):
    def forward(self, x):
        B, L, _ = x.shape
        return self.q_proj(x).view(B, L, self.num_heads, 10)  # fails


class ConcatNotContiguous(Base):
    def forward(self, x):
        B, L, _ = x.shape
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        context = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        context = context.transpose(1, 2).view(B, L, self.d_model)  # fails
        return self.out_proj(context)


class ConcatForgotten(Base):
    def forward(self, x):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        context = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out_proj(context)  # fails


class ConcatNotFlattened(Base):
    def forward(self, x):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out_proj(context)  # fails


class HeadsStacked(nn.Module):
    """A list of heads, stacked where they should be put side by side."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(24, 8) for _ in range(3)])
        self.out_proj = nn.Linear(24, 24)

    def forward(self, x):
        outputs = []
        for head in self.heads:
            q = head(x)
            outputs.append((q @ q.transpose(-2, -1)).softmax(-1) @ q)
        return self.out_proj(torch.stack(outputs, dim=-1))  # fails


class BatchOfTheQuery(Base):
    """The query's batch size, used for the keys as well."""

    def forward(self, query, key):
        bs = query.size(0)
        q = self.q_proj(query).view(bs, -1, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(key).view(bs, -1, self.num_heads, self.head_dim).transpose(1, 2)  # fails
        return q @ k.transpose(-2, -1)


class HeadsByEinops(Base):
    def forward(self, x):
        return rearrange(self.q_proj(x), "b l (h d) -> b h l d", h=5)  # fails


class PackedNotTransposed(Base):
    """One projection for all three."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, v = self.split(q), self.split(v)
        return (q @ self.split(k)).softmax(-1) @ v  # fails


class WrongWidth(Base):
    def forward(self, x):
        q = self.q_proj(x)  # fails
        return q


class TransposedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q = nn.Parameter(torch.randn(40, 24))

    def forward(self, x):
        return x @ self.W_q  # fails


class TokenIds(Base):
    def forward(self, tokens):
        return self.q_proj(tokens)  # fails


class Masked(Base):
    """Masks are laid over these scores."""

    def forward(self, x, mask):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(mask == 0, -1e9)  # fails
        return scores


class AddedMask(Base):
    def forward(self, x, memory, mask):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(memory))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        scores += mask  # fails
        return scores.softmax(-1)


class IntegerMask(Base):
    def forward(self, x, mask):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        scores = q @ k.transpose(-2, -1)
        return scores.masked_fill(mask, -1e9)  # fails


class SdpaMask(Base):
    def forward(self, x, attention_mask):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)  # fails


class HalfKeys(Base):
    def forward(self, x):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return F.scaled_dot_product_attention(q, k.half(), v.half())  # fails


class HalfProduct(Base):
    def forward(self, x):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        return q @ k.half().transpose(-2, -1)  # fails


class MaskElsewhere(Base):
    """A tensor that the module makes for itself, on another device."""

    def forward(self, x):
        q, k = self.split(self.q_proj(x)), self.split(self.k_proj(x))
        bias = torch.zeros(x.shape[1], x.shape[1], device="meta")
        return q @ k.transpose(-2, -1) + bias  # fails


class EinsumNotTransposed(Base):
    def forward(self, x):
        B, L, _ = x.shape
        q = self.split(self.q_proj(x))
        k = self.k_proj(x).view(B, L, self.num_heads, self.head_dim)  # split here
        return torch.einsum("bhqd,bhkd->bhqk", q, k)  # fails


class SequenceFirst(Base):
    """Right in itself, for input with the sequence first; the keys are not."""

    def forward(self, x):
        L, B, _ = x.shape
        q = self.q_proj(x).view(L, B * self.num_heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(x).view(L, B * self.num_heads, self.head_dim).transpose(0, 1)
        return torch.bmm(q, k)  # fails


class Block(nn.Module):
    """A second layer fails after a first one that is right."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(24, 3, batch_first=True)
        self.norm = nn.LayerNorm(24)
        self.second = KeyNotTransposed()

    def forward(self, x):
        x = self.norm(x + self.first(x, x, x)[0])
        return self.second(x)

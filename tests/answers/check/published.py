"""Attention as public repositories write it (meta-llama, gpt-fast, ESM2), small, and with one mistake planted."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


# -- meta-llama: start_pos, freqs_cis, cache written in place --------------------------------------------------------
def precompute(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    f = freqs_cis.view(1, xq_.shape[1], 1, xq_.shape[-1])
    return (torch.view_as_real(xq_ * f).flatten(3).type_as(xq), torch.view_as_real(xk_ * f).flatten(3).type_as(xk))


def repeat_kv(x, n_rep):
    bs, slen, n_kv, d = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(bs, slen, n_kv, n_rep, d).reshape(bs, slen, n_kv * n_rep, d)


class LlamaAttention(nn.Module):
    unrotated, tiled = False, False

    def __init__(self, dim=32, n_heads=4, n_kv_heads=2, max_batch=4, max_seq=32):
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.cache_k = torch.zeros(max_batch, max_seq, n_kv_heads, self.head_dim)
        self.cache_v = torch.zeros(max_batch, max_seq, n_kv_heads, self.head_dim)

    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv, self.head_dim)
        q_, k_ = apply_rotary_emb(xq, xk, freqs_cis)
        xq, xk = q_, (xk if self.unrotated else k_)
        self.cache_k = self.cache_k.to(xq)
        self.cache_v = self.cache_v.to(xq)
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        keys = self.cache_k[:bsz, : start_pos + seqlen]
        values = self.cache_v[:bsz, : start_pos + seqlen]
        n_rep = self.n_heads // self.n_kv
        if self.tiled:
            keys, values = keys.repeat(1, 1, n_rep, 1), values.repeat(1, 1, n_rep, 1)
        else:
            keys, values = repeat_kv(keys, n_rep), repeat_kv(values, n_rep)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        out = torch.matmul(scores, values).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(out)


class LlamaUnrotated(LlamaAttention):
    unrotated = True


class LlamaTiled(LlamaAttention):
    tiled = True


class LlamaModel(nn.Module):
    kind = LlamaAttention

    def __init__(self, dim=32, n_heads=4, n_kv_heads=2, vocab=50, layers=2, max_seq=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(self.kind(dim, n_heads, n_kv_heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)
        self.freqs_cis = precompute(dim // n_heads, max_seq)

    @torch.inference_mode()
    def forward(self, tokens, start_pos=0):
        seqlen = tokens.shape[1]
        h = self.emb(tokens)
        freqs_cis = self.freqs(start_pos, seqlen)
        mask = self.mask(start_pos, seqlen).type_as(h) if seqlen > 1 else None
        for layer in self.layers:
            h = h + layer(h, start_pos, freqs_cis, mask)
        return self.out(self.norm(h)).float()

    def freqs(self, start_pos, seqlen):
        return self.freqs_cis[start_pos : start_pos + seqlen]

    def mask(self, start_pos, seqlen):
        mask = torch.full((seqlen, seqlen), float("-inf"))
        mask = torch.triu(mask, diagonal=1)
        return torch.hstack([torch.zeros((seqlen, start_pos)), mask])


class LlamaModelRestarted(LlamaModel):
    """Each chunk is rotated from position 0 on."""

    def freqs(self, start_pos, seqlen):
        return self.freqs_cis[:seqlen]


class LlamaModelTopLeft(LlamaModel):
    """The first query of a chunk sees the first key alone."""

    def mask(self, start_pos, seqlen):
        return torch.triu(torch.full((seqlen, start_pos + seqlen), float("-inf")), diagonal=1)


class LlamaModelUnrotated(LlamaModel):
    kind = LlamaUnrotated


class LlamaModelTiled(LlamaModel):
    kind = LlamaTiled


def llama():
    torch.manual_seed(0)
    layer = LlamaAttention()
    return layer, (torch.randn(2, 6, 32), 0, precompute(8, 32)[:6], torch.triu(torch.full((6, 6), float("-inf")), 1))


class LlamaTable(LlamaAttention):
    """The rotations come by a name that says nothing."""

    def forward(self, x, start_pos, table, mask):
        return super().forward(x, start_pos, table, mask)


def llama_table():
    _, (x, start_pos, table, mask) = llama()
    return LlamaTable(), (x, start_pos, table, mask)


# -- gpt-fast: static cache with index_put, input_pos, a mask table ---------------------------------------------------
class KVCache(nn.Module):
    def __init__(self, b, t, h, d):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(b, h, t, d))
        self.register_buffer("v_cache", torch.zeros(b, h, t, d))

    def update(self, input_pos, k, v):
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        return self.k_cache, self.v_cache


class GptFast(nn.Module):
    def __init__(self, dim=32, n_heads=4, n_local=2, max_seq=16, batch=2, vocab=50):
        super().__init__()
        self.n_head, self.n_local, self.head_dim = n_heads, n_local, dim // n_heads
        self.emb = nn.Embedding(vocab, dim)
        self.wqkv = nn.Linear(dim, (n_heads + 2 * n_local) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache = KVCache(batch, max_seq, n_local, self.head_dim)
        self.register_buffer("causal_mask", torch.tril(torch.ones(max_seq, max_seq, dtype=torch.bool)))
        c = precompute(self.head_dim, max_seq)
        self.register_buffer("freqs", torch.stack([c.real, c.imag], -1))

    def rot(self, x, f):
        xs = x.float().reshape(*x.shape[:-1], -1, 2)
        f = f.view(1, xs.size(1), 1, xs.size(3), 2)
        out = torch.stack(
            [xs[..., 0] * f[..., 0] - xs[..., 1] * f[..., 1], xs[..., 1] * f[..., 0] + xs[..., 0] * f[..., 1]], -1
        )
        return out.flatten(3).type_as(x)

    def positions(self, input_pos):
        return input_pos

    def forward(self, idx, input_pos):
        x = self.emb(idx)
        mask, f = self.causal_mask[None, None, input_pos], self.freqs[self.positions(input_pos)]
        b, s, _ = x.shape
        kv = self.n_local * self.head_dim
        q, k, v = self.wqkv(x).split([self.n_head * self.head_dim, kv, kv], -1)
        q = q.view(b, s, self.n_head, self.head_dim)
        k = k.view(b, s, self.n_local, self.head_dim)
        v = v.view(b, s, self.n_local, self.head_dim)
        q, k = self.rot(q, f), self.rot(k, f)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.n_head // self.n_local, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, -1))


def gpt_fast():
    torch.manual_seed(0)
    return GptFast(), (torch.randint(0, 50, (2, 6)), torch.arange(6))


class GptFastRestarted(GptFast):
    """Each chunk is rotated from position 0 on."""

    def positions(self, input_pos):
        return input_pos - input_pos[0]


# -- left padding: pad queries see anything where the fill is finite --------------------------------------------------
class LeftPadded(nn.Module):
    fill = torch.finfo(torch.float32).min

    def __init__(self, dim=32, n_heads=4, vocab=50):
        super().__init__()
        self.h, self.d = n_heads, dim // n_heads
        self.emb = nn.Embedding(vocab, dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, self.d).transpose(1, 2)

    def forward(self, input_ids, attention_mask=None):
        x = self.emb(input_ids)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = q @ k.transpose(-1, -2) / self.d**0.5
        t = x.shape[1]
        keep = torch.tril(torch.ones(t, t, dtype=torch.bool))[None, None]
        if attention_mask is not None:
            keep = keep & attention_mask[:, None, None, :].bool()
        s = s.masked_fill(~keep, self.fill)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def left_padded():
    torch.manual_seed(0)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    return LeftPadded(), (torch.randint(0, 50, (2, 6)),), {"attention_mask": mask}


class LeftUnmasked(LeftPadded):
    def forward(self, input_ids, attention_mask=None):
        x = self.emb(input_ids)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = q @ k.transpose(-1, -2) / self.d**0.5
        t = x.shape[1]
        keep = torch.tril(torch.ones(t, t, dtype=torch.bool))[None, None]
        if attention_mask is not None:
            keep = keep & attention_mask[:, None, None, :].bool()
        keep = keep | ~keep.any(-1, keepdim=True)
        s = s.masked_fill(~keep, float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def left_unmasked():
    torch.manual_seed(0)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    return LeftUnmasked(), (torch.randint(0, 50, (2, 6)),), {"attention_mask": mask}


# -- ESM: scaled in W_q's output, before the rotation -----------------------------------------------------------------
class Esm(nn.Module):
    def __init__(self, dim=32, n_heads=4):
        super().__init__()
        self.h, self.d = n_heads, dim // n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape

        def heads(y):
            return y.view(b, t, self.h, self.d).transpose(1, 2)

        q, k, v = heads(self.q(x) * self.d**-0.5), heads(self.k(x)), heads(self.v(x))
        inv = 1.0 / (10000 ** (torch.arange(0, self.d, 2).float() / self.d))
        fr = torch.outer(torch.arange(t).float(), inv)
        emb = torch.cat((fr, fr), -1)
        cos, sin = emb.cos(), emb.sin()

        def rot(y):
            a, c = y.chunk(2, -1)
            return y * cos + torch.cat((-c, a), -1) * sin

        q, k = rot(q), rot(k)
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def esm():
    torch.manual_seed(0)
    return Esm(), (torch.randn(2, 6, 32),)


class NoScale(Esm):
    def forward(self, x):
        b, t, _ = x.shape

        def heads(y):
            return y.view(b, t, self.h, self.d).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class LateMask(Esm):
    def forward(self, x):
        b, t, _ = x.shape

        def heads(y):
            return y.view(b, t, self.h, self.d).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        s = q @ k.mT / self.d**0.5
        s = s.masked_fill(torch.triu(torch.ones(t, t, dtype=torch.bool), 2), float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Three(Esm):
    """No scale, the mask a diagonal late, and heads merged without transposing."""

    def forward(self, x):
        b, t, e = x.shape

        def heads(y):
            return y.view(b, t, self.h, self.d).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        s = q @ k.mT
        s = s.masked_fill(torch.triu(torch.ones(t, t, dtype=torch.bool), 2), float("-inf"))
        return self.o((s.softmax(-1) @ v).reshape(b, t, e))


# -- a mask that takes [b, 1, 1, k] only ------------------------------------------------------------------------------
class FourD(Esm):
    def forward(self, x, attention_mask=None):
        b, t, _ = x.shape

        def heads(y):
            return y.view(b, t, self.h, self.d).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        s = q @ k.mT / self.d**0.5
        if attention_mask is not None:
            assert attention_mask.dim() == 4, attention_mask.shape
            s = s + (1.0 - attention_mask.to(s.dtype)) * -1e9
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

"""Attention as people write it, in many ways that are right; mistakes of one line in each are in `mutants`."""

# ruff: noqa: B905, C408, C417, E501, RUF005, RUF059
# fmt: off

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

from mha_inspect.reports.trace import Cache, Position, QKNorm

from .entry import FOLDED, ONE_HEAD_AT_A_TIME, idiom, linears, weights


@idiom(
    lambda: dict(x=torch.randn(2, 8, 32)), {"causal": True, "scale": "sqrt_head_dim"}, size=(2, 8), heads=4,
    head_dim=8, kind=("self", "causal"), masked=True, output="c_proj",
    rows=linears(c_attn="qkv: (qkv heads head_dim) embed", c_proj="o: embed (heads head_dim)"),
)
class NanoGpt(nn.Module):
    def __init__(self, n_embd=32, n_head=4, block=16):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(0.1)
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, 0.1
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


@idiom(
    lambda: dict(x=torch.randn(3, 7, 24), mask=torch.ones(3, 7, dtype=torch.bool)),
    {"padding": "mask", "padding_true": "keep", "scale": "sqrt_head_dim"}, size=(3, 7), heads=4, head_dim=6,
    masked=True, output="w_o",
    rows=linears(w_q="q: (heads head_dim) embed", w_k="k: (heads head_dim) embed", w_v="v: (heads head_dim) embed", w_o="o: embed (heads head_dim)"),
)
class KeepMask(nn.Module):
    def __init__(self, d_model=24, num_heads=4):
        super().__init__()
        self.d_k, self.h = d_model // num_heads, num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)
    def split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.h, self.d_k).transpose(1, 2)
    def forward(self, x, mask=None):
        q = self.split(self.w_q(x))
        k = self.split(self.w_k(x))
        v = self.split(self.w_v(x))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        p = scores.softmax(dim=-1)
        out = torch.matmul(p, v).transpose(1, 2)
        out = out.reshape(x.size(0), -1, self.h * self.d_k)
        return self.w_o(out)


@idiom(
    lambda: dict(query=torch.randn(6, 3, 20), key_padding_mask=torch.zeros(3, 6, dtype=torch.bool)),
    {"padding": "key_padding_mask", "padding_true": "ignore", "batch_axis": 1, "scale": "sqrt_head_dim"},
    size=(6, 3), **FOLDED, heads=5, head_dim=4, early=0.5, masked=True, output="out_proj",
    rows=linears(q_proj="q: (heads head_dim) embed", k_proj="k: (heads head_dim) embed", v_proj="v: (heads head_dim) embed", out_proj="o: embed (heads head_dim)"),
    projected="token batch (heads head_dim)",
    axes={ "query": "query batch embed", "key": "key batch embed", "value": "key batch embed", "scores": "batch heads query key", "concat": "query batch (heads head_dim)", "output": "query batch embed", },
    lengths={"batch": 3, "query": 6, "key": 6},
)
class Fairseq(nn.Module):
    def __init__(self, embed_dim=20, num_heads=5):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
    def forward(self, query, key_padding_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(query)
        v = self.v_proj(query)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        src_len = k.size(1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf"))
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_probs = F.softmax(attn_weights, dim=-1)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope(x, pos):
    d = x.shape[-1]
    inv = 1.0 / 10000 ** (torch.arange(0, d, 2).float() / d)
    ang = torch.einsum("n,d->nd", pos.float(), inv)
    emb = torch.cat((ang, ang), -1)
    return x * emb.cos() + rotate_half(x) * emb.sin()


def repeat_kv(x, n):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)


@idiom(
    lambda: dict(x=torch.randn(2, 9, 32)), {"causal": True, "cache": "past", "scale": "sqrt_head_dim"},
    needs=(rotate_half, rope, repeat_kv,), size=(2, 9), heads=4, kv_heads=2, head_dim=8,
    kind=("self", "causal", "grouped"), masked=True, position=Position("rotary", "half", 8, 0, 0), output="wo",
    rows=weights(wq="q: (heads head_dim) embed", wk="k: (kv_heads head_dim) embed", wv="v: (kv_heads head_dim) embed", wo="o: embed (heads head_dim)"),
)
class Llama(nn.Module):
    def __init__(self, dim=32, heads=4, kv=2):
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv * self.hd, bias=False)
        self.wv = nn.Linear(dim, kv * self.hd, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
    def forward(self, x, past=None):
        b, t, c = x.shape
        q = self.wq(x).view(b, t, self.heads, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, t, self.kv, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, t, self.kv, self.hd).transpose(1, 2)
        offset = past[0].shape[2] if past is not None else 0
        pos = torch.arange(offset, offset + t)
        q, k = rope(q, pos), rope(k, pos)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        cache = (k, v)
        k, v = repeat_kv(k, self.heads // self.kv), repeat_kv(v, self.heads // self.kv)
        s = q @ k.transpose(2, 3) / math.sqrt(self.hd)
        mask = torch.full((t, k.shape[2]), float("-inf")).triu(1 + offset)
        s = (s + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
        o = (s @ v).transpose(1, 2).reshape(b, t, c)
        return self.wo(o), cache


@idiom(
    lambda: dict(x=torch.randn(2, 5, 24), memory=torch.randn(2, 7, 24), memory_mask=torch.ones(2, 7, dtype=torch.long)),
    {"padding": "memory_mask", "padding_true": "keep", "scale": "sqrt_head_dim"}, size=(2, 5), head_dim=8,
    kind=("cross",), masked=True, lengths={"key": 7}, output="to_out",
    rows=weights(to_q="q: (heads head_dim) embed", to_kv="kv: (kv heads head_dim) embed", to_out="o: embed (heads head_dim)"),
)
class Cross(nn.Module):
    def __init__(self, dim=24, heads=3):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim)
    def forward(self, x, memory, memory_mask=None):
        h = self.heads
        q = self.to_q(x)
        k, v = self.to_kv(memory).chunk(2, dim=-1)
        q, k, v = map(lambda t: rearrange(t, "b n (h d) -> b h n d", h=h), (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if memory_mask is not None:
            m = rearrange(memory_mask.bool(), "b j -> b 1 1 j")
            sim = sim.masked_fill(~m, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@idiom(
    lambda: dict(x=torch.randn(2, 9, 16)), {"causal": True, "window": 3}, size=(2, 9), heads=2, head_dim=8,
    kind=("self", "causal"), masked=True, window=3, projected="batch token (qkv heads head_dim)", output="proj",
    rows=linears(qkv="qkv: (qkv heads head_dim) embed", proj="o: embed (heads head_dim)"),
)
class SlidingWindow(nn.Module):
    def __init__(self, dim=16, heads=2, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        i = torch.arange(n)[:, None]
        j = torch.arange(n)[None, :]
        keep = (j <= i) & (i - j < self.window)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.proj(o.transpose(1, 2).reshape(b, n, c))


@idiom(
    lambda: dict(x=torch.randn(2, 8, 16)), {}, size=(2, 8), heads=2, head_dim=8,
    split="batch windows heads token head_dim", pairs="batch windows heads query key",
    projected="batch (windows token) (heads head_dim)",
    rows=linears(q="q: (heads head_dim) embed", k="k: (heads head_dim) embed", v="v: (heads head_dim) embed", o="o: embed (heads head_dim)"),
    axes={ "query": "batch (windows query) embed", "key": "batch (windows key) embed", "value": "batch (windows key) embed", "concat": "batch (windows query) (heads head_dim)", "output": "batch (windows query) embed", },
    lengths={"query": 4, "key": 4},
)
class Blocks(nn.Module):
    def __init__(self, dim=16, heads=2, block=4):
        super().__init__()
        self.heads, self.block = heads, block
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
    def fold(self, t):
        b, n, c = t.shape
        t = t.view(b, n // self.block, self.block, self.heads, c // self.heads)
        return t.transpose(2, 3)
    def forward(self, x):
        q, k, v = self.fold(self.q(x)), self.fold(self.k(x)), self.fold(self.v(x))
        a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = (a @ v).transpose(2, 3)
        return self.o(y.reshape(x.shape))


@idiom(
    lambda: dict(x=torch.randn(2, 10, 24)), {"scale": "sqrt_head_dim"}, size=(2, 10), heads=4, head_dim=6,
    qk_norm=QKNorm("layer", "head"), projected="batch token (qkv heads head_dim)", output="proj",
    rows=linears(qkv="qkv: (qkv heads head_dim) embed", proj="o: embed (heads head_dim)"),
)
class Vit(nn.Module):
    def __init__(self, dim=24, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.q_norm, self.k_norm = nn.LayerNorm(dim // num_heads), nn.LayerNorm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(self.norm(x)).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q, k = self.q_norm(q), self.k_norm(k)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


@idiom(
    lambda: dict(x=torch.randn(2, 6, 16), pad=torch.zeros(2, 6, dtype=torch.bool)),
    {"causal": True, "padding": "pad", "padding_true": "ignore"}, size=(2, 6), heads=2, head_dim=8,
    kind=("self", "causal"), masked=True, axes={"concat": "(batch query) (heads head_dim)"}, grad=False,
    returns_output=False, output="",
    rows={"attn.in_proj_weight": "qkv: (qkv heads head_dim) embed", "attn.in_proj_bias": "qkv: (qkv heads head_dim)", "attn.out_proj.weight": "o: embed (heads head_dim)"},
)
class TorchBlock(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.drop = nn.Dropout(0.1)
    def forward(self, x, pad=None):
        n = x.size(1)
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
        y = self.n1(x)
        y, _ = self.attn(y, y, y, attn_mask=mask, key_padding_mask=pad, need_weights=False)
        x = x + self.drop(y)
        return x + self.ff(self.n2(x))


class Head(nn.Module):
    def __init__(self, dim, hd):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(dim, hd, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(12, 12)))
    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ self.value(x)


@idiom(
    lambda: dict(x=torch.randn(2, 6, 18)), {"causal": True}, needs=(Head,), size=(2, 6), **ONE_HEAD_AT_A_TIME,
    projected="batch token head_dim", heads=3, head_dim=6, kind=("self", "causal"), masked=True, output="proj",
    rows={"proj.weight": "o: embed (heads head_dim)"} | {f"heads.{h}.{name}.weight": f"{name[0]} {h}: head_dim embed" for name in ("query", "key", "value") for h in range(3)},
)
class PerHead(nn.Module):
    def __init__(self, dim=18, heads=3):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // heads) for _ in range(heads))
        self.proj = nn.Linear(dim, dim)
    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.proj(out)






@idiom(
    lambda: dict(x=torch.randn(2, 5, 24), mask=torch.zeros(2, 5)),
    {"padding": "mask", "padding_true": "ignore", "scale": "sqrt_head_dim"}, size=(2, 5), head_dim=8, masked=True,
    in_scores=1.0, projected="batch token heads head_dim", split="batch token heads head_dim",
    axes={"concat": "batch query heads head_dim"}, output="", rows={},
)
class EinsumMasked(nn.Module):
    def __init__(self, dim=24, heads=3):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(dim, heads, self.hd) * 0.2) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, self.hd, dim) * 0.2)
    def forward(self, x, mask=None):
        q = torch.einsum("bqe,ehd->bqhd", x, self.wq)
        k = torch.einsum("bke,ehd->bkhd", x, self.wk)
        v = torch.einsum("bke,ehd->bkhd", x, self.wv)
        energy = torch.einsum("bqhd,bkhd->bhqk", q, k)
        if mask is not None:
            energy = energy + mask[:, None, None, :] * -1e9
        w = torch.softmax(energy / self.hd ** 0.5, dim=3)
        out = torch.einsum("bhqk,bkhd->bqhd", w, v)
        return torch.einsum("bqhd,hde->bqe", out, self.wo)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
    def forward(self, x, bias, past):
        b, n, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(c, -1)
        q, k, v = (t.view(b, n, self.h, -1).transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(a.transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.ln2(x)), (k, v)


@idiom(
    lambda: dict(input_ids=torch.randint(0, 50, (2, 8)), attention_mask=torch.ones(2, 8, dtype=torch.long)),
    {"causal": True, "padding": "attention_mask", "padding_true": "keep", "padding_side": "left", "cache": "past"},
    needs=(Block,), times=2, size=(2, 8), heads=4, head_dim=8, kind=("self", "causal"), masked=True, output="",
    rows=linears(**{f"blocks__{n}__{name}": axes for n in range(2) for name, axes in (("qkv", "qkv: (qkv heads head_dim) embed"), ("o", "o: embed (heads head_dim)"))}),
)
class LanguageModel(nn.Module):
    def __init__(self, vocab=50, dim=32, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
    def forward(self, input_ids, attention_mask=None, past=None):
        b, n = input_ids.shape
        before = past[0][0].shape[-2] if past is not None else 0
        if attention_mask is None:
            attention_mask = torch.ones(b, before + n, dtype=torch.long)
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -n:]
        x = self.wte(input_ids) + self.wpe(position_ids)
        total = before + n
        causal = torch.ones(n, total, dtype=torch.bool).tril(total - n)
        keep = causal[None, None] & attention_mask.bool()[:, None, None, :]
        keep = keep | torch.eye(total, dtype=torch.bool)[-n:]
        presents = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, keep, past[i] if past is not None else None)
            presents.append(present)
        return self.head(self.ln_f(x)), presents


@idiom(
    lambda: dict(hidden_states=torch.randn(2, 8, 24), attention_mask=torch.ones(2, 8)),
    {"padding": "attention_mask", "padding_true": "keep"}, size=(2, 8), returns_output=False, heads=4, head_dim=6,
    masked=True, output="dense",
    rows=linears(query="q: (heads head_dim) embed", key="k: (heads head_dim) embed", value="v: (heads head_dim) embed", dense="o: embed (heads head_dim)"),
)
class Bert(nn.Module):
    def __init__(self, hidden=24, heads=4):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, hidden // heads
        self.all_head_size = hidden
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense, self.LayerNorm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size))
        return x.permute(0, 2, 1, 3)
    def forward(self, hidden_states, attention_mask=None):
        extended = (1.0 - attention_mask[:, None, None, :]) * torch.finfo(hidden_states.dtype).min
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        q = self.transpose_for_scores(self.query(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        scores = scores + extended
        probs = nn.functional.softmax(scores, dim=-1)
        ctx = torch.matmul(probs, v)
        ctx = ctx.permute(0, 2, 1, 3).contiguous()
        ctx = ctx.view(ctx.size()[:-2] + (self.all_head_size,))
        return self.LayerNorm(self.dense(ctx) + hidden_states)




@idiom(
    lambda: dict(x=torch.randn(2, 6, 16)), {"causal": True, "cache": "cache"}, size=(2, 6), reads_arguments=False,
    heads=2, head_dim=8, kind=("self", "causal"), masked=True,
    rows=weights(qkv="qkv: (qkv heads head_dim) embed", o="o: embed (heads head_dim)"),
)
class StaticCache(nn.Module):
    def __init__(self, dim=16, heads=2, most=32):
        super().__init__()
        self.h, self.most = heads, most
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.pos = nn.Parameter(torch.randn(most, dim) * 0.5)
    def forward(self, x, cache=None):
        b, n, c = x.shape
        if cache is None:
            cache = {"k": x.new_zeros(b, self.h, self.most, c // self.h), "v": x.new_zeros(b, self.h, self.most, c // self.h), "at": 0}
        start = cache["at"]
        x = x + self.pos[start : start + n]
        q, k, v = (t.view(b, n, self.h, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        ck, cv = cache["k"].clone(), cache["v"].clone()
        ck[:, :, start : start + n] = k
        cv[:, :, start : start + n] = v
        total = start + n
        bar = torch.arange(total)[None] > torch.arange(start, total)[:, None]
        s = (q @ ck[:, :, :total].mT) / (c // self.h) ** 0.5
        w = s.masked_fill(bar, float("-inf")).softmax(-1)
        y = (w @ cv[:, :, :total]).transpose(1, 2).reshape(b, n, c)
        return self.o(y), {"k": ck, "v": cv, "at": total}


@idiom(
    lambda: dict(x=torch.randn(2, 7, 24)), {"causal": True, "scale": "sqrt_head_dim"}, size=(2, 7), heads=4,
    head_dim=6, kind=("self", "causal"), masked=True, projected="batch token (heads qkv head_dim)",
    axes={"q_heads": "(batch heads) query head_dim", "k_heads": "(batch heads) key head_dim", "scores": "(batch heads) query key"},
    output="dense",
    rows=linears(query_key_value="qkv: (heads qkv head_dim) embed", dense="o: embed (heads head_dim)"),
)
class NeoX(nn.Module):
    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.query_key_value(x).view(b, n, self.h, 3 * self.d)
        q = qkv[..., : self.d].permute(0, 2, 1, 3)
        k = qkv[..., self.d : 2 * self.d].permute(0, 2, 1, 3)
        v = qkv[..., 2 * self.d :].permute(0, 2, 1, 3)
        q, k, v = (t.reshape(b * self.h, n, self.d) for t in (q, k, v))
        s = torch.baddbmm(torch.zeros(1, 1, 1), q, k.transpose(1, 2), beta=1.0, alpha=self.d ** -0.5)
        s = s.view(b, self.h, n, n)
        keep = torch.ones(n, n, dtype=torch.bool).tril()
        s = torch.where(keep, s, torch.tensor(torch.finfo(s.dtype).min))
        w = s.softmax(-1)
        o = torch.matmul(w, v.view(b, self.h, n, self.d))
        o = o.permute(0, 2, 1, 3).contiguous().view(b, n, -1)
        return self.dense(o)








@idiom(
    lambda: dict(x=torch.randn(3, 7, 30), mask=torch.ones(3, 7, dtype=torch.bool)),
    {"causal": True, "padding": "mask", "padding_true": "keep"}, size=(3, 7), heads=6, kv_heads=2, head_dim=5,
    kind=("self", "causal", "grouped"), masked=True, split="batch token kv_heads group head_dim",
    pairs="batch kv_heads group query key",
    axes={"k_heads": "batch key kv_heads head_dim", "v_heads": "batch key kv_heads head_dim"}, output="p.3",
    rows=linears(p__0="q: (heads head_dim) embed", p__1="k: (kv_heads head_dim) embed", p__2="v: (kv_heads head_dim) embed", p__3="o: embed (heads head_dim)"),
)
class Groups(nn.Module):
    def __init__(self, width=30, groups=2, each=3):
        super().__init__()
        self.groups, self.each, self.dim = groups, each, width // groups // each
        self.p = nn.ModuleList(nn.Linear(*size) for size in ((width, width), (width, groups * self.dim), (width, groups * self.dim), (width, width)))
    def forward(self, x, mask):
        b, n, _ = x.shape
        q = self.p[0](x).view(b, n, self.groups, self.each, self.dim)
        k, v = (p(x).view(b, n, self.groups, self.dim) for p in self.p[1:3])
        s = torch.einsum("bigrd,bjgd->bgrij", q, k) * self.dim ** -0.5
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        s = s.masked_fill(~mask[:, None, None, None], torch.finfo(s.dtype).min)
        y = torch.einsum("bgrij,bjgd->bigrd", s.softmax(-1), v)
        return self.p[3](y.reshape(b, n, -1))


@idiom(
    lambda: dict(x=torch.randn(2, 7, 30)), {"causal": True, "cache": "start_pos"}, size=(2, 7), grad=False,
    head_dim=10, kind=("self", "causal"), masked=True, cache=Cache(0, 7, 4, "in place"), lengths={"key": None},
    rows=linears(q="q: (heads head_dim) embed", k="k: (heads head_dim) embed", v="v: (heads head_dim) embed", o="o: embed (heads head_dim)"),
)
class LazyCache(nn.Module):
    def __init__(self, width=30, heads=3, slots=11):
        super().__init__()
        self.heads, self.slots, self.kv = heads, slots, None
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
    def forward(self, x, start_pos=0):
        b, n, c = x.shape
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.kv is None:
            self.kv = x.new_zeros(2, 3, self.heads, self.slots, c // self.heads)
        at = torch.arange(start_pos, start_pos + n)
        for cache, new in zip(self.kv[:, :b], (k, v)):
            cache.index_copy_(2, at, new)
        k, v = self.kv[:, :b]
        s = q @ k.mT / math.sqrt(c // self.heads)
        s = s.masked_fill(torch.arange(self.slots) > at[:, None], float("-inf"))
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@idiom(
    lambda: dict(x=torch.randn(2, 16, 3), start=5), {"causal": True}, size=(2, 3), grad=False, output="", heads=4,
    head_dim=4, kind=("self", "causal"), masked=True, cache=Cache(5, 3, 4, "in place"), lengths={"key": None},
    projected="batch (heads head_dim) token",
    axes={"query": "batch embed query", "key": "batch embed key", "value": "batch embed key", "concat": "batch (heads head_dim) query", "output": "batch embed query"},
    rows=linears(q="q: (heads head_dim) embed 1", k="k: (heads head_dim) embed 1", v="v: (heads head_dim) embed 1", o="o: embed (heads head_dim) 1"),
)
class Convolved(nn.Module):
    def __init__(self, dim=16, heads=4, slots=12):
        super().__init__()
        self.h, self.slots = heads, slots
        self.q, self.k, self.v, self.o = (nn.Conv1d(dim, dim, 1) for _ in range(4))
        self.register_buffer("kv", torch.zeros(2, 2, heads, slots, dim // heads))
    def forward(self, x, start=0):
        b, c, n = x.shape
        q, k, v = (p(x).view(b, self.h, c // self.h, n).transpose(2, 3) for p in (self.q, self.k, self.v))
        at = torch.arange(start, start + n)
        for cache, new in zip(self.kv, (k, v)):
            cache[:b, :, start : start + n] = new
        k, v = self.kv[:, :b]
        s = q @ k.mT / (c // self.h) ** 0.5
        s = s.masked_fill(torch.arange(self.slots) > at[:, None], float("-inf"))
        y = (s.softmax(-1) @ v).transpose(2, 3).reshape(b, c, n)
        return self.o(y)

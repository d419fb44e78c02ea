"""Attention as people write it, in many ways that are right, and mistakes of one line in each."""

# ruff: noqa: E501, Q
# fmt: off

from __future__ import annotations

HEAD = """import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
"""

IDIOMS: dict[str, tuple[dict[str, object], str, str]] = {}
"""A name to what is meant, its inputs, and its source."""

IDIOMS["nanogpt"] = ({"causal": True, "scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 8, 32))", '''
class M(nn.Module):
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
''')

IDIOMS["keepmask"] = ({"padding": "mask", "padding_true": "keep", "scale": "sqrt_head_dim"}, "dict(x=torch.randn(3, 7, 24), mask=torch.ones(3, 7, dtype=torch.bool))", '''
class M(nn.Module):
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
''')

IDIOMS["fairseq"] = ({"padding": "key_padding_mask", "padding_true": "ignore", "batch_axis": 1, "scale": "sqrt_head_dim"}, "dict(query=torch.randn(6, 3, 20), key_padding_mask=torch.zeros(3, 6, dtype=torch.bool))", '''
class M(nn.Module):
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
''')

IDIOMS["llama"] = ({"causal": True, "cache": "past", "scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 9, 32))", '''
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
class M(nn.Module):
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
''')

IDIOMS["cross"] = ({"padding": "memory_mask", "padding_true": "keep", "scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 5, 24), memory=torch.randn(2, 7, 24), memory_mask=torch.ones(2, 7, dtype=torch.long))", '''
class M(nn.Module):
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
''')

IDIOMS["window"] = ({"causal": True, "window": 3}, "dict(x=torch.randn(2, 9, 16))", '''
class M(nn.Module):
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
''')

IDIOMS["blocks"] = ({}, "dict(x=torch.randn(2, 8, 16))", '''
class M(nn.Module):
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
''')

IDIOMS["vit"] = ({"scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 10, 24))", '''
class M(nn.Module):
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
''')

IDIOMS["mha"] = ({"causal": True, "padding": "pad", "padding_true": "ignore"}, "dict(x=torch.randn(2, 6, 16), pad=torch.zeros(2, 6, dtype=torch.bool))", '''
class M(nn.Module):
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
''')

IDIOMS["perhead"] = ({"causal": True}, "dict(x=torch.randn(2, 6, 18))", '''
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
class M(nn.Module):
    def __init__(self, dim=18, heads=3):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // heads) for _ in range(heads))
        self.proj = nn.Linear(dim, dim)
    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.proj(out)
''')

IDIOMS["t5"] = ({}, "dict(x=torch.randn(2, 7, 16))", '''
class M(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.rel = nn.Embedding(31, heads)
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, self.h, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.transpose(3, 2)
        ctx, mem = torch.arange(n)[:, None], torch.arange(n)[None]
        bias = self.rel(mem - ctx + 15).permute(2, 0, 1)[None]
        w = F.softmax((s + bias).float(), dim=-1).type_as(s)
        return self.o((w @ v).transpose(1, 2).contiguous().view(b, n, -1))
''')

IDIOMS["alibi"] = ({"causal": True}, "dict(x=torch.randn(2, 7, 16))", '''
class M(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** -(8.0 / heads * torch.arange(1, heads + 1)))
    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.h, self.d).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        pos = torch.arange(n)
        dist = (pos[None, :] - pos[:, None]).float()
        bias = self.slopes[:, None, None] * dist
        s = torch.matmul(q, k.transpose(-1, -2)) / self.d ** 0.5 + bias
        s = s + torch.full((n, n), -1e9).triu(1)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
''')

IDIOMS["einsum"] = ({"padding": "mask", "padding_true": "ignore", "scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 5, 24), mask=torch.zeros(2, 5))", '''
class M(nn.Module):
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
''')

IDIOMS["lm"] = ({"causal": True, "padding": "attention_mask", "padding_true": "keep", "padding_side": "left", "cache": "past"}, "dict(input_ids=torch.randint(0, 50, (2, 8)), attention_mask=torch.ones(2, 8, dtype=torch.long))", '''
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
class M(nn.Module):
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
''')

IDIOMS["bert"] = ({"padding": "attention_mask", "padding_true": "keep"}, "dict(hidden_states=torch.randn(2, 8, 24), attention_mask=torch.ones(2, 8))", '''
class M(nn.Module):
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
''')

IDIOMS["mqa"] = ({"causal": True}, "dict(x=torch.randn(2, 6, 24))", '''
class M(nn.Module):
    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * self.d), nn.Linear(dim, dim)
    def forward(self, x):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.h, self.d).transpose(1, 2)
        k, v = self.kv(x).split(self.d, dim=-1)
        att = torch.einsum("bhqd,bkd->bhqk", q, k) * self.d ** -0.5
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)
        att = att.masked_fill(causal, torch.finfo(att.dtype).min)
        out = torch.einsum("bhqk,bkd->bhqd", att.softmax(-1), v)
        return self.o(out.transpose(1, 2).reshape(b, n, c))
''')

IDIOMS["static"] = ({"causal": True, "cache": "cache"}, "dict(x=torch.randn(2, 6, 16))", '''
class M(nn.Module):
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
''')

IDIOMS["neox"] = ({"causal": True, "scale": "sqrt_head_dim"}, "dict(x=torch.randn(2, 7, 24))", '''
class M(nn.Module):
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
''')

IDIOMS["half"] = ({}, "dict(x=torch.randn(2, 6, 32, dtype=torch.float16) * 30)", '''
class M(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim).half(), nn.Linear(dim, dim).half()
        with torch.no_grad():
            self.qkv.weight.mul_(4)
    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.h, self.d).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = (q.float() * self.d ** -0.5) @ k.float().mT
        w = s.softmax(-1).to(x.dtype)
        return self.o((w @ v).transpose(1, 2).reshape(b, n, c))
''')

IDIOMS["paddings_add"] = ({"padding": "src_mask", "padding_true": "keep"}, "dict(src=torch.randn(3, 6, 16), src_mask=torch.ones(3, 1, 1, 6, dtype=torch.bool))", '''
def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn
class M(nn.Module):
    def __init__(self, d_model=16, h=4):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
    def forward(self, src, src_mask=None):
        nb = src.size(0)
        query, key, value = [l(t).view(nb, -1, self.h, self.d_k).transpose(1, 2) for l, t in zip(self.linears, (src, src, src))]
        x, self.attn = attention(query, key, value, mask=src_mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nb, -1, self.h * self.d_k)
        return self.linears[-1](x)
''')

IDIOMS["groups"] = ({"causal": True, "padding": "mask", "padding_true": "keep"}, "dict(x=torch.randn(3, 7, 30), mask=torch.ones(3, 7, dtype=torch.bool))", '''
class M(nn.Module):
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
''')

IDIOMS["lazy"] = ({"causal": True, "cache": "start_pos"}, "dict(x=torch.randn(2, 7, 30))", '''
class M(nn.Module):
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
''')

IDIOMS["convolved"] = ({"causal": True}, "dict(x=torch.randn(2, 16, 3), start=5)", '''
class M(nn.Module):
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
''')

MUTANTS: list[tuple[str, str, str, str]] = [
    ("nanogpt", "mask_inverted", "== 0, float", "== 1, float"),
    ("nanogpt", "mask_triu", "torch.tril(torch.ones(block, block))", "torch.triu(torch.ones(block, block))"),
    ("nanogpt", "mask_early", "torch.tril(torch.ones(block, block))", "(torch.tril(torch.ones(block, block), diagonal=-1) + F.one_hot(torch.tensor([0]), block) * F.one_hot(torch.tensor([0]), block).T)"),
    ("nanogpt", "scale_times", "* (1.0 / math.sqrt(k.size(-1)))", "* math.sqrt(k.size(-1))"),
    ("nanogpt", "mask_zero", 'float("-inf")', "0.0"),
    ("nanogpt", "mask_minus1", 'float("-inf")', "-1.0"),
    ("nanogpt", "mask_lost", "att = att.masked_fill(self", "att.masked_fill(self"),
    ("nanogpt", "k_is_q", "att = (q @ k.transpose", "att = (q @ q.transpose"),
    ("nanogpt", "v_is_k", "y = att @ v", "y = att @ k"),
    ("nanogpt", "att_T", "y = att @ v", "y = att.transpose(-2, -1) @ v"),
    ("nanogpt", "state", "return self.c_proj(y)", "self.bias = self.bias.roll(1, -1)\n        return self.c_proj(y)"),
    ("nanogpt", "flatten_before", "q, k, v = self.c_attn(x).split(self.n_embd, dim=2)", "q, k, v = self.c_attn(x).view(B, 3 * C, T).transpose(1, 2).split(self.n_embd, dim=2)"),
    ("nanogpt", "out_transposed", "return self.c_proj(y)", "return self.c_proj(y).transpose(1, 2).reshape(B, T, C)"),
    ("nanogpt", "batch_mean", "B, T, C = x.size()", "B, T, C = x.size()\n        x = x - x.mean((0, 2), keepdim=True)"),
    ("nanogpt", "detach", "y = att @ v", "y = att.detach() @ v"),
    ("nanogpt", "bnc_swapped", "B, T, C = x.size()", "T, B, C = x.size()"),
    ("keepmask", "not_renorm", "            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)\n        p = scores.softmax(dim=-1)", "            pass\n        p = scores.softmax(dim=-1) * mask[:, None, None, :]"),
    ("keepmask", "other_row", "~mask[:, None, None, :]", "~mask.roll(1, 0)[:, None, None, :]"),
    ("keepmask", "flip", "~mask[:, None, None, :]", "~mask.flip(1)[:, None, None, :]"),
    ("keepmask", "any_row", "~mask[:, None, None, :]", "~mask.all(0)[None, None, None, :]"),
    ("keepmask", "merge23", "torch.matmul(p, v).transpose(1, 2)", "torch.matmul(p, v).transpose(2, 3)"),
    ("keepmask", "batchfold", "t.view(b, n, self.h, self.d_k).transpose(1, 2)", "t.view(n, b, self.h, self.d_k).permute(1, 2, 0, 3)"),
    ("keepmask", "cumulative_len", "~mask[:, None, None, :]", "(torch.arange(mask.size(1))[None] > mask.sum(1, keepdim=True))[:, None, None, :]"),
    ("keepmask", "len_off", "~mask[:, None, None, :]", "(torch.arange(mask.size(1))[None] >= mask.sum(1, keepdim=True) - 1)[:, None, None, :]"),
    ("keepmask", "both", "~mask[:, None, None, :]", "~(mask[:, None, None, :] | mask[:, None, :, None])"),
    ("fairseq", "mask_order", 'attn_weights = attn_weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf"))', "attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len).masked_fill(key_padding_mask.repeat(self.num_heads, 1)[:, None], float('-inf'))"),
    ("fairseq", "fold_wrong", "q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)", "q = q.contiguous().view(tgt_len, bsz, self.num_heads, self.head_dim).permute(2, 1, 0, 3).reshape(bsz * self.num_heads, tgt_len, self.head_dim)"),
    ("fairseq", "view_direct", "k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)", "k = k.contiguous().view(bsz * self.num_heads, -1, self.head_dim)"),
    ("fairseq", "view_all", ".transpose(0, 1)\n        src_len", "\n        q, k, v = (t.transpose(0, 1).reshape(bsz * self.num_heads, tgt_len, self.head_dim) for t in (q, k, v.transpose(0, 1).reshape(tgt_len, -1, self.head_dim)))\n        src_len"),
    ("fairseq", "merge_bt", "attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)", "attn = attn.transpose(0, 1).contiguous().view(bsz, tgt_len, embed_dim).transpose(0, 1)"),
    ("fairseq", "scale_twice", "torch.bmm(q, k.transpose(1, 2))", "torch.bmm(q, k.transpose(1, 2)) * self.scaling"),
    ("fairseq", "scale_k", "k = self.k_proj(query)", "k = self.k_proj(query) * self.scaling"),
    ("fairseq", "mask_view", "attn_weights.view(bsz, self.num_heads, tgt_len, src_len)", "attn_weights.view(self.num_heads, bsz, tgt_len, src_len).transpose(0, 1).contiguous()"),
    ("fairseq", "batch_first", "tgt_len, bsz, embed_dim = query.size()", "bsz, tgt_len, embed_dim = query.size()\n        key_padding_mask = None"),
    ("llama", "repeat_tile_k", "k, v = repeat_kv(k, self.heads // self.kv)", "k, v = k.repeat(1, self.heads // self.kv, 1, 1)"),
    ("llama", "repeat_tile_v", "repeat_kv(v, self.heads // self.kv)", "v.repeat(1, self.heads // self.kv, 1, 1)"),
    ("llama", "rope_v", "q, k = rope(q, pos), rope(k, pos)", "q, k, v = rope(q, pos), rope(k, pos), rope(v, pos)"),
    ("llama", "rope_k_only", "q, k = rope(q, pos), rope(k, pos)", "k = rope(k, pos)"),
    ("llama", "rope_layout", "emb = torch.cat((ang, ang), -1)", "emb = ang.repeat_interleave(2, -1)"),
    ("llama", "rope_sign", "return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, x1), dim=-1)"),
    ("llama", "rope_head", 'ang = torch.einsum("n,d->nd", pos.float(), inv)', "ang = torch.einsum('n,d->nd', torch.arange(x.shape[1]).float(), inv)[:, None]"),
    ("llama", "rope_k_off", "rope(k, pos)", "rope(k, pos + 1)"),
    ("llama", "rope_k_neg", "rope(k, pos)", "rope(k, -pos)"),
    ("llama", "rope_base", "rope(k, pos)", "rope(k, pos * 0.5)"),
    ("llama", "pos_off", "offset = past[0].shape[2] if past", "offset = past[0].shape[2] - 1 if past"),
    ("llama", "pos_axis", "offset = past[0].shape[2] if past", "offset = past[0].shape[1] if past"),
    ("llama", "cache_after_repeat", "cache = (k, v)", "cache = (k.flip(1), v)"),
    ("llama", "cache_order_v", "torch.cat([past[1], v], dim=2)", "torch.cat([v, past[1]], dim=2)"),
    ("llama", "cache_axis", "dim=2)", "dim=1)"),
    ("llama", "cache_swapped", "cache = (k, v)", "cache = (v, k)"),
    ("llama", "cache_new_only", "cache = (k, v)", "cache = (k[:, :, -t:], v[:, :, -t:])"),
    ("llama", "mask_off", ".triu(1 + offset)", ".triu(offset)"),
    ("llama", "mask_tril", ".triu(1 + offset)", ".tril(-1)"),
    ("llama", "rotate_after_cache", "cache = (k, v)", "cache = (rope(k, torch.arange(k.shape[2])), v)"),
    ("llama", "scale_pre", "/ math.sqrt(self.hd)", "/ math.sqrt(c)"),
    ("llama", "rope_before_split", "q = self.wq(x).view(b, t, self.heads, self.hd).transpose(1, 2)", "q = rope(self.wq(x), torch.arange(t)).view(b, t, self.heads, self.hd).transpose(1, 2)"),
    ("llama", "global_kv", "k, v = repeat_kv(k,", "k, v = k.mean(0, keepdim=True).expand_as(k), v\n        k, v = repeat_kv(k,"),
    ("llama", "q_roll", "q, k = rope(q, pos), rope(k, pos)", "q, k = rope(q, pos).roll(1, 0), rope(k, pos)"),
    ("cross", "self_kv", "self.to_kv(memory)", "self.to_kv(x)\n        memory_mask = None\n        k, v = self.to_kv(x)"),
    ("cross", "dropped", "sim = sim.masked_fill", "_ = sim.masked_fill"),
    ("cross", "mask_other", "memory_mask.bool()", "memory_mask.flip(0).bool()"),
    ("cross", "einsum_ij", '"b h i j, b h j d -> b h i d", attn, v', '"b h i j, b h j d -> b h i d", attn.flip(0), v'),
    ("cross", "mem_batch0", "self.to_kv(memory)", "self.to_kv(memory[:1].expand_as(memory))"),
    ("window", "future", "keep = (j <= i) & (i - j < self.window)", "keep = (i - j).abs() < self.window"),
    ("window", "no_causal", "(j <= i) & (i - j < self.window)", "(i - j < self.window)"),
    ("window", "inv", "attn_mask=keep", "attn_mask=~keep"),
    ("window", "strict", "(j <= i)", "((j < i) | (i == 0) & (j == 0))"),
    ("window", "swapped_ij", "(i - j < self.window)", "(j - i < self.window)"),
    ("window", "or", ") & (i", ") | (i"),
    ("window", "float", "attn_mask=keep", "attn_mask=keep.float()"),
    ("window", "modulo", "(i - j < self.window)", "(i % self.window >= j % self.window)"),
    ("window", "perm_view", "reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)", "reshape(3, b, self.heads, n, c // self.heads)"),
    ("window", "perm_view2", "reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)", "reshape(b, 3, n, self.heads, c // self.heads).permute(1, 0, 3, 2, 4)"),
    ("window", "perm_view3", "reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)", "reshape(b, 3, self.heads, n, c // self.heads).permute(1, 0, 2, 3, 4)"),
    ("blocks", "no_transpose", "t.transpose(2, 3)", "t.reshape(b, n // self.block, self.heads, self.block, c // self.heads)"),
    ("blocks", "merge", "(a @ v).transpose(2, 3)", "(a @ v)"),
    ("blocks", "batch", "t.view(b, n // self.block, self.block, self.heads, c // self.heads)", "t.view(n // self.block, b, self.block, self.heads, c // self.heads)\n        t = t.transpose(0, 1)"),
    ("blocks", "block_heads", "return t.transpose(2, 3)", "return t"),
    ("vit", "nt", "permute(2, 0, 3, 1, 4)", "permute(2, 0, 1, 3, 4)"),
    ("vit", "reshape2", ".reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)", ".reshape(3, B, self.num_heads, N, C // self.num_heads)"),
    ("vit", "merge2", "(attn @ v).transpose(1, 2).reshape(B, N, C)", "(attn @ v).permute(2, 0, 1, 3).reshape(B, N, C)"),
    ("vit", "kk", "q, k, v = qkv[0], qkv[1], qkv[2]", "q, k, v = qkv[0], qkv[1], qkv[1]"),
    ("vit", "norm_q_twice", "self.q_norm(q), self.k_norm(k)", "self.q_norm(q), self.q_norm(k)"),
    ("vit", "scale_both", "k.transpose(-2, -1)\n", "(k * self.scale).transpose(-2, -1)\n"),
    ("vit", "norm_batch", "self.norm(x)", "(x - x.mean(0)) / (x.std(0) + 1e-5)"),
    ("vit", "batch_view", "B, N, C = x.shape\n", "N, B, C = x.shape\n"),
    ("mha", "not_bf_nomask", "y, _ = self.attn(y, y, y, attn_mask=mask, key_padding_mask=pad, need_weights=False)", "y, _ = self.attn(y, y, y, need_weights=False)"),
    ("mha", "mask_inv", "diagonal=1)", "diagonal=1).logical_not()"),
    ("mha", "mask_tril", "torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)", "torch.tril(torch.ones(n, n, dtype=torch.bool))"),
    ("mha", "mask_float", "torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)", "torch.triu(torch.ones(n, n), diagonal=1)"),
    ("mha", "is_causal_no_mask", "attn_mask=mask, ", "attn_mask=None, "),
    ("mha", "drop_f", "self.drop(y)", "F.dropout(y, 0.1)"),
    ("mha", "norm_batch", "y = self.n1(x)", "y = F.layer_norm(x.transpose(1, 2), (x.size(1),)).transpose(1, 2)"),
    ("mha", "res_T", "x = x + self.drop(y)", "x = x.roll(1, 1) + self.drop(y)"),
    ("mha", "res_B", "x = x + self.drop(y)", "x = x.roll(1, 0) + self.drop(y)"),
    ("mha", "inplace", "x = x + self.drop(y)", "x += self.drop(y)"),
    ("perhead", "one_head", "[h(x) for h in self.heads]", "[self.heads[0](x) for h in self.heads]"),
    ("perhead", "stack", "torch.cat([h(x) for h in self.heads], dim=-1)", "torch.stack([h(x) for h in self.heads], dim=1).reshape(x.shape)"),
    ("perhead", "mask", "torch.tril(", "torch.triu("),
    ("perhead", "cat1", "torch.cat([h(x) for h in self.heads], dim=-1)", "torch.cat([h(x) for h in self.heads], dim=1).reshape(x.shape)"),
    ("perhead", "shared", "nn.ModuleList(Head(dim, dim // heads) for _ in range(heads))", "nn.ModuleList([Head(dim, dim // heads)] * heads)"),
    ("t5", "softmax", "dim=-1)", "dim=1)"),
    ("t5", "bias_after", "w = F.softmax((s + bias).float(), dim=-1).type_as(s)", "w = F.softmax(s.float(), dim=-1).type_as(s) + bias"),
    ("alibi", "triu0", ".triu(1)", ".triu(0)"),
    ("alibi", "triu2", ".triu(1)", ".triu(2)"),
    ("alibi", "tril", ".triu(1)", ".tril(1)"),
    ("einsum", "dim1", "dim=3", "dim=1"),
    ("einsum", "dim2", "dim=3", "dim=2"),
    ("einsum", "kT", '"bhqk,bkhd->bqhd", w, v', '"bhkq,bkhd->bqhd", w, v'),
    ("einsum", "mask_sign", "* -1e9", "* 1e9"),
    ("einsum", "mask_weak", "* -1e9", "* -1"),
    ("einsum", "scale_dim", "self.hd ** 0.5", "x.size(-1) ** 0.5"),
    ("einsum", "batch_sum", '"bhqk,bkhd->bqhd", w, v', '"bhqk,ckhd->bqhd", w, v'),
    ("lm", "pos_arange", "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -n:]", "position_ids = torch.arange(before, before + n)[None]"),
    ("lm", "pos_noclamp", "- 1).clamp(min=0)[:, -n:]", ").clamp(min=0)[:, :n]"),
    ("lm", "tril0", ".tril(total - n)", ".tril(0)"),
    ("lm", "tril1", ".tril(total - n)", ".tril(total - n + 1)"),
    ("lm", "triu", ".tril(total - n)", ".triu(total - n)"),
    ("lm", "no_pad", " & attention_mask.bool()[:, None, None, :]", ""),
    ("lm", "pad_q", "attention_mask.bool()[:, None, None, :]", "attention_mask.bool()[:, None, -n:, None]"),
    ("lm", "or", "causal[None, None] & att", "causal[None, None] | att"),
    ("lm", "past_swapped", "past[i] if past is not None", "past[-1 - i] if past is not None"),
    ("lm", "cache_dim", "torch.cat((past[1], v), -2)", "torch.cat((v, past[1]), -2)"),
    ("lm", "eye_all", "torch.eye(total, dtype=torch.bool)[-n:]", "torch.ones(n, total, dtype=torch.bool).triu(n - 1)"),
    ("lm", "last_only", "presents.append(present)", "presents.append((present[0][..., -n:, :], present[1][..., -n:, :]))"),
    ("lm", "mean_norm", "return self.head(self.ln_f(x)), presents", "return self.head(self.ln_f(x - x.mean(1, keepdim=True))), presents"),
    ("bert", "ext_raw", "scores = scores + extended", "scores = scores + attention_mask[:, None, None, :]"),
    ("bert", "ext_mul", "scores = scores + extended", "scores = scores * extended"),
    ("bert", "ext_minus", "scores = scores + extended", "scores = scores - extended"),
    ("bert", "ext_late", "        scores = scores + extended\n        probs = nn.functional.softmax(scores, dim=-1)\n", "        probs = nn.functional.softmax(scores, dim=-1)\n        probs = probs + extended\n"),
    ("bert", "query_key", "self.transpose_for_scores(self.value(hidden_states))", "self.transpose_for_scores(self.key(hidden_states))"),
    ("bert", "ln_res", "self.LayerNorm(self.dense(ctx) + hidden_states)", "self.LayerNorm(self.dense(ctx) + hidden_states.mean(1, keepdim=True))"),
    ("bert", "ln_flip", "self.LayerNorm(self.dense(ctx) + hidden_states)", "self.LayerNorm(self.dense(ctx) + hidden_states.flip(0))"),
    ("mqa", "view_q", "self.q(x).view(b, n, self.h, self.d).transpose(1, 2)", "self.q(x).view(b, self.h, n, self.d)"),
    ("mqa", "triu0", ".triu(1)", ".triu()"),
    ("mqa", "notril", ".triu(1)", ".tril(-1)"),
    ("static", "start0", "x = x + self.pos[start : start + n]", "x = x + self.pos[:n]"),
    ("static", "write", "cv[:, :, start : start + n] = v", "cv[:, :, :n] = v"),
    ("static", "at", '"at": total}', '"at": n}'),
    ("static", "bar0", "torch.arange(start, total)[:, None]", "torch.arange(n)[:, None]"),
    ("static", "all", "s = (q @ ck[:, :, :total].mT)", "total = self.most; bar = torch.arange(total)[None] > 10 ** 6\n        s = (q @ ck[:, :, :total].mT)"),
    ("static", "inplace", 'ck, cv = cache["k"].clone(), cache["v"].clone()', 'ck, cv = cache["v"].clone(), cache["k"].clone()'),
    ("static", "bar1", "torch.arange(total)[None] > torch", "torch.arange(total)[None] > 1 + torch"),
    ("neox", "view_nh", "s.view(b, self.h, n, n)", "s.view(self.h, b, n, n).transpose(0, 1)"),
    ("neox", "v_view", "v.view(b, self.h, n, self.d)", "v.view(self.h, b, n, self.d).transpose(0, 1)"),
    ("neox", "qkv_view", "self.query_key_value(x).view(b, n, self.h, 3 * self.d)", "self.query_key_value(x).view(b, self.h, n, 3 * self.d).transpose(1, 2)"),
    ("neox", "permute_v", "v = qkv[..., 2 * self.d :].permute(0, 2, 1, 3)", "v = qkv[..., 2 * self.d :].permute(0, 1, 2, 3)"),
    ("neox", "permute_out", "o.permute(0, 2, 1, 3)", "o.permute(0, 1, 2, 3)"),
    ("neox", "alpha", "alpha=self.d ** -0.5", "alpha=self.d ** 0.5"),
    ("neox", "kt", "q, k.transpose(1, 2), beta", "q, q.transpose(1, 2), beta"),
    ("half", "overflow", "(q.float() * self.d ** -0.5) @ k.float().mT", "(q @ k.mT) * self.d ** -0.5"),
    ("paddings_add", "maskT", "mask == 0", "mask.transpose(-1, -2) == 0"),
    ("paddings_add", "same_linear", "zip(self.linears, (src", "zip([self.linears[0]] * 3, (src"),
    ("paddings_add", "wrong_last", "self.linears[-1](x)", "self.linears[0](x)"),
    ("groups", "unused", "return self.p[3](y.reshape(b, n, -1))", "return y.reshape(b, n, -1)"),
    ("groups", "query_view", "q = self.p[0](x).view(b, n, self.groups, self.each, self.dim)", "q = self.p[0](x).view(b, self.groups, self.each, n, self.dim).permute(0, 3, 1, 2, 4)"),
    ("groups", "merged", "->bigrd", "->bgrid"),
    ("groups", "axis", "softmax(-1)", "softmax(1)"),
    ("groups", "times", "s.masked_fill(~mask[:, None, None, None], torch.finfo(s.dtype).min)", "s * mask[:, None, None, None]"),
    ("groups", "zero", "torch.finfo(s.dtype).min", "0.0"),
    ("groups", "of_others", "~mask[:, None, None, None]", "~torch.stack((mask, mask.roll(1, 0)), 1)[:, :, None, None]"),
    ("groups", "turned", "~mask[:, None, None, None]", "~mask.flip(0)[:, None, None, None]"),
    ("groups", "dropped", "s.softmax(-1)", "F.dropout(s.softmax(-1), 0.2)"),
    ("lazy", "over", "cache.index_copy_(2, at, new)", "cache.index_copy_(2, (at - 1).clamp(0) if start_pos else at, new)"),
    ("lazy", "restarts", "torch.arange(start_pos, start_pos + n)", "torch.arange(n)"),
    ("lazy", "aligned", "> at[:, None]", "> torch.arange(n)[:, None]"),
    ("lazy", "late", "> at[:, None]", "> 1 + at[:, None]"),
    ("convolved", "split_by_view", "view(b, self.h, c // self.h, n).transpose(2, 3)", "view(b, self.h, n, c // self.h)"),
    ("convolved", "merged_by_view", ".transpose(2, 3).reshape(b, c, n)", ".reshape(b, c, n)"),
    ("convolved", "mask_late", "> at[:, None]", "> 1 + at[:, None]"),
    ("paddings_add", "drop", "p_attn = dropout(p_attn)", "p_attn = F.dropout(p_attn, 0.1, training=True)"),
]
"""An idiom, a name, and the line that goes wrong: what stands there, and what somebody wrote.

Those that `cases` has a twin of are there alone.
"""

ORDERS: list[tuple[str, str, str, str]] = [
    ("keepmask", "merge_hd", "torch.matmul(p, v).transpose(1, 2)", "torch.matmul(p, v).permute(0, 2, 3, 1)"),
    ("keepmask", "hd_order", "t.view(b, n, self.h, self.d_k).transpose(1, 2)", "t.view(b, n, self.d_k, self.h).permute(0, 3, 1, 2)"),
    ("llama", "rope_sign2", "return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"),
    ("llama", "heads_reversed", "(s @ v).transpose(1, 2)", "(s @ v).flip(1).transpose(1, 2)"),
    ("cross", "merge_dh", '"b h n d -> b n (h d)"', '"b h n d -> b n (d h)"'),
    ("cross", "split_dh", '"b n (h d) -> b h n d"', '"b n (d h) -> b h n d"'),
    ("window", "order", "b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)", "b, n, self.heads, 3, c // self.heads).permute(3, 0, 2, 1, 4)"),
    ("alibi", "flat", ".transpose(1, 2).flatten(2)", ".flatten(2).transpose(1, 2).reshape(b, n, -1)"),
]
"""Those that a module learns to live with: only a reference with the same weights tells them."""

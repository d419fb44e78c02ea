"""Modules that people reported as wrong, in own words: each is the right one, with the text that was wrong in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mha_inspect.checks.intent import Intent

HEAD = "import math\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n"


@dataclass(frozen=True)
class Reported:
    """A module with a mistake that a patch mends."""

    name: str
    source: str
    """The right module: the last class of the source is called."""
    right: str
    wrong: str
    inputs: Callable[[], dict[str, Tensor]]
    intent: Intent


REPORTED: list[Reported] = []


def report(
    name: str, source: str, right: str, wrong: str, inputs: Callable[[], dict[str, Tensor]], **intent: Any
) -> None:
    assert right in source
    REPORTED.append(Reported(name, HEAD + source, right, wrong, inputs, Intent(**intent)))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def keep(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, -3:] = False
    return mask


report(
    "halonet_mask",
    """class Attention(nn.Module):
    def __init__(self, dim=24, heads=3):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        mask = mask[:, None, None, :]
        sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))
""",
    "masked_fill_(~mask,",
    "masked_fill_(mask,",
    lambda: {"x": floats(2, 7, 24), "mask": keep(2, 7)},
    padding="mask",
    padding_true="keep",
)

report(
    "label_attention",
    """class LabelAttention(nn.Module):
    def __init__(self, dim=24, heads=3, labels=5):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.labels = nn.Embedding(labels, dim)
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens, attention_mask):
        b, t, _ = tokens.shape
        labels = self.labels.weight[None].expand(b, -1, -1)
        q = self.q(labels).view(b, -1, self.heads, self.dim // self.heads).transpose(1, 2)
        k = self.k(tokens).view(b, t, self.heads, self.dim // self.heads).transpose(1, 2)
        v = self.v(tokens).view(b, t, self.heads, self.dim // self.heads).transpose(1, 2)
        mask = attention_mask.bool()[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, -1, self.dim))
""",
    "attn_mask=mask",
    "attn_mask=~mask",
    lambda: {"tokens": floats(2, 7, 24), "attention_mask": keep(2, 7).long()},
    padding="attention_mask",
    padding_true="keep",
)

report(
    "head_scaled_by_C",
    """class Head(nn.Module):
    def __init__(self, n_embd=24, head_size=8, block_size=16):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.size(-1)**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ self.value(x)
""",
    "k.size(-1)**-0.5",
    "C**-0.5",
    lambda: {"x": floats(2, 7, 24)},
    causal=True,
    scale="sqrt_head_dim",
)

report(
    "vit_cifar_sqrt_d",
    """class MultiHeadSelfAttention(nn.Module):
    def __init__(self, feats=24, head=3):
        super().__init__()
        self.head = head
        self.feats = feats
        self.sqrt_d = (self.feats // self.head) ** 0.5
        self.q = nn.Linear(feats, feats)
        self.k = nn.Linear(feats, feats)
        self.v = nn.Linear(feats, feats)
        self.o = nn.Linear(feats, feats)

    def forward(self, x):
        b, n, f = x.size()
        q = self.q(x).view(b, n, self.head, self.feats // self.head).transpose(1, 2)
        k = self.k(x).view(b, n, self.head, self.feats // self.head).transpose(1, 2)
        v = self.v(x).view(b, n, self.head, self.feats // self.head).transpose(1, 2)
        score = F.softmax(torch.einsum("bhif, bhjf->bhij", q, k) / self.sqrt_d, dim=-1)
        attn = torch.einsum("bhij, bhjf->bihf", score, v)
        return self.o(attn.flatten(2))
""",
    "(self.feats // self.head) ** 0.5",
    "self.feats ** 0.5",
    lambda: {"x": floats(2, 7, 24)},
    scale="sqrt_head_dim",
)

report(
    "timm_dropout_in_eval",
    """class Attention(nn.Module):
    def __init__(self, dim=24, num_heads=3, attn_drop=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)
""",
    "self.attn_drop.p if self.training else 0.0",
    "self.attn_drop.p",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "widedeep_dropout_made_in_forward",
    """class MultiHeadedAttention(nn.Module):
    def __init__(self, input_dim=24, n_heads=3, dropout=0.2):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, input_dim // n_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(input_dim, input_dim, bias=False)
        self.kv_proj = nn.Linear(input_dim, input_dim * 2, bias=False)
        self.out_proj = nn.Linear(input_dim, input_dim)

    def forward(self, X_Q, X_KV):
        q = self.q_proj(X_Q)
        k, v = self.kv_proj(X_KV).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bhsd,bhld->bhsl", q, k) / math.sqrt(self.head_dim)
        attn_weights = scores.softmax(dim=-1)
        attn_output = torch.einsum("bhsl,bhld->bhsd", F.dropout(attn_weights, self.dropout, self.training), v)
        return self.out_proj(attn_output.transpose(1, 2).flatten(2))
""",
    "F.dropout(attn_weights, self.dropout, self.training)",
    "nn.Dropout(self.dropout)(attn_weights)",
    lambda: {"X_Q": floats(2, 7, 24), "X_KV": floats(2, 5, 24)},
)

report(
    "from_scratch_no_permute",
    """class MultiHeadAttention(nn.Module):
    def __init__(self, hidden_dim=24, num_heads=3):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_dim = hidden_dim // num_heads
        self.qkv_proj = nn.Linear(hidden_dim, 3 * num_heads * self.qkv_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.qkv_dim, hidden_dim, bias=False)

    def forward(self, x):
        batch_size, sequence_length, hidden_dim = x.size()
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, sequence_length, self.num_heads, 3 * self.qkv_dim)
        qkv = qkv.permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values, attn = self.scaled_dot_product(q, k, v)
        values = values.permute(0, 2, 1, 3)
        values = values.reshape(batch_size, sequence_length, hidden_dim)
        return self.o_proj(values)

    def scaled_dot_product(self, q, k, v):
        attn_logits = torch.matmul(q, torch.transpose(k, -2, -1)) / math.sqrt(q.size()[-1])
        attention = F.softmax(attn_logits, dim=-1)
        return torch.matmul(attention, v), attention
""",
    "        values = values.permute(0, 2, 1, 3)\n",
    "",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "relative_view_of_heads_first",
    """class MHA(nn.Module):
    def __init__(self, emb_dim=24, num_heads=3):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, emb_dim // num_heads
        self.q = nn.Linear(emb_dim, emb_dim)
        self.k = nn.Linear(emb_dim, emb_dim)
        self.v = nn.Linear(emb_dim, emb_dim)
        self.out = nn.Linear(emb_dim, emb_dim)

    def fold(self, batch_size, t):
        t = t.view(batch_size, -1, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        return t.reshape(batch_size * self.num_heads, -1, self.head_dim)

    def reshape_to_concat(self, batch_size, t):
        t = t.permute(0, 2, 1, 3)
        return t.contiguous().view(batch_size, -1, self.num_heads * self.head_dim)

    def forward(self, x):
        batch_size = x.shape[0]
        q, k, v = (self.fold(batch_size, layer(x)) for layer in (self.q, self.k, self.v))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head_dim)
        output = torch.bmm(F.softmax(scores, -1), v)
        output = output.view(batch_size, self.num_heads, -1, self.head_dim)
        return self.out(self.reshape_to_concat(batch_size, output))
""",
    "output.view(batch_size, self.num_heads, -1",
    "output.view(self.num_heads, batch_size, -1",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "informer_view",
    """class AttentionLayer(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.query_projection = nn.Linear(d_model, d_model)
        self.key_projection = nn.Linear(d_model, d_model)
        self.value_projection = nn.Linear(d_model, d_model)
        self.out_projection = nn.Linear(d_model, d_model)

    def forward(self, queries, keys, values):
        B, L, _ = queries.shape
        _, S, _ = keys.shape
        H = self.n_heads
        queries = self.query_projection(queries).view(B, L, H, -1)
        keys = self.key_projection(keys).view(B, S, H, -1)
        values = self.value_projection(values).view(B, S, H, -1)
        out = self.inner_attention(queries, keys, values)
        return self.out_projection(out.reshape(B, L, -1))

    def inner_attention(self, queries, keys, values):
        B, L_Q, H, D = queries.shape
        _, L_K, _, _ = keys.shape
        queries = queries.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(D)
        context = torch.softmax(scores, dim=-1) @ values
        return context.transpose(1, 2)
""",
    """        queries = queries.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
""",
    """        queries = queries.view(B, H, L_Q, -1)
        keys = keys.view(B, H, L_K, -1)
        values = values.view(B, H, L_K, -1)
""",
    lambda: {"queries": floats(2, 7, 24), "keys": floats(2, 5, 24), "values": floats(2, 5, 24)},
)

report(
    "qanet_heads_viewed",
    """class SelfAttention(nn.Module):
    def __init__(self, dim=24, n_heads=3):
        super().__init__()
        self.n_heads, self.value_dim = n_heads, dim // n_heads
        self.w_q = nn.Parameter(torch.randn(n_heads, dim, self.value_dim) * 0.2)
        self.w_k = nn.Parameter(torch.randn(n_heads, dim, self.value_dim) * 0.2)
        self.w_v = nn.Parameter(torch.randn(n_heads, dim, self.value_dim) * 0.2)
        self.w_o = nn.Linear(dim, dim)

    def forward(self, x):
        batch_size, l, _ = x.shape
        q = torch.einsum("bld,hdk->hblk", x, self.w_q)
        k = torch.einsum("bld,hdk->hblk", x, self.w_k)
        v = torch.einsum("bld,hdk->hblk", x, self.w_v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.value_dim)
        heads = torch.softmax(scores, dim=-1) @ v
        x = heads.permute(1, 2, 0, 3).contiguous().view(batch_size, l, -1)
        return self.w_o(x)
""",
    "heads.permute(1, 2, 0, 3).contiguous().view(",
    "heads.view(",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "open_lm_rotary_over_heads",
    """def rotary(x):
    n, d = x.shape[-2:]
    freqs = 10000.0 ** (-torch.arange(0, d, 2) / d)
    angles = torch.outer(torch.arange(n), freqs)
    angles = torch.cat((angles, angles), dim=-1)
    x1, x2 = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-x2, x1), dim=-1) * angles.sin()


class CustomAttn(nn.Module):
    def __init__(self, dim=24, n_heads=3):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        batchsize, seqlen, _ = x.shape
        queries, keys, vals = self.in_proj(x).chunk(3, dim=-1)
        queries = queries.view(batchsize, seqlen, self.n_heads, self.head_dim)
        keys = keys.view(batchsize, seqlen, self.n_heads, self.head_dim)
        vals = vals.view(batchsize, seqlen, self.n_heads, self.head_dim)
        queries = rotary(queries.transpose(1, 2))
        keys = rotary(keys.transpose(1, 2))
        output = F.scaled_dot_product_attention(queries, keys, vals.transpose(1, 2), is_causal=True)
        return self.out_proj(output.transpose(1, 2).reshape(batchsize, seqlen, -1))
""",
    """        queries = rotary(queries.transpose(1, 2))
        keys = rotary(keys.transpose(1, 2))
""",
    """        queries = rotary(queries).transpose(1, 2)
        keys = rotary(keys).transpose(1, 2)
""",
    lambda: {"x": floats(2, 7, 24)},
    causal=True,
)

report(
    "executorch_positions_of_cache",
    """class Attention(nn.Module):
    def __init__(self, dim=24, n_heads=3, max_seq_len=32):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        freqs = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(max_seq_len), freqs)
        self.register_buffer("angles", torch.cat((angles, angles), -1))

    def rotate(self, x, angles):
        x1, x2 = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-x2, x1), -1) * angles.sin()

    def forward(self, x, past=None):
        bsz, seqlen, _ = x.shape
        start_pos = 0 if past is None else past[0].shape[2]
        heads = (bsz, seqlen, self.n_heads, self.head_dim)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        angles = self.angles[start_pos : start_pos + seqlen]
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        hidden = torch.ones(seqlen, k.shape[2], dtype=torch.bool).triu(1 + start_pos)
        scores = (q @ k.transpose(2, 3) / math.sqrt(self.head_dim)).masked_fill(hidden, float("-inf"))
        y = scores.softmax(-1) @ v
        return self.wo(y.transpose(1, 2).reshape(bsz, seqlen, -1)), (k, v)
""",
    "self.angles[start_pos : start_pos + seqlen]",
    "self.angles[:seqlen]",
    lambda: {"x": floats(2, 7, 24)},
    causal=True,
    cache="past",
)

report(
    "prime_rl_repeats_tokens",
    """class Attention(nn.Module):
    def __init__(self, dim=24, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(dim, dim)

    def forward(self, x):
        bs, sl, _ = x.shape
        q = self.q_proj(x).view(bs, sl, self.heads, self.head_dim)
        k = self.k_proj(x).view(bs, sl, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(bs, sl, self.kv_heads, self.head_dim)
        n_rep = self.heads // self.kv_heads
        k = k.repeat_interleave(n_rep, dim=2)
        v = v.repeat_interleave(n_rep, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(bs, sl, -1))
""",
    "(n_rep, dim=2)",
    "(n_rep, dim=1)",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "gqa_tiled",
    """class GroupedAttention(nn.Module):
    def __init__(self, dim=24, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, dim)
        self.wkv = nn.Linear(dim, 2 * kv_heads * self.head_dim)
        self.wo = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.wkv(x).view(b, n, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        times = self.heads // self.kv_heads
        k = torch.repeat_interleave(k, times, dim=1)
        v = torch.repeat_interleave(v, times, dim=1)
        weights = torch.softmax(q @ k.mT * self.head_dim**-0.5, dim=-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))
""",
    """        k = torch.repeat_interleave(k, times, dim=1)
        v = torch.repeat_interleave(v, times, dim=1)
""",
    """        k = torch.cat([k] * times, dim=1)
        v = torch.cat([v] * times, dim=1)
""",
    lambda: {"x": floats(2, 7, 24)},
)

report(
    "tokenlearner_view",
    """class Head(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.mhsa = nn.MultiheadAttention(dim, 3)

    def forward(self, y):
        y = y.transpose(0, 1)
        y, _ = self.mhsa(y, y, y)
        return y.transpose(0, 1)
""",
    """        y = y.transpose(0, 1)
        y, _ = self.mhsa(y, y, y)
        return y.transpose(0, 1)
""",
    """        b, n, d = y.shape
        y = y.view(n, b, d)
        y, _ = self.mhsa(y, y, y)
        return y.view(b, n, d)
""",
    lambda: {"y": floats(3, 7, 24)},
)

report(
    "book_tril_of_weights",
    """class CausalAttention(nn.Module):
    def __init__(self, d_in=24, d_out=24):
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x):
        keys = self.W_key(x)
        queries = self.W_query(x)
        values = self.W_value(x)
        attn_scores = queries @ keys.transpose(1, 2)
        hidden = torch.ones_like(attn_scores).tril() == 0
        attn_weights = torch.softmax(attn_scores.masked_fill(hidden, -torch.inf) / keys.shape[-1] ** 0.5, dim=-1)
        return attn_weights @ values
""",
    """        hidden = torch.ones_like(attn_scores).tril() == 0
        attn_weights = torch.softmax(attn_scores.masked_fill(hidden, -torch.inf) / keys.shape[-1] ** 0.5, dim=-1)
""",
    """        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = torch.tril(attn_weights)
""",
    lambda: {"x": floats(2, 7, 24)},
    causal=True,
)

report(
    "sooftware_mask_of_heads_first",
    """class MultiHeadAttention(nn.Module):
    def __init__(self, d_model=24, num_heads=3):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_model // num_heads
        self.query_proj = nn.Linear(d_model, d_model)
        self.key_proj = nn.Linear(d_model, d_model)
        self.value_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask):
        batch_size = value.size(0)
        query = self.query_proj(query).view(batch_size, -1, self.num_heads, self.d_head)
        key = self.key_proj(key).view(batch_size, -1, self.num_heads, self.d_head)
        value = self.value_proj(value).view(batch_size, -1, self.num_heads, self.d_head)
        query = query.permute(2, 0, 1, 3).contiguous().view(batch_size * self.num_heads, -1, self.d_head)
        key = key.permute(2, 0, 1, 3).contiguous().view(batch_size * self.num_heads, -1, self.d_head)
        value = value.permute(2, 0, 1, 3).contiguous().view(batch_size * self.num_heads, -1, self.d_head)
        mask = mask.unsqueeze(1).repeat(self.num_heads, 1, 1)
        score = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.d_head)
        score = score.masked_fill(mask, -1e9)
        context = torch.bmm(F.softmax(score, -1), value)
        context = context.view(self.num_heads, batch_size, -1, self.d_head)
        return context.permute(1, 2, 0, 3).contiguous().view(batch_size, -1, self.num_heads * self.d_head)
""",
    "mask.unsqueeze(1).repeat(self.num_heads, 1, 1)",
    "mask.unsqueeze(1).repeat_interleave(self.num_heads, 0)",
    lambda: {"query": floats(3, 7, 24), "key": floats(3, 7, 24), "value": floats(3, 7, 24), "mask": ~keep(3, 7)},
    padding="mask",
    padding_true="ignore",
)

report(
    "set_transformer_dim_V",
    """class MAB(nn.Module):
    def __init__(self, dim_Q=24, dim_K=24, dim_V=24, num_heads=3):
        super().__init__()
        self.dim_V = dim_V
        self.num_heads = num_heads
        self.fc_q = nn.Linear(dim_Q, dim_V)
        self.fc_k = nn.Linear(dim_K, dim_V)
        self.fc_v = nn.Linear(dim_K, dim_V)
        self.fc_o = nn.Linear(dim_V, dim_V)

    def forward(self, Q, K):
        Q = self.fc_q(Q)
        K, V = self.fc_k(K), self.fc_v(K)
        dim_split = self.dim_V // self.num_heads
        Q_ = torch.cat(Q.split(dim_split, 2), 0)
        K_ = torch.cat(K.split(dim_split, 2), 0)
        V_ = torch.cat(V.split(dim_split, 2), 0)
        A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(dim_split), 2)
        O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)
        return O + F.relu(self.fc_o(O))
""",
    "math.sqrt(dim_split)",
    "math.sqrt(self.dim_V)",
    lambda: {"Q": floats(2, 7, 24), "K": floats(2, 5, 24)},
    scale="sqrt_head_dim",
)

"""Code as it is published (meta-llama, gpt-fast): what is right is not accused, and a planted mistake is found."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError

from ...corpus.planted import B, E, N, Right, future

TOKENS = torch.arange(12).reshape(2, 6)
X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))


def rotations(dim: int, end: int) -> Tensor:
    """Complex numbers, `position pair`."""
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate pairs of `batch position heads head_dim`."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * freqs_cis.view(1, x.shape[1], 1, -1)
    return torch.view_as_real(turned).flatten(3)


class LlamaAttention(nn.Module):
    """The cache is written in place."""

    def __init__(self, dim: int = 32, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.cache_k = torch.zeros(4, 32, n_kv_heads, self.head_dim)
        self.cache_v = torch.zeros(4, 32, n_kv_heads, self.head_dim)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xq, xk = rotated(xq, freqs_cis), rotated(xk, freqs_cis)
        self.cache_k = self.cache_k.to(xq)
        self.cache_v = self.cache_v.to(xq)
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        keys = self.cache_k[:bsz, : start_pos + seqlen].repeat_interleave(self.n_heads // self.n_kv, 2)
        values = self.cache_v[:bsz, : start_pos + seqlen].repeat_interleave(self.n_heads // self.n_kv, 2)
        scores = xq.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1) @ values.transpose(1, 2)
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class LlamaTable(LlamaAttention):
    """The rotations come by a name that says nothing."""

    def forward(self, x: Tensor, start_pos: int, table: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x, start_pos, table, mask)


class LlamaModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.layers = nn.ModuleList(LlamaAttention() for _ in range(2))
        self.freqs_cis = rotations(8, 32)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        seqlen = tokens.shape[1]
        h = self.emb(tokens)
        mask = self.mask(start_pos, seqlen) if seqlen > 1 else None
        for layer in self.layers:
            h = h + layer(h, start_pos, self.freqs(start_pos, seqlen), mask)
        return self.out(h)

    def freqs(self, start_pos: int, seqlen: int) -> Tensor:
        return self.freqs_cis[start_pos : start_pos + seqlen]

    def mask(self, start_pos: int, seqlen: int) -> Tensor:
        mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1)
        return torch.hstack([torch.zeros((seqlen, start_pos)), mask])


class Restarted(LlamaModel):
    """Each chunk is rotated from position 0 on."""

    def freqs(self, start_pos: int, seqlen: int) -> Tensor:
        return self.freqs_cis[:seqlen]


class TopLeft(LlamaModel):
    """The first query of a chunk sees the first key alone."""

    def mask(self, start_pos: int, seqlen: int) -> Tensor:
        return torch.triu(torch.full((seqlen, start_pos + seqlen), float("-inf")), diagonal=1)


class GptFast(nn.Module):
    """A static cache that is written by index_put, input_pos, and a table of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.wqkv = nn.Embedding(50, 32), nn.Linear(32, 64, bias=False)
        self.wo = nn.Linear(32, 32, bias=False)
        self.register_buffer("k_cache", torch.zeros(2, 2, 16, 8))
        self.register_buffer("v_cache", torch.zeros(2, 2, 16, 8))
        self.register_buffer("causal_mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))
        self.register_buffer("freqs", rotations(8, 16))

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        mask, freqs = self.causal_mask[None, None, input_pos], self.freqs[input_pos]
        q, k, v = (side.unflatten(-1, (-1, 8)) for side in self.wqkv(self.emb(idx)).split([32, 16, 16], -1))
        q, k = rotated(q, freqs), rotated(k, freqs)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        k, v = self.k_cache.repeat_interleave(2, dim=1), self.v_cache.repeat_interleave(2, dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().flatten(2))


def llama(kind: Callable[[], nn.Module] = LlamaAttention) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a layer and its arguments."""
    torch.manual_seed(0)
    return kind().eval(), (X, 0, rotations(8, 6), torch.triu(torch.full((6, 6), float("-inf")), 1))


def gpt_fast() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return GptFast().eval(), (TOKENS, torch.arange(6))


def llama_model() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return LlamaModel(), (TOKENS,)


@pytest.mark.parametrize(("draw", "cache"), [(llama, "start_pos"), (gpt_fast, "input_pos"), (llama_model, None)])
def test_published_code_is_not_accused_and_its_cache_is_continued_by_positions(
    draw: Callable[[], tuple[nn.Module, tuple[Any, ...]]], cache: str | None
) -> None:
    module, args = draw()
    report = mha_inspect.check(module, *args, intent=Intent(causal=True, scale="sqrt_head_dim", cache=cache))
    assert report.findings == ()
    assert {"cache", "causal", "scale", "grouped", "rotary"} <= {passed.check for passed in report.passed}


@pytest.mark.parametrize(
    ("model", "cause", "cache"),
    [(Restarted, "positions restart at 0", "start_pos"), (TopLeft, "aligned top left", None)],
)
def test_a_mistake_that_only_chunks_show_is_found(model: type[nn.Module], cause: str, cache: str | None) -> None:
    module = model().eval()
    (finding,) = mha_inspect.check(module, TOKENS, intent=Intent(cache=cache)).findings
    assert (finding.check, finding.sure) == ("cache", True)
    assert cause in finding.sentence
    # The first chunk and the one call agree: worked out by hand with the module itself.
    assert torch.allclose(module(TOKENS)[:, :3], module(TOKENS[:, :3]), atol=1e-5)
    assert int(re.findall(r"from position (\d+) on", finding.sentence)[0]) >= 3


class Counted(Right):
    """Takes a position, and keeps nothing."""

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        return super().forward(x + start_pos)


def test_an_argument_that_nobody_can_cut_accuses_nobody() -> None:
    module, args = llama(LlamaTable)
    reasons = {skipped.check: skipped.reason for skipped in mha_inspect.check(module, *args).left_out}
    assert "table has a size for each token" in reasons["cache"]
    with pytest.raises(InputError, match=r"cache was declared and could not run: table has a size .*--skip cache"):
        mha_inspect.check(module, *args, intent=Intent(cache="start_pos"))
    (finding,) = mha_inspect.check(Counted(), torch.randn(B, N, E), intent=Intent(cache="start_pos")).findings
    assert (finding.check, finding.sure) == ("cache", True)


def test_the_keys_of_a_static_cache_are_aligned_with_what_was_written() -> None:
    module, (tokens, positions) = gpt_fast()
    late = positions + 3  # the first three slots are empty, and masked for nobody: the past is visible
    facts = {fact.name: fact.sentence for fact in mha_inspect.check(module, tokens, late).facts}
    assert facts["who sees whom"] == "causal; 7 keys are masked out for every query"


def test_three_mistakes_are_three_findings() -> None:
    """No scale, the mask a diagonal late, and heads merged without transposing."""
    module = Right(
        attend=lambda module, q, k, v: (q @ k.mT).masked_fill(future(torch.empty(N, N), 2), -math.inf).softmax(-1) @ v,
        join=lambda module, context: context.reshape(B, N, E),
    )
    report = mha_inspect.check(module, torch.randn(B, N, E))
    assert [(finding.check, finding.sure) for finding in report.findings] == [
        ("heads", True),
        ("causal", False),
        ("scale", False),
    ]
    # Nothing that relies on one token per position has passed.
    relies = {"rotary", "mixing", "causal", "window", "padding", "cache"}
    assert relies.isdisjoint({passed.check for passed in report.passed})
    declared = mha_inspect.check(module, torch.randn(B, N, E), intent=Intent(causal=True))
    assert [finding.check for finding in declared.findings if finding.sure] == ["heads", "causal"]


class FourD(Right):
    """Takes a mask of `batch 1 1 key` only."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is None or attention_mask.dim() == 4, "no mask of these axes is taken"
        self.hidden = torch.zeros(()) if attention_mask is None else 1.0 - attention_mask.to(x.dtype)
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores + self.hidden * -1e9


class NoMask(Right):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is None, "no mask is taken"
        return super().forward(x)


def test_a_mask_is_given_in_the_form_that_the_forward_takes() -> None:
    x, intent = torch.randn(B, N, E), Intent(padding="attention_mask", padding_true="keep")
    assert "padding" in {passed.check for passed in mha_inspect.check(FourD(), x, intent=intent).passed}
    with pytest.raises(InputError, match=r"padding was declared and could not run.*no mask is taken"):
        mha_inspect.check(NoMask(), x, intent=intent)

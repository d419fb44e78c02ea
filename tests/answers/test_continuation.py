"""The reason that is said where a call that continues from a cache differs from one call over all tokens.

Each fault is planted in one place of a right module, so the first thing that differs is known.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves: `batch heads position head_dim`."""
    half = x.shape[-1] // 2
    angles = torch.outer(positions.float(), 50.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Decoder(nn.Module):
    """Attention written out, with shared key heads, a rotation, a bias by distance and a cache; `fault` breaks it."""

    def __init__(self, fault: str = "", *, heads: int = 6, shared: int = 3, head_dim: int = 4, most: int = 0) -> None:
        super().__init__()
        self.fault, self.heads, self.shared, self.head_dim, self.most = fault, heads, shared, head_dim, most
        self.q = nn.Linear(20, heads * head_dim)
        self.k, self.v = (nn.Linear(20, shared * head_dim) for _ in range(2))
        self.o, self.places = nn.Linear(heads * head_dim, 20), nn.Embedding(64, 20)

    def forward(self, x: Tensor, past_kv: Any = None) -> tuple[Tensor, Any]:
        count, kept = x.shape[1], 0 if past_kv is None else past_kv[0].shape[2]
        seen = kept if past_kv is None or len(past_kv) < 3 else past_kv[2]
        start = 0 if self.fault == "restart" else kept if self.fault == "kept" else seen
        at = torch.arange(start, start + count)
        x = x + self.places(torch.arange(count) + (0 if self.fault == "embedding" else seen))
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = turned(q, at)
        k = turned(k, at) if self.fault != "twice" else k
        new = k, v
        if past_kv is not None and self.fault != "lost":
            order = slice(None, None, -1 if self.fault == "turned" else 1)
            k = torch.cat((past_kv[0], k), 2)
            v = torch.cat((past_kv[1], v)[order], 2)
        cache = (k, v, seen + count)
        if self.most and self.fault != "whole":
            cache = (k[:, :, -self.most :], v[:, :, -self.most :], seen + count)
        if self.fault == "twice":  # the cache keeps rotated keys, and all keys are rotated
            k = turned(k, torch.arange(k.shape[2]))
            cache = (k, *cache[1:])
        if self.fault == "swapped":
            cache = (v, k, seen + count)
        if self.fault == "lost":
            cache = (*new, seen + count)
        each = self.heads // self.shared
        scores = q @ k.repeat_interleave(each, 1).mT / math.sqrt(self.head_dim)
        if self.fault == "scaled":
            scores = scores * (1 + 0.5 * (past_kv is not None))
        rows, keys = torch.arange(count)[:, None] + (seen), torch.arange(k.shape[2]) + seen + count - k.shape[2]
        distance = rows - keys
        if self.fault == "bias":
            distance = distance - seen
        slopes = 0.2 * torch.arange(1.0, 1 + self.heads)[:, None, None]
        scores = scores - slopes * distance.abs()
        hidden = keys > rows
        if self.fault == "top left":
            hidden = torch.ones(count, k.shape[2], dtype=torch.bool).triu(1)
        if self.fault == "open" and past_kv is not None:
            hidden = torch.zeros(count, k.shape[2], dtype=torch.bool)
        if self.most:
            hidden = hidden | (rows - keys >= self.most)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        context = weights @ v.repeat_interleave(each, 1)
        return self.o(context.transpose(1, 2).flatten(2)), cache


REASONS = {
    "top left": "The mask is aligned top left: with 5 queries and 11 keys, position 6 sees key 0 alone.",
    "bias": "The keys are equal, and the bias differs: position 6 adds 0 to the score of key 0, as for a query at "
    "position 0; expected -7.2.",
    "restart": "Position 6 is rotated as position 0: positions restart at 0.",
    "embedding": "Position 6 gets the embedding of position 0: positions restart at 0.",
    "twice": "The cached keys of positions 1–5 are rotated a second time: that of position 1 has the angle of "
    "position 2.",
    "turned": "Key 0 of this call is that of token 0, and value 0 that of token 6.",
    "lost": "This call has 5 keys for 5 tokens: the keys of the 6 earlier tokens are missing.",
    "scaled": "The scores are scaled by 0.75, and in one call by 0.5.",
    "open": "Position 6 sees future positions 7–10, which are masked out in one call.",
    "swapped": "The cached values are the keys of the earlier calls.",
}


def report_of(module: nn.Module, intent: Intent | None = None, *, batch: int = 2, length: int = 12) -> CheckReport:
    torch.manual_seed(3)
    return check(Subject(module.eval(), (torch.randn(batch, length, 20),), {}), intent or Intent())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("fault", REASONS)
def test_the_first_thing_that_differs_is_the_reason(fault: str, batch: int) -> None:
    findings = [
        f for f in report_of(Decoder(fault), Intent(cache="past_kv"), batch=batch).findings if f.check == "cache"
    ]
    assert [REASONS[fault] in finding.sentence for finding in findings] == [True], findings


def test_rows_that_a_cache_keeps_are_not_the_tokens_so_far() -> None:
    (finding,) = report_of(Decoder("kept", most=6), Intent(causal=True, window=6, cache="past_kv")).findings
    assert (
        "Position 11 is rotated as position 6: positions count the 6 rows that the cache keeps, instead of all 11 "
        "tokens so far." in finding.sentence
    )
    assert finding.fix.startswith("Count all tokens so far")


@pytest.mark.parametrize("most", [0, 6])
@pytest.mark.parametrize("sizes", [(6, 3), (4, 4), (2, 1)])
def test_a_right_cache_is_not_accused(most: int, sizes: tuple[int, int]) -> None:
    module = Decoder(heads=sizes[0], shared=sizes[1], most=most)
    assert report_of(module, Intent(cache="past_kv")).findings == ()


@pytest.mark.parametrize("fault", ["restart", "embedding", "twice", "bias", "scaled"])
def test_decode_says_the_reason_in_the_same_words(fault: str) -> None:
    torch.manual_seed(3)
    subject = Subject(Decoder(fault).eval(), (torch.randn(2, 12, 20),), {})
    proof = decoded(subject, Show(), 6, cache="past_kv")[0].decode
    assert proof is not None
    assert proof.verdict == "differs"
    assert proof.reason == REASONS[fault]


def test_decode_of_a_right_cache_has_no_reason() -> None:
    proof = decoded(Subject(Decoder().eval(), (torch.randn(2, 12, 20),), {}), Show(), 6)[0].decode
    assert proof is not None
    assert (proof.verdict, proof.reason, proof.fix) == ("same", "", "")


class FusedTopLeft(nn.Module):
    """Two layers with torch's kernel, whose is_causal is aligned top left; `right` leaves it out for one query."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.qkv, self.out = (nn.ModuleList(nn.Linear(20, size) for _ in range(2)) for size in (60, 20))

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        kept = []
        for place, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (each.unflatten(-1, (5, 4)).transpose(1, 2) for each in qkv(x).chunk(3, -1))
            if cache is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(cache[place], (k, v), strict=True))
            kept.append((k, v))
            rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            mask = {"attn_mask": torch.arange(k.shape[2]) <= rows} if self.right else {"is_causal": True}
            y = nn.functional.scaled_dot_product_attention(q, k, v, **mask)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x, kept


def test_the_flag_of_a_kernel_is_aligned_top_left() -> None:
    (finding,) = report_of(FusedTopLeft(right=False), Intent(cache="cache")).findings
    assert "The mask is aligned top left: with 5 queries and 11 keys, position 6 sees key 0 alone." in finding.sentence
    assert report_of(FusedTopLeft(right=True), Intent(cache="cache")).findings == ()
    proof = decoded(Subject(FusedTopLeft(right=False).eval(), (torch.randn(2, 9, 20),), {}), Show(), 2)[0].decode
    assert proof is not None
    assert proof.reason == "The mask is aligned top left: with 1 query and 8 keys, position 7 sees key 0 alone."


class Restarts(nn.Module):
    """A causal attention behind a convolution over past tokens, whose past a cache does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.attention = nn.Conv1d(20, 20, 3), FusedTopLeft(right=True)

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        return self.attention(x + self.mix(nn.functional.pad(x.mT, (2, 0))).mT, cache)


def test_what_differs_before_the_attention_is_said() -> None:
    (finding,) = report_of(Restarts(), Intent(cache="cache")).findings
    assert (
        "The input of attention 1 differs at position 6: an operation before it makes the difference"
        in finding.sentence
    )


class Faulty(nn.Module):
    """A causal attention with a cache; the calls that continue from it have a fault."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(20, 20) for _ in range(4))
        with torch.no_grad():
            self.q.weight.mul_(6)  # a rounded key then changes its weight by more than rounding does
        self.fault = fault

    def forward(self, x: Tensor, past_kv: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (f(x).unflatten(-1, (4, 5)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past_kv is not None:
            old_k, old_v = past_kv
            if self.fault == "keys doubled":
                old_k = 2 * old_k
            if self.fault == "heads moved":
                old_k = old_k.roll(1, 1)
            if self.fault == "values halved":
                old_v = 0.5 * old_v
            if self.fault == "queries halved":
                q = 0.5 * q
            if self.fault == "rounded":
                old_k = old_k.bfloat16().float()
            k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
            if self.fault == "newest dropped":
                k, v = k[:, :, :-1], v[:, :, :-1]
        rows, keys = q.shape[2], k.shape[2]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        weights = (q @ k.mT / math.sqrt(5)).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), (k, v)


TRIED = {
    "keys doubled": "k_heads in one call is 0.5 times k_heads in this call",
    "heads moved": "The heads of k_heads are in another order: in one call they are 1 2 3 0 of those in this call.",
    "values halved": "v_heads in one call is 2 times v_heads in this call",
    "queries halved": "The scores are scaled by 0.2236, and in one call by 0.4472.",
    "rounded": "k_heads in this call is rounded to bfloat16",
    "newest dropped": "the key of position 10 itself is missing",
}


@pytest.mark.parametrize("fault", TRIED)
def test_what_was_tried_is_told_of_cached_calls(fault: str) -> None:
    (finding,) = report_of(Faulty(fault), Intent(cache="past_kv")).findings
    assert TRIED[fault] in finding.sentence
    subject = Subject(Faulty(fault).eval(), (torch.randn(2, 12, 20),), {})
    proof = decoded(subject, Show(), 6, cache="past_kv")[0].decode
    assert proof is not None
    assert proof.verdict == "differs"
    assert TRIED[fault].replace("position 10", "position 6") in proof.reason


def test_a_right_cache_of_the_same_module_has_no_finding() -> None:
    assert not report_of(Faulty(), Intent(cache="past_kv")).findings

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
    """Attention written out, with shared key heads, a rotation, a bias by distance and a cache.

    The cache has keys and values, at most `most` of them where it is not 0, and the number of tokens so far.
    """

    def __init__(self, *, heads: int = 6, shared: int = 3, head_dim: int = 4, most: int = 0) -> None:
        super().__init__()
        self.heads, self.shared, self.head_dim, self.most = heads, shared, head_dim, most
        self.q = nn.Linear(20, heads * head_dim)
        self.k, self.v = (nn.Linear(20, shared * head_dim) for _ in range(2))
        self.o, self.places = nn.Linear(heads * head_dim, 20), nn.Embedding(64, 20)

    def embedded(self, x: Tensor, seen: int) -> Tensor:
        return x + self.places(torch.arange(seen, seen + x.shape[1]))

    def first_angle(self, rows: int, seen: int) -> int:
        """Return the position of the first new token, after the rows of the cache and the tokens so far."""
        return seen

    def turned_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return turned(k, positions)

    def joined(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if past is None:
            return k, v
        return torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept = slice(-self.most if self.most else None, None)
        return k[:, :, kept], v[:, :, kept]

    def scale(self, past: Any) -> float:
        return 1 / math.sqrt(self.head_dim)

    def distance(self, rows: Tensor, keys: Tensor) -> Tensor:
        return rows - keys

    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor:
        late = keys > rows
        return late | (rows - keys >= self.most) if self.most else late

    def forward(self, x: Tensor, past_kv: Any = None) -> tuple[Tensor, Any]:
        count = x.shape[1]
        rows, seen = (0, 0) if past_kv is None else (past_kv[0].shape[2], past_kv[2])
        x = self.embedded(x, seen)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        first = self.first_angle(rows, seen)
        positions = torch.arange(first, first + count)
        k, v = self.joined(past_kv, self.turned_key(k, positions), v)
        repeats = self.heads // self.shared
        scores = turned(q, positions) @ k.repeat_interleave(repeats, 1).mT * self.scale(past_kv)
        places = torch.arange(seen, seen + count)[:, None]
        of_keys = torch.arange(k.shape[2]) + seen + count - k.shape[2]
        slopes = 0.2 * torch.arange(1.0, 1 + self.heads)[:, None, None]
        scores = scores - slopes * self.distance(places, of_keys).abs()
        weights = scores.masked_fill(self.hidden(places, of_keys), -torch.inf).softmax(-1)
        context = weights @ v.repeat_interleave(repeats, 1)
        return self.o(context.transpose(1, 2).flatten(2)), (*self.cached(k, v), seen + count)


class TopLeft(Decoder):
    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(len(rows), len(keys), dtype=torch.bool).triu(1)


class BiasFromZero(Decoder):
    def distance(self, rows: Tensor, keys: Tensor) -> Tensor:
        return rows - rows[0] - keys


class RotationRestarts(Decoder):
    def first_angle(self, rows: int, seen: int) -> int:
        return 0


class RotationCountsRows(Decoder):
    def first_angle(self, rows: int, seen: int) -> int:
        return rows


class EmbeddingRestarts(Decoder):
    def embedded(self, x: Tensor, seen: int) -> Tensor:
        return super().embedded(x, 0)


class RotatedTwice(Decoder):
    """Keeps rotated keys, and rotates all keys of a call."""

    def turned_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return k

    def joined(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().joined(past, k, v)
        return turned(k, torch.arange(k.shape[2])), v


class ValuesFirst(Decoder):
    """Joins the values in the other order."""

    def joined(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if past is None:
            return k, v
        return torch.cat((past[0], k), 2), torch.cat((v, past[1]), 2)


class CacheLost(Decoder):
    def joined(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class OtherScale(Decoder):
    def scale(self, past: Any) -> float:
        return super().scale(past) * (1 if past is None else 1.5)


class Open(Decoder):
    """Masks the first call alone."""

    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor:
        return super().hidden(rows, keys) & (rows[0] == 0)


class Swapped(Decoder):
    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return v, k


REASONS = {
    TopLeft: "The mask is aligned top left: with 5 queries and 11 keys, position 6 sees key 0 alone.",
    BiasFromZero: "The keys are equal, and the bias differs: position 6 adds 0 to the score of key 0, as for a query "
    "at position 0; expected -7.2.",
    RotationRestarts: "Position 6 is rotated as position 0: positions restart at 0.",
    EmbeddingRestarts: "Position 6 gets the embedding of position 0: positions restart at 0.",
    RotatedTwice: "The cached keys of positions 1–5 are rotated a second time: that of position 1 has the angle of "
    "position 2.",
    ValuesFirst: "Key 0 of this call is that of token 0, and value 0 that of token 6.",
    CacheLost: "This call has 5 keys for 5 tokens: the keys of the 6 earlier tokens are missing.",
    OtherScale: "The scores are scaled by 0.75, and in one call by 0.5.",
    Open: "Position 6 sees future positions 7–10, which are masked out in one call.",
    Swapped: "The cached values are the keys of the earlier calls.",
}


def report_of(module: nn.Module, intent: Intent | None = None, *, batch: int = 2, length: int = 12) -> CheckReport:
    torch.manual_seed(3)
    return check(Subject(module.eval(), (torch.randn(batch, length, 20),), {}), intent or Intent())


@pytest.mark.parametrize("kind", REASONS)
def test_the_first_thing_that_differs_is_the_reason(kind: type[Decoder]) -> None:
    findings = report_of(kind(), Intent(cache="past_kv")).findings
    of_cache = [finding.sentence for finding in findings if finding.check == "cache"]
    assert len(of_cache) == 1
    assert REASONS[kind] in of_cache[0]


def test_rows_that_a_cache_keeps_are_not_the_tokens_so_far() -> None:
    (finding,) = report_of(RotationCountsRows(most=6), Intent(causal=True, window=6, cache="past_kv")).findings
    assert (
        "Position 11 is rotated as position 6: positions count the 6 rows that the cache keeps, instead of all 11 "
        "tokens so far." in finding.sentence
    )
    assert finding.fix.startswith("Count all tokens so far")


@pytest.mark.parametrize(("most", "heads", "shared"), [(0, 6, 3), (6, 4, 4)])
def test_a_right_cache_is_not_accused(most: int, heads: int, shared: int) -> None:
    module = Decoder(heads=heads, shared=shared, most=most)
    assert report_of(module, Intent(cache="past_kv")).findings == ()


@pytest.mark.parametrize(("kind", "verdict"), [(BiasFromZero, "differs"), (Decoder, "same")])
def test_decode_says_the_reason_in_the_same_words(kind: type[Decoder], verdict: str) -> None:
    torch.manual_seed(3)
    subject = Subject(kind().eval(), (torch.randn(2, 12, 20),), {})
    proof = decoded(subject, Show(), 6, cache="past_kv")[0].decode
    assert proof is not None
    assert proof.verdict == verdict
    assert proof.reason == REASONS.get(kind, "")


class FusedTopLeft(nn.Module):
    """Two layers with torch's kernel, whose is_causal is aligned top left; `right` leaves it out for one query."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.qkv, self.out = (nn.ModuleList(nn.Linear(20, size) for _ in range(2)) for size in (60, 20))

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        kept = []
        for place, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (part.unflatten(-1, (5, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
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


class Changing(nn.Module):
    """A causal attention with a cache; the calls that continue from it change something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(20, 20) for _ in range(4))

    def past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def read(self, joined: Tensor) -> Tensor:
        return joined

    def forward(self, x: Tensor, past_kv: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (f(x).unflatten(-1, (4, 5)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past_kv is not None:
            earlier_k, earlier_v = self.past(*past_kv)
            k, v = self.read(torch.cat([earlier_k, k], 2)), self.read(torch.cat([earlier_v, v], 2))
        rows, keys = q.shape[2], k.shape[2]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        weights = (q @ k.mT / math.sqrt(5)).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), (k, v)


class KeysDoubled(Changing):
    def past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * k, v


class HeadsMoved(Changing):
    def past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.roll(1, 1), v


class NewestDropped(Changing):
    def read(self, joined: Tensor) -> Tensor:
        return joined[:, :, :-1]


TRIED = {
    KeysDoubled: "k_heads in one call is 0.5 times k_heads in this call",
    HeadsMoved: "The heads of k_heads are in another order: in one call they are 1 2 3 0 of those in this call.",
    NewestDropped: "the key of position 10 itself is missing",
}


@pytest.mark.parametrize("kind", TRIED)
def test_what_was_tried_is_told_of_cached_calls(kind: type[Changing]) -> None:
    (finding,) = report_of(kind(), Intent(cache="past_kv")).findings
    assert TRIED[kind] in finding.sentence

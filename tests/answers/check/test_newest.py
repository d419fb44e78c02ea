"""A call whose newest token has no key, or a cache without it, is suspected; caches that drop the oldest are not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mha_inspect import check, trace

WIDTH, H, D, N = 32, 4, 8, 9
Past = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """An attention with a cache, that another code masks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def used(self, each: Tensor, cached: bool) -> Tensor:
        return each

    def kept(self, each: Tensor) -> Tensor:
        return each

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        k, v = (self.used(each, past is not None) for each in (k, v))
        weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), (self.kept(k), self.kept(v))


class DropsAlways(Attention):
    def used(self, each: Tensor, cached: bool) -> Tensor:
        return each[:, :, :-1]


class DropsInCachedCalls(Attention):
    def used(self, each: Tensor, cached: bool) -> Tensor:
        return each[:, :, :-1] if cached else each


class DropsInTheCache(Attention):
    def kept(self, each: Tensor) -> Tensor:
        return each[:, :, :-1]


class Window(Attention):
    """Right: the oldest tokens are outside the window."""

    def used(self, each: Tensor, cached: bool) -> Tensor:
        return each[:, :, -5:] if cached else each

    def kept(self, each: Tensor) -> Tensor:
        return each[:, :, -4:]


class Sink(Attention):
    """Right: the first token and the last ones are kept."""

    def kept(self, each: Tensor) -> Tensor:
        return torch.cat([each[:, :, :1], each[:, :, -3:]], 2)


class Registers(Attention):
    """Right: learned keys are behind the tokens, and not in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        both = torch.cat([x, self.more.expand(len(x), -1, -1)], 1)
        q, k, v = (
            f(each).unflatten(-1, (H, D)).transpose(1, 2)
            for f, each in zip((self.q, self.k, self.v), (x, both, both), strict=True)
        )
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), (k[:, :, :-2], v[:, :, :-2])


class ZeroBehind(Attention):
    """Right: a key of zeros is behind the tokens, as torch's add_zero_attn appends one, and not in the cache."""

    def used(self, each: Tensor, cached: bool) -> Tensor:
        return functional.pad(each, (0, 0, 0, 1))

    def kept(self, each: Tensor) -> Tensor:
        return each[:, :, :-1]


class EmptySlots(ZeroBehind):
    """Right: a cache of a fixed size, of which the filled slots are returned."""

    def used(self, each: Tensor, cached: bool) -> Tensor:
        slots = each.new_zeros(*each.shape[:2], 16, each.shape[3])
        slots[:, :, : each.shape[2]] = each
        return slots

    def kept(self, each: Tensor) -> Tensor:
        return each[:, :, :N]


class BeforeItself(Attention):
    """Right: each token sees the tokens before it, and the first one a key of zeros."""

    def used(self, each: Tensor, cached: bool) -> Tensor:
        return functional.pad(each[:, :, :-1], (0, 0, 1, 0))


def given(length: int = N) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(0))


def cached(length: int = 5) -> Past:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, H, length, D, generator=generator), torch.randn(2, H, length, D, generator=generator)


def test_the_newest_of_one_call_has_no_key() -> None:
    (finding,) = check(DropsAlways(), given()).findings
    assert (finding.check, finding.sure) == ("cache", False)
    assert finding.sentence.startswith("The newest token 8 of the call has no key")


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_newest_of_a_call_with_a_cache_has_no_key(tokens: int) -> None:
    findings = [each for each in check(DropsInCachedCalls(), given(tokens), cached()).findings if each.check == "cache"]
    assert [each.sentence for each in findings] == [
        f"The newest token {tokens - 1} of the call has no key: it is projected, and cut off before the scores."
    ]
    traced = trace(DropsInCachedCalls(), given(tokens), cached())
    assert any("The newest token" in finding.sentence for finding in traced.findings)


def test_the_cache_that_is_returned_lacks_the_newest() -> None:
    (finding,) = check(DropsInTheCache(), given()).findings
    assert "it has all of its keys but key 8" in finding.sentence
    # The rows that are returned are those of the call, without the newest: torch says so.
    _, (keys, _) = DropsInTheCache()(given())
    assert keys.shape[2] == N - 1


@pytest.mark.parametrize("kind", [Attention, Window, Sink])
def test_right_caches_are_not_suspected(kind: type[Attention]) -> None:
    assert not check(kind(), given()).findings
    for tokens in (1, 3):
        assert not check(kind(), given(tokens), cached()).findings
        assert not trace(kind(), given(tokens), cached()).findings


@pytest.mark.parametrize("kind", [Registers, ZeroBehind, EmptySlots, BeforeItself])
def test_keys_behind_the_newest_are_not_taken_for_it(kind: type[Attention]) -> None:
    assert not [finding for finding in trace(kind(), given()).findings if finding.check == "cache"]

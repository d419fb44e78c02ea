"""A call whose newest token has no key, or a cache without it, is suspected; caches that drop the oldest are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check, trace

from ...corpus.planted import D, E, H, Right

N = 9
Past = tuple[Tensor, Tensor]


class Attention(Right):
    """An attention with a cache: `used` says which keys and values the scores get, `kept` which are returned."""

    def used(self, side: Tensor, is_cached: bool) -> Tensor:
        return side

    def kept(self, side: Tensor) -> Tensor:
        return side

    def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        q, k, v = self.heads(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        k, v = (self.used(side, past is not None) for side in (k, v))
        return self.o(self.join(self.attend(q, k, v))), (self.kept(k), self.kept(v))


class DropsAlways(Attention):
    def used(self, side: Tensor, is_cached: bool) -> Tensor:
        return side[:, :, :-1]


class DropsInCachedCalls(Attention):
    def used(self, side: Tensor, is_cached: bool) -> Tensor:
        return side[:, :, :-1] if is_cached else side


class DropsInTheCache(Attention):
    def kept(self, side: Tensor) -> Tensor:
        return side[:, :, :-1]


class Window(Attention):
    """Right: the oldest tokens are outside the window."""

    def used(self, side: Tensor, is_cached: bool) -> Tensor:
        return side[:, :, -5:] if is_cached else side

    def kept(self, side: Tensor) -> Tensor:
        return side[:, :, -4:]


class Sink(Attention):
    """Right: the first token and the last ones are kept."""

    def kept(self, side: Tensor) -> Tensor:
        return torch.cat([side[:, :, :1], side[:, :, -3:]], 2)


class Registers(Attention):
    """Right: learned keys are behind the tokens, and not in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(1, 2, E))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.cat([x, self.more.expand(len(x), -1, -1)], 1)
        return self.split(self.q(x)), self.split(self.k(both)), self.split(self.v(both))

    def kept(self, side: Tensor) -> Tensor:
        return side[:, :, :-2]


class EmptySlots(Attention):
    """Right: a cache of a fixed size, of which the filled slots are returned."""

    def used(self, side: Tensor, is_cached: bool) -> Tensor:
        slots = side.new_zeros(*side.shape[:2], 16, side.shape[3])
        slots[:, :, : side.shape[2]] = side
        return slots

    def kept(self, side: Tensor) -> Tensor:
        return side[:, :, :N]


def given(length: int = N) -> Tensor:
    return torch.randn(2, length, E, generator=torch.Generator().manual_seed(0))


def cached(length: int = 5) -> Past:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, H, length, D, generator=generator), torch.randn(2, H, length, D, generator=generator)


def test_the_newest_of_one_call_has_no_key() -> None:
    (finding,) = check(DropsAlways(), given()).findings
    assert (finding.check, finding.sure) == ("cache", False)
    assert finding.sentence.startswith("The newest token 8 of the call has no key")


@pytest.mark.parametrize("tokens", [3])
def test_the_newest_of_a_call_with_a_cache_has_no_key(tokens: int) -> None:
    findings = check(DropsInCachedCalls(), given(tokens), cached()).findings
    assert [finding.sentence for finding in findings if finding.check == "cache"] == [
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


@pytest.mark.parametrize("kind", [Window, Sink])
def test_right_caches_are_not_suspected(kind: type[Attention]) -> None:
    assert not check(kind(), given()).findings
    assert not check(kind(), given(1), cached()).findings
    assert not trace(kind(), given(3), cached()).findings


@pytest.mark.parametrize("kind", [Registers, EmptySlots])
def test_keys_behind_the_newest_are_not_taken_for_it(kind: type[Attention]) -> None:
    assert "cache" not in {finding.check for finding in trace(kind(), given()).findings}

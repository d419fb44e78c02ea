"""Who sees whom, and the kind of an attention: read off the weights of a run, whatever masked them, and no name.

Modules of each kind are in the corpus; here is what they leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.naming.visibility import is_causal, sees

from ..built import trace_module
from ..corpus.planted import E, H, Right, fused

BATCH, LENGTH = 2, 5
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()
LOW = float("-inf")
X = torch.randn(BATCH, LENGTH, E)
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def by_hand(masked: Callable[[Tensor], Tensor]) -> Right:
    return Right(mask=lambda m, scores: masked(scores))


def kinds(module: nn.Module, *args: Tensor, **kwargs: object) -> list[tuple[str, ...]]:
    with torch.no_grad():
        return [attention.kind for attention in trace_module(module.eval(), *args, **kwargs).attentions]


def test_sees_any_head_and_no_key_of_a_row_that_is_masked_whole() -> None:
    scores = torch.randn(BATCH, H, LENGTH, LENGTH).masked_fill(CAUSAL, LOW)
    scores[1, :, 2] = torch.finfo(scores.dtype).min
    seen = sees(scores.softmax(-1), scores)
    assert torch.equal(seen[0], ~CAUSAL)
    assert not seen[1, 2].any()
    assert torch.equal(seen[1, 3], ~CAUSAL[3])
    assert sees(scores.softmax(-1))[1, 2].all()
    assert not sees(torch.full((1, 1, 2, 2), torch.nan)).any()


@pytest.mark.parametrize(
    ("seen", "causal"),
    [
        (~CAUSAL, True),
        (~CAUSAL.T, False),
        (torch.ones(5, 5).bool(), False),
        (torch.ones(5, 5).tril().triu(-1).bool(), True),  # a window of two
        (torch.ones(5, 5).tril(-1).bool(), False),  # none sees itself
        ((torch.arange(5) < 1).expand(5, 5), False),  # padding
        (torch.ones(2, 5).tril(3).bool(), True),  # the last queries of more keys
        (torch.ones(2, 5).tril(2).bool(), False),
        (torch.ones(1, 5).bool(), False),
    ],
)
def test_is_causal(seen: Tensor, causal: bool) -> None:
    assert is_causal(seen) is causal


@pytest.mark.parametrize(("ahead", "causal"), [(3, True), (4, False)])
def test_fewer_queries_than_keys_end_together(ahead: int, causal: bool) -> None:
    """As with a cache: the last query of 2 is at the last key of 5."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q[:, :, -2:] @ k.mT
        return scores.masked_fill(torch.ones(2, 5).triu(ahead + 1).bool(), LOW).softmax(-1) @ v

    (kind,) = kinds(Right(attend=attend), X)
    assert ("causal" in kind) is causal


def test_self_is_one_tensor_and_cross_is_two() -> None:
    layer, y = nn.MultiheadAttention(E, H, batch_first=True), torch.randn(BATCH, LENGTH, E)
    assert kinds(layer, X, X, X) == [("self",)]
    assert kinds(layer, X, y, y) == [("cross",)]
    assert kinds(layer, X, X, X, attn_mask=CAUSAL) == [("self", "causal")]
    assert kinds(layer, X, X, X, attn_mask=CAUSAL.T) == [("self",)]
    assert kinds(nn.TransformerDecoderLayer(E, H, 7, batch_first=True), X, y) == [("self",), ("cross",)]


def test_one_mask_that_two_layers_read_the_other_way_round() -> None:
    first, second = by_hand(lambda s: s.masked_fill(CAUSAL, LOW)), by_hand(lambda s: torch.where(CAUSAL, s, LOW))
    assert kinds(nn.Sequential(first, second), X) == [("self", "causal"), ("self",)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_fused_kernel_is_causal_as_it_was_asked_to_be(device: str, causal: bool) -> None:
    (kind,) = kinds(Right(**fused(is_causal=causal)).to(device), X.to(device))
    assert ("causal" in kind) is causal


def test_a_mask_that_was_written_after_the_block_says_nothing() -> None:
    layer, mask = nn.MultiheadAttention(E, H, batch_first=True).eval(), torch.ones(5, 5).tril(-1).bool()
    with torch.no_grad(), mha_inspect.recording() as seen:
        layer(X, X, X, attn_mask=mask)
    mask.copy_(CAUSAL)
    assert [attention.kind for attention in seen.trace.attentions] == [("self",)]


MASKED = torch.zeros(BATCH, 1, LENGTH, LENGTH)
MASKED[1, :, 2] = MASKED[0, :, 0] = 1


@pytest.mark.parametrize("low", [LOW, torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("of_kernel", [True, False])
def test_queries_without_a_key_are_counted_however_they_were_masked(low: float, of_kernel: bool) -> None:
    mask = torch.zeros_like(MASKED).masked_fill(MASKED.bool(), low)
    make = partial(Right, **fused(attn_mask=mask)) if of_kernel else partial(by_hand, lambda s: s + mask)
    with torch.no_grad():
        notes = " ".join(trace_module(make().eval(), X).notes)
    assert "2 queries have every key masked out (first: query 0 of batch item 0)" in notes

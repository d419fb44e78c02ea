"""Who sees whom, and the kind of an attention: read off the weights of a run, whatever masked them, and no name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mha_inspect
from mha_inspect.naming.visibility import Visibility, is_causal, sees, visibility
from mha_inspect.running.subject import Subject

from ..built import trace_module

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 5, 12
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()
LOW = float("-inf")
X = torch.randn(BATCH, LENGTH, WIDTH)


class Attends(nn.Module):
    """Three heads over `batch seq 12`; `attend` makes the contexts of `batch heads seq 4`."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, seq_first: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend, self.seq_first = attend, seq_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.seq_first else x
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        output = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return output.transpose(0, 1) if self.seq_first else output


def by_hand(masked: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: masked(q @ k.mT).softmax(-1) @ v


def fused(**settings: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **settings)


def of(module: nn.Module, x: Tensor = X, *, keep: bool = False) -> Visibility | None:
    with torch.no_grad():
        run = Subject(module.eval(), (x,), {}).recorded(keep=keep)
    ((attention, names),) = run.attentions
    return visibility(run.graph, attention, names)


def kinds(module: nn.Module, *args: Tensor, **kwargs: object) -> list[tuple[str, ...]]:
    with torch.no_grad():
        return [attention.kind for attention in trace_module(module.eval(), *args, **kwargs).attentions]


def test_sees_any_head_and_no_key_of_a_row_that_is_masked_whole() -> None:
    scores = torch.randn(BATCH, HEADS, LENGTH, LENGTH).masked_fill(CAUSAL, LOW)
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


def by_positions(scores: Tensor) -> Tensor:
    place = torch.arange(LENGTH)
    return torch.where(place[None, :] <= place[:, None], scores, torch.finfo(scores.dtype).min)


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k @ q.mT).masked_fill(CAUSAL.T, LOW).softmax(-2)
    return weights.mT @ v


CAUSAL_WAYS = {
    "filled": by_hand(lambda s: s.masked_fill(CAUSAL, LOW)),
    "where": by_hand(lambda s: torch.where(~CAUSAL, s, torch.tensor(-1e9))),
    "added, as low as BERT's masks": by_hand(lambda s: s + torch.zeros(5, 5).masked_fill(CAUSAL, -1e4)),
    "from positions": by_hand(by_positions),
    "keys first": keys_first,
    "of the fused kernel": fused(is_causal=True),
    "a bool given to the fused kernel": fused(attn_mask=~CAUSAL),
    "exponentials by hand": lambda q, k, v: (lambda e: (e / e.sum(-1, keepdim=True)) @ v)(
        (q @ k.mT).masked_fill(CAUSAL, LOW).exp()
    ),
    "sigmoid": lambda q, k, v: (q @ k.mT).masked_fill(CAUSAL, LOW).sigmoid() @ v,
}


@pytest.mark.parametrize(("name", "seq_first"), [*((name, False) for name in CAUSAL_WAYS), ("filled", True)])
def test_causal_is_told_wherever_the_weights_show_it(name: str, seq_first: bool) -> None:
    module, x = Attends(CAUSAL_WAYS[name], seq_first=seq_first), X.transpose(0, 1) if seq_first else X
    visible = of(module, x)
    assert visible is not None
    assert visible.seen is not None
    assert torch.equal(visible.seen, ~CAUSAL)
    assert kinds(module, x) == [("self", "causal")]


PADDED = torch.arange(LENGTH) > 2
OTHER_MASKS = {
    "nothing": torch.zeros(5, 5),
    "padding": torch.zeros(5, 5).masked_fill(PADDED, LOW),
    "a window": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(2).bool() | torch.ones(5, 5).tril(-2).bool(), LOW),
    "the past": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).tril(-1).bool(), LOW),
    "everything": torch.full((5, 5), LOW),
    "a small bias": torch.ones(5, 5).triu(1) * -3.0,
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_any_other_mask_is_not_causal(name: str) -> None:
    assert kinds(Attends(by_hand(lambda s: s + OTHER_MASKS[name])), X) == [("self",)]


def test_a_causal_mask_may_be_padded_too() -> None:
    module = Attends(by_hand(lambda s: s.masked_fill(CAUSAL, LOW).masked_fill(PADDED, LOW)))
    assert kinds(module, X) == [("self", "causal")]


def test_a_mask_from_a_buffer_and_from_an_argument() -> None:
    module = Attends(by_hand(lambda s: s.masked_fill(module.later, LOW)))
    module.register_buffer("later", CAUSAL)
    assert kinds(module, X) == [("self", "causal")]
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    assert kinds(layer, X, X, X, attn_mask=CAUSAL) == [("self", "causal")]
    assert kinds(layer, X, X, X, attn_mask=CAUSAL.T) == [("self",)]


@pytest.mark.parametrize(("ahead", "causal"), [(3, True), (4, False)])
def test_fewer_queries_than_keys_end_together(ahead: int, causal: bool) -> None:
    """As with a cache: the last query of 2 is at the last key of 5."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q[:, :, -2:] @ k.mT
        return scores.masked_fill(torch.ones(2, 5).triu(ahead + 1).bool(), LOW).softmax(-1) @ v

    (kind,) = kinds(Attends(attend), X)
    assert ("causal" in kind) is causal


def test_self_is_one_tensor_and_cross_is_two() -> None:
    layer, y = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(BATCH, LENGTH, WIDTH)
    assert kinds(layer, X, X, X) == [("self",)]
    assert kinds(layer, X, y, y) == [("cross",)]
    assert kinds(nn.TransformerDecoderLayer(WIDTH, HEADS, 7, batch_first=True), X, y) == [("self",), ("cross",)]


def test_one_mask_that_two_layers_read_the_other_way_round() -> None:
    first = Attends(by_hand(lambda s: s.masked_fill(CAUSAL, LOW)))
    second = Attends(by_hand(lambda s: torch.where(CAUSAL, s, LOW)))
    assert kinds(nn.Sequential(first, second), X) == [("self", "causal"), ("self",)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_fused_kernel_is_causal_as_it_was_asked_to_be(device: str, causal: bool) -> None:
    (kind,) = kinds(Attends(fused(is_causal=causal)).to(device), X.to(device))
    assert ("causal" in kind) is causal


def test_a_mask_that_was_written_after_the_block_says_nothing() -> None:
    layer, mask = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), torch.ones(5, 5).tril(-1).bool()
    with torch.no_grad(), mha_inspect.recording() as seen:
        layer(X, X, X, attn_mask=mask)
    mask.copy_(CAUSAL)
    assert [attention.kind for attention in seen.trace.attentions] == [("self",)]


@pytest.mark.parametrize(
    ("keep", "low", "kernel"),
    [(False, LOW, False), (True, LOW, True), (False, torch.finfo(torch.float32).min, True), (True, -1e9, False)],
)
def test_queries_without_a_key_are_told_however_they_were_masked(keep: bool, low: float, kernel: bool) -> None:
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH)
    mask[1, :, 2] = mask[0, :, 0] = low
    visible = of(Attends(fused(attn_mask=mask) if kernel else by_hand(lambda s: s + mask)), keep=keep)
    assert visible is not None
    assert visible.blind == ((0, 0), (1, 2))
    assert visible.seen is not None
    assert visible.seen.all()

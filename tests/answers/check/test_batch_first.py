"""Items of a batch that affect each other, and padding masks that are the wrong way round, are named as such."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check
from mha_inspect.reports.check import Finding

VOCABULARY, WIDTH = 30, 32


class Model(nn.Module):
    """A pooled classifier of tokens: `batch sequence`."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.encoder(self.embed(tokens))
        return self.head(y.mean(1))


class RightPadded(Model):
    """The batch is second inside, and a mask says which keys are padding."""

    def padding(self, tokens: Tensor) -> Tensor:
        return tokens == 0

    def forward(self, input_ids: Tensor) -> Tensor:
        y = self.encoder(self.embed(input_ids).transpose(0, 1), src_key_padding_mask=self.padding(input_ids))
        return self.head(y.mean(0))


class Padded(RightPadded):
    def padding(self, tokens: Tensor) -> Tensor:
        return tokens != 0


def findings(module: nn.Module, given: Tensor, name: str) -> list[Finding]:
    return [finding for finding in check(module, given).findings if finding.check == name]


def tokens(rows: int = 4, length: int = 9) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [4, 9])
def test_a_layer_that_attends_over_the_batch_is_named(rows: int) -> None:
    (finding,) = findings(Model(), tokens(rows), "batch")
    assert finding.sure
    assert finding.module == "encoder.self_attn"
    assert f"batch_first=False: it takes dimension 0 of tokens, {rows} items, as positions" in finding.sentence
    assert "batch_first=True" in finding.fix
    # The fix, run: no item changes another.
    assert not findings(Model(batch_first=True), tokens(rows), "batch")


def padded_tokens() -> Tensor:
    given = tokens(3, 8)
    given[0, 5:] = given[1, 6:] = given[2, 7:] = 0
    return given


def test_a_mask_that_leaves_the_padding_alone_is_inverted() -> None:
    (finding,) = findings(Padded(), padded_tokens(), "masking")
    assert "the visible keys are exactly the tokens with id 0, the padding_idx of embed" in finding.sentence
    assert "input_ids == 0" in finding.fix
    assert not findings(RightPadded(), padded_tokens(), "masking")
    assert not findings(RightPadded(), tokens(3, 8), "masking")


class InvertedByHand(nn.Module):
    """The padding mask is inverted; a second mask may hide the first token, and then inverting is not enough."""

    def __init__(self, *, hides_first: bool) -> None:
        super().__init__()
        self.hides_first = hides_first
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.q(x), self.k(x), self.v(x)
        hidden = (tokens != 0)[:, None]
        if self.hides_first:
            hidden = hidden | (torch.arange(tokens.shape[1]) == 0)
        return (q @ k.mT / WIDTH**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def test_an_inversion_that_does_not_pass_is_not_printed() -> None:
    (untried,) = findings(InvertedByHand(hides_first=True), padded_tokens(), "masking")
    assert "The padding mask is inverted" in untried.sentence
    assert untried.fix == ""
    (tried,) = findings(InvertedByHand(hides_first=False), padded_tokens(), "masking")
    assert tried.fix == "Invert the mask where it is passed."
    assert "With the mask inverted, every query of these items sees the real tokens alone." in tried.evidence


class ByHand(nn.Module):
    """Attention over the first axis, without a setting that says which one the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).transpose(0, 1) for f in (self.q, self.k, self.v))
        return ((q @ k.mT / WIDTH**0.5).softmax(-1) @ v).transpose(0, 1)


class Fixed(ByHand):
    """As the fix says."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Pooled(nn.Module):
    def __init__(self, attention: ByHand, *, mixes: bool = False) -> None:
        super().__init__()
        self.attention, self.head, self.mixes = attention, nn.Linear(WIDTH, 8), mixes

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        return self.head((y + y.mean(0) if self.mixes else y).mean(1))


def test_a_transposition_is_printed_only_if_it_passes() -> None:
    x = torch.randn(4, 9, WIDTH, generator=torch.Generator().manual_seed(0))
    (finding,) = findings(Pooled(ByHand()), x, "batch")
    assert finding.fix == "Use transpose(0, 1) before and after the attention."
    (mixed,) = findings(Pooled(ByHand(), mixes=True), x, "batch")
    assert mixed.fix == ""
    # What is printed, run by torch: no item changes another one.
    fixed, changed = Pooled(Fixed()), torch.cat([x[:1] + 1, x[1:]])
    assert torch.equal(fixed(x)[1:], fixed(changed)[1:])

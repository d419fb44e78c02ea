"""Outputs of padded tokens are no outputs: torch writes zeros there in eval, where it drops padded tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import check
from mha_inspect.reports.check import CheckReport

ZEROS = "Outputs of padded tokens are 0 in eval and not in train; those of real tokens are equal."
CONSTANT = "Outputs of padded tokens differ in train and eval; those of real tokens are equal."


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1).eval()


def pads(*lengths: int, size: int = 8) -> Tensor:
    return torch.arange(size)[None] >= torch.tensor(lengths)[:, None]


def report_of(module: nn.Module, mask: Tensor) -> CheckReport:
    torch.manual_seed(1)
    return check(module, torch.randn(*mask.shape, 16), src_key_padding_mask=mask)


class Tagger(nn.Module):
    """An encoder between layers with a bias, which make another number of a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Linear(16, 16), encoder(), nn.Linear(16, 7)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=src_key_padding_mask))


@pytest.mark.parametrize("lengths", [(5, 4, 3), (1, 8, 3)])
def test_zeros_of_padded_tokens_are_no_finding(lengths: tuple[int, ...]) -> None:
    mask = pads(*lengths)
    report = report_of(encoder(), mask)
    assert report.findings == ()
    assert ZEROS in report.notes
    # The oracle: real tokens are equal in train and eval, and padded ones are zeros in eval.
    module, x = encoder(), torch.randn(len(lengths), 8, 16)
    with torch.no_grad():
        fast = module(x, src_key_padding_mask=mask)
        for part in module.modules():
            part.training = not isinstance(part, nn.Dropout)
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        slow = module(x, src_key_padding_mask=mask)
    assert torch.allclose(fast[~mask], slow[~mask], atol=1e-5)
    assert not bool(fast[mask].any())


def test_a_bias_behind_the_encoder_changes_nothing_of_that() -> None:
    report = report_of(Tagger().eval(), pads(5, 4, 3))
    assert (report.findings, CONSTANT in report.notes) == ((), True)


class Leaks(nn.Module):
    """An encoder that hands on the mean of all tokens, the real ones included, in train alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        y = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        return y + x.mean(1, keepdim=True) if self.training else y


class MixesItems(Leaks):
    """An encoder whose outputs take something of the next batch item."""

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        y = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        return y + 0.1 * y.roll(1, 0)


@pytest.mark.parametrize(("module", "name"), [(Leaks, "training"), (MixesItems, "batch")])
def test_a_difference_of_real_tokens_is_found(module: type[nn.Module], name: str) -> None:
    report = report_of(module().eval(), pads(8, 5, 6))
    assert name in {finding.check for finding in report.findings if finding.sure}

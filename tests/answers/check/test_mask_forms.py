"""Masks with a batch axis: the form that ran is said, and a mask on the heads, or that does nothing, is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.answers.trace import traced
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

from ...corpus.planted import E, H, Padded, Right

LENGTH = 7
ON_HEADS = "The batch axis of mask is aligned with the heads of the scores"


class OnHeads(Padded):
    """Masks scores with `batch key`, of which an axis for the heads is missing."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.is_masked = mask is not None
        return super().forward(x, mask)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.padding[:, None, :], -torch.inf) if self.is_masked else scores


def checked(module: nn.Module, items: int, *, declared: bool = False) -> CheckReport:
    torch.manual_seed(0)
    x, mask = torch.randn(items, LENGTH, E), torch.ones(items, LENGTH, dtype=torch.bool)
    mask[0, 5:] = mask[2 % items, 3:] = False
    if declared:
        return mha_inspect.check(module.eval(), x, intent=Intent(padding="mask", padding_true="keep"))
    return mha_inspect.check(module.eval(), x, mask)


def test_a_batch_axis_on_the_heads_is_found_where_there_are_as_many_items() -> None:
    report = checked(OnHeads(), H)
    (finding,) = report.findings
    assert finding.sentence.startswith(ON_HEADS)
    assert finding.fix.startswith("Align the batch axis of the mask with that of the scores: mask[:, None, None, :]")
    assert not [fact for fact in report.facts if "no effect" in fact.sentence]
    assert checked(Padded(), H).findings == ()


def test_a_declared_mask_on_the_heads_is_found() -> None:
    (finding,) = checked(OnHeads(), H, declared=True).findings
    assert finding.sentence.startswith(ON_HEADS)


def test_the_form_that_ran_is_said_with_the_reason_for_the_one_that_raised() -> None:
    """The oracle is torch: 2 items do not broadcast to 4 heads."""
    report = checked(OnHeads(), 2, declared=True)
    (note,) = [note for note in report.notes if note.startswith("mask ran as")]
    assert note.startswith(f"mask ran as bool [2, 1, {LENGTH}]. mask: the forward rejects bool [2, {LENGTH}] (")
    with pytest.raises(RuntimeError, match="must match") as raised:
        OnHeads()(torch.randn(2, LENGTH, E), torch.ones(2, LENGTH, dtype=torch.bool))
    assert str(raised.value) in note
    assert f"mask ran as bool [2, {LENGTH}]." in checked(Padded(), 2, declared=True).notes


def with_float_padding(*rows: list[float]) -> Subject:
    """A layer of torch with a padding mask of numbers, which it adds to the scores."""
    torch.manual_seed(0)
    padding = torch.tensor(rows)
    x = torch.randn(*padding.shape, E)
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    return Subject(layer.eval(), (x, x, x), {"key_padding_mask": padding})


def report_of(subject: Subject) -> CheckReport:
    return mha_inspect.check(subject.module, *subject.args, **subject.kwargs)


@pytest.mark.parametrize("rows", [([0.0, 1.0],), ([0.0, 0.0], [0.0, 1.0])])
def test_zeros_and_ones_that_are_added_are_found_in_any_size(rows: tuple[list[float], ...]) -> None:
    subject = with_float_padding(*rows)
    report = report_of(subject)
    (finding,) = report.findings
    assert finding.sentence.startswith("The mask is added as zeros and ones")
    assert "slopes by head" not in {fact.name for fact in report.facts}
    judged, _ = traced(subject, Show(), keep=False, judge=True)
    assert judged.findings


class Pooled(nn.Module):
    """Pooling by a softmax over one score for each token; without a product of queries and keys."""

    def __init__(self, *, is_filled: bool) -> None:
        super().__init__()
        self.is_filled, self.score = is_filled, nn.Linear(E, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        scores = scores.masked_fill(mask == 0, float("-inf")) if self.is_filled else scores * mask
        return torch.einsum("bn,bnd->bd", scores.softmax(-1), x)


def test_scores_of_a_pooling_that_are_multiplied_by_the_mask_are_found() -> None:
    x, mask = torch.randn(3, LENGTH, E), torch.ones(3, LENGTH)
    mask[0, 4:] = 0
    (finding,) = mha_inspect.check(Pooled(is_filled=False), x, mask).findings
    assert finding.sentence.startswith("The scores are multiplied by the mask")
    for is_filled, given in ((True, mask), (False, torch.ones(3, LENGTH))):
        with pytest.raises(InputError, match="no attention"):  # and nothing wrong
            mha_inspect.check(Pooled(is_filled=is_filled), x, given)


class Forgets(Right):
    """Takes a mask and does not pass it on."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("mask", [torch.ones(5, 5).tril().bool(), torch.full((5, 5), -1e9).triu(1)])
def test_a_forgotten_mask_may_be_a_mistake(mask: Tensor) -> None:
    (finding,) = mha_inspect.check(Forgets(), torch.randn(2, 5, E), mask).findings
    assert finding.sentence == "mask is given and has no effect on the output."
    assert finding.evidence.endswith("no operation reads it.")
    assert not finding.sure


class LeavesOut(Padded):
    """Leaves a mask out where it masks nothing."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores if bool(self.padding.all()) else super().mask(scores)


def test_a_mask_that_is_left_out_where_it_masks_nothing_is_not_forgotten() -> None:
    x = torch.randn(2, 5, E)
    assert mha_inspect.check(LeavesOut(), x, torch.ones(2, 5, dtype=torch.bool)).findings == ()

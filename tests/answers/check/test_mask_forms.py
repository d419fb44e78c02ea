"""Masks with a batch axis: the form that ran is said, and a batch axis that lies on the heads is found."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.answers.trace import traced
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

HEADS, LENGTH, WIDTH = 4, 7, 32
ON_HEADS = "The batch axis of mask is aligned with the heads of the scores"


class Masked(nn.Module):
    """Masks scores with `batch key`, of which an axis for the heads is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def placed(self, mask: Tensor) -> Tensor:
        return mask[:, None, :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~self.placed(mask).bool(), float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Right(Masked):
    def placed(self, mask: Tensor) -> Tensor:
        return mask[:, None, None, :]


class Fused(Masked):
    """The same mistake, in the mask of torch's function."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.placed(mask))


class FusedRight(Fused):
    def placed(self, mask: Tensor) -> Tensor:
        return mask[:, None, None, :]


def checked(module: nn.Module, items: int, *, declared: bool = False) -> CheckReport:
    torch.manual_seed(0)
    x, mask = torch.randn(items, LENGTH, WIDTH), torch.ones(items, LENGTH, dtype=torch.bool)
    mask[0, 5:] = mask[2 % items, 3:] = False
    intent = Intent(padding="mask", padding_true="keep") if declared else Intent()
    return check(Subject(module.eval(), (x,) if declared else (x, mask), {}), intent)


@pytest.mark.parametrize("module", [Masked, Fused])
def test_a_batch_axis_on_the_heads_is_found_where_there_are_as_many_items(module: type[Masked]) -> None:
    report = checked(module(), HEADS)
    (finding,) = report.findings
    assert finding.sentence.startswith(ON_HEADS)
    assert finding.fix.startswith("Align the batch axis of the mask with that of the scores: mask[:, None, None, :]")
    assert not [fact for fact in report.facts if "no effect" in fact.sentence]


@pytest.mark.parametrize("module", [Right, FusedRight])
@pytest.mark.parametrize("items", [2, HEADS])
def test_a_mask_in_its_place_is_none(module: type[Masked], items: int) -> None:
    assert checked(module(), items).findings == ()


def test_a_declared_mask_on_the_heads_is_found() -> None:
    (finding,) = checked(Masked(), HEADS, declared=True).findings
    assert finding.sentence.startswith(ON_HEADS)


def test_the_form_that_ran_is_said_with_the_reason_for_the_one_that_raised() -> None:
    """The oracle is torch: 2 items do not broadcast to 4 heads."""
    report = checked(Masked(), 2, declared=True)
    (note,) = [note for note in report.notes if note.startswith("mask ran as")]
    assert note.startswith(f"mask ran as bool [2, 1, {LENGTH}]. mask: the forward rejects bool [2, {LENGTH}] (")
    with pytest.raises(RuntimeError, match="must match") as raised:
        Masked()(torch.randn(2, LENGTH, WIDTH), torch.ones(2, LENGTH, dtype=torch.bool))
    assert str(raised.value) in note


def test_a_first_form_that_runs_is_said_alone() -> None:
    assert f"mask ran as bool [2, {LENGTH}]." in checked(Right(), 2, declared=True).notes


def with_float_padding(width: int, heads: int, mask: list[list[float]]) -> Subject:
    """A layer of torch with a padding mask of numbers, which it adds to the scores."""
    torch.manual_seed(0)
    padding = torch.tensor(mask)
    x = torch.randn(len(padding), padding.shape[1], width)
    layer = nn.MultiheadAttention(width, heads, batch_first=True)
    return Subject(layer.eval(), (x, x, x), {"key_padding_mask": padding})


@pytest.mark.parametrize(("width", "heads"), [(1, 1), (8, 1), (32, 4)])
@pytest.mark.parametrize("mask", [[[0.0, 1.0]], [[0.0, 0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]], [[1.0, 1.0]]])
def test_zeros_and_ones_that_are_added_are_found_in_any_size(width: int, heads: int, mask: list[list[float]]) -> None:
    subject = with_float_padding(width, heads, mask)
    findings = check(subject).findings
    judged, _ = traced(subject, Show(), keep=False, judge=True)
    has_zeros = any(0.0 in row for row in mask)
    assert [each.sentence.startswith("The mask is added as zeros and ones") for each in findings] == [True] * has_zeros
    assert bool(judged.findings) is has_zeros
    assert has_zeros or not any("masks out no key" in note for note in judged.notes)


def test_a_mask_of_zeros_and_ones_has_no_slopes() -> None:
    report = check(with_float_padding(32, 4, [[0.0, 1.0]]))
    assert "slopes by head" not in {fact.name for fact in report.facts}


class Pooled(nn.Module):
    """Pooling by a softmax over one score for each token; without a product of queries and keys."""

    def __init__(self, *, filled: bool) -> None:
        super().__init__()
        self.filled, self.score = filled, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        scores = scores.masked_fill(mask == 0, float("-inf")) if self.filled else scores * mask
        return torch.einsum("bn,bnd->bd", scores.softmax(-1), x)


@pytest.mark.parametrize(("filled", "padded"), [(False, True), (True, True), (False, False)])
def test_scores_of_a_pooling_that_are_multiplied_by_the_mask_are_found(filled: bool, padded: bool) -> None:
    torch.manual_seed(0)
    mask = torch.ones(3, LENGTH)
    mask[0, 4:] = not padded
    subject = Subject(Pooled(filled=filled).eval(), (torch.randn(3, LENGTH, WIDTH), mask), {})
    findings = []
    with suppress(InputError):  # no attention, and nothing wrong
        findings = [each.sentence for each in check(subject).findings]
    assert [each.startswith("The scores are multiplied by the mask") for each in findings] == [True] * (
        padded and not filled
    )

"""What a diff says of sides that are the same in another form, of masks, and of two sides of one name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.diff import DiffReport

from ..corpus.planted import D, E, H, N, Right, future

X = torch.randn(2, N, E)


def compared(left: nn.Module, right: nn.Module, *given: Tensor) -> DiffReport:
    """Compare both with the weights of the left."""
    right.load_state_dict(left.state_dict())
    return mha_inspect.diff(left.eval(), right.eval(), *(given or (X,)), same_weights=True)


class ByHead(Right):
    """One head at a time: their parts of the output projection are added up, as in a row-parallel layer."""

    first_column = 0

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for start in range(0, E, D):
            rows = slice(start, start + D)
            q, k, v = (F.linear(x, part.weight[rows], part.bias[rows]) for part in (self.q, self.k, self.v))
            columns = slice((start + self.first_column) % E, (start + self.first_column) % E + D)
            parts.append(F.linear((q @ k.mT / D**0.5).softmax(-1) @ v, self.o.weight[:, columns]))
        return torch.stack(parts).sum(0) + self.o.bias


class WrongColumns(ByHead):
    first_column = D


def test_heads_that_are_attentions_are_compared_as_the_heads_of_the_whole() -> None:
    for left, right in ((ByHead(), Right()), (Right(), ByHead())):
        report = compared(left, right)
        assert report.outcome == "same"
        assert report.first_differing_stage is None
        assert {row.name for row in report.stages if row.verdict != "same"} == {"output"}
        assert "attentions 1–4 of ByHead are compared as the heads of the attention of Right" in " ".join(report.notes)


def test_a_difference_after_heads_that_are_attentions_is_said_to_be_there() -> None:
    report = compared(WrongColumns(), Right())
    assert report.outcome == "differs"
    assert report.first_differing_stage is None
    assert "Every stage that both have is the same; the difference is in the output projection" in str(report)


class OtherHeads(ByHead):
    """The second head is scaled by another number."""

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for start in range(0, E, D):
            rows = slice(start, start + D)
            q, k, v = (F.linear(x, part.weight[rows], part.bias[rows]) for part in (self.q, self.k, self.v))
            scale = 1.0 if start == D else D**0.5
            parts.append(F.linear((q @ k.mT / scale).softmax(-1) @ v, self.o.weight[:, rows]))
        return torch.stack(parts).sum(0) + self.o.bias


def test_a_head_that_is_an_attention_of_its_own_and_differs_is_found_at_its_stage() -> None:
    report = compared(OtherHeads(), Right())
    assert report.outcome == "differs"
    assert report.first_differing_stage == "scores"


class Moved(Right):
    """All scores of a query are higher by one number, which the softmax takes away again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ (k + 1).mT / D**0.5).softmax(-1) @ v


def test_a_stage_of_another_form_is_no_first_difference() -> None:
    report = compared(Moved(), Right())
    assert report.outcome == "same"
    assert report.first_differing_stage is None
    assert "differs" in {row.verdict for row in report.stages}
    assert "in form alone" in str(report)


class MovedAndDoubled(Moved):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_stage_of_another_form_is_no_first_difference_of_outputs_that_differ() -> None:
    report = compared(MovedAndDoubled(), Right())
    assert report.outcome == "differs"
    assert report.first_differing_stage is None
    assert "or differs in form alone" in str(report)
    assert [reason.kind for reason in report.reasons] == ["scale"]


def masked(number: float, diagonal: int = 1) -> Right:
    return Right(mask=lambda _, scores: scores.masked_fill(future(scores, diagonal), number))


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(("left", "right"), [(-1e9, -torch.inf), (-1e9, -1e9), (LOWEST, -1e9)])
def test_a_mask_of_another_diagonal_is_called_one_thing(left: float, right: float) -> None:
    report = compared(masked(left), masked(right, 2))
    (row,) = [row for row in report.stages if row.name == "masked_scores"]
    assert (row.verdict, row.max_abs_difference) == ("differs", None)
    assert f"{2 * H * (N - 1)} of {2 * H * N * N} scores are below -30,000" in row.note
    assert "inf" not in str(report).replace("inference", "")


def test_two_sides_of_one_class_are_told_apart() -> None:
    torch.manual_seed(0)
    left, right = (nn.MultiheadAttention(E, H, batch_first=True) for _ in range(2))
    mask = torch.ones(2, N, dtype=torch.bool)
    report = mha_inspect.diff(left, right, X, X, X, key_padding_mask=mask, need_weights=False, same_weights=True)
    assert "in MultiheadAttention and" not in str(report)
    named = [note for note in report.notes if "Called with" in note]
    assert all(note.startswith(("The left MultiheadAttention", "The right MultiheadAttention")) for note in named)
    assert report.left.label == "MultiheadAttention"

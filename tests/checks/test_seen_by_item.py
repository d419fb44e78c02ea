"""Who sees whom, where it differs by batch item, and where queries are chosen: words, picture and no accusation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport, Fact

from ..corpus.items import Documents, DocumentsBothWays, Masked, PaddedByItem
from ..corpus.planted import B, D, E, Right


def checked(module: nn.Module, *args: Tensor, **intent: Any) -> CheckReport:
    torch.manual_seed(0)
    return mha_inspect.check(module.eval(), *args, intent=Intent(**intent))


def seen(report: CheckReport) -> Fact:
    (fact,) = [fact for fact in report.facts if fact.name == "who sees whom"]
    return fact


def tokens(marks: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*marks.shape, 22)


PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1, 1, 1]])


def test_packed_documents_are_causal_in_each_document() -> None:
    report = checked(Documents(), tokens(PACKED), PACKED, causal=True)
    assert report.ok
    assert "causal" in {passed.check for passed in report.passed}
    fact = seen(report)
    assert "0–2 | 3–6 | 7" in fact.sentence
    assert "0–3 | 4–7" in fact.sentence
    assert fact.picture[3] == "···■····"


def test_documents_are_no_window() -> None:
    report = checked(Documents(), tokens(PACKED), PACKED)
    assert "window" not in seen(report).sentence
    assert report.ok


def test_documents_both_ways() -> None:
    report = checked(DocumentsBothWays(), tokens(PACKED), PACKED)
    assert report.ok
    assert seen(report).picture[0] == "■■■·····"
    assert "0–2 | 3–6 | 7" in seen(report).sentence


class LocalDocuments(Documents):
    """Each token sees itself and the two before it in its document."""

    def seen(self, marks: Tensor) -> Tensor:
        return super().seen(marks).triu(-2)


def test_two_documents_are_no_padding() -> None:
    marks = torch.tensor([[0] * 5 + [1] * 5, [0] * 3 + [1] * 7])
    report = checked(LocalDocuments(), tokens(marks), marks, causal=True)
    assert report.ok
    sentence = seen(report).sentence
    assert "masked out for every query" not in sentence
    assert "causal, a window of 3, within groups of tokens: 0–4 | 5–9" in sentence


class PaddedDocuments(Documents):
    """Tokens of document -1 are padding, and see nothing: their weights are those of a mask of -1e9."""

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        seen = self.seen(marks) & (marks >= 0)[:, None, None]
        return self.o(self.join((q @ k.mT).masked_fill(~seen, -1e9).softmax(-1) @ v))


@pytest.mark.parametrize("declared", [True, None])
def test_a_query_without_any_key_is_not_accused_of_the_future(declared: bool | None) -> None:
    marks = torch.tensor([[0] * 4 + [1] * 4 + [-1] * 2, [0] * 3 + [1] * 7])
    report = checked(PaddedDocuments(), tokens(marks), marks, causal=declared)
    assert [finding for finding in report.findings if finding.check == "causal"] == []


class Unconnected(Masked):
    """A mistake: query 4 and those after it do not see key 0."""

    def seen(self, marks: Tensor) -> Tensor:
        pairs = torch.ones(marks.shape[1], marks.shape[1], dtype=torch.bool).tril()
        pairs[4:, 0] = False
        return pairs[None, None]


def test_a_key_that_is_masked_out_is_no_document() -> None:
    report = checked(Unconnected(), tokens(PACKED), PACKED, causal=True)
    assert [finding.check for finding in report.findings if finding.sure] == ["causal"]


@pytest.mark.parametrize("side", [slice(0, 3), slice(5, 8)])
def test_padding_makes_no_window(side: slice) -> None:
    class CausalPadded(Masked):
        def seen(self, marks: Tensor) -> Tensor:
            past = torch.ones(marks.shape[1], marks.shape[1], dtype=torch.bool).tril()
            return past & marks[:, None, None].bool()

    marks = torch.ones(1, 8, dtype=torch.long)
    marks[:, side] = 0
    fact = seen(checked(CausalPadded(), tokens(marks), marks))
    assert fact.sentence.startswith("causal")
    assert "window" not in fact.sentence


def test_padding_of_every_item_is_counted() -> None:
    marks = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]] * 2)
    assert seen(checked(PaddedByItem(), tokens(marks), marks)).sentence == "every query sees 5 of 8 keys"


def test_as_many_keys_that_are_others_in_each_item() -> None:
    marks = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]])
    fact = seen(checked(PaddedByItem(), tokens(marks), marks))
    assert "5 of 8 keys, not the same" in fact.sentence
    assert fact.picture == ("■■■■■···",) * 8


class ByPair(Masked):
    def seen(self, marks: Tensor) -> Tensor:
        return marks[:, None].bool()


def test_masks_that_differ_by_item_are_not_joined() -> None:
    past = torch.ones(7, 7).tril()
    marks = torch.stack([past, past.T])
    fact = seen(checked(ByPair(), tokens(marks[..., 0]), marks))
    assert "batch item 0: causal; batch item 1: causal, reversed" in fact.sentence


# -- queries that are picked by an index -------------------------------------------------------------------------------


def chosen(module: Right, q: Tensor, k: Tensor, v: Tensor, *, late: int = 0) -> Tensor:
    """Take the queries in another order, mask them by their positions, and write them back."""
    rows = torch.arange(q.shape[-2] - 1, -1, -1)
    future = torch.arange(k.shape[-2]) > rows[:, None] + late
    scores = (q[:, :, rows] @ k.mT / D**0.5).masked_fill(future, -torch.inf)
    out = torch.zeros_like(v)
    out[:, :, rows] = scores.softmax(-1) @ v
    return out


def test_chosen_queries_stand_in_the_order_of_their_tokens() -> None:
    x = torch.randn(B, 9, E)
    report = checked(Right(attend=chosen), x, causal=True)
    assert report.ok
    assert "causal" in {passed.check for passed in report.passed}
    assert seen(report).sentence == "causal"
    assert seen(report).picture[1] == "■■·······"


def test_chosen_queries_that_see_the_future_are_found() -> None:
    def late(module: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chosen(module, q, k, v, late=1)

    report = checked(Right(attend=late), torch.randn(B, 9, E), causal=True)
    assert [finding.check for finding in report.findings] == ["causal"]
    assert "one future token" in report.findings[0].sentence


def by_need(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take the queries of each head in the order of their largest scores (ProbSparse of Informer)."""
    rows = (q @ k.mT).amax(-1).argsort(-1)  # batch heads query
    picked = q.gather(2, rows[..., None].expand_as(q))
    future = torch.arange(k.shape[-2]) > rows[..., None]
    weights = (picked @ k.mT / D**0.5).masked_fill(future, -torch.inf).softmax(-1)
    return torch.zeros_like(v).scatter(2, rows[..., None].expand_as(q), weights @ v)


@pytest.mark.parametrize("declared", [True, None])
def test_queries_chosen_by_their_scores_are_not_accused(declared: bool | None) -> None:
    assert checked(Right(attend=by_need), torch.randn(B, 9, E), causal=declared).ok


# -- masks of queries --------------------------------------------------------------------------------------------------


class MaskedQueries(Right):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        scores = (q @ k.mT / D**0.5).masked_fill(~mask[:, None, :, None], -1e9)
        return self.o(self.join(scores.softmax(-1) @ v))


class Unread(MaskedQueries):
    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, y, torch.ones_like(mask))


def of_queries(module: nn.Module) -> CheckReport:
    x, y, mask = torch.randn(2, 7, E), torch.randn(2, 5, E), torch.ones(2, 7, dtype=torch.bool)
    return checked(module, x, y, mask, padding="mask")


def test_a_mask_of_queries_is_called_so() -> None:
    facts = [fact.sentence for fact in of_queries(MaskedQueries()).facts if fact.name == "mask"]
    assert facts == ["mask: False masks out a query, not a key"]


def test_evidence_names_no_key_that_is_not_there() -> None:
    (finding,) = of_queries(Unread()).findings
    assert "keys 5" not in finding.evidence
    assert "tokens 5" in finding.evidence


@pytest.mark.parametrize("fill", [-torch.inf, -1e9])
def test_a_query_without_keys_is_no_diagonal_too_early(fill: float) -> None:
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hidden[3] = True
    module = Right(mask=lambda _, scores: scores.masked_fill(hidden, fill))
    finding = checked(module, torch.randn(2, 6, E), causal=True).findings[-1]
    assert finding.check == "causal"
    assert "every key masked out" in finding.sentence
    assert "diagonal" not in finding.sentence + finding.fix


def test_one_query_that_sees_a_later_token_is_not_causal() -> None:
    later = torch.arange(6) > 1
    module = Right(
        heads=lambda m, x: (m.split(m.q(x))[:, :, :1], m.split(m.k(x)), m.split(m.v(x))),
        mask=lambda _, scores: scores.masked_fill(later, -torch.inf),
    )
    with pytest.raises(InputError, match="one query"):
        checked(module, torch.randn(2, 6, E), causal=True)

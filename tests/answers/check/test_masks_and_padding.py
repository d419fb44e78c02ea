"""Right masks with padding, at sizes that coincide: nothing is accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

WIDTH, HEADS = 16, 2


class Causal(nn.Module):
    """Causal attention with a mask of padding, `batch key`, over past and new keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def forward(
        self, x: Tensor, mask: Tensor, cache: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = self.seen(q.shape[2], k.shape[2]) & mask.bool()[:, None, None]
        context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(context.transpose(1, 2).flatten(2)), (k, v)


class Late(Causal):
    """Each query sees one future token."""

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


class Gap(Causal):
    """No query sees the token two before it."""

    def seen(self, queries: int, keys: int) -> Tensor:
        whole = super().seen(queries, keys)
        return whole & ~(whole.tril(keys - queries - 2) & ~whole.tril(keys - queries - 3))


def subject_of(module: nn.Module, lengths: tuple[int, ...], size: int) -> Subject:
    torch.manual_seed(0)
    mask = (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()
    return Subject(module.eval(), (torch.randn(len(lengths), size, WIDTH), mask), {})


def checked(module: nn.Module, lengths: tuple[int, ...], size: int, **intent: object) -> CheckReport:
    return check(subject_of(module, lengths, size), Intent(**intent))


def faults(report: CheckReport) -> list[str]:
    return [finding.check for finding in report.findings if finding.sure]


@pytest.mark.parametrize("lengths", [(5, 4), (4, 4), (5, 5), (3, 5, 4), (2, 6), (6, 2), (1, 6)])
def test_causal_attention_with_padding_has_no_gaps(lengths: tuple[int, ...]) -> None:
    report = checked(Causal(), lengths, 6, causal=True)
    assert faults(report) == []
    (seen,) = [fact.sentence for fact in report.facts if fact.name == "who sees whom"]
    assert seen.startswith("causal")
    assert "window" not in seen
    assert "gaps" not in seen


@pytest.mark.parametrize(("module", "said"), [(Late, "future"), (Gap, "all of its past")])
@pytest.mark.parametrize("lengths", [(6, 6), (5, 4), (6, 4)])
def test_a_wrong_mask_with_padding_is_found(module: type[Causal], said: str, lengths: tuple[int, ...]) -> None:
    (finding,) = [f for f in checked(module(), lengths, 6, causal=True).findings if f.check == "causal"]
    assert said in finding.sentence


@pytest.mark.parametrize("items", [3, 4])
def test_as_many_items_as_tokens_change_nothing(items: int) -> None:
    """Of a mask of `batch key` no rows are cut as if they were queries, at 4 items of 4 tokens."""
    report = checked(Causal(), (4,) * items, 4, causal=True, cache="cache", padding="mask", padding_true="keep")
    assert report.findings == ()
    assert {"padding", "cache"} <= {passed.check for passed in report.held}
    proof = decoded(subject_of(Causal(), (4,) * items, 4), Show(), 2)[0].decode
    assert proof is not None
    assert proof.verdict == "same"


@pytest.mark.parametrize("items", [5, 6])
def test_a_padding_mask_of_torch_with_as_many_items_as_tokens(items: int) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True).eval()
    subject = Subject(layer, (torch.randn(items, 6, WIDTH),), {})
    report = check(subject, Intent(padding="src_key_padding_mask", padding_true="ignore"))
    assert report.findings == ()
    assert "padding" in {passed.check for passed in report.held}

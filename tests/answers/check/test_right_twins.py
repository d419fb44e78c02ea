"""Right modules that look like a mistake are not accused, and wrong ones beside them still are."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mha_inspect import Intent, check

from ...corpus.planted import MADE, B, D, E, H, N, Padded, Right, before, fused, future, halves


def given(batch: int = B, length: int = N) -> Tensor:
    return torch.randn(batch, length, E, generator=torch.Generator().manual_seed(0))


class Rotated(Right):
    """Rotates in float32 before a kernel in bfloat16."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return halves(q).to(x.dtype), halves(k).to(x.dtype), v


def test_rotations_in_bfloat16_before_a_fused_kernel_are_not_accused() -> None:
    report = check(Rotated(**fused()).bfloat16(), given().bfloat16(), only=["rotary"])
    assert (report.findings, [passed.check for passed in report.passed]) == ((), ["rotary"])


class Summarized(Right):
    """Queries see the tokens before them, and after these a key that is made of one token alone."""

    def __init__(self, token: int) -> None:
        super().__init__(is_causal=True, token=token)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([side, side[:, :, self.token, None]], 2) for side in (k, v))
        seen = torch.ones(N, N + 1, dtype=torch.bool).tril()
        seen[1:, -1] = True
        return (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def test_an_attribute_alone_is_no_proof_that_attention_is_causal() -> None:
    assert check(Summarized(0), given()).findings == ()
    (finding,) = check(Summarized(N - 1), given()).findings
    assert (finding.check, finding.sure) == ("causal", False)


class Early(Padded):
    """No query sees itself, and the first one sees no key."""

    def mask(self, scores: Tensor) -> Tensor:
        return super().mask(scores).masked_fill(future(scores, 0), -1e9)


def test_padding_that_leaks_through_a_query_without_keys_is_told_as_that() -> None:
    intent = Intent(padding="mask", padding_true="keep", padding_side="left")
    padding, causal = check(Early(), given(), intent=intent).findings
    assert (padding.check, causal.check, causal.sure) == ("padding", "causal", False)
    assert "a query with every key masked out" in padding.sentence


class Translator(nn.Module):
    def __init__(self, *, hides_memory: bool) -> None:
        super().__init__()
        self.hides_memory = hides_memory
        self.encoder = nn.TransformerEncoderLayer(E, H, 14, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(E, H, 14, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, decoder_x: Tensor | None = None) -> Any:
        pads = None if mask is None else ~mask.bool()
        memory = self.encoder(x, src_key_padding_mask=pads)
        return self.decoder(decoder_x, memory, memory_key_padding_mask=pads if self.hides_memory else None)


@pytest.mark.parametrize("hides_memory", [True, False])
def test_a_padding_mask_belongs_to_the_sequence_whose_keys_it_masks_out(hides_memory: bool) -> None:
    module = Translator(hides_memory=hides_memory).eval()
    intent = Intent(padding="mask", padding_true="keep")
    report = check(module, given(), decoder_x=-given(), intent=intent, only=["padding"])
    assert [finding.check for finding in report.findings] == ["padding"] * (not hides_memory)
    assert ("padding" in {passed.check for passed in report.passed}) == hides_memory


class Gated(Right):
    """The gate is zero before training, as in Flamingo."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * super().forward(x)


def test_a_gate_of_zero_is_no_unused_result() -> None:
    report = check(Gated(), given())
    assert not report.findings
    assert any("multiplied by zeros" in skipped.reason for skipped in report.left_out)


class WithPrefix(Right):
    """Learned tokens before the sequence see each other; the sequence is causal."""

    leaks = False

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 3, E))

    def forward(self, text: Tensor) -> Tensor:
        return super().forward(torch.cat([self.prefix.expand(len(text), -1, -1), text], 1))[:, 3:]

    def mask(self, scores: Tensor) -> Tensor:
        hidden = future(scores)
        hidden[:3, :3] = False
        hidden[3, 4] = not self.leaks
        return scores.masked_fill(hidden, -math.inf)


class LeakyPrefix(WithPrefix):
    leaks = True


def test_a_prefix_that_sees_itself_is_no_leak() -> None:
    assert not check(WithPrefix(), given(), intent=Intent(causal=True)).findings
    findings = check(LeakyPrefix(), given(), intent=Intent(causal=True)).findings
    assert any("future" in finding.sentence for finding in findings)


class Similarities(Right):
    """One number for each pair of batch items, as a contrastive loss takes them."""

    def leave(self, x: Tensor) -> Tensor:
        pooled = functional.normalize(self.o(x).mean(1), dim=-1)
        return pooled @ pooled.T


class MixedSimilarities(Similarities):
    def enter(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


def test_similarities_of_items_do_not_mix_them() -> None:
    assert not check(Similarities(), given()).findings
    (finding,) = check(MixedSimilarities(), given()).findings
    assert finding.check == "batch"
    assert finding.sentence == "Changing one batch item changes the output of another."


class Mixes(Right):
    """Neighbours are mixed before, and heads after, attention with a bias for distance: all of it on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.talk = nn.Conv1d(E, E, 3), nn.Linear(H, H, bias=False)

    def enter(self, x: Tensor) -> Tensor:
        return self.conv(functional.pad(x.mT, (2, 0))).mT

    def mask(self, scores: Tensor) -> Tensor:
        return (scores - 0.3 * before(scores)).masked_fill(future(scores), -1e9)

    def weigh(self, scores: Tensor) -> Tensor:
        return self.talk(scores.softmax(-1).movedim(1, -1)).movedim(-1, 1)


class MergesTokens(Right):
    """Every two tokens become one key."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.unflatten(2, (-1, 2)).mean(3), v.unflatten(2, (-1, 2)).mean(3))


class SharesMemory(Right):
    """Keys of the whole batch stand beside each row's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat((side, side.mean((0, 2), keepdim=True).expand(B, H, 1, D)), 2) for side in (k, v))
        return super().attend(q, k, v)


@pytest.mark.parametrize(
    ("module", "causal", "may_be"),
    [(Mixes(), True, []), (MergesTokens(), None, []), (SharesMemory(), None, ["batch"])],
)
def test_what_is_meant_is_no_fault(module: nn.Module, causal: bool | None, may_be: list[str]) -> None:
    report = check(module, given(), intent=Intent(causal=causal))
    assert report.ok
    assert [finding.check for finding in report.findings] == may_be


class RowsOfAlignments(Right):
    """Items of one alignment have one weight matrix: the batch is divided, and scores are summed over items."""

    leaks = False

    def forward(self, x: Tensor, rows: int = 3) -> Tensor:
        q, k, v = (side.unflatten(0, (-1, rows)) for side in self.heads(x))
        q = q - q.mean((0, 1), keepdim=True) if self.leaks else q
        weights = (torch.einsum("arhqd,arhkd->ahqk", q, k) / (rows * D) ** 0.5).softmax(-1)
        return self.o(self.join((weights[:, None] @ v).flatten(0, 1)))


@pytest.mark.parametrize(("rows", "groups"), [(6, "1 group"), (2, "3 groups")])
def test_items_of_the_batch_share_scores_in_the_groups_that_a_view_makes(rows: int, groups: str) -> None:
    (finding,) = check(RowsOfAlignments(), given(6), rows=rows, only=["batch"]).findings
    assert f"correct if dimension 0 has {groups} of {rows} items, as a view divides it (" in finding.sentence
    assert not finding.sure
    (leak,) = check(RowsOfAlignments(leaks=True), given(6), rows=rows, only=["batch"]).findings
    assert leak.sure == (rows < 6)


class Hides(Right):
    """A mask hides two keys from every query; the result may be thrown away."""

    keys = (N // 2, N - 1)
    factor = 1

    def mask(self, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor(self.keys), -math.inf)

    def join(self, x: Tensor) -> Tensor:
        return super().join(x) * self.factor


def test_a_token_that_a_mask_hides_is_no_proof_that_tokens_do_not_mix() -> None:
    report = check(Hides(), given())
    assert report.findings == ()
    assert "mixing" in {passed.check for passed in report.passed}
    (finding,) = check(Hides(factor=0), given(), only=["mixing"]).findings
    assert finding.sure
    tokens = re.findall(r"\d+", finding.evidence)
    assert set(map(int, tokens)).isdisjoint(Hides.keys)


class Codes(Right):
    """Each token is replaced by the nearest row of a table, as in a codec: no gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, E)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.cdist(super().forward(x), self.table.weight).argmin(-1))


@pytest.mark.parametrize("kind", [Codes])
def test_a_projection_without_gradient_on_purpose_is_not_accused(kind: type[nn.Module]) -> None:
    assert check(kind(), given(), only=["parameters"]).findings == ()


class FirstHead(Right):
    """The first head is cut off from autograd, or is zero."""

    is_detached = True

    def join(self, x: Tensor) -> Tensor:
        first = x[:, :1].detach() if self.is_detached else x[:, :1] * 0
        return super().join(torch.cat([first, x[:, 1:]], 1))


@pytest.mark.parametrize(
    ("module", "says", "sure"),
    [
        (FirstHead(), "the autograd graph is cut", True),
        (FirstHead(is_detached=False), "do not affect the output", False),
        (MADE["CausalAlongHeads"](True), "do not affect the output", False),  # the first head sees one key
    ],
)
def test_features_without_an_effect_are_not_called_detached(module: nn.Module, says: str, sure: bool) -> None:
    findings = check(module, given(), only=["parameters"]).findings
    assert {(says in finding.sentence, finding.sure) for finding in findings} == {(True, sure)}
    assert all(f"features 0–{D - 1} of {E}" in finding.sentence for finding in findings)


@pytest.mark.parametrize("replaced", [False, True])
def test_weights_of_nan_that_are_replaced_may_be_meant(replaced: bool) -> None:
    module = Right(
        mask=lambda module, scores: scores.masked_fill(torch.eye(N)[:, :1].bool(), -math.inf),
        weigh=lambda module, scores: scores.softmax(-1).nan_to_num() if replaced else scores.softmax(-1),
    )
    (finding,) = check(module, given()).findings
    assert (finding.check, finding.sure) == ("finite", not replaced)
    assert finding.sentence == "A query with every key masked out gives NaN, first in weights."


class Scored(Right):
    """Causal attention with scores of any size, and a mask that is added: 0 keeps a key."""

    scale = 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT * self.scale + torch.full((x.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
        return self.o((scores if mask is None else scores + mask[:, None]).softmax(-1) @ v)


@pytest.mark.parametrize(("scale", "dtype"), [(1e4, torch.float32), (60, torch.float16)])
def test_a_weight_that_is_too_small_for_its_dtype_is_no_mask(scale: float, dtype: torch.dtype) -> None:
    module, x = Scored(scale=scale).to(dtype), given(length=2 * N).to(dtype)
    assert module(x).isfinite().all()
    findings = check(module, x, intent=Intent(causal=True)).findings
    assert [finding for finding in findings if finding.sure] == []


@pytest.mark.parametrize("seed", [7, 11])
def test_tokens_without_a_weight_from_other_queries_prove_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    report = check(Scored(scale=60), given(length=2 * N), intent=Intent(causal=True))
    assert report.findings == ()
    (reason,) = [skipped.reason for skipped in report.left_out if skipped.check == "mixing"]
    assert "sharp" in reason

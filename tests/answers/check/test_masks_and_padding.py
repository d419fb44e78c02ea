"""Right masks with padding, at sizes that coincide: nothing is accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport, Finding
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


def of_scores(report: CheckReport) -> list[Finding]:
    """The findings, but for a mask that a class here takes and ignores on purpose."""
    return [finding for finding in report.findings if "has no effect on the output" not in finding.sentence]


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


class Scored(nn.Module):
    """Attention by hand, with scores `batch heads query key`; subclasses say how a mask `batch key` acts on them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        weights = self.weights(q @ k.mT * (WIDTH // HEADS) ** -0.5, mask.bool())
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Pairs(Scored):
    """A token sees real tokens if it is one, and itself."""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        seen = (keep[:, :, None] & keep[:, None]) | torch.eye(scores.shape[-1], dtype=torch.bool)
        return scores.masked_fill(~seen[:, None], -1e9).softmax(-1)


class Segments(Scored):
    """A token sees the tokens with its own mark: neither mark keeps a key."""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        seen = keep[:, :, None] == keep[:, None]
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)


class CausalSegments(Scored):
    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        size = scores.shape[-1]
        seen = (keep[:, :, None] == keep[:, None]) & torch.ones(size, size, dtype=torch.bool).tril()
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)


class Safe(Scored):
    """Rows with every key masked out are filled with 0 against NaN, and weights of masked keys are set to 0."""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        seen = (keep[:, :, None] & keep[:, None])[:, None]
        masked = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        return masked.softmax(-1) * seen


class Divided(Scored):
    """The weights are set to 0 after the softmax, and divided by their sum."""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        weights = scores.softmax(-1) * keep[:, None, None]
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)


def sided(module: nn.Module, lengths: tuple[int, ...], size: int, *, left: bool, **intent: object) -> CheckReport:
    subject = subject_of(module, lengths, size)
    x, mask = subject.args
    return check(Subject(module, (x, mask.flip(1) if left else mask), {}), Intent(**intent))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lengths", [(2, 8), (3, 8), (8, 5), (4, 6, 8)])
@pytest.mark.parametrize("module", [Pairs, Segments, Safe, Divided])
def test_right_masks_of_padding_are_not_accused(module: type[Scored], lengths: tuple[int, ...], left: bool) -> None:
    report = sided(module(), lengths, 8, left=left, padding="mask", padding_true="keep")
    assert faults(report) == []
    assert "padding" in {passed.check for passed in report.held}


@pytest.mark.parametrize("module", [Segments, CausalSegments])
def test_no_mark_of_a_mask_of_segments_keeps_a_key(module: type[Scored]) -> None:
    report = sided(module(), (2, 8), 8, left=True, padding="mask", padding_true="keep")
    assert [fact for fact in report.facts if fact.name == "mask"] == []


@pytest.mark.parametrize("lengths", [(8, 5), (3, 5), (5, 5)])
def test_an_item_of_one_mark_throughout_is_judged(lengths: tuple[int, ...]) -> None:
    report = sided(CausalSegments(), lengths, 8, left=False, causal=True, padding="mask", padding_true="keep")
    assert faults(report) == []
    assert {"causal", "padding"} <= {passed.check for passed in report.held}


def test_weights_that_are_set_to_zero_are_not_seen() -> None:
    report = sided(Divided(), (1, 8), 8, left=False, padding="mask", padding_true="keep")
    assert faults(report) == []
    (seen,) = [fact.sentence for fact in report.facts if fact.name == "who sees whom"]
    assert seen == "every query sees 1 to 8 of 8 keys"


class Lowered(Scored):
    """Causal by a finite number."""

    number = -30.0

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, self.number).softmax(-1)


@pytest.mark.parametrize(("number", "suspected"), [(-30.0, True), (-69.0, True), (-100.0, False), (-1e4, False)])
def test_a_finite_mask_that_changes_no_output_is_at_most_suspected(number: float, suspected: bool) -> None:
    module = Lowered()
    module.number = number
    report = checked(module, (8, 8), 8, causal=True)
    assert faults(report) == []
    assert ["masking"] * suspected == [finding.check for finding in of_scores(report)]


def test_a_finite_mask_that_changes_outputs_is_a_fault() -> None:
    module = Lowered()
    module.number = -5.0
    assert "causal" in faults(checked(module, (8, 8), 8, causal=True))


class Prefix(Scored):
    """Causal, but the first two tokens see each other: one pair of fifteen is of the future."""

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        seen[:, :2] = True
        return scores.masked_fill(~seen, -1e9).softmax(-1)


def test_one_pair_of_the_future_is_no_late_diagonal() -> None:
    (finding,) = of_scores(checked(Prefix(), (6, 6), 6, causal=True))
    assert finding.sentence == "Positions can see future tokens."
    assert "1 of 15" in finding.evidence


class Subtracted(Scored):
    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        return (scores - torch.ones(scores.shape[-2:]).triu(1)).softmax(-1)


def test_a_mask_of_ones_that_is_subtracted_loses_weight() -> None:
    (finding,) = [f for f in checked(Subtracted(), (6, 6), 6).findings if f.check == "masking"]
    assert "subtracted" in finding.sentence
    assert finding.sentence.endswith("lose weight.")


class Joined(nn.Module):
    """Scores of `(batch heads) query key` or `(heads batch) query key`, and a mask of `batch key` in some order."""

    def __init__(self, *, heads_first: bool, tiled: bool, of_queries: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads_first, self.tiled, self.of_queries = heads_first, tiled, of_queries

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        order = (2, 0, 1, 3) if self.heads_first else (0, 2, 1, 3)
        q, k, v = (s.unflatten(-1, (HEADS, -1)).permute(order).flatten(0, 1) for s in self.qkv(x).chunk(3, -1))
        keep = mask.bool().repeat(HEADS, 1) if self.tiled else mask.bool().repeat_interleave(HEADS, 0)
        hidden = ~(keep[:, :, None] if self.of_queries else keep[:, None])
        context = (q @ k.mT * (WIDTH // HEADS) ** -0.5).masked_fill(hidden, -1e9).softmax(-1) @ v
        if self.heads_first:
            return self.out(context.unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(2))
        return self.out(context.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("lengths", [(6, 4), (6, 4, 5)])
def test_a_fix_is_laid_out_as_the_scores_are(heads_first: bool, lengths: tuple[int, ...]) -> None:
    padding = {"padding": "mask", "padding_true": "keep"}
    assert checked(Joined(heads_first=heads_first, tiled=heads_first), lengths, 6, **padding).findings == ()
    expected = "mask.repeat(heads, 1)" if heads_first else "mask.repeat_interleave(heads, 0)"
    wrong = Joined(heads_first=heads_first, tiled=not heads_first)
    (finding,) = checked(wrong, lengths, 6, **padding).findings
    assert finding.sentence == "The mask of one batch item masks out keys of another item."
    assert f"{expected}[:, None, :]" in finding.fix
    of_queries = Joined(heads_first=heads_first, tiled=heads_first, of_queries=True)
    (finding,) = checked(of_queries, lengths, 6, **padding).findings
    assert "queries instead of keys" in finding.sentence
    assert f"{expected}[:, None, :]" in finding.fix


class Channels(nn.Module):
    """Convolutions of `batch channels positions`, whose heads are split by a view in a wrong order, or right."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.query, self.key, self.value, self.out = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, width, positions = x.shape
        sides = [side(x) for side in (self.query, self.key, self.value)]
        if self.right:
            q, k, v = (side.view(batch, HEADS, width // HEADS, positions).mT for side in sides)
        else:
            q, k, v = (side.view(batch, HEADS, positions, width // HEADS) for side in sides)
        context = (q @ k.mT * (width // HEADS) ** -0.5).softmax(-1) @ v
        return self.out((context.mT if self.right else context).reshape(batch, width, positions))


def test_positions_that_a_view_mixes_are_not_called_heads_within_a_token() -> None:
    x = torch.randn(2, WIDTH, 6)
    assert check(Subject(Channels(right=True).eval(), (x,), {}), Intent()).findings == ()
    (finding,) = check(Subject(Channels(right=False).eval(), (x,), {}), Intent()).findings
    assert "split without transpose" in finding.sentence
    assert "within each token" not in finding.sentence
    assert "sees only" not in finding.sentence


class Capped(Scored):
    """A causal mask that is added, and then capped by a tanh; or the cap first."""

    cap_first = False

    def weights(self, scores: Tensor, keep: Tensor) -> Tensor:
        mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        if self.cap_first:
            return ((scores / 5).tanh() * 5 + mask).softmax(-1)
        return (((scores + mask) / 5).tanh() * 5).softmax(-1)


@pytest.mark.parametrize("cap_first", [True, False])
def test_a_cap_after_an_added_mask_undoes_it(cap_first: bool) -> None:
    module = Capped()
    module.cap_first = cap_first
    findings = of_scores(checked(module, (6, 6), 6))
    assert [finding.check for finding in findings] == [] if cap_first else ["masking"]
    assert cap_first or "undoes the mask" in findings[0].sentence


class Summed(nn.Module):
    """Softmax by hand, whose sum counts masked keys, or does not."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT * (WIDTH // HEADS) ** -0.5).exp()
        seen = scores.tril()
        total = (seen if self.right else scores).sum(-1, keepdim=True)
        return self.out((seen @ v / total).transpose(1, 2).flatten(2))


def test_a_sum_that_counts_masked_keys_is_the_fault_and_no_mixing_of_positions() -> None:
    x = torch.randn(2, 6, WIDTH)
    assert check(Subject(Summed(right=True).eval(), (x,), {}), Intent(causal=True)).findings == ()
    (finding,) = check(Subject(Summed(right=False).eval(), (x,), {}), Intent(causal=True)).findings
    assert finding.check == "softmax"
    assert "divided by something other than the sum" in finding.sentence
    assert "sum" in finding.fix

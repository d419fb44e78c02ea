"""What is said of one attention between plain projections: it is true, whatever the code between them is written with.

The context of the function is `batch heads query head_dim`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import Finding
from mha_inspect.reports.trace import Trace

E, H, D, N = 24, 3, 8, 6
SCALE = D**-0.5
INDEX = torch.arange(N)
FUTURE = INDEX[None] > INDEX[:, None]

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Projections, and a function between them."""

    def __init__(self, core: Core, width: int = E, heads: int = H) -> None:
        super().__init__()
        self.core, self.heads = core, heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v).transpose(1, 2).flatten(2))


def trace_of(core: Core, *, factor: float = 1.0, length: int = N, seed: int = 0) -> Trace:
    torch.manual_seed(seed)
    module = Attention(core).eval()
    return mha_inspect.trace(module, torch.randn(2, length, E) * factor)


def findings_of(core: Core) -> tuple[Finding, ...]:
    return trace_of(core).findings


def by_query(weights_of: Callable[[int, Tensor], Tensor]) -> Core:
    """Return attention of one query after another; its scores are `batch heads key`."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for index in range(N):
            scores = (q[:, :, index : index + 1] * k).sum(-1)
            contexts.append((weights_of(index, scores)[..., None] * v).sum(2))
        return torch.stack(contexts, 2)

    return core


def by_weights(weights_of: Callable[[Tensor], Tensor]) -> Core:
    return lambda q, k, v: weights_of(q @ k.mT * SCALE) @ v


# -- one query at a time ----------------------------------------------------------------------------------------------


def test_a_mask_masks_out_every_key_only_if_it_does_so_in_every_turn() -> None:
    later = by_query(lambda index, scores: (scores * SCALE + torch.where(index <= INDEX, -1e9, 0.0)).softmax(-1))
    assert findings_of(later) == ()
    every = by_query(lambda index, scores: (scores * SCALE + torch.where(INDEX >= 0, -1e9, 0.0 * index)).softmax(-1))
    (finding,) = findings_of(every)
    assert finding.sentence.startswith("The mask masks out every key for every query")
    assert f"all {2 * N * N} pairs" in finding.evidence


@pytest.mark.parametrize(
    ("weights_of", "sentence"),
    [
        (
            lambda index, scores: (scores * SCALE).softmax(-1) * (index >= INDEX),
            "The mask is applied after the softmax",
        ),
        (lambda _, scores: (scores * SCALE).softmax(-1) * 0.9, "The weights are changed after the softmax"),
        (lambda _, scores: (scores * SCALE).softmax(-1), ""),
    ],
)
def test_weights_of_one_query_at_a_time_sum_to_one(weights_of: Callable[[int, Tensor], Tensor], sentence: str) -> None:
    findings = [each for each in findings_of(by_query(weights_of)) if each.check == "softmax"]
    assert len(findings) == bool(sentence)
    assert all(finding.sentence.startswith(sentence) for finding in findings)


# -- the axis of the softmax ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights_of", "sentence"),
    [
        (
            lambda scores: scores.flatten(2).softmax(-1).view_as(scores),
            "The softmax runs over queries and keys together",
        ),
        (lambda scores: scores.softmax(-1).cumsum(-1), "The weights are changed after the softmax"),
        (lambda scores: scores.softmax(1), "The softmax runs over heads or batch items"),
        (lambda scores: scores.softmax(-2), "The softmax runs over the queries instead of the keys"),
    ],
)
def test_the_axis_of_the_softmax_is_named_where_it_is_known(
    weights_of: Callable[[Tensor], Tensor], sentence: str
) -> None:
    (finding,) = [each for each in findings_of(by_weights(weights_of)) if each.check == "softmax"]
    assert finding.sentence.startswith(sentence)


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4, 7))
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_far_keys_are_not_masked_out(factor: float, seed: int) -> None:
    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (-(q.unsqueeze(3) - k.unsqueeze(2)).pow(2).sum(-1)).softmax(-1) @ v

    assert trace_of(by_distance, factor=factor, length=12, seed=seed).findings == ()


# -- the order of the keys --------------------------------------------------------------------------------------------


def flipped_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.flip(2).mT * SCALE).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v.flip(2)


def flipped_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v.flip(2)


@pytest.mark.parametrize(
    ("core", "order"), [(flipped_keys, "key 0 and value 0"), (flipped_values, "key 5 and value 0")]
)
def test_keys_in_another_order_than_the_queries_are_no_fault_of_another_operation(core: Core, order: str) -> None:
    sentence = "Queries, keys and values are in different orders: the causal mask does not hide the future tokens."
    (suspicion,) = findings_of(core)
    assert (suspicion.sentence, suspicion.sure) == (sentence, False)
    assert suspicion.evidence == f"The last token is query 5, {order}."
    report = mha_inspect.check(Attention(core).eval(), torch.randn(2, N, E), intent=mha_inspect.Intent(causal=True))
    assert [(finding.sentence, finding.sure) for finding in report.findings] == [(sentence, True)]


def test_no_other_operation_is_blamed_if_the_order_of_the_keys_is_unknown() -> None:
    flipped = by_query(
        lambda index, scores: (scores.flip(-1) * SCALE).masked_fill(FUTURE[index], -torch.inf).softmax(-1).flip(-1)
    )
    report = mha_inspect.check(Attention(flipped).eval(), torch.randn(2, N, E), intent=mha_inspect.Intent(causal=True))
    assert [finding.sentence for finding in report.findings] == ["An output depends on a future token."]


# -- heads of one feature ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys_first", [False, True])
@pytest.mark.parametrize("heads", [4, 8])
def test_heads_of_one_feature_are_not_split_without_a_transpose(keys_first: bool, heads: int) -> None:
    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (k @ q.mT).softmax(-2).mT if keys_first else (q @ k.mT).softmax(-1)
        return weights @ v

    trace = mha_inspect.trace(Attention(core, width=8, heads=heads).eval(), torch.randn(2, 5, 8))
    (attention,) = trace.attentions
    assert attention.kind == ("self",)
    axes = {stage.name: stage.axes for stage in attention.stages}
    assert axes["q_proj"] == ("batch query heads" if heads == 8 else "batch query (heads head_dim)")

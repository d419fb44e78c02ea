"""What is said of one attention between plain projections: it is true, whatever the code between them is written with.

The context of the function is `batch heads query head_dim`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mha_inspect
from mha_inspect.reports.check import CheckReport, Finding
from mha_inspect.reports.trace import Trace

from ...corpus.planted import D, E, Right

B, N = 2, 6
SCALE = D**-0.5
INDEX = torch.arange(N)
FUTURE = INDEX[None] > INDEX[:, None]

Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(core: Core) -> Right:
    return Right(attend=lambda module, q, k, v: core(q, k, v)).eval()


def trace_of(core: Core) -> Trace:
    torch.manual_seed(0)
    return mha_inspect.trace(attention(core), torch.randn(B, N, E))


def findings_of(core: Core) -> tuple[Finding, ...]:
    return trace_of(core).findings


def checked(core: Core) -> CheckReport:
    return mha_inspect.check(attention(core), torch.randn(B, N, E), intent=mha_inspect.Intent(causal=True))


def by_query(weights_of: Callable[[int, Tensor], Tensor]) -> Core:
    """Return attention of one query after another; its scores are `batch heads key`."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for index in range(N):
            scores = (q[:, :, index : index + 1] * k).sum(-1) * SCALE
            contexts.append((weights_of(index, scores)[..., None] * v).sum(2))
        return torch.stack(contexts, 2)

    return core


def by_weights(weights_of: Callable[[Tensor], Tensor]) -> Core:
    return lambda q, k, v: weights_of(q @ k.mT * SCALE) @ v


def test_a_mask_masks_out_every_key_only_if_it_does_so_in_every_turn() -> None:
    later = by_query(lambda index, scores: (scores + torch.where(index <= INDEX, -1e9, 0.0)).softmax(-1))
    assert findings_of(later) == ()
    every = by_query(lambda index, scores: (scores + torch.where(INDEX >= 0, -1e9, 0.0 * index)).softmax(-1))
    (finding,) = findings_of(every)
    assert finding.sentence.startswith("The mask masks out every key for every query")
    assert f"all {B * N * N} pairs" in finding.evidence


def softmaxes(core: Core) -> list[str]:
    return [finding.sentence for finding in findings_of(core) if finding.check == "softmax"]


def test_weights_of_one_query_at_a_time_sum_to_one() -> None:
    assert softmaxes(by_query(lambda index, scores: scores.softmax(-1))) == []
    (late,) = softmaxes(by_query(lambda index, scores: scores.softmax(-1) * (index >= INDEX)))
    assert late.startswith("The mask is applied after the softmax")
    (changed,) = softmaxes(by_query(lambda index, scores: scores.softmax(-1) * 0.9))
    assert changed.startswith("The weights are changed after the softmax")


@pytest.mark.parametrize(
    ("weights_of", "begins"),
    [
        (lambda scores: scores.flatten(2).softmax(-1).view_as(scores), "The softmax runs over queries and keys"),
        (lambda scores: scores.softmax(-1).cumsum(-1), "The weights are changed after the softmax"),
        (lambda scores: scores.softmax(1), "The softmax runs over heads or batch items"),
        (lambda scores: scores.softmax(-2), "The softmax runs over the queries instead of the keys"),
    ],
)
def test_the_axis_of_the_softmax_is_named_where_it_is_known(
    weights_of: Callable[[Tensor], Tensor], begins: str
) -> None:
    (sentence,) = softmaxes(by_weights(weights_of))
    assert sentence.startswith(begins)


def test_far_keys_are_not_masked_out() -> None:
    def by_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (-(q.unsqueeze(3) - k.unsqueeze(2)).pow(2).sum(-1) * 2).softmax(-1) @ v

    assert findings_of(by_distance) == ()


def flipped_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.flip(2).mT * SCALE).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v.flip(2)


def flipped_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SCALE).masked_fill(FUTURE, -torch.inf).softmax(-1) @ v.flip(2)


def flipped_throughout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flipped_keys(q.flip(2), k, v).flip(2)


@pytest.mark.parametrize(
    ("core", "order"), [(flipped_keys, "key 0 and value 0"), (flipped_values, f"key {N - 1} and value 0")]
)
def test_keys_in_another_order_than_the_queries_are_no_fault_of_another_operation(core: Core, order: str) -> None:
    sentence = "Queries, keys and values are in different orders: the causal mask does not hide the future tokens."
    (suspicion,) = findings_of(core)
    assert (suspicion.sentence, suspicion.sure) == (sentence, False)
    assert suspicion.evidence == f"The last token is query {N - 1}, {order}."
    assert [(finding.sentence, finding.sure) for finding in checked(core).findings] == [(sentence, True)]
    assert findings_of(flipped_throughout) == ()


def test_no_other_operation_is_blamed_if_the_order_of_the_keys_is_unknown() -> None:
    flipped = by_query(
        lambda index, scores: scores.flip(-1).masked_fill(FUTURE[index], -torch.inf).softmax(-1).flip(-1)
    )
    assert [finding.sentence for finding in checked(flipped).findings] == ["An output depends on a future token."]

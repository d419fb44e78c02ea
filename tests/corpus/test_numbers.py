"""The numbers of an entry's stages are those of attention, in float64, and recording changes none of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

from .every import ENTRIES, entries
from .runs import Numbers, returned_by, shown, traced
from .test_truth import NOT_YET

ATTENDING = [name for name in entries() if name not in NOT_YET]


@pytest.mark.parametrize("name", ENTRIES)
def test_recording_changes_no_bit_of_the_output(name: str) -> None:
    entry = ENTRIES[name]
    module, (args, kwargs) = entry.made(), entry.arguments()
    with torch.set_grad_enabled(entry.grad):
        plain = module(*args, **kwargs)
    for left, right in zip(tensors_in(plain), tensors_in(returned_by(name)), strict=True):
        assert torch.equal(left, right)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    tensors = list[Tensor]()
    for part in value if isinstance(value, (list, tuple)) else ():
        tensors += tensors_in(part)
    return tensors


@pytest.mark.parametrize("name", ATTENDING)
def test_stages_are_the_steps_of_attention(name: str) -> None:
    for attention, truth in shown(name):
        numbers = Numbers(attention, truth)
        last = numbers.of(numbers.last_scores)
        if truth.softmax:
            assert_close(last.softmax(-2 if truth.over == "query" else -1), numbers.weights())
        sums = numbers.weights().sum(-2 if truth.over == "query" else -1)
        if truth.over:
            assert_close(sums, torch.ones_like(sums))
        elif truth.weigh is None:
            assert sums.max() < 1
        if truth.plain:
            assert_close(numbers.average(), numbers.of("context"))
        if truth.joined and "concat" in numbers.stages and "batch heads" in truth.split:
            assert_close(numbers.of("concat"), numbers.of("context"))


@pytest.mark.parametrize("name", ATTENDING)
def test_scores_are_products_of_queries_and_keys(name: str) -> None:
    for attention, truth in shown(name):
        numbers = Numbers(attention, truth)
        if "q_heads" not in numbers.stages or truth.scale is None:
            continue
        assert truth.scores_scale is not None
        assert_close(numbers.products() * truth.scores_scale, numbers.of("scores"))
        if truth.cap is not None:
            capped = truth.cap * torch.tanh(numbers.of("scores") / truth.cap)
            assert_close(numbers.of("masked_scores").tril(), capped.tril())


@pytest.mark.parametrize("name", [name for name in ATTENDING if ENTRIES[name].attentions[0].pair])
def test_scores_are_those_of_each_pair(name: str) -> None:
    """In float64, where they are no dot products."""
    for attention, truth in shown(name):
        numbers = Numbers(attention, truth)
        q, k = numbers.of("q_heads")[..., :, None, :], numbers.of("k_heads")[..., None, :, :]
        with torch.no_grad():
            assert_close(ENTRIES[name].made().pair(q, k), numbers.of("scores"))


@pytest.mark.parametrize("name", [name for name in ATTENDING if ENTRIES[name].attentions[0].weigh is not None])
def test_weights_are_what_the_scores_are_made_to(name: str) -> None:
    for attention, truth in shown(name):
        numbers = Numbers(attention, truth)
        assert truth.weigh is not None
        assert_close(truth.weigh(numbers.of("scores")), numbers.of("weights"))


@pytest.mark.parametrize("name", [name for name in ATTENDING if ENTRIES[name].attentions[0].scale is not None])
def test_the_scale_is_that_of_the_weights(name: str) -> None:
    """Measured from q·k and the weights alone: what is left of their logarithms has no part of q·k."""
    for attention, truth in shown(name):
        if truth.bias or truth.mixed or truth.weigh is not None or not truth.plain:
            continue
        numbers = Numbers(attention, truth)
        products, weights = numbers.products(), numbers.weights()
        measured = slope(products.mT, weights.mT) if truth.over == "query" else slope(products, weights)
        assert attention.scale == pytest.approx(measured * truth.early, rel=1e-3)


def slope(products: Tensor, weights: Tensor) -> float:
    """Return a of weights ∝ exp(a · products), row by row where a key has weight."""
    seen = weights > 1e-12
    count = seen.sum(-1, keepdim=True)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(seen, x, 0)
        return torch.where(seen, x - x.sum(-1, keepdim=True) / count, 0)

    logs, x = centred(weights.clamp(min=1e-300).log()), centred(products)
    a = float((logs * x).sum() / x.square().sum())
    assert_close(logs, a * x)
    return a


def test_a_scale_that_is_no_number_is_one_for_each_head() -> None:
    numbers = Numbers(*next(shown("UnitHeads")))
    products = numbers.products()
    slopes = [slope(products[:, head], numbers.weights()[:, head]) for head in range(3)]
    assert slopes == pytest.approx(ENTRIES["UnitHeads"].made().temperature.flatten().tolist(), rel=1e-4)
    assert math.isnan(traced("UnitHeads").attentions[0].scale)


def assert_close(left: Tensor, right: Tensor, rtol: float = 2e-4) -> None:
    """Assert that numbers are equal within float32's rounding, where neither was masked with a huge number."""
    left, right = torch.broadcast_tensors(left.nan_to_num(0, 0, 0), right.nan_to_num(0, 0, 0))
    seen = (left.abs() < 1e6) & (right.abs() < 1e6)
    torch.testing.assert_close(left[seen], right[seen], rtol=rtol, atol=2e-4)


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "causal", "hidden", "added", "grouped"])
def test_a_kernel_is_shown_as_precisely_as_it_computes(dtype: torch.dtype, kind: str) -> None:
    """Half precision is summed in float32, as inside of kernels: its scores are not rounded to half."""
    generator = torch.Generator().manual_seed(0)
    heads = 1 if kind == "grouped" else 3
    q, k, v = (torch.randn(2, h, n, 16, generator=generator).to(dtype) for h, n in ((3, 5), (heads, 7), (heads, 7)))
    seen = torch.ones(5, 7, dtype=torch.bool).tril()
    added = torch.randn(5, 7, generator=generator).to(dtype)
    settings: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "hidden": {"attn_mask": seen},
        "added": {"attn_mask": added},
        "grouped": {"enable_gqa": True},
    }[kind]
    (attention,) = mha_inspect.trace(Kernel(), q, k, v, keep=True, **settings).attentions
    scores = q.double() @ k.double().mT / 4
    if kind in ("causal", "hidden"):
        scores = scores.masked_fill(~seen, -math.inf)
    weights = (scores + added.double() if kind == "added" else scores).softmax(-1)
    shown = next(stage.tensor for stage in attention.stages if stage.name == "weights")
    precision = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(shown.double(), weights, rtol=precision, atol=0)

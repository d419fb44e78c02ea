"""What -1e9 and -inf have in common, where a fully masked row tells them apart, and masks that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mha_inspect.call.masks import merged_mask
from mha_inspect.errors import InputError
from mha_inspect.layers.per_head import mask_of_head

from .conftest import BATCH, HEADS, KEY, QUERY
from .declared import canonical_weights, load_weights


@pytest.mark.parametrize(("name", "finite"), [("split-heads", True), ("bert", True), ("fold-heads", False)])
def test_a_fully_masked_row(bench, name, finite):
    inputs = bench.inputs(padding=(0, QUERY))
    output, weights = bench.run(name, bench.build(name), inputs)
    assert not output[0].isnan().any()
    if finite:
        assert not output[1].isnan().any()
        torch.testing.assert_close(weights[1].sum(-1), torch.ones(HEADS, QUERY, dtype=torch.float64))
    else:
        assert output[1].isnan().all()


def test_partly_masked_rows_are_equal_to_the_bit(bench):
    """A weight behind -1e9 is exactly zero, as one behind -inf is, and the others are those of the same scores.

    Both layers get numbers of few binary places: their products and sums are exact in float64, so that the scores are
    the same bits on every CPU, in whatever order its kernels add.
    """
    weights = canonical_weights(bench.spec())
    inputs = bench.inputs(padding=(0, 3))
    x = (inputs.tensors[0] * 4).round() / 4
    inputs = replace(inputs, tensors=(x, x, x))
    rows = []
    for name in ("split-heads", "fold-heads"):
        layer = bench.build(name)
        load_weights(layer, weights)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_((parameter * 16).round() / 16)
        rows.append(bench.run(name, layer, inputs)[1])
    assert rows[0][1, ..., -3:].count_nonzero() == 0
    assert (rows[0] > 0.01).sum() > rows[0].numel() / 3  # no head looks at one key alone
    assert torch.equal(*rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["split-heads", "grouped-query"])
def test_masked_weights_are_zero_in_every_dtype(bench, name, dtype):
    inputs = bench.inputs(bench.spec(dtype=dtype), causal=True)
    output, weights = bench.run(name, bench.build(name, dtype=dtype), inputs)
    assert output.dtype == getattr(torch, dtype)
    assert weights.triu(1).count_nonzero() == 0
    assert torch.isfinite(output).all()


def test_split_heads_refuses_an_additive_mask_that_float16_cannot_hold(bench):
    inputs = bench.inputs(bench.spec(dtype="float16"), mask=torch.zeros(QUERY, QUERY, dtype=torch.float16))
    with pytest.raises(InputError, match="float16 has no numbers small enough"):
        inputs.into("split-heads", bench.build("split-heads", dtype="float16"))


def merged_in(bench, given):
    masks = given.into("torch", bench.build("torch")).kwargs
    padding = given_padding(masks.get("key_padding_mask"))
    return merged_mask(masks.get("attn_mask"), padding, "boolean", torch.float64, BATCH, "")


def given_padding(mask):
    # torch takes two masks of one kind; merged takes padding as booleans.
    return mask if mask is None or mask.dtype == torch.bool else mask == float("-inf")


def test_each_head_gets_its_own_mask(bench):
    mask = torch.zeros(BATCH * HEADS, QUERY, KEY, dtype=torch.bool)
    mask[1 * HEADS + 2, 3, 4] = True
    given = bench.inputs(mask=mask, key_len=KEY)
    both = merged_in(bench, given)
    assert both.nonzero().tolist() == [[1, 2, 3, 4]]
    assert mask_of_head(both, 2).nonzero().tolist() == [[1, 3, 4]]
    assert mask_of_head(both, 1).count_nonzero() == 0

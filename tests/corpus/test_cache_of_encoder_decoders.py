"""A cache beside a bias by relative positions, and beside an encoder: T5 by transformers, right and with a fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from mha_inspect import Intent, check
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport

SIZES: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
LENGTH = 9


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, 50, (2, length), generator=torch.Generator().manual_seed(length))


def call(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return T5 and its arguments."""
    torch.manual_seed(0)
    if name == "encoder and decoder":
        return T5ForConditionalGeneration(T5Config(**SIZES)).eval(), {"input_ids": ids(7), "decoder_input_ids": ids()}
    decoder = T5Stack(T5Config(**SIZES, is_decoder=True, use_cache=True)).eval()
    return decoder, {"input_ids": ids(), "encoder_hidden_states": torch.randn(2, 7, 32)}


@contextmanager
def bias_from_zero() -> Iterator[None]:
    """Count the positions of the queries from 0 in every call, as if there were no cache."""
    right = T5Attention.compute_bias

    def wrong(self: T5Attention, query_length: int, key_length: int, device: Any = None, **_: Any) -> torch.Tensor:
        return right(self, query_length, key_length, device=device)  # type: ignore[no-any-return]

    T5Attention.compute_bias = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        T5Attention.compute_bias = right  # type: ignore[method-assign]


def report_of(name: str) -> CheckReport:
    module, given = call(name)
    return check(module, **given, only="cache")


@pytest.mark.parametrize("name", ["decoder", "encoder and decoder"])
def test_a_bias_of_relative_positions_is_checked_with_the_cache(name: str) -> None:
    right = report_of(name)
    assert not right.findings
    assert [passed.check for passed in right.passed] == ["cache"]
    with bias_from_zero():
        (finding,) = report_of(name).findings
    assert finding.sure
    assert "The keys are equal, and the bias differs: position 4 adds" in finding.sentence
    assert "as for a query at position 0" in finding.sentence


def test_a_second_output_that_is_no_cache_is_no_fault() -> None:
    """T5Attention returns its bias second, and fills the cache that it is given."""
    layer = T5Attention(T5Config(**SIZES, is_decoder=True), has_relative_attention_bias=True, layer_idx=0).eval()
    with pytest.raises(InputError, match="the second output is a tensor, which cache does not take"):
        check(layer, torch.randn(2, LENGTH, 32), intent=Intent(cache="cache"), only="cache")

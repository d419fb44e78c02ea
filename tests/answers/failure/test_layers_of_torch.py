"""A failure inside a layer of torch is shown at the user's line, not at one of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mha_inspect import recording, trace
from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Failure

HERE = Path(__file__).name


def failure_of(module: nn.Module, *args: object, **kwargs: object) -> Failure:
    with pytest.raises(ForwardError) as failed:
        trace(module, *args, **kwargs)  # the line of the user
    failure = failed.value.trace.failure
    assert failure is not None
    return failure


def test_a_layer_that_is_called_itself_fails_at_the_call_of_trace() -> None:
    x = torch.randn(2, 7, 32)
    layer = nn.MultiheadAttention(32, 4)
    failure = failure_of(layer, x, x, x, key_padding_mask=torch.zeros(2, 7).bool())
    assert HERE in failure.source
    assert failure.line == "trace(module, *args, **kwargs)  # the line of the user"
    assert "torch/" not in failure.source


def test_a_block_fails_at_its_own_line() -> None:
    layer, x = nn.MultiheadAttention(32, 4), torch.randn(2, 7, 32)
    with pytest.raises(AssertionError), recording() as seen:
        layer(x, x, x, key_padding_mask=torch.zeros(2, 7).bool())
    assert seen.trace.failure is not None
    assert seen.trace.failure.line.startswith("layer(x, x, x")


class Padded(nn.Module):
    """An encoder converts its padding mask before a layer of it raises."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=pad)  # type: ignore[no-any-return]


def test_a_tensor_inside_a_running_layer_is_not_called_its_output() -> None:
    failure = failure_of(Padded(), torch.randn(2, 7, 16), torch.zeros(2, 8, dtype=torch.bool))
    assert not any("encoder(...)" in operand.name for operand in failure.operands)
    assert failure.cause is not None
    assert "key_padding_mask is [2, 8]" in failure.cause.explanation

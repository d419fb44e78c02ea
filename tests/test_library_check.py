"""What the library's `check` says of an intent that is none, and of a forward that raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mha_inspect
from mha_inspect.errors import ForwardError, SpecError

from .call.styles import Attention

X = torch.randn(2, 5, 8)


def test_a_forward_that_raises_has_its_cause() -> None:
    module = Attention(8, 3).train()
    with pytest.raises(ForwardError, match="Width 8 cannot be split into 3 heads") as raised:
        mha_inspect.check(module, X)
    assert isinstance(raised.value.__cause__, RuntimeError)
    failure = raised.value.trace.failure
    assert failure is not None
    assert failure.cause is not None
    assert failure.cause.name == "heads_do_not_divide"
    assert module.training


def test_arguments_that_do_not_fit_raise_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        mha_inspect.check(Attention(8, 2), X, X, X)


def test_an_intent_that_is_a_dict_is_written_out() -> None:
    intent: Any = {"causal": True, "window": 4}
    with pytest.raises(TypeError, match=r"Give mha_inspect\.Intent\(causal=True, window=4\)"):
        mha_inspect.check(Attention(8, 2), X, intent=intent)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"causal": "yes"}, "causal has to be True or False"),
        ({"causal": 1}, "causal has to be True or False"),
        ({"window": "4"}, "window has to be a whole number"),
        ({"window": True}, "window has to be a whole number"),
        ({"padding": 3}, "padding has to be the name of an argument"),
        ({"reference": "torch"}, "reference has to be a torch.nn.Module"),
    ],
)
def test_an_intent_of_another_type_is_refused(setting: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        mha_inspect.Intent(**setting)

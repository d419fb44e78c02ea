"""The call that raised, read off the traceback: the same as is seen by watching, and nothing is run twice for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mha_inspect.answers.failure.called import Reading, dispatched, read_call
from mha_inspect.answers.failure.witness import Witness
from mha_inspect.record.arguments import tensors_in
from mha_inspect.record.run import record_until_failure

from . import test_failure_causes as causes


class Block(nn.Module):
    """Calls a function, and counts how often."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.5)
        self.body, self.calls = body, 0

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def forward(self, *args: torch.Tensor) -> Any:
        return self.body(self, *args)


def read(module: nn.Module, *args: Any) -> tuple[Reading, Any]:
    attempt = record_until_failure(module, args, {})
    assert attempt.error is not None
    return read_call(attempt.error, attempt.recorder, attempt.recording.ops), attempt


def shapes(*given: Any) -> list[Any]:
    return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for _, tensor in tensors_in(given)]


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not say which expression was running")
MISTAKES = [(getattr(causes.HAND, name), args) for name, _, args in causes.BY_HAND]
MISTAKES += [(getattr(causes.OWN, name), args) for name, args in causes.OTHERS]
BY_A_FUNCTION = ("PackedNotTransposed",)


@pytest.mark.parametrize(("cls", "args"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_it_is_the_call_that_watching_sees(cls: type[nn.Module], args: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    module = cls().eval()
    reading, _ = read(module, *args)
    witness = Witness()
    watched = record_until_failure(module, args, {}, watching=witness)
    assert watched.error is not None
    call = witness.took(watched.error)
    assert reading.told is (cls.__name__ not in BY_A_FUNCTION)
    if not reading.told or call is None:
        assert reading.call is None
        return
    assert reading.call is not None
    assert reading.call.name == call.name
    assert shapes(reading.call.args, reading.call.kwargs) == shapes(call.args, call.kwargs)


X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (lambda m, x: m.proj(x).view(2, 5, -1), True),
        (lambda m, x: torch.matmul(m.proj(x), m.proj(x)), True),
        (lambda m, x: x @ (x * 2), True),
        (lambda m, x: x.view(*[2, 5], -1), True),
        (lambda m, x: torch.cat([x, x[:, :3].transpose(1, 2)], dim=1), True),
        (lambda m, x: x[:, 9], True),
        (lambda m, x: x.masked_fill(x[0].mT > 0, 0.0), True),
        (lambda m, x: x.view(2, x.shape[1] + len(x), -1), True),
        (lambda m, x: {"x": x}["y"], True),
        (lambda m, x: int("x"), True),
        (lambda m, x: x.nothing, True),
        (lambda m, x: m.counted(x).view(2, 5, -1), False),
        (lambda m, x: F.dropout(x, 0.5).view(2, 5, -1), False),
        (lambda m, x: m.drop(x).view(2, 5, -1), False),
        (lambda m, x: x.add_(1).view(2, 5, -1), False),
        (lambda m, x: x.view(2, next(iter([5])), -1), False),
    ],
)
def test_what_may_count_draw_or_write_is_not_worked_out_again(body: Callable[..., Any], told: bool) -> None:
    module = Block(body)
    before, state = X.clone(), torch.get_rng_state()
    attempt = record_until_failure(module, (X,), {})
    after, calls, ran = X.clone(), module.calls, torch.get_rng_state()
    assert attempt.error is not None
    reading = read_call(attempt.error, attempt.recorder, attempt.recording.ops)
    assert reading.told is told
    assert torch.equal(X, after)
    assert module.calls == calls <= 1
    assert torch.equal(torch.get_rng_state(), ran)
    X.copy_(before)
    torch.set_rng_state(state)


def test_arguments_that_are_made_in_the_call_are_those_of_the_recording() -> None:
    def body(module: Block, x: torch.Tensor) -> torch.Tensor:
        return (module.proj(x) * 3) @ x.transpose(1, 2).contiguous().transpose(1, 2)

    reading, attempt = read(Block(body), X)
    assert reading.call is not None
    found = {id(tensor): known for tensor, known in reading.made}
    left, right = (found[id(tensor)] for tensor in reading.call.args)
    names = [attempt.recording.producer(tensor).name for tensor in (left, right)]
    assert names == ["aten.mul.Tensor", "aten.transpose.int"]
    assert left.shape == (2, 7, 24)


def test_the_operation_that_was_dispatched_is_in_the_traceback() -> None:
    _, attempt = read(Block(lambda m, x: m.proj(x[..., :7])), X)
    assert dispatched(attempt.error) == "aten.mm.default"
    _, attempt = read(Block(lambda m, x: x.view(2, 5, -1)), X)
    assert dispatched(attempt.error) == "aten.view.default"
    _, attempt = read(Block(lambda m, x: x[0][0] @ x.unsqueeze(0)[..., :3]), X)
    assert dispatched(attempt.error) in ("", "aten.mm.default", "aten.bmm.default")

"""The call that raised, read off the traceback: the same as is seen by watching, and nothing is run again for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from mha_inspect.answers.failure import site
from mha_inspect.answers.failure.call import dispatched, read_call
from mha_inspect.answers.failure.expression import Reading, name_of
from mha_inspect.naming.subject import Run, run
from mha_inspect.record.arguments import tensors_in

from . import test_failure_causes as causes

SAYS_WHERE = sys.version_info >= (3, 11)
"""Whether Python says which expression was running; else the operation that raised is told, and what it was given."""


class Watch(TorchFunctionMode):
    """The oracle: remembers the call of torch that raised last, with what it was given."""

    raised: tuple[str, Any] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.raised = name_of(func), shapes(args, kwargs)
            raise


class Block(nn.Module):
    """Calls a function, and counts how often."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.proj, self.other = nn.Linear(24, 24), nn.Linear(24, 24)
        self.drop = nn.Dropout(0.5)
        self.body, self.calls = body, 0

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def split(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.proj(x).view(2, -1, 3, 8).transpose(1, 2)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.body(self, *args)


def read(module: nn.Module, *args: Any) -> tuple[Reading, Run]:
    attempt = run(module, args, {})
    assert attempt.error is not None
    assert attempt.recorder is not None
    return read_call(attempt.error, attempt.recorder, attempt.recording, in_block=False), attempt


def shapes(*given: Any) -> list[Any]:
    return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for _, tensor in tensors_in(given)]


MISTAKES = [(getattr(causes.HAND, name), args) for name, _, args in causes.BY_HAND]
MISTAKES += [(getattr(causes.OWN, name), args) for name, args in causes.OTHERS]


@pytest.mark.parametrize("positions", [True, False], ids=["", "as on 3.10"])
@pytest.mark.parametrize(("cls", "args"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_it_is_the_call_that_watching_sees(
    monkeypatch: pytest.MonkeyPatch, cls: type[nn.Module], args: tuple[Any, ...], positions: bool
) -> None:
    if not positions:
        monkeypatch.setattr(site, "_position", lambda frame, tb: None)
    torch.manual_seed(0)
    reading, _ = read(cls().eval(), *args)
    watch = Watch()
    with watch, pytest.raises(Exception) as caught:  # noqa: PT011 - the plain run is the oracle
        cls().eval()(*args)
    assert reading.told
    if reading.call is None:
        assert watch.raised is None or caught.traceback[-1].frame.code.name == "forward"
        return
    assert watch.raised == (reading.call.name, shapes(reading.call.args, reading.call.kwargs))


def numbers() -> int:
    return 5


X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("body", "call", "whole"),
    [
        (lambda m, x: m.proj(x).view(2, 5, -1), "Tensor.view", True),
        (lambda m, x: torch.matmul(m.proj(x), m.other(x)), "torch.matmul", True),
        (lambda m, x: m.proj(x[:, :5]) @ m.proj(x), "Tensor.matmul", True),
        (lambda m, x: x @ (x * 2), "Tensor.matmul", True),
        (lambda m, x: x.view(*[2, 5], -1), "Tensor.view", True),
        (lambda m, x: torch.cat([x, x[:, :3].transpose(1, 2)], dim=1), "torch.cat", True),
        (lambda m, x: x[:, 9], "Tensor.__getitem__", True),
        (lambda m, x: x.masked_fill(x[0].mT > 0, 0.0), "Tensor.masked_fill", True),
        (lambda m, x: x.view(2, x.shape[1] + len(x), -1), "Tensor.view", True),
        (lambda m, x: {"x": x}["y"], "", True),
        (lambda m, x: int("x"), "", True),
        (lambda m, x: x.nothing, "", True),
        (lambda m, x: x.add_(1).view(2, 5, -1), "Tensor.view", True),
        (lambda m, x: F.dropout(x, 0.5) @ x, "Tensor.matmul", True),
        (lambda m, x: x @ m.drop(x), "Tensor.matmul", True),
        (lambda m, x: x[:, None] @ m.split(x), "Tensor.matmul", True),
        (lambda m, x: m.split(x) @ m.split(x), "Tensor.matmul", False),  # whose operations are whose is not recorded
        (lambda m, x: x.view(2, numbers(), -1), "Tensor.view", True),
        (lambda m, x: m.counted(x).view(2, 5, -1), "aten.view.default", True),
        (lambda m, x: x @ m.counted(x), "Tensor.matmul", False),
    ],
)
def test_what_may_count_draw_or_write_is_not_called_again(body: Callable[..., Any], call: str, whole: bool) -> None:
    watched, watch = Block(body), Watch()
    with watch, pytest.raises(Exception):  # noqa: B017, PT011 - the plain run is the oracle
        watched(X.clone())
    module, x = Block(body), X.clone()
    attempt = run(module, (x,), {})
    after, ran = x.clone(), torch.get_rng_state()
    assert attempt.error is not None
    assert attempt.recorder is not None
    reading = read_call(attempt.error, attempt.recorder, attempt.recording, in_block=False)
    if SAYS_WHERE:
        assert ("" if reading.call is None else reading.call.name, reading.told) == (call, whole)
    assert torch.equal(x, after)
    assert module.calls == watched.calls
    assert torch.equal(torch.get_rng_state(), ran)
    if SAYS_WHERE and reading.call is not None and whole:
        assert watch.raised is not None
        assert watch.raised[1] == shapes(reading.call.args, reading.call.kwargs)


def test_arguments_that_are_made_in_the_call_are_those_of_the_recording() -> None:
    def body(module: Block, x: torch.Tensor) -> torch.Tensor:
        return (module.proj(x) * 3) @ x.transpose(1, 2).contiguous().transpose(1, 2)

    reading, attempt = read(Block(body), X)
    assert reading.call is not None
    found = {id(tensor): known for tensor, known in reading.made}
    left, right = (found[id(tensor)] for tensor in reading.call.args)
    made_by = [attempt.recording.producer(tensor) for tensor in (left, right)]
    assert [op and op.name for op in made_by] == ["aten.mul.Tensor", "aten.transpose.int"]
    assert left.shape == (2, 7, 24)


def test_the_operation_that_was_dispatched_is_in_the_traceback() -> None:
    for body, names in (
        (lambda m, x: m.proj(x[..., :7]), {"aten.mm.default"}),
        (lambda m, x: x.view(2, 5, -1), {"aten.view.default"}),
        (lambda m, x: x[0][0] @ x.unsqueeze(0)[..., :3], {"", "aten.mm.default", "aten.bmm.default"}),
    ):
        _, attempt = read(Block(body), X)
        assert attempt.error is not None
        assert dispatched(attempt.error) in names

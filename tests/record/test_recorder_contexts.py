"""A recording belongs to the thread and the task that entered it, in whatever order blocks are left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mha_inspect.errors import RecordingError
from mha_inspect.record.recorder import Recorder

from ..recorded import record


def modes() -> tuple[int, bool, bool, bool]:
    """What torch knows of modes in this thread."""
    return (
        torch._C._len_torch_dispatch_stack(),
        dispatch._is_in_torch_dispatch_mode,
        dispatch._is_in_non_infra_torch_dispatch_mode,
        dispatch._is_in_any_mode_without_ignore_compile_internals,
    )


@pytest.fixture(autouse=True)
def no_mode_is_left_on() -> Iterator[None]:
    before = modes()
    yield
    assert modes() == before


def names(recorder: Recorder) -> list[str]:
    return [op.base_name for op in recorder.finish().ops]


def test_tasks_that_take_turns_are_kept_apart() -> None:
    async def task(function: Callable[[torch.Tensor], torch.Tensor], turns: int) -> list[str]:
        with Recorder() as recorder:
            x = torch.ones(3)
            for _ in range(turns):
                x = function(x)
                await asyncio.sleep(0)
        return names(recorder)

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(task(torch.exp, 2), task(torch.sin, 4), task(torch.cos, 3)))

    assert asyncio.run(both()) == [["ones", *["exp"] * 2], ["ones", *["sin"] * 4], ["ones", *["cos"] * 3]]


class Other(TorchDispatchMode):
    """A mode of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("second", [Recorder, Other])
def test_blocks_that_are_left_in_the_order_in_which_they_were_entered(second: Callable[[], Any]) -> None:
    first, second_block, before = Recorder(), second(), modes()
    first.__enter__()
    second_block.__enter__()
    x = torch.ones(3)
    first.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == before[0] + 1
    x.exp()
    second_block.__exit__(None, None, None)
    assert modes() == before
    x.sin()
    assert names(first) == ["ones"]
    assert (second_block.seen if isinstance(second_block, Other) else names(second_block)) == ["ones", "exp"]


def in_a_thread(function: Callable[[], Any]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # handed over, whatever it is
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_another_thread_is_not_recorded_and_cannot_leave_the_block() -> None:
    recorder = Recorder()
    with recorder:
        torch.ones(3).exp()
        assert in_a_thread(lambda: torch.ones(3).sin()) is None
        error = in_a_thread(lambda: recorder.__exit__(None, None, None))
        assert isinstance(error, RecordingError)
        assert "thread" in str(error)
        torch.ones(3).cos()  # it was told to end, though by the wrong one
    assert names(recorder) == ["ones", "exp"]


def test_a_recorder_is_entered_once_at_a_time() -> None:
    with Recorder() as recorder:
        with pytest.raises(RecordingError, match="has already started"):
            recorder.__enter__()
        torch.ones(3)
    with pytest.raises(RecordingError):
        recorder.__exit__(None, None, None)
    with recorder:
        torch.zeros(3)
    assert names(recorder) == ["ones", "zeros"]


class Net(nn.ModuleDict):
    """Two layers and a scale that is a tensor of no dimension."""

    def __init__(self) -> None:
        super().__init__({"first": nn.Linear(4, 5), "second": nn.Linear(5, 2)})
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self["first"](x).relu() * self.scale
        return self["second"](hidden) * torch.tensor(0.5)


def per_sample(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    given = dict(net.named_parameters())
    return vmap(grad(lambda p, row: functional_call(net, p, row).sum()), (None, 0))(given, x)["first.weight"]


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "vmap": lambda net, x: vmap(net)(x),
    "functional_call": lambda net, x: functional_call(net, {n: 2 * p for n, p in net.named_parameters()}, x),
    "per sample": per_sample,
    "ensemble": lambda net, x: vmap(lambda p: functional_call(net, p, x))(
        {name: torch.stack([p, 2 * p]) for name, p in net.named_parameters()}
    ),
    "checkpoint": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "reentrant checkpoint": lambda net, x: checkpoint(net, x.requires_grad_(), use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for jvp use it
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "block"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_inside_of_a_recording(name: str, is_root: bool) -> None:
    class Wrapped(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return TRANSFORMS[name](self[0], x)

    torch.manual_seed(0)
    module, x = Wrapped(Net()), torch.randn(3, 4)
    torch.manual_seed(1)
    plain = module(x)
    torch.manual_seed(1)
    if is_root:
        recording, returned = record(module, x, keep=True)
    else:
        with Recorder() as recorder:
            returned = module(x)
        recording = recorder.finish(returned)
    assert torch.equal(plain, returned)
    assert {op.module for op in recording.ops} >= {"0.first", "0.second"}

"""Whatever is asked, in whatever mode, of one thread or of many: nothing of torch's or Python's is changed."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as dispatch

import mha_inspect
from mha_inspect.errors import MhaInspectError


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_frozen() -> None:
    """Thaw what is frozen for other tests: here it is counted, and each of those that is freed would count."""
    gc.unfreeze()


_ASKED = ("is_", "get_", "_get_", "_is_", "_len_", "are_", "_are_")
_SPACES = (torch, torch._C, torch.backends, torch.backends.cuda, torch.backends.cudnn, torch.backends.mha, dispatch)
_OF_OTHERS = ("nvfuser", "caught_jit", "DTensor", "cuda_is", "available")
"""What warns when it is asked, or tells what hangs on other things than settings."""


def state() -> dict[str, Any]:
    """Every setting of torch's that can be asked for, and what of Python's a tool could leave changed."""
    answers: dict[str, Any] = {}
    for space in _SPACES:
        for name in dir(space):
            asked = (name.startswith(_ASKED) or name.endswith("_enabled")) and not any(o in name for o in _OF_OTHERS)
            if not asked or isinstance(getattr(space, name), type):
                continue
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = repr(getattr(space, name)())
                answers[f"{space.__name__}.{name}"] = "" if " at 0x" in said else said
    modules = vars(nn.modules.module)
    flags = {name: value for name, value in vars(dispatch).items() if isinstance(value, (bool, int))}
    return {
        **answers,
        **{f"dispatch.{name}": value for name, value in flags.items()},
        **{name: repr(value) for name, value in modules.items() if name.startswith("_global_")},
        "included": str(torch._C._dispatch_tls_local_include_set()),
        "excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "printing": repr(torch._tensor_str.PRINT_OPTS),
        "torch's numbers": torch.get_rng_state().tolist(),
        "Python's numbers": random.getstate(),
        "numpy's numbers": repr(np.random.get_state()),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)),
        "watching": (sys.gettrace(), sys.getprofile(), sys.excepthook, threading.excepthook, threading.active_count()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "process": (dict(os.environ), os.getcwd(), [*sys.path], sys.getrecursionlimit(), sys.getswitchinterval()),
        "warnings": repr(warnings.filters),
    }


class Attention(nn.Module):
    """A fused kernel, and a product that may not fit."""

    def __init__(self, num_heads: int, fails: bool) -> None:
        super().__init__()
        self.num_heads, self.fails = num_heads, fails
        self.packed = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return context.transpose(1, 2).flatten(2) @ (x if self.fails else x.mT)


def attention(num_heads: int = 2, *, fails: bool = False) -> nn.Module:
    """Build one without drawing from the generator."""
    with torch.random.fork_rng():
        return Attention(num_heads, fails).eval()


def encoder() -> nn.Module:
    """Build a layer of torch's, in the same way."""
    with torch.random.fork_rng():
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def _record(module: nn.Module, x: torch.Tensor) -> object:
    with mha_inspect.recording(keep=True) as seen:
        module(x)
    return seen.trace


ASKED: dict[str, Callable[[torch.Tensor], object]] = {
    "trace": lambda x: mha_inspect.trace(attention(), x),
    "trace, kept": lambda x: mha_inspect.trace(attention(), x, keep=True, show=mha_inspect.Show(stats=True)),
    "trace that fails": lambda x: mha_inspect.trace(attention(fails=True), x),
    "recording": lambda x: _record(attention(), x),
    "recording that fails": lambda x: _record(attention(fails=True), x),
    "params": lambda x: mha_inspect.params(attention(), x, per_head=True),
    "compare_heads": lambda x: mha_inspect.compare_heads((1, 2), attention, x),
    "diff": lambda x: mha_inspect.diff(attention(), attention(4), x, same_weights=True),
    "check": lambda x: mha_inspect.check(attention(), x),
    "encoder": lambda x: mha_inspect.trace(encoder(), x),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def ask(asked: str, mode: str, x: torch.Tensor) -> None:
    """Ask as told; what raises may raise."""
    with MODES[mode](), suppress(RuntimeError, MhaInspectError):
        ASKED[asked](x)


@pytest.mark.parametrize(
    ("asked", "mode"), [*((asked, "grad") for asked in ASKED), ("trace", "no_grad"), ("recording", "inference")]
)
def test_nothing_is_changed(asked: str, mode: str) -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    ask(asked, mode, x)  # what is imported for the first time may do as it likes
    before = state()
    ask(asked, mode, x)
    after = state()
    assert len(before) > 100
    assert gc.isenabled()
    assert {name: (before[name], after.get(name)) for name in before if before[name] != after.get(name)} == {}


def test_nothing_is_changed_by_eight_threads_at_once_and_each_has_its_own_answer() -> None:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    module = encoder()
    alone = {grad: str(_traced(module, x, grad)) for grad in (True, False)}
    before, answers, turn = state(), [], threading.Barrier(8)

    def run(grad: bool) -> None:
        turn.wait(30)
        answers.extend((grad, str(_traced(module, x, grad))) for _ in range(2))

    threads = [threading.Thread(target=run, args=(place % 2 == 0,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    assert all(answer == alone[grad] for grad, answer in answers)
    assert state() == before


def _traced(module: nn.Module, x: torch.Tensor, grad: bool) -> object:
    with torch.set_grad_enabled(grad):
        return mha_inspect.trace(module, x)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_the_process_does_not_grow_from_trace_to_trace() -> None:
    x = torch.randn(3, 5, 8)
    module = attention()
    gc.freeze()  # a collection looks through what these traces make, and not through what other tests left

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    with torch.no_grad():
        for _ in range(5):
            mha_inspect.trace(module, x)
        before = resident()
        for _ in range(30):
            mha_inspect.trace(module, x)
    assert resident() - before < 1_000_000

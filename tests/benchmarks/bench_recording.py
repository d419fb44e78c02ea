"""A traced and a recorded forward beside the plain one, in CPU time and in the memory of a process."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mha_inspect
from mha_inspect.layers.spec import Show
from mha_inspect.questions.trace import traced
from mha_inspect.running.subject import Subject

from .conftest import cpu_time
from .models import Gpt

Run = Callable[[torch.nn.Module, torch.Tensor], Any]

_GPT2, _BERT = "gpt2-like, 12 x 256, 2 x 64", "BERT-like, 12 x 768, 4 x 128"


def _record(model: torch.nn.Module, x: torch.Tensor) -> None:
    with mha_inspect.recording():
        model(x)


def _debug_mode(model: torch.nn.Module, x: torch.Tensor) -> None:
    with pytest.importorskip("torch.utils._debug_mode").DebugMode():
        model(x)


def _unjudged(model: torch.nn.Module, x: torch.Tensor) -> None:
    traced(Subject(model, (x,), {}), Show(), keep=False)


def _times(runs: dict[str, Run], model: torch.nn.Module, x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return the median CPU time of each, run in turn; the first round warms up."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(rounds + 1):
            for name, run_it in runs.items():
                start = cpu_time()
                run_it(model, x)
                took[name].append(cpu_time() - start)
    return {name: statistics.median(times[1:]) for name, times in took.items()}


def test_beside_torchs_debug_mode(add_row):
    """What each adds to a plain forward, all in turn, beside what torch's own DebugMode adds to it.

    A machine's speed is in both, so the ratios of two commits compare where both ran on one machine.
    """
    model, x = Gpt(12, 256).eval(), torch.randint(0, 1000, (2, 64))
    runs: dict[str, Run] = {"plain": lambda model, x: model(x), "DebugMode": _debug_mode, "recording()": _record}
    runs |= {"trace, not judged": _unjudged, "trace": mha_inspect.trace}
    times = _times(runs, model, x, 15) | _times({"params": mha_inspect.params}, model, x, 5)
    added = {name: time - times["plain"] for name, time in times.items()}
    bounds = {"recording()": 0.45, "trace, not judged": 1.2, "trace": 1.5, "params": 2.1}
    for name, bound in bounds.items():
        detail = (
            f"{added[name] * 1e3:.1f} ms against {added['DebugMode'] * 1e3:.1f} ms, plain {times['plain'] * 1e3:.1f} ms"
        )
        add_row(f"what {name} adds, 12 x 256", "what DebugMode adds", added[name] / added["DebugMode"], bound, detail)


def test_equal_layers(add_row):
    """What a further equal layer costs in `trace` beyond `recording()`, in ms."""
    x, beyond = torch.randint(0, 1000, (2, 64)), {}
    for layers, rounds in ((12, 5), (48, 3), (192, 1)):
        times = _times({"recording()": _record, "trace": _unjudged}, Gpt(layers, 64).eval(), x, rounds)
        beyond[layers] = (times["trace"] - times["recording()"]) * 1e3
    for few, many in ((12, 48), (48, 192)):
        detail = f"{beyond[many]:.0f} ms against {beyond[few]:.0f} ms"
        each = (beyond[many] - beyond[few]) / (many - few)
        add_row(f"trace beyond recording(), ms a layer, {few} to {many} layers", "one", each, 1.5, detail)


_PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, mha_inspect
from models import model_and_input
model, x = model_and_input(sys.argv[2])
small, few = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(1, 8, 16)
def record(module, *args):
    with mha_inspect.recording():
        module(*args)
run = {"plain": lambda module, *args: module(*args), "trace": mha_inspect.trace, "recording": record}[sys.argv[3]]
def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
with torch.no_grad():
    run(small, few, few, few)  # imports
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = kib("VmRSS")
    run(model, x)
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the high-water mark from /proc")
@pytest.mark.parametrize(
    ("how", "size", "bound"),
    [
        ("trace", _GPT2, 25.0),
        ("trace", _BERT, 60.0),
        ("recording", _BERT, 30.0),
    ],
)
def test_peak_memory(add_row, how, size, bound):
    """What a process needs at most beyond a plain forward, in MB."""

    def peak(how: str) -> float:
        command = [sys.executable, "-c", _PEAK, str(Path(__file__).parent), size, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024 / 1e6

    ours, plain = (statistics.median(peak(one) for _ in range(3)) for one in (how, "plain"))
    detail = f"{ours:.0f} MB against {plain:.0f} MB"
    add_row(f"peak of {how}, MB beyond, {size}", "plain", ours - plain, bound, detail)

"""Inside one process: a recorded forward beside the plain one, in time and in memory."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mha_inspect
from mha_inspect.record.recorder import Recorder, opened, record


@pytest.mark.parametrize("path", ["opened", "as it is"])
def test_recorded_forward(side_by_side, path):
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    x = torch.randn(8, 512, 512)
    settings = opened() if path == "opened" else torch.no_grad()
    with torch.no_grad(), settings:
        side_by_side(
            f"recorded forward, {path}",
            lambda: record(layer, x, x, x),
            "plain forward",
            lambda: layer(x, x, x),
            at_most=1.05,
            rounds=25,
        )


class _Nothing(TorchDispatchMode):
    """Does nothing: what is left is torch's own. Under any mode it adds a bias out of place, for one."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_that_does_nothing(side_by_side):
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    x = torch.randn(8, 512, 512)

    def run() -> None:
        with _Nothing():
            layer(x, x, x)

    with torch.no_grad(), opened():
        side_by_side(
            "opened, under a mode of torch's that does nothing",
            run,
            "plain forward",
            lambda: layer(x, x, x),
            at_most=math.inf,
            rounds=25,
        )


class _Block(torch.nn.Module):
    """A block of GPT-2, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        barred = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(barred, -math.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.after(x))))


def _blocks(width: int, heads: int, layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(_Block(width, heads) for _ in range(layers))).eval()


def test_a_small_model(side_by_side):
    """All that a recording adds shows: most of its operations take a few microseconds."""
    model, x = _blocks(256, 8, 12), torch.randn(2, 64, 256)

    def recorded() -> None:
        with mha_inspect.recording():
            model(x)

    with torch.no_grad():
        side_by_side("recording(), 12 layers of 256", recorded, "plain model", lambda: model(x), at_most=1.3, rounds=25)


def test_a_model_as_large_as_bert(side_by_side):
    model, x = _blocks(768, 12, 12), torch.randn(4, 128, 768)

    def recorded() -> None:
        with mha_inspect.recording():
            model(x)

    with torch.no_grad():
        side_by_side("recording(), 12 layers of 768", recorded, "plain model", lambda: model(x), at_most=1.05, rounds=9)


def test_the_time_of_an_operation(add_row):
    """What the recorder adds to an operation while it runs and afterwards, beside a mode that does nothing."""
    model, x, took = _blocks(256, 8, 12), torch.randn(2, 64, 256), defaultdict(list)

    def timed(name: str, run: Callable[[], object]) -> None:
        start = time.process_time()
        run()
        took[name].append(time.process_time() - start)

    def under(mode: TorchDispatchMode) -> None:
        with mode:
            model(x)

    with torch.no_grad():
        for _ in range(25):
            recorder = Recorder(model)
            timed("plain", lambda: model(x))
            timed("nothing", lambda: under(_Nothing()))
            timed("recorder", lambda recorder=recorder: under(recorder))
            timed("finish", recorder.finish)
    number = len(recorder.finish().ops)
    each = {name: sorted(times)[len(times) // 2] / number * 1e6 for name, times in took.items()}
    added, floor = each["recorder"] - each["plain"], each["nothing"] - each["plain"]
    detail = f"{added:.0f} us against {floor:.0f} us, and {each['finish']:.0f} us afterwards, {number} operations"
    add_row("recorder, added to an operation", "a mode that does nothing", added / floor, 2.5, detail)


_PEAK = """
import sys, torch
from mha_inspect.record.recorder import opened, record
layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
x = torch.randn(8, 512, 512)
small = x[:1, :8].contiguous()
def run(x):
    record(layer, x, x, x) if sys.argv[1] == "recorded" else layer(x, x, x)
def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))
with torch.no_grad(), opened():
    run(small)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
    before = kib("VmRSS")
    run(x)
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the high-water mark from /proc")
def test_peak_memory(add_row):
    def peak(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", _PEAK, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    recorded, plain = sorted(peak("recorded") for _ in range(5))[2], sorted(peak("plain") for _ in range(5))[2]
    detail = f"{recorded / 1024:.0f} MiB against {plain / 1024:.0f} MiB"
    add_row("recorded forward, peak memory", "plain forward", recorded / plain, 1.05, detail)


def test_recorded_model(side_by_side):
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    x = torch.randn(4, 256, 768)
    with torch.no_grad(), opened():
        side_by_side(
            "recorded model, 12 layers of 768",
            lambda: record(model, x),
            "plain model",
            lambda: model(x),
            at_most=1.10,
            rounds=11,
        )


@pytest.mark.parametrize("tool", ["torch's DebugMode", "torchinfo", "torchlens"])
def test_other_tools(side_by_side, tool):
    """What others take for the same model; those that are not installed are passed over."""
    layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    x = torch.randn(4, 256, 768)

    def run() -> None:
        if tool == "torchinfo":
            pytest.importorskip("torchinfo").summary(model, input_data=x, verbose=0)
        elif tool == "torchlens":
            pytest.importorskip("graphviz")  # torchlens does not start without it
            pytest.importorskip("torchlens").trace(model, x)
        else:
            debug_mode = pytest.importorskip("torch.utils._debug_mode")
            with debug_mode.DebugMode():
                model(x)

    with torch.no_grad(), opened():
        side_by_side(f"{tool}, 12 layers of 768", run, "plain model", lambda: model(x), at_most=math.inf, rounds=5)

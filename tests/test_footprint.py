"""What a pass needs of memory: counted by hand, and beside what torch really allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.settings import spec_for
from mha_inspect.layers.spec import InputSpec, RunSpec, Show
from mha_inspect.record.footprint import given_bytes, kept_bytes, peak_bytes
from mha_inspect.targets.load import load_layer, plan_layer
from mha_inspect.targets.room import Room, rough_need_of_layer

from .built import trace_layer
from .recorded import record


def test_lifetimes_by_hand() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = x * 2  # 40 bytes
        b = torch.cat((a, a, a))  # 120, beside a: 160
        c = b.view(5, 6).sum(0)  # 24, beside b: 144
        d = c[:3]  # a view of c
        e = d + 1  # 12, beside c: 36
        return torch.cat((e.expand(7, 3).flatten(), e))  # 84 + 96, beside e

    recording, _ = record(forward, torch.ones(10))
    assert peak_bytes(recording) == 84 + 96 + 12
    assert kept_bytes(recording) == 40 + 120 + 24 + 12 + 84 + 96
    assert given_bytes(recording) == 40
    # What is returned lives to the end: x * 2 beside the larger one that comes after it.
    recording, _ = record(lambda x: (x * 2, torch.cat((x, x)).sum()), torch.ones(10))
    assert peak_bytes(recording) == 40 + 80 + 4
    # In place nothing is added, and an expanded view takes no more than what it shows.
    recording, _ = record(lambda x: (x * 2).mul_(3).add_(1).expand(1000, 10), torch.ones(10))
    assert peak_bytes(recording) == kept_bytes(recording) == 40
    recording, _ = record(lambda x: x.view(2, 5), torch.ones(10))
    assert peak_bytes(recording) == kept_bytes(recording) == 0
    recording, _ = record(lambda: torch.zeros(0, 3))
    assert peak_bytes(recording) == 0


def test_what_is_given_is_counted_once() -> None:
    layer = nn.BatchNorm1d(7)
    x = torch.ones(5, 7)
    recording, _ = record(layer, x)
    assert given_bytes(recording) == 4 * (7 + 7 + 7 + 7 + 5 * 7) + 8  # num_batches_tracked is an int64
    mha = nn.MultiheadAttention(22, 2, batch_first=True)
    recording, _ = record(mha, *(torch.ones(3, 5, 22) for _ in range(3)))
    assert given_bytes(recording) == 4 * (4 * 22 * 22 + 4 * 22 + 3 * 3 * 5 * 22)
    x = torch.ones(3, 5, 22)
    recording, _ = record(mha, x, x, x)
    assert given_bytes(recording) == 4 * (4 * 22 * 22 + 4 * 22 + 3 * 5 * 22)


def allocated(run: Callable[[], Any]) -> int:
    """The oracle: most bytes that torch's allocator had given out at one time, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = run()
    now = most = 0
    assert watched.profiler is not None
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del result
    return most


INPUTS = InputSpec(batch=3, seq_len=67, causal=True)


@pytest.mark.parametrize("layer", ["torch", "split-heads", "per-head", "wide"])
def test_the_peak_of_a_run_is_what_torch_allocates(layer: str) -> None:
    """Between what a layer that drops its names needs, and as much again for those that hold on to them."""
    forward = load_layer(spec_for(LAYERS[layer], embed_dim=96, num_heads=6), INPUTS, RunSpec(), layer)
    recording = forward.recorded().recording
    real = allocated(forward.recorded)
    # What a kernel is compared with stands beside it.
    assert (0.4 if recording.kernels else 0.5) * real < peak_bytes(recording) <= real
    assert real <= kept_bytes(recording) + given_bytes(recording)


@pytest.mark.parametrize(("keep", "grad"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("layer", ["torch", "split-heads", "wide"])
def test_the_need_of_a_trace_is_what_torch_allocates(layer: str, keep: bool, grad: bool) -> None:
    """Not much less, or it would be killed; not more than twice, or what fits would be refused."""
    spec, run = spec_for(LAYERS[layer], embed_dim=96, num_heads=6), RunSpec(grad=grad)
    need = Room(kept=keep, statistics=keep).need(plan_layer(spec, INPUTS, run, layer).on_meta(None))
    show = Show(stats=keep)
    real = allocated(lambda: trace_layer(spec, INPUTS, run, show, layer=layer))
    assert 0.8 * real < need < 2.5 * real


@pytest.mark.parametrize("layer", LAYERS)
def test_the_rough_estimate_is_on_the_safe_side(layer: str) -> None:
    for sizes, inputs in (
        ({"embed_dim": 6, "num_heads": 6}, {"seq_len": 501}),
        ({"embed_dim": 512, "num_heads": 1}, {"seq_len": 2}),
        ({"embed_dim": 96, "num_heads": 8}, {"batch": 13, "seq_len": 7, "key_len": 301}),
        ({"embed_dim": 96, "num_heads": 8}, {"batch": 13, "seq_len": 301, "key_len": 7}),
    ):
        spec, asked = spec_for(LAYERS[layer], **sizes), InputSpec(**inputs)
        need = Room(kept=True).need(plan_layer(spec, asked, RunSpec(grad=True), layer).on_meta(None))
        assert need < 8 * rough_need_of_layer(spec, asked)

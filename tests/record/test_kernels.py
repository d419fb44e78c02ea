"""How PyTorch runs an attention is what torch itself dispatches and says, and what is hidden is what does not show."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mha_inspect.call.load import load_layer
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.measure.run_report import path_of
from mha_inspect.running.subject import Run

from ..built import trace_layer
from ..recorded import record, record_opened

BATCH, QUERY, EMBED, HEADS = 3, 5, 22, 2


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Names(TorchDispatchMode):
    """The oracle: the names of what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).rpartition(".")[0])
        return func(*args, **(kwargs or {}))


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "gradients": ({}, {"grad": True}),
    "training": ({"training": True}, {}),
    "no weights": ({}, {"need_weights": False}),
}
FUSED = ("aten._native_multi_head_attention", "aten._scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_kernel_is_the_one_that_torch_dispatches(name: str) -> None:
    layer, run = SETTINGS[name]
    spec = AttentionSpec(embed_dim=EMBED, num_heads=HEADS, **layer)
    inputs = InputSpec(batch=BATCH, seq_len=QUERY)
    trace = trace_layer(spec, inputs, RunSpec(**run))
    forward, oracle = load_layer(spec, inputs, RunSpec(**run)), Names()
    with torch.set_grad_enabled(run.get("grad", False)), oracle:
        forward.module(*forward.args, **forward.kwargs)
    fused = [kernel for kernel in FUSED if kernel in oracle.names]
    assert list(trace.path.opened) == fused
    if fused:
        assert trace.path.plain.startswith(fused[0])
    else:
        assert trace.path.plain.startswith("separate operations: ")
        named = trace.path.plain.removeprefix("separate operations: ").split(", ")
        assert {f"aten.{named[0]}", f"aten._{named[1]}", f"aten.{named[2]}"} <= set(oracle.names)
    assert bool(trace.path.reason) == (FUSED[0] not in fused)
    marked = {stage.name for stage in trace.attentions[0].stages if stage.opened}
    inside = {"scores", "weights"}
    whole = inside | {"q_proj", "k_proj", "v_proj", "q_heads", "k_heads", "v_heads", "context", "concat"}
    assert marked == (whole if FUSED[0] in fused else inside if fused else set())
    outer = {kernel.op for kernel in forward.recorded().recording.kernels if kernel.within is None}
    assert outer == {f"{kernel}.default" for kernel in fused}


def refusals_of(run: Callable[[], Any]) -> list[str]:
    """The oracle: torch's own `why_not_fast_path`, as it stands when the forward returns."""
    refusals: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is nn.MultiheadAttention.forward.__code__:
            refusals.append(frame.f_locals.get("why_not_fast_path", ""))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return refusals


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "none": ({}, {}, ""),
    "training": ({"train": True}, {}, "training is enabled"),
    "key is another": ({}, {"cross": True}, "non-self attention"),
    "no bias": ({"bias": False}, {}, ""),
    "two masks": ({}, {"masks": True}, ""),
    "autocast": ({}, {"autocast": True}, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_fast_path_is_refused_in_torchs_own_words(name: str) -> None:
    settings, run, words = copy.deepcopy(REFUSED[name])
    is_training = settings.pop("train", False)
    layer = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **settings}).train(is_training)
    x = drawn(BATCH, QUERY, EMBED)
    key = x.clone() if run.get("cross") else x
    masks = {}
    if run.get("masks"):
        masks = {"attn_mask": torch.eye(QUERY) > 0, "key_padding_mask": torch.zeros(BATCH, QUERY) > 0}

    def forward() -> Any:
        with torch.no_grad(), torch.autocast("cpu", enabled=run.get("autocast", False)):
            return layer(x, key, key, **masks)

    expected = refusals_of(forward)
    recording, _ = record(forward)
    assert list(recording.fast_path_refusals) == expected
    assert words in expected[0]
    taken = any(op.base_name == "_native_multi_head_attention" for op in recording.ops)
    assert taken == (name in ("none", "two masks", "autocast"))


def test_a_fast_path_that_is_left_without_a_word_is_said_to_be() -> None:
    layer = nn.MultiheadAttention(6, 2, bias=False, batch_first=True).eval()
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = Run(record_opened(layer, x, x, x)[0])
    assert seen.recording.fast_path_refusals == ("",)
    assert path_of(seen).reason == "torch gives no reason; its fast path requires biases"

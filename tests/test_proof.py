"""The proof sees a path that computes something else, and calls only rounding rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mha_inspect.record.proof import prove
from torch import nn

from mha_inspect.answers.trace import trace_module
from mha_inspect.record.recorder import opened
from mha_inspect.record.subject import Run, Subject
from mha_inspect.reports.trace import Proof
from mha_inspect.targets.spec import AttentionSpec, InputSpec, RunSpec

from .built import trace_layer

BATCH, QUERY, EMBED, HEADS = 3, 5, 22, 2
SPEC = {"embed_dim": EMBED, "num_heads": HEADS}
INPUTS = InputSpec(batch=BATCH, seq_len=QUERY)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def proof(run: dict[str, Any] | None = None, inputs: InputSpec = INPUTS, **spec: Any) -> Proof:
    return trace_layer(AttentionSpec(**{**SPEC, **spec}), inputs, RunSpec(**(run or {}))).proof


class Fused(nn.Module):
    """Fused attention, and something else beside it when it is opened."""

    def __init__(self, dropout: float = 0.0, wrong: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.packed = nn.Linear(EMBED, 3 * EMBED)
        self.dropout, self.wrong = dropout, wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        x = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)
        return x if torch.backends.mha.get_fastpath_enabled() else x * (1 + self.wrong)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_two_right_paths_agree(dtype: str, need_weights: bool) -> None:
    found = proof({"need_weights": need_weights}, dtype=dtype)
    assert found.agrees is True
    assert found.note == ""
    assert found.noise_floor is not None
    eps = torch.finfo(getattr(torch, dtype)).eps
    assert eps / 100 < found.noise_floor < 20 * eps


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("training", [False, True])
def test_an_opened_path_that_is_wrong_does_not_agree(
    monkeypatch: pytest.MonkeyPatch, dtype: str, training: bool
) -> None:
    softmax = nn.functional.softmax
    # The fused kernels do not call it: only the opened stages are wrong.
    monkeypatch.setattr(nn.functional, "softmax", lambda *args, **kwargs: softmax(*args, **kwargs) * 1.25)
    monkeypatch.setattr(torch, "softmax", lambda *args, **kwargs: softmax(*args, **kwargs) * 1.25)
    found = proof(dtype=dtype)
    assert found.agrees is False
    monkeypatch.undo()
    assert proof(dtype=dtype).agrees is True
    layer = Fused(wrong=0.25).to(getattr(torch, dtype)).train(training)
    x = drawn(BATCH, QUERY, EMBED).to(getattr(torch, dtype))
    assert trace_module(layer, x).proof.agrees is False
    layer.wrong = 0.0
    assert trace_module(layer, x).proof.agrees is True


def test_a_plain_path_that_is_wrong_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    native = torch._native_multi_head_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, weights = native(*args, **kwargs)
        output[1, 2, 3] += 1e-4
        return output, weights

    monkeypatch.setattr(torch, "_native_multi_head_attention", wrong)
    found = proof()
    assert found.agrees is False
    assert found.max_abs_difference == pytest.approx(1e-4, rel=0.01)
    assert proof(dtype="bfloat16").agrees is True  # smaller than its rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_and_the_difference_are_measured(dtype: torch.dtype) -> None:
    layer, x = Fused().to(dtype).eval(), drawn(BATCH, QUERY, EMBED).to(dtype)
    found = trace_module(layer, x).proof
    plain = layer(x).double()
    with opened():
        shown, exact = layer(x).double(), Fused().to(dtype).double()(x.double())
    assert found.max_abs_difference == float((plain - shown).abs().max().detach())
    assert found.noise_floor == float((shown - exact).abs().max().detach())


def test_dropout_that_a_fused_kernel_draws_is_not_compared() -> None:
    own = Subject(Fused().train(), (drawn(BATCH, QUERY, EMBED),), {})
    plain, shown = own.recorded(open_up=False), own.recorded()
    assert prove(own, plain, shown, drops=True).agrees is True
    # On the CPU torch does not fuse where it drops, so the kernel is told so here, as another device would have it.
    ops = tuple(
        replace(op, args=(*op.args[:3], 0.5)) if op.base_name.startswith("_scaled_dot_product") else op
        for op in plain.recording.ops
    )
    assert ops != plain.recording.ops
    told = Run(replace(plain.recording, ops=ops), plain.returned)
    found = prove(own, told, shown, drops=True)
    assert (found.max_abs_difference, found.noise_floor, found.agrees) == (None, None, None)
    assert "dropout in another order" in found.note


def test_dropout_is_spoken_of_where_there_is_some() -> None:
    for run in ({}, {"need_weights": False}):
        found = proof(run, training=True, dropout=0.5)
        assert (found.agrees, found.max_abs_difference) == (True, 0.0)
        assert found.note == "noise floor measured without dropout"
        found = proof(run, training=True)
        assert (found.agrees, found.note) == (True, "")
        found = proof(run, dropout=0.5)
        assert (found.agrees, found.note) == (True, "")
    x = drawn(BATCH, QUERY, EMBED)
    # Another layer's dropout draws the same numbers in both runs.
    found = trace_module(nn.Sequential(Fused(), nn.Dropout(0.5)).train(), x).proof
    assert (found.agrees, found.note) == (True, "noise floor measured without dropout")
    for layer in (Fused(dropout=0.5).eval(), Fused().train()):
        found = trace_module(layer, x).proof
        assert (found.agrees, found.note) == (True, "")


def test_a_floor_of_0_is_explained_where_nothing_is_finite() -> None:
    assert proof(inputs=InputSpec(batch=BATCH, seq_len=QUERY, padding=(QUERY,))).note == "no number in either is finite"
    assert proof(inputs=InputSpec(batch=BATCH, seq_len=QUERY, padding=(QUERY, 1, 0))).note == ""


def test_what_cannot_be_measured_is_said() -> None:
    found = proof({"device": "meta"})
    assert (found.max_abs_difference, found.noise_floor, found.agrees) == (None, None, None)
    assert "meta" in found.note

    class OnlyFloat32(Fused):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ torch.eye(EMBED, dtype=torch.float32)

    found = trace_module(OnlyFloat32(), drawn(BATCH, QUERY, EMBED)).proof
    assert found.noise_floor is None
    assert found.note.startswith("it does not run in float64: ")
    assert found.agrees == (True if found.max_abs_difference == 0 else None)

    class NoTensor(Fused):
        def forward(self, x: torch.Tensor) -> str:  # type: ignore[override]
            super().forward(x)
            return "done"

    found = trace_module(NoTensor(), drawn(BATCH, QUERY, EMBED)).proof
    assert (found.agrees, found.note) == (None, "the module returned no tensor")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_that_torchs_encoder_leaves_out_is_named() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 7, batch_first=True), 1).eval()
    padding = torch.zeros(BATCH, QUERY, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        found = trace_module(encoder, drawn(BATCH, QUERY, EMBED), src_key_padding_mask=padding).proof
    assert found.agrees is False
    assert found.note.startswith("only padding differs")
    with torch.no_grad():
        whole = trace_module(encoder, drawn(BATCH, QUERY, EMBED)).proof
    assert (whole.agrees, whole.note) == (True, "")


def test_the_module_and_the_generators_are_as_one_plain_call_leaves_them() -> None:
    def layer() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(QUERY), Fused(), nn.Dropout(0.5)).train()

    traced, plain, x = layer(), layer(), drawn(BATCH, QUERY, EMBED)
    torch.manual_seed(7)
    expected = plain(x)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    trace_module(traced, x)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(map(torch.equal, plain.buffers(), traced.buffers()))
    assert not torch.equal(traced[0].running_mean, torch.zeros(QUERY))
    assert traced.training
    assert expected.requires_grad


def test_a_module_on_meta_whose_stages_are_all_in_the_plain_run_is_not_said_to_agree():
    class Written(torch.nn.Linear):
        def forward(self, x):
            return (super().forward(x) @ x.mT).softmax(dim=-1) @ x

    found = trace_module(Written(6, 6, device="meta"), torch.empty(2, 5, 6, device="meta")).proof
    assert (found.agrees, found.max_abs_difference) == (None, None)
    assert "meta" in found.note
    assert trace_module(Written(6, 6), torch.ones(2, 5, 6)).proof.agrees

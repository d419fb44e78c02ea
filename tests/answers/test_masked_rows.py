"""What becomes of a query whose every key is masked, beside what really comes out of the layer on both paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.call.load import load_layer
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.settings import spec_for
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.reports.trace import MaskedRow

from ..built import trace_layer
from ..layers.declared import read_weights

SIZES = {"embed_dim": 22, "num_heads": 2}
PADDED = {"batch": 3, "seq_len": 5, "padding": (0, 5, 2)}


def contents(layer: str, spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> list[list[str]]:
    """The oracle: what each row of the output is, `batch query`, by running the layer."""
    forward = load_layer(spec, inputs, run, layer)
    with torch.set_grad_enabled(run.grad):
        output = forward.module(*forward.args, **forward.kwargs)[0].detach()
    output = output[None] if inputs.unbatched else output if spec.batch_first else output.transpose(0, 1)
    weights = read_weights(forward.module)
    nothing = torch.zeros(spec.embed_dim) if weights.b_o is None else weights.b_o.detach()

    def content(row: torch.Tensor) -> str:
        return "nan" if bool(row.isnan().any()) else "zero" if torch.equal(row, nothing.to(row.dtype)) else "finite"

    return [[content(row) for row in rows] for rows in output]


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fast path": ({}, {}),
    "gradients": ({}, {"grad": True}),
    "fused": ({}, {"need_weights": False}),
    "training": ({"training": True}, {}),
    "training, fused": ({"training": True}, {"need_weights": False}),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layer", LAYERS)
def test_each_row_is_what_comes_out_of_the_layer(layer: str, run: str) -> None:
    settings, run_settings = RUNS[run]
    if "need_weights" not in LAYERS[layer].takes:
        run_settings = {name: value for name, value in run_settings.items() if name != "need_weights"}
    spec = spec_for(LAYERS[layer], **SIZES, **settings)
    inputs, asked = InputSpec(**PADDED), RunSpec(**run_settings)
    trace = trace_layer(spec, inputs, asked, layer=layer)
    plain = contents(layer, spec, inputs, asked)
    assert [(row.batch, row.query) for row in trace.masked_rows] == [(1, query) for query in range(5)]
    for row in trace.masked_rows:
        assert row.plain == row.opened == plain[1][row.query]
        assert row.stage == ("weights" if row.opened != "finite" else "")
    # What is true of the other rows: they are no one's business.
    assert {content for rows in (plain[0], plain[2]) for content in rows} == {"finite"}


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_rows_are_found_in_every_layout(unbatched: bool, batch_first: bool) -> None:
    spec = AttentionSpec(**SIZES, batch_first=batch_first)
    inputs = InputSpec(seq_len=5, padding=(5,), unbatched=True) if unbatched else InputSpec(**PADDED)
    trace = trace_layer(spec, inputs, RunSpec())
    place = 0 if unbatched else 1
    plain = contents("torch", spec, inputs, RunSpec())[place]
    assert trace.masked_rows == tuple(
        MaskedRow(place, query, "weights", plain[query], plain[query])  # type: ignore[arg-type]
        for query in range(5)
    )


@pytest.mark.parametrize("layer", ["torch", "per-head", "narrow", "fold-heads"])
def test_one_head_without_keys_is_enough(layer: str, tmp_path: Path) -> None:
    mask = torch.zeros(3 * 2, 5, 5, dtype=torch.bool)
    mask[2 * 2 + 1, 3] = True  # batch row 2, the second head, query 3
    torch.save(mask, tmp_path / "mask.pt")
    spec, inputs = AttentionSpec(**SIZES), InputSpec(batch=3, seq_len=5, attn_mask=tmp_path / "mask.pt")
    trace = trace_layer(spec, inputs, RunSpec(), layer=layer)
    plain = contents(layer, spec, inputs, RunSpec())
    (row,) = trace.masked_rows
    assert (row.batch, row.query, row.opened, row.plain) == (2, 3, plain[2][3], plain[2][3])
    assert row.stage == "weights"


def test_a_bias_of_the_output_does_not_hide_a_row_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch starts b_o at 0; here it is not."""
    from mha_inspect.layers import torch_mha

    make = torch_mha.MultiheadAttention

    def with_bias(*args: Any, **kwargs: Any) -> Any:
        layer = make(*args, **kwargs)
        with torch.no_grad():
            layer.out_proj.bias.copy_(torch.arange(1.0, 1.0 + len(layer.out_proj.bias)))
        return layer

    monkeypatch.setattr(torch_mha, "MultiheadAttention", with_bias)
    spec, inputs, run = AttentionSpec(**SIZES), InputSpec(**PADDED), RunSpec(need_weights=False, grad=True)
    trace = trace_layer(spec, inputs, run)
    assert {row.plain for row in trace.masked_rows} == {contents("torch", spec, inputs, run)[1][0]}
    assert {row.opened for row in trace.masked_rows} == {"zero"}


def test_nothing_is_said_where_no_row_is_without_keys() -> None:
    trace = trace_layer(AttentionSpec(**SIZES), InputSpec(batch=3, seq_len=5, padding=(0, 4, 2)), RunSpec())
    assert trace.masked_rows == ()

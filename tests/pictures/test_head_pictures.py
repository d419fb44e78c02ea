"""params --picture and compare-heads --picture: norms of parameters, and averaged weights, beside what torch gives."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from mha_inspect.answers.params import params
from mha_inspect.pictures.grid import RAMP
from mha_inspect.pictures.stages import norms_picture
from mha_inspect.running.subject import Subject


def norms_of_torch(layer: nn.MultiheadAttention) -> dict[str, list[float]]:
    """By hand: rows of the packed projection are heads, one above the other, and columns of the last."""
    heads = layer.num_heads
    q, k, v = layer.in_proj_weight.double().chunk(3)
    by_head = {
        name: one.unflatten(0, (heads, -1)).flatten(1).norm(dim=1) for name, one in zip("qkv", (q, k, v), strict=True)
    }
    by_head["o"] = layer.out_proj.weight.double().T.unflatten(0, (heads, -1)).flatten(1).norm(dim=1)
    return {f"W_{name}": norms.tolist() for name, norms in by_head.items()}


def test_norms_are_those_of_the_matrices():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight[4:8] = 0  # the second head asks for nothing
    x = torch.randn(2, 5, 12)
    report = params(Subject(layer, (x, x, x), {}), norms=True)
    assert {one.part: pytest.approx(one.norms) for one in report.head_norms} == norms_of_torch(layer)
    assert report.head_norms[0].norms[1] == 0
    picture = norms_picture(report.head_norms)
    assert picture.rows.labels == ("W_q", "W_k", "W_v", "W_o")
    for drawn, norms in zip(picture.values[0].tolist(), norms_of_torch(layer).values(), strict=True):
        assert drawn == pytest.approx([norm / (sum(norms) / 3) for norm in norms])
    first = norms_of_torch(layer)["W_v"]
    assert f"W_v {min(first):.4g} to {max(first):.4g}" in picture.notes[0]
    assert params(Subject(layer, (x, x, x), {})).head_norms is None


def test_each_attention_has_a_panel(invoke):
    line = ("params", "torch.nn:TransformerDecoderLayer", "--embed-dim", "12", "--num-heads", "3", "--picture")
    out = invoke(*line).out
    assert re.search(r"part ↓ self_attn +multihead_attn", out)
    found = json.loads(invoke(*line, "--json").out)["head_norms"]
    assert [(one["owner"], one["part"]) for one in found] == [
        (owner, part) for owner in ("self_attn", "multihead_attn") for part in ("W_q", "W_k", "W_v", "W_o")
    ]


def test_shared_keys_stand_at_each_head_that_uses_them(invoke):
    line = ("params", "--layer", "grouped-query", "--embed-dim", "12", "--num-heads", "6", "--num-kv-heads", "2")
    out = invoke(*line, "--picture").out
    keys = re.search(r"W_k (\S{12})$", out, re.M)[1]
    assert keys == keys[0] * 6 + keys[6] * 6


def test_what_has_no_heads_has_no_picture(invoke):
    line = ("params", "torch.nn:Linear", "--set", "in_features=3", "--set", "out_features=3", "--picture")
    assert "no parameter could be matched to heads" in invoke(*line).err
    assert "no numbers to draw" in invoke("params", "--picture", "--device", "meta").err


def test_averaged_weights_of_each_head_count(invoke):
    from mha_inspect.call.load import load_layer
    from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

    out = invoke(
        *["compare-heads", "--embed-dim", "12", "--heads", "1,3", "--seq-len", "6", "--causal", "--picture"]
    ).out
    low, high = map(float, re.search(r"averaged over the heads  (\S+) \S+ (\S+)", out).groups())
    for count, title in ((1, "1 head"), (3, "3 heads")):
        layer = load_layer(AttentionSpec(embed_dim=12, num_heads=count), InputSpec(seq_len=6, causal=True), RunSpec())
        with torch.no_grad():
            theirs = layer.module(*layer.args, **{**layer.kwargs, "need_weights": True})[1][0]
        lines = out[out.index(f"↓ {title}\n") :].split("\n")[1:7]
        read = np.array([[(RAMP + " ").index(c) for c in line[8:].ljust(12)[:12:2]] for line in lines])
        for row, column in np.ndindex(6, 6):
            if column > row:
                assert read[row, column] == len(RAMP)  # blank: masked
            else:
                step = (high - low) / len(RAMP)
                assert abs(low + (read[row, column] + 0.5) * step - theirs[row, column]) <= 0.51 * step


def test_compare_heads_draws_targets_and_no_json(invoke):
    line = "compare-heads torch.nn:TransformerEncoderLayer --embed-dim 8 --heads 1,2 --seq-len 4 --picture"
    out = invoke(*line.split()).out
    assert out.index("↓ 1 head\n") < out.index("↓ 2 heads\n")
    assert "has no pictures" in invoke(*line.split(), "--json").err


def test_each_attention_of_each_head_count_is_drawn(invoke):
    line = "compare-heads torch.nn:TransformerDecoderLayer --embed-dim 8 --heads 1,2 --seq-len 4 --key-len 3 --picture"
    out = invoke(*line.split()).out
    assert re.findall(r"averaged over the heads, of (attention \d of \d)", out) == [
        "attention 1 of 2",
        "attention 2 of 2",
    ]


@pytest.mark.parametrize("line", [("params", "--num-heads", "4"), ("compare-heads", "--heads", "1,2")])
def test_a_page_has_the_picture_that_was_asked_for(invoke, tmp_path, line):
    page = tmp_path / "page.html"
    out = invoke(*line, "--embed-dim", "16", "--picture", "-o", str(page)).out
    drawn = html.unescape(re.search(r"<pre>(.*?)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)[1])
    assert drawn.strip()
    assert out.endswith(drawn)


def test_nothing_of_panels_below_each_other_is_cut_off(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    file = tmp_path / "heads.png"
    invoke("compare-heads", "--embed-dim", "16", "--heads", "1,2,4", "--picture", "-o", str(file))
    ink = np.array(Image.open(file).convert("L")) < 250
    assert not ink[:, [0, -1]].any()
    assert not ink[[0, -1]].any()

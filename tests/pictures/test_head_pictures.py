"""compare-heads --picture: averaged weights, beside what torch gives."""

from __future__ import annotations

import html
import re

import numpy as np
import pytest
import torch

from mha_inspect.pictures.grid import RAMP


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


def test_a_page_has_the_picture_that_was_asked_for(invoke, tmp_path):
    page = tmp_path / "page.html"
    out = invoke("compare-heads", "--heads", "1,2", "--embed-dim", "16", "--picture", "-o", str(page)).out
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

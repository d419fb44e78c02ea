"""compare-heads --picture: the weights of each head, beside what torch gives."""

from __future__ import annotations

import re

import numpy as np
import torch

from mha_inspect.pictures.grid import RAMP


def test_the_weights_of_each_head_of_each_head_count(invoke):
    from mha_inspect.call.load import load_layer
    from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

    line = "compare-heads --embed-dim 12 --heads 1,3 --seq-len 6 --causal --picture"
    out = invoke(*line.split()).out
    for count, title in ((1, "1 head"), (3, "3 heads")):
        layer = load_layer(AttentionSpec(embed_dim=12, num_heads=count), InputSpec(seq_len=6, causal=True), RunSpec())
        settings = {**layer.kwargs, "need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            theirs = layer.module(*layer.args, **settings)[1][0]
        picture = out[: out.index(f"weights of {title}")].rpartition("query ↓")[2].split("\n")[1:7]
        low, high = map(float, re.search(rf"weights of {title}  (\S+) \S+ (\S+)", out).groups())
        step = (high - low) / len(RAMP)
        for head in range(count):
            start = 8 + head * 14
            read = [[(RAMP + " ").index(mark) for mark in row[start:].ljust(12)[:12:2]] for row in picture]
            for row, column in np.ndindex(6, 6):
                if column > row:
                    assert read[row][column] == len(RAMP)  # blank: masked
                else:
                    assert abs(low + (read[row][column] + 0.5) * step - theirs[head, row, column]) <= 0.51 * step


def test_compare_heads_draws_targets_and_no_json(invoke):
    line = "compare-heads torch.nn:TransformerEncoderLayer --embed-dim 8 --heads 1,2 --seq-len 4 --picture"
    out = invoke(*line.split()).out
    assert out.index("weights of 1 head ") < out.index("weights of 2 heads ")
    assert "has no pictures" in invoke(*line.split(), "--json").err

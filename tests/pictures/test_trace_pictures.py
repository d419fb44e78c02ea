"""`trace --picture`: what is drawn are the numbers that torch's own layer returns, and the line says what cannot be."""

from __future__ import annotations

import re

import pytest
import torch

from mha_inspect.pictures.grid import RAMP, codes

from .read_back import MASKED, inkless, panels


def weights_of_torch(num_heads: int, length: int, batch: int, *, causal: bool) -> torch.Tensor:
    """What `nn.MultiheadAttention` returns for the layer and inputs of the flags: `batch heads query key`."""
    from mha_inspect.call.load import load_layer
    from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

    forward = load_layer(
        AttentionSpec(embed_dim=30, num_heads=num_heads),
        InputSpec(batch=batch, seq_len=length, causal=causal),
        RunSpec(),
    )
    with torch.no_grad():
        return forward.module(*forward.args, **{**forward.kwargs, "need_weights": True, "average_attn_weights": False})[
            1
        ]


def off_the_legend(text: str, steps: int, read: list[list[list[int]]]) -> torch.Tensor:
    """The numbers that somebody who looks reads off; a masked one is 0."""
    low, high = map(
        float, re.search(r"^weights  ([\d.e-]+) .* ([\d.e-]+)", re.sub(r"\x1b.*?m", "", text), re.M).groups()
    )
    step = (high - low) / steps
    return torch.tensor(
        [[[0 if n == MASKED else low + (n + 0.5) * step for n in row] for row in p] for p in read]
    ), step


LINE = ("trace", "--embed-dim", "30", "--num-heads", "3", "--seq-len", "7", "--batch", "2", "--picture", "weights")


@pytest.mark.parametrize(("causal", "depth"), [(True, "true"), (False, "256"), (True, "none")])
def test_what_is_drawn_are_torchs_weights(invoke, monkeypatch, causal, depth):
    theirs = weights_of_torch(3, 7, 2, causal=causal)
    monkeypatch.setenv("COLUMNS", "80")
    if depth == "none":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.setenv("FORCE_COLOR", "3" if depth == "true" else "2")
    text = invoke(*LINE, *(["--causal"] if causal else [])).out
    if depth == "none":
        assert "\x1b" not in text
        ours, step = off_the_legend(text, len(RAMP), inkless(text, 7, 7, 2))
    else:
        table = codes(False, depth)
        drawn = text[text.index("query ↓") :]
        ours, step = off_the_legend(text, len(table), panels(drawn, table, 7, 7, zoom=2))
    assert ours.shape == theirs[0].shape
    assert (ours - theirs[0]).abs().max() <= 1.51 * step
    assert bool((ours == 0).any()) is causal
    assert ("masked" in text[text.index("query ↓") :]) is causal


def test_chosen_heads_and_labels(invoke, tmp_path):
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("one\ntwo\nthree\nfour\nfive\nsix\nse\u202even\n", encoding="utf-8")
    out = invoke(*LINE[:-1], "weights:2,0,1", "--tokens", str(tokens)).out
    assert re.findall(r"head \d", out) == ["head 2", "head 0", "head 1"]
    assert re.search(r"^ +three [.:=+*#%@-]{14}  ", out, re.M)
    assert "\u202e" not in out


def test_several_attentions(invoke):
    line = ("trace", "torch.nn:TransformerDecoderLayer", "--embed-dim", "8", "--num-heads", "2", "--picture", "scores")
    a, b = "self_attn", "multihead_attn"
    assert f"scores of attention 1 of 2 in {a}" in invoke(*line).out
    assert "To draw attention 2: --attention N" in invoke(*line).out
    assert f"scores of attention 2 of 2 in {b}" in invoke(*line, "--attention", "2").out
    assert invoke(*line, "--attention", b).out.count("scores of attention") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--picture", "weights:3"), "head 3 does not exist: weights has 3, counted from 0."),
        (("--picture", "weights:x"), "head x is not a whole number or a list of them"),
        (("--tokens", "a,b"), "2 tokens fit no axis of weights"),
        (("--json",), "--picture draws, but --json has no pictures."),
        (("--device", "meta"), "device meta has shapes and no numbers to draw."),
    ],
)
def test_what_cannot_be_drawn(invoke, more, said):
    code, out, err = invoke(*LINE, *more)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("mask", [-float("inf"), -1e4, torch.finfo(torch.float32).min])
def test_masked_is_told_apart_from_zero(mask):
    """However the mask is written; a weight that is zero of itself is a number."""
    from mha_inspect.pictures.stages import Attended

    scores = torch.tensor([[[[0.0, 500.0, 3.0], [1.0, 2.0, 3.0]]]])
    barred = torch.tensor([[False, False, True], [True, True, True]])
    masked = scores + torch.zeros(2, 3).masked_fill(barred, mask)
    contents = {"scores": scores, "masked_scores": masked, "weights": masked.softmax(-1)}
    attended = Attended("", 1, 1, lambda: contents)
    drawn = attended.picture("weights").values[0]
    assert drawn[0].tolist() == [0, 1, -float("inf")]
    # A row without keys has NaN, or weights all the same where the mask is finite.
    assert not (drawn[1] == -float("inf")).any()
    assert (attended.picture("masked_scores").values[0] == -float("inf")).tolist() == barred.tolist()
    assert not (attended.picture("scores").values == -float("inf")).any()
    del contents["scores"]
    assert attended.picture("weights").values[0][0].tolist() == [0, 1, -float("inf")]

"""Pictures in a REPL and a notebook, and files of them: their numbers are those of the kept tensors."""

from __future__ import annotations

import html
import json
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import ExportError, InputError, SpecError
from mha_inspect.layers.catalog import find_layer
from mha_inspect.layers.spec import AttentionSpec

from .test_viewer import numbers


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return mha_inspect.trace(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, 12), mask=mask, keep=True
    )


def test_every_head_of_a_loop_is_drawn():
    module = find_layer("per-head").build(AttentionSpec(embed_dim=15, num_heads=3)).eval()
    x = torch.randn(2, 7, 15)
    seen = mha_inspect.trace(module, x, x, x, keep=True)
    drawn = seen._attended[0].picture("weights", batch_row=1)
    assert drawn.panels == ("head 0", "head 1", "head 2")
    with torch.no_grad():
        heads = zip(module.W_q, module.W_k, strict=True)
        weights = [(q(x[1]) @ k(x[1]).mT / 5**0.5).softmax(-1) for q, k in heads]
    np.testing.assert_allclose(drawn.values, torch.stack(weights).numpy(), atol=1e-6)
    assert "head 2" in seen.attentions[0].weights.picture(width=80, color=False)


def test_what_was_not_kept_or_is_not_there(seen):
    with pytest.raises(ValueError, match=r"was not kept\. Trace with keep=True"):
        mha_inspect.trace(nn.MultiheadAttention(4, 2), *[torch.randn(3, 4)] * 3).attentions[0].weights.picture()
    with pytest.raises(SpecError, match="head 3 does not exist"):
        seen.attentions[0].weights.picture(head=3)
    with pytest.raises(SpecError, match="batch item 2 does not exist"):
        seen.attentions[0].weights.picture(batch_row=2)


def test_the_page_and_the_notebook_have_the_viewer(seen, tmp_path):
    file = tmp_path / "trace.html"
    seen.save(file)
    text = file.read_text()
    data = json.loads(re.search(r'id="mha-viewer-data">(.*?)</script>', text)[1])
    assert [attention["name"] for attention in data["attentions"]] == [
        "attention 1 of 2 in layers.0.self_attn",
        "attention 2 of 2 in layers.1.self_attn",
    ]
    stored = next(stage for stage in data["attentions"][1]["stages"] if stage["stage"] == "weights")
    ours = numbers(stored)
    theirs = seen.attentions[1].weights.tensor
    theirs = (theirs if theirs.dim() == 4 else theirs.unflatten(0, (2, -1)))[0].numpy()
    assert np.array_equal(ours == -np.inf, np.triu(np.ones((3, 7, 7), bool), 1))
    assert np.abs(np.where(np.isfinite(ours), ours, 0) - theirs).max() < 1e-4
    assert "Content-Security-Policy" in text
    assert f'srcdoc="{html.escape("<!DOCTYPE html>")}' in seen._repr_html_()
    assert "iframe" not in mha_inspect.trace(nn.Linear(2, 2), torch.randn(1, 2), keep=True)._repr_html_()
    with pytest.raises(ExportError, match=r"Draw one with \.plot\(\)"):
        seen.save(tmp_path / "trace.png")


def test_plot_gives_axes_with_the_numbers(seen, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    weights = seen.attentions[0].weights
    axes = weights.plot(head=1)
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("key", "query", "head 1")
    drawn = axes.get_images()[0].get_array()
    theirs = weights.tensor.unflatten(0, (2, -1)) if weights.tensor.dim() == 3 else weights.tensor
    assert np.array_equal(drawn.mask, np.triu(np.ones((7, 7), bool), 1))
    assert np.array_equal(drawn.filled(0), theirs[0, 1].numpy())
    assert len(weights.plot()) == 3
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'pip install "mha-inspect\[plot\]"'):
        weights.plot()


LINE = ("trace", "--embed-dim", "12", "--num-heads", "3", "--seq-len", "6", "--causal")


def test_a_file_of_the_picture_alone(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    more = ("--picture", "scores:0,2", "--tokens", "$a,b$,c,d,e,f")
    for name in ("a.png", "again.png"):
        answer = invoke(*LINE, *more, "--export", str(tmp_path / name))
        assert (answer.code, answer.err) == (0, f"mha-inspect: wrote {tmp_path / name}\n")
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content == (tmp_path / "again.png").read_bytes()
    code, out, err = invoke(*LINE, "--export", str(tmp_path / "b.svg"))
    assert (code, out, (tmp_path / "b.svg").exists()) == (2, "", False)
    assert "b.svg ends in .svg: the ending gives the format. Use one of .txt, .json, .html, .png." in err


def test_without_matplotlib_it_says_what_to_install(invoke, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = invoke(*LINE, "--export", str(tmp_path / "a.png"))
    assert (code, out) == (2, "")
    assert 'needs the library matplotlib, which is not installed. Install it: pip install "mha-inspect[plot]"' in err


def test_a_page_and_a_text_with_the_picture(invoke, tmp_path):
    invoke(*LINE, "--picture", "masked_scores:1", "--export", str(tmp_path / "a.html"))
    data = json.loads(re.search(r'id="mha-viewer-data">(.*?)</script>', (tmp_path / "a.html").read_text())[1])
    assert data["first"] == {"attention": 0, "stage": "masked_scores", "head": 1}
    assert {len(stage["heads"]) for stage in data["attentions"][0]["stages"]} == {3}
    out = invoke(*LINE, "--picture", "weights", "--export", str(tmp_path / "a.txt")).out
    assert (tmp_path / "a.txt").read_text() == out
    invoke("trace", "--embed-dim", "12", "--device", "meta", "--num-heads", "3", "--export", str(tmp_path / "b.html"))
    data = json.loads(re.search(r'id="mha-viewer-data">(.*?)</script>', (tmp_path / "b.html").read_text())[1])
    # On meta there are shapes and no numbers.
    (attention,) = data["attentions"]
    assert attention["stages"] == []
    assert [stage["name"] for stage in attention["flow"]["stages"]][-2:] == ["concat", "output"]

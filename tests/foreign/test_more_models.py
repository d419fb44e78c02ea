"""Models that cut sequences into windows, or put several widths into one matrix: a name is true, or it is a number."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from .truth import Shown, attentions

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 97, "num_hidden_layers": 1, "pad_token_id": 0, "intermediate_size": 32}


def run(kind: str, **config: Any) -> tuple[list[Shown], list[torch.Tensor]]:
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(kind, **config), attn_implementation="eager"
    ).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    given = {"input_ids": torch.randint(5, 90, (2, 13))}
    if kind == "longt5":
        given["decoder_input_ids"] = torch.randint(5, 90, (2, 7))
    with torch.no_grad():
        returned = made(**given, output_attentions=True)
    weights = returned["encoder_attentions" if kind == "longt5" else "attentions"]
    return attentions(made, **given), [one for one in weights if one is not None]


def assert_one_size_a_name(attention: Shown) -> None:
    sizes: dict[str, int] = {}
    for stage, pattern in attention.axes().items():
        dims = re.findall(r"\([^)]*\)|\S+", pattern)
        for dim, size in zip(dims, attention.found.stages[stage].shape, strict=True):
            if dim.isidentifier():
                assert sizes.setdefault(dim, size) == size, (stage, pattern)
            elif dim.isdigit():
                assert int(dim) == size, (stage, pattern)


def test_windows_that_overlap() -> None:
    config = {**TEXT, "hidden_size": 30, "num_attention_heads": 3, "max_position_embeddings": 64}
    found, returned = run("longformer", **config, attention_window=8)
    assert_one_size_a_name(run("longformer", **config, attention_window=16)[0][0])
    attention = found[0]
    assert_one_size_a_name(attention)
    # batch heads query window, without the padding to whole windows
    weights = attention.value("weights")
    torch.testing.assert_close(weights[:, :13].transpose(1, 2), returned[0])
    assert weights.shape == (2, 16, 3, 9)
    for stage in ("scores", "masked_scores"):
        assert attention.found.stages[stage].shape == weights.shape
    torch.testing.assert_close(attention.value("masked_scores").softmax(-1)[:, :13], weights[:, :13])
    axes = attention.axes()
    assert (axes["query"], axes["q_heads"]) == ("positions batch embed", "(batch heads) windows query head_dim")
    assert (attention.names.num_heads, attention.names.head_dim) == (3, 10)

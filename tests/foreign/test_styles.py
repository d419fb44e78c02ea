"""Attention as people write it comes out right: each style by its own arithmetic, at two sizes."""

from __future__ import annotations

import inspect
import re
from math import isclose

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from . import styles
from .styles import D, E, H
from .truth import Shown, assert_true, attentions

GROUPED = {"Grouped", "GroupedBroadcast"}
MULTI_QUERY = {"FusedGrouped", "RepeatInterleave", "OneKeyHead"}
OWN_TESTS = ("LoopChunks", "Unfolded", "LearnedQuery", "OneHead")
SIZES = ((7, 12), (2, 16))
STYLES = sorted(
    name
    for name, style in vars(styles).items()
    if inspect.isclass(style) and issubclass(style, nn.Module) and style.__module__ == styles.__name__
)
HEAD_DIMS = {"RotateHalf": 6, "RotateComplex": 6, "RotatePairs": 6, "RotatePart": 10, "LowRank": D + 2}
SCALES = {"UnitHeads": None, "SoftCap": 0.25}
CROSS = ("Base", "Fused", "PackedKeyValue", "Einsum", "FoldBatchHeads", "FoldHeadsBatch")


def find(name: str, batch: int = 7, length: int = 12, **kwargs: object) -> list[Shown]:
    torch.manual_seed(0)
    module = getattr(styles, name)().train(name == "Dropped")
    shape = (batch, 3, length, E) if name == "Image" else (batch, length, E)
    return attentions(module, torch.randn(shape), **kwargs)


@pytest.mark.parametrize(("batch", "length"), SIZES)
@pytest.mark.parametrize("name", [name for name in STYLES if name not in OWN_TESTS])
def test_a_style_comes_out_right(name: str, batch: int, length: int) -> None:
    (attention,) = find(name, batch, length)
    assert_true(attention, dropped=name == "Dropped")
    names, sizes = attention.names, attention.sizes()
    heads = (6, 2) if name in GROUPED else (6, 3) if name == "GroupedSliced" else (H, 1 if name in MULTI_QUERY else H)
    assert (names.num_heads, names.num_kv_heads) == heads
    head_dim = HEAD_DIMS.get(name, D)
    assert names.head_dim == head_dim
    scale = SCALES.get(name, head_dim**-0.5)
    assert attention.found.scale is None if scale is None else isclose(attention.found.scale or 0, scale, rel_tol=1e-5)
    positions = {"Windows": 4, "Image": 3 * length}.get(name, length)
    assert sizes.get("batch", batch) == batch
    assert sizes.get("key", positions) == positions
    assert name == "Pooled" or sizes.get("query", positions) == positions
    assert sizes["embed"] == E
    wanted = {"query", "key", "value", "q_proj", "k_proj", "v_proj", "q_heads", "k_heads", "v_heads", "scores"}
    wanted |= {"weights", "context", "concat"} | ({"output"} if name != "NoOutput" else set())
    assert wanted <= set(attention.found.stages)


@pytest.mark.parametrize("name", [name for name in STYLES if name not in ("LoopChunks", "Dropped")])
def test_the_axes_of_a_style_are_the_same_at_any_size(name: str) -> None:
    (small,), (large,) = find(name, *SIZES[0]), find(name, *SIZES[1])
    assert small.axes() == large.axes()
    assert not re.search(r"\d\d", " ".join(small.axes().values()))


@pytest.mark.parametrize("name", CROSS)
def test_another_source_of_keys_has_its_own_length(name: str) -> None:
    torch.manual_seed(0)
    (attention,) = attentions(getattr(styles, name)(), torch.randn(7, 11, E), torch.randn(7, 13, E))
    assert_true(attention)
    assert attention.sizes()["query"] == 11
    assert attention.sizes()["key"] == 13


@pytest.mark.parametrize("name", [name for name in STYLES if not name.startswith(("LoopC", "Unf"))])
def test_a_style_is_found_with_gradients(name: str) -> None:
    (attention,) = find(name, grad=True)
    assert_true(attention, dropped=name == "Dropped")


@pytest.mark.parametrize("name", ["Packed", "Sliced", "PackedKeyValue", "Interleaved", "Conv1D", "LowRank"])
def test_what_one_product_packs_has_a_name(name: str) -> None:
    (attention,) = find(name)
    packed = {
        "Packed": "batch query (qkv heads head_dim)",
        "Interleaved": "batch query (heads qkv head_dim)",
        "LowRank": "batch query (heads head_dim)",
    }
    assert attention.names.of_stage("q_proj") == packed.get(name, "batch query (heads head_dim)")


def test_latent_projections_are_told_apart_from_the_last() -> None:
    (attention,) = find("LowRank")
    found = attention.found
    assert found.stages["query"].shape == (7, 12, E) == found.stages["value"].shape
    assert {side: len(ops) for side, ops in found.earlier.items()} == {"query": 1, "key": 1, "value": 1}
    assert found.earlier["key"] == found.earlier["value"] != found.earlier["query"]
    assert attention.names.of_stage("v_heads") == "batch heads key v_head_dim"


class GatedBias(nn.Module):
    """WavLM: what comes in is split into heads too, for a gate on the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(21, H * D) for _ in range(3))
        self.out = nn.Linear(H * D, 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = x.unflatten(-1, (H, 7)).sum(-1).sigmoid().transpose(1, 2)[..., None]
        q, k, v = (project(x).unflatten(-1, (H, D)).transpose(1, 2) for project in self.qkv)
        scores = q @ k.transpose(-1, -2) / D**0.5 + gate * torch.linspace(0, 1, x.shape[1])
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_features_that_are_split_on_the_way_in_are_no_batch() -> None:
    torch.manual_seed(0)
    (attention,) = attentions(GatedBias(), torch.randn(7, 11, 21))
    assert_true(attention)
    assert (attention.names.num_heads, attention.sizes()["batch"]) == (H, 7)
    assert attention.names.of_stage("query") == attention.names.of_stage("output") == "batch query embed"


def test_windows_that_are_unfolded_have_queries_with_keys_of_their_own() -> None:
    (attention,) = find("Unfolded")
    names = attention.names
    assert (names.num_heads, names.head_dim) == (H, D)
    assert names.of_stage("scores") == names.of_stage("weights") == "batch heads query 1 key"
    assert names.of_stage("k_heads") == "batch heads query head_dim key"
    assert names.of_stage("k_proj") == "batch key (heads head_dim)"
    assert attention.found.stages["scores"].shape == (7, H, 12, 1, 5)


def test_a_learned_query_has_no_projection() -> None:
    (attention,) = find("LearnedQuery")
    assert_true(attention)
    assert not {"query", "q_proj"} & set(attention.found.stages)
    assert attention.names.of_stage("key") == "batch key embed"
    assert (attention.names.num_heads, attention.found.stages["scores"].shape) == (H, (7, H, 2, 12))


def test_pieces_of_the_queries_are_one_attention() -> None:
    (attention,) = find("LoopChunks")
    assert_true(attention)
    assert attention.found.stages["scores"].shape == (7, H, 12, 12)
    assert (attention.names.num_heads, attention.found.branches) == (H, ())


@pytest.mark.parametrize("name", ["Loop", "LoopStacked", "LoopSlices"])
def test_a_loop_over_heads_is_one_attention(name: str) -> None:
    (attention,) = find(name)
    found, names = attention.found, attention.names
    assert len(found.branches) == H == names.num_heads
    assert found.stages["scores"].shape == (7, 12, 12)
    assert names.of_stage("concat") == "batch query (heads head_dim)"
    assert found.stages["concat"].shape == (7, 12, H * D)
    assert len({branch.softmax.index for branch in found.branches}) == H


def test_a_scale_that_comes_after_the_mask_is_told_apart() -> None:
    (attention,) = find("MaskedThenScaled")
    assert attention.found.scores_scale == 1
    assert isclose(attention.found.scale or 0, D**-0.5)


def test_a_scale_on_the_projection_is_told_apart() -> None:
    (attention,) = find("ScaledEarly")
    assert attention.found.scores_scale == 1
    assert isclose(attention.found.scale or 0, D**-0.5)


def test_a_soft_cap_is_no_part_of_the_scores() -> None:
    (attention,) = find("SoftCap")
    assert [name for name, _ in attention.found.scoring][:3] == ["scale", "tanh", "scale"]
    assert isclose(attention.found.scoring[2][1] or 0, 1.5)
    capped = 1.5 * torch.tanh(attention.value("scores") / 1.5)
    torch.testing.assert_close(attention.value("masked_scores").tril(), capped.tril())


def test_sinks_are_no_keys() -> None:
    (attention,) = find("Sinks")
    assert attention.found.sinks is not None
    assert attention.value("weights").shape == (7, H, 12, 12)
    assert attention.value("weights").sum(-1).max() < 1


@pytest.mark.parametrize(("batch", "length"), [(1, 11), (7, 1), (1, 1)])
@pytest.mark.parametrize("name", ["Base", "Fused", "Packed", "Conv1D", "Einsum", "FoldBatchHeads", "KeyFirst", "Loop"])
def test_sizes_of_one_are_no_obstacle(name: str, batch: int, length: int) -> None:
    (attention,) = find(name, batch, length)
    assert attention.names.num_heads == H
    assert attention.names.head_dim == D
    assert set(attention.found.stages) >= {"query", "q_proj", "scores", "weights", "concat", "output"}


@pytest.mark.parametrize("name", ["Base", "Fused", "ByHand", "KeyFirst", "MaskedFill"])
def test_one_head(name: str) -> None:
    torch.manual_seed(0)
    (attention,) = attentions(getattr(styles, name)(heads=1), torch.randn(7, 11, E))
    assert_true(attention)
    assert (attention.names.num_heads, attention.names.head_dim) == (1, D)
    assert attention.names.of_stage("scores") == "batch heads query key" or name == "KeyFirst"


@pytest.mark.parametrize("name", ["Base", "Fused", "ByHand", "MaskedFill", "NormedHeads"])
def test_without_a_batch(name: str) -> None:
    torch.manual_seed(0)
    (attention,) = attentions(getattr(styles, name)(), torch.randn(11, E))
    assert_true(attention)
    assert attention.names.num_heads == H
    # torch 2.15 gives its fused kernel a batch of one.
    of_one = "batch " * (len(attention.found.stages["scores"].shape) == 4)
    assert attention.names.of_stage("scores") == f"{of_one}heads query key"
    assert attention.names.of_stage("output") == "query embed"


class TwoKindsOfKeys(nn.Module):
    """Keys of everything and keys that are one's own, under one softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.own = (nn.Linear(14, 14) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        beside = q @ self.own(x[:, :3]).mT
        weights = torch.cat([q @ k.mT, beside], -1).softmax(-1)
        return weights[..., : x.shape[1]] @ v + weights[..., x.shape[1] :] @ v[:, :3]


def test_scores_of_other_keys_are_no_sinks() -> None:
    (attention,) = mha_inspect.trace(TwoKindsOfKeys().eval(), torch.randn(2, 11, 14)).attentions
    assert "The softmax also covers scores of other keys" in attention.notes[0]
    assert not any("Sinks" in note for note in attention.notes)

"""Inputs drawn from a seed or read from files, and the masks that go with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

from ..built import built_layer

SPEC = AttentionSpec(embed_dim=10, num_heads=2)


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    key_padding_mask: Tensor | None


def inputs_of(spec: AttentionSpec = SPEC, device: str = "cpu", **inputs: Any) -> Inputs:
    layer = built_layer(spec, InputSpec(**inputs), RunSpec(device=device))
    return Inputs(*layer.tensors, layer.kwargs.get("attn_mask"), layer.kwargs.get("key_padding_mask"))


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_one_tensor_serves_where_one_can() -> None:
    inputs = inputs_of(batch=3, seq_len=5)
    assert inputs.query is inputs.key is inputs.value
    assert inputs.query.shape == (3, 5, 10)
    assert inputs.attn_mask is inputs.key_padding_mask is None
    crossed = inputs_of(batch=3, seq_len=5, key_len=7)
    assert crossed.key is crossed.value
    assert crossed.key.shape == (3, 7, 10)
    wide = inputs_of(replace(SPEC, kdim=7, vdim=11), batch=3, seq_len=5)
    assert [tensor.shape[-1] for tensor in (wide.query, wide.key, wide.value)] == [10, 7, 11]


def test_draws_are_the_same_for_every_head_count_layout_and_dtype() -> None:
    base = inputs_of(batch=3, seq_len=5).query
    assert torch.equal(inputs_of(replace(SPEC, num_heads=5), batch=3, seq_len=5).query, base)
    assert torch.equal(inputs_of(replace(SPEC, batch_first=False), batch=3, seq_len=5).query.transpose(0, 1), base)
    assert torch.equal(inputs_of(replace(SPEC, dtype="float64"), batch=3, seq_len=5).query, base.double())
    assert torch.equal(inputs_of(seq_len=5, unbatched=True).query, inputs_of(seq_len=5).query[0])
    assert not torch.equal(inputs_of(replace(SPEC, seed=1), batch=3, seq_len=5).query, base)


def test_causal_is_torchs_own_causal_mask_and_with_more_keys_aligns_the_first_ones() -> None:
    expected = torch.nn.Transformer.generate_square_subsequent_mask(5) == float("-inf")
    assert torch.equal(inputs_of(seq_len=5, causal=True).attn_mask, expected)  # type: ignore[arg-type]
    mask = inputs_of(seq_len=2, key_len=3, causal=True).attn_mask
    assert mask is not None
    assert mask.tolist() == [[False, True, True], [False, False, True]]


def test_padding_marks_the_last_keys() -> None:
    mask = inputs_of(batch=3, seq_len=3, padding=(0, 1, 3)).key_padding_mask
    assert mask is not None
    assert mask.tolist() == [[False, False, False], [False, False, True], [True, True, True]]
    alone = inputs_of(seq_len=3, unbatched=True, padding=(2,)).key_padding_mask
    assert alone is not None
    assert alone.tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["query.pt", "query.safetensors"])
def test_a_file_of_one_tensor_is_the_query(name: str, tmp_path: Path) -> None:
    query = torch.randn(3, 7, 10)
    path = tmp_path / name
    if name.endswith("pt"):
        torch.save(query, path)
    else:
        pytest.importorskip("safetensors.torch").save_file({"x": query}, path)
    inputs = inputs_of(input=path)
    assert torch.equal(inputs.query, query)
    assert inputs.query is inputs.key is inputs.value


@pytest.mark.parametrize(
    ("content", "inputs", "words"),
    [
        (
            torch.zeros(3, 7, 12),
            {},
            ["[3, 7, 12]", "`batch query embed`", "embed_dim 10 as the last", "--embed-dim 12"],
        ),
        (torch.zeros(3, 7, 10), {"unbatched": True}, ["`query embed`", "2 dimensions", "Drop unbatched"]),
        (torch.zeros(3, 7, 10), {"padding": (8,)}, ["padding 8", "7 keys"]),
    ],
)
def test_a_file_that_does_not_fit_is_answered_with_the_rule(
    content: Any, inputs: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises((InputError, SpecError)) as caught:
        inputs_of(input=saved(tmp_path / "given.pt", content), **inputs)
    assert [word for word in words if word not in str(caught.value)] == []
    assert str(caught.value).count("\n") <= 1


def test_masks_of_one_kind_are_merged_with_the_causal_one(tmp_path: Path) -> None:
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    boolean = torch.zeros(5, 5, dtype=torch.bool)
    boolean[3, 2] = True
    mask = inputs_of(seq_len=5, causal=True, attn_mask=saved(tmp_path / "b.pt", boolean)).attn_mask
    assert torch.equal(mask, causal | boolean)  # type: ignore[arg-type]
    bias = torch.randn(2 * 2, 5, 5)
    mask = inputs_of(batch=2, seq_len=5, causal=True, attn_mask=saved(tmp_path / "f.pt", bias)).attn_mask
    assert torch.equal(mask, bias.masked_fill(causal, float("-inf")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.zeros(7, 5, dtype=torch.bool), ["[7, 5]", "`query key` [5, 7]", "[6, 5, 7]"]),
        (torch.eye(5, 7), ["float32 numbers 0 and 1", "booleans", "mask.bool()"]),
        (torch.full((5, 7), 3), ["int64", "boolean", "mask.float()"]),
    ],
)
def test_a_mask_that_does_not_fit_is_answered_with_the_rule(mask: Tensor, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        inputs_of(batch=3, seq_len=5, key_len=7, attn_mask=saved(tmp_path / "mask.pt", mask))
    assert [word for word in words if word not in str(caught.value)] == []

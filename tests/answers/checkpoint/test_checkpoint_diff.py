"""Two checkpoints against each other: each change that is told was made by hand here, and each number by torch."""

from __future__ import annotations

import json
import re

import pytest
import torch

import mha_inspect
from mha_inspect.answers.checkpoint.diff import diff_of_checkpoints
from mha_inspect.render.formats import to_text

from ...fuzz.files import saved

CONFIG = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}


def llama(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two layers of 6 heads of 8 features, which share 2 keys and values."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (48, 48), "k_proj": (16, 48), "v_proj": (16, 48), "o_proj": (48, 48)}
    named = {}
    for layer in range(2):
        for name, size in sizes.items():
            named[f"layers.{layer}.self_attn.{name}.weight"] = size
    named |= {"embed.weight": (50, 48), "layers.0.norm.weight": (48,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in named.items()}


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    """GPT-2's way: q, k and v side by side in columns; 4 heads of 6 features."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"c_attn.weight": (24, 72), "c_attn.bias": (72,), "c_proj.weight": (24, 24)}
    return {f"h.0.attn.{name}": torch.randn(shape, generator=generator) for name, shape in sizes.items()}


def compared(tmp_path, left, right, *, left_config=CONFIG, right_config=CONFIG, **options):
    left_file = saved(tmp_path / "left" / "model.safetensors", left, left_config)
    right_file = saved(tmp_path / "right" / "model.safetensors", right, right_config)
    return diff_of_checkpoints(left_file, right_file, **options)


def test_the_same_file(tmp_path):
    report = compared(tmp_path, llama(), llama())
    assert (report.outcome, report.answer) == ("same", ("Yes: all 10 tensors are the same, bit for bit.",))
    assert report.parts == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounding_of_a_dtype_is_told_from_a_change(tmp_path, dtype):
    left = llama()
    right = {name: tensor.to(dtype) for name, tensor in left.items()}
    report = compared(tmp_path, left, right)
    assert (report.outcome, {pair.verdict for pair in report.tensors}) == ("same", {"same within rounding"})
    for pair in report.tensors:
        apart = (left[pair.name].double() - right[pair.name].double()).abs().max()
        assert pair.max_abs_difference == float(apart)
        assert pair.relative_difference <= (torch.finfo(dtype).eps if dtype != torch.float64 else 0)
    name = "layers.1.self_attn.k_proj.weight"
    right[name][9, 3] *= 1.02  # two or three steps of bfloat16
    report = compared(tmp_path, left, right)
    assert report.outcome == "differs"
    assert [pair.name for pair in report.tensors if pair.verdict == "differs"] == [name]


def test_which_heads_changed_most(tmp_path):
    left = llama()
    right = {name: tensor.clone() for name, tensor in left.items()}
    name = "layers.1.self_attn.q_proj.weight"
    right[name][8:16] *= 1.5
    right[name][40:48] *= 1.25
    right["layers.0.self_attn.o_proj.weight"][:, 24:32] *= 0.25  # columns of head 3
    report = compared(tmp_path, left, right)
    differing = [part for part in report.parts if part.verdict == "differs"]
    assert {(part.left, part.part): part.differences for part in differing} == {
        ("layers.1.self_attn", "W_q"): pytest.approx((0, 0.5, 0, 0, 0, 0.25)),
        ("layers.0.self_attn", "W_o"): pytest.approx((0, 0, 0, 0.75, 0, 0)),
    }
    answer = " ".join(report.answer)
    assert "head 3 of W_o in layers.0.self_attn (75.0 %), head 1 of W_q in layers.1.self_attn (50.0 %)" in answer
    assert "In layers.1.self_attn only heads 1, 5 of W_q changed." in answer


def test_attentions_under_other_names(tmp_path):
    """As Meta's names of Llama are to those of Hugging Face."""
    left = llama()
    right = {re.sub(r"self_attn\.(\w)_proj", r"attention.w\1", name): tensor.clone() for name, tensor in left.items()}
    right["layers.1.attention.wk.weight"][9] *= 1.5
    report = compared(tmp_path, left, right, right_config=None)
    assert (report.only_left, report.only_right) == ((), ())
    pairs = {pair.name: (pair.right_name, pair.verdict) for pair in report.tensors}
    assert pairs["layers.1.self_attn.k_proj.weight"] == ("layers.1.attention.wk.weight", "differs")
    assert pairs["layers.0.self_attn.k_proj.weight"] == ("layers.0.attention.wk.weight", "same bits")
    assert [(part.left, part.part) for part in report.parts if part.verdict == "differs"] == [
        ("layers.1.self_attn", "W_k")
    ]


def apart(tensors):
    """`packed`, with q, k and v in three Linears, as porting it to plain layers leaves it."""
    split = {"h.0.attn.o_proj.weight": tensors["h.0.attn.c_proj.weight"].T}
    weights = tensors["h.0.attn.c_attn.weight"].T.chunk(3)
    biases = tensors["h.0.attn.c_attn.bias"].chunk(3)
    for letter, weight, bias in zip("qkv", weights, biases, strict=True):
        split[f"h.0.attn.{letter}_proj.weight"] = weight
        split[f"h.0.attn.{letter}_proj.bias"] = bias
    return split


def test_one_tensor_of_all_parts_against_one_for_each(tmp_path):
    report = compared(tmp_path, packed(), apart(packed()), left_config=None, right_config=None, num_heads=4)
    words = "q, k and v are the same, in one tensor on the left and in three on the right"
    assert (report.outcome, report.only_left, report.only_right) == ("differs", (), ())
    expected = {("c_proj.weight", "o_proj.weight"): ("same, permuted", "transposed")}
    for letter in "qkv":
        expected["c_attn.weight", f"{letter}_proj.weight"] = ("same, permuted", words)
        expected["c_attn.bias", f"{letter}_proj.bias"] = ("same bits", words)
    for pair in report.tensors:
        names = pair.name.removeprefix("h.0.attn."), pair.right_name.removeprefix("h.0.attn.")
        assert (pair.verdict, pair.note) == expected.pop(names)
    assert expected == {}
    assert report.answer[-1] == f"{words[0].upper()}{words[1:]}."


def test_a_head_that_changed_on_the_way_into_several_tensors(tmp_path):
    right = apart(packed())
    right["h.0.attn.k_proj.weight"] = right["h.0.attn.k_proj.weight"].clone()
    right["h.0.attn.k_proj.weight"][13, 5] += 3
    report = compared(tmp_path, packed(), right, left_config=None, right_config=None, num_heads=4)
    assert [pair.right_name for pair in report.tensors if pair.verdict == "differs"] == ["h.0.attn.k_proj.weight"]
    assert report.answer[-1] == "In h.0.attn only head 2 of W_k changed."  # row 13, in heads of 6


def test_transposed(tmp_path):
    left = packed() | {"h.0.mlp.c_fc.weight": torch.randn(24, 30)}
    right = {name: tensor.T if tensor.dim() == 2 else tensor for name, tensor in left.items()}
    report = compared(tmp_path, left, right, left_config={"n_head": 4}, right_config={"n_head": 4})
    assert {pair.verdict for pair in report.tensors if pair.left_shape != pair.right_shape} == {"same, permuted"}
    assert {part.verdict for part in report.parts} == {"same bits"}


def test_what_is_on_one_side_alone_and_in_another_shape(tmp_path):
    left = llama()
    right = {**left, "embed.weight": torch.zeros(51, 48), "more": torch.zeros(3, 5)}
    del right["layers.0.norm.weight"]
    report = compared(tmp_path, left, right)
    assert [pair.name for pair in report.only_left] == ["layers.0.norm.weight"]
    assert [(pair.name, pair.shape) for pair in report.only_right] == [("more", (3, 5))]
    assert {pair.name: pair.verdict for pair in report.tensors}["embed.weight"] == "other shape"


def test_a_tensor_that_is_no_part_of_an_attention_is_known_by_its_numbers(tmp_path):
    left = llama()
    right = {name.replace("embed", "tok_embeddings"): tensor.bfloat16() for name, tensor in left.items()}
    (pair,) = [pair for pair in compared(tmp_path, left, right).tensors if pair.name == "embed.weight"]
    assert (pair.right_name, pair.verdict) == ("tok_embeddings.weight", "same within rounding")


def test_nan_is_equal_to_itself_and_to_no_number(tmp_path):
    left = llama()
    left["embed.weight"][3, 4] = float("nan")
    assert compared(tmp_path, left, {n: tensor.double() for n, tensor in left.items()}).outcome == "same"
    report = compared(tmp_path, left, {**left, "embed.weight": left["embed.weight"].nan_to_num(0)})
    assert report.outcome == "differs"
    assert json.loads(to_text(report, "json"))["tensors"][0]["max_abs_difference"] == "Infinity"


def test_heads_that_nothing_tells(tmp_path):
    left = llama()
    right = {name: tensor * 1.1 for name, tensor in left.items()}
    report = compared(tmp_path, left, right, left_config=None, right_config=None)
    assert report.parts == ()
    assert "The head count of 2 differing attentions is unknown" in " ".join(report.notes)
    report = compared(tmp_path, left, right, left_config=None, right_config=None, num_heads=6)
    assert {len(part.differences) for part in report.parts} == {6, 2}


def test_the_command_and_the_library(tmp_path, invoke):
    left, right = llama(), llama(1)
    files = [str(saved(tmp_path / "left.safetensors", left, CONFIG))]
    files.append(str(saved(tmp_path / "right.safetensors", right, CONFIG)))
    code, out, err = invoke("diff", *files, "--json", "--fail-if", "differs")
    assert (code, err) == (1, "")
    report = mha_inspect.diff(*files)
    assert json.loads(out) == report.to_dict()
    code, out, err = invoke("diff", *files)
    assert (code, err, out) == (0, "", str(report) + "\n")
    with pytest.raises(TypeError, match="are paths of checkpoints, which take no other argument"):
        mha_inspect.diff(*files, torch.zeros(3))


def test_one_tensor_of_keys_and_values_against_one_for_each(tmp_path):
    """As Linears that vit-pytorch has beside a query of its own."""
    right = {f"a.to_{n}.weight": torch.randn(12, 8, generator=torch.Generator().manual_seed(ord(n))) for n in "qkv"}
    right["a.to_out.weight"] = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    left = {name: tensor for name, tensor in right.items() if name not in ("a.to_k.weight", "a.to_v.weight")}
    left["a.to_kv.weight"] = torch.cat([right["a.to_k.weight"], right["a.to_v.weight"]])
    report = compared(tmp_path, left, right, left_config=None, right_config=None, num_heads=3)
    assert (report.only_left, report.only_right) == ((), ())
    assert report.answer[-1] == "K and v are the same, in one tensor on the left and in two on the right."

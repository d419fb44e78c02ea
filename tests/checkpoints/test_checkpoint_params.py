"""Checkpoints by their headers: roles as the module's own run shows them, head counts, damaged and split files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.errors import InputError, MhaInspectError, SpecError, UnsafeFileError
from mha_inspect.layers.spec import Show
from mha_inspect.render.formats import to_text
from mha_inspect.running.subject import Subject

from ..fuzz.files import saved


def roles(report: Any) -> dict[str, tuple[str, str]]:
    return {p.name: (p.role, p.axes) for p in report.parameters if p.role[:2] in ("W_", "b_")}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([1], "a list"),
        (torch.zeros(3, 7).to_sparse(), "a sparse, nested or quantized tensor"),
    ],
)
def test_what_is_no_state_dict(content, what, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(InputError, match=f"x.pt is {what}, expected a state dict"):
        params_of_checkpoint(tmp_path / "x.pt")


def test_head_by_head_is_told_by_the_config(tmp_path):
    """GPT-NeoX packs head by head, and says so nowhere but in the type of its config."""
    saved(
        tmp_path / "model.safetensors",
        {
            "h.0.attention.query_key_value.weight": torch.zeros(66, 22),
            "h.0.attention.dense.weight": torch.zeros(22, 22),
        },
    )
    (parameter, _) = params_of_checkpoint(tmp_path).parameters[::-1]
    assert "could not determine whether head by head" in parameter.role
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "num_attention_heads": 2}))
    (parameter, _) = params_of_checkpoint(tmp_path, per_head=True).parameters[::-1]
    assert parameter.role == "W_q, W_k, W_v head by head: 11 rows of q, 11 of k, 11 of v each"
    assert [(s.head, s.part, s.rows) for s in parameter.heads if s.head == 1] == [
        (1, "W_q", (33, 44)),
        (1, "W_k", (44, 55)),
        (1, "W_v", (55, 66)),
    ]


PACKED = {
    "falcon": {"new_decoder_architecture": True, "num_attention_heads": 4, "num_kv_heads": 2, "num_hidden_layers": 1},
    "gpt_neox": {"num_attention_heads": 4, "num_hidden_layers": 1},
    "gpt2": {"n_head": 4, "n_layer": 1},
    "gpt_bigcode": {"n_head": 4, "n_layer": 1},
    "deberta": {"num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 30},
    "mpt": {"n_heads": 4, "n_layers": 1, "d_model": 32},
    "t5": {"num_heads": 4, "num_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 30},
    "deepseek_v3": {
        **{"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 1, "q_lora_rank": 10},
        **{"kv_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 5, "n_routed_experts": 8},
        **{"intermediate_size": 30, "moe_intermediate_size": 8},
    },
}
"""Types of Hugging Face models that pack or name their projections in ways of their own."""


@pytest.mark.parametrize("kind", PACKED)
def test_names_tell_what_the_run_of_the_model_tells(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "n_embd": 32} | PACKED[kind]
    config = transformers.CONFIG_MAPPING[kind](vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.randint(3, 50, (2, 7))
    kwargs = {"decoder_input_ids": ids} if kind == "t5" else {}
    run = mha_inspect.params(model, ids, per_head=True, **kwargs)
    saved(tmp_path / "model.safetensors", model.state_dict(), json.loads(config.to_json_string(use_diff=False)))
    report = params_of_checkpoint(tmp_path, per_head=True)
    expected = roles(run)
    # The rank of a projection on the way to the queries is a number in what the run tells, and a word in names.
    assert {n: text for n, (text, _) in roles(report).items()} == {n: text for n, (text, _) in expected.items()}
    heads = {p.name: {*p.heads} for p in run.parameters if p.heads and p.name in expected}
    assert {p.name: {*p.heads} for p in report.parameters if p.heads} == heads
    assert {attention.num_heads for attention in report.stored_attentions} == {3 if kind == "deepseek_v3" else 4}


def test_the_head_count_of_the_configuration_that_fits(tmp_path):
    """A text tower and a picture tower have their own, and their widths tell which is whose."""
    named = {f"vision.layers.0.{n}_proj.weight": torch.zeros(24, 24) for n in "qkvo"}
    named |= {f"text.layers.0.{n}_proj.weight": torch.zeros(36, 36) for n in "qkvo"}
    towers = {
        "text_config": {"hidden_size": 36, "num_attention_heads": 12},
        "vision_config": {"hidden_size": 24, "num_attention_heads": 3},
    }
    saved(tmp_path / "x.safetensors", named, towers)
    counts = {attention.module: attention.num_heads for attention in params_of_checkpoint(tmp_path).stored_attentions}
    assert counts == {"text.layers.0": 12, "vision.layers.0": 3}


def test_head_counts_that_the_shapes_allow(tmp_path):
    def file(**more: torch.Tensor) -> Path:
        q, k = torch.zeros(30, 13), torch.zeros(10, 13)
        named = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": q.T, **more}
        return saved(tmp_path / "x.safetensors", {f"a.{name}.weight": tensor for name, tensor in named.items()})

    (attention,) = params_of_checkpoint(file()).stored_attentions
    # By hand: 30 features of queries and 10 of keys are heads of 10, 5, 2 or 1 features.
    assert (attention.num_heads, attention.fits) == (None, (3, 6, 15, 30))
    assert "3, 6, 15 and 30 fit" in " ".join(params_of_checkpoint(file()).notes)
    (attention,) = params_of_checkpoint(file(q_norm=torch.zeros(5))).stored_attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (6, 2, 5)
    with pytest.raises(SpecError, match="num_heads 4 does not fit"):
        params_of_checkpoint(file(), num_heads=4)


def test_the_bias_of_a_norm_is_added(tmp_path):
    shapes = dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"), (12, 12))
    named = shapes | {"q_norm.weight": (4,), "q_norm.bias": (4,)}
    report = params_of_checkpoint(saved(tmp_path / "x.safetensors", {n: torch.zeros(s) for n, s in named.items()}))
    roles = {parameter.name: parameter.role for parameter in report.parameters}
    assert roles["q_norm.weight"] == "scales the queries after their projection"
    assert roles["q_norm.bias"] == "added to the queries after their projection"


def test_what_a_training_script_saves(tmp_path):
    model = nn.Sequential(nn.MultiheadAttention(14, 2))
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"epoch": 3, "optimizer": {"state": {0: {"m": torch.zeros(3)}}}, "model": wrapped}, tmp_path / "x.pt")
    report = params_of_checkpoint(tmp_path / "x.pt", show=Show(stats=True))
    assert {p.name for p in report.parameters} == set(model.state_dict())
    assert [attention.module for attention in report.stored_attentions] == ["0"]
    for parameter in report.parameters:
        assert parameter.stats.max == pytest.approx(float(model.state_dict()[parameter.name].max()))


def test_shards_and_what_lies_outside(tmp_path):
    saved(tmp_path / "a.safetensors", {"x.q_proj.weight": torch.zeros(4, 4), "x.k_proj.weight": torch.zeros(4, 4)})
    saved(tmp_path / "b.safetensors", {"x.v_proj.weight": torch.zeros(4, 4)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"1": "a.safetensors", "2": "b.safetensors"}}))
    for path in (index, tmp_path):
        assert [attention.module for attention in params_of_checkpoint(path).stored_attentions] == ["x"]
    index.write_text(json.dumps({"weight_map": {"1": "../../etc/x.safetensors"}}))
    with pytest.raises(UnsafeFileError, match="beside their index"):
        params_of_checkpoint(index)
    index.write_text(json.dumps({"weight_map": {"1": "c.safetensors"}}))
    with pytest.raises(InputError, match="was not found"):
        params_of_checkpoint(index)


@pytest.mark.parametrize("name", ["\x1b[31mred.weight \u202eb", "layers.99999999999999999999.q_proj.weight"])
def test_hostile_names(name, tmp_path):
    report = params_of_checkpoint(saved(tmp_path / "x.safetensors", {name: torch.zeros(2)}))
    page = to_text(report, "plain")
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert json.loads(to_text(report, "json"))["parameters"][0]["name"] == name


def test_torch_is_not_needed(tmp_path):
    path = saved(tmp_path / "x.safetensors", {"q_proj.weight": torch.zeros(4, 4)})
    code = "import sys; from mha_inspect.__main__ import run; print(int(run(sys.argv[1:])), 'torch' in sys.modules)"
    line = [sys.executable, "-c", code, "params", str(path)]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "0 False"


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "x.npy").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for name in ("x.pt", "empty", "absent.safetensors", "/dev/zero.pt", "x.npy"):
        with pytest.raises(MhaInspectError) as caught:
            params_of_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert "x.npy is an array of numpy, expected .safetensors, .pt, .pth or .bin" in str(caught.value)


def test_a_file_against_a_module(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, batch_first=True), "head": nn.Linear(12, 7)})
    state = dict(model.state_dict())
    del state["attn.out_proj.bias"]
    state |= {"head.weight": torch.zeros(8, 12), "more": torch.zeros(3)}
    path = saved(tmp_path / "x.safetensors", {f"model.{name}": tensor for name, tensor in state.items()})
    report = mha_inspect.params(path, like=model).like
    assert (report.prefix, report.matching) == ("model.", 4)
    assert [(tensor.name, tensor.shape) for tensor in report.missing] == [("attn.out_proj.bias", (12,))]
    assert [(tensor.name, tensor.shape) for tensor in report.unexpected] == [("model.more", (3,))]
    assert [(tensor.name, tensor.shape, tensor.expected) for tensor in report.wrong_shape] == [
        ("model.head.weight", (8, 12), (7, 12))
    ]
    other = mha_inspect.params(path, like=nn.ParameterDict({"other": torch.zeros(3)}))
    assert (other.like.matching, len(other.like.missing), len(other.like.unexpected)) == (0, 1, 6)
    assert "The file has no tensor name of ParameterDict" in other.notes[-1]


def test_a_file_of_the_attention_alone_for_a_module_around_it(tmp_path):
    """The attention has the path `attn` in the module, and none in the file."""
    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    path = saved(tmp_path / "x.safetensors", attention.state_dict(), {"num_attention_heads": 4, "hidden_size": 12})

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x, x, x)[0]

    report = params_of_checkpoint(path, like=Subject(Block(), (torch.randn(2, 5, 12),), {}))
    assert report.like is not None
    assert report.like.prefix == "-attn."
    assert [stored.module for stored in report.stored_attentions or ()] == [""]
    assert [note for note in report.notes if "config.json" in note] == [
        "The attention has 3 heads in Block, but 4 in config.json."
    ]


def test_roles_from_the_run_of_a_module(tmp_path):
    """Names that tell nothing, and a packing that only the forward knows."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x):
            q, k, v = self.first(x).unflatten(-1, (3, 3, 4)).permute(3, 0, 2, 1, 4)
            weights = (q @ k.mT / 2).softmax(-1)
            return self.last((weights @ v).transpose(1, 2).flatten(2))

    model = Own()
    path = saved(tmp_path / "x.safetensors", model.state_dict())
    report = mha_inspect.params(path, torch.zeros(2, 5, 12), like=model, per_head=True)
    assert roles(report)["first.weight"][0] == "W_q, W_k, W_v head by head: 4 rows of q, 4 of k, 4 of v each"
    heads = {p.name: p.heads for p in report.parameters}
    assert [(s.part, s.rows) for s in heads["first.weight"] if s.head == 2] == [
        ("W_q", (24, 28)),
        ("W_k", (28, 32)),
        ("W_v", (32, 36)),
    ]
    (attention,) = report.stored_attentions
    assert (attention.num_heads, attention.fits) == (3, (1, 2, 3, 4, 6, 12))
    with torch.no_grad():
        model.first.weight.unflatten(0, (3, 3, 4))[2, 1] = 0
    saved(path, model.state_dict())
    subject = Subject(model, (torch.zeros(2, 5, 12),), {})
    zeroed = params_of_checkpoint(path, like=subject, show=Show(stats=True))
    assert "W_k of the file: head 2 is all zero." in zeroed.notes


def test_a_file_against_a_model_on_the_command_line(invoke, tmp_path):
    pytest.importorskip("transformers")
    shapes = ["--set", "n_layer=1", "--set", "n_embd=12", "--set", "n_head=3", "--set", "vocab_size=50"]
    named = {"transformer.h.0.attn.c_attn.weight": torch.zeros(12, 36), "transformer.wte.weight": torch.zeros(51, 12)}
    path = saved(tmp_path / "x.safetensors", named)
    code, out, err = invoke("params", str(path), "--like", "hf:gpt2", *shapes, "--json")
    assert code == 0, err
    like = json.loads(out)["like"]
    assert like["matching"] == 1
    assert [tensor["name"] for tensor in like["wrong_shape"]] == ["transformer.wte.weight"]
    code, out, err = invoke("params", str(path), "--like", "hf:gpt2", *shapes)
    assert "W_q, W_k, W_v side by side: columns 0–11, 12–23, 24–35" in out
    assert "wrong shape" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["params", "--like", "torch"], "--like needs a checkpoint, and none was given"),
        (["params", "{}", "--embed-dim", "4"], "--embed-dim does not apply to it. Drop it."),
        (["diff", "{}", "torch"], "is a checkpoint, and torch is not"),
        (["diff", "{}"], "is a checkpoint, and the other side is missing"),
        (["diff", "{}", "{}", "--seq-len", "3"], "--seq-len does not apply"),
        (["diff", "{}", "{}", "--num-heads", "5"], "num_heads 5 does not fit"),
    ],
)
def test_what_a_checkpoint_is_no_answer_to(invoke, tmp_path, line, said):
    path = saved(tmp_path / "x.safetensors", {f"{n}_proj.weight": torch.zeros(8, 8) for n in "qkvo"})
    code, out, err = invoke(*(word.replace("{}", str(path)) for word in line))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_command_that_is_named_for_a_file_beside_a_module_compares_them(invoke, tmp_path):
    path = saved(tmp_path / "x.safetensors", {f"{n}_proj.weight": torch.zeros(8, 8) for n in "qkvo"})
    for module in ("torch", "per-head"):
        _, command, _ = invoke("diff", str(path), module).err.split("`")
        code, out, err = invoke(*command.split()[1:])
        assert (code, err) == (0, "")
        assert "fit: against " + module in out


def test_heads_of_unusual_numbers_are_named(tmp_path):
    q, k, v = (torch.randn(30, 13) for _ in range(3))
    q[5:10] = 0
    k[5:10] = k[15:20]
    v[29, 12] = float("nan")
    named = {f"a.{n}_proj.weight": tensor for n, tensor in zip("qkv", (q, k, v), strict=True)}
    report = params_of_checkpoint(saved(tmp_path / "x.safetensors", named), num_heads=6, show=Show(stats=True))
    assert report.notes[-3:] == (
        "W_q of a: head 1 is all zero.",
        "W_k of a: heads 1, 3 are identical.",
        "W_v of a: head 5 is not finite (NaN or inf).",
    )
    assert all(parameter.heads is None for parameter in report.parameters)


def test_layers_that_are_alike_are_one_row_of_the_page(tmp_path):
    named = {f"layers.{i}.{p}_proj.weight": torch.zeros(4, 4) for i in range(12) for p in "qkvo"}
    page = to_text(params_of_checkpoint(saved(tmp_path / "x.safetensors", named)), "plain")
    assert "layers.0–11.q_proj.weight ×12" in page
    assert page.count("q_proj") == 1
    assert "total" in page
    assert "768" in page  # 12 layers of 4 matrices of 16

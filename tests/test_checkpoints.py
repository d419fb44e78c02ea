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
from mha_inspect.answers.checkpoint import params_of_checkpoint
from mha_inspect.checkpoints.content import content_of
from mha_inspect.errors import InputError, MhaInspectError, SpecError, UnsafeFileError
from mha_inspect.render import to_text
from mha_inspect.targets.files import read_tensors
from mha_inspect.targets.load import load_layer
from mha_inspect.targets.spec import AttentionSpec, InputSpec, RunSpec

from .fuzz.files import safetensors


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a .safetensors file by hand, in float32."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    path.write_bytes(safetensors(header, data))
    return path


def roles(report: Any) -> dict[str, tuple[str, str]]:
    return {p.name: (p.role, p.axes) for p in report.parameters if p.role[:2] in ("W_", "b_")}


@pytest.mark.parametrize("layer", ["torch", "split-heads", "bert", "grouped-query"])
def test_roles_are_those_that_the_run_shows(layer, tmp_path):
    kv = {"num_kv_heads": 3} if layer == "grouped-query" else {}
    subject = load_layer(
        AttentionSpec(embed_dim=42, num_heads=6, **kv), InputSpec(batch=2, seq_len=5), RunSpec(), layer
    )
    run = mha_inspect.params(subject.module, *subject.args, per_head=True, **subject.kwargs).report
    path = saved(tmp_path / "x.safetensors", {f"layers.0.attn.{n}": p for n, p in subject.module.named_parameters()})
    found = params_of_checkpoint(path, num_heads=6, per_head=True)
    expected = {f"layers.0.attn.{name}": own for name, own in roles(run).items()}
    assert roles(found) == expected
    by_head = {f"layers.0.attn.{p.name}": p.heads for p in run.parameters if p.heads}
    assert {p.name: p.heads for p in found.parameters if p.heads} == by_head
    (attention,) = found.stored_attentions
    assert (attention.num_heads, attention.head_dim) == (6, 7)


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
    assert "neither its name nor its shape tells" in parameter.role
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "num_attention_heads": 2}))
    (parameter, _) = params_of_checkpoint(tmp_path, per_head=True).parameters[::-1]
    assert parameter.role == "W_q, W_k, W_v head by head: 11 rows of q, 11 of k, 11 of v each"
    assert [(s.head, s.part, s.rows) for s in parameter.heads if s.head == 1] == [
        (1, "W_q", (33, 44)),
        (1, "W_k", (44, 55)),
        (1, "W_v", (55, 66)),
    ]


def test_head_counts_that_the_shapes_allow(tmp_path):
    def file(**more: torch.Tensor) -> Path:
        q, k = torch.zeros(30, 13), torch.zeros(10, 13)
        named = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": q.T, **more}
        return saved(tmp_path / "x.safetensors", {f"a.{name}.weight": own for name, own in named.items()})

    (attention,) = params_of_checkpoint(file()).stored_attentions
    # By hand: 30 features of queries and 10 of keys are heads of 10, 5, 2 or 1 features.
    assert (attention.num_heads, attention.fits) == (None, (3, 6, 15, 30))
    assert "3, 6, 15 and 30 fit" in " ".join(params_of_checkpoint(file()).notes)
    (attention,) = params_of_checkpoint(file(q_norm=torch.zeros(5))).stored_attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (6, 2, 5)
    with pytest.raises(SpecError, match="num_heads 4 does not fit"):
        params_of_checkpoint(file(), num_heads=4)


def test_what_a_training_script_saves(tmp_path):
    model = nn.Sequential(nn.MultiheadAttention(14, 2))
    wrapped = {f"module.{name}": own for name, own in model.state_dict().items()}
    torch.save({"epoch": 3, "optimizer": {"state": {0: {"m": torch.zeros(3)}}}, "model": wrapped}, tmp_path / "x.pt")
    report = params_of_checkpoint(tmp_path / "x.pt", stats=True)
    assert {p.name for p in report.parameters} == set(model.state_dict())
    assert [own.module for own in report.stored_attentions] == ["0"]
    for parameter in report.parameters:
        assert parameter.stats.max == pytest.approx(float(model.state_dict()[parameter.name].max()))


def test_shards_and_what_lies_outside(tmp_path):
    saved(tmp_path / "a.safetensors", {"x.q_proj.weight": torch.zeros(4, 4), "x.k_proj.weight": torch.zeros(4, 4)})
    saved(tmp_path / "b.safetensors", {"x.v_proj.weight": torch.zeros(4, 4)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"1": "a.safetensors", "2": "b.safetensors"}}))
    for path in (index, tmp_path):
        assert [own.module for own in params_of_checkpoint(path).stored_attentions] == ["x"]
    index.write_text(json.dumps({"weight_map": {"1": "../../etc/x.safetensors"}}))
    with pytest.raises(UnsafeFileError, match="beside their index"):
        params_of_checkpoint(index)
    index.write_text(json.dumps({"weight_map": {"1": "c.safetensors"}}))
    with pytest.raises(InputError, match="is not there"):
        params_of_checkpoint(index)


def test_layers_that_are_alike_are_one_row_of_the_page(tmp_path):
    named = {f"layers.{i}.{p}_proj.weight": torch.zeros(4, 4) for i in range(12) for p in "qkvo"}
    page = to_text(params_of_checkpoint(saved(tmp_path / "x.safetensors", named)), "plain")
    assert "layers.0–11.q_proj.weight ×12" in page
    assert page.count("q_proj") == 1
    assert "total" in page
    assert "768" in page  # 12 layers of 4 matrices of 16


@pytest.mark.parametrize(
    "name", ["\x1b[31mred.weight", "a\u202eb", "x" * 30_000, "layers.99999999999999999999.q_proj.weight"]
)
def test_hostile_names(name, tmp_path):
    report = params_of_checkpoint(saved(tmp_path / "x.safetensors", {name: torch.zeros(2)}))
    page = to_text(report, "plain")
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert json.loads(to_text(report, "json"))["parameters"][0]["name"] == name


def test_torch_is_not_needed(tmp_path):
    path = saved(tmp_path / "x.safetensors", {"q_proj.weight": torch.zeros(4, 4)})
    code = "import sys; from mha_inspect.__main__ import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"
    for file in (path, tmp_path / "x.pt"):
        torch.save({"q_proj.weight": torch.zeros(4, 4)}, tmp_path / "x.pt")
        out = subprocess.run(
            [sys.executable, "-c", code, "params", str(file)], capture_output=True, text=True, check=True
        ).stdout
        assert out.splitlines()[-1] == "0 False"


def test_options_that_a_checkpoint_has_no_use_for(invoke, tmp_path):
    path = saved(tmp_path / "x.safetensors", {"q_proj.weight": torch.zeros(4, 4)})
    code, out, err = invoke("params", str(path), "--embed-dim", "4")
    assert (code, out) == (2, "")
    assert "--embed-dim cannot change: drop it" in err
    assert invoke("params", str(path), "--format", "json")[0] == 0


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64]
)
def test_what_torch_saves_is_read_as_torch_reads_it(dtype, new, tmp_path):
    if dtype == torch.uint16 and not new:
        pytest.skip("torch cannot read what it wrote")
    whole = (torch.arange(60).reshape(3, 4, 5) % 7).to(dtype)
    views = {
        "a": whole,
        "b": whole[1:, ::2].transpose(0, 2),
        "c": whole[:1, :1, :1].expand(2, 3, 4),
        "d": whole[2, 3, 4],
    }
    torch.save(
        {name: nn.Parameter(own, requires_grad=False) for name, own in views.items()} | views,
        tmp_path / "x.pt",
        _use_new_zipfile_serialization=new,
    )
    found, expected = read_tensors(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)
    for name, own in expected.items():
        assert found[name].dtype == own.dtype
        assert torch.equal(found[name], own)


def test_a_library_of_safetensors_reads_the_same(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    names = ("float32", "float16", "bfloat16", "int8", "bool", "float8_e4m3fn", "uint32", "int64")
    tensors = {name: (torch.arange(6).reshape(2, 3) % 2).to(getattr(torch, name)) for name in names}
    library.save_file(tensors, tmp_path / "x.safetensors")
    for name, own in read_tensors(tmp_path / "x.safetensors").items():
        assert own.dtype == tensors[name].dtype
        assert torch.equal(own.float(), tensors[name].float())
    assert list(content_of(tmp_path / "x.safetensors", (".safetensors",))["int8"].shape) == [2, 3]


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "x.pt", tmp_path / "empty", tmp_path / "absent.safetensors", Path("/dev/zero.pt")):
        with pytest.raises(MhaInspectError) as caught:
            params_of_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_norms_of_heads_are_those_of_the_numbers(tmp_path):
    q, k, v = (torch.randn(30, 13) for _ in range(3))
    q[5:10] = 0
    v[29, 12] = float("nan")
    named = {f"a.{n}_proj.weight": own for n, own in zip("qkv", (q, k, v), strict=True)}
    report = params_of_checkpoint(saved(tmp_path / "x.safetensors", named), num_heads=6, norms=True)
    by_part = {own.part: own.norms for own in report.head_norms}
    assert by_part["W_k"] == pytest.approx(k.double().unflatten(0, (6, 5)).flatten(1).norm(dim=1).tolist())
    notes = " ".join(report.notes)
    assert "W_q of a: heads 1 are zero: dead." in notes
    assert "W_v of a: heads 5 are not finite" in notes
    assert all(parameter.heads is None for parameter in report.parameters)

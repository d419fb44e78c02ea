"""Weights that a file has transposed: non-square ones by their shape, square ones by the others of their block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.checkpoints.diff import diff_of_checkpoints
from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.running.subject import Subject
from tests.corpus.stored import Grouped, Model, Separate, linear
from tests.fuzz.files import saved

NAMES = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def with_transposed(state: dict[str, Tensor], pattern: str) -> dict[str, Tensor]:
    turned = dict(state)
    for name, tensor in state.items():
        if tensor.dim() == 2 and re.search(pattern, name):
            turned[name] = tensor.T.contiguous()
    return turned


def like_of(tmp_path: Path, file: dict[str, Tensor], module: nn.Module) -> Any:
    subject = Subject(module, (torch.zeros(2, 5, 24),), {})
    return params_of_checkpoint(saved(tmp_path / "x.safetensors", file), like=subject, per_head=True)


def names_of(tensors: Any) -> list[str]:
    return sorted(tensor.name for tensor in tensors)


def test_a_file_of_conv1d_for_a_module_of_linear(tmp_path):
    model = Model()
    report = like_of(tmp_path, with_transposed(model.state_dict(), r"^h\."), model)
    expected = sorted(f"h.{layer}.{name}.weight" for layer in (0, 1) for name in NAMES)
    assert names_of(report.like.transposed) == expected
    assert report.like.wrong_shape == ()
    assert report.like.matching == len(model.state_dict()) - 8
    assert not report.ok
    notes = " ".join(report.notes)
    assert "layout of GPT-2's Conv1D" in notes
    assert "Use .t() on each of them" in notes
    assert (
        "h.0.attn.c_proj.weight, h.1.attn.c_proj.weight are square, so they load without an error either way" in notes
    )


def test_roles_and_heads_of_transposed_weights_are_those_of_the_file(tmp_path):
    model = Model()
    report = like_of(tmp_path, with_transposed(model.state_dict(), r"^h\."), model)
    # By hand: the file has head 1 of the queries in columns 6 to 11, and the output's head 1 in rows 6 to 11.
    parameters = {parameter.name: parameter for parameter in report.parameters}
    packed, output = parameters["h.0.attn.c_attn.weight"], parameters["h.0.attn.c_proj.weight"]
    assert packed.role == "W_q, W_k, W_v side by side: columns 0–23, 24–47, 48–71"
    assert packed.axes == "embed (qkv heads head_dim)"
    assert output.role == "W_o: rows are the heads stacked, 6 each"
    assert output.axes == "(heads head_dim) embed"
    slices = {(piece.part, piece.head): (piece.rows, piece.columns) for piece in (*packed.heads, *output.heads)}
    assert slices["W_q", 1] == ((0, 24), (6, 12))
    assert slices["W_v", 0] == ((0, 24), (48, 54))
    assert slices["W_o", 1] == ((6, 12), (0, 24))


@pytest.mark.parametrize("run", [True, False])
def test_the_feed_forward_is_the_only_evidence(tmp_path, run):
    model = Model(kind=Separate, layers=1)
    file = with_transposed(model.state_dict(), r"^h\.")
    path = saved(tmp_path / "x.safetensors", file)
    report = like_of(tmp_path, file, model) if run else params_of_checkpoint(path, like=model)
    squares = [f"h.0.attn.{name}_proj.weight" for name in "koqv"]
    assert names_of(report.like.transposed) == [*squares, "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"]
    roles = {parameter.name: parameter.role for parameter in report.parameters}
    assert roles["h.0.attn.k_proj.weight"].startswith("W_k: columns are the heads side by side")
    assert roles["h.0.attn.o_proj.weight"].startswith("W_o: rows are the heads stacked")


def test_a_file_of_the_same_layout_has_nothing_to_say(tmp_path):
    report = like_of(tmp_path, Model(Separate).state_dict(), Model(Separate))
    assert (report.like.transposed, report.like.wrong_shape, report.ok) == ((), (), True)
    assert "transposed" not in " ".join(report.notes)


def test_only_square_weights_say_nothing(tmp_path):
    module = Separate(linear, True)
    report = like_of(tmp_path, with_transposed(module.state_dict(), ""), module)
    assert (report.like.transposed, report.ok) == ((), True)
    assert "transposed" not in " ".join(report.notes)


def test_only_some_are_transposed(tmp_path):
    """The square weight may be either; its block says both."""
    model = Model(layers=1)
    report = like_of(tmp_path, with_transposed(model.state_dict(), r"attn\.c_attn"), model)
    assert names_of(report.like.transposed) == ["h.0.attn.c_attn.weight"]
    said = " ".join(report.notes)
    assert "h.0.attn.c_attn.weight is transposed" in said
    assert "h.0.attn.c_proj.weight is square: could not determine whether transposed" in said


def test_exchanged_layers_are_not_transposed(tmp_path):
    model = Model(kind=Separate, layers=1, bias=False)
    state = model.state_dict()
    state["h.0.mlp.c_fc.weight"], state["h.0.mlp.c_proj.weight"] = (
        state["h.0.mlp.c_proj.weight"],
        state["h.0.mlp.c_fc.weight"],
    )
    report = like_of(tmp_path, state, model)
    assert report.like.transposed == ()
    assert names_of(report.like.wrong_shape) == ["h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight"]


def test_a_module_of_conv1d(tmp_path):
    """Its own file has nothing to say; a file of Linear is the transpose."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def make(inner: int, outer: int, bias: bool) -> nn.Module:
        return conv1d(outer, inner)

    model = Model(layers=1, make=make)
    report = like_of(tmp_path, model.state_dict(), model)
    assert (report.like.transposed, report.ok) == ((), True)
    assert "transpose" not in " ".join(report.notes)
    report = like_of(tmp_path, Model(layers=1).state_dict(), model)
    assert names_of(report.like.transposed) == [f"h.0.{name}.weight" for name in NAMES]
    assert "Conv1D" not in " ".join(report.notes)
    output = next(parameter for parameter in report.parameters if parameter.name == "h.0.attn.c_proj.weight")
    assert output.role == "W_o: columns are the heads side by side, 6 each"


@pytest.mark.parametrize(("bias", "runs"), [(True, True), (False, False)])
def test_names_are_read_in_the_layout_of_the_module(tmp_path, bias, runs):
    """The forward fails, so roles come from names: the shapes that they are read with are the module's own."""
    module = Grouped(linear, bias)
    file = saved(tmp_path / "x.safetensors", with_transposed(module.state_dict(), ""))
    like = Subject(module, (torch.zeros(2, 5, 24),), {}) if runs else module
    report = params_of_checkpoint(file, like=like, num_heads=4, per_head=True)
    (attention,) = report.stored_attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 6)
    parameters = {parameter.name: parameter for parameter in report.parameters}
    assert parameters["k_proj.weight"].axes == "embed (kv_heads head_dim)"
    assert parameters["q_proj.weight"].axes == "embed (heads head_dim)"
    heads = [(piece.rows, piece.columns) for piece in parameters["k_proj.weight"].heads]
    assert heads == [((0, 24), (0, 6)), ((0, 24), (6, 12))]
    if bias:
        assert parameters["k_proj.bias"].axes == "(kv_heads head_dim)"
        assert parameters["k_proj.bias"].role.startswith("b_k")


def test_no_head_count_is_said_to_load_with_transposed_weights(tmp_path):
    """24 and 12 features: a head count of 2, 4, 8 gives 1, 2, 4 heads of keys. None of them loads."""
    module = Grouped(linear, bias=True)
    turned = params_of_checkpoint(
        saved(tmp_path / "t.safetensors", with_transposed(module.state_dict(), "")), like=module
    )
    straight = params_of_checkpoint(saved(tmp_path / "x.safetensors", module.state_dict()), like=module)
    assert [attention.fits for attention in turned.stored_attentions] == [
        attention.fits for attention in straight.stored_attentions
    ]
    assert turned.stored_attentions[0].fits == (2, 4, 6, 8, 12, 24)
    with pytest.raises(RuntimeError):
        module.load_state_dict(with_transposed(module.state_dict(), ""))
    assert "loads without an error" in " ".join(straight.notes)
    assert "loads without an error" not in " ".join(turned.notes)


def test_a_number_that_is_none_is_named(tmp_path):
    state = Model().state_dict()
    name = next(iter(state))
    broken = {**state, name: state[name].clone()}
    broken[name].flatten()[0] = torch.nan
    paths = [saved(tmp_path / f"{side}.safetensors", content) for side, content in (("a", state), ("b", broken))]
    answer = " ".join(diff_of_checkpoints(*paths).answer)
    assert f"{name}: NaN or inf on one side, where the other has another number." in answer

"""Queries, keys and values stacked in one tensor on one side, and in three tensors on the other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.checkpoints.params import params_of_checkpoint
from mha_inspect.running.subject import Subject
from tests.corpus.stored import Apart
from tests.fuzz.files import saved

WIDTH, HEADS = 24, 4
Weights = dict[str, Tensor]
APART = "q, k and v are the same, in one tensor on the {} and in three on the {}"


def stacked() -> Weights:
    generator = torch.Generator().manual_seed(0)
    sizes = {"in_proj_weight": (3 * WIDTH, WIDTH), "in_proj_bias": (3 * WIDTH,)}
    sizes |= {"out_proj.weight": (WIDTH, WIDTH), "out_proj.bias": (WIDTH,)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def split(weights: Weights, order: str = "qkv") -> Weights:
    """Return the weights with a tensor for each letter; `order` is that of the blocks that they are taken from."""
    apart = {name: tensor for name, tensor in weights.items() if "in_proj" not in name}
    for kind, letter, block in itertools.product(("weight", "bias"), "qkv", range(3)):
        if order[block] == letter:
            apart[f"{letter}_proj.{kind}"] = weights[f"in_proj_{kind}"].chunk(3)[block].clone()
    return apart


@pytest.mark.parametrize(("prefix", "runs"), [("", True), ("layer.", False)])
def test_a_stacked_file_for_a_module_of_three_is_split(tmp_path: Path, prefix: str, runs: bool) -> None:
    weights = {f"{prefix}{name}": tensor for name, tensor in stacked().items()}
    module = Apart()
    like = Subject(module, (torch.randn(2, 5, WIDTH),), {}) if runs else module
    report = params_of_checkpoint(saved(tmp_path / "model.safetensors", weights, None), like=like)
    role = {parameter.name: parameter.role for parameter in report.parameters}[f"{prefix}in_proj_weight"]
    assert role == "W_q, W_k, W_v stacked: rows 0–23, 24–47, 48–71"
    (note,) = [note for note in report.notes if "in_proj_weight" in note]
    line = note.partition("To split it: ")[2]
    state = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    for kind in ("weight", "bias"):
        exec(line.replace("weight", kind), {"state": state})
    assert all(torch.equal(state[name], tensor) for name, tensor in split(stacked()).items())
    module.load_state_dict(state)


def test_three_tensors_for_a_module_that_stacks_them_are_joined(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", split(stacked()), None)
    report = params_of_checkpoint(path, like=nn.MultiheadAttention(WIDTH, HEADS))
    (note,) = [note for note in report.notes if "in_proj_weight" in note]
    state = split(stacked())
    exec(note.partition("To join them: ")[2], {"state": state, "torch": torch})
    assert torch.equal(state["in_proj_weight"], stacked()["in_proj_weight"])


def test_other_sizes_are_not_split(tmp_path: Path) -> None:
    weights = stacked() | {"in_proj_weight": torch.randn(3 * WIDTH, 2 * WIDTH)}
    report = params_of_checkpoint(saved(tmp_path / "model.safetensors", weights, None), like=Apart())
    assert not [note for note in report.notes if "in_proj_weight" in note]

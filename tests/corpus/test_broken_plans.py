"""Plans that are broken on purpose are found at the first stage that they make wrong, and the right one is proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.errors import ForwardError
from mha_inspect.layers.spec import Show
from mha_inspect.layers.split_heads import SplitHeadsAttention
from mha_inspect.questions.shard_plan import Plan
from mha_inspect.questions.sharding import sharded
from mha_inspect.reports.trace import Proof
from mha_inspect.running.subject import Subject

from .ranks import BROKEN, Block, Change, CutInOneBlock, CutPacked, Styles, cut_styles, styles_of

pytest.importorskip("torch.distributed._local_tensor")

"""What is changed in a module before it is cut, and the styles that are other than those of a right plan."""


def tokens() -> Tensor:
    return torch.randint(0, 32, (2, 10))


def block_cut_after(change: Change) -> Plan:
    def cut(module: nn.Module, mesh: Any) -> None:
        styles = styles_of(["attention.q", "attention.k", "attention.v"], "attention.o")
        cut_styles(module, mesh, styles | (change(module, mesh) or {}))

    return Plan(code=cut)


def proof_of(module: nn.Module, given: tuple[Tensor, ...], plan: Plan) -> Proof:
    return sharded(Subject(module.eval(), given, {}), Show(), 2, plan)[0].proof


# -- right plans ------------------------------------------------------------------------------------------------------


def test_a_right_plan_of_a_block_is_proved() -> None:
    torch.manual_seed(0)
    proof = proof_of(Block(), (tokens(),), block_cut_after(lambda module, mesh: None))
    assert proof.agrees, proof


def test_a_right_plan_of_a_layer_with_a_fixed_number_of_heads_is_proved() -> None:
    def cut(module: Any, mesh: Any) -> None:
        module.num_heads, module.d_model = 2, 12  # those of a rank
        cut_styles(module, mesh, styles_of(["wq", "wk", "wv"], "dense"))

    torch.manual_seed(0)
    proof = proof_of(SplitHeadsAttention(24, 4), (torch.randn(2, 5, 24),) * 3, Plan(code=cut))
    assert proof.agrees, proof


def test_a_right_plan_cuts_a_bias_of_relative_positions_too() -> None:
    transformers = pytest.importorskip("transformers")
    inside = "encoder.block.0.layer.0.SelfAttention."
    columns = [inside + name for name in ("q", "k", "v", "relative_attention_bias")]

    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=32, d_model=48, d_kv=12, d_ff=64, num_layers=1, num_heads=4)
    plan = Plan(code=lambda module, mesh: cut_styles(module, mesh, styles_of(columns, inside + "o")))
    proof = proof_of(transformers.T5EncoderModel(config), (tokens(),), plan)
    assert proof.agrees, proof


# -- broken plans -----------------------------------------------------------------------------------------------------


"""What is broken, the first wrong stage, and a part of the reason, which is tried on the numbers."""


@pytest.mark.parametrize("how", BROKEN)
def test_each_broken_plan_is_found_at_its_stage(how: str) -> None:
    change, stage, reason = BROKEN[how]
    torch.manual_seed(0)
    proof = proof_of(Block(), (tokens(),), block_cut_after(change))
    assert proof.agrees is False
    assert proof.note.startswith(f"The first difference is {stage} on rank 0: "), proof
    assert reason in proof.note, proof


@pytest.mark.parametrize(("letter", "style"), [("o", "ColwiseParallel"), ("q", "RowwiseParallel")])
def test_a_plan_that_makes_a_projection_raise_names_it(letter: str, style: str) -> None:
    def cut_as(module: nn.Module, mesh: Any) -> Styles:
        from torch.distributed.tensor import parallel

        return {f"attention.{letter}": getattr(parallel, style)()}

    torch.manual_seed(0)
    with pytest.raises(ForwardError) as failed:
        proof_of(Block(), (tokens(),), block_cut_after(cut_as))
    failure = failed.value.trace.failure
    assert failure is not None
    assert failure.module == f"attention.{letter}"


def test_a_plan_that_makes_the_forward_raise_before_the_attention_names_no_stage() -> None:
    def cut_embedding(module: nn.Module, mesh: Any) -> Styles:
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {"embed": ColwiseParallel()}

    torch.manual_seed(0)
    with pytest.raises(ForwardError) as failed:
        proof_of(Block(), (tokens(),), block_cut_after(cut_embedding))
    failure = failed.value.trace.failure
    assert failure is not None
    assert not any(stage.name for stage in failure.completed)


# -- packed columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "note"), [(CutPacked, ""), (CutInOneBlock, "The first difference is q_proj on rank 1: ")]
)
def test_packed_columns_of_gpt2_are_cut_by_a_function(cut: type[CutPacked], note: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=32, n_embd=48, n_layer=1, n_head=4))
    proof = proof_of(model, (tokens(),), Plan(code=cut()))
    assert proof.agrees is (cut is CutPacked), proof
    assert proof.note.startswith(note), proof

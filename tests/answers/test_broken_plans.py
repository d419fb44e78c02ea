"""Plans that are broken on purpose are found at the first stage that they make wrong, and the right one is proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.shard_plan import Plan
from mha_inspect.answers.sharding import sharded
from mha_inspect.errors import ForwardError
from mha_inspect.layers.spec import Show
from mha_inspect.layers.split_heads import SplitHeadsAttention
from mha_inspect.reports.trace import Proof
from mha_inspect.running.subject import Subject

from .test_sharding import Attention, Rowwise

pytest.importorskip("torch.distributed._local_tensor")

Styles = dict[str, Any]
Change = Callable[[nn.Module, Any], Styles | None]
"""What is changed in a module before it is cut, and the styles that are other than those of a right plan."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(32, 24), nn.LayerNorm(24), Attention()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.attention(self.norm(x))


def tokens() -> Tensor:
    return torch.randint(0, 32, (2, 10))


def styles_of(columns: list[str], rows: str) -> Styles:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return dict.fromkeys(columns, ColwiseParallel()) | {rows: RowwiseParallel()}


def cut_styles(module: nn.Module, mesh: Any, styles: Styles) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    used = {path: style for path, style in styles.items() if style is not None}
    parallelize_module(module, mesh, used, src_data_rank=None)


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


def without_sum(module: Any, mesh: Any) -> Styles:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import RowwiseParallel

    return {"attention.o": RowwiseParallel(output_layouts=Partial())}


def bias_on_every_rank(module: Any, mesh: Any) -> Styles:
    module.attention.o = Rowwise(module.attention.o, mesh, reduces=True, bias_everywhere=True)
    return {"attention.o": None}


def swapped(module: Any, mesh: Any) -> None:
    q, k = module.attention.q, module.attention.k
    q.weight, k.weight = k.weight, q.weight


def moved(letter: str, dim: int = 0, step: int = 1) -> Change:
    """Return what moves the rows, or the columns, of a matrix, so that each rank gets some of another's."""

    def move(module: nn.Module, mesh: Any) -> None:
        part = module.get_submodule(f"attention.{letter}")
        part.weight = nn.Parameter(part.weight.detach().roll(step, dim))  # type: ignore[operator]

    return move


class Normed(nn.Module):
    """A norm over the features that a rank has."""

    def __init__(self, norm: Any, mesh: Any) -> None:
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def part(self, whole: Tensor, dim: int) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        everywhere = DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False)
        return everywhere.redistribute(self.mesh, [Shard(dim)]).to_local()

    def forward(self, x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        features, weight = self.part(x, 2), self.part(self.norm.weight, 0)
        normed = features * features.square().mean(-1, keepdim=True).rsqrt() * weight
        return DTensor.from_local(normed, self.mesh, [Shard(2)], run_check=False).full_tensor()


def cut_norm(module: Any, mesh: Any) -> None:
    module.norm = Normed(module.norm, mesh)


BROKEN: dict[str, tuple[Change, str, str]] = {
    "no sum": (without_sum, "output", "The sum over the 2 ranks"),
    "bias on every rank": (bias_on_every_rank, "output", "every rank adds the bias"),
    "q and k swapped": (swapped, "q_proj", "t is the part of k_proj."),
    "keys cut inside a head": (moved("k"), "k_proj", "t has features"),
    "other columns of W_o": (moved("o", 1, 12), "output", ""),
    "norm cut": (cut_norm, "query", ""),
}
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


class CutPacked:
    """parallelize_module cuts no Conv1D: a rank's columns of W_q, W_k and W_v are taken from each of the three."""

    def of_packed(self, whole: Tensor, mesh: Any) -> Tensor:
        return self.part(whole.unflatten(-1, (3, -1)), mesh).flatten(-2)

    def part(self, whole: Tensor, mesh: Any) -> Tensor:
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(whole, mesh, [Shard(whole.dim() - 1)], src_data_rank=None).to_local()

    def __call__(self, module: Any, mesh: Any) -> None:
        attention = module.h[0].attn
        packed, width = attention.c_attn, attention.embed_dim
        for name in ("weight", "bias"):
            whole = getattr(packed, name).detach()
            setattr(packed, name, nn.Parameter(self.of_packed(whole, mesh)))
        packed.nf, attention.split_size, attention.num_heads = 3 * width // 2, width // 2, 2
        out = nn.Linear(width, width)
        out.weight, out.bias = nn.Parameter(attention.c_proj.weight.detach().T), attention.c_proj.bias
        attention.c_proj = Rowwise(out, mesh, reduces=True, bias_everywhere=False)


class CutInOneBlock(CutPacked):
    """Takes the first half of all packed columns for rank 0."""

    def of_packed(self, whole: Tensor, mesh: Any) -> Tensor:
        return self.part(whole, mesh)


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

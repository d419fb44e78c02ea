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
from mha_inspect.layers.fold_heads import FoldHeadsAttention
from mha_inspect.layers.grouped_query import GroupedQueryAttention
from mha_inspect.layers.spec import Show
from mha_inspect.layers.split_heads import SplitHeadsAttention
from mha_inspect.layers.wide import WideAttention
from mha_inspect.running.subject import Subject

from .test_sharding import Attention, Rowwise

pytest.importorskip("torch.distributed._local_tensor")
transformers = pytest.importorskip("transformers")

Broken = Callable[[nn.Module, Any, dict[str, str]], dict[str, Any] | None]
SIZES = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(32, 24), nn.LayerNorm(24), Attention()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.attention(self.norm(x))


def llama() -> Any:
    return transformers.LlamaModel(
        transformers.LlamaConfig(hidden_size=48, num_key_value_heads=2, attention_bias=True, use_cache=False, **SIZES)
    )


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(hidden_size=48, **SIZES))


def t5() -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=32, d_model=48, d_kv=12, d_ff=64, num_layers=1, num_heads=4)
    )


def fold_heads() -> nn.Module:
    """Return the layer with its lazy projections made."""
    module = FoldHeadsAttention(24, 4)
    module(*[torch.zeros(1, 2, 24)] * 3)
    return module


def paths(prefix: str, names: str, **others: str) -> dict[str, str]:
    return {letter: prefix + name for letter, name in zip("qkvo", names.split(), strict=True)} | others


LLAMA = "layers.0.self_attn."
BERT = "encoder.layer.0.attention."
T5 = "encoder.block.0.layer.0.SelfAttention."
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "block": (Block, paths("attention.", "q k v o", embed="embed", norm="norm"), ""),
    "llama": (
        llama,
        paths(LLAMA, "q_proj k_proj v_proj o_proj", embed="embed_tokens", norm="layers.0.input_layernorm"),
        "",
    ),
    "bert": (
        bert,
        paths(
            BERT,
            "self.query self.key self.value output.dense",
            embed="embeddings.word_embeddings",
            norm="embeddings.LayerNorm",
        ),
        "",
    ),
    "t5": (
        t5,
        paths(
            T5,
            "q k v o",
            embed="encoder.embed_tokens",
            norm="encoder.block.0.layer.0.layer_norm",
            b=T5 + "relative_attention_bias",
        ),
        "",
    ),
    "split-heads": (lambda: SplitHeadsAttention(24, 4), paths("", "wq wk wv dense"), "num_heads d_model"),
    "fold-heads": (fold_heads, paths("", "W_q W_k W_v W_o"), "num_heads"),
    "wide": (lambda: WideAttention(24, 4, 24), paths("", "toqueries tokeys tovalues unifyheads"), "heads"),
    "grouped-query": (
        lambda: GroupedQueryAttention(24, 8, 4, 3),
        paths("", "q_proj k_proj v_proj o_proj"),
        "num_heads num_key_value_heads",
    ),
}
"""A model, the paths of its projections, and the attributes of which a rank has a part."""


def replaced(module: nn.Module, path: str, change: Callable[[Any], nn.Module]) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, change(module.get_submodule(path)))


def without_sum(module: nn.Module, mesh: Any, at: dict[str, str]) -> dict[str, Any]:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import RowwiseParallel

    return {at["o"]: RowwiseParallel(output_layouts=Partial())}


def bias_on_every_rank(module: nn.Module, mesh: Any, at: dict[str, str]) -> dict[str, Any]:
    replaced(module, at["o"], lambda whole: Rowwise(whole, mesh, reduces=True, bias_everywhere=True))
    return {at["o"]: None}


def swapped(module: nn.Module, mesh: Any, at: dict[str, str]) -> None:
    q, k = (module.get_submodule(at[letter]) for letter in "qk")
    q.weight, k.weight = k.weight, q.weight


def moved(letter: str, dim: int = 0, step: int = 1) -> Broken:
    def move(module: nn.Module, mesh: Any, at: dict[str, str]) -> None:
        part = module.get_submodule(at[letter])
        part.weight = nn.Parameter(part.weight.detach().roll(step, dim))  # type: ignore[operator]

    return move


def cut_as(letter: str, style: str) -> Broken:
    def cut(module: nn.Module, mesh: Any, at: dict[str, str]) -> dict[str, Any]:
        from torch.distributed.tensor import parallel

        return {at[letter]: getattr(parallel, style)()}

    return cut


class Normed(nn.Module):
    """A norm over the features that a rank has."""

    def __init__(self, norm: Any, mesh: Any) -> None:
        super().__init__()
        self.norm, self.mesh = norm, mesh

    def forward(self, x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parts = (
            DTensor.from_local(each, self.mesh, [Replicate()], run_check=False).redistribute(self.mesh, [Shard(dim)])
            for each, dim in ((x, 2), (self.norm.weight, 0))
        )
        mine, weight = (part.to_local() for part in parts)
        normed = mine * mine.square().mean(-1, keepdim=True).rsqrt() * weight
        return DTensor.from_local(normed, self.mesh, [Shard(2)], run_check=False).full_tensor()


def cut_norm(module: nn.Module, mesh: Any, at: dict[str, str]) -> None:
    replaced(module, at["norm"], lambda norm: Normed(norm, mesh))


BREAKS: dict[str, tuple[Broken, str]] = {
    "right": (lambda module, mesh, at: None, ""),
    "no sum": (without_sum, "output"),
    "bias on every rank": (bias_on_every_rank, "output"),
    "q and k swapped": (swapped, "q_proj"),
    "keys cut inside a head": (moved("k"), "k_proj"),
    "values cut inside a head": (moved("v"), "v_proj"),
    "other columns of W_o": (moved("o", 1, 12), "output"),
    "columns for rows of W_o": (cut_as("o", "ColwiseParallel"), "in o"),
    "columns for rows of W_q": (cut_as("q", "RowwiseParallel"), "in q"),
    "embed cut": (cut_as("embed", "ColwiseParallel"), "no stage"),
    "norm cut": (cut_norm, "query"),
}
"""What is broken, and the first wrong stage, or the projection that raises."""
REASONS = {
    "no sum": "The sum over the 2 ranks",
    "bias on every rank": "every rank adds the bias",
    "q and k swapped": "t is the part of k_proj.",
    "keys cut inside a head": "t has features",
}
"""What is broken to the reason, which is tried on the numbers."""
IMPOSSIBLE = {("llama", "q and k swapped"), ("grouped-query", "q and k swapped"), ("t5", "bias on every rank")}
CASES = [
    (name, how)
    for name, (_, at, _) in MODELS.items()
    for how in BREAKS
    if (name, how) not in IMPOSSIBLE and ("embed" in at or how not in ("embed cut", "norm cut"))
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_each_broken_plan_is_found_at_its_stage(name: str, how: str) -> None:
    make, at, counts = MODELS[name]
    breaks, wrong = BREAKS[how]

    def cut(module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for count in counts.split():
            setattr(module, count, getattr(module, count) // 2)
        styles = {at[letter]: ColwiseParallel() for letter in "qkvb" if letter in at} | {at["o"]: RowwiseParallel()}
        styles |= breaks(module, mesh, at) or {}
        parallelize_module(module, mesh, {path: style for path, style in styles.items() if style}, src_data_rank=None)

    torch.manual_seed(0)
    x = torch.randint(0, 32, (2, 10)) if "embed" in at else torch.randn(2, 5, 24)
    made = Subject(make().eval(), (x,) if name in ("block", "llama", "bert", "t5", "grouped-query") else (x, x, x), {})
    if wrong in ("in o", "in q", "no stage"):
        with pytest.raises(ForwardError) as failed:
            sharded(made, Show(), 2, Plan(code=cut))
        failure = failed.value.trace.failure
        assert failure is not None
        assert (
            failure.module == at[wrong[-1]]
            if wrong != "no stage"
            else not any(stage.name for stage in failure.completed)
        )
        return
    proof = sharded(made, Show(), 2, Plan(code=cut))[0].proof
    assert proof.agrees is (how == "right"), proof
    assert how == "right" or proof.note.startswith(f"The first difference is {wrong} on rank 0: "), proof
    assert REASONS.get(how, "") in proof.note, proof


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("right", ""),
        ("in one block", "q_proj on rank 1"),
        ("q and k swapped", "q_proj on rank 0"),
        ("inside a head", "q_proj on rank 0"),
        ("no sum", "output on rank 0"),
        ("bias on every rank", "output on rank 0"),
    ],
)
def test_packed_columns_of_gpt2_are_cut_by_a_function(how: str, wrong: str) -> None:
    """parallelize_module cuts no Conv1D: a rank's columns of W_q, W_k and W_v are taken from each of the three."""

    def cut(module: Any, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        def part(whole: Tensor, dim: int) -> Tensor:
            return distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None).to_local()

        attention = module.h[0].attn
        packed, width = attention.c_attn, attention.embed_dim
        for name in ("weight", "bias"):
            of_each = getattr(packed, name).detach().unflatten(-1, (3, width))
            if how == "q and k swapped":
                of_each = of_each[..., [1, 0, 2], :]
            if how == "inside a head":
                of_each = of_each.roll(1, -1)
            if how == "in one block":
                of_each = of_each.flatten(-2)
            mine = part(of_each, of_each.dim() - 1)
            setattr(packed, name, nn.Parameter(mine if how == "in one block" else mine.flatten(-2)))
        packed.nf, attention.split_size, attention.num_heads = 3 * width // 2, width // 2, 2
        whole = nn.Linear(width, width)
        whole.weight, whole.bias = nn.Parameter(attention.c_proj.weight.detach().T), attention.c_proj.bias
        everywhere = how == "bias on every rank"
        attention.c_proj = Rowwise(whole, mesh, reduces=how != "no sum", bias_everywhere=everywhere)

    torch.manual_seed(0)
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=32, n_embd=48, n_layer=1, n_head=4))
    proof = sharded(Subject(model.eval(), (torch.randint(0, 32, (2, 10)),), {}), Show(), 2, Plan(code=cut))[0].proof
    assert proof.agrees is (how == "right"), proof
    assert how == "right" or proof.note.startswith(f"The first difference is {wrong}: "), proof

"""Attention that is cut by heads over ranks, and plans that cut it, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GOOD = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class Attention(nn.Module):
    """Attention that computes its own number of heads from what it gets."""

    def __init__(self, width: int = 24, head_dim: int = 3) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def returned(self, weights: Tensor, output: Tensor) -> Any:
        return output

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.projected(x))
        weights = (q @ k.mT / self.head_dim**0.5).softmax(-1)
        return self.returned(weights, self.o((weights @ v).transpose(1, 2).flatten(2)))


class WithLayer(Attention):
    """Attention before a further layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(24, 24)

    def returned(self, weights: Tensor, output: Tensor) -> Tensor:
        return self.extra(output)


class Packed(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(24, 72)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


class Transposed(Attention):
    """W_q and W_k in nn.Linear, and W_v in the last columns of a parameter, as in Conv1D of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(24, 72) / 5)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), (x @ self.qkv).split(24, -1)[2]


class NormedOverHeads(Attention):
    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k = (nn.functional.rms_norm(p(x), (p.out_features,)) for p in (self.q, self.k))
        return q, k, self.v(x)


def with_one_weight(first: str, second: str) -> Attention:
    module = Attention()
    module.get_submodule(second).weight = module.get_submodule(first).weight
    return module


def computed(parametrize: Callable[[nn.Module], Any]) -> Attention:
    module = Attention()
    parametrize(module.q)
    return module


class Rowwise(nn.Module):
    """A rank's columns of W_o, written by hand; the sum over ranks and the bias may be wrong."""

    def __init__(self, whole: nn.Linear, mesh: Any, *, reduces: bool, bias_everywhere: bool) -> None:
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor

        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh, [Shard(1)], src_data_rank=None))
        self.bias, self.reduces, self.bias_everywhere = whole.bias, reduces, bias_everywhere

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed as dist

        out = nn.functional.linear(x, self.weight.to_local(), self.bias if self.bias_everywhere else None)  # type: ignore[operator]
        if self.reduces:
            dist.all_reduce(out)
        return out if self.bias_everywhere else out + self.bias


def by_hand(reduces: bool, bias_everywhere: bool) -> Callable[[Attention, Any], None]:
    def cut(module: Attention, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        module.o = Rowwise(module.o, mesh, reduces=reduces, bias_everywhere=bias_everywhere)  # type: ignore[assignment]
        parallelize_module(module, mesh, {name: ColwiseParallel() for name in "qkv"}, src_data_rank=None)

    return cut


class Mapped(Attention):
    """Returns the weights before the output, as a mapping."""

    def returned(self, weights: Tensor, output: Tensor) -> dict[str, Tensor]:
        return {"mean": weights.mean((-1, -3)), "out": output}


class ChangesItsInput(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Last(Attention):
    """A mean over the features of a projection after W_o."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(24, 24)
        self.unused = nn.Linear(24, 24)

    def returned(self, weights: Tensor, output: Tensor) -> Tensor:
        return self.after(output).mean(-1)


Styles = dict[str, Any]


Change = Callable[[nn.Module, Any], Styles | None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Embedding(32, 24), nn.LayerNorm(24), Attention()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.attention(self.norm(x))


def styles_of(columns: list[str], rows: str) -> Styles:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return dict.fromkeys(columns, ColwiseParallel()) | {rows: RowwiseParallel()}


def cut_styles(module: nn.Module, mesh: Any, styles: Styles) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    used = {path: style for path, style in styles.items() if style is not None}
    parallelize_module(module, mesh, used, src_data_rank=None)


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

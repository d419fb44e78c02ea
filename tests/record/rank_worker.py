"""Run the ranks of `test_ranks`: `python rank_worker.py FOLDER`. The answers are `FOLDER/RANK.json`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mha_inspect
from mha_inspect import Show
from mha_inspect.answers.ranks import rank_of
from mha_inspect.answers.trace import traced
from mha_inspect.errors import ForwardError
from mha_inspect.running.subject import Subject

PLAN = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
HEADS, WIDTH = 4, 32


class Attention(nn.Module):
    def __init__(self, fused: bool, bias: bool = True) -> None:
        super().__init__()
        self.fused, self.head_dim = fused, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.fused:
            context = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            context = (q @ k.mT / self.head_dim**0.5).softmax(-1) @ v
        return self.o(context.transpose(1, 2).flatten(2))


class Model(nn.Sequential):
    def __init__(self, fused: bool = False) -> None:
        parts = {"first": Attention(fused), "norm": nn.LayerNorm(WIDTH), "second": Attention(fused)}
        super().__init__(OrderedDict(parts))


class ByHand(Attention):
    """The rank's own heads in plain parameters, and torch's older collective, which writes into the output."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(fused=False, bias=False)
        for name in "qkv":
            weight = getattr(self, name).weight
            setattr(self, name, nn.Linear(WIDTH, WIDTH // world, bias=False))
            getattr(self, name).weight = nn.Parameter(weight.detach().chunk(world)[rank].clone())
        self.o.weight = nn.Parameter(self.o.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with torch.no_grad():
            dist.all_reduce(out)
        return out


class Collectives(TorchDispatchMode):
    """Counts the collectives of a block."""

    count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        self.count += "c10d" in str(func) and "wait" not in str(func) and "wrap" not in str(func)
        return func(*args, **(kwargs or {}))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def tensor_parallel(fused: bool) -> nn.Module:
    model = seeded(lambda: Model(fused))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for attention in (model.first, model.second):
        parallelize_module(attention, mesh, PLAN)
    return model


class InParts(nn.Sequential):
    """Attention whose output projection is outside the module that computes the scores, as in BERT."""

    def __init__(self) -> None:
        super().__init__(OrderedDict({"heads": Attention(fused=False), "dense": nn.Linear(WIDTH, WIDTH)}))
        self.heads.o = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


def output_in_parts(x: torch.Tensor, *, is_cut: bool) -> list[Any]:
    """Return the output, its shape over ranks, its FLOPs and the collectives; each rank may keep a piece of it."""
    model, mesh = seeded(InParts), init_device_mesh("cpu", (dist.get_world_size(),))
    last = RowwiseParallel(output_layouts=Shard(1) if is_cut else Replicate())
    parallelize_module(model, mesh, {**{f"heads.{name}": ColwiseParallel() for name in "qkv"}, "dense": last})
    trace = mha_inspect.trace(model, x, keep=True)
    output = trace.attentions[0].stages[-1]
    collectives = [[exchange.name, exchange.stage] for exchange in trace.collectives or ()]
    return [output.name, output.tensor.tolist(), output.whole, output.flops, collectives]


def fsdp() -> nn.Module:
    model = seeded(Model)
    for attention in (model.first, model.second):
        fully_shard(attention)
    return fully_shard(model)


class HeadsForPositions(Attention):
    """DeepSpeed-Ulysses: every rank projects its positions, and exchanges them for all positions of its heads."""

    def exchanged(self, x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        parts = x.chunk(dist.get_world_size(), cut)
        sent = torch.cat([part.flatten() for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat([part.view(parts[0].shape) for part in received.chunk(len(parts))], joined)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k, v = (self.exchanged(part, 1, 2) for part in (q, k, v))
        context = (q @ k.mT / self.head_dim**0.5).softmax(-1) @ v
        return self.o(self.exchanged(context, 2, 1).transpose(1, 2).flatten(2))


def other_ways(rank: int, world: int) -> dict[str, Any]:
    """Return the stages of one attention, and of ranks that divide it in other ways than tensor parallelism alone."""

    def attention() -> Attention:
        return seeded(lambda: Attention(fused=False))  # type: ignore[return-value]

    def planned(plan: dict[str, Any]) -> nn.Module:
        return parallelize_module(attention(), init_device_mesh("cpu", (world,)), plan)

    x = seeded(lambda: nn.Embedding(2 * 8, WIDTH)).weight.detach().view(2, 8, WIDTH)
    mine, cut = x.chunk(world, 1)[rank], RowwiseParallel(output_layouts=Shard(1))
    gathers = {name: ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
    runs: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "unsharded": (attention(), x),
        "flat parameters": (FullyShardedDataParallel(attention(), device_id=torch.device("cpu")), x),
        "heads for positions": (seeded(lambda: HeadsForPositions(fused=False)), mine),
        "gathered for each side": (planned({**gathers, "o": cut}), mine),
    }
    answers = {}
    for name, (module, given) in runs.items():
        with torch.no_grad():
            trace = mha_inspect.trace(module, given, keep=True)
        stages = {stage.name: stage.tensor.tolist() for stage in trace.attentions[0].stages}
        between = [[exchange.name, exchange.stage] for exchange in trace.collectives or ()]
        answers[name] = {"kind": trace.attentions[0].kind, "stages": stages, "between ranks": between}
    return answers


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    with Collectives() as collectives:
        out = model(x)
        out.square().mean().backward()
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return local(out) + 0, gradients, collectives.count


def bits_and_collectives(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Any]:
    """Compare a step of training in a recording with a plain one."""
    plain, plain_gradients, plain_count = run(make(), x)
    model = make()
    with mha_inspect.recording() as recording:
        out, gradients, count = run(model, x)
    is_as_long = len(gradients) == len(plain_gradients) > 0
    return {
        "same output": torch.equal(out, plain),
        "same gradients": is_as_long and all(map(torch.equal, gradients, plain_gradients)),
        "collectives": [plain_count, count],
        "recorded": shapes_of(recording.trace),
        "recording is proved": bool(recording.trace),
    }


def shapes_of(trace: mha_inspect.Trace) -> list[dict[str, list[int]]]:
    return [{stage.name: list(stage.shape) for stage in attention.stages} for attention in trace.attentions]


def listed(sizes: tuple[int, ...] | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


def traced_stages(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Any]:
    """Return the stages of a trace, and its collectives beside those of a trace of one item."""
    model = make()
    with Collectives() as collectives:
        trace = mha_inspect.trace(model, x, keep=True)
    model = make()
    with Collectives() as of_one_item:
        mha_inspect.trace(model, x[:1])
    exchanges = [[exchange.name, exchange.stage, exchange.nbytes] for exchange in trace.collectives or ()]
    stages = trace.attentions[0].stages
    return {
        "traced": shapes_of(trace),
        "trace is proved": bool(trace),
        "forward collectives": [collectives.count, of_one_item.count, len(exchanges)],
        "between ranks": exchanges,
        "numbers": {stage.name: stage.tensor.tolist() for stage in stages},
        "whole": {stage.name: listed(stage.whole) for stage in stages},
    }


def parameters(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Any]:
    """Return shape, shape over ranks, first element and role of each parameter, and the bytes of all."""
    report = mha_inspect.params(make(), x, per_head=True)
    return {
        "parameters": {
            row.name: [list(row.shape), listed(row.whole), listed(row.start), row.role] for row in report.parameters
        },
        "parameter bytes": sum(local(parameter).nbytes for parameter in make().parameters()),
    }


def answers(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Any]:
    with torch.no_grad():
        model = make()
        rank = rank_of(dist.get_rank(), *traced(Subject(model, (x,), {}), Show(), keep=False), model)
    return {
        **bits_and_collectives(make, x),
        **traced_stages(make, x),
        **parameters(make, x),
        "rank": asdict(rank),
    }


def raising(x: torch.Tensor) -> str:
    """Return the message of a traced call that fails on this rank only, while the others wait for nobody."""
    model = tensor_parallel(fused=False)
    if dist.get_rank() == 0:
        try:
            mha_inspect.trace(model, x[..., :7])
        except ForwardError as error:
            return str(error)
    return ""


def with_nan(x: torch.Tensor) -> list[str]:
    """Return the notes of a trace whose NaN is in a result: to find its origin the module would run again."""
    model = tensor_parallel(fused=False)
    with torch.no_grad():
        model.first.q.bias.to_local()[0] = float("inf")
    return list(mha_inspect.trace(model, x).notes)


def of_two(rank: int) -> dict[str, Callable[[], nn.Module]]:
    return {
        "tensor parallel": lambda: tensor_parallel(fused=False),
        "tensor parallel, fused": lambda: tensor_parallel(fused=True),
        "by hand": lambda: seeded(lambda: ByHand(rank, 2)),
        "fsdp": fsdp,
        "ddp": lambda: DistributedDataParallel(seeded(Model)),
    }


def more_of_two(x: torch.Tensor, rank: int) -> dict[str, Any]:
    """Return what is asked once of two ranks: errors, NaN, outputs in parts, other ways to divide, and a model."""
    by_hand = mha_inspect.trace(seeded(lambda: Attention(fused=False, bias=False)), x, keep=True).attentions[0]
    in_parts = seeded(InParts)
    with torch.no_grad():
        expected_in_parts = in_parts.dense(in_parts.heads(x[:, :4])).tolist()
    return {
        "raising": raising(x),
        "with nan": with_nan(x),
        "in parts": {str(cut): output_in_parts(x[:, :4], is_cut=cut) for cut in (False, True)},
        "unsharded in parts": expected_in_parts,
        "unsharded by hand": {stage.name: stage.tensor.tolist() for stage in by_hand.stages},
        "other ways": other_ways(rank, 2),
    }


def answer(folder: Path, rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    try:
        x = seeded(lambda: nn.Embedding(2 * 5, WIDTH)).weight.detach().view(2, 5, WIDTH)
        unsharded = mha_inspect.trace(seeded(Model), x, keep=True).attentions[0]
        of_rank: dict[str, Any] = {name: answers(make, x) for name, make in of_two(rank).items()}
        of_rank["unsharded"] = {stage.name: stage.tensor.tolist() for stage in unsharded.stages}
        of_rank |= more_of_two(x, rank)
        (folder / f"{rank}.json").write_text(json.dumps(of_rank))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def import_what_ranks_import() -> None:
    """Run what imports while it runs: a process that is forked afterwards need not."""
    import torch._dynamo

    module, x = Attention(fused=False), torch.zeros(1, 2, WIDTH)
    with torch.no_grad(), mha_inspect.recording() as recording:
        module(x)
    assert recording.trace.attentions
    mha_inspect.params(module, x)


def main(folder: Path) -> None:
    import_what_ranks_import()
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=answer, args=(folder, rank, 2), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"exit codes {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

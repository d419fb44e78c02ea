"""Run the ranks of `test_ranks`: `python rank_worker.py FOLDER`. The answers are `FOLDER/WORLD/RANK.json`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
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


class Model(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = Attention(fused), nn.LayerNorm(WIDTH), Attention(fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


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


class InParts(nn.Module):
    """Attention whose output projection is outside the module that computes the scores, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.dense = Attention(fused=False), nn.Linear(WIDTH, WIDTH)
        self.heads.o = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.heads(x)).sin()


def output_in_parts(x: torch.Tensor, *, is_cut: bool) -> list[Any]:
    """Return the output, its shape over ranks, its FLOPs and the collectives; each rank may keep a piece of it."""
    model, mesh = seeded(InParts), init_device_mesh("cpu", (dist.get_world_size(),))
    last = RowwiseParallel(output_layouts=Shard(1) if is_cut else Replicate())
    parallelize_module(model, mesh, {**{f"heads.{name}": ColwiseParallel() for name in "qkv"}, "dense": last})
    trace = mha_inspect.trace(model, x, keep=True)
    output = trace.attentions[0].stages[-1]
    collectives = [[c.name, c.stage] for c in trace.collectives or ()]
    return [output.name, output.tensor.tolist(), output.whole, output.flops, collectives]


def fsdp() -> nn.Module:
    model = seeded(Model)
    for attention in (model.first, model.second):
        fully_shard(attention)
    return fully_shard(model)


def both() -> nn.Module:
    model = seeded(Model)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for attention in (model.first, model.second):
        parallelize_module(attention, mesh["tp"], PLAN)
        fully_shard(attention, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


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
    whole_contexts = ColwiseParallel(input_layouts=Shard(2), output_layouts=Replicate())
    runs: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "unsharded": (attention(), x),
        "unsharded, uneven": (attention(), x[:, :7]),
        "flat parameters": (FullyShardedDataParallel(attention(), device_id=torch.device("cpu")), x),
        "heads for positions": (seeded(lambda: HeadsForPositions(fused=False)), mine),
        "gathered for each side": (planned({**gathers, "o": cut}), mine),
        "gathered contexts": (planned({**PLAN, "o": whole_contexts}), x),
        "uneven": (planned({**PLAN, "o": cut}), x[:, :7]),
    }
    found = {}
    for name, (module, given) in runs.items():
        with torch.no_grad():
            trace = mha_inspect.trace(module, given, keep=True)
        stages = {stage.name: stage.tensor.tolist() for stage in trace.attentions[0].stages}
        between = [[c.name, c.stage] for c in trace.collectives or ()]
        found[name] = {"kind": trace.attentions[0].kind, "stages": stages, "between ranks": between}
    return found


def models() -> dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]]:
    """Return models of Hugging Face, which every rank gets whole from its seed, with their inputs."""
    import transformers

    ids = torch.arange(12).view(2, 6)
    sizes: Any = {"num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64, "hidden_size": WIDTH}
    llama = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
    t5 = transformers.T5Config(vocab_size=32, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS)
    gpt2 = transformers.GPT2Config(vocab_size=32, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    return {
        "llama": (lambda: transformers.LlamaModel(llama), {"input_ids": ids}),
        "bert": (lambda: transformers.BertModel(transformers.BertConfig(vocab_size=32, **sizes)), {"input_ids": ids}),
        "gpt2": (lambda: transformers.GPT2Model(gpt2), {"input_ids": ids}),
        "t5": (lambda: transformers.T5Model(t5), {"input_ids": ids, "decoder_input_ids": ids[:, :4]}),
    }


def models_under_fsdp() -> dict[str, Any]:
    """Return for each model what differs where its layers are sharded by FSDP2: stages, and words of parameters."""
    found: dict[str, Any] = {}
    for name, (make, given) in models().items():
        whole, spread = (seeded(make).eval() for _ in range(2))
        for layers in [part for part in spread.modules() if isinstance(part, nn.ModuleList)][::-1]:  # innermost first
            for layer in layers:
                fully_shard(layer)
        fully_shard(spread)
        pairs = zip(*(mha_inspect.trace(each, keep=True, **given).attentions for each in (whole, spread)), strict=True)
        differ = []
        for number, (expected, got) in enumerate(pairs):
            stages = {stage.name: stage for stage in got.stages}
            differ += [f"stages of {number}"] * ([*stages] != [stage.name for stage in expected.stages])
            for one in expected.stages:
                other = stages.get(one.name, one)
                alike = torch.equal(one.tensor, other.tensor) and (one.axes, one.formula) == (other.axes, other.formula)
                differ += [] if alike else [f"{one.name} of {number}"]
        roles = [{p.name: p.role for p in mha_inspect.params(each, **given).parameters} for each in (whole, spread)]
        differ += [path for path, role in roles[0].items() if not roles[1][path].startswith(role)]
        found[name] = {"attentions": number + 1, "differ": differ}
    return found


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    with Collectives() as collectives:
        out = model(x)
        out.square().mean().backward()
    gradients = [own(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return own(out) + 0, gradients, collectives.count


def answers(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Any]:
    plain, plain_gradients, plain_count = run(make(), x)
    model = make()
    with mha_inspect.recording() as recording:
        out, gradients, count = run(model, x)
    recorded = recording.trace
    model = make()
    with Collectives() as collectives:
        trace = mha_inspect.trace(model, x, keep=True)
    with torch.no_grad():
        rank = rank_of(dist.get_rank(), *traced(Subject(model := make(), (x,), {}), Show(), keep=False), model)
    model = make()
    with Collectives() as of_one:
        mha_inspect.trace(model, x[:1])
    params = mha_inspect.params(make(), x, per_head=True)
    return {
        "same output": torch.equal(out, plain),
        "same gradients": len(gradients) == len(plain_gradients) > 0
        and all(map(torch.equal, gradients, plain_gradients)),
        "collectives": [plain_count, count],
        "forward collectives": [collectives.count, of_one.count, len(trace.collectives or ())],
        "recorded": [{stage.name: list(stage.shape) for stage in a.stages} for a in recorded.attentions],
        "recorded whole": {s.name: s.whole and list(s.whole) for s in recorded.attentions[0].stages},
        "traced": [{stage.name: list(stage.shape) for stage in a.stages} for a in trace.attentions],
        "between ranks": [[c.name, c.stage, c.nbytes] for c in trace.collectives or ()],
        "numbers": {stage.name: stage.tensor.tolist() for stage in trace.attentions[0].stages},
        "parameters": {
            p.name: [list(p.shape), p.whole and list(p.whole), p.start and list(p.start), p.role]
            for p in params.parameters
        },
        "whole": {stage.name: stage.whole and list(stage.whole) for stage in trace.attentions[0].stages},
        "rank": asdict(rank),
        "parameter bytes": sum(own(parameter).nbytes for parameter in make().parameters()),
        "proved": bool(trace) and bool(recorded),
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


def answer(folder: Path, rank: int, world: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    try:
        x = seeded(lambda: nn.Embedding(2 * 5, WIDTH)).weight.detach().view(2, 5, WIDTH)
        cases: dict[str, Callable[[], nn.Module]] = {
            "tensor parallel": lambda: tensor_parallel(fused=False),
            "tensor parallel, fused": lambda: tensor_parallel(fused=True),
            "by hand": lambda: seeded(lambda: ByHand(rank, world)),
            "fsdp": fsdp,
            "ddp": lambda: DistributedDataParallel(seeded(Model)),
        }
        if world > 2:
            few = ("tensor parallel", "by hand")
            cases = {name: cases[name] for name in few} | {"fsdp and tensor parallel": both}
        found: dict[str, Any] = {name: answers(make, x) for name, make in cases.items()}
        found["raising"], found["with nan"] = raising(x), with_nan(x)
        found["in parts"] = {str(cut): output_in_parts(x[:, :4], is_cut=cut) for cut in (False, True)}
        found["other ways"] = other_ways(rank, world)
        found["models"] = models_under_fsdp() if world == 2 and find_spec("transformers") else {}
        in_parts = seeded(InParts)
        with torch.no_grad():
            found["unsharded in parts"] = in_parts.dense(in_parts.heads(x[:, :4])).tolist()
        whole = seeded(Model)
        unsharded = mha_inspect.trace(whole, x, keep=True).attentions[0]
        found["unsharded"] = {stage.name: stage.tensor.tolist() for stage in unsharded.stages}
        hand = mha_inspect.trace(seeded(lambda: Attention(fused=False, bias=False)), x, keep=True).attentions[0]
        found["unsharded by hand"] = {stage.name: stage.tensor.tolist() for stage in hand.stages}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(folder: Path) -> None:
    for world in (2, 4):
        (folder / str(world)).mkdir()
        # Forked, so that torch is imported once.
        start = multiprocessing.get_context("fork").Process
        ranks = [start(target=answer, args=(folder / str(world), rank, world), daemon=True) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"exit codes {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

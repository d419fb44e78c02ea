"""Run the ranks of `test_ranks`: `python rank_worker.py FOLDER`. What each finds wrong is in `FOLDER/RANK.json`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mha_inspect
from mha_inspect import Show
from mha_inspect.errors import ForwardError
from mha_inspect.measure.ranks import rank_of
from mha_inspect.questions.trace import traced
from mha_inspect.running.subject import Subject

PLAN = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
WORLD, HEADS, WIDTH = 2, 4, 32
OF_HEADS = dict.fromkeys(("q_heads", "k_heads", "v_heads", "scores", "weights", "context"), 1)
"""The stages of which a rank has its own heads, and the dimension of the heads."""
OF_FEATURES = dict.fromkeys(("q_proj", "k_proj", "v_proj", "concat"), 2)
OF_POSITIONS = dict.fromkeys(("query", "key", "value", "q_proj", "k_proj", "v_proj", "concat", "output"), 1)
Make = Callable[[], nn.Module]


class Attention(nn.Module):
    def __init__(self, fused: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.fused, self.head_dim = fused, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v)]

    def average(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / self.head_dim**0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.o(self.average(*self.heads(x)).transpose(1, 2).flatten(2))
        return output


class ByHand(Attention):
    """The rank's own heads in plain parameters, and torch's older collective, which writes into the output."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        for name in "qkvo":
            whole = getattr(self, name).weight.detach()
            mine = whole.chunk(WORLD, int(name == "o"))[dist.get_rank()].clone()
            setattr(self, name, nn.Linear(*mine.shape[::-1], bias=False))
            getattr(self, name).weight = nn.Parameter(mine)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            dist.all_reduce(out)
        return out


class HeadsForPositions(Attention):
    """DeepSpeed-Ulysses: every rank projects its positions, and exchanges them for all positions of its heads."""

    def exchanged(self, x: Tensor, cut: int, joined: int) -> Tensor:
        parts = x.chunk(WORLD, cut)
        sent = torch.cat([part.flatten() for part in parts])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat([part.view(parts[0].shape) for part in received.chunk(WORLD)], joined)

    def forward(self, x: Tensor) -> Tensor:
        context = self.average(*(self.exchanged(part, 1, 2) for part in self.heads(x)))
        output: Tensor = self.o(self.exchanged(context, 2, 1).transpose(1, 2).flatten(2))
        return output


class InParts(nn.Sequential):
    """Attention whose output projection is outside the module that computes the scores, as in BERT."""

    def __init__(self) -> None:
        super().__init__(OrderedDict({"heads": Attention(), "dense": nn.Linear(WIDTH, WIDTH)}))
        self.heads.o = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x).sin()
        return output


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


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def model(fused: bool = False) -> nn.Module:
    parts = {"first": Attention(fused), "norm": nn.LayerNorm(WIDTH), "second": Attention(fused)}
    return nn.Sequential(OrderedDict(parts))


def planned(module: nn.Module, plan: dict[str, Any]) -> nn.Module:
    return parallelize_module(module, init_device_mesh("cpu", (WORLD,)), plan)


def tensor_parallel(fused: bool = False) -> nn.Module:
    made = seeded(partial(model, fused))
    for attention in (made.first, made.second):
        planned(attention, PLAN)
    return made


def fsdp() -> nn.Module:
    made = seeded(model)
    for attention in (made.first, made.second):
        fully_shard(attention)
    return fully_shard(made)


SHARDED: dict[str, Make] = {
    "tensor parallel": tensor_parallel,
    "tensor parallel, fused": partial(tensor_parallel, True),
    "by hand": lambda: seeded(ByHand),
    "fsdp": fsdp,
    "ddp": lambda: DistributedDataParallel(seeded(model)),
}


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def inputs(length: int = 5) -> Tensor:
    return seeded(lambda: nn.Embedding(2 * length, WIDTH)).weight.detach().view(2, length, WIDTH)


def numbers(attention: Any) -> dict[str, Tensor]:
    return {stage.name: stage.tensor for stage in attention.stages}


def assert_divided(attention: Any, whole: Any, dims: dict[str, int]) -> None:
    """Assert that each stage is that of the unsharded run, or the rank's part of it along a dimension."""
    got, expected = numbers(attention), numbers(whole)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        mine = expected[name].chunk(WORLD, dims[name])[dist.get_rank()] if name in dims else expected[name]
        torch.testing.assert_close(tensor, mine, msg=name)


# -- what is asked of each sharded model -------------------------------------------------------------------------------


def bits_and_collectives(name: str) -> None:
    """A step of training in a recording has the same bits and exchanges as a plain one."""
    sides = []
    for recording in (None, mha_inspect.recording()):
        module = SHARDED[name]()
        with Collectives() as collectives:
            if recording is None:
                out = module(inputs())
            else:
                with recording:
                    out = module(inputs())
            out.square().mean().backward()
        gradients = [local(parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
        assert gradients
        sides.append([[local(out) + 0, *gradients], collectives.count])
    (plain, count), (recorded, recorded_count) = sides
    assert len(plain) == len(recorded)
    assert all(map(torch.equal, plain, recorded))
    assert count == recorded_count > 0
    assert recording.trace  # its verdict is good
    shapes = [{stage.name: stage.shape for stage in attention.stages} for attention in recording.trace.attentions]
    heads = 4 if name in ("fsdp", "ddp") else 2
    assert [each["q_heads"] for each in shapes] == [(2, heads, 5, 8)] * (1 if name == "by hand" else 2)
    assert {*shapes[0]} == {*OF_POSITIONS, *OF_HEADS}


def stages_and_exchanges(name: str) -> None:
    """The stages are the rank's own, of the unsharded run, and a trace exchanges nothing of its own."""
    is_whole, counts = name in ("fsdp", "ddp"), []
    for x in (inputs()[:1], inputs()):
        module = SHARDED[name]()
        with Collectives() as collectives:
            trace = mha_inspect.trace(module, x, keep=True)
        counts.append(collectives.count)
    exchanges = [(exchange.name, exchange.stage, exchange.nbytes) for exchange in trace.collectives or ()]
    assert [*counts, len(exchanges)] == [counts[0]] * 3
    assert trace
    assert len(trace.attentions) == (1 if name == "by hand" else 2)
    make = (lambda: Attention(bias=False)) if name == "by hand" else model
    unsharded = mha_inspect.trace(seeded(make), inputs(), keep=True).attentions[0]
    assert_divided(trace.attentions[0], unsharded, {} if is_whole else OF_HEADS | OF_FEATURES)
    whole = {stage.name: stage.whole for stage in trace.attentions[0].stages}
    is_cut = not is_whole and name != "by hand"
    assert (whole["q_heads"], whole["output"]) == ((2, 4, 5, 8) if is_cut else None, None)
    reduced = 4 * 2 * 5 * WIDTH
    expected = {
        "tensor parallel": [("all_reduce", "output", reduced)] * 2,
        "by hand": [("allreduce", "output", reduced)],
        "ddp": [],
    }
    if name in expected:
        assert [exchange for exchange in exchanges if exchange[1] or name == "by hand"] == expected[name]


def heads_and_parameters(name: str) -> None:
    """A rank says its heads, its part of the parameters and their place in the whole."""
    module, rank, heads = SHARDED[name](), dist.get_rank(), 4 if name in ("fsdp", "ddp") else 2
    with torch.no_grad():
        part = rank_of(rank, *traced(Subject(module, (inputs(),), {}), Show(), keep=False), module)
    rows, first = 8 * heads, 0 if heads == 4 else 16 * rank
    assert (part.rank, part.heads, part.kv_heads) == (rank, heads, heads)
    assert part.rows == ({} if name == "by hand" else {f"W_{letter}": (first, first + rows) for letter in "qkvo"})
    assert part.bytes == sum(local(parameter).nbytes for parameter in SHARDED[name]().parameters())
    exchanges = mha_inspect.trace(SHARDED[name](), inputs()).collectives or ()
    assert part.exchanged == sum(exchange.nbytes for exchange in exchanges)
    # Four projections and two products, of 2 items and 5 positions.
    attentions = 1 if name == "by hand" else 2
    assert part.flops == attentions * 2 * (4 * 2 * 5 * WIDTH * rows + 2 * 2 * 5 * 5 * rows)
    told = {row.name: row for row in mha_inspect.params(SHARDED[name](), inputs(), per_head=True).parameters}
    place = f"{16 * rank}–{16 * rank + 15} of 32: heads {2 * rank}–{2 * rank + 1}"
    if name == "ddp":
        row = told["module.first.q.weight"]
        assert (row.shape, row.whole, row.start) == ((32, 32), None, None)
    elif name != "by hand":
        row = told["first.q.weight"]
        assert (row.shape, row.whole, row.start) == ((16, 32), (32, 32), (16 * rank, 0))
        assert (row.role[:3], row.role.endswith(f"; rows {place}")) == ("W_q", True)
    if name == "tensor parallel":
        row = told["first.o.weight"]
        assert (row.shape, row.whole, row.start) == ((32, 16), (32, 32), (0, 16 * rank))
        assert f"; columns {place}" in row.role


# -- what is asked once ------------------------------------------------------------------------------------------------


def other_ways() -> None:
    """Stages are found on both sides of collectives, however ranks divide one attention."""
    x, cut = inputs(8), RowwiseParallel(output_layouts=Shard(1))
    mine = x.chunk(WORLD, 1)[dist.get_rank()]
    gathers = {name: ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
    whole = mha_inspect.trace(seeded(Attention), x, keep=True).attentions[0]
    flat = FullyShardedDataParallel(seeded(Attention), device_id=torch.device("cpu"))
    ways: list[tuple[nn.Module, Tensor, dict[str, int]]] = [
        (flat, x, {}),
        (seeded(HeadsForPositions), mine, OF_HEADS | OF_POSITIONS),
        (planned(seeded(Attention), {**gathers, "o": cut}), mine, OF_HEADS | OF_FEATURES | {"output": 1}),
    ]
    for module, given, dims in ways:
        with torch.no_grad():
            trace = mha_inspect.trace(module, given, keep=True)
        assert trace.attentions[0].kind == ("self",)
        assert_divided(trace.attentions[0], whole, dims)
        if isinstance(module, HeadsForPositions):
            exchanged = [(exchange.name, exchange.stage) for exchange in trace.collectives or ()]
            assert exchanged == [("alltoall_base", name) for name in ("q_heads", "k_heads", "v_heads", "concat")]


def output_in_parts() -> None:
    """An output is added up over ranks before each may keep a piece of it."""
    x, unsharded = inputs(4), seeded(InParts)
    with torch.no_grad():
        expected = unsharded.dense(unsharded.heads(x))
    for is_cut, name in ((False, "all_reduce"), (True, "reduce_scatter_tensor")):
        last = RowwiseParallel(output_layouts=Shard(1) if is_cut else Replicate())
        plan = {**{f"heads.{name}": ColwiseParallel() for name in "qkv"}, "dense": last}
        trace = mha_inspect.trace(planned(seeded(InParts), plan), x, keep=True)
        output = trace.attentions[0].stages[-1]
        torch.testing.assert_close(output.tensor, expected.chunk(WORLD, 1)[dist.get_rank()] if is_cut else expected)
        assert (output.name, output.whole) == ("output", tuple(expected.shape) if is_cut else None)
        assert output.flops == 2 * 2 * 4 * WIDTH * WIDTH // WORLD
        assert [(exchange.name, exchange.stage) for exchange in trace.collectives or ()] == [(name, "output")]


def errors_and_nan() -> None:
    """A rank that raises says why without a second run, and for the origin of NaN there is none either."""
    module = tensor_parallel()
    if dist.get_rank() == 0:  # the others wait for nobody
        with pytest.raises(ForwardError, match=r"rank_worker\.py.*RuntimeError|RuntimeError.*rank_worker\.py"):
            mha_inspect.trace(module, inputs()[..., :7])
    module = tensor_parallel()
    with torch.no_grad():
        module.first.q.bias.to_local()[0] = float("inf")
    notes = mha_inspect.trace(module, inputs()).notes
    assert not any("second run" in note for note in notes)
    assert any("The output has NaN" in note for note in notes)


OF_EACH = (bits_and_collectives, stages_and_exchanges, heads_and_parameters)
ONCE = (other_ways, output_in_parts, errors_and_nan)


def questions() -> Iterator[tuple[str, Callable[[], None]]]:
    for question in OF_EACH:
        for name in SHARDED:
            yield f"{question.__name__}: {name}", partial(question, name)
    for question in ONCE:
        yield question.__name__, question


def answer(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    wrong = {}
    try:
        for name, ask in questions():
            try:
                ask()
            except Exception:
                wrong[name] = traceback.format_exc()
            (folder / f"{rank}.json").write_text(json.dumps(wrong))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main(folder: Path) -> None:
    # What imports while it runs is imported before the processes are forked.
    with torch.no_grad(), mha_inspect.recording() as recording:
        Attention()(torch.zeros(1, 2, WIDTH))
    assert recording.trace.attentions
    start = multiprocessing.get_context("fork").Process
    ranks = [start(target=answer, args=(folder, rank), daemon=True) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"exit codes {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

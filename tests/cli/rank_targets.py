"""Targets for several ranks, and a launcher that runs commands on them: `python -m tests.cli.rank_targets FOLDER`.

The launcher reads `FOLDER/commands.json`, a command line by name. It forks the ranks of all commands, so that torch is
imported once, and writes each rank's output to `FOLDER/NAME.RANK.out`, `.err`, and its exit code and seconds to `.end`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from mha_inspect.__main__ import main, run

from ..record.rank_worker import PLAN, Attention

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
X = torch.arange(2.0 * 5 * 32).view(2, 5, 32) / 320


def sharded() -> Made:
    print("printed by the target")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))  # makes the process group
    return parallelize_module(Attention(fused=False), mesh, PLAN), (X,)


def stage_of(attends: str) -> Made:
    """Return one stage of a pipeline, of which only some ranks have attention."""
    dist.init_process_group("gloo")
    return Attention(fused=False) if str(dist.get_rank()) in attends else nn.Linear(32, 32), (X,)


def asleep_in_its_target() -> Made:
    made = sharded()
    if dist.get_rank() == 1:
        time.sleep(60)  # rank 1 sleeps in its target
    dist.barrier()  # rank 0 waits in its target
    return made


def asleep() -> Made:
    module, given = sharded()
    if dist.get_rank() == 1:
        module.q.register_forward_hook(lambda *_: time.sleep(60))  # rank 1 sleeps in a hook
    return module, given


def killed() -> Made:
    module, given = sharded()
    if dist.get_rank() == 1:
        module.q.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return module, given


def in_its_own_group() -> Made:
    dist.init_process_group("gloo")
    return sharded()


def in_a_given_group() -> Made:
    assert dist.get_world_size() == 2
    return sharded()


def without_backend() -> Made:
    dist.init_process_group("nccl")
    return sharded()


def without_device() -> Made:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun does
    init_device_mesh("cuda", (2,))
    return sharded()


def late_without_backend() -> Made:
    """Fail on both ranks, on rank 0 two seconds after rank 1."""
    end = time.monotonic() + 2 * (dist_rank() == 0)
    while time.monotonic() < end:
        pass
    return without_backend()


def dist_rank() -> int:
    return int(os.environ["RANK"])


def fails_beside_a_barrier() -> Made:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot be built")
    dist.barrier()
    return sharded()


class Renamed(Attention):
    """The same code under another name."""


def other_class() -> Made:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return (Renamed if dist.get_rank() else Attention)(fused=False), (X,)


def other_code() -> Made:
    """Change the file of this module on rank 1, as far as the process knows."""
    module, given = sharded()
    if dist_rank():
        sys.modules[__name__].__file__ = sys.modules[Attention.__module__].__file__
    return module, given


def drifted() -> Made:
    module, (x,) = sharded()
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.o.bias.to_local()[3] += 1  # type: ignore[operator, union-attr]
        x = x + 1
    return module, (x,)


def drifted_input_under_fsdp() -> Made:
    """Gather the parameters by FSDP, which reads them in memory of its own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "heads"))
    module = parallelize_module(Attention(fused=False), mesh["heads"], PLAN)
    fully_shard(module, mesh=mesh["data"])
    return module, (X + dist.get_rank(),)


def own_experts() -> Made:
    module, given = sharded()
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        norm, expert = nn.LayerNorm(32), nn.Linear(32, 32)
        norm.weight += dist.get_rank()
    return nn.Sequential(norm, module, expert), given


class OneKeyHead(Attention):
    """Every rank has the only key head, and its own queries."""

    def __init__(self) -> None:
        super().__init__(fused=False)
        self.k, self.v = (nn.Linear(32, 8) for _ in range(2))


def copied_keys() -> Made:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    return parallelize_module(OneKeyHead(), mesh, {name: PLAN[name] for name in "qo"}), (X,)


def cut_key_head() -> Made:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    return parallelize_module(OneKeyHead(), mesh, PLAN), (X,)


class Broken(Attention):
    """Rank 1 raises, is killed, or does not come to the collective of rank 0."""

    def __init__(self, how: str) -> None:
        super().__init__(fused=False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            if self.how == "raises":
                x.view(3, 7)
            if self.how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "sleeps":
                time.sleep(60)  # rank 1 sleeps in its forward
            if self.how == "receives":
                dist.recv(x + 0, 0)  # rank 1 receives here
            if self.how == "skips":
                return super().forward(x)
        dist.all_reduce(x + 0)  # rank 0 waits here
        return super().forward(x)


def broken(how: str) -> Made:
    dist.init_process_group("gloo")
    return Broken(how), (X,)


def group_for_its_forward() -> Made:
    return Broken("works"), (X,)


def start(folder: Path, name: str, rank: int, port: int, command: list[str]) -> int:
    """Fork a rank that runs a command line; return its process."""
    if process := os.fork():
        return process
    code = 70
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for number, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}.{rank}.{ending}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv[1:] = command
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def launch(folder: Path) -> None:
    commands: dict[str, list[str]] = json.loads((folder / "commands.json").read_text())
    begun, running, ended = time.monotonic(), dict[int, tuple[str, int]](), dict[str, list[Any]]()
    ports = {}
    with redirect_stdout(StringIO()):
        assert run(["trace", "--seq-len", "3"]) == 0  # imports what every rank needs
    for name, command in commands.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[name] = free.getsockname()[1]
        running |= {start(folder, name, rank, ports[name], command): (name, rank) for rank in (0, 1)}
        ended[name] = [None, None]
    while running:
        process, status = os.wait()
        name, rank = running.pop(process)
        ended[name][rank] = [os.waitstatus_to_exitcode(status), time.monotonic() - begun]
    left = []
    for name, port in ports.items():
        with socket.socket() as probe:
            left += [name] if probe.connect_ex(("127.0.0.1", port)) == 0 else []
    (folder / "ended.json").write_text(json.dumps({"ended": ended, "ports left": left}))


if __name__ == "__main__":
    launch(Path(sys.argv[1]))

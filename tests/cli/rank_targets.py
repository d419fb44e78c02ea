"""Targets for several ranks, and a launcher that runs commands on them: `python -m tests.cli.rank_targets FOLDER`.

The launcher reads `FOLDER/commands.json`, a command line by name. It forks the ranks of all commands, so that torch is
imported once, and writes each rank's output to `FOLDER/NAME.RANK.out` and `.err`, and the exit codes to `codes.json`.
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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from mha_inspect.__main__ import main, run

from ..record.rank_worker import PLAN, Attention

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
X = torch.arange(2.0 * 5 * 32).view(2, 5, 32) / 320


def sharded() -> Made:
    print("printed by the target")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))  # makes the process group
    return parallelize_module(Attention(fused=False), mesh, PLAN), (X,)


def fails_beside_a_barrier() -> Made:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot be built")
    dist.barrier()
    return sharded()


class OneKeyHead(Attention):
    """Every rank has the only key head, and its own queries."""

    def __init__(self) -> None:
        super().__init__(fused=False)
        self.k, self.v = (nn.Linear(32, 8) for _ in range(2))


def cut_key_head() -> Made:
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    return parallelize_module(OneKeyHead(), mesh, PLAN), (X,)


class Exchanging(Attention):
    """Exchanges an input that the module does not use; rank 1 raises instead."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            x.view(3, 7)
        dist.all_reduce(x + 0)
        return super().forward(x)


def one_raises() -> Made:
    dist.init_process_group("gloo")
    return Exchanging(fused=False), (X,)


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
    running, codes = dict[int, tuple[str, int]](), dict[str, list[int]]()
    with redirect_stdout(StringIO()):
        assert run(["trace", "--seq-len", "3"]) == 0  # imports what every rank needs
    for name, command in commands.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running |= {start(folder, name, rank, port, command): (name, rank) for rank in (0, 1)}
        codes[name] = [0, 0]
    while running:
        process, status = os.wait()
        name, rank = running.pop(process)
        codes[name][rank] = os.waitstatus_to_exitcode(status)
        if codes[name][rank] > 0:  # as torchrun does, which waits a little
            time.sleep(1)
            for beside, (of, _) in running.items():
                if of == name:
                    os.kill(beside, signal.SIGTERM)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    launch(Path(sys.argv[1]))

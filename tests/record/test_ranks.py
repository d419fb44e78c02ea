"""Attention on several ranks: real processes with gloo on the CPU; `rank_worker` is one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mha_inspect.record.ranks import local, piece_of, wraps

from . import rank_worker


def launch(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, rank_worker.__file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            _, errors = started.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, errors


@pytest.mark.parametrize("question", [name for name, _ in rank_worker.questions()])
def test_each_rank_finds_nothing_wrong(question: str, once: Callable[[str, Callable[[Path], None]], Path]) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = once("ranks_of_records", launch)
    for rank in range(rank_worker.WORLD):
        wrong = json.loads((folder / f"{rank}.json").read_text())
        assert wrong.get(question, "") == "", f"rank {rank}"


def test_a_plain_tensor_is_its_own_and_whole() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert local(parameter) is parameter
    assert piece_of(parameter) is None
    assert not wraps([torch.Tensor, torch.nn.Parameter])

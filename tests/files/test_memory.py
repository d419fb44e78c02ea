"""The limit of this process: what exceeds the free memory raises."""

from __future__ import annotations

import sys
from resource import RLIMIT_DATA, getrlimit, setrlimit

import pytest
import torch

from mha_inspect.errors import is_out_of_memory
from mha_inspect.files import memory
from mha_inspect.files.memory import limited_to_what_is_free

MIB = 1024**2


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_more_than_is_free_is_an_error_inside_of_the_limit_and_no_longer_after_it(monkeypatch) -> None:
    before = getrlimit(RLIMIT_DATA)
    monkeypatch.setattr(memory, "free_memory", lambda: 64 * MIB)
    with limited_to_what_is_free():
        assert torch.ones(10 * MIB).nbytes == 40 * MIB
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            torch.empty(1024 * MIB)  # more than earlier tests may have freed in this process
        assert is_out_of_memory(caught.value)
        with pytest.raises(MemoryError):
            bytearray(4096 * MIB)
        limited = getrlimit(RLIMIT_DATA)
        with limited_to_what_is_free("cuda:0"):
            assert getrlimit(RLIMIT_DATA) == limited
    assert getrlimit(RLIMIT_DATA) == before
    setrlimit(RLIMIT_DATA, (1 << 40, before[1]))
    try:
        monkeypatch.setattr(memory, "free_memory", lambda: 1 << 50)
        with limited_to_what_is_free():
            assert getrlimit(RLIMIT_DATA)[0] == 1 << 40, "a limit that is lower stays"
    finally:
        setrlimit(RLIMIT_DATA, before)

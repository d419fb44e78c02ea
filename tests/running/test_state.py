"""What a run may change is put back, in the very lists and dicts that somebody else may hold on to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_inspect.running.subject import Subject


class Counts(nn.Module):
    def __init__(self, log: list[int]) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.linear, self.calls, self.log, self.cache = nn.Linear(3, 3), 0, log, {"first": 1}

    def forward(self, x: Tensor) -> Tensor:
        assert self.calls < 1, "runs once"
        self.calls += 1
        self.log.append(self.calls)
        self.cache["last"] = self.calls
        self.extra = x
        self.total = self.total + 1
        return self.linear(x)


def test_a_replay_leaves_no_trace_and_begins_where_it_did() -> None:
    log: list[int] = []
    module, x = Counts(log), torch.randn(2, 3)
    subject, total = Subject(module, (x,), {}), module.total
    before = subject.state()
    subject.plain()
    after = module.total
    for _ in range(2):
        with subject.replaying(before):
            assert (module.calls, log, module.cache) == (0, [], {"first": 1})
            assert module.total is total
            assert not hasattr(module, "extra")
            subject.plain()
        assert (module.calls, log, module.cache) == (1, [1], {"first": 1, "last": 1})
        assert module.log is log
        assert module.extra is x
        assert module.total is after

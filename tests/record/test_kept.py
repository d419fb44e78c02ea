"""What is done to memory after a run does not reach the tensors that were kept of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.layers.spec import Show
from mha_inspect.record.tensors import unshared
from mha_inspect.running.subject import Subject, run_and_record


class Caching(nn.Module):
    """Returns its weights, and stashes its values where anybody can write to them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(15, 45), nn.Linear(15, 15)
        self.query = nn.Parameter(torch.randn(2, 3, 1, 5))
        self.cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.view(2, 7, 3, 5).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.cache = [v]
        weights = (q @ k.mT / 5**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(2, 7, 15)), weights


def contents(trace: mha_inspect.notebook.LiveTrace) -> Iterator[tuple[str, torch.Tensor]]:
    for attention in trace.attentions:
        for stage in attention.stages:
            yield stage.name, stage.tensor


def write_into_everything(module: Caching, x: torch.Tensor, returned: tuple[torch.Tensor, ...]) -> None:
    with torch.no_grad():
        for tensor in (*returned, x, *module.cache, *module.parameters()):
            tensor.fill_(torch.nan)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_writing_after_a_block_does_not_reach_what_was_kept(context: Callable[[], torch.no_grad]) -> None:
    torch.manual_seed(0)
    module, x = Caching(), torch.randn(2, 7, 15)
    with context():
        with mha_inspect.recording(keep=True) as seen:
            returned = module(x)
        before = {name: tensor.clone() for name, tensor in contents(seen.trace)}
        assert before["output"].equal(returned[0])
        write_into_everything(module, x, returned)
    assert {"query", "v_heads", "weights", "output"} <= set(before)
    for name, tensor in contents(seen.trace):
        assert torch.equal(tensor, before[name]), name
    assert seen._ran is not None
    assert seen._ran.recording.values == {}


def test_what_is_kept_for_an_answer_goes_with_it() -> None:
    """Without the collector: tensors in a circle would stay until it runs, which knows nothing of their size."""
    module, x = Caching(), torch.randn(2, 7, 15)
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    module.out.register_forward_pre_hook(lambda _, args: storages.append(weakref.ref(args[0].untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        mha_inspect.trace(module, x, show=Show(stats=True, values=True))
        module.cache.clear()
        assert {storage() for storage in storages} == {None}
    finally:
        gc.enable()


def test_only_what_somebody_else_holds_is_copied() -> None:
    module, x = Caching(), torch.randn(2, 7, 15)
    with torch.no_grad(), mha_inspect.recording(keep=True) as seen:
        returned = module(x)
    addresses = {name: tensor.untyped_storage().data_ptr() for name, tensor in contents(seen.trace)}
    theirs = {tensor.untyped_storage().data_ptr() for tensor in (*returned, x, *module.cache, *module.parameters())}
    assert not theirs & set(addresses.values())
    mine = torch.randn(3, 4)
    (stages,) = unshared(({"scores": torch.randn(2, 2), "weights": mine.detach()},))
    assert torch.equal(stages["weights"], mine)
    assert stages["weights"].data_ptr() != mine.data_ptr()
    whole = torch.randn(4, 6)
    pair = {"q_proj": whole[:, :3], "k_proj": whole[:, 3:], "v_proj": whole}
    del whole
    addresses = {name: tensor.data_ptr() for name, tensor in pair.items()}
    (stages,) = unshared((pair,))
    assert {name: tensor.data_ptr() for name, tensor in stages.items()} == addresses


def test_a_view_that_is_made_twice_keeps_its_content() -> None:
    """Positions that a static cache reads for its keys and again for its values, and then advances."""

    class Slots(nn.Identity):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("at", torch.arange(8))
            self.register_buffer("slots", torch.zeros(2, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for slots in self.slots:
                slots[self.at[:3]] = x
            self.at.add_(3)
            return self.slots.clone()

    recording = Subject(Slots(), (torch.ones(3),), {}, grad=False).recorded(keep=True).recording
    read = [op.inputs[1] for op in recording.ops if op.base_name == "index_put_"]
    assert [recording.values[tensor.id].tolist() for tensor in read] == [[0, 1, 2], [0, 1, 2]]


class _TwoKernels(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            heads = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in super().forward(x).chunk(3, -1))
            x = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("room", [0, 15_000, 1 << 30])
def test_a_kernel_is_opened_and_compared_whether_or_not_its_tensors_have_room(room: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        run = run_and_record(_TwoKernels(24, 72), (torch.randn(2, 7, 24),), {}, keep=True, room=room)
    assert [kernel.opened for kernel in run.recording.kernels] == [True, True]
    assert [kernel.note for kernel in run.recording.kernels] == ["", ""]
    checks = [kernel.check for kernel in run.recording.kernels]
    assert all(check is not None and check.times < 8 for check in checks)
    assert len(run.attentions) == 2


def test_parameters_take_no_room_of_the_tensors_of_a_run() -> None:
    module, x = nn.Linear(300, 200), torch.randn(2, 300)
    with torch.no_grad():
        run = run_and_record(module, (x,), {}, keep=True, room=2 * 200 * 4)
        full = run_and_record(module, (x,), {}, keep=True, room=2 * 200 * 4 - 1)
    assert run.recording.values
    assert not full.recording.values

"""What would not fit is refused before it is tried, with the largest seq_len that does."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mha_inspect.build.room import Room
from mha_inspect.call.load import load_layer, plan_layer
from mha_inspect.errors import DoesNotFitError, ExitCode
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.record import rehearsal

SPEC, RUN = AttentionSpec(embed_dim=22, num_heads=2), RunSpec()
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted by torch's profiler: for small runs what the kernel tells is not fine enough."""
    monkeypatch.setattr(rehearsal, "taken", lambda run, device, before: allocated(run))
    monkeypatch.setattr(rehearsal, "held", lambda device: 0)


def allocated(run: Callable[[], object]) -> int:
    """Most bytes that torch's allocator had given out at one time."""
    gc.collect()  # what is freed meanwhile counts less than nothing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    assert watched.profiler is not None
    events = [event.nbytes() for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(events), default=0)


def require_fit(inputs: InputSpec, layer: str = "torch", *, keep: bool = False) -> None:
    room = Room(lambda: load_layer(SPEC, inputs, RUN, layer).recorded(keep=keep), shapes_do=True)
    load_layer(SPEC, inputs, RUN, layer, room)


def need_of(inputs: InputSpec, layer: str = "torch", *, keep: bool = False) -> int:
    def run() -> object:
        return load_layer(SPEC, inputs, RUN, layer).recorded(keep=keep)

    extent = plan_layer(SPEC, inputs, RUN, layer).extent
    return rehearsal.foresee(run, extent, DEVICE, 1 << 20)(extent)


def set_free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr("mha_inspect.build.room.free_memory", lambda device: count)
    monkeypatch.setattr("mha_inspect.files.memory.free_memory", lambda device: count)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("layer", ["torch", "grouped-query"])
def test_the_largest_seq_len_fits_and_the_next_does_not(
    monkeypatch: pytest.MonkeyPatch, layer: str, keep: bool
) -> None:
    inputs = InputSpec(batch=3, seq_len=600, causal=True)
    set_free(monkeypatch, 1 << 23)
    with pytest.raises(DoesNotFitError) as refused:
        require_fit(inputs, layer, keep=keep)
    message = str(refused.value)
    assert refused.value.exit_code == ExitCode.REFUSED == 3
    assert "embed_dim 22, num_heads 2, batch 3, seq_len 600 needs about " in message
    assert "free on cpu" in message
    assert "--device meta" in message
    best = int(re.search(r"largest seq_len that fits is (\d+)\.", message)[1])  # type: ignore[index]
    assert 1 <= best < 600
    require_fit(InputSpec(batch=3, seq_len=best, causal=True), layer, keep=keep)
    with pytest.raises(DoesNotFitError):
        require_fit(InputSpec(batch=3, seq_len=best * 5 // 4, causal=True), layer, keep=keep)


def test_exactly_what_is_free_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputSpec(batch=3, seq_len=200)
    need = need_of(inputs)
    set_free(monkeypatch, need)
    require_fit(inputs)
    set_free(monkeypatch, need - 1)
    with pytest.raises(DoesNotFitError):
        require_fit(inputs)


def test_where_nothing_fits_no_seq_len_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1000)
    with pytest.raises(DoesNotFitError, match="Try a smaller batch or embed_dim") as refused:
        require_fit(InputSpec(seq_len=50))
    assert "largest seq_len" not in str(refused.value)


def test_a_file_sets_the_lengths_so_no_other_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save(torch.zeros(200, 200, dtype=torch.bool), tmp_path / "mask.pt")
    torch.save(torch.zeros(3, 200, 22), tmp_path / "input.pt")
    for inputs, asked in (
        (InputSpec(seq_len=200, attn_mask=tmp_path / "mask.pt"), "torch on 1 sequence of 200 positions"),
        (InputSpec(input=tmp_path / "input.pt"), "torch on 3 sequences of 200 positions"),
    ):
        set_free(monkeypatch, need_of(inputs) - 1)
        with pytest.raises(DoesNotFitError, match=f"{asked} needs .* Try a smaller batch or embed_dim"):
            require_fit(inputs)
        set_free(monkeypatch, need_of(inputs))
        require_fit(inputs)


def test_padding_does_not_stand_in_the_way_of_a_shorter_length(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1 << 20)
    with pytest.raises(DoesNotFitError, match=r"largest seq_len that fits is \d+"):
        require_fit(InputSpec(batch=2, seq_len=600, padding=(599, 5)))


def test_parameters_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = AttentionSpec(embed_dim=1 << 20, num_heads=2), InputSpec(seq_len=2)
    room = Room(lambda: pytest.fail("rehearsed"), copies=3)
    with pytest.raises(DoesNotFitError, match=r"embed_dim 1048576, .* needs about 48\.0 TiB"):
        load_layer(spec, inputs, RUN, "torch", room)


@pytest.mark.parametrize("free", [None, 1 << 40])
def test_what_is_far_from_it_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    set_free(monkeypatch, free)
    monkeypatch.setattr(rehearsal, "taken", lambda *args: pytest.fail("rehearsed"))
    require_fit(InputSpec(seq_len=50), keep=True)


def test_meta_takes_no_memory_and_is_never_refused() -> None:
    spec = AttentionSpec(embed_dim=16384, num_heads=128)
    room = Room(lambda: pytest.fail("rehearsed"))
    load_layer(spec, InputSpec(batch=4, seq_len=131072), RunSpec(device="meta"), "torch", room)


def test_more_is_needed_where_more_is_held() -> None:
    inputs = InputSpec(batch=3, seq_len=100)
    scores = 2 * 3 * 100 * 100 * 4
    assert need_of(inputs, keep=True) > need_of(inputs) > scores

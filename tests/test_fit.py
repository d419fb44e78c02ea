"""What would not fit is refused before it is tried, with the largest seq_len that does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mha_inspect.errors import DoesNotFitError, ExitCode
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.targets.load import plan_layer
from mha_inspect.targets.room import HELD, Room

SPEC, RUN = AttentionSpec(embed_dim=22, num_heads=2), RunSpec()


def require_fit(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str, *, keep: bool) -> None:
    Room(kept=keep, shapes_do=True).require(plan_layer(spec, inputs, run, layer))


def need_of(spec: AttentionSpec, inputs: InputSpec, run: RunSpec, layer: str, *, keep: bool) -> int:
    return Room(kept=keep).need(plan_layer(spec, inputs, run, layer).on_meta(None), held=HELD)


def set_free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr("mha_inspect.targets.room.free_memory", lambda device: count)
    monkeypatch.setattr("mha_inspect.targets.memory.free_memory", lambda device: count)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("layer", ["torch", "grouped-query"])
def test_the_largest_seq_len_fits_and_the_next_does_not(
    monkeypatch: pytest.MonkeyPatch, layer: str, keep: bool
) -> None:
    inputs = InputSpec(batch=3, seq_len=300, causal=True)
    set_free(monkeypatch, need_of(SPEC, inputs, RUN, layer, keep=keep) // 3)
    with pytest.raises(DoesNotFitError) as refused:
        require_fit(SPEC, inputs, RUN, layer, keep=keep)
    message = str(refused.value)
    assert refused.value.exit_code == ExitCode.REFUSED == 3
    assert "embed_dim 22, num_heads 2, batch 3, seq_len 300 needs about " in message
    assert "free on cpu" in message
    assert "--device meta" in message
    best = int(re.search(r"largest seq_len that fits is (\d+)\.", message)[1])  # type: ignore[index]
    assert 1 <= best < 300
    require_fit(SPEC, InputSpec(batch=3, seq_len=best, causal=True), RUN, layer, keep=keep)
    with pytest.raises(DoesNotFitError):
        require_fit(SPEC, InputSpec(batch=3, seq_len=best + 1, causal=True), RUN, layer, keep=keep)


def test_exactly_what_is_free_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputSpec(batch=3, seq_len=50)
    need = need_of(SPEC, inputs, RUN, "torch", keep=False)
    set_free(monkeypatch, need)
    require_fit(SPEC, inputs, RUN, "torch", keep=False)
    set_free(monkeypatch, need - 1)
    with pytest.raises(DoesNotFitError):
        require_fit(SPEC, inputs, RUN, "torch", keep=False)


def test_where_nothing_fits_no_seq_len_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1000)
    with pytest.raises(DoesNotFitError, match="Try a smaller batch or embed_dim") as refused:
        require_fit(SPEC, InputSpec(seq_len=50), RUN, "torch", keep=False)
    assert "largest seq_len" not in str(refused.value)


def test_a_file_sets_the_lengths_so_no_other_one_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save(torch.zeros(50, 50, dtype=torch.bool), tmp_path / "mask.pt")
    inputs = InputSpec(seq_len=50, attn_mask=tmp_path / "mask.pt")
    set_free(monkeypatch, need_of(SPEC, inputs, RUN, "torch", keep=False) - 1)
    with pytest.raises(DoesNotFitError, match="Try a smaller batch or embed_dim"):
        require_fit(SPEC, inputs, RUN, "torch", keep=False)


def test_padding_does_not_stand_in_the_way_of_a_shorter_length(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = InputSpec(batch=2, seq_len=300, padding=(299, 5))
    set_free(monkeypatch, need_of(SPEC, inputs, RUN, "torch", keep=False) // 2)
    with pytest.raises(DoesNotFitError, match=r"largest seq_len that fits is \d+"):
        require_fit(SPEC, inputs, RUN, "torch", keep=False)


@pytest.mark.parametrize("free", [None, 1 << 40])
def test_what_is_far_from_it_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Looking closely takes meta, and its import a second."""
    set_free(monkeypatch, free)
    monkeypatch.setattr(Room, "need", lambda *args, **kwargs: pytest.fail("looked closely"))
    require_fit(SPEC, InputSpec(seq_len=50), RUN, "torch", keep=True)


def test_meta_takes_no_memory_and_is_never_refused() -> None:
    require_fit(
        AttentionSpec(embed_dim=16384, num_heads=128),
        InputSpec(batch=4, seq_len=131072),
        RunSpec(device="meta"),
        "torch",
        keep=False,
    )


def test_more_is_needed_where_more_is_held() -> None:
    inputs = InputSpec(batch=3, seq_len=100)
    plain = need_of(SPEC, inputs, RUN, "torch", keep=False)
    assert need_of(SPEC, inputs, RUN, "torch", keep=True) > plain
    assert need_of(SPEC, inputs, RunSpec(grad=True), "torch", keep=False) > plain
    scores = 2 * 3 * 100 * 100
    assert plain > 4 * HELD * scores

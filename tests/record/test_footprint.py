"""What a run needs of memory: counted by hand, and foreseen from runs on less input."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from mha_inspect.build.room import rough_need_of_layer
from mha_inspect.call.load import load_layer
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.settings import spec_for
from mha_inspect.layers.spec import InputSpec, RunSpec
from mha_inspect.record.footprint import kept_bytes
from mha_inspect.record.rehearsal import Cut, Extent, foresee, held, rehearsed, taken

from ..recorded import record
from ..warm import Answer

CPU = torch.device("cpu")


def test_results_by_hand() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = x * 2  # 40 bytes
        b = torch.cat((a, a, a))  # 120
        c = b.view(5, 6).sum(0)  # 24
        d = c[:3]  # a view of c
        e = d + 1  # 12
        return torch.cat((e.expand(7, 3).flatten(), e))  # 84 + 96

    recording, _ = record(forward, torch.ones(10))
    assert kept_bytes(recording) == 40 + 120 + 24 + 12 + 84 + 96
    # In place nothing is added, and an expanded view takes no more than what it shows.
    recording, _ = record(lambda x: (x * 2).mul_(3).add_(1).expand(1000, 10), torch.ones(10))
    assert kept_bytes(recording) == 40
    recording, _ = record(lambda x: x.view(2, 5), torch.ones(10))
    assert kept_bytes(recording) == 0


MB = 10**6


WHOLE = Extent(rows=40, length=5000)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """What was left in each rehearsal, each of which takes the bytes that it returns."""
    lefts: list[Extent] = []

    def told(run: Callable[[], int], device: torch.device, before: int) -> int:
        lefts.append(rehearsed().left)  # type: ignore[union-attr]
        return run()

    monkeypatch.setattr("mha_inspect.record.rehearsal.taken", told)
    monkeypatch.setattr("mha_inspect.record.rehearsal.held", lambda device: 0)
    return lefts


@pytest.mark.parametrize("factors", [(MB, 0, 0), (MB, 300, 0), (10**4, 40, 7), (0, 0, 5)])
def test_bytes_are_foreseen_by_what_they_are_a_sum_of(factors: tuple[int, int, int], seen: list[Extent]) -> None:
    def bytes_of(extent: Extent) -> int:
        return sum(one * term for one, term in zip(factors, extent.terms, strict=True))

    foreseen = foresee(lambda: bytes_of(rehearsed().left), WHOLE, CPU, 1 << 30)  # type: ignore[union-attr]
    for extent in (WHOLE, Extent(3, 900), Extent(1, 20000)):
        # What is there once is measured; what grows may not be freed at once.
        assert foreseen(extent) == pytest.approx(factors[0] + 1.3 * (bytes_of(extent) - factors[0]), rel=1e-3)
    assert rehearsed() is None


def test_no_less_is_foreseen_than_was_seen_of_the_whole(seen: list[Extent]) -> None:
    """What is allocated from some size on is no sum: the largest rehearsal says more than those before it."""
    whole = Extent(1, 800)

    def bytes_of(extent: Extent) -> int:
        return 20 * MB + (100 * MB if extent == whole else 0)

    foreseen = foresee(lambda: bytes_of(rehearsed().left), whole, CPU, 1 << 30)  # type: ignore[union-attr]
    assert bytes_of(whole) <= foreseen(whole) + 1
    assert foreseen(whole) < 1.5 * bytes_of(whole)


@pytest.mark.parametrize("factors", [(10**4, 40, 0), (0, 0, 7)])
def test_what_fits_for_certain_is_not_rehearsed_as_a_whole(factors: tuple[int, int, int], seen: list[Extent]) -> None:
    """A forward that takes minutes is worth few rehearsals where there is room for many times what it takes."""

    def bytes_of(extent: Extent) -> int:
        return sum(one * term for one, term in zip(factors, extent.terms, strict=True))

    free = 10**12
    foreseen = foresee(lambda: bytes_of(rehearsed().left), WHOLE, CPU, free)  # type: ignore[union-attr]
    assert sum(left.terms[2] for left in seen) < WHOLE.terms[2] / 10
    assert bytes_of(WHOLE) <= foreseen(WHOLE) < free


def test_what_the_first_keeps_counts_for_all_and_what_later_ones_keep_for_none(
    seen: list[Extent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports are made once. Kernels that are made for one size stay, and the real run makes those of its own size."""
    kept = [0]
    monkeypatch.setattr("mha_inspect.record.rehearsal.held", lambda device: kept[0])

    def bytes_of(extent: Extent) -> int:
        return 1000 * extent.terms[1]

    def run() -> int:
        imported = 0 if kept[0] else 50 * MB
        kept[0] += imported + 20 * MB
        return bytes_of(rehearsed().left) + imported + 20 * MB  # type: ignore[union-attr]

    foreseen = foresee(run, WHOLE, CPU, 1 << 30)
    assert bytes_of(WHOLE) + 70 * MB < foreseen(WHOLE) < 1.3 * (bytes_of(WHOLE) + 100 * MB)


def test_a_rehearsal_takes_a_small_part_of_what_is_free(seen: list[Extent]) -> None:
    foresee(lambda: 4 * MB, WHOLE, CPU, 2 * MB)
    assert seen == [Extent(4, 32)], "it took more than there is"
    seen.clear()
    foresee(lambda: 2 * MB * len(seen), WHOLE, CPU, 10 * MB)
    assert seen == [Extent(4, 32), Extent(4, 64), Extent(4, 128)]
    seen.clear()
    foresee(lambda: 1000, WHOLE, CPU, 2000)
    assert seen[-5:] == [Extent(4, 5000), Extent(8, 5000), Extent(16, 5000), Extent(32, 5000), WHOLE]


def test_what_is_left_of_inputs_and_masks() -> None:
    cut = Cut(WHOLE, Extent(4, 100))
    assert cut.shape((40, 5000, 64), vectors=True) == (4, 100, 64)
    assert cut.shape((5000, 40, 64), vectors=True) == (100, 4, 64)
    assert cut.shape((40, 5000), vectors=False) == (4, 100)
    assert cut.shape((5000, 64), vectors=True) == (100, 64)
    assert cut.shape((40, 3, 224, 224), vectors=True) == (4, 3, 224, 224)
    assert cut.shape((40, 12, 64), vectors=True) == (4, 12, 64), "what is short stays"
    assert cut.mask(torch.zeros(5000, 2500)).shape == (100, 50)
    assert cut.mask(torch.zeros(80, 50, 50)).shape == (8, 16, 16)
    assert cut.mask(torch.zeros(40, 1, 50, 50)).shape == (4, 1, 16, 16)


@pytest.mark.skipif(sys.platform != "linux", reason="only its kernel tells the most that there was since a moment")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("sizes", "inputs"),
    [
        ({"embed_dim": 6, "num_heads": 6}, {"seq_len": 501}),
        ({"embed_dim": 512, "num_heads": 1}, {"seq_len": 2}),
        ({"embed_dim": 96, "num_heads": 8}, {"batch": 13, "seq_len": 7, "key_len": 301}),
        ({"embed_dim": 96, "num_heads": 8}, {"batch": 13, "seq_len": 301, "key_len": 7}),
    ],
)
def test_the_rough_estimate_is_on_the_safe_side(layer: str, sizes: dict[str, int], inputs: dict[str, int]) -> None:
    spec, asked = spec_for(LAYERS[layer], **sizes), InputSpec(**inputs)

    def run() -> object:
        return load_layer(spec, asked, RunSpec(grad=True), layer).recorded(keep=True)

    assert taken(run, CPU, held(CPU)) < 8 * rough_need_of_layer(spec, asked) + 20 * MB


FORESEEN = """
import sys
from pathlib import Path
from mha_inspect.record.rehearsal import _field, held
from mha_inspect.targets import room

room._SAFE, foresee, told = 1 << 40, room.foresee, []
def foresee_and_go_on(run, extent, device, free):
    told.append(foresee(run, extent, device, 1 << 30)(extent))
    told.append(held(device))
    Path("/proc/self/clear_refs").write_text("5")
    return lambda extent: 0
room.foresee = foresee_and_go_on
from mha_inspect.__main__ import run
run(sys.argv[1:])
(foreseen, before), peak = told, _field("VmHWM:")
print(foreseen, peak - before)
"""


def numbers(answer: Answer) -> list[int]:
    """Those in the last line that a process prints."""
    assert answer.code == 0, answer.err
    return [int(word) for word in answer.out.splitlines()[-1].split()]


STAYS = """
import torch
from mha_inspect.record.rehearsal import _field
from mha_inspect.files.memory import free_at_once, freeing_at_scale
def stays():
    before = _field("VmRSS:")
    many = [torch.ones(1 << 18) for _ in range(40)]
    last = torch.ones(1 << 18)
    del many
    return _field("VmRSS:") - before
free_at_once()
with freeing_at_scale(1 / 10):
    at_scale = stays()
print(stays() - at_scale)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_what_a_rehearsal_frees_is_given_back_as_what_is_ten_times_as_large(fork) -> None:
    """40 tensors of 1 MiB below one that stays: for good they are kept for later, and 10 MiB would not be."""
    (more,) = numbers(fork(STAYS))
    assert more > 30 * MB


TAKEN = """
import torch
from mha_inspect.record.rehearsal import held, taken
def run():
    a = torch.zeros(10_000_000)
    b = torch.zeros(30_000_000)
    del a
    c = torch.zeros(5_000_000)
cpu = torch.device("cpu")
print(taken(run, cpu, held(cpu)) - taken(lambda: None, cpu, held(cpu)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only its kernel tells the most that there was since a moment")
def test_what_is_taken_at_one_time(fork: Callable[..., Answer]) -> None:
    """In a process of its own, as threads of other tests may free what they hold meanwhile."""
    (most,) = numbers(fork(TAKEN))
    assert abs(most - 160 * MB) < 8 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another unit, or none")
@pytest.mark.parametrize(
    "line",
    [
        "trace --stats --seq-len 1500",
        "diff torch split-heads --seq-len 1000",
        "diff torch.nn:MultiheadAttention torch --seq-len 1000",
        "compare-heads --heads 1,2,4,8,16 --seq-len 1500",
        "compare-heads --heads 2,4 --gradients --seq-len 1000",
        "check torch.nn:MultiheadAttention --seq-len 1000",
    ],
)
def test_a_process_takes_what_was_foreseen(line: str, fork: Callable[..., Answer]) -> None:
    """Its peak beyond what it holds after the rehearsals; what is read and written may take 8 MB."""
    line += " --embed-dim 64" + ("" if "--heads" in line else " --num-heads 4")
    foreseen, peak = numbers(fork(FORESEEN, *line.split()))
    assert peak - 8 * MB < foreseen < 1.5 * peak + 60 * MB

"""A target that would not fit in memory is refused before it is tried, and any other is left alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mha_inspect.errors import DoesNotFitError, ExitCode
from mha_inspect.layers.spec import InputSpec
from mha_inspect.targets.drawing import Plan, draw
from mha_inspect.targets.inputs import Asked
from mha_inspect.targets.load import plan_call
from mha_inspect.targets.room import Room, _Guard, with_room
from mha_inspect.targets.target import Target

DIM, BATCH, LENGTH = 14, 3, 211


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Looking(Attention):
    """Looks at its numbers: on meta there are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


class Masked(Attention):
    """Makes tensors of its own, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).triu(1) > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        return super().forward(x + torch.arange(length)[:, None] + self.mask[:length, :length].sum())


def target(kind: type[nn.Module] = Attention) -> Target:
    return Target(kind().eval(), "mine.py:Attention", {})


def asked(length: int = LENGTH, **inputs) -> Asked:
    return Asked(InputSpec(batch=BATCH, seq_len=length, **inputs))


def set_free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    for place in ("mha_inspect.targets.memory", "mha_inspect.targets.room"):
        monkeypatch.setattr(f"{place}.free_memory", lambda device: count)


def trace_room() -> Room:
    return Room(shapes_do=True)


def compare_room() -> Room:
    return Room(kept=True, exact=True)


def refused(monkeypatch: pytest.MonkeyPatch, free: int, length: int = LENGTH, *, room: Room, kind=Attention) -> str:
    set_free(monkeypatch, free)
    with pytest.raises(DoesNotFitError) as error:
        room.require(plan_call(target(kind), asked(length)))
    assert error.value.exit_code == ExitCode.REFUSED
    return str(error.value)


SCORES = BATCH * 2 * LENGTH * LENGTH * 4
ROWS = BATCH * LENGTH * DIM * 4


def test_what_has_to_be_there_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: scores and weights, what they are multiplied with, and the input; the module is there already."""
    least, most = ROWS + 2 * SCORES, ROWS + 2 * SCORES + 6 * ROWS
    message = refused(monkeypatch, least - 1, room=trace_room())
    assert "Attention on x float32 [3, 211, 14] needs about " in message
    assert "free on cpu" in message
    assert "--device meta" in message
    set_free(monkeypatch, most)
    trace_room().require(plan_call(target(), asked()))


def test_the_module_itself_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Target(nn.Linear(DIM, 1000).eval(), "mine.py:Wide", {})
    given, made = BATCH * 5 * DIM * 4, BATCH * 5 * 1000 * 4
    set_free(monkeypatch, given + made)
    trace_room().require(plan_call(one, asked(5)))
    set_free(monkeypatch, given + made - 1)
    with pytest.raises(DoesNotFitError):
        trace_room().require(plan_call(one, asked(5)))


def test_what_is_kept_is_kept_in_float64_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v, scores, weights and context, once in float32 and once in float64; the copy of the heads is one more."""
    matrices = 3 * DIM * DIM * 4
    whole = 3 * (ROWS + 2 * SCORES + 5 * ROWS) + 2 * matrices
    assert "--device meta" not in refused(monkeypatch, whole - 4 * ROWS, room=compare_room())
    set_free(monkeypatch, whole + 12 * ROWS)
    compare_room().require(plan_call(target(), asked()))


@pytest.mark.parametrize("kind", [Attention, Masked])
def test_the_largest_seq_len_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch, kind) -> None:
    message = refused(monkeypatch, 1 << 20, room=compare_room(), kind=kind)
    best = int(re.search(r"The largest seq_len that fits is (\d+)\.", message)[1])  # type: ignore[index]
    assert 1 < best < LENGTH
    compare_room().require(plan_call(target(kind), asked(best)))
    refused(monkeypatch, 1 << 20, best + 1, room=compare_room(), kind=kind)


def test_what_is_held_of_the_targets_before_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps q, k, v, scores, weights and context; only of the first there is a run in float64."""
    each = ROWS + 2 * SCORES + 5 * ROWS
    set_free(monkeypatch, 4 * each + 20 * ROWS)
    room = compare_room()
    room.require(plan_call(target(), asked()))
    room.exact = False
    room.require(plan_call(target(), asked()))
    assert 4 * each <= room.taken <= 4 * each + 20 * ROWS
    with pytest.raises(DoesNotFitError, match=r"Attention on x float32 \[3, 211, 14\], with what it is compared with,"):
        room.require(plan_call(target(), asked()))


def test_of_what_is_not_kept_the_largest_seq_len_leaves_some_room(monkeypatch: pytest.MonkeyPatch) -> None:
    best = int(re.search(r"fits is (\d+)\.", refused(monkeypatch, 1 << 20, room=trace_room()))[1])  # type: ignore[index]
    trace_room().require(plan_call(target(), asked(best + 1)))


def test_where_nothing_fits_no_seq_len_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Try a smaller batch, length or model." in refused(monkeypatch, 1000, room=compare_room())


def test_what_cannot_be_told_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1000)
    compare_room().require(plan_call(target(Looking), asked()))
    set_free(monkeypatch, None)
    compare_room().require(plan_call(target(), asked()))


@pytest.mark.parametrize("free", [1 << 40])
def test_what_is_far_from_it_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Looking closely takes meta, and its import a second."""
    set_free(monkeypatch, free)
    monkeypatch.setattr(Room, "need", lambda *args, **kwargs: pytest.fail("looked closely"))
    compare_room().require(plan_call(target(), asked()))


def test_the_module_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one = target(Masked)
    before = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    set_free(monkeypatch, 1 << 20)
    with pytest.raises(DoesNotFitError):
        compare_room().require(plan_call(one, asked()))
    assert all(torch.equal(before[name], tensor) for name, tensor in one.module.state_dict().items())


def test_a_constructor_is_stopped_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def build() -> nn.Module:
        layers = nn.ModuleList()
        for _ in range(100):
            layers.append(nn.Linear(31, 31, bias=False))
            made.append(layers[-1].weight.device.type)
        return layers

    size = 31 * 31 * 4
    set_free(monkeypatch, 90 * size)
    with pytest.raises(DoesNotFitError, match=r"Layers\(n=100\) needs about 375 KiB and 338 KiB are free on cpu"):
        with_room(build, "Layers(n=100)")
    assert made.count("cpu") <= 90 // 8
    made.clear()
    set_free(monkeypatch, 100 * size)
    assert len(with_room(build, "Layers(n=100)")) == 100
    assert made[-100:] == ["cpu"] * 100


def test_a_constructor_that_meta_does_not_suit_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 100)
    linear = with_room(lambda: nn.Linear(int(torch.ones(29).sum().item()), 7), "Odd()")
    assert linear.weight.shape == (7, 29)


def test_an_input_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, generator = Plan("hidden", (1, 1 << 20, 29)), torch.Generator()
    set_free(monkeypatch, 29 * 4 * (1 << 20) - 1)
    with pytest.raises(DoesNotFitError, match=r"an input \[1, 1048576, 29\] needs about 116 MiB"):
        draw(plan, torch.float32, torch.device("cpu"), generator)
    assert draw(plan, torch.float32, torch.device("meta"), generator).is_meta


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (lambda: torch.empty(3, 5), 60),
        (lambda: torch.zeros((3, 5), dtype=torch.float64), 120),
        (lambda: torch.full(size=(3, 5), fill_value=2.0), 60),
        (lambda: torch.randint(0, 9, (3, 5), dtype=torch.int64), 120),
        (lambda: torch.empty(3, 5, device="meta"), 0),
        (lambda: torch.normal(torch.zeros(()), 1.0), 4),
    ],
)
def test_bytes_are_counted_before_they_are_taken(call, size: int) -> None:
    guard = _Guard(8 * 1000)
    with guard:
        call()
    assert 1000 - guard.left == size

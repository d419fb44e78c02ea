"""A target that would not fit in memory is refused before it is tried, and any other is left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mha_inspect.build.room import Room, _Guard, with_room
from mha_inspect.build.target import Target
from mha_inspect.build.values import InputShape
from mha_inspect.call.drawing import Plan, draw
from mha_inspect.call.inputs import Asked
from mha_inspect.call.load import call_target, subject_of
from mha_inspect.errors import DoesNotFitError, ExitCode
from mha_inspect.layers.spec import InputSpec

from .test_fit import counted

DIM, BATCH, LENGTH = 14, 3, 511

__all__ = ["counted"]


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
    return Asked(InputSpec(**{"batch": BATCH, "seq_len": length, **inputs}))


def set_free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    for place in ("mha_inspect.files.memory", "mha_inspect.build.room"):
        monkeypatch.setattr(f"{place}.free_memory", lambda device: count)


def run_in_room(one: Target, asked: Asked) -> None:
    """Call it once, where there is room for that."""

    def again() -> object:
        return subject_of(one, call_target(one, asked), seed=0).recorded(keep=True)

    call_target(one, asked, Room(again))


def refused(monkeypatch: pytest.MonkeyPatch, free: int, length: int = LENGTH, kind=Attention) -> str:
    set_free(monkeypatch, free)
    with pytest.raises(DoesNotFitError) as error:
        run_in_room(target(kind), asked(length))
    assert error.value.exit_code == ExitCode.REFUSED
    return str(error.value)


SCORES = BATCH * 2 * LENGTH * LENGTH * 4


def test_what_is_kept_has_to_be_there_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: scores and weights; the rows are a small part of that."""
    message = refused(monkeypatch, 2 * SCORES)
    assert "Attention with batch 3, seq_len 511 needs about " in message
    assert "free on cpu" in message
    set_free(monkeypatch, 4 * SCORES)
    run_in_room(target(), asked())


@pytest.mark.parametrize("kind", [Attention, Masked, Looking])
def test_the_largest_seq_len_fits_and_the_next_does_not(monkeypatch: pytest.MonkeyPatch, kind) -> None:
    message = refused(monkeypatch, 1 << 23, kind=kind)
    best = int(re.search(r"The largest seq_len that fits is (\d+)\.", message)[1])  # type: ignore[index]
    assert 1 < best < LENGTH
    run_in_room(target(kind), asked(best))
    refused(monkeypatch, 1 << 23, best * 5 // 4, kind=kind)


def test_where_nothing_fits_no_seq_len_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Try a smaller batch, length or model." in refused(monkeypatch, 100)


def test_a_file_that_asks_for_a_long_sequence_is_refused_by_its_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.save(torch.zeros(1, 1, DIM).expand(2, 900, DIM), tmp_path / "long.pt")
    set_free(monkeypatch, 2 << 20)
    with pytest.raises(DoesNotFitError, match=r"Attention on 2 sequences of 900 positions needs about \d\d\.\d MiB"):
        run_in_room(target(), Asked(InputSpec(input=tmp_path / "long.pt")))


def test_so_is_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 2 << 20)
    with pytest.raises(DoesNotFitError, match=r"Attention on 2 sequences of 900 positions needs about \d\d\.\d MiB"):
        run_in_room(target(), Asked(InputSpec(), shapes={"x": InputShape((2, 900, DIM), None)}))


class OfOneLength(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.zeros(LENGTH, 1))


def test_what_cannot_be_told_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, SCORES)
    run_in_room(target(OfOneLength), asked())
    set_free(monkeypatch, None)
    run_in_room(target(), asked())


def test_the_module_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    one = target(Masked)
    before = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    set_free(monkeypatch, 1 << 20)
    with pytest.raises(DoesNotFitError):
        run_in_room(one, asked())
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

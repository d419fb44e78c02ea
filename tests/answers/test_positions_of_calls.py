"""The positions that each call of a loop is rotated by, and a jump between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.trace import Trace
from mha_inspect.running.subject import Subject

E, H = 24, 3


class Rotated(nn.Module):
    """Attention with a cache, rotated by positions that are given; with `anew` cached keys are rotated by their rows.

    The table is computed in the forward, or a buffer that is sliced, or picked from by ids.
    """

    def __init__(self, *, table: str = "computed", anew: bool = False, most: int = 0, fault: int = 0) -> None:
        super().__init__()
        self.table, self.anew, self.most, self.fault = table, anew, most, fault
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.register_buffer("angles", self._angles(), persistent=False)

    def _angles(self) -> Tensor:
        return torch.outer(torch.arange(64.0), 50.0 ** (-torch.arange(4) / 4))

    def turn(self, x: Tensor, at: int) -> Tensor:
        angles = self._angles() if self.table == "computed" else self.angles
        places = torch.arange(at, at + x.shape[2])
        angles = angles[places] if self.table == "ids" else angles[at : at + x.shape[2]]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor, past: Any = None, offset: int | None = None) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = 0 if past is None else past[2] + self.fault
        at = at if offset is None else offset
        k = k if self.anew else self.turn(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        keys = k.shape[2]
        q = self.turn(q, keys - q.shape[2] if self.anew else at)
        context = nn.functional.scaled_dot_product_attention(
            q, self.turn(k, 0) if self.anew else k, v, is_causal=x.shape[1] > 1
        )
        kept = slice(-self.most if self.most else None, None)
        return self.o(context.transpose(1, 2).flatten(2)), (k[:, :, kept], v[:, :, kept], at + x.shape[1])


def recorded(module: nn.Module, offsets: list[int | None], *, length: int = 6, cut: int = 0) -> Trace:
    torch.manual_seed(1)
    cache, x = None, torch.randn(1, length, E)
    with torch.no_grad(), mha_inspect.recording() as seen:
        for offset in offsets:
            y, cache = module.eval()(x, cache, offset)
            x = y[:, -1:]
            if cut:
                cache, cut = (cache[0][:, :, :-cut], cache[1][:, :, :-cut], cache[2] - cut), 0
    return seen.trace


def offsets(trace: Trace) -> list[int | None]:
    return [step.query_offset for step in trace.steps or ()]


def jump_of(trace: Trace) -> list[str]:
    return [note for note in trace.notes if "jump" in note]


@pytest.mark.parametrize("table", ["computed", "sliced", "ids"])
def test_a_block_tells_the_positions_of_each_call_and_a_jump(table: str) -> None:
    trace = recorded(Rotated(table=table), [0, 12, 13])
    assert offsets(trace) == [0, 12, 13]
    assert jump_of(trace) == ["The positions jump: 0–5, then 12; expected 6."]
    text = str(trace)
    assert "positions" in text
    assert "0–5" in text


def test_keys_that_are_rotated_anew_count_their_rows() -> None:
    trace = recorded(Rotated(anew=True, most=6), [None] * 4)
    assert offsets(trace) == [0, 6, 6, 6]
    assert jump_of(trace) == []


def test_tokens_that_are_taken_back_are_no_jump() -> None:
    trace = recorded(Rotated(), [None, None, None], cut=2)
    assert offsets(trace) == [0, 4, 5]
    assert jump_of(trace) == []


def test_without_a_rotation_there_are_no_positions() -> None:
    class Plain(Rotated):
        def turn(self, x: Tensor, at: int) -> Tensor:
            return x

    trace = recorded(Plain(), [0, 12])
    assert offsets(trace) == [None, None]
    assert "positions" not in str(trace)


@pytest.mark.parametrize(("fault", "said"), [(0, []), (1, ["The positions jump: 0–5, then 7; expected 6."])])
def test_decode_tells_them_too(fault: int, said: list[str]) -> None:
    torch.manual_seed(1)
    module = Rotated(fault=fault).eval()
    trace, _ = decoded(Subject(module, (torch.randn(1, 8, E),), {}), Show(), 2)
    assert offsets(trace) == [0, 6 + fault, 7 + 2 * fault]
    assert jump_of(trace) == said

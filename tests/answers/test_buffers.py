"""Buffers are no weights: each side of a comparison keeps its own, and they count as no parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.shared_weights import differing_buffers

DIM, HEADS, LENGTH = 12, 3, 7


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(3))


def made(make: Callable[..., nn.Module], seed: int = 0, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    return make(**settings).eval()


class Attention(nn.Module):
    """One mask and one slope a head, as buffers; a table of relative distances, whose index is a buffer."""

    def __init__(
        self, num_heads: int = HEADS, diagonal: int = 0, slope: float = 0.0, turned: bool = False, kept: bool = True
    ) -> None:
        super().__init__()
        self.h = num_heads
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, num_heads))
        ahead = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril(diagonal), persistent=kept)
        self.register_buffer("slopes", slope * torch.arange(1, num_heads + 1).view(-1, 1, 1), persistent=kept)
        self.register_buffer("index", (-ahead if turned else ahead) + LENGTH - 1, persistent=kept)
        self.register_buffer("scale", torch.tensor((DIM // num_heads) ** -0.5), persistent=kept)

    def sides(self, x: Tensor) -> list[Tensor]:
        return list(self.qkv(x).chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (side.unflatten(-1, (self.h, -1)).transpose(1, 2) for side in self.sides(x))
        ahead = torch.arange(n) - torch.arange(n)[:, None]
        scores = q @ k.mT * self.scale + self.slopes * ahead + self.table[self.index[:n, :n]].permute(2, 0, 1)
        weights = scores.masked_fill(self.tril[:n, :n] == 0, float("-inf")).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Apart(Attention):
    """The same with three matrices, so that weights are copied by head."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

    def sides(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x), self.v(x)]


@pytest.mark.parametrize(
    ("right_class", "kept", "settings", "name"),
    [
        (Attention, True, {"diagonal": 1}, "tril"),
        (Attention, False, {"slope": 0.5}, "slopes"),
        (Apart, True, {"turned": True}, "index"),
    ],
)
def test_each_side_of_a_diff_keeps_its_buffers(x, right_class, kept, settings, name):
    left, right = made(Attention, kept=kept, **settings), made(right_class, 1, kept=kept)
    before = {key: tensor.clone() for key, tensor in right.named_buffers()}
    report = mha_inspect.diff(left, right, x, same_weights=True)
    assert report.weights.whole
    assert (report.outcome, report.first_differing_stage) == ("differs", "masked_scores")
    assert report.buffers == (name,)
    assert any(f"The buffer {name} differs: buffers are not weights" in sentence for sentence in report.answer)
    assert all(torch.equal(before[key], tensor) for key, tensor in right.named_buffers())
    # By hand: the left side's weights in a module with the buffers of the right.
    expected = made(Attention, kept=kept)
    for key, parameter in left.named_parameters():
        expected.get_parameter(key).data.copy_(parameter)
    with torch.no_grad():
        apart = float((left(x) - expected(x)).abs().max())
    assert report.output.max_abs_difference == pytest.approx(apart, rel=1e-4)


def test_buffers_of_another_dtype_are_compared_within_its_rounding():
    left, right = made(Attention, slope=0.3), made(Attention, slope=0.3).bfloat16()
    assert differing_buffers(left, right) == ()
    assert differing_buffers(left, right.float()) == ("slopes",)


def test_tied_weights_that_the_other_side_has_apart_are_not_the_same(x):
    """One tensor cannot have the numbers of two."""

    class Twice(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.attention, self.a, self.b = Attention(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.b.weight = self.a.weight if tied else self.b.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.attention(x)))

    apart, tied = made(Twice, tied=False), made(Twice, 1, tied=True)
    assert mha_inspect.diff(tied, apart, x, same_weights=True).outcome == "same"
    report = mha_inspect.diff(apart, tied, x, same_weights=True)
    assert not report.weights.whole
    assert any("not copied, outside the projections: a.weight" in sentence for sentence in report.weights.left_out)


class Head(nn.Module):
    """A head that is a module, as in many lectures: each has a mask of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(DIM, width, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        n, k = x.shape[1], self.key(x)
        weights = self.query(x) @ k.mT * k.shape[-1] ** -0.5
        return weights.masked_fill(self.tril[:n, :n] == 0, float("-inf")).softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(DIM // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


def test_a_head_count_does_not_change_parameters_by_its_buffers(x):
    report = mha_inspect.compare_heads((1, 3), Heads, x)
    assert [count.same_parameters for count in report.counts] == [True, True]
    assert not any("tril" in sentence for sentence in report.answer)


def test_buffers_of_a_checkpoint_are_told_from_weights(tmp_path: Path, x):
    model = made(Attention)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "index"}
    state["tril"] = torch.ones(LENGTH + 2, LENGTH + 2).tril()
    torch.save(state, tmp_path / "x.pt")
    report = mha_inspect.params(tmp_path / "x.pt", x, like=model)
    assert [(missing.name, missing.buffer) for missing in report.like.missing] == [("index", True)]
    assert [(row.name, row.buffer) for row in report.like.wrong_shape] == [("tril", True)]
    numel = 81 + HEADS + 1
    whole = sum(tensor.numel() for tensor in state.values())
    said = f"scale, slopes, tril are buffers of Attention, not weights: {numel} of the {whole:,} numbers in the file."
    assert said in report.notes


def test_a_module_that_does_not_run_without_memory_still_tells_how_a_file_fits(invoke, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Mine(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.q_proj = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.q_proj(x) * torch.ones(4)\n"
    )
    torch.save({"q_proj.weight": torch.zeros(4, 4), "q_proj.bias": torch.zeros(4)}, tmp_path / "x.pt")
    code, out, err = invoke("params", str(tmp_path / "x.pt"), "--like", f"{tmp_path / 'mine.py'}:Mine")
    assert (code, err) == (0, "")
    assert "2 with the same name and shape" in out
    assert "Mine could not be run without memory" in out
    assert "a run of Mine" not in out

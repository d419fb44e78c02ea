"""Right modules around an attention are not accused: gradients of their own, running sums, padded windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent

from ...corpus.planted import B, E, N, Right


class Doubled(torch.autograd.Function):
    """Runs a module without autograd, and computes its gradients in a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x + Right.forward(module, x)  # type: ignore[arg-type, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (given + Right.forward(ctx.module, given)).backward(*gradients)
        assert given.grad is not None
        return given.grad, None


class Reversible(Right):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x + 0 * self.o.bias, self)  # type: ignore[no-any-return]


def test_a_projection_with_a_backward_of_its_own_has_a_gradient() -> None:
    torch.manual_seed(0)
    assert mha_inspect.check(Reversible(), torch.randn(B, N, E), only=["parameters"]).findings == ()


class SumsBefore(nn.Module):
    """A running sum before attention that leaves padding out of a prompt alone, as recurrent layers of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Any]:
        if x.shape[1] > 1:
            x = x * mask[:, -x.shape[1] :, None]
        sums = x.cumsum(1)
        if past is not None:
            sums = sums + past[2]
        q, k, v = self.qkv(sums / 9).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        future = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
        scores = (q @ k.mT / E**0.5).masked_fill(future | ~mask[:, None].bool(), -1e9)
        return scores.softmax(-1) @ v, (k, v, sums[:, -1:])


def test_padding_on_the_left_is_in_the_first_call_that_fills_a_cache() -> None:
    torch.manual_seed(0)
    mask = torch.ones(B, N, dtype=torch.long)
    mask[0, :2] = 0
    report = mha_inspect.check(SumsBefore(), torch.randn(B, N, E), mask=mask, intent=Intent(causal=True, cache="past"))
    assert [finding for finding in report.findings if finding.check == "cache"] == []
    assert "cache" in {passed.check for passed in report.passed}


class PaddedWindows(nn.Module):
    """Rotary attention in windows with the window before, of a sequence that is padded to whole windows."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.o = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        q, k, v = F.pad(heads, (0, 0, 0, -x.shape[1] % self.window)).unflatten(-2, (-1, self.window))
        k, v = self.with_window_before(k), self.with_window_before(v)
        angles = torch.arange(2 * self.window)[:, None] * 100.0 ** (-torch.arange(6) / 6).repeat(2)
        q, k = self.rotated(q, angles[self.window :]), self.rotated(k, angles)
        query, key = torch.arange(self.window)[:, None] + self.window, torch.arange(2 * self.window)
        hidden = (key > query).expand(q.shape[2], -1, -1).clone()
        hidden[0, :, : self.window] = True  # the first window has none before it
        context = (q @ k.mT / 12**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.o(context.flatten(2, 3)[:, :, : x.shape[1]].transpose(1, 2).flatten(2))

    def with_window_before(self, side: Tensor) -> Tensor:
        """Return `batch heads windows (2 window) head_dim` of `batch heads windows window head_dim`."""
        before = F.pad(side, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
        return torch.cat((before, side), -2)

    def rotated(self, side: Tensor, turn: Tensor) -> Tensor:
        return side * turn.cos() + torch.cat((-side[..., 6:], side[..., :6]), -1) * turn.sin()


def test_rows_that_pad_a_sequence_to_whole_windows_are_not_rotated_tokens() -> None:
    torch.manual_seed(0)
    report = mha_inspect.check(PaddedWindows(4).eval(), torch.randn(2, 7, 24))
    assert [finding for finding in report.findings if finding.sure] == []

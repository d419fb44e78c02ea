"""Attentions behind one another, and keys of no position, at sizes where one may be taken for the other."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

B, N, E, H, D = 3, 5, 8, 4, 6


class Stream(nn.Module):
    """Two attentions with residuals, in one forward. Their heads together are wider than the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(E, H * D) for _ in range(6))
        self.out = nn.ModuleList(nn.Linear(H * D, E) for _ in range(2))
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.read = []
        for place, out in enumerate(self.out):
            self.read.append(x.detach())
            sides = self.sides[3 * place : 3 * place + 3]
            q, k, v = (side(x).view(*x.shape[:2], H, D).transpose(1, 2) for side in sides)
            context = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
            x = x + out(context.transpose(1, 2).flatten(2))
        return x[:, -1]


def test_an_attention_before_it_is_no_low_rank_step_of_a_projection() -> None:
    torch.manual_seed(0)
    module = Stream()
    report = mha_inspect.trace(module, torch.randn(B, N, E), keep=True)
    for attention, read in zip(report.attentions, module.read, strict=True):
        stages = {stage.name: stage for stage in attention.stages}
        assert stages["q_proj"].formula == "query · W_qᵀ + b_q"
        assert attention.query.tensor.equal(read)


class WithKeysOfNoPosition(nn.Module):
    """Self-attention of torch with `add_bias_kv` and `add_zero_attn`: keys behind the tokens, that all queries see."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(N, N).triu(1 + self.late).bool()
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@pytest.mark.parametrize("late", [0, 1])
def test_joined_keys_of_no_position_are_no_future(late: int) -> None:
    torch.manual_seed(0)
    module, x = WithKeysOfNoPosition(late), torch.randn(B, N, H * D)
    findings = mha_inspect.check(module, x, intent=mha_inspect.Intent(causal=True)).findings
    assert [(each.check, each.sure) for each in findings] == [("causal", True)] * late
    assert all("one diagonal too late" in each.sentence for each in findings)


class FixedSlots(nn.Module):
    """Causal attention over the slots of a cache, the empty ones of which may be visible."""

    def __init__(self, *, visible: bool) -> None:
        super().__init__()
        self.packed, self.out, self.visible = nn.Linear(E, 3 * H * D), nn.Linear(H * D, E), visible
        self.register_buffer("slots", torch.zeros(2, B, H, N + 3, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        self.slots[:, :, :, :N] = torch.stack([k, v])
        seen = F.pad(torch.ones(N, N).tril().bool(), (0, 3), value=self.visible)
        scores = (q @ self.slots[0].mT / math.sqrt(D)).masked_fill(~seen, -torch.inf)
        return self.out((scores.softmax(-1) @ self.slots[1]).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("visible", [False, True])
def test_visible_empty_slots_of_a_cache_are_a_fault(visible: bool) -> None:
    torch.manual_seed(0)
    findings = mha_inspect.check(
        FixedSlots(visible=visible), torch.randn(B, N, E), intent=mha_inspect.Intent(causal=True)
    ).findings
    assert [(each.check, each.sure) for each in findings] == [("causal", True)] * visible


class Across(nn.Module):
    """Cross-attention. The last key of the source is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True)

    def forward(self, x: Tensor, source: Tensor, pad: Tensor) -> Tensor:
        return self.attention(x, source, source, key_padding_mask=pad, need_weights=False)[0]


def test_padding_behind_a_source_is_no_late_causal_mask() -> None:
    torch.manual_seed(0)
    x, source = torch.randn(B, 3, H * D), torch.randn(B, N, H * D)
    pad = (torch.arange(N) == N - 1).expand(B, N)
    report = mha_inspect.check(Across(), x, source, pad)
    assert report.findings == ()
    assert f"every query sees 4 of {N} keys" in [fact.sentence for fact in report.facts]


class Reduced(nn.Module):
    """Fewer keys than queries, by a convolution before W_k and W_v (SegFormer, CvT) or as W_k and W_v (PVT)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.o = kind, nn.Linear(12, 12), nn.Linear(12, 12)
        self.few = nn.Conv2d(12, 24 if kind == "as" else 12, 2, 2, groups=12 if kind == "by channel" else 1)
        self.norm, self.kv = nn.LayerNorm(12), nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        few = self.few(x.mT.unflatten(2, (4, 6))).flatten(2).mT
        k, v = (few if self.kind == "as" else self.kv(self.norm(few))).chunk(2, -1)
        q, k, v = (side.unflatten(-1, (3, 4)).transpose(1, 2) for side in (self.q(x), k, v))
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["before", "by channel", "as"])
def test_keys_that_a_convolution_makes_fewer_say_so(kind: str) -> None:
    module, x = Reduced(kind), torch.randn(2, 24, 12)
    formulas = {stage.name: stage.formula for stage in mha_inspect.trace(module, x).attentions[0].stages}
    found = {row.name: row for row in mha_inspect.params(module, x, per_head=True).parameters}
    few = found["few.weight"]
    if kind == "as":
        assert (few.axes, few.role) == ("(kv heads head_dim) embed 2 2", "W_k, W_v stacked: rows 0–11, 12–23")
        assert [(piece.part, piece.head, piece.rows) for piece in few.heads or ()] == [
            (part, head, (start + 4 * head, start + 4 * head + 4))
            for part, start in (("W_k", 0), ("W_v", 12))
            for head in range(3)
        ]
    else:
        assert (formulas["key"], formulas["value"]) == ("the query, then convolution, native_layer_norm", "the key")
        roles = {found[name].role for name in ("few.weight", "few.bias", "norm.weight", "norm.bias")}
        assert roles == {"used before the projection to the keys and values"}

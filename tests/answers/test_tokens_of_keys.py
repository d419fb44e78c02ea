"""The token that is in each key of a call: one that is in none, in another's slot, or rotated as another is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport, Finding
from mha_inspect.running.subject import Subject


def report_of(module: nn.Module, intent: Intent, *, length: int = 12) -> CheckReport:
    torch.manual_seed(3)
    return check(Subject(module.eval(), (torch.randn(2, length, 20),), {}), intent)


def the_finding(module: nn.Module, intent: Intent, *, length: int = 12) -> Finding:
    (finding,) = report_of(module, intent, length=length).findings
    return finding


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return y.transpose(1, 2).flatten(2)


class _Layer(nn.Module):
    def __init__(self, *, right: bool = False) -> None:
        super().__init__()
        self.right, self.qkv, self.out = right, nn.Linear(20, 60), nn.Linear(20, 20)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [each.unflatten(-1, (5, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)]


class LateOwnKey(_Layer):
    """A cache whose new key and value are appended after the step has read it."""

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        new = (k, v) if cache is None else tuple(torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        read = (k, v) if cache is None else new if self.right else cache
        past = 0 if cache is None else cache[0].shape[2]
        mask = torch.arange(read[0].shape[2]) <= torch.arange(q.shape[2])[:, None] + past
        return self.out(attended(q, *read, mask)), new


def test_a_new_token_whose_key_is_appended_too_late_is_said() -> None:
    finding = the_finding(LateOwnKey(), Intent(causal=True, cache="cache"))
    assert (
        "Position 6 attends to 6 keys, of positions 0–5; the keys of positions 6–10 themselves are only in the cache "
        "that the call returns." in finding.sentence
    )
    assert (
        finding.fix
        == "Join the new keys and values to the cached ones before the scores: torch.cat((past, new), dim=2)."
    )
    proof = decoded(Subject(LateOwnKey().eval(), (torch.randn(1, 12, 20),), {}), Show(), 3)[0].decode
    assert proof is not None
    assert proof.reason == (
        "Position 9 attends to 9 keys, of positions 0–8; the key of position 9 itself is only in the cache that the "
        "call returns."
    )


class Memo(_Layer):
    """A rotation whose angles are kept by the number of tokens; if `right`, also by the first position."""

    def __init__(self, *, right: bool = False) -> None:
        super().__init__(right=right)
        self.known: dict[Any, Tensor] = {}

    def turned(self, x: Tensor, start: int) -> Tensor:
        count = x.shape[2]
        angles = self.known.setdefault(
            (count, start if self.right else 0),
            torch.outer(torch.arange(start, start + count).float(), torch.tensor([1.0, 0.1])),
        )
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        past = 0 if cache is None else cache[0].shape[2]
        q, k = self.turned(q, past), self.turned(k, past)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + past
        return self.out(attended(q, k, v, mask)), (k, v)


def test_the_calls_of_one_decode_keep_the_state_of_the_module() -> None:
    module = Memo()
    finding = the_finding(module, Intent(causal=True, cache="cache"))
    assert "(token by token) differ from one call" in finding.sentence
    rotated = "Position 1 is rotated by the angle of position 0, which the module keeps from an earlier call."
    assert rotated in finding.sentence
    assert finding.fix == "Compute the angles of the positions of each call, or keep them by position."
    assert module.known == {}
    proof = decoded(Subject(Memo().eval(), (torch.randn(1, 12, 20),), {}), Show(), 3)[0].decode
    assert proof is not None
    assert proof.reason == (
        "Position 10 is rotated by the angle of position 9, which the module keeps from an earlier call."
    )


@pytest.mark.parametrize("intent", [Intent(causal=True, cache="cache"), Intent()])
@pytest.mark.parametrize(
    "module",
    [LateOwnKey(right=True), Memo(right=True)],
    ids=["appended", "memo"],
)
def test_a_right_cache_is_not_accused(module: nn.Module, intent: Intent) -> None:
    assert report_of(module, intent).findings == ()

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
        return [part.unflatten(-1, (5, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]


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
        self.kept: dict[Any, Tensor] = {}

    def turned(self, x: Tensor, start: int) -> Tensor:
        count = x.shape[2]
        angles = self.kept.setdefault(
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
    assert module.kept == {}
    proof = decoded(Subject(Memo().eval(), (torch.randn(1, 12, 20),), {}), Show(), 3)[0].decode
    assert proof is not None
    assert proof.reason == (
        "Position 10 is rotated by the angle of position 9, which the module keeps from an earlier call."
    )


class Slots(_Layer):
    """A cache of fixed size, a ring if `most` is smaller than the tokens; `shift` moves the slots that are read."""

    def __init__(self, most: int, *, shift: int = 0, right: bool = False) -> None:
        super().__init__(right=right)
        self.most, self.shift = most, shift

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        count = x.shape[1]
        empty = x.new_zeros(len(x), 5, self.most, 4)
        keys, values, start = (empty, empty, 0) if cache is None else cache
        keys, values, end = keys.clone(), values.clone(), start + count
        place = torch.full((self.most,), -1)
        for token in range(max(end - self.most, 0), start):
            place[token % self.most] = token
        for at in range(count):
            slot = (start + at) % self.most
            keys[:, :, slot], values[:, :, slot], place[slot] = k[:, :, at], v[:, :, at], start + at
        read = slice(self.shift, min(end, self.most) + self.shift)
        rows = torch.arange(start, end)[:, None]
        columns = place[read] if self.right else torch.arange(place[read].shape[0])
        mask = columns <= rows
        if self.right:
            mask = mask & (columns > rows - self.most)
        return self.out(attended(q, keys[:, :, read], values[:, :, read], mask)), (keys, values, end)


SLOTS = {
    (6, 0): (
        "Keys 0–5 are tokens 6–11: a ring of 6 slots has overwritten tokens 0–5, and the mask counts slots as tokens.",
        "Query 0 gives weight to key 0, which is token 6.",
    ),
    (32, 1): (
        "Key j is token j + 1: token 0 is in no key, and key 11 is an empty slot of zeros.",
        "Query 0 gives weight to key 0, which is token 1.",
    ),
    (12, 2): (
        "Key j is token j + 2: tokens 0–1 are in no key.",
        "Query 0 gives weight to key 0, which is token 2.",
    ),
}


@pytest.mark.parametrize("sizes", SLOTS)
def test_keys_that_are_other_tokens_are_said(sizes: tuple[int, int]) -> None:
    report = report_of(Slots(sizes[0], shift=sizes[1]), Intent())
    assert [(finding.check, finding.sentence, finding.evidence) for finding in report.findings] == [
        ("cache", *SLOTS[sizes])
    ]
    assert [fact.sentence for fact in report.facts if fact.name == "who sees whom"] == [
        "causal, if key rows were tokens in order"
    ]


@pytest.mark.parametrize(
    "module",
    [LateOwnKey(right=True), Memo(right=True), Slots(16), Slots(12, right=True), Slots(32, right=True)],
    ids=["appended", "memo", "slots", "ring as long as the call", "slots by token"],
)
def test_a_right_cache_is_not_accused(module: nn.Module) -> None:
    assert report_of(module, Intent()).findings == ()


def test_a_ring_whose_mask_is_by_token_shows_no_later_token() -> None:
    findings = report_of(Slots(6, right=True), Intent()).findings
    assert [finding.sentence for finding in findings if "overwritten" in finding.sentence] == []

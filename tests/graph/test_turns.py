"""Turns of a loop on one line are calls of their own."""

from __future__ import annotations

import torch

from ..recorded import record


def calls_of(function, *args):
    recording, _ = record(function, *args)
    found: dict[int, list[str]] = {}
    for op in recording.ops:
        found.setdefault(op.call, []).append(op.base_name)
    return list(found.values())


X = torch.randn(2, 3, 5, 7)
W = torch.randn(2, 3, 7, 7)


def test_a_product_again_and_again():
    def loop(x):
        for _ in range(3):
            x = x @ W
        return x

    (once,) = calls_of(lambda x: x @ W, X)
    assert len(once) > 1
    assert calls_of(loop, X) == [once] * 3


def test_one_call_of_several_operations_stays_one():
    (call,) = calls_of(lambda x: torch.einsum("bhqd,bhdk->bqhk", x, W), X)
    assert len(call) > 2


def test_what_is_between_two_of_the_same_keeps_them_apart():
    assert calls_of(lambda x: x.exp().neg().exp(), X) == [["exp"], ["neg"], ["exp"]]

"""The steps of a kernel that is called again are noted as they are when they are run again."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mha_inspect.record import xray
from mha_inspect.record.ops import Recording
from mha_inspect.record.xray import XRay

Q, K, V = torch.randn(3, 2, 6, 7, 4, generator=torch.Generator().manual_seed(0))  # each `batch heads position head_dim`
MASK = torch.ones(7, 7).tril().bool()
BLIND = MASK.clone().fill_(False)


def _calls_of_a_kernel(x: Tensor, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, K, V, **settings)


def _masks() -> None:
    for mask in (MASK, MASK, BLIND, MASK.T, None, torch.randn(7, 7), MASK):
        _calls_of_a_kernel(Q, attn_mask=mask)


def _layouts() -> None:
    for k in (K, K.mT.contiguous().mT, K, K[:, :, :5], K):
        F.scaled_dot_product_attention(Q, k, V[:, :, : k.shape[2]])


def _views_between() -> None:
    """The code makes the view of the keys that the steps make too."""
    for _ in range(3):
        _calls_of_a_kernel(Q, is_causal=True)
        (Q @ K.transpose(-2, -1)).sum()
        K.transpose(-2, -1).sum()


def _on_meta_first() -> None:
    for device in ("meta", "cpu", "cpu"):
        mask = torch.zeros(7, 7, dtype=torch.bool, device=device)
        F.scaled_dot_product_attention(Q.to(device), K.to(device), V.to(device), attn_mask=mask)


def _written_between() -> None:
    k = K.clone()
    for _ in range(3):
        F.scaled_dot_product_attention(Q, k, V)
        k.mul_(2)


CODE = (
    _masks,
    _layouts,
    _views_between,
    _on_meta_first,
    _written_between,
)


def recorded(code: Any) -> tuple[Recording, int]:
    torch.manual_seed(0)
    recorder = XRay()
    with torch.no_grad(), recorder:
        code()
    return recorder.finish(), len(recorder._recorded_steps)


@pytest.mark.parametrize("code", CODE, ids=lambda code: code.__name__.strip("_"))
def test_steps_that_are_repeated_are_those_that_are_run(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    again, kinds = recorded(code)
    assert kinds < len(again.kernels)  # some were repeated
    numbers = count()
    monkeypatch.setattr(xray, "_kind_of_call", lambda entry, opening: next(numbers))
    run, kinds = recorded(code)
    assert kinds == len(run.kernels)
    assert again.ops == run.ops
    assert again.producers == run.producers
    assert again.scalars == run.scalars
    assert again.kernels == run.kernels
    assert again.sights.keys() == run.sights.keys()

"""Libraries that others wrote: what is told of their attention is what they say of it, and the weights are theirs.

Outside of CI: `pip install -e .[zoo]`, then `pytest tests/zoo`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mha_inspect.answers.trace import traced
from mha_inspect.record.subject import Subject
from mha_inspect.targets.spec import Show

from .configurations import CONFIGURATIONS, Configuration

for name in ("x_transformers", "vit_pytorch", "local_attention", "linformer", "slot_attention", "soft_moe_pytorch"):
    pytest.importorskip(name, reason="the zoo is an extra: pip install -e .[zoo]")


@pytest.mark.parametrize("own", CONFIGURATIONS, ids=lambda own: own.name)
def test_what_is_told_is_what_the_library_says(own: Configuration) -> None:
    torch.manual_seed(1)
    module, args = own.make().eval(), own.args()
    # The oracle of the weights: what the library's own softmax modules give.
    given: list[torch.Tensor] = []
    for inner in module.modules():
        if isinstance(inner, nn.Softmax):
            inner.register_forward_hook(lambda _, __, weights: given.append(weights.detach().clone()))
    report, seen = traced(Subject(module, args, {}), Show(), keep=True)
    told = report.attentions
    assert own.count is None or len(told) == own.count
    for wanted, name in ((own.heads, "num_heads"), (own.kv_heads, "num_kv_heads"), (own.head_dim, "head_dim")):
        assert wanted is None or {getattr(one, name) for one in told} <= {wanted}, name
    if own.kind is not None:
        assert {frozenset(one.kind) for one in told} <= {frozenset(own.kind.split())}
    if own.scale is not None:
        assert [one.scale for one in told] == pytest.approx([own.scale] * len(told), rel=1e-4)
    for found, _ in seen.attentions if given else ():
        weights = seen.recording.values[found.stages["weights"].id]
        assert any(_are_alike(weights, one) for one in given), found.module


def _are_alike(weights: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, laid out in whatever way."""
    return weights.numel() == given.numel() and torch.equal(weights.flatten().sort()[0], given.flatten().sort()[0])

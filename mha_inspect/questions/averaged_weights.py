"""Returned tensors that are the mean of an attention's weights over its heads, as the numbers of a run show."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..naming.canonical import content_of
from ..record.arguments import tensors_in
from ..reports.trace import Trace
from ..running.subject import Run, Subject

_LARGEST = 1 << 24
"""Weights with more elements are not averaged."""
_ARGUMENT = "average_attn_weights"
"""The argument of torch's layer that says whether weights are averaged."""


def with_means(trace: Trace, run: Run) -> Trace:
    """Return the trace of a run, with its tensors, in which returned means of weights over heads are called so."""
    means = list(_means(run))
    returns = []
    for shown, (_, tensor) in zip(trace.returns, tensors_in(run.returned), strict=False):
        heads = [count for count, mean in means if _is_same(tensor, mean)]
        returns.append(replace(shown, mean_of_heads=heads[0]) if heads else shown)
    return replace(trace, returns=tuple(returns))


def how_by_head(trace: Trace, subject: Subject) -> Iterator[str]:
    """Yield the argument of torch's layer that returns the weights of each head, if this run returned their mean."""
    is_mean = any(shown.mean_of_heads for shown in trace.returns)
    has_argument = _ARGUMENT in inspect.signature(subject.module.forward).parameters
    if is_mean and has_argument and not subject.layer:
        yield f"The returned weights are the mean of the heads: {_ARGUMENT}=False returns those of each head."


def _means(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of heads and the mean of the weights, `batch query key`, of each attention of several heads."""
    for attention, names in run.attentions:
        weights = attention.stages.get("weights")
        if weights is None or names.num_heads < 2 or weights.numel > _LARGEST:
            continue
        content = content_of(run, attention, names, "weights")
        if content is not None and content.dim() == 4 and content.shape[1] > 1:
            yield content.shape[1], content.double().mean(1)


def _is_same(returned: Tensor, mean: Tensor) -> bool:
    """Return whether a returned tensor, `batch query key` or `query key` of one item, has these numbers."""
    if not returned.is_floating_point() or returned.is_meta or returned.is_nested:
        return False
    if returned.shape not in (mean.shape, mean.shape[1:]) or returned.numel() != mean.numel():
        return False
    rounding = 16 * torch.finfo(returned.dtype).eps
    numbers = returned.detach().double().reshape(mean.shape).to(mean.device)
    return torch.allclose(numbers, mean, rtol=rounding, atol=rounding, equal_nan=True)

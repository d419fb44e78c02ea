"""What is so of an attention, and may well be meant: scale, who sees whom, what masks do, what hangs on each head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch
from einops import EinopsError, rearrange
from torch import Tensor

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.canonical import sizes_in
from ...naming.pattern import dims_of
from ...record.ops import TensorRef
from ...reports.check import Fact, Head
from ...text import first_few
from .bench import Bench
from .gradients import MOST_HEADS, Gradients, gradients_of, weight_of
from .masks import mask_facts
from .runner import NotPossibleError
from .tokens import Flow, LostError


def facts_of(bench: Bench, *, runs: bool) -> Iterator[Fact]:
    """Yield what is so; with `runs` also what more runs tell."""
    every = bench.recorded.attentions
    scales = ((f"{scale_words(each, names)} (head_dim {names.head_dim})", (), each.module) for each, names in every)
    yield from _by_words("scale", scales)
    yield from _by_words("attended over", ((_over(each, names), (), each.module) for each, names in every))
    yield from _by_words("who sees whom", ((sight.words(), sight.picture, sight.module) for sight in bench.sights))
    if runs:
        yield from mask_facts(bench)


def _by_words(name: str, told: Iterable[tuple[str, tuple[str, ...], str]]) -> Iterator[Fact]:
    """Yield what is told of attentions, once: words, a picture, and the module of each; nothing for no words."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for words, picture, module in told:
        groups.setdefault((words, picture), []).append(module)
    for (words, picture), modules in groups.items():
        where = f" in {first_few(modules, 1)}" if len(groups) > 1 and any(modules) else ""
        if words:
            yield Fact(name, words + where, picture)


def _over(attention: Attention, names: AxisNames) -> str:
    """Return what is attended over, where it is not the keys; else empty."""
    if attention.over_queries:
        return "the queries, which compete for each key"
    return "the features of a head, not positions" if names.over_features else ""


def scale_words(attention: Attention, names: AxisNames) -> str:
    """Return a scale and what it is of head_dim: `0.125 = 1/√head_dim`."""
    if not attention.is_dot:
        return "none is due: the scores are additive"
    if attention.scale is None:
        return "no single number"
    head_dim = max(names.head_dim, 1)
    width = attention.stages["query"].shape[-1] if "query" in attention.stages else 0
    if math.isclose(attention.scale, 1, rel_tol=1e-3):
        return "1: none"
    known = {
        " = 1/√head_dim": head_dim**-0.5,
        " = 1/head_dim": 1 / head_dim,
        " = √head_dim": head_dim**0.5,
        " = head_dim^(-1/4)": head_dim**-0.25,
        " = 1/√(heads · head_dim)": (names.num_heads * head_dim) ** -0.5,
        " = 1/√embed_dim": width**-0.5 if width > 1 else 0.0,
    }
    otherwise = f", {attention.scale * head_dim**0.5:.4g} times 1/√head_dim"
    like = (name for name, value in known.items() if math.isclose(attention.scale, value, rel_tol=1e-3))
    return f"{attention.scale:.4g}{next(like, otherwise)}"


WithoutHeads = list[tuple[Attention, AxisNames, list[float]]]
"""Attentions, and how much the output of each changes without each of its heads."""


def without_heads(bench: Bench) -> WithoutHeads:
    """Return what changes without each head, for as many attentions as have `MOST_HEADS` heads together."""
    heads, changes = 0, []
    for attention, names in bench.recorded.attentions:
        heads += names.num_heads
        if heads > MOST_HEADS:
            continue
        with suppress(LostError):
            changes.append((attention, names, _without_each(bench.base.flow, attention, names)))
    return changes


def heads_of(bench: Bench, without: WithoutHeads, *, runs: bool) -> Iterator[Head]:
    """Yield what hangs on each head: the output of its attention without it, and its share of the gradient."""
    gradients: Gradients = {}
    with suppress(NotPossibleError):
        gradients = gradients_of(bench) if runs else {}
    for attention, names, changes in without:
        share = _shares(bench, attention, names, gradients)
        for head, change in enumerate(changes):
            yield Head(attention.module, head, change, share[head] if share else None)


def _without_each(flow: Flow, attention: Attention, names: AxisNames) -> list[float]:
    """Return how much the output of an attention changes when a head's context is zero, beside the output."""
    target = attention.stages.get("output") or attention.stages.get("concat")
    if target is None:
        raise LostError
    context = attention.stages["context"]
    base = flow.again({context.id: flow.value(context)}, target).double()
    size = float(base.norm()) or 1.0
    changed = ({ref.id: value} for ref, value in _contexts_without_each(flow, attention, names))
    return [round(float((flow.again(values, target).double() - base).norm()) / size, 6) for values in changed]


def _contexts_without_each(flow: Flow, attention: Attention, names: AxisNames) -> Iterator[tuple[TensorRef, Tensor]]:
    """Yield for each head the context that has it, and its numbers with zeros for that head."""
    if attention.branches:
        contexts = [branch.stages["context"] for branch in attention.branches]
        if len({context.id for context in contexts}) < names.num_heads:
            raise LostError
        yield from ((context, torch.zeros_like(flow.value(context))) for context in contexts)
        return
    context, axes = attention.stages["context"], names.of_stage("context")
    value = flow.value(context)
    dims = dims_of(axes)
    heads = [name for name in ("heads", "kv_heads", "group") if any(name in dim for dim in dims)]
    others = [name for dim in dims for name in dim if name not in (*heads, "1")]
    sizes = {
        name: size for name, size in sizes_in(attention, names, "context").items() if _shares_a_dimension(name, dims)
    }
    places = torch.arange(value.numel(), device=value.device).view(value.shape)
    try:
        by_head = rearrange(places, f"{axes} -> ({' '.join(heads)}) ({' '.join(others)})", **sizes)
    except EinopsError as error:
        raise LostError from error
    if len(by_head) != names.num_heads:
        raise LostError
    for of_head in by_head:
        yield context, value.flatten().index_fill(0, of_head, 0).view(value.shape)


def _shares_a_dimension(name: str, dims: list[list[str]]) -> bool:
    return any(name in dim and len(dim) > 1 for dim in dims)


def _shares(bench: Bench, attention: Attention, names: AxisNames, gradients: Gradients) -> list[float] | None:
    """Return each head's share of what the output's gradient says of zeroing heads: |W_o ∘ dW_o| over its columns."""
    op = attention.projections.get("output")
    name = weight_of(bench, op) if op else ""
    gradient = gradients.get(name)
    width = names.num_heads * names.head_dim
    parameter = dict(bench.module.named_parameters()).get(name)
    if gradient is None or parameter is None or parameter.dim() != 2 or width not in parameter.shape:
        return None
    if "concat" not in attention.stages or names.of_stage("concat").split()[-2:] != ["(heads", "head_dim)"]:
        return None
    taylor = (parameter.detach() * gradient).double()
    # A square matrix is taken for nn.Linear's, which has the features that come in last.
    taylor = taylor if parameter.shape[1] == width else taylor.T
    each = taylor.reshape(taylor.shape[0], names.num_heads, names.head_dim).sum((0, 2)).abs()
    total = float(each.sum())
    return [round(float(share) / total, 6) for share in each] if total else None

"""What is so of an attention, and may well be meant: scale, who sees whom, what masks do, what hangs on each head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...naming.canonical import sizes_in
from ...naming.layout import Layout
from ...record.ops import TensorRef
from ...reports.check import Fact, Head
from ...text import first_few
from .bench import Bench, NotPossibleError
from .evidence import MOST_HEADS
from .gradients import gradients_of, weight_of
from .masks import mask_facts
from .tokens import Flow, LostError


def facts_of(bench: Bench, *, runs: bool) -> Iterator[Fact]:
    """Yield what is so; with `runs` also what more runs tell."""
    every = bench.seen.attentions
    scales = ((f"{scale_words(found, names)} (head_dim {names.head_dim})", (), found.module) for found, names in every)
    yield from _by_words("scale", scales)
    yield from _by_words("attended over", ((_over(found, names), (), found.module) for found, names in every))
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


def _over(found: Attention, names: AxisNames) -> str:
    """What is attended over, where it is not the keys."""
    if found.over_queries:
        return "the queries, which compete for each key"
    return "the features of a head, not positions" if names.over_features else ""


def scale_words(found: Attention, names: AxisNames) -> str:
    """A scale and what it is of head_dim: `0.125 = 1/√head_dim`."""
    if not found.is_dot:
        return "none is due: the scores are additive"
    if found.scale is None:
        return "no single number"
    head_dim, width = max(names.head_dim, 1), found.stages["query"].shape[-1] if "query" in found.stages else 0
    if math.isclose(found.scale, 1, rel_tol=1e-3):
        return "1: none"
    known = {
        " = 1/√head_dim": head_dim**-0.5,
        " = 1/head_dim": 1 / head_dim,
        " = √head_dim": head_dim**0.5,
        " = head_dim^(-1/4)": head_dim**-0.25,
        " = 1/√(heads · head_dim)": (names.num_heads * head_dim) ** -0.5,
        " = 1/√embed_dim": width**-0.5 if width > 1 else 0.0,
    }
    otherwise = f", {found.scale * head_dim**0.5:.4g} times 1/√head_dim"
    like = (name for name, value in known.items() if math.isclose(found.scale, value, rel_tol=1e-3))
    return f"{found.scale:.4g}{next(like, otherwise)}"


WithoutHeads = list[tuple[Attention, AxisNames, list[float]]]
"""Attentions, and how much the output of each changes without each of its heads."""


def without_heads(bench: Bench) -> WithoutHeads:
    """Return what changes without each head, for as many attentions as have `MOST_HEADS` heads together."""
    heads, made = 0, []
    for found, names in bench.seen.attentions:
        heads += names.num_heads
        if heads > MOST_HEADS:
            continue
        with suppress(LostError):
            made.append((found, names, _without_each(bench.flow, found, names)))
    return made


def heads_of(bench: Bench, without: WithoutHeads, *, runs: bool) -> Iterator[Head]:
    """Yield what hangs on each head: the output of its attention without it, and its share of the gradient."""
    gradients: Mapping[str, Tensor | None] = {}
    with suppress(NotPossibleError):
        gradients = gradients_of(bench) if runs else {}
    for found, names, changes in without:
        share = _shares(bench, found, names, gradients)
        for head, change in enumerate(changes):
            yield Head(found.module, head, change, share[head] if share else None)


def _without_each(flow: Flow, found: Attention, names: AxisNames) -> list[float]:
    """How much the output of an attention changes when a head's context is zero, beside the output."""
    target = found.stages.get("output") or found.stages.get("concat")
    if target is None:
        raise LostError
    own = found.stages["context"]
    base = flow.again({own.id: flow.value(own)}, target).double()
    size = float(base.norm()) or 1.0
    empty = ({context.id: without} for context, without in _contexts_without_each(flow, found, names))
    return [round(float((flow.again(changed, target).double() - base).norm()) / size, 6) for changed in empty]


def _contexts_without_each(flow: Flow, found: Attention, names: AxisNames) -> Iterator[tuple[TensorRef, Tensor]]:
    """Yield for each head the context that has it, and its numbers with zeros for that head."""
    if found.branches:
        contexts = [branch.stages["context"] for branch in found.branches]
        if len({context.id for context in contexts}) < names.num_heads:
            raise LostError
        yield from ((context, torch.zeros_like(flow.value(context))) for context in contexts)
        return
    context, axes = found.stages["context"], names.of_stage("context")
    value = flow.value(context)
    try:
        layout = Layout(context, axes, sizes_in(found, names, "context"))
    except ValueError as error:
        raise LostError from error
    if "heads" not in axes or layout.num_heads != names.num_heads:
        raise LostError
    for head in range(names.num_heads):
        yield context, value.masked_fill(layout.is_of(head).to(value.device), 0)


def _shares(
    bench: Bench, found: Attention, names: AxisNames, gradients: Mapping[str, Tensor | None]
) -> list[float] | None:
    """Each head's share of what the output's gradient says of zeroing heads: |W_o ∘ dW_o| summed over its columns."""
    op = found.projections.get("output")
    name = weight_of(bench, op) if op else ""
    gradient = gradients.get(name)
    width = names.num_heads * names.head_dim
    parameter = dict(bench.module.named_parameters()).get(name)
    if gradient is None or parameter is None or parameter.dim() != 2 or width not in parameter.shape:
        return None
    if "concat" not in found.stages or names.of_stage("concat").split()[-2:] != ["(heads", "head_dim)"]:
        return None
    taylor = (parameter.detach() * gradient).double()
    # A square matrix is taken for nn.Linear's, which has the features that come in last.
    taylor = taylor if parameter.shape[1] == width else taylor.T
    each = taylor.reshape(taylor.shape[0], names.num_heads, names.head_dim).sum((0, 2)).abs()
    total = float(each.sum())
    return [round(float(one) / total, 6) for one in each] if total else None

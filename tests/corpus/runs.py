"""One recorded run of each entry, which all properties read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

import mha_inspect
from mha_inspect.notebook import LiveTrace
from mha_inspect.reports.params import ParamsReport

from .entry import Truth
from .every import ENTRIES


@cache
def _recorded(name: str, batch: int, length: int) -> tuple[LiveTrace, Any]:
    """Return the trace of an entry with its tensors, and what the module returned while it was recorded.

    It runs at its first size with gradients, or at another without.
    """
    entry, returned = ENTRIES[name], list[Any]()
    module, (args, kwargs) = entry.made(), entry.arguments(batch, length)
    module.register_forward_hook(lambda _, args, output: returned.append(output))
    with torch.set_grad_enabled(entry.grad and not batch):
        trace = mha_inspect.trace(module, *args, keep=True, **kwargs)
    return trace, returned[0]


def traced(name: str, batch: int = 0, length: int = 0) -> LiveTrace:
    return _recorded(name, batch, length)[0]


def returned_by(name: str) -> Any:
    """Return what an entry returned while `traced` recorded it."""
    return _recorded(name, 0, 0)[1]


@cache
def parameters(name: str) -> ParamsReport:
    """Return the parameters of an entry by head."""
    entry = ENTRIES[name]
    args, kwargs = entry.arguments()
    with torch.no_grad():
        return mha_inspect.params(entry.made(), *args, per_head=True, **kwargs)


def shown(name: str) -> Iterator[tuple[Any, Truth]]:
    """Return each attention of an entry's trace beside its truth."""
    yield from zip(traced(name).attentions, ENTRIES[name].attentions, strict=True)


def axes_of(attention: Any) -> dict[str, str]:
    return {stage.name: stage.axes for stage in attention.stages}


def words(axes: str) -> list[str]:
    return re.findall(r"\w+", axes)


def sizes_of(attention: Any, truth: Truth) -> dict[str, set[int]]:
    """Return the sizes of each name wherever it stands alone in a dimension."""
    sizes: dict[str, set[int]] = {"heads": {truth.heads}, "head_dim": {truth.head_dim}}
    for stage in attention.stages:
        dims = re.findall(r"\([^)]*\)|\S+", stage.axes)
        assert len(dims) == len(stage.shape), (stage.name, stage.axes, stage.shape)
        for dim, size in zip(dims, stage.shape, strict=True):
            if dim.isidentifier():
                sizes.setdefault(dim, set()).add(size)
    return sizes


def canonical(stage: Any, target: str, truth: Truth, sizes: Mapping[str, int]) -> Tensor:
    """Return a stage in float64 in axes of one's choice; those that it has not are of size 1.

    `batch` takes in windows and `query` its parts; key heads are repeated for the query heads that share them.
    """
    present = words(stage.axes)
    for name in ("batch", "query", "key"):
        parts = [word for word in present if re.fullmatch(rf"{name}_\d", word)]
        parts = ["batch", "windows"] if name == "batch" and "windows" in present else parts
        target = target.replace(name, f"({' '.join(parts)})") if parts else target
    if "kv_heads" in present:
        target = target.replace("heads", "(kv_heads group)" if "group" in present else "kv_heads")
    if "maps" in present:
        target = target.replace("heads", "(heads maps)")
    to = " ".join(word if word in (*present, "(", ")") else "1" for word in re.findall(r"\w+|[()]", target))
    value = rearrange(stage.tensor, f"{stage.axes} -> {to}", **{name: sizes[name] for name in present if name in sizes})
    if "kv_heads" in present and "group" not in present:
        value = value.repeat_interleave(truth.heads // truth.true_kv_heads, 1)
    return value.double()


class Numbers:
    """The stages of one attention in canonical axes, `batch heads query key`, in float64."""

    def __init__(self, attention: Any, truth: Truth) -> None:
        self.stages = {stage.name: stage for stage in attention.stages}
        self.truth = truth
        self.sizes = {name: min(sizes) for name, sizes in sizes_of(attention, truth).items() if len(sizes) == 1}
        self.sizes |= {name: size for name, size in truth.lengths.items() if size is not None}
        self.sizes |= {"kv_heads": truth.true_kv_heads, "group": truth.heads // truth.true_kv_heads}

    def of(self, stage: str) -> Tensor:
        value = "v_head_dim" if self.truth.value_dim is not None else "head_dim"
        if stage in ("scores", "masked_scores", "weights"):
            target = "batch heads query key"
        elif stage in ("context", "concat"):
            target = f"batch heads query {value}"
        else:
            tokens = "query" if stage == "q_heads" else "query key" if self.of_each_query else "key"
            target = f"batch heads {tokens} {value if stage[0] == 'v' else 'head_dim'}"
        return canonical(self.stages[stage], target, self.truth, self.sizes)

    @property
    def of_each_query(self) -> bool:
        """Whether each query has keys of its own."""
        return "query" in words(self.stages["v_heads"].axes)

    def products(self) -> Tensor:
        """Return q·k of all pairs."""
        if self.of_each_query:
            return (self.of("q_heads")[..., None, :] * self.of("k_heads")).sum(-1)
        return self.of("q_heads") @ self.of("k_heads").mT

    def average(self) -> Tensor:
        """Return weights · v."""
        if self.of_each_query:
            return (self.weights()[..., None] * self.of("v_heads")).sum(-2)
        return self.weights() @ self.of("v_heads")

    @property
    def last_scores(self) -> str:
        """The stage that the softmax is given."""
        return "masked_scores" if "masked_scores" in self.stages else "scores"

    def weights(self) -> Tensor:
        """The weights; where the sum divides what the exponentials give with the values there are none."""
        return self.of("weights") if "weights" in self.stages else self.of(self.last_scores).softmax(-1)

"""What must hold of every attention that is found: its own arithmetic, in the axes that it was given."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange

from mha_inspect.graph.attention import Attention
from mha_inspect.graph.dataflow import Graph
from mha_inspect.graph.find import attentions_of
from mha_inspect.naming.axes import AxisNames
from mha_inspect.naming.pattern import STAGES
from mha_inspect.record.ops import Recording
from tests.recorded import record_opened

_SCORES = "batch heads query key"


@dataclass(frozen=True)
class Shown:
    found: Attention
    names: AxisNames
    recording: Recording

    def value(self, stage: str) -> torch.Tensor:
        return self.recording.values[self.found.stages[stage].id]

    def axes(self) -> dict[str, str]:
        return {stage: self.names.of_stage(stage) for stage in self.found.stages}

    def sizes(self) -> dict[str, int]:
        """The size of each name, which must be the same wherever it stands alone in a dimension."""
        sizes: dict[str, int] = {}
        for stage, pattern in self.axes().items():
            dims = re.findall(r"\([^)]*\)|\S+", pattern)
            shape = self.found.stages[stage].shape
            assert len(dims) == len(shape), (stage, pattern, shape)
            for dim, size in zip(dims, shape, strict=True):
                if dim.isidentifier():
                    assert sizes.setdefault(dim, size) == size, (stage, pattern, shape, sizes)
        sizes.setdefault("heads", self.names.num_heads)
        sizes.setdefault("head_dim", self.names.head_dim)
        sizes.setdefault("windows", self.names.num_windows)
        if "group" in self.words():
            sizes["kv_heads"] = self.names.num_kv_heads
            sizes["group"] = self.names.num_heads // self.names.num_kv_heads
        return sizes

    def words(self) -> set[str]:
        return set(re.findall(r"\w+", " ".join(self.axes().values())))

    def canonical(self, stage: str, target: str) -> torch.Tensor:
        """A stage in axes of one's choice; those that it has not are of size one, and batch takes in windows."""
        pattern = self.names.of_stage(stage)
        present = re.findall(r"\w+", pattern)
        for name in ("batch", "query", "key"):
            parts = [word for word in present if re.fullmatch(rf"{name}_\d", word)]
            parts = ["batch", "windows"] if name == "batch" and "windows" in present else parts
            target = target.replace(name, f"({' '.join(parts)})") if parts else target
        if "kv_heads" in present:
            target = target.replace("heads", "(kv_heads group)" if "group" in present else "kv_heads")
        words = re.findall(r"\w+|[()]", target)
        to = " ".join(word if word in (*present, "(", ")") else "1" for word in words)
        sizes = self.sizes()
        value = rearrange(
            self.value(stage), f"{pattern} -> {to}", **{name: sizes[name] for name in present if name in sizes}
        )
        if "kv_heads" in present and "group" not in present:
            value = value.repeat_interleave(self.names.num_heads // self.names.num_kv_heads, 1)
        return value.double()


def attentions(module: Any, *args: Any, grad: bool = False, **kwargs: Any) -> list[Shown]:
    """Run and record a forward, and find what is in it."""
    with torch.set_grad_enabled(grad):
        recording, _ = record_opened(module, *args, keep=True, **kwargs)
    graph = Graph(recording)
    return [Shown(found, AxisNames(found, graph.dimensions), recording) for found in attentions_of(graph)]


def assert_true(attention: Shown) -> None:
    """Names that are whole and the same everywhere, and q·kᵀ, softmax and weights·v as the stages say they are."""
    assert list(attention.found.stages) == [stage for stage in STAGES if stage in attention.found.stages]
    _assert_names_are_whole(attention)
    _assert_scores_are_products(attention)
    _assert_weights_average_values(attention, _weights_of(attention))


def _assert_names_are_whole(attention: Shown) -> None:
    for stage, pattern in attention.axes().items():
        words = re.findall(r"\w+", pattern)
        assert len(words) == len(set(words)), (stage, pattern)
        assert all(word.isidentifier() or word == "1" for word in words), (stage, pattern)


def _assert_scores_are_products(attention: Shown) -> None:
    scale = attention.found.scores_scale
    if "scores" not in attention.found.stages or scale is None:
        return
    q = attention.canonical("q_heads", "batch heads query head_dim")
    k = attention.canonical("k_heads", "batch heads key head_dim")
    assert_close(q @ k.transpose(-1, -2) * scale, attention.canonical("scores", _SCORES))


def _weights_of(attention: Shown) -> torch.Tensor:
    """Return the weights, `batch heads query key`, after comparing them with the softmax of the last scores."""
    stages = attention.found.stages
    last = "masked_scores" if "masked_scores" in stages else "scores"
    # Where the sum divides what the exponentials give with the values, there are no weights.
    if "weights" not in stages:
        return attention.canonical(last, _SCORES).softmax(-1)
    weights = attention.canonical("weights", _SCORES)
    masks_exponentials = attention.found.masks and last == "scores"
    if last in stages and attention.found.sinks is None and not masks_exponentials:
        assert_close(attention.canonical(last, _SCORES).softmax(-1), weights)
    return weights


def _assert_weights_average_values(attention: Shown, weights: torch.Tensor) -> None:
    value_dim = "v_head_dim" if "v_head_dim" in attention.words() else "head_dim"
    context = attention.canonical("context", f"batch heads query {value_dim}")
    assert_close(weights @ attention.canonical("v_heads", f"batch heads key {value_dim}"), context)
    if "concat" in attention.found.stages and not attention.found.branches and _only_moved(attention):
        assert_close(attention.canonical("concat", f"batch heads query {value_dim}"), context)


def _only_moved(attention: Shown) -> bool:
    """Whether nothing is done to the heads between the product and W_o."""
    tensor = attention.found.stages["concat"]
    while tensor.id != attention.found.stages["context"].id:
        op = attention.recording.producer(tensor)
        if op is None or op.kind not in ("view", "copy") or op.base_name in ("cat", "stack"):
            return False
        tensor = op.inputs[0]
    return True


def assert_close(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal to within float32's rounding, where neither was masked with a huge number."""
    left, right = torch.broadcast_tensors(left.nan_to_num(0, 0, 0), right.nan_to_num(0, 0, 0))
    seen = (left.abs() < 1e6) & (right.abs() < 1e6)
    torch.testing.assert_close(left[seen].double(), right[seen].double(), rtol=2e-4, atol=2e-4)

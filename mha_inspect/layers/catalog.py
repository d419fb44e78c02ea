"""List the attention layers that can be built by name: class, arguments, formula, and origin of the style.

This table imports no torch: it serves `--help`, completion and "did you mean". A layer's code is imported when it is
built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SpecError
from ..text import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from .spec import AttentionSpec, InputSpec, RunSpec

MaskStyle = Literal["boolean", "additive", "lowest", "ones"]
"""The form in which a layer takes its mask.

`boolean` (True: masked out) or additive, as it was given; `additive` with -inf; `lowest` with the lowest number of the
dtype; `ones` with 1 for masked-out keys, to be multiplied by -1e9.
"""

OPTIONAL = {
    "num_kv_heads": "every head has its own key and value head",
    "head_dim": "its heads have embed_dim / num_heads features",
    "rope": "it does not encode positions",
    "kdim": "its keys are as wide as its queries",
    "vdim": "its values are as wide as its queries",
    "add_bias_kv": "it appends no key or value",
    "add_zero_attn": "it appends no key or value",
    "dropout": "it has no dropout",
    "batch_first": "its inputs are batch first",
    "unbatched": "its inputs have a batch",
    "need_weights": "it always returns its weights",
}
"""The settings that some layers do not take, and why."""
USUAL = {"num_kv_heads": "num_heads", "kdim": "embed_dim", "vdim": "embed_dim"}
"""Sizes that have no effect when they equal another size."""

LETTERS = {"E": "embed_dim", "H": "num_heads", "G": "num_kv_heads", "D": "head_dim", "K": "kdim", "V": "vdim"}
"""The letters of a formula."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One implementation of attention."""

    name: str
    """Name on the command line."""
    summary: str
    """One line on the implementation."""
    weights: str = "4E²"
    """Formula of the number of weights, in `LETTERS`; adjacent factors are multiplied."""
    biases: str = "4E"
    split: str
    """The split into heads, as an einops pattern or a phrase."""
    origin: str
    """The origin of this style."""
    maker: str
    """The class or function that builds the layer: `.wide:WideAttention`, in a module of this folder."""
    arguments: str
    """Its arguments in order, by the names of the spec."""
    masks: MaskStyle | None = "boolean"
    """The form of its mask; None for the masks of torch's layer."""
    takes: frozenset[str] = frozenset()
    """The names of `OPTIONAL` that it takes; it takes every other setting."""
    whole_heads: bool = False
    """Whether a head has embed_dim features by default, instead of embed_dim / num_heads."""

    @property
    def parameter_formula(self) -> str:
        """Formula of the number of parameters of the layer with default settings."""
        return f"{self.weights} + {self.biases}"

    def formula(self, spec: AttentionSpec) -> str:
        """Return the formula of the number of parameters of a layer with these sizes.

        A projection of keys or values is as wide as its input. A learned key and value count as a bias each.
        """
        weights, biases = self.weights, self.biases if spec.bias else ""
        if "kdim" in self.takes:
            others = ["EK"] * (spec.key_width != spec.embed_dim) + ["EV"] * (spec.value_width != spec.embed_dim)
            vectors = 4 * spec.bias + 2 * spec.add_bias_kv
            weights, biases = " + ".join([f"{4 - len(others)}E²", *others]), f"{vectors}E" if vectors else ""
        elif self.whole_heads and spec.head_dim_given and spec.head_dim != spec.embed_dim:
            weights, biases = "4EHD", biases and "3HD + E"
        return " + ".join(filter(None, (weights, biases)))

    def spec(self, **settings: Any) -> AttentionSpec:
        """Return `AttentionSpec(**settings)` with the layer's own defaults. Raise its `SpecError`."""
        from .spec import AttentionSpec

        if self.whole_heads and settings.get("head_dim") is None:  # any number of heads fits the width
            settings["head_dim"] = settings.get("embed_dim", AttentionSpec.embed_dim)
        return AttentionSpec(**settings)

    def check(self, *parts: AttentionSpec | InputSpec | RunSpec) -> None:
        """Raise `SpecError`, with the layers that take it, for a setting that this layer does not take."""
        for name in (name for name in OPTIONAL if name not in self.takes):
            (part,) = (part for part in parts if name in part.__dataclass_fields__)
            value, default = getattr(part, name), part.__dataclass_fields__[name].default
            is_derived = name == "head_dim" and not getattr(part, "head_dim_given", True)
            if is_derived or value == default or (name in USUAL and value == getattr(part, USUAL[name])):
                continue
            others = ", ".join(kind.name for kind in LAYERS.values() if name in kind.takes)
            typed = f"{name} {str(value).lower()}"
            raise SpecError(f"layer {self.name} does not take {typed}: {OPTIONAL[name]}. Layers that do: {others}.")

    def build(self, spec: AttentionSpec, device: str = "cpu") -> nn.Module:
        """Import the layer's code (this imports torch) and build it, with the dtype and the mode of the spec.

        Its parameters are drawn from spec.seed in float32 on the CPU, then cast and moved, so that every device and
        dtype has the same numbers up to rounding. On `meta` they have shapes only. The global generators and default
        dtype stay unchanged.
        """
        import torch

        module, _, name = self.maker.partition(":")
        make: Callable[..., nn.Module] = getattr(import_module(module, __package__), name)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("meta" if device == "meta" else "cpu"), torch.random.fork_rng(devices=[]):
                # Not `torch.manual_seed`: it would also seed the other devices, which fork_rng does not restore.
                torch.default_generator.manual_seed(spec.seed % 2**64)
                layer = make(*attrgetter(*self.arguments.split())(spec))
        finally:
            torch.set_default_dtype(before)
        return layer.to(device=device, dtype=getattr(torch, spec.dtype)).train(spec.training)


def evaluate(formula: str, spec: AttentionSpec) -> int:
    """Return the value of a formula, e.g. `2E² + E(K + V) + 4E`, for a layer of these sizes."""
    sizes = (spec.embed_dim, spec.num_heads, spec.kv_heads, int(spec.head_dim), spec.key_width, spec.value_width)
    text = re.sub(r"(?<=[\dA-Z)²])(?=[A-Z(])", "*", formula).replace("²", "**2")
    return int(eval(text, {"__builtins__": {}}, dict(zip(LETTERS, sizes, strict=True))))


LAYERS: dict[str, LayerKind] = {
    kind.name: kind
    for kind in (
        LayerKind(
            name="torch",
            summary="torch.nn.MultiheadAttention: one packed projection, heads folded into the batch",
            split="query batch (heads head_dim) -> (batch heads) query head_dim",
            origin="PyTorch",
            maker="torch.nn:MultiheadAttention",
            arguments="embed_dim num_heads dropout bias add_bias_kv add_zero_attn kdim vdim batch_first",
            masks=None,
            takes=frozenset(
                {"kdim", "vdim", "add_bias_kv", "add_zero_attn", "dropout", "batch_first", "unbatched", "need_weights"}
            ),
        ),
        LayerKind(
            name="split-heads",
            summary="wq, wk, wv and dense; view and permute split the heads; adds mask * -1e9",
            split="batch seq (heads head_dim) -> batch heads seq head_dim",
            origin="TensorFlow's transformer tutorial",
            maker=".split_heads:SplitHeadsAttention",
            arguments="embed_dim num_heads bias",
            masks="ones",
        ),
        LayerKind(
            name="fold-heads",
            summary="lazy Linears for inputs of any width; einops folds the heads into the batch for one bmm",
            split="batch seq (heads head_dim) -> (batch heads) seq head_dim",
            origin="Dive into Deep Learning, with einops",
            maker=".fold_heads:make",
            arguments="embed_dim num_heads key_width value_width dropout bias",
            takes=frozenset({"kdim", "vdim", "dropout"}),
        ),
        LayerKind(
            name="bert",
            summary="query, key and value projections, scores / √attention_head_size, no output projection",
            weights="3E²",
            biases="3E",
            split="... seq (heads head_dim) -> ... heads seq head_dim",
            origin="BERT, BertSelfAttention in Hugging Face transformers",
            maker=".bert:BertSelfAttention",
            arguments="embed_dim num_heads dropout bias",
            masks="lowest",
            takes=frozenset({"dropout", "unbatched", "need_weights"}),
        ),
        LayerKind(
            name="per-head",
            summary="the paper's formula, word for word: a loop over heads with their own W_q, W_k, W_v; Concat, W_o",
            split="no split: each head has its own matrix (head_dim embed)",
            origin="Attention Is All You Need, section 3.2.2",
            maker=".per_head:PerHeadAttention",
            arguments="embed_dim num_heads kdim vdim bias",
            takes=frozenset({"kdim", "vdim", "unbatched", "need_weights"}),
        ),
        LayerKind(
            name="grouped-query",
            summary="fewer key and value heads than query heads, repeated; optional rotary positions",
            weights="2EHD + 2EGD",
            biases="HD + 2GD + E",
            split="batch seq (heads head_dim) -> batch heads seq head_dim, key and value heads repeated",
            origin="LLaMA",
            maker=".grouped_query:GroupedQueryAttention",
            arguments="embed_dim num_heads kv_heads head_dim rope dropout bias",
            masks="additive",
            takes=frozenset({"num_kv_heads", "head_dim", "rope", "dropout", "need_weights"}),
        ),
        LayerKind(
            name="narrow",
            summary="each head gets its own slice of the embedding before any projection",
            weights="E² + 3ED",
            biases="4E",
            split="batch seq (heads head_dim) -> heads batch seq head_dim, of the input itself",
            origin="articles that say the input is split; Peter Bloem's narrow self-attention",
            maker=".narrow:NarrowAttention",
            arguments="embed_dim num_heads bias",
            takes=frozenset({"unbatched", "need_weights"}),
        ),
        LayerKind(
            name="wide",
            summary="every head has embed_dim (or head_dim) features of its own: parameters grow with the heads",
            weights="4HE²",
            biases="3HE + E",
            split="batch seq (heads head_dim) -> batch heads seq head_dim, with head_dim = embed_dim",
            origin="Peter Bloem's wide self-attention",
            maker=".wide:WideAttention",
            arguments="embed_dim num_heads head_dim bias",
            takes=frozenset({"head_dim", "need_weights"}),
            whole_heads=True,
        ),
    )
}


def find_layer(name: str) -> LayerKind:
    """Return the layer of this name. Raise `SpecError`, with the nearest name, if there is none."""
    if name in LAYERS:
        return LAYERS[name]
    raise SpecError(f"layer {name!r} was not found. Layers: {', '.join(LAYERS)}.{did_you_mean(name, LAYERS)}")

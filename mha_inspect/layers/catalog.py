"""The attention layers that can be built by name.

This table imports no torch: it serves `--help`, completion and "did you mean". A layer's code is imported when it is
built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from ..errors import SpecError
from ..text import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from .spec import AttentionSpec

MaskStyle = Literal["boolean", "additive", "lowest", "ones"]
"""How a layer takes its one mask.

`boolean` (True: not allowed) or additive as it was given, `additive` with -inf, `lowest` with the lowest number of the
dtype, `ones` where a query may not look, to be multiplied by -1e9.
"""


@dataclass(frozen=True)
class LayerKind:
    """One way to write attention."""

    name: str
    """Name on the command line."""
    summary: str
    """One line: how it is written."""
    weights: str
    """Closed formula of the number of weights; `layers.spec.symbols` says what its letters are."""
    biases: str
    """That of the number of biases."""
    split: str
    """How the heads are split, as an einops pattern or a phrase."""
    origin: str
    """Where this style comes from."""
    maker: str
    """Module under mha_inspect.layers, and what in it builds the layer as torch would draw it: `wide.WideAttention`."""
    arguments: str
    """What that takes, in order, by the names of the spec."""
    masks: MaskStyle | None = "boolean"
    """None: as torch's layer takes them."""
    takes: frozenset[str] = frozenset()
    """Those of `mha_inspect.layers.settings.OPTIONAL` that it has a use for; it takes every other setting."""
    whole_heads: bool = False
    """Whether a head has embed_dim features where no head_dim is given, and not embed_dim / num_heads of them."""

    @property
    def parameter_formula(self) -> str:
        """Closed formula of the number of parameters, as the layer is by default."""
        return f"{self.weights} + {self.biases}"

    def own(self, spec: AttentionSpec) -> AttentionSpec:
        """Return a spec that was made without knowing of the layer with the defaults that are the layer's own."""
        return replace(spec, head_dim=spec.embed_dim) if self.whole_heads and not spec.head_dim_given else spec

    def formula(self, spec: AttentionSpec) -> str:
        """Return the closed formula of the number of parameters of a layer with these sizes.

        What reads a key or a value is as wide as that is; a learned key and value are a bias each.
        """
        weights, biases = self.weights, self.biases if spec.bias else ""
        if "kdim" in self.takes:
            others = ["EK"] * (spec.key_width != spec.embed_dim) + ["EV"] * (spec.value_width != spec.embed_dim)
            vectors = 4 * spec.bias + 2 * spec.add_bias_kv
            weights, biases = " + ".join([f"{4 - len(others)}E²", *others]), f"{vectors}E" if vectors else ""
        elif self.whole_heads and spec.head_dim_given and spec.head_dim != spec.embed_dim:
            weights, biases = "4EHD", biases and "3HD + E"
        return " + ".join(filter(None, (weights, biases)))

    def build(self, spec: AttentionSpec, device: str = "cpu") -> nn.Module:
        """Import the layer's code (this imports torch) and build it: in spec.dtype, in training or eval mode as asked.

        Its parameters are drawn from spec.seed on the CPU and then moved, so that they are the same on every device; on
        `meta` they have shapes and no content.
        """
        from .building import build_seeded

        module, _, name = self.maker.partition(".")
        make: Callable[..., nn.Module] = getattr(import_module(f"{__package__}.{module}"), name)
        arguments = attrgetter(*self.arguments.split())(self.own(spec))
        return build_seeded(lambda: make(*arguments), spec, device)


LAYERS: dict[str, LayerKind] = {
    kind.name: kind
    for kind in (
        LayerKind(
            name="torch",
            summary="torch.nn.MultiheadAttention: one packed projection, heads folded into the batch",
            weights="4E²",
            biases="4E",
            split="query batch (heads head_dim) -> (batch heads) query head_dim",
            origin="PyTorch",
            maker="torch_mha.MultiheadAttention",
            arguments="embed_dim num_heads dropout bias add_bias_kv add_zero_attn kdim vdim batch_first",
            masks=None,
            takes=frozenset(
                {"kdim", "vdim", "add_bias_kv", "add_zero_attn", "dropout", "batch_first", "unbatched", "need_weights"}
            ),
        ),
        LayerKind(
            name="split-heads",
            summary="wq, wk, wv and a dense; view and permute into heads; the mask added as mask * -1e9",
            weights="4E²",
            biases="4E",
            split="batch seq (heads head_dim) -> batch heads seq head_dim",
            origin="TensorFlow's transformer tutorial",
            maker="split_heads.SplitHeadsAttention",
            arguments="embed_dim num_heads bias",
            masks="ones",
        ),
        LayerKind(
            name="fold-heads",
            summary="lazy Linears for inputs of any width; einops folds the heads into the batch for one bmm",
            weights="4E²",
            biases="4E",
            split="batch seq (heads head_dim) -> (batch heads) seq head_dim",
            origin="Dive into Deep Learning, with einops",
            maker="fold_heads.make",
            arguments="embed_dim num_heads key_width value_width dropout bias",
            takes=frozenset({"kdim", "vdim", "dropout"}),
        ),
        LayerKind(
            name="bert",
            summary="query, key and value over hidden_size, scores / √attention_head_size, no output projection",
            weights="3E²",
            biases="3E",
            split="... seq (heads head_dim) -> ... heads seq head_dim",
            origin="BERT, BertSelfAttention in Hugging Face transformers",
            maker="bert.BertSelfAttention",
            arguments="embed_dim num_heads dropout bias",
            masks="lowest",
            takes=frozenset({"dropout", "unbatched", "need_weights"}),
        ),
        LayerKind(
            name="per-head",
            summary="the paper's formula read literally: W_q, W_k, W_v of its own for each head, a loop, Concat, W_o",
            weights="4E²",
            biases="4E",
            split="nothing is split: a matrix (head_dim embed) for each head",
            origin="Attention Is All You Need, section 3.2.2",
            maker="per_head.PerHeadAttention",
            arguments="embed_dim num_heads kdim vdim bias",
            takes=frozenset({"kdim", "vdim", "unbatched", "need_weights"}),
        ),
        LayerKind(
            name="grouped-query",
            summary="fewer key and value heads than query heads, repeated; rotary positions on request",
            weights="2EHD + 2EGD",
            biases="HD + 2GD + E",
            split="batch seq (heads head_dim) -> batch heads seq head_dim, key and value heads repeated",
            origin="LLaMA",
            maker="grouped_query.GroupedQueryAttention",
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
            maker="narrow.NarrowAttention",
            arguments="embed_dim num_heads bias",
            takes=frozenset({"unbatched", "need_weights"}),
        ),
        LayerKind(
            name="wide",
            summary="every head has the full embed_dim (or head_dim) to itself: the parameters grow with the heads",
            weights="4HE²",
            biases="3HE + E",
            split="batch seq (heads head_dim) -> batch heads seq head_dim, with head_dim = embed_dim",
            origin="Peter Bloem's wide self-attention",
            maker="wide.WideAttention",
            arguments="embed_dim num_heads head_dim bias",
            takes=frozenset({"head_dim", "need_weights"}),
            whole_heads=True,
        ),
    )
}


def find_layer(name: str) -> LayerKind:
    """The layer of this name. Raises `SpecError`, with the nearest name, when there is none."""
    if name in LAYERS:
        return LAYERS[name]
    raise SpecError(f"layer {name!r} is not one that can be built: {', '.join(LAYERS)}.{did_you_mean(name, LAYERS)}")

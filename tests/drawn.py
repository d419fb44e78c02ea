"""Settings drawn by hypothesis for every layer, and what attention gives for them, written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from hypothesis import strategies as st
from torch import Tensor

from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import InputSpec, RunSpec
from mha_inspect.naming.canonical import NamedAxes, own_axes
from mha_inspect.running.subject import Run

from .built import Layer, built_layer
from .layers.declared import read_weights


def sizes_of(forward: Layer) -> dict[str, int]:
    """The sizes of the axes that share a dimension with others in some layout."""
    spec = forward.spec
    return {
        "batch": forward.inputs.batch,
        "heads": spec.num_heads,
        "kv_heads": spec.kv_heads,
        "group": spec.num_heads // spec.kv_heads,
        "head_dim": int(spec.head_dim),
    }


LOOPS = ("per-head", "narrow")
"""Layers that compute one head after the other: what is shown of a single head is the first's."""


@dataclass(frozen=True)
class Setting:
    """A layer, its spec, its inputs and its run, as keyword arguments."""

    layer: str
    spec: dict[str, Any]
    inputs: dict[str, Any]
    run: dict[str, Any]

    def build(self) -> Layer:
        """The forward pass, with biases that are not zero."""
        spec = LAYERS[self.layer].spec(**self.spec)
        forward = built_layer(spec, InputSpec(**self.inputs), RunSpec(**self.run), self.layer)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in forward.module.parameters():
                if parameter.dim() == 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return forward


@st.composite
def settings_of(draw: Any, dtypes: tuple[str, ...] = ("float64",), layers: tuple[str, ...] = tuple(LAYERS)) -> Setting:
    """Any setting that a layer takes, at small sizes. No row is without keys."""
    layer = draw(st.sampled_from(layers))
    takes = LAYERS[layer].takes

    def maybe(name: str, values: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {name: draw(values)} if name in takes and draw(st.booleans()) else {}

    heads = draw(st.sampled_from((1, 2, 3, 4, 6)))
    head_dim = draw(st.sampled_from((2, 3, 5, 7)))
    spec = {
        "embed_dim": heads * head_dim,
        "num_heads": heads,
        "dtype": draw(st.sampled_from(dtypes)),
        "bias": draw(st.booleans()),
        "training": draw(st.booleans()),
        **maybe("num_kv_heads", st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        **maybe("head_dim", st.sampled_from((1, 2, 4, 9))),
        **maybe("kdim", st.sampled_from((1, 11, 13))),
        **maybe("vdim", st.sampled_from((1, 11, 17))),
        **maybe("add_bias_kv", st.just(True)),
        **maybe("add_zero_attn", st.just(True)),
        **maybe("batch_first", st.just(False)),
        **maybe("dropout", st.just(0.5)),
    }
    if spec.get("head_dim", head_dim) % 2 == 0:
        spec |= maybe("rope", st.just(True))
    inputs: dict[str, Any] = {"seq_len": draw(st.sampled_from((1, 2, 3, 7))), **maybe("unbatched", st.just(True))}
    inputs["batch"] = 1 if inputs.get("unbatched") else draw(st.sampled_from((1, 2, 5)))
    if draw(st.booleans()):
        inputs["key_len"] = draw(st.sampled_from((1, 2, 4, 11)))
    keys = inputs.get("key_len", inputs["seq_len"])
    inputs["causal"] = draw(st.booleans())
    if draw(st.booleans()):
        inputs["padding"] = tuple(draw(st.integers(0, keys - 1)) for _ in range(inputs["batch"]))
    run = {"grad": draw(st.booleans()), "average_weights": draw(st.booleans())}
    if heads > 1:
        run |= maybe("need_weights", st.just(False))
    return Setting(layer, spec, inputs, run)


class Case:
    """A drawn setting, run opened with its tensors kept, beside the reference."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.forward = setting.build()
        self.seen: Run = self.forward.recorded(keep=True)
        self.axes: NamedAxes = own_axes(replace(self.seen, wider=self.forward.wider_run(self.seen)))

    @property
    def extra_keys(self) -> int:
        """Keys that the layer appends itself, which no mask covers."""
        return int(self.forward.spec.add_bias_kv) + int(self.forward.spec.add_zero_attn)

    @property
    def drops(self) -> bool:
        """Whether dropout is at work, which no reference can follow."""
        return self.forward.spec.training and self.forward.spec.dropout > 0

    def value(self, stage: str) -> Tensor:
        """The content of a stage, as it was computed."""
        return self.seen.recording.values[self.seen.attentions[0][0].stages[stage].id].detach()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The true size of each axis, from what was asked. `key` is what goes in; the layer may append its own."""
        spec, inputs = self.forward.spec, self.forward.inputs
        return {
            "batch": inputs.batch,
            "query": inputs.seq_len,
            "key": inputs.key_len or inputs.seq_len,
            "heads": spec.num_heads,
            "kv_heads": spec.kv_heads,
            "group": spec.num_heads // spec.kv_heads,
            "head_dim": int(spec.head_dim),
            "embed": spec.embed_dim,
            "kdim": spec.key_width,
            "vdim": spec.value_width,
        }

    def sizes_in(self, stage: str) -> dict[str, int]:
        """The same, of a stage: behind the heads there are the keys that the layer appends."""
        appends = stage not in ("query", "key", "value", "q_proj", "k_proj", "v_proj")
        return {**self.sizes, "key": self.sizes["key"] + appends * self.extra_keys}

    @cached_property
    def barred(self) -> Tensor:
        """`batch heads query key`: where a query may not look."""
        inputs, sizes = self.forward.inputs, self.sizes
        barred = torch.zeros(sizes["batch"], sizes["heads"], sizes["query"], sizes["key"], dtype=torch.bool)
        if inputs.causal:
            barred |= torch.arange(sizes["key"]) > torch.arange(sizes["query"])[:, None]
        for row, padded in zip(
            barred, inputs.padding * (1 if len(inputs.padding) > 1 else sizes["batch"]), strict=False
        ):
            row[..., sizes["key"] - padded :] = True
        return nn_pad(barred, self.extra_keys)

    @cached_property
    def reference(self) -> dict[str, Tensor]:
        """Every stage in its canonical axes, from the textbook's formulas and the layer's own weights in float64."""
        inputs, spec, given = self.forward.inputs, self.forward.spec, read_weights(self.forward.module).tensors()
        w = {name: tensor.detach().double() for name, tensor in given.items()}
        found: dict[str, Tensor] = {}
        heads: dict[str, Tensor] = {}
        for name, tensor in zip(("query", "key", "value"), self.forward.tensors, strict=True):
            x = tensor[None] if inputs.unbatched else tensor if spec.batch_first else tensor.transpose(0, 1)
            letter = name[0]
            found[name] = x.double()
            projected = torch.einsum("bne,hde->bnhd", x.double(), w[f"w_{letter}"]) + w.get(f"b_{letter}", 0)
            found[f"{letter}_proj"] = projected.flatten(2)
            heads[letter] = projected.transpose(1, 2)
        for letter in "kv":
            if f"bias_{letter}" in w:
                learned = w[f"bias_{letter}"][None, :, None].expand(inputs.batch, -1, -1, -1)
                heads[letter] = torch.cat((heads[letter], learned), 2)
            if spec.add_zero_attn:
                heads[letter] = torch.nn.functional.pad(heads[letter], (0, 0, 0, 1))
        if spec.rope:
            heads |= {letter: rotated(heads[letter]) for letter in "qk"}
        group = spec.num_heads // spec.kv_heads
        q, k, v = (heads[letter].repeat_interleave(1 if letter == "q" else group, 1) for letter in "qkv")
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        masked = scores.masked_fill(self.barred, -math.inf)
        weights = masked.softmax(-1)
        concat = rearrange(weights @ v, "batch heads query head_dim -> batch query (heads head_dim)")
        found |= {"q_heads": q, "k_heads": k, "v_heads": v, "scores": scores, "masked_scores": masked}
        found |= {"weights": weights, "context": weights @ v, "concat": concat}
        if "w_o" in w:
            found["output"] = concat @ w["w_o"].flatten(1).T + w.get("b_o", 0)
        return found

    def expected(self, stage: str) -> Tensor:
        """The reference of what is shown: of the first head alone, where the layer loops over its heads."""
        whole = self.reference[stage]
        if self.setting.layer not in LOOPS or stage in ("query", "key", "value", "concat", "output"):
            return whole
        if stage.endswith("_proj"):
            return whole[..., : int(self.forward.spec.head_dim)]
        return whole[:, :1]


def nn_pad(mask: Tensor, keys: int) -> Tensor:
    """The mask with columns of False for keys that it does not cover."""
    return torch.nn.functional.pad(mask, (0, keys))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions by complex numbers: pair (i, i + head_dim / 2) turned by position / 10000^(2i / head_dim)."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2]).double(), 10000.0 ** -(torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def dims_of(pattern: str) -> list[list[str]]:
    """The names in each dimension of an einops pattern."""
    dims: list[list[str]] = []
    inside = False
    for word in pattern.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            dims += [[]] if inside else []
        elif inside:
            dims[-1].append(word)
        else:
            dims.append([word])
    return dims

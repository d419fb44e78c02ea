"""What each layer of the catalog declares of its parameters, row by row: an oracle for what is read off a run.

Written by hand from the layers' own code. Weights are carried from layer to layer by it, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from mha_inspect.layers.spec import AttentionSpec
from mha_inspect.layers.spec import spec_of as spec_of_torchs
from mha_inspect.reports.params import HeadSlice

Bounds = tuple[int, int]
"""Start included, stop not."""


@dataclass(frozen=True)
class Part:
    """A matrix or bias that is a part of a parameter, or the whole of it."""

    name: str
    """`W_q`, `W_k`, `W_v`, `W_o`, `b_q`, `b_k`, `b_v`, `b_o`; `bias_k`, `bias_v` for a learned key and value."""
    rows: Bounds
    """For a bias: its elements, counted along its one dimension that is not 1."""
    columns: Bounds | None = None
    """None for a bias."""
    split: Literal["rows", "columns"] | None = "rows"
    """Along what the heads lie in it, one after the other, in equal runs; None where it belongs to no head."""
    heads: int = 1
    """How many heads it is split over (key/value heads for W_k and W_v)."""
    first_head: int = 0
    """The number of the first of them: a parameter of its own for each head has `heads=1, first_head=h`."""

    def slices(self) -> tuple[HeadSlice, ...]:
        """The run of each head, in order; together they are the whole part, each element once."""
        if self.split is None:
            return ()
        if self.split == "rows":
            return tuple(HeadSlice(head, self.name, run, self.columns) for head, run in self._runs(self.rows))
        assert self.columns is not None, "a bias has no columns to split"
        return tuple(HeadSlice(head, self.name, self.rows, run) for head, run in self._runs(self.columns))

    def _runs(self, bounds: Bounds) -> list[tuple[int, Bounds]]:
        start, stop = bounds
        width, rest = divmod(stop - start, self.heads)
        assert rest == 0, f"{self.name}: {stop - start} cannot be split over {self.heads} heads"
        return [(self.first_head + n, (start + n * width, start + (n + 1) * width)) for n in range(self.heads)]


@dataclass(frozen=True)
class Role:
    """What one parameter is for."""

    axes: str
    """What its dimensions are, as an einops pattern."""
    text: str
    """In words, with the real numbers."""
    parts: tuple[Part, ...] = ()

    def slices(self) -> tuple[HeadSlice, ...]:
        """Which rows and columns belong to each head, part by part."""
        return tuple(piece for part in self.parts for piece in part.slices())


def stacked(names: tuple[str, ...], sizes: tuple[int, ...], columns: Bounds | None, heads: int) -> tuple[Part, ...]:
    """Parts one above the other, each split over the heads by rows."""
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(Part(name, (start, start + size), columns, heads=heads))
        start += size
    return tuple(parts)


def ranges(parts: tuple[Part, ...]) -> str:
    """Their rows as people count them, both ends included: `0–511, 512–1023`."""
    return ", ".join(f"{part.rows[0]}–{part.rows[1] - 1}" for part in parts)


def projection(name: str, letter: str, axis: str, width: int, heads: int, head_dim: int) -> dict[str, Role]:
    """One Linear for all heads, their rows one after the other: W_q, W_k or W_v by `letter`, from `axis` of `width`."""
    rows = (0, heads * head_dim)
    return {
        f"{name}.weight": Role(
            f"(heads head_dim) {axis}",
            f"W_{letter}: rows are the heads stacked, {head_dim} each",
            (Part(f"W_{letter}", rows, (0, width), heads=heads),),
        ),
        f"{name}.bias": Role("(heads head_dim)", f"b_{letter}", (Part(f"b_{letter}", rows, heads=heads),)),
    }


def one_head(
    name: str, letter: str, head: int, width: int, head_dim: int, axes: str, reads: str = ""
) -> dict[str, Role]:
    """A Linear of one head's own."""
    rows = (0, head_dim)
    return {
        f"{name}.weight": Role(
            axes,
            f"W_{letter} of head {head}{reads}",
            (Part(f"W_{letter}", rows, (0, width), first_head=head),),
        ),
        f"{name}.bias": Role("head_dim", f"b_{letter} of head {head}", (Part(f"b_{letter}", rows, first_head=head),)),
    }


def output_projection(name: str, embed_dim: int, heads: int, head_dim: int) -> dict[str, Role]:
    """One Linear over the heads side by side."""
    rows, columns = (0, embed_dim), (0, heads * head_dim)
    return {
        f"{name}.weight": Role(
            "embed (heads head_dim)",
            f"W_o: columns are the heads side by side, {head_dim} each",
            (Part("W_o", rows, columns, split="columns", heads=heads),),
        ),
        f"{name}.bias": Role("embed", "b_o: added once, not split by head", (Part("b_o", rows, split=None),)),
    }


def _torch_mha(spec: AttentionSpec) -> dict[str, Role]:
    embed, heads, head_dim = spec.embed_dim, spec.num_heads, int(spec.head_dim)
    packed = stacked(("W_q", "W_k", "W_v"), (embed, embed, embed), (0, embed), heads)
    biases = stacked(("b_q", "b_k", "b_v"), (embed, embed, embed), None, heads)
    appended = {
        "bias_k": "learned, and appended to the keys",
        "bias_v": "learned, and appended to the values",
    }
    table = {
        "in_proj_weight": Role("(qkv heads head_dim) embed", f"W_q, W_k, W_v stacked: rows {ranges(packed)}", packed),
        "in_proj_bias": Role("(qkv heads head_dim)", f"b_q, b_k, b_v concatenated: elements {ranges(biases)}", biases),
        **{
            name: Role("1 1 (heads head_dim)", text, (Part(name, (0, embed), heads=heads),))
            for name, text in appended.items()
        },
        **output_projection("out_proj", embed, heads, head_dim),
    }
    if spec.key_width != embed or spec.value_width != embed:
        del table["in_proj_weight"]
        for letter, axis, width in widths_of(spec):
            role = projection("", letter, axis, width, heads, head_dim)[".weight"]
            table[f"{letter}_proj_weight"] = role
    return table


def widths_of(spec: AttentionSpec) -> tuple[tuple[str, str, int], ...]:
    """What W_q, W_k and W_v read: its letter, the name of the axis, and how wide that is."""
    widths = (("q", "embed", spec.embed_dim), ("k", "kdim", spec.key_width), ("v", "vdim", spec.value_width))
    # The same number bears the same name.
    return tuple((letter, "embed" if width == spec.embed_dim else axis, width) for letter, axis, width in widths)


def _linears(q: str, k: str, v: str, o: str = "") -> Callable[[AttentionSpec], dict[str, Role]]:
    """Roles of a layer with one Linear for each of W_q, W_k, W_v and W_o, by their names."""

    def roles(spec: AttentionSpec) -> dict[str, Role]:
        heads, head_dim, table = spec.num_heads, int(spec.head_dim), dict[str, Role]()
        for name, (letter, axis, width) in zip((q, k, v), widths_of(spec), strict=True):
            table |= projection(name, letter, axis, width, heads, head_dim)
        return table | (output_projection(o, spec.embed_dim, heads, head_dim) if o else {})

    return roles


def _per_head(spec: AttentionSpec) -> dict[str, Role]:
    head_dim = int(spec.head_dim)
    table = output_projection("W_o", spec.embed_dim, spec.num_heads, head_dim)
    for letter, axis, width in widths_of(spec):
        for head in range(spec.num_heads):
            table |= one_head(f"W_{letter}.{head}", letter, head, width, head_dim, f"head_dim {axis}")
    return table


def _grouped_query(spec: AttentionSpec) -> dict[str, Role]:
    embed, head_dim = spec.embed_dim, int(spec.head_dim)
    table = projection("q_proj", "q", "embed", embed, spec.num_heads, head_dim)
    for letter in ("k", "v"):
        shared = projection(f"{letter}_proj", letter, "embed", embed, spec.kv_heads, head_dim)
        group = spec.num_heads // spec.kv_heads
        for name, role in shared.items():
            axes = role.axes.replace("heads", "kv_heads")
            text = role.text if group == 1 else f"{role.text}, each for {group} query heads"
            table[name] = replace(role, axes=axes, text=text)
    return table | output_projection("o_proj", embed, spec.num_heads, head_dim)


def _narrow(spec: AttentionSpec) -> dict[str, Role]:
    width = int(spec.head_dim)
    table = output_projection("unifyheads", spec.embed_dim, spec.num_heads, width)
    for name, letter in (("toqueries", "q"), ("tokeys", "k"), ("tovalues", "v")):
        for head in range(spec.num_heads):
            reads = f": it reads features {head * width}–{(head + 1) * width - 1} of the embedding and no others"
            table |= one_head(f"{name}.{head}", letter, head, width, width, "head_dim head_dim", reads)
    return table


ROLES = {
    "torch": _torch_mha,
    "split-heads": _linears("wq", "wk", "wv", "dense"),
    "fold-heads": _linears("W_q", "W_k", "W_v", "W_o"),
    "bert": _linears("query", "key", "value"),
    "per-head": _per_head,
    "grouped-query": _grouped_query,
    "narrow": _narrow,
    "wide": _linears("toqueries", "tokeys", "tovalues", "unifyheads"),
}
"""By the name of the layer, what makes a table of roles of a spec."""

_LINEARS = {
    "SplitHeadsAttention": ("split-heads", "wq", "wk", "wv", "dense"),
    "FoldHeadsAttention": ("fold-heads", "W_q", "W_k", "W_v", "W_o"),
    "BertSelfAttention": ("bert", "query", "key", "value", "query"),
    "PerHeadAttention": ("per-head", "W_q", "W_k", "W_v", "W_o"),
    "GroupedQueryAttention": ("grouped-query", "q_proj", "k_proj", "v_proj", "o_proj"),
    "NarrowAttention": ("narrow", "toqueries", "unifyheads", "unifyheads", "unifyheads"),
    "WideAttention": ("wide", "toqueries", "tokeys", "tovalues", "unifyheads"),
}
"""A layer's class, to its name and the Linears that tell the widths of query, key, value and output."""


def spec_of(module: Any) -> AttentionSpec:
    """The sizes that a layer has."""
    if isinstance(module, nn.MultiheadAttention):
        return spec_of_torchs(module)
    parts = [getattr(module, path) for path in _LINEARS[type(module).__name__][1:]]
    q, k, v, o = (part[0] if isinstance(part, nn.ModuleList) else part for part in parts)
    heads = (getattr(module, name, None) for name in ("num_heads", "num_attention_heads", "heads"))
    return AttentionSpec(
        embed_dim=o.out_features,
        num_heads=next(filter(None, heads), None) or len(module.W_q),
        num_kv_heads=getattr(module, "num_key_value_heads", None),
        head_dim=getattr(module, "head_dim", getattr(module, "k", None)),
        kdim=k.in_features,
        vdim=v.in_features,
        bias=q.bias is not None,
    )


def places_of(module: nn.Module) -> dict[str, tuple[Tensor, ...]]:
    """Views into the parameters of a layer, one a head, by part; of b_o one. Writing to a view writes to the parameter.

    Where head i reads slice i of the embedding only, W_q, W_k and W_v have those columns and no others.
    """
    name, *_ = _LINEARS.get(type(module).__name__, ("torch",))
    roles = ROLES[name](spec_of(module))
    views: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, parameter in module.named_parameters():
        for part in roles[name].parts:
            for piece in part.slices() or (HeadSlice(0, part.name, part.rows, part.columns),):
                views[part.name][piece.head] = _view(parameter.detach(), piece)
    return {part: tuple(heads[head] for head in sorted(heads)) for part, heads in views.items()}


def _view(parameter: Tensor, piece: HeadSlice) -> Tensor:
    if piece.columns is None:
        # Of a bias, also of torch's `1 1 embed`.
        return parameter.view(-1)[slice(*piece.rows)]
    return parameter[slice(*piece.rows), slice(*piece.columns)]


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights of one attention layer, by head. Matrices are laid out as nn.Linear's: `out in`.

    W_q, W_k and W_v are `heads head_dim embed`, the last two with key heads, W_o is `embed heads head_dim`, None
    where there is none; b_o is `embed`, the other biases, and a learned key and value, are `heads head_dim`.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor | None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None
    bias_k: Tensor | None = None
    bias_v: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.w_q.shape[0]

    @property
    def head_dim(self) -> int:
        return self.w_q.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, of those that there are."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def canonical_weights(spec: AttentionSpec) -> AttentionWeights:
    """Weights drawn from spec.seed, by Xavier's rule, with biases that are not zero, so that a mistake in one shows.

    As flat matrices `(heads head_dim) embed` they do not depend on num_heads, and W_q and W_o not on num_kv_heads
    either: each is drawn from a stream of its own, in float64, and then cast to spec.dtype.
    """
    features, kv_features = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def draw(stream: int, *shape: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed((spec.seed * 1_000_003 + stream) % 2**63)
        bound = math.sqrt(6 / sum(shape)) if len(shape) == 2 else 0.5
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        return ((2 * uniform - 1) * bound).to(getattr(torch, spec.dtype))

    def by_head(matrix: Tensor, heads: int) -> Tensor:
        return matrix.reshape(heads, spec.head_dim, *matrix.shape[1:])

    return AttentionWeights(
        w_q=by_head(draw(0, features, spec.embed_dim), spec.num_heads),
        w_k=by_head(draw(1, kv_features, spec.key_width), spec.kv_heads),
        w_v=by_head(draw(2, kv_features, spec.value_width), spec.kv_heads),
        w_o=draw(3, spec.embed_dim, features).reshape(spec.embed_dim, spec.num_heads, spec.head_dim),
        b_q=by_head(draw(4, features), spec.num_heads) if spec.bias else None,
        b_k=by_head(draw(5, kv_features), spec.kv_heads) if spec.bias else None,
        b_v=by_head(draw(6, kv_features), spec.kv_heads) if spec.bias else None,
        b_o=draw(7, spec.embed_dim) if spec.bias else None,
        bias_k=by_head(draw(8, features), spec.num_heads) if spec.add_bias_kv else None,
        bias_v=by_head(draw(9, features), spec.num_heads) if spec.add_bias_kv else None,
    )


def read_weights(module: nn.Module) -> AttentionWeights:
    """A copy of the layer's weights, by head.

    Where head i reads slice i of the embedding only (narrow), its matrices are given with zeros for all the rest: that
    is what they compute."""
    places = places_of(module)
    tensors = {part.lower(): torch.stack(heads, dim=int(part == "W_o")) for part, heads in places.items()}
    if "b_o" in places:
        tensors["b_o"] = places["b_o"][0].clone()
    if _is_sliced(module, places):
        # Not torch.block_diag(...): that would lose the sign of a zero. Each block is put where it is.
        for name in ("w_q", "w_k", "w_v"):
            heads, width, _ = tensors[name].shape
            blocks, tensors[name] = tensors[name], tensors[name].new_zeros(heads, width, heads * width)
            for head, block in enumerate(blocks):
                tensors[name][head, :, head * width : (head + 1) * width] = block
    return AttentionWeights(**{"w_o": None, **tensors})


def load_weights(module: nn.Module, weights: AttentionWeights) -> None:
    """Write the weights into a layer, cast to its dtype.

    Key/value heads are repeated for a layer that has one for every head. Biases that are absent are written as zeros,
    an output projection that is absent as the identity.
    """
    places, tensors = places_of(module), weights.tensors()
    is_sliced = _is_sliced(module, places)
    for part, heads in places.items():
        numbers = tensors.get(part.lower())
        if numbers is None and part.startswith("bias"):
            continue
        if part == "W_o":
            features = weights.num_heads * weights.head_dim
            identity = torch.eye(features, dtype=weights.w_q.dtype).view(features, weights.num_heads, weights.head_dim)
            pieces = (identity if numbers is None else numbers).unbind(1)
        elif numbers is None:
            pieces = [torch.zeros_like(place) for place in heads]
        elif part == "b_o":
            pieces = [numbers]
        elif part in ("W_k", "W_v", "b_k", "b_v"):
            pieces = _shared(numbers, weights.num_heads, len(heads)).unbind(0)
        else:
            pieces = numbers.unbind(0)
        if is_sliced and part in ("W_q", "W_k", "W_v"):
            pieces = _slices(torch.stack([*pieces]))
        for place, piece in zip(heads, pieces, strict=True):
            assert place.shape == piece.shape
            place.copy_(piece)


def _is_sliced(module: nn.Module, places: dict[str, tuple[Tensor, ...]]) -> bool:
    """Whether head i reads slice i of the embedding only."""
    return places["W_q"][0].shape[1] != spec_of(module).embed_dim


def _shared(tensor: Tensor, num_heads: int, kv_heads: int) -> Tensor:
    """Key/value heads as many as a layer has, of those that a group shares one."""
    every = repeat(tensor, "kv_heads ... -> (kv_heads group) ...", group=num_heads // tensor.shape[0])
    groups = rearrange(every, "(kv_heads group) ... -> kv_heads group ...", kv_heads=kv_heads)
    assert groups.isnan().any() or torch.equal(groups, groups[:, :1].expand_as(groups)), "heads of their own"
    return groups[:, 0]


def _slices(matrices: Tensor) -> list[Tensor]:
    """`heads head_dim embed` as the columns of slice i for head i; the weights outside of them are zero."""
    heads = matrices.shape[0]
    columns = rearrange(matrices, "heads head_dim (slices width) -> heads slices head_dim width", slices=heads)
    assert not columns[~torch.eye(heads, dtype=torch.bool)].any()
    return [columns[head, head] for head in range(heads)]

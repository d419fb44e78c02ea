"""Canonical weights: the same W_q, W_k, W_v, W_o and biases, by head, out of any layer and into any other."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from mha_inspect.errors import WeightsError
from mha_inspect.measure.compare import same_bits
from mha_inspect.targets.spec import AttentionSpec

from .declared_places import Heads, Places, places_of


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The weights of one attention layer, by head. Matrices are laid out as nn.Linear's: `out in`."""

    w_q: Tensor
    """`heads head_dim embed`."""
    w_k: Tensor
    """`kv_heads head_dim kdim`."""
    w_v: Tensor
    """`kv_heads head_dim vdim`."""
    w_o: Tensor | None
    """`embed heads head_dim`; None where there is no output projection."""
    b_q: Tensor | None = None
    """`heads head_dim`."""
    b_k: Tensor | None = None
    """`kv_heads head_dim`."""
    b_v: Tensor | None = None
    """`kv_heads head_dim`."""
    b_o: Tensor | None = None
    """`embed`."""
    bias_k: Tensor | None = None
    """`heads head_dim`: the learned key that is appended to the sequence (add_bias_kv)."""
    bias_v: Tensor | None = None
    """`heads head_dim`: the learned value that is appended with it."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.w_q.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.w_k.shape[0]

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.w_q.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, of those that there are."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def equals(self, other: AttentionWeights) -> bool:
        """Whether both have the same tensors, bit for bit (a NaN equals itself, 0.0 does not equal -0.0)."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)

    def with_heads(self, num_heads: int) -> AttentionWeights:
        """The same matrices, their rows counted out to another number of heads.

        Raises `WeightsError` where the rows do not divide, or key/value heads are shared.
        """
        features = self.num_heads * self.head_dim
        if self.kv_heads != self.num_heads:
            raise WeightsError(
                f"num_kv_heads {self.kv_heads} is below num_heads {self.num_heads}: the rows of W_k and W_v belong to "
                "groups of heads, and another head count is another layer. Take weights with one key/value head a head."
            )
        if features % num_heads:
            raise WeightsError(
                f"{features} rows cannot be split over num_heads {num_heads}: each head gets the same number of them."
            )
        by_row = {"w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "bias_k", "bias_v"}
        cut = {
            name: tensor.reshape(num_heads, features // num_heads, *tensor.shape[2:])
            for name, tensor in self.tensors().items()
            if name in by_row
        }
        w_o = None if self.w_o is None else self.w_o.reshape(-1, num_heads, features // num_heads)
        return replace(self, **cut, w_o=w_o)


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
    is what they compute.

    Raises `WeightsError` for a module that is none of the layers.
    """
    places = places_of(module)
    return AttentionWeights(
        w_q=_widened(places.w_q, places.sliced),
        w_k=_widened(places.w_k, places.sliced),
        w_v=_widened(places.w_v, places.sliced),
        w_o=None if places.w_o is None else torch.stack(places.w_o, dim=1),
        b_q=_stacked(places.b_q),
        b_k=_stacked(places.b_k),
        b_v=_stacked(places.b_v),
        b_o=None if places.b_o is None else places.b_o.clone(),
        bias_k=_stacked(places.bias_k),
        bias_v=_stacked(places.bias_v),
    )


def load_weights(module: nn.Module, weights: AttentionWeights) -> None:
    """Write `weights` into the layer, cast to its dtype. All of them or, where it raises, none.

    Key/value heads are repeated for a layer that has one for every head. Biases that are absent are written as zeros,
    an output projection that is absent as the identity.

    Raises `WeightsError` where sizes differ, or the layer has no place for numbers that matter: a bias, an output
    projection, key/value heads of their own, weights outside of a head's slice.
    """
    places, name = places_of(module), type(module).__name__
    _check_sizes(places, weights, name)

    def shared(tensor: Tensor) -> Tensor:
        return _for_kv_heads(tensor, weights.num_heads, len(places.w_k), name)

    writes: list[tuple[Tensor, Tensor]] = []
    for place, tensor, label in (
        (places.w_q, weights.w_q, "W_q"),
        (places.w_k, shared(weights.w_k), "W_k"),
        (places.w_v, shared(weights.w_v), "W_v"),
    ):
        heads = _slices(tensor, name, label) if places.sliced else tensor.unbind(0)
        writes += zip(place, heads, strict=True)
    writes += _output_writes(places, weights, name)
    b_k, b_v = (None if bias is None else shared(bias) for bias in (weights.b_k, weights.b_v))
    for bias, given, label in ((places.b_q, weights.b_q, "b_q"), (places.b_k, b_k, "b_k"), (places.b_v, b_v, "b_v")):
        if bias is not None:
            writes += [(head, torch.zeros_like(head) if given is None else given[i]) for i, head in enumerate(bias)]
        elif given is not None and not _all_zero(given):
            raise WeightsError(_no_bias(name, label))
    for appended, given in ((places.bias_k, weights.bias_k), (places.bias_v, weights.bias_v)):
        if (appended is None) != (given is None):
            has, lacks = ("weights", name) if appended is None else (name, "weights")
            raise WeightsError(
                f"A learned key and value are appended to the sequence in the {has}, and not in the {lacks}: no number "
                "stands for one that is not there. Give add_bias_kv to both or to none."
            )
        if appended is not None and given is not None:
            writes += zip(appended, given.unbind(0), strict=True)
    for place_of_head, numbers in writes:
        if place_of_head.shape != numbers.shape:
            raise WeightsError(
                f"{name} has {list(place_of_head.shape)} where the weights have {list(numbers.shape)}: weights are "
                "carried between layers of the same sizes."
            )
    for place_of_head, numbers in writes:
        place_of_head.copy_(numbers)


def _check_sizes(places: Places, weights: AttentionWeights, name: str) -> None:
    head_dim, embed_dim = places.w_q[0].shape
    widths = {"embed_dim": embed_dim, "kdim": places.w_k[0].shape[1], "vdim": places.w_v[0].shape[1]}
    if places.sliced:
        widths = {size: width * len(places.w_q) for size, width in widths.items()}
    theirs = {"embed_dim": weights.w_q.shape[2], "kdim": weights.w_k.shape[2], "vdim": weights.w_v.shape[2]}
    for size, layers, given in (
        ("num_heads", len(places.w_q), weights.num_heads),
        ("head_dim", head_dim, weights.head_dim),
        *((size, width, theirs[size]) for size, width in widths.items()),
    ):
        if layers != given:
            raise WeightsError(
                f"{name} has {size} {layers}, and the weights have {size} {given}: weights are carried between layers "
                "of the same sizes."
            )


def _for_kv_heads(tensor: Tensor, num_heads: int, kv_heads: int, name: str) -> Tensor:
    """`kv_heads ...` of the weights as `kv_heads ...` of the layer: repeated, or one for each group of equal heads."""
    if tensor.shape[0] == kv_heads:
        return tensor
    for_each_head = repeat(tensor, "kv_heads ... -> (kv_heads group) ...", group=num_heads // tensor.shape[0])
    groups = rearrange(for_each_head, "(kv_heads group) ... -> kv_heads group ...", kv_heads=kv_heads)
    if not same_bits(groups, groups[:, :1].expand_as(groups)):
        raise WeightsError(
            f"{name} has num_kv_heads {kv_heads} for {num_heads} heads, and the weights have {tensor.shape[0]} "
            "key/value heads that differ: heads that share one key and value cannot keep their own. Carry them the "
            f"other way, or take num_kv_heads {tensor.shape[0]}."
        )
    return groups[:, 0]


def _slices(matrices: Tensor, name: str, label: str) -> list[Tensor]:
    """`heads head_dim embed` as the columns of slice i for head i.

    Raises `WeightsError` where a weight outside of them is not zero.
    """
    heads, embed = matrices.shape[0], matrices.shape[2]
    columns = rearrange(matrices, "heads head_dim (slices width) -> heads slices head_dim width", slices=heads)
    kept = [columns[head, head] for head in range(heads)]
    if not _all_zero(columns[~torch.eye(heads, dtype=torch.bool, device=columns.device)]):
        raise WeightsError(
            f"{name} gives head 0 the features 0 to {embed // heads - 1} of the embedding, and so on: its matrices "
            f"have {embed // heads} columns. The weights' {label} reads all {embed} features in every head. "
            "They can be carried the other way."
        )
    return kept


def _output_writes(places: Places, weights: AttentionWeights, name: str) -> list[tuple[Tensor, Tensor]]:
    """What to write for W_o and its bias."""
    features = weights.num_heads * weights.head_dim
    if places.w_o is None:
        identity = torch.eye(features, dtype=weights.w_q.dtype, device=weights.w_q.device)
        if weights.w_o is not None and not (
            weights.w_o.shape[0] == features and torch.equal(weights.w_o.flatten(1), identity)
        ):
            raise WeightsError(
                f"{name} has no output projection, and the weights' W_o is not the identity: it would be lost. Carry "
                "them the other way, where W_o becomes the identity."
            )
        if weights.b_o is not None and not _all_zero(weights.b_o):
            raise WeightsError(_no_bias(name, "b_o"))
        return []
    embed = places.w_o[0].shape[0]
    w_o = weights.w_o
    if w_o is None:
        if embed != features:
            raise WeightsError(
                f"The weights have no output projection and {features} features, and {name} has embed_dim {embed}: an "
                "identity cannot stand for W_o."
            )
        identity = torch.eye(features, dtype=weights.w_q.dtype, device=weights.w_q.device)
        w_o = identity.reshape(features, weights.num_heads, weights.head_dim)
    writes = list(zip(places.w_o, w_o.unbind(1), strict=True))
    if places.b_o is not None:
        writes.append((places.b_o, torch.zeros_like(places.b_o) if weights.b_o is None else weights.b_o))
    elif weights.b_o is not None and not _all_zero(weights.b_o):
        raise WeightsError(_no_bias(name, "b_o"))
    return writes


def _no_bias(name: str, bias: str) -> str:
    return (
        f"{name} has no place for a bias {bias}, and the weights' is not zero: "
        "build it with bias, or the other one without."
    )


def _stacked(heads: Heads | None) -> Tensor | None:
    return None if heads is None else torch.stack(heads)


def _widened(heads: Heads, sliced: bool) -> Tensor:
    """`heads head_dim embed`, with zeros for what a sliced head does not read."""
    if not sliced:
        return torch.stack(heads)
    # Not torch.block_diag(...): that would lose the sign of a zero. Each block is put where it is.
    matrices = heads[0].new_zeros(len(heads), heads[0].shape[0], len(heads) * heads[0].shape[1])
    for head, block in enumerate(heads):
        matrices[head, :, head * block.shape[1] : (head + 1) * block.shape[1]] = block
    return matrices


def _all_zero(tensor: Tensor) -> bool:
    return not tensor.is_meta and not bool(tensor.count_nonzero())

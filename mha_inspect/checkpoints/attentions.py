"""Which tensors of a checkpoint belong to which attention, by their names; and what their shapes allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..reports.params import StoredAttention
from .parts import Parts, Widths, parts_by_owner, widths_of
from .stored import StoredTensor
from .tensor_role import Packing, Role, StoredProjection, TensorRole

_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTH = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")


@dataclass(frozen=True)
class FoundAttention:
    """An attention, and what each of its tensors is for."""

    stored: StoredAttention
    roles: dict[str, Role]
    projections: tuple[StoredProjection, ...]
    """Empty where the number of heads is not known; without those whose packing is not."""
    packed: Mapping[Packing, tuple[StoredProjection, ...]]
    """What they would be in each way to pack q, k and v in one tensor; empty where they are not in one."""


def find_attentions(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], asked: int | None
) -> list[FoundAttention]:
    """Return the attentions in the order of their layers.

    Args:
        tensors: by name.
        config: what config.json says, which may name head counts.
        asked: a number of heads that somebody has given; it stands where it fits.
    """
    found = []
    for parts in parts_by_owner(tensors).values():
        widths = widths_of(parts) if parts.whole else None
        if widths is not None:
            found.append(_attention(parts, widths, config, asked))
    return found


def _attention(parts: Parts, widths: Widths, config: Mapping[str, Any], asked: int | None) -> FoundAttention:
    fits: Sequence[int] = (parts.num_heads,) if parts.stacked and parts.num_heads else ()
    if parts.latent is not None:
        fits = _fitting_latent(parts, widths)
    fits = fits or fitting_counts(widths.query, widths.key, widths.value, widths.output, parts.head_dim)
    told = fits or "head_ratio" in config
    if not fits:  # W_o takes in more than the values of the heads: which of its columns are theirs is not in the names
        widths = replace(widths, output=widths.value * widths.query // widths.key)
        fits = fitting_counts(widths.query, widths.key, widths.value, widths.output, parts.head_dim)
    known = (parts.num_heads, asked, *(_of_config(config, parts, widths) if told else ()))
    count = next((n for n in known if n in fits), fits[0] if len(fits) == 1 else None)
    mixed = parts.latent is not None
    head_dim = None if count is None else widths.query // count
    kv_heads = count if mixed else None if head_dim is None else widths.key // head_dim
    counts = {"q": count, "k": kv_heads, "v": kv_heads, "o": count}
    each = ((name, part, held.shape) for part, (name, held) in parts.tensors.items())
    own = [(name, TensorRole(parts, part, shape, widths, counts, config)) for name, part, shape in each]
    fitting = [(name, tensor) for name, tensor in own if tensor.fits]
    roles = {name: tensor.role() for name, tensor in fitting}
    roles |= {name: Role("", text) for name, text in parts.beside.items()}
    left = () if count is not None else tuple(fits)
    stored = StoredAttention(parts.owner, tuple(roles), count, kv_heads, head_dim, left)

    def packed(way: Packing | None) -> tuple[StoredProjection, ...]:
        return tuple(one for name, tensor in fitting for one in tensor.projections(name, way))

    ways: tuple[Packing, ...] = ("part by part", "group by group") if "W_qkv" in parts.tensors else ()
    return FoundAttention(stored, roles, packed(None), {way: packed(way) for way in ways})


def _of_config(config: Mapping[str, Any], parts: Parts, widths: Widths) -> list[int]:
    """Return the numbers of heads in a config, and in the configs in it, for an attention of this width and name."""
    held = [("", config)]
    held += [(key, own) for key, own in config.items() if key.endswith("_config") and isinstance(own, dict)]
    query = parts.shape("W_q") or parts.shape("W_qkv") or ()
    found: list[tuple[bool, int]] = []
    for key, own in held:
        width = next((own[name] for name in _WIDTH if type(own.get(name)) is int), None)
        head_dim = own.get("head_dim")
        for name in _HEADS:
            count = own.get(name)
            if type(count) is not int or (len(held) > 1 and width is not None and width not in query):
                continue
            if type(head_dim) is int and parts.latent is None and count * head_dim != widths.query:
                continue
            # ConvBERT has convolutions in the place of some of its heads.
            ratio = own.get("head_ratio", 1)
            word = (key or name).partition("_")[0]
            found.append((word not in parts.owner, count // ratio if type(ratio) is int and ratio > 0 else count))
    return [count for _, count in sorted(found, key=lambda one: one[0])]


def _fitting_latent(parts: Parts, widths: Widths) -> tuple[int, ...]:
    """Return the number of heads of multi-head latent attention: the one that gives each query what the keys have.

    A query is as wide as its key, and that is the head's own part and the part for positions, which all heads share.
    """
    latent, inner = parts.latent, parts.shape("W_kv")
    shared = 0 if latent is None or inner is None or len(latent.shape) != 2 else latent.shape[0] - inner[1]
    if shared <= 0 or (widths.query - widths.key) % shared:
        return ()
    count = (widths.query - widths.key) // shared
    return (count,) if count > 0 and not any(widths.of(letter) % count for letter in "qkv") else ()


@cache
def fitting_counts(query: int, key: int, value: int, output: int, head_dim: int | None = None) -> tuple[int, ...]:
    """Return the numbers of heads that leave whole heads, and as many query heads to each key head.

    Args:
        query: features of all heads together.
        key: likewise.
        value: likewise.
        output: what W_o takes in: the values of all heads.
        head_dim: of a norm of a head's features, where there is one: it leaves one number.
    """
    fits = []
    small = [n for n in range(1, int(query**0.5) + 1) if query % n == 0] if query < 2**40 else []
    for count in sorted({*small, *(query // n for n in small)}):
        own = query // count
        kv_heads = key // own
        if key % own or not kv_heads or count % kv_heads or value % kv_heads or value // kv_heads * count != output:
            continue
        if head_dim in (None, query, own):
            fits.append(count)
    return tuple(fits)

"""Which tensors of a checkpoint belong to which attention, by their names; and what their shapes allow.

And what one tensor of an attention is for, and where in it each head lies: in words and in numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal

from ..layers.spec import divisors
from ..reports.params import HeadSlice, StoredAttention
from .parts import Parts, Widths, axes_of_stack, parts_by_owner, widths_of
from .stored import StoredTensor

_GROUPED = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon", "internlm2", "deberta"})
"""Types of config whose packed projection lies group by group: the queries of a key, that key, its value."""
_SIDE_BY_SIDE = frozenset({"gpt2", "phi3", "mpt", "dbrx", "modernbert", "qwen", "baichuan", "nomic_bert", "glm"})
"""Types of config whose packed projection lies part by part."""
_IN_FOUR = "codegen"
"""The type of config whose packed projection lies in four groups, each of queries, values and keys in this order."""
_UNCERTAIN = frozenset({"query_key_value", "wqkv"})
"""Words under which some pack head by head, and others not."""

Packing = Literal["part by part", "group by group", "unknown"]


@dataclass(frozen=True)
class Role:
    """What a tensor is for."""

    axes: str
    text: str


@dataclass(frozen=True)
class StoredProjection:
    """Where a tensor has the numbers of each head of W_q, or of another part."""

    part: str
    tensor: str
    axis: int
    """The dimension of a head's features."""
    starts: tuple[int, ...]
    """Where those of each head begin; empty where another dimension counts the heads."""
    width: int
    heads_axis: int | None = None
    """The dimension that counts the heads."""

    def slices(self, shape: tuple[int, ...]) -> Iterator[HeadSlice]:
        """Return the rows and columns of each head; nothing where they are a matrix for each."""
        for head, start in enumerate(self.starts):
            bounds = [(0, size) for size in shape]
            bounds[self.axis] = (start, start + self.width)
            yield HeadSlice(head, self.part, bounds[0], bounds[1] if len(shape) > 1 else None)


class TensorRole:
    """One tensor of an attention: where in it each head lies, in words and in numbers."""

    def __init__(
        self,
        parts: Parts,
        part: str,
        shape: tuple[int, ...],
        widths: Widths,
        counts: Mapping[str, int | None],
        config: Mapping[str, Any],
    ) -> None:
        self._parts, self._shape, self._widths, self._counts = parts, shape, widths, counts
        self._matrix, self._letters = part.split("_")
        self._is_matrix, self._of_no_head = self._matrix == "W", part == "b_o"
        self._is_stack = parts.stacked and len(shape) == (3 if self._is_matrix else 2)
        self._axis = 1 if self._is_matrix and (self._letters == "o") != parts.across else 0
        self._in_four = config.get("model_type") == _IN_FOUR and self._letters == "qkv" and (counts["q"] or 0) % 4 == 0
        self._order = "qvk" if self._in_four else self._letters
        self._groups = 4 if self._in_four else counts["k"] or 1
        self._packing = self._packed(config)

    @property
    def fits(self) -> bool:
        """Whether its size is what the others say."""
        size = self._shape[self._axis] if len(self._shape) > self._axis else None
        return self._is_stack or self._of_no_head or size == self._widths.of(self._letters)

    def _packed(self, config: Mapping[str, Any]) -> Packing:
        kind, word = str(config.get("model_type", "")), self._parts.words.get(self._letters, "")
        if len(self._letters) == 1 or kind in _SIDE_BY_SIDE:
            return "part by part"
        by_group = self._in_four or kind in _GROUPED or word in ("kv_b_proj", "linear_qkv")
        if by_group or (kind == "gpt_bigcode" and config.get("multi_query") is False):
            return "group by group"
        return "unknown" if word in _UNCERTAIN or kind == _IN_FOUR else "part by part"

    @property
    def _grouped(self) -> bool:
        """Whether heads share keys and values."""
        return self._widths.k < self._widths.q and self._parts.latent is None

    def _width(self, letter: str) -> int | None:
        """Return the features of one head; None where their number is not known."""
        count = self._counts[letter]
        return None if count is None else self._widths.of(letter) // count

    def role(self) -> Role:
        """Return what it is for."""
        if self._of_no_head:
            return Role("embed", "b_o: added once, it belongs to no head")
        return Role(self._axes(), self._text())

    def _axes(self) -> str:
        letters, latent = self._letters, self._parts.latent is not None
        heads = "kv_heads" if self._grouped and letters in ("k", "v", "kv") else "heads"
        head_dim = "v_head_dim" if latent and letters == "o" else "head_dim"
        inner = "latent" if latent and letters in ("kv", "q") and self._parts.words[letters] != "q_proj" else "embed"
        if self._is_stack:
            if not self._is_matrix:
                return f"{heads} {head_dim}"
            names = dict(zip(axes_of_stack(self._parts, letters), (heads, head_dim), strict=True))
            return " ".join(names.get(dim, inner) for dim in range(3))
        query = self._parts.shape("W_q")
        if letters in ("k", "v") and self._is_matrix and query is not None and query[1] != self._shape[1]:
            inner = f"{letters}dim"
        if len(letters) == 1:
            side = f"({heads} {head_dim})"
        elif self._packing == "unknown" or self._in_four:
            side = "packed"
        elif latent or len({self._widths.of(letter) for letter in letters}) > 1:
            by_group = self._packing == "group by group" and self._counts["k"] != 1
            side = f"({'heads' if latent else 'kv_heads'} packed)" if by_group else "packed"
        else:
            outer = f"{letters} {heads}" if self._packing == "part by part" else f"{heads} {letters}"
            side = f"({outer} head_dim)"
        return side if not self._is_matrix else f"{side} {inner}" if self._axis == 0 else f"{inner} {side}"

    def _text(self) -> str:
        letters, unit = self._letters, "elements" if not self._is_matrix else ("rows", "columns")[self._axis]
        way = {"rows": "one above the other", "columns": "side by side", "elements": "one after the other"}[unit]
        listed = ", ".join(f"{self._matrix}_{letter}" for letter in self._order)
        heads, kv_heads = self._counts["q"], self._counts["k"]
        shared = ""
        if self._grouped and letters in ("k", "v") and heads and kv_heads:
            shared = f", each for {heads // kv_heads} query heads"
        if len(letters) == 1:
            if not self._is_matrix:
                return listed + shared
            if self._is_stack:
                return f"{listed}: a matrix for each head"
            each = self._width(letters)
            return f"{listed}: its {unit} are the heads {way}" + (f", {each} each" if each else "") + shared
        if self._packing == "unknown":
            return f"{listed} in one: neither its name nor its shape tells whether head by head"
        if self._packing == "group by group" and (kv_heads is None or kv_heads > 1 or kv_heads == heads):
            return f"{listed} {self._in_groups(unit)}"
        places = list(accumulate((self._widths.of(letter) for letter in letters), initial=0))
        return f"{listed} {way}: {unit} " + ", ".join(f"{start}–{stop - 1}" for start, stop in pairwise(places))

    def _in_groups(self, unit: str) -> str:
        way = "group by group" if self._in_four or (self._grouped and "q" in self._letters) else "head by head"
        said: list[str] = []
        for letter in self._order:
            # So many heads of it are in one group.
            width, each = self._width(letter), (self._counts[letter] or 1) // self._groups
            if width is None:
                return way
            said.append(f"{f'{each}·' if each > 1 else ''}{width}{'' if said else ' ' + unit} of {letter}")
        return f"{way}: {', '.join(said)} each"

    def projections(self, name: str) -> list[StoredProjection]:
        """Return where each head of each part lies; nothing where the number of heads or the packing is not known."""
        letters = self._letters
        if None in self._counts.values() or self._packing == "unknown" or self._of_no_head:
            return []
        if self._is_stack:
            heads_axis, axis = axes_of_stack(self._parts, letters) if self._is_matrix else (0, 1)
            return [StoredProjection(f"{self._matrix}_{letters}", name, axis, (), self._shape[axis], heads_axis)]
        widths = {letter: self._width(letter) or 1 for letter in letters}
        groups = self._groups if self._packing == "group by group" else 1
        # In each group, so many heads of each.
        order = [letter for letter in self._order for _ in range((self._counts[letter] or 1) // groups)] * groups
        starts: dict[str, list[int]] = {letter: [] for letter in letters}
        for letter, start in zip(order, accumulate((widths[part] for part in order), initial=0), strict=False):
            starts[letter].append(start)
        return [
            StoredProjection(f"{self._matrix}_{letter}", name, self._axis, tuple(starts[letter]), widths[letter])
            for letter in starts
        ]


_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTH = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")


@dataclass(frozen=True)
class NamedAttention:
    """An attention, and what each of its tensors is for."""

    stored: StoredAttention
    roles: dict[str, Role]
    projections: tuple[StoredProjection, ...]
    """Empty where the number of heads is not known; without those whose packing is not."""


def find_attentions(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], asked: int | None
) -> list[NamedAttention]:
    """Return the attentions in the order of their layers.

    Args:
        tensors: by name.
        config: what config.json says, which may name head counts.
        asked: a number of heads that somebody has given; it stands where it fits.
    """
    attentions = []
    for parts in parts_by_owner(tensors).values():
        widths = widths_of(parts) if parts.whole else None
        if widths is not None:
            attentions.append(_attention(parts, widths, config, asked))
    return attentions


def _attention(parts: Parts, widths: Widths, config: Mapping[str, Any], asked: int | None) -> NamedAttention:
    fits: Sequence[int] = (parts.num_heads,) if parts.stacked and parts.num_heads else ()
    if parts.latent is not None:
        fits = _fitting_latent(parts, widths)
    fits = fits or fitting_counts(*widths, parts.head_dim)
    told = fits or "head_ratio" in config
    if not fits:  # W_o takes in more than the values of the heads: which of its columns are theirs is not in the names
        widths = widths._replace(o=widths.v * widths.q // widths.k)
        fits = fitting_counts(*widths, parts.head_dim)
    known = (parts.num_heads, asked, *(_of_config(config, parts, widths) if told else ()))
    count = next((n for n in known if n in fits), fits[0] if len(fits) == 1 else None)
    head_dim = None if count is None else widths.q // count
    kv_heads = count if parts.latent is not None or head_dim is None else widths.k // head_dim
    counts = {"q": count, "k": kv_heads, "v": kv_heads, "o": count}
    tensors = {
        name: TensorRole(parts, part, stored.shape, widths, counts, config)
        for part, (name, stored) in parts.tensors.items()
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.fits}
    roles = {name: tensor.role() for name, tensor in tensors.items()}
    roles |= {name: Role("", text) for name, text in parts.beside.items()}
    left = () if count is not None else tuple(fits)
    stored = StoredAttention(parts.owner, tuple(roles), count, kv_heads, head_dim, left)
    projections = (projection for name, tensor in tensors.items() for projection in tensor.projections(name))
    return NamedAttention(stored, roles, tuple(projections))


def _of_config(config: Mapping[str, Any], parts: Parts, widths: Widths) -> list[int]:
    """Return the numbers of heads in a config, and in the configs in it, for an attention of this width and name."""
    configs = [("", config)]
    configs += [(key, inner) for key, inner in config.items() if key.endswith("_config") and isinstance(inner, dict)]
    query = parts.shape("W_q") or parts.shape("W_qkv") or ()
    counts: list[tuple[bool, int]] = []
    for key, inner in configs:
        width = next((inner[name] for name in _WIDTH if type(inner.get(name)) is int), None)
        head_dim = inner.get("head_dim")
        for name in _HEADS:
            count = inner.get(name)
            if type(count) is not int or (len(configs) > 1 and width is not None and width not in query):
                continue
            if type(head_dim) is int and parts.latent is None and count * head_dim != widths.q:
                continue
            # ConvBERT has convolutions in the place of some of its heads.
            ratio = inner.get("head_ratio", 1)
            word = (key or name).partition("_")[0]
            counts.append((word not in parts.owner, count // ratio if type(ratio) is int and ratio > 0 else count))
    return [count for _, count in sorted(counts, key=lambda pair: pair[0])]


def _fitting_latent(parts: Parts, widths: Widths) -> tuple[int, ...]:
    """Return the number of heads of multi-head latent attention: the one that gives each query what the keys have.

    A query is as wide as its key, and that is the head's own part and the part for positions, which all heads share.
    """
    latent, inner = parts.latent, parts.shape("W_kv")
    shared = 0 if latent is None or inner is None or len(latent.shape) != 2 else latent.shape[0] - inner[1]
    if shared <= 0 or (widths.q - widths.k) % shared:
        return ()
    count = (widths.q - widths.k) // shared
    return (count,) if count > 0 and not any(width % count for width in widths[:3]) else ()


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

    def fits(count: int) -> bool:
        width = query // count
        kv_heads, rest = divmod(key, width)
        if rest or not kv_heads or count % kv_heads or value % kv_heads:
            return False
        return value // kv_heads * count == output and head_dim in (None, query, width)

    return tuple(filter(fits, divisors(query) if query < 2**40 else ()))

"""Find which tensors of a checkpoint belong to which attention, by their names, and the rows of each head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..layers.spec import divisors
from ..reports.params import HeadSlice, StoredAttention
from .tensors import StoredTensor

_LETTERS = {
    "q": "q_proj query q wq to_q q_lin linear_q query_proj w_q q_linear query_layer q_b_proj",
    "k": "k_proj key k wk to_k k_lin linear_k key_proj w_k k_linear key_layer",
    "v": "v_proj value v wv to_v v_lin linear_v value_proj w_v v_linear value_layer",
    "o": "o_proj out_proj dense c_proj o wo to_out.0 to_out out_lin linear_out proj out w_o out_linear linear_proj "
    "output_proj",
    "qkv": "in_proj c_attn qkv qkv_proj wqkv query_key_value attn_qkv to_qkv w_pack qkv_linear c_qkv linear_qkv "
    "qkv_net",
    "kv": "kv_proj to_kv kv wkv key_value kv_b_proj linear_kv",
}
_WORDS = {word: letters for letters, words in _LETTERS.items() for word in words.split()}
_NAME = re.compile(r"(?:(?P<owner>.*)\.)?(?P<word>(?:to_out\.0|[^.]+?))[._](?P<kind>weight|bias)")
_LATENT = "kv_a_proj_with_mqa"
"""The projection to latent keys and values, with one position key that all heads share."""
_NO_HEAD = "; not split by head"
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "q_ln", "query_norm"), "{does} the queries after their projection"),
    **dict.fromkeys(("k_norm", "k_layernorm", "k_ln", "key_norm"), "{does} the keys after their projection"),
}
_OTHER_ROLES = {
    **_NORMS,
    "q_a_proj": f"projects the input down, before the queries{_NO_HEAD}",
    "q_a_layernorm": f"{{does}} the input of the projection to the queries{_NO_HEAD}",
    _LATENT: f"projects the input down, before the keys and values{_NO_HEAD}",
    "kv_a_layernorm": f"{{does}} the input of the projection to the keys and values{_NO_HEAD}",
}
"""Tensor name to its purpose, for tensors other than the projections."""
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTH = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
_GROUPED = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon", "internlm2", "deberta"})
"""Config types whose packed projection is group by group: a key's queries, the key, its value."""
_SIDE_BY_SIDE = frozenset({"gpt2", "phi3", "mpt", "dbrx", "modernbert", "qwen", "baichuan", "nomic_bert", "glm"})
"""Config types whose packed projection is part by part."""
_UNCERTAIN = frozenset({"query_key_value", "wqkv"})
"""Words that name a tensor packed head by head in some models, and part by part in others."""
_WAYS = {"rows": "stacked", "columns": "side by side", "elements": "concatenated"}


@dataclass(frozen=True)
class Role:
    """The purpose of a tensor."""

    axes: str
    text: str
    heads: tuple[HeadSlice, ...] = ()
    """The rows and columns of each head; empty if the number of heads or the packing is unknown."""
    axis: int = 0
    """The dimension that has the features of the heads."""
    part: str = ""
    """What its name calls it: `W_q`, `b_qkv`; empty for other purposes."""
    blocks: tuple[HeadSlice, ...] = ()
    """The rows and columns of each part, as of one head; empty if parts lie head by head, or their order is unknown."""


@dataclass(frozen=True)
class NamedAttention:
    """An attention, and the purpose of each of its tensors."""

    stored: StoredAttention
    roles: dict[str, Role]


class _Tensor(NamedTuple):
    name: str
    word: str
    """The name of the tensor in its module."""
    shape: tuple[int, ...]


@dataclass
class _Owner:
    """The tensors of one module: an attention, if their names are those of projections."""

    path: str
    parts: dict[str, _Tensor] = field(default_factory=dict)
    """Tensors by part, e.g. `W_q`, `b_qkv`."""
    other_roles: dict[str, str] = field(default_factory=dict)
    """Name to purpose, for the other tensors."""
    head_dim: int | None = None
    """Features of a head, if a norm of a head's features gives them; otherwise None."""
    latent: int | None = None
    """Features of latent keys and values, with the shared position key; None without latents."""

    @property
    def is_whole(self) -> bool:
        """Whether it has queries, keys and values."""
        has_keys = {"W_k", "W_v"} <= {*self.parts} or "W_kv" in self.parts
        return "W_qkv" in self.parts or ("W_q" in self.parts and has_keys)

    @property
    def is_in_out(self) -> bool:
        """Whether the weights are `in out`, as for `x @ weight` and in GPT-2's Conv1D; nn.Linear has `out in`.

        A bias shows it: a `[24, 12]` beside a bias of 12. Without one, the name of GPT-2's packed projection does.
        """
        for part, weight in self.parts.items():
            bias = self.parts.get(f"b{part[1:]}")
            if part[0] != "W" or bias is None or weight.shape[0] == weight.shape[1]:
                continue
            if bias.shape[0] in weight.shape:
                return bias.shape[0] == weight.shape[1]
        packed = self.parts.get("W_qkv")
        return packed is not None and packed.word == "c_attn" and packed.shape[1] > packed.shape[0]

    def axis(self, part: str) -> int:
        """Return the dimension that has the features of all heads."""
        return int(part[0] == "W" and (part == "W_o") != self.is_in_out)

    def width(self, part: str) -> int:
        """Return the features of all heads together; 0 for a missing part."""
        return self.parts[part].shape[self.axis(part)] if part in self.parts else 0


def find_attentions(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], wanted: int | None
) -> list[NamedAttention]:
    """Return the attentions in the order of their layers; empty if there are none.

    The number of heads is `wanted` if it fits, otherwise the number in config.json if that fits.
    """
    owners: dict[str, _Owner] = {}
    for name, match in ((name, _NAME.fullmatch(name)) for name in tensors):
        if match is not None:
            owner = owners.setdefault(match["owner"] or "", _Owner(match["owner"] or ""))
            _add(owner, _Tensor(name, match["word"], tensors[name].shape), "W" if match["kind"] == "weight" else "b")
    for path, owner in owners.items():
        around, _, last = path.rpartition(".")
        if last in ("self", "attention") and owner.is_whole and "W_o" not in owner.parts:  # as in BERT
            output = owners.get(f"{around}.output", owner).parts
            owner.parts |= {part: output[part] for part in ("W_o", "b_o") if part in output}
    widths = [(owner, _widths(owner)) for owner in owners.values() if owner.is_whole]
    return [_attention(owner, width, config, wanted) for owner, width in widths if min(width.values()) > 0]


def _add(owner: _Owner, tensor: _Tensor, kind: str) -> None:
    """Add a tensor to its owner, if its name is known."""
    word = tensor.word.casefold()
    if word in _OTHER_ROLES:
        owner.other_roles[tensor.name] = _OTHER_ROLES[word].format(does="scales" if kind == "W" else "added to")
        if word in _NORMS and len(tensor.shape) == 1:
            owner.head_dim = tensor.shape[0]
        if word == _LATENT and kind == "W":
            owner.latent = tensor.shape[0]
    elif word in _WORDS and len(tensor.shape) == (2 if kind == "W" else 1):
        owner.parts.setdefault(f"{kind}_{_WORDS[word]}", tensor)


def _widths(owner: _Owner) -> dict[str, int]:
    """Return the features of all heads together, for q, k, v and the input of W_o; 0 if unknown."""
    query, out, packed = owner.width("W_q"), owner.width("W_o"), owner.width("W_kv")
    key, value = owner.width("W_k"), owner.width("W_v")
    if "W_qkv" in owner.parts:
        query = out or owner.width("W_qkv") // 3
        packed = owner.width("W_qkv") - query
    if packed:
        # Latent keys are wider than values by their position features.
        value = out if owner.latent is not None else packed // 2 if packed % 2 == 0 else 0
        key = packed - value
    return {"q": query, "k": key, "v": value, "o": out or query}


def _attention(owner: _Owner, widths: dict[str, int], config: Mapping[str, Any], wanted: int | None) -> NamedAttention:
    fits = fitting_counts(*widths.values(), owner.head_dim)
    if owner.latent is not None and "W_kv" in owner.parts:
        # A query is as wide as its key: the head's own part, and the position part that all heads share.
        shared = owner.latent - owner.parts["W_kv"].shape[1]
        count, rest = divmod(widths["q"] - widths["k"], shared) if shared > 0 else (0, 0)
        fits = (count,) if count > 0 and not (rest or any(widths[letter] % count for letter in "qkv")) else ()
    candidates = (wanted, *_of_config(config, owner, widths["q"]))
    heads = next((n for n in candidates if n in fits), fits[0] if len(fits) == 1 else None)
    head_dim = None if heads is None else widths["q"] // heads
    kv_heads = heads if owner.latent is not None or head_dim is None else widths["k"] // head_dim
    roles = {}
    for part, tensor in owner.parts.items():
        if part == "b_o":
            roles[tensor.name] = Role("embed", "b_o: added once, not split by head", part=part)
        elif owner.width(part) == sum(widths[letter] for letter in part[2:]):
            by_group = False if len(part) == 3 else _is_by_group(tensor.word, config)
            layout = _Layout(owner, part, widths, heads, kv_heads, by_group)
            roles[tensor.name] = Role(
                layout.pattern(), layout.text(), layout.slices(), owner.axis(part), part, layout.blocks()
            )
    roles |= {name: Role("", text) for name, text in owner.other_roles.items()}
    stored = StoredAttention(owner.path, tuple(roles), heads, kv_heads, head_dim, fits if heads is None else ())
    return NamedAttention(stored, roles)


def _of_config(config: Mapping[str, Any], owner: _Owner, width: int) -> list[int]:
    """Return the numbers of heads in a config and its inner configs, for an attention of this width and name."""
    configs = {key: inner for key, inner in config.items() if key.endswith("_config") and isinstance(inner, dict)}
    query = owner.parts["W_q" if "W_q" in owner.parts else "W_qkv"].shape
    counts: list[tuple[bool, int]] = []
    for key, inner in {"": config, **configs}.items():
        hidden = next((inner[name] for name in _WIDTH if type(inner.get(name)) is int), None)
        for name in _HEADS if not configs or hidden is None or hidden in query else ():
            count, head_dim = inner.get(name), inner.get("head_dim")
            if type(count) is int and (
                type(head_dim) is not int or owner.latent is not None or count * head_dim == width
            ):
                counts.append(((key or name).partition("_")[0] not in owner.path, count))
    return [count for _, count in sorted(counts, key=lambda pair: pair[0])]


def _is_by_group(word: str, config: Mapping[str, Any]) -> bool | None:
    """Return whether the parts of one tensor are interleaved by head or group; None if it could not be determined."""
    kind = str(config.get("model_type", ""))
    if kind in _SIDE_BY_SIDE:
        return False
    if kind in _GROUPED or word in ("kv_b_proj", "linear_qkv"):
        return True
    if kind == "gpt_bigcode":
        return config.get("multi_query") is False
    return None if word in _UNCERTAIN or kind == "codegen" else False


class _Layout(NamedTuple):
    """The order of heads in a tensor of one part or several."""

    owner: _Owner
    part: str
    widths: Mapping[str, int]
    heads: int | None
    kv_heads: int | None
    by_group: bool | None

    def _each(self) -> dict[str, tuple[int, int]]:
        """Return each letter's number of heads and features of one head; one head if the number is unknown."""
        counts = {letter: (self.kv_heads if letter in "kv" else self.heads) or 1 for letter in self.part[2:]}
        return {letter: (count, self.widths[letter] // count) for letter, count in counts.items()}

    @property
    def _is_shared(self) -> bool:
        """Whether query heads share keys and values."""
        return self.widths["k"] < self.widths["q"] and self.owner.latent is None

    def _inner_size(self, part: str) -> int:
        """Return the number of features that a weight reads."""
        return self.owner.parts[part].shape[1 - self.owner.axis(part)]

    def pattern(self) -> str:
        """Return the dimensions as an einops pattern."""
        letters, tensor, axis = self.part[2:], self.owner.parts[self.part], self.owner.axis(self.part)
        is_latent, inner = self.owner.latent is not None, "embed"
        heads = "kv_heads" if self._is_shared and letters in ("k", "v", "kv") else "heads"
        if is_latent and letters in ("kv", "q") and tensor.word != "q_proj":
            inner = "latent"
        elif letters in ("k", "v") and self.part[0] == "W" and self._inner_size("W_q") != self._inner_size(self.part):
            inner = f"{letters}dim"
        if self.by_group is None:
            side = "packed"
        elif len(letters) == 1:
            side = f"({heads} {'v_head_dim' if is_latent and letters == 'o' else 'head_dim'})"
        elif len({self.widths[letter] for letter in letters}) == 1:
            side = f"({heads} {letters} head_dim)" if self.by_group else f"({letters} {heads} head_dim)"
        else:
            by_head = self.by_group and self.kv_heads != 1
            side = f"({'heads' if is_latent else 'kv_heads'} packed)" if by_head else "packed"
        return " ".join(side if dim == axis else inner for dim in range(len(tensor.shape)))

    def text(self) -> str:
        """Return the parts in the tensor and the order of their heads, as a phrase."""
        kind, letters, each, heads, kv_heads = self.part[0], self.part[2:], self._each(), self.heads, self.kv_heads
        unit = "elements" if kind == "b" else ("rows", "columns")[self.owner.axis(self.part)]
        listed = ", ".join(f"{kind}_{letter}" for letter in letters)
        if len(letters) == 1:
            shared = ""
            if self._is_shared and letters in "kv" and heads and kv_heads:
                shared = f", each for {heads // kv_heads} query heads"
            width = f", {each[letters][1]} each" if heads else ""
            return f"{listed}{'' if kind == 'b' else f': {unit} are the heads {_WAYS[unit]}{width}'}{shared}"
        if self.by_group is None:
            return f"{listed} in one tensor: could not determine whether head by head"
        if self.by_group and (kv_heads != 1 or heads == 1):
            way = "group by group" if self._is_shared and "q" in letters else "head by head"
            if not kv_heads:
                return f"{listed} {way}"
            sizes = [(f"{n // kv_heads}·" if n > kv_heads else "") + str(width) for n, width in each.values()]
            sizes[0] += f" {unit}"
            sizes = [f"{size} of {letter}" for size, letter in zip(sizes, letters, strict=True)]
            return f"{listed} {way}: {', '.join(sizes)} each"
        places = list(accumulate((self.widths[letter] for letter in letters), initial=0))
        return f"{listed} {_WAYS[unit]}: {unit} " + ", ".join(f"{start}–{stop - 1}" for start, stop in pairwise(places))

    def slices(self) -> tuple[HeadSlice, ...]:
        """Return the rows and columns of each head of each part; empty if the heads or the packing are unknown."""
        if self.heads is None or self.by_group is None:
            return ()
        shape, axis = self.owner.parts[self.part].shape, self.owner.axis(self.part)
        each, groups = self._each(), (self.kv_heads or 1) if self.by_group else 1
        # Each group has this many heads of each part.
        order = [letter for letter, (count, _) in each.items() for _ in range(count // groups)] * groups
        starts: dict[str, list[int]] = {letter: [] for letter in each}
        for letter, start in zip(order, accumulate((each[letter][1] for letter in order), initial=0), strict=False):
            starts[letter].append(start)
        slices = []
        for letter, (_, width) in each.items():
            for head, start in enumerate(starts[letter]):
                bounds = [(start, start + width) if dim == axis else (0, size) for dim, size in enumerate(shape)]
                slices.append(HeadSlice(head, f"{self.part[0]}_{letter}", bounds[0], (*bounds, None)[1]))
        return tuple(slices)

    def blocks(self) -> tuple[HeadSlice, ...]:
        """Return the rows and columns of each part; empty if they lie head by head, or their order is unknown."""
        if self.by_group is not False:
            return ()
        shape, axis, letters = self.owner.parts[self.part].shape, self.owner.axis(self.part), self.part[2:]
        blocks = []
        for letter, bound in zip(
            letters, pairwise(accumulate((self.widths[x] for x in letters), initial=0)), strict=True
        ):
            bounds = [bound if dim == axis else (0, size) for dim, size in enumerate(shape)]
            blocks.append(HeadSlice(0, f"{self.part[0]}_{letter}", bounds[0], (*bounds, None)[1]))
        return tuple(blocks)


@cache
def fitting_counts(query: int, key: int, value: int, output: int, head_dim: int | None = None) -> tuple[int, ...]:
    """Return the numbers of heads with whole heads, and with the same number of query heads for each key head.

    Sizes are the features of all heads together. `head_dim` is the size of a norm of a head's features, or None.
    """

    def fits(count: int) -> bool:
        width = query // count
        kv_heads, rest = divmod(key, width)
        if rest or not kv_heads or count % kv_heads or value % kv_heads:
            return False
        return value // kv_heads * count == output and head_dim in (None, query, width)

    return tuple(filter(fits, divisors(query) if query < 2**40 else ()))

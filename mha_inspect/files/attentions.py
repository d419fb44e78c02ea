"""Find which tensors of a checkpoint belong to which attention, by their names, and the rows of each head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
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
        if "W_qkv" in self.parts:
            return True
        if "W_q" not in self.parts:
            return False
        return "W_kv" in self.parts or ("W_k" in self.parts and "W_v" in self.parts)

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
        if part[0] == "b":
            return 0
        # The output projection reads the features of the heads, and the others write them.
        if part == "W_o":
            return 0 if self.is_in_out else 1
        return 1 if self.is_in_out else 0

    def width(self, part: str) -> int:
        """Return the features of all heads together; 0 for a missing part."""
        if part not in self.parts:
            return 0
        return self.parts[part].shape[self.axis(part)]


def find_attentions(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], wanted: int | None
) -> list[NamedAttention]:
    """Return the attentions in the order of their layers; empty if there are none.

    The number of heads is `wanted` if it fits, otherwise the number in config.json if that fits.
    """
    owners: dict[str, _Owner] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        path = match["owner"] or ""
        owner = owners.setdefault(path, _Owner(path))
        _add(owner, _Tensor(name, match["word"], tensor.shape), "W" if match["kind"] == "weight" else "b")
    attentions: list[NamedAttention] = []
    for owner in owners.values():
        if not owner.is_whole:
            continue
        _take_output_beside(owner, owners)
        widths = _widths(owner)
        if min(widths.values()) > 0:
            attentions.append(_attention(owner, widths, config, wanted))
    return attentions


def _take_output_beside(owner: _Owner, owners: Mapping[str, _Owner]) -> None:
    """Take the output projection of an attention from the module beside it, as in BERT: `attention.output.dense`."""
    around, _, last = owner.path.rpartition(".")
    if last not in ("self", "attention") or "W_o" in owner.parts:
        return
    beside = owners.get(f"{around}.output")
    if beside is None:
        return
    for part in ("W_o", "b_o"):
        if part in beside.parts:
            owner.parts[part] = beside.parts[part]


def _add(owner: _Owner, tensor: _Tensor, kind: str) -> None:
    """Add a tensor to its owner, if its name is known."""
    word = tensor.word.casefold()
    if word in _OTHER_ROLES:
        does = "scales" if kind == "W" else "added to"
        owner.other_roles[tensor.name] = _OTHER_ROLES[word].format(does=does)
        if word in _NORMS and len(tensor.shape) == 1:
            owner.head_dim = tensor.shape[0]
        if word == _LATENT and kind == "W":
            owner.latent = tensor.shape[0]
    elif word in _WORDS and len(tensor.shape) == (2 if kind == "W" else 1):
        owner.parts.setdefault(f"{kind}_{_WORDS[word]}", tensor)


def _widths(owner: _Owner) -> dict[str, int]:
    """Return the features of all heads together, for q, k, v and the input of W_o; 0 if unknown."""
    query, key, value = owner.width("W_q"), owner.width("W_k"), owner.width("W_v")
    out = owner.width("W_o")
    packed = owner.width("W_kv")
    if "W_qkv" in owner.parts:
        query = out or owner.width("W_qkv") // 3
        packed = owner.width("W_qkv") - query
    if packed:
        value = _width_of_values(owner, packed, out)
        key = packed - value
    return {"q": query, "k": key, "v": value, "o": out or query}


def _width_of_values(owner: _Owner, packed: int, out: int) -> int:
    """Return the features of the values among those of keys and values together; 0 if unknown."""
    # Latent keys are wider than values by their position features.
    if owner.latent is not None:
        return out
    return packed // 2 if packed % 2 == 0 else 0


def _attention(owner: _Owner, widths: dict[str, int], config: Mapping[str, Any], wanted: int | None) -> NamedAttention:
    """Return an attention with its number of heads, and the purpose of each of its tensors."""
    fits = _fitting_heads(owner, widths)
    heads = fits[0] if len(fits) == 1 else None
    for count in (wanted, *_of_config(config, owner, widths["q"])):
        if count in fits:
            heads = count
            break
    head_dim = None if heads is None else widths["q"] // heads
    kv_heads = heads if owner.latent is not None or head_dim is None else widths["k"] // head_dim
    roles: dict[str, Role] = {}
    for part, tensor in owner.parts.items():
        if part == "b_o":
            roles[tensor.name] = Role("embed", "b_o: added once, not split by head", part=part)
        elif owner.width(part) == sum(widths[letter] for letter in part[2:]):
            by_group = False if len(part) == 3 else _is_by_group(tensor.word, config)
            roles[tensor.name] = _Layout(owner, part, widths, heads, kv_heads, by_group).role()
    for name, text in owner.other_roles.items():
        roles[name] = Role("", text)
    stored = StoredAttention(
        module=owner.path,
        parameters=tuple(roles),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        fits=fits if heads is None else (),
    )
    return NamedAttention(stored, roles)


def _fitting_heads(owner: _Owner, widths: Mapping[str, int]) -> tuple[int, ...]:
    """Return the numbers of heads with which the tensors of an attention fit together."""
    if owner.latent is None or "W_kv" not in owner.parts:
        return fitting_counts(widths["q"], widths["k"], widths["v"], widths["o"], owner.head_dim)
    # A query is as wide as its key: the head's own part, and the position part that all heads share.
    shared = owner.latent - owner.parts["W_kv"].shape[1]
    if shared <= 0:
        return ()
    count, rest = divmod(widths["q"] - widths["k"], shared)
    if count <= 0 or rest:
        return ()
    is_whole = all(widths[letter] % count == 0 for letter in "qkv")
    return (count,) if is_whole else ()


def _of_config(config: Mapping[str, Any], owner: _Owner, width: int) -> list[int]:
    """Return the numbers of heads in a config and its inner configs, for an attention of this width and name.

    Those of a config with the name of the attention's path come first: `vision_config` for `vision.layers.0.attn`.
    """
    inner_configs = {key: inner for key, inner in config.items() if key.endswith("_config") and isinstance(inner, dict)}
    query = owner.parts["W_q" if "W_q" in owner.parts else "W_qkv"].shape
    named: list[int] = []
    unnamed: list[int] = []
    for key, inner in {"": config, **inner_configs}.items():
        hidden = _first_int(inner, _WIDTH)
        # Of several configs only those of this width count.
        if inner_configs and hidden is not None and hidden not in query:
            continue
        for name in _HEADS:
            count, head_dim = inner.get(name), inner.get("head_dim")
            if type(count) is not int:
                continue
            if type(head_dim) is int and owner.latent is None and count * head_dim != width:
                continue
            word = (key or name).partition("_")[0]
            (named if word in owner.path else unnamed).append(count)
    return named + unnamed


def _first_int(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first whole number with one of these names in a config; None if there is none."""
    for name in names:
        value = config.get(name)
        if type(value) is int:
            return value
    return None


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

    def role(self) -> Role:
        """Return the purpose of the tensor."""
        return Role(
            axes=self.pattern(),
            text=self.text(),
            heads=self.slices(),
            axis=self.owner.axis(self.part),
            part=self.part,
            blocks=self.blocks(),
        )

    @property
    def kind(self) -> str:
        """`W` for a weight, `b` for a bias."""
        return self.part[0]

    @property
    def letters(self) -> str:
        """The parts in the tensor: `q`, `qkv`."""
        return self.part[2:]

    def _count(self, letter: str) -> int:
        """Return the number of heads of a part; 1 if it is unknown."""
        return (self.kv_heads if letter in "kv" else self.heads) or 1

    def _head_width(self, letter: str) -> int:
        """Return the features of a head of a part."""
        return self.widths[letter] // self._count(letter)

    @property
    def _is_shared(self) -> bool:
        """Whether query heads share keys and values."""
        return self.widths["k"] < self.widths["q"] and self.owner.latent is None

    def _inner_size(self, part: str) -> int:
        """Return the number of features that a weight reads."""
        return self.owner.parts[part].shape[1 - self.owner.axis(part)]

    def pattern(self) -> str:
        """Return the dimensions as an einops pattern: `(heads head_dim) embed`."""
        axis = self.owner.axis(self.part)
        rank = len(self.owner.parts[self.part].shape)
        side, inner = self._side_of_heads(), self._inner_side()
        return " ".join(side if place == axis else inner for place in range(rank))

    def _inner_side(self) -> str:
        """Return the name of the dimension without heads."""
        word = self.owner.parts[self.part].word
        if self.owner.latent is not None and self.letters in ("kv", "q") and word != "q_proj":
            return "latent"
        if self.kind == "W" and self.letters in ("k", "v") and self._inner_size("W_q") != self._inner_size(self.part):
            return f"{self.letters}dim"
        return "embed"

    def _side_of_heads(self) -> str:
        """Return the dimension with the features of the heads."""
        letters = self.letters
        is_latent = self.owner.latent is not None
        heads = "kv_heads" if self._is_shared and letters in ("k", "v", "kv") else "heads"
        if self.by_group is None:
            return "packed"
        if len(letters) == 1:
            return f"({heads} v_head_dim)" if is_latent and letters == "o" else f"({heads} head_dim)"
        if len({self.widths[letter] for letter in letters}) == 1:
            return f"({heads} {letters} head_dim)" if self.by_group else f"({letters} {heads} head_dim)"
        if not self.by_group or self.kv_heads == 1:
            return "packed"
        return "(heads packed)" if is_latent else "(kv_heads packed)"

    def text(self) -> str:
        """Return the parts in the tensor and the order of their heads, as a phrase."""
        listed = ", ".join(f"{self.kind}_{letter}" for letter in self.letters)
        if len(self.letters) == 1:
            return f"{listed}{self._text_of_heads()}{self._text_of_sharing()}"
        if self.by_group is None:
            return f"{listed} in one tensor: could not determine whether head by head"
        if self.by_group and (self.kv_heads != 1 or self.heads == 1):
            return f"{listed} {self._text_of_groups()}"
        unit = self._unit()
        places = ", ".join(f"{start}–{stop - 1}" for start, stop in self._bounds_of_parts())
        return f"{listed} {_WAYS[unit]}: {unit} {places}"

    def _unit(self) -> str:
        """Return what the features of a head are in the tensor: its rows, its columns or its elements."""
        if self.kind == "b":
            return "elements"
        return "rows" if self.owner.axis(self.part) == 0 else "columns"

    def _text_of_heads(self) -> str:
        """Return the order of the heads of one part: `: rows are the heads stacked, 64 each`; empty for a bias."""
        if self.kind == "b":
            return ""
        unit = self._unit()
        width = f", {self._head_width(self.letters)} each" if self.heads else ""
        return f": {unit} are the heads {_WAYS[unit]}{width}"

    def _text_of_sharing(self) -> str:
        """Return how many query heads share a head of keys or values: `, each for 4 query heads`; empty if none do."""
        if not self._is_shared or self.letters not in "kv" or not self.heads or not self.kv_heads:
            return ""
        return f", each for {self.heads // self.kv_heads} query heads"

    def _text_of_groups(self) -> str:
        """Return the order of parts in groups: `group by group: 2·64 rows of q, 64 of k, 64 of v each`."""
        way = "group by group" if self._is_shared and "q" in self.letters else "head by head"
        if not self.kv_heads:
            return way
        sizes: list[str] = []
        for letter in self.letters:
            size = str(self._head_width(letter))
            if self._count(letter) > self.kv_heads:
                size = f"{self._count(letter) // self.kv_heads}·{size}"
            if not sizes:
                size += f" {self._unit()}"
            sizes.append(f"{size} of {letter}")
        return f"{way}: {', '.join(sizes)} each"

    def _bounds_of_parts(self) -> list[tuple[int, int]]:
        """Return where each part begins and ends, if parts lie one after the other."""
        bounds: list[tuple[int, int]] = []
        start = 0
        for letter in self.letters:
            bounds.append((start, start + self.widths[letter]))
            start += self.widths[letter]
        return bounds

    def slices(self) -> tuple[HeadSlice, ...]:
        """Return the rows and columns of each head of each part; empty if the heads or the packing are unknown."""
        if self.heads is None or self.by_group is None:
            return ()
        groups = (self.kv_heads or 1) if self.by_group else 1
        starts: dict[str, list[int]] = {letter: [] for letter in self.letters}
        end = 0
        for _ in range(groups):
            for letter in self.letters:
                # Each group has this many heads of each part.
                for _ in range(self._count(letter) // groups):
                    starts[letter].append(end)
                    end += self._head_width(letter)
        slices: list[HeadSlice] = []
        for letter in self.letters:
            for head, start in enumerate(starts[letter]):
                slices.append(self._slice(head, letter, (start, start + self._head_width(letter))))
        return tuple(slices)

    def blocks(self) -> tuple[HeadSlice, ...]:
        """Return the rows and columns of each part; empty if they lie head by head, or their order is unknown."""
        if self.by_group is not False:
            return ()
        parts = zip(self.letters, self._bounds_of_parts(), strict=True)
        return tuple(self._slice(0, letter, bounds) for letter, bounds in parts)

    def _slice(self, head: int, letter: str, features: tuple[int, int]) -> HeadSlice:
        """Return the rows and columns of these features of a part; all columns of rows, or all rows of columns."""
        shape = self.owner.parts[self.part].shape
        bounds: list[tuple[int, int]] = [(0, size) for size in shape]
        bounds[self.owner.axis(self.part)] = features
        return HeadSlice(head, f"{self.kind}_{letter}", bounds[0], bounds[1] if len(bounds) > 1 else None)


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

    if query >= 2**40:
        return ()
    return tuple(count for count in divisors(query) if fits(count))

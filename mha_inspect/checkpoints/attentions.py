"""Which tensors of a checkpoint belong to which attention, by their names; and what their shapes allow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal

from ..reports.params import HeadSlice, StoredAttention
from .stored import StoredTensor

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
_SAID = {
    **dict.fromkeys(("q_norm", "q_layernorm", "q_ln", "query_norm"), "scales the queries after their projection"),
    **dict.fromkeys(("k_norm", "k_layernorm", "k_ln", "key_norm"), "scales the keys after their projection"),
    "q_a_proj": "a projection to something narrower, on the way to the queries: it belongs to no head",
    "q_a_layernorm": "scales what is on the way to the queries, before they are projected: it belongs to no head",
    "kv_a_proj_with_mqa": "a projection to something narrower, on the way to the keys and values: it belongs to no "
    "head",
    "kv_a_layernorm": "scales what is on the way to the keys and values, before they are projected: it belongs to no "
    "head",
    "relative_attention_bias": "added to the scores",
}
"""What a tensor does beside the projections."""
_GROUPED = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon", "internlm2", "deberta"})
"""Types of config whose packed projection lies group by group: the queries of a key, that key, its value."""
_SIDE_BY_SIDE = frozenset({"gpt2", "phi3", "mpt", "dbrx", "modernbert", "qwen", "baichuan", "nomic_bert", "glm"})
"""Types of config whose packed projection lies part by part."""
_IN_FOUR = "codegen"
"""The type of config whose packed projection lies in four groups, each of queries, values and keys in this order."""
_UNCERTAIN = frozenset({"query_key_value", "wqkv"})
"""Words under which some pack head by head, and others not."""
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_WIDTH = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
_NAME = re.compile(r"(?:(?P<owner>.*)\.)?(?P<word>(?:to_out\.0|[^.]+?))(?P<kind>[._]weight|[._]bias)")
_BY_HEAD = re.compile(r"(?:(?P<owner>.*)\.)?(?:(?P<kind>[Wb])_(?P<letter>[QKVO])|(?P<bare>[qkvo]))")
"""A tensor of three dimensions, one of which counts the heads: `W_Q` of TransformerLens, and `q` of XLNet."""

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
            own, whole = (start, start + self.width), (0, shape[1 - self.axis] if len(shape) > 1 else 0)
            if len(shape) == 1:
                yield HeadSlice(head, self.part, own, None)
            else:
                yield HeadSlice(head, self.part, *((own, whole) if self.axis == 0 else (whole, own)))


@dataclass(frozen=True)
class FoundAttention:
    """An attention, and what each of its tensors is for."""

    stored: StoredAttention
    roles: dict[str, Role]
    projections: tuple[StoredProjection, ...]
    """Empty where the number of heads is not known; without those whose packing is not."""
    packed: Mapping[Packing, tuple[StoredProjection, ...]]
    """What they would be in each way to pack q, k and v in one tensor; empty where they are not in one."""


@dataclass(frozen=True)
class _Widths:
    """The features of all heads together."""

    query: int
    key: int
    value: int
    output: int
    """Those that W_o takes in."""

    def of(self, letter: str) -> int:
        return {"q": self.query, "k": self.key, "v": self.value, "o": self.output}[letter]


@dataclass
class _Parts:
    """The tensors of one attention, by what they are: `W_q`, `b_qkv`."""

    owner: str
    tensors: dict[str, tuple[str, StoredTensor]] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    beside: dict[str, str] = field(default_factory=dict)
    """Names of other tensors, to what they do."""
    head_dim: int | None = None
    """Where the shape of a norm tells it."""
    num_heads: int | None = None
    """Where the shape of a table of positions tells it, or a dimension that counts the heads."""
    latent: StoredTensor | None = None
    """What makes the keys and values narrower, with a key of positions that all heads share."""

    @property
    def whole(self) -> bool:
        has_keys = {"W_k", "W_v"} <= {*self.tensors} or "W_kv" in self.tensors
        return "W_qkv" in self.tensors or ("W_q" in self.tensors and has_keys)

    def shape(self, part: str) -> tuple[int, ...] | None:
        return self.tensors[part][1].shape if part in self.tensors else None

    @property
    def across(self) -> bool:
        """Whether weights are `in out`, as in GPT-2's Conv1D."""
        shape = self.shape("W_qkv")
        return shape is not None and self.words["qkv"] == "c_attn" and shape[1] > shape[0]

    @property
    def stacked(self) -> bool:
        """Whether a dimension of the matrices counts the heads."""
        return self.words.get("q") in ("W", "bare")


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
    for parts in _owners(tensors).values():
        widths = _widths(parts) if parts.whole else None
        if widths is not None:
            found.append(_attention(parts, widths, config, asked))
    return found


def _attention(parts: _Parts, widths: _Widths, config: Mapping[str, Any], asked: int | None) -> FoundAttention:
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
    own = [(name, _Tensor(parts, part, shape, widths, counts, config)) for name, part, shape in each]
    fitting = [(name, tensor) for name, tensor in own if tensor.fits]
    roles = {name: tensor.role() for name, tensor in fitting}
    roles |= {name: Role("", text) for name, text in parts.beside.items()}
    left = () if count is not None else tuple(fits)
    stored = StoredAttention(parts.owner, tuple(roles), count, kv_heads, head_dim, left)

    def packed(way: Packing | None) -> tuple[StoredProjection, ...]:
        return tuple(one for name, tensor in fitting for one in tensor.projections(name, way))

    ways: tuple[Packing, ...] = ("part by part", "group by group") if "W_qkv" in parts.tensors else ()
    return FoundAttention(stored, roles, packed(None), {way: packed(way) for way in ways})


def _of_config(config: Mapping[str, Any], parts: _Parts, widths: _Widths) -> list[int]:
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


# -- which tensors ------------------------------------------------------------------------------------------------


def _owners(tensors: Mapping[str, StoredTensor]) -> dict[str, _Parts]:
    """Return what may be attentions, by the path of the module that holds the projections."""
    owners: dict[str, _Parts] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            _add_stacked(owners, name, tensor)
            continue
        owner, word, kind = match["owner"] or "", match["word"].casefold(), match["kind"][1]
        if word == "dense" and owner.rpartition(".")[2] == "output":
            # BERT's own way: attention.self.query, and attention.output.dense.
            around = owner.rpartition(".")[0]
            inner = next((f"{around}.{part}" for part in ("self", "attention") if f"{around}.{part}" in owners), None)
            owner = inner or owner
        parts = owners.setdefault(owner, _Parts(owner))
        if word in _SAID:
            parts.beside[name] = _SAID[word]
            if _SAID[word].startswith("scales") and "after" in _SAID[word] and len(tensor.shape) == 1:
                parts.head_dim = tensor.shape[0]
            if word == "relative_attention_bias" and len(tensor.shape) == 2:
                parts.num_heads = tensor.shape[1]
            if word == "kv_a_proj_with_mqa" and kind == "w":
                parts.latent = tensor
        elif word in _WORDS:
            letters = _WORDS[word]
            parts.tensors.setdefault(f"{'W' if kind == 'w' else 'b'}_{letters}", (name, tensor))
            parts.words[letters] = "Wqkv" if match["word"] == "Wqkv" else word
    # BERT's output is sorted before its query.
    for parts in list(owners.values()):
        around, _, last = parts.owner.rpartition(".")
        if last in ("self", "attention") and parts.whole and "W_o" not in parts.tensors:
            output = owners.get(f"{around}.output")
            for part in ("W_o", "b_o"):
                if output is not None and part in output.tensors:
                    parts.tensors[part] = output.tensors[part]
    return owners


def _add_stacked(owners: dict[str, _Parts], name: str, tensor: StoredTensor) -> None:
    """Add a tensor with a matrix, or a bias, for each head."""
    match = _BY_HEAD.fullmatch(name)
    if match is None or len(tensor.shape) != (3 if match["kind"] != "b" else 1 if match["letter"] == "O" else 2):
        return
    letter = (match["letter"] or match["bare"]).casefold()
    parts = owners.setdefault(match["owner"] or "", _Parts(match["owner"] or ""))
    parts.tensors[f"{match['kind'] or 'W'}_{letter}"] = name, tensor
    parts.words[letter] = "bare" if match["bare"] else "W"
    if letter == "q" and match["kind"] != "b":
        parts.num_heads = tensor.shape[1 if match["bare"] else 0]


# -- sizes ---------------------------------------------------------------------------------------------------------


def _widths(parts: _Parts) -> _Widths | None:
    """Return the features of all heads together; None where the shapes do not tell."""
    held = {part: tensor.shape for part, (_, tensor) in parts.tensors.items() if part.startswith("W")}
    dimensions = 3 if parts.stacked else 2
    if any(len(shape) != dimensions or 0 in shape for shape in held.values()):
        return None
    if parts.stacked:
        if not {"W_q", "W_k", "W_v"} <= {*held}:
            return None
        query, key, value = (
            shape[_axes_of_stack(parts, letter)[0]] * shape[_axes_of_stack(parts, letter)[1]]
            for letter, shape in (("q", held["W_q"]), ("k", held["W_k"]), ("v", held["W_v"]))
        )
        return _Widths(query, key, value, query)
    out = held["W_o"][0 if parts.across else 1] if "W_o" in held else None
    if "W_qkv" in held:
        total = held["W_qkv"][1 if parts.across else 0]
        query = total // 3 if out is None else out
        if total <= query or (total - query) % 2:
            return None
        return _Widths(query, (total - query) // 2, (total - query) // 2, query)
    query = held["W_q"][0]
    if "W_kv" in held:
        total = held["W_kv"][0]
        if parts.latent is not None:  # what is not of the values is of the keys
            return None if out is None or not 0 < out < total else _Widths(query, total - out, out, out)
        return None if total % 2 else _Widths(query, total // 2, total // 2, query)
    return _Widths(query, held["W_k"][0], held["W_v"][0], query if out is None else out)


def _axes_of_stack(parts: _Parts, letter: str) -> tuple[int, int]:
    """Return the dimensions of a matrix for each head that count the heads, and their features."""
    if parts.words.get(letter) == "bare":  # embed heads head_dim
        return 1, 2
    return (0, 1) if letter == "o" else (0, 2)


def _fitting_latent(parts: _Parts, widths: _Widths) -> tuple[int, ...]:
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


# -- what each is for ------------------------------------------------------------------------------------------------


class _Tensor:
    """One tensor of an attention: where in it each head lies, in words and in numbers."""

    def __init__(
        self,
        parts: _Parts,
        part: str,
        shape: tuple[int, ...],
        widths: _Widths,
        counts: Mapping[str, int | None],
        config: Mapping[str, Any],
    ) -> None:
        self._parts, self._shape, self._widths, self._counts = parts, shape, widths, counts
        self._matrix, self._letters = part.split("_")
        self._is_matrix = self._matrix == "W"
        self._is_stack = parts.stacked and len(shape) == (3 if self._is_matrix else 2)
        self._axis = 1 if self._is_matrix and (self._letters == "o") != parts.across else 0
        self._in_four = config.get("model_type") == _IN_FOUR and self._letters == "qkv" and (counts["q"] or 0) % 4 == 0
        self._order = "qvk" if self._in_four else self._letters
        self._groups = 4 if self._in_four else counts["k"] or 1
        self._packing = self._packed(config)

    @property
    def fits(self) -> bool:
        """Whether its size is what the others say."""
        if self._letters == "o" and not self._is_matrix:
            return True
        return self._is_stack or (
            len(self._shape) > self._axis
            and self._shape[self._axis] == sum(self._widths.of(letter) for letter in self._letters)
        )

    def _packed(self, config: Mapping[str, Any]) -> Packing:
        kind, word = str(config.get("model_type", "")), self._parts.words.get(self._letters, "")
        if len(self._letters) == 1 or kind in _SIDE_BY_SIDE:
            return "part by part"
        by_group = kind in _GROUPED or word in ("kv_b_proj", "linear_qkv")
        if by_group or (kind == "gpt_bigcode" and config.get("multi_query") is False):
            return "group by group"
        if self._in_four:
            return "group by group"
        return "unknown" if word in _UNCERTAIN or kind == _IN_FOUR else "part by part"

    @property
    def _grouped(self) -> bool:
        """Whether heads share keys and values."""
        return self._widths.key < self._widths.query and self._parts.latent is None

    def _width(self, letter: str) -> int | None:
        """Return the features of one head; None where their number is not known."""
        count = self._counts[letter]
        return None if count is None else self._widths.of(letter) // count

    def role(self) -> Role:
        """Return what it is for."""
        if self._letters == "o" and not self._is_matrix:
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
            names = dict(zip(_axes_of_stack(self._parts, letters), (heads, head_dim), strict=True))
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
            side = (
                f"({heads} {letters} head_dim)" if self._packing != "part by part" else f"({letters} {heads} head_dim)"
            )
        return side if not self._is_matrix else f"{side} {inner}" if self._axis == 0 else f"{inner} {side}"

    def _text(self) -> str:
        letters, unit = self._letters, "elements" if not self._is_matrix else ("rows", "columns")[self._axis]
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
            lie = "side by side" if unit == "columns" else "one above the other"
            each = self._width(letters)
            return f"{listed}: its {unit} are the heads {lie}" + (f", {each} each" if each else "") + shared
        if self._packing == "unknown":
            return f"{listed} in one: neither its name nor its shape tells whether head by head"
        if self._packing == "group by group" and (kv_heads is None or kv_heads > 1 or kv_heads == heads):
            return f"{listed} {self._in_groups(unit)}"
        places = list(accumulate((self._widths.of(letter) for letter in letters), initial=0))
        way = {"rows": "one above the other", "columns": "side by side", "elements": "one after the other"}[unit]
        return f"{listed} {way}: {unit} " + ", ".join(f"{start}–{stop - 1}" for start, stop in pairwise(places))

    def _in_groups(self, unit: str) -> str:
        way = "group by group" if self._in_four or (self._grouped and "q" in self._letters) else "head by head"
        said: list[str] = []
        for letter in self._order:
            width, each = self._width(letter), self._each(letter)
            if width is None:
                return way
            said.append(f"{f'{each}·' if each > 1 else ''}{width}{'' if said else ' ' + unit} of {letter}")
        return f"{way}: {', '.join(said)} each"

    def _each(self, letter: str) -> int:
        """Return how many heads of it are in one group."""
        return (self._counts[letter] or 1) // self._groups

    def projections(self, name: str, way: Packing | None) -> list[StoredProjection]:
        """Return where each head of each part lies; nothing where the number of heads or the packing is not known.

        `way` is how parts would be packed; None: as they are.
        """
        letters, packing = self._letters, way or self._packing
        if None in self._counts.values() or packing == "unknown" or (letters == "o" and not self._is_matrix):
            return []
        if self._is_stack:
            heads_axis, axis = _axes_of_stack(self._parts, letters) if self._is_matrix else (0, 1)
            return [StoredProjection(f"{self._matrix}_{letters}", name, axis, (), self._shape[axis], heads_axis)]
        widths = {letter: self._width(letter) or 1 for letter in letters}
        groups = self._groups if packing == "group by group" else 1
        # In each group, so many heads of each.
        order = [(letter, (self._counts[letter] or 1) // groups) for letter in self._order]
        starts: dict[str, list[int]] = {letter: [] for letter in letters}
        place = 0
        for _ in range(groups):
            for letter, number in order:
                starts[letter] += [place + head * widths[letter] for head in range(number)]
                place += number * widths[letter]
        return [
            StoredProjection(f"{self._matrix}_{letter}", name, self._axis, tuple(own), widths[letter])
            for letter, own in starts.items()
        ]

"""The tensors of what may be an attention: which they are by their names, and how wide all heads are together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

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
_NORMS = {
    **dict.fromkeys(("q_norm", "q_layernorm", "q_ln", "query_norm"), "scales the queries after their projection"),
    **dict.fromkeys(("k_norm", "k_layernorm", "k_ln", "key_norm"), "scales the keys after their projection"),
}
_SAID = {
    **_NORMS,
    "q_a_proj": "a projection to something narrower, on the way to the queries: it belongs to no head",
    "q_a_layernorm": "scales what is on the way to the queries, before they are projected: it belongs to no head",
    "kv_a_proj_with_mqa": "a projection to something narrower, on the way to the keys and values: it belongs to no "
    "head",
    "kv_a_layernorm": "scales what is on the way to the keys and values, before they are projected: it belongs to no "
    "head",
}
"""What a tensor does beside the projections."""
_TELLING = tuple(
    (re.compile(words), [names.split() for names in axes.split(" or ")], text)
    for words, axes, text in (
        (
            "relative_(?:attention_bias|position_bias_table)",
            "positions heads or heads rows columns",
            "added to the scores",
        ),
        ("attention_biases", "heads positions", "added to the scores"),
        ("pos_bias_[uv]|r_[rsw]_bias", "heads head_dim", "added to the queries"),
        ("rel_pos_[hw]", "positions head_dim", "its products with the queries are added to the scores"),
        ("logit_scale|temperature|head_scale.*", "heads 1 1 or 1 heads 1 1", "a factor for each head"),
        (
            ".*talking_heads.*|proj_[lw]|reattn_weights",
            "heads heads or heads heads 1 1",
            "mixes the heads with one another",
        ),
    )
)
"""Tensors whose shapes tell how many heads there are, or how wide one is: names, axes, and what they do."""
_NAME = re.compile(r"(?:(?P<owner>.*)\.)?(?P<word>(?:to_out\.0|[^.]+?))(?P<kind>[._]weight|[._]bias)")
_BY_HEAD = re.compile(r"(?:(?P<owner>.*)\.)?(?:(?P<kind>[Wb])_(?P<letter>[QKVO])|(?P<bare>[qkvo]))")
"""A tensor of three dimensions, one of which counts the heads: `W_Q` of TransformerLens, and `q` of XLNet."""


class Widths(NamedTuple):
    """The features of all heads together."""

    q: int
    k: int
    v: int
    o: int
    """Those that W_o takes in."""

    def of(self, letters: str) -> int:
        """Return those of some of q, k, v and o together."""
        return sum(getattr(self, letter) for letter in letters)


@dataclass
class Parts:
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
        """Whether it has queries, keys and values."""
        has_keys = {"W_k", "W_v"} <= {*self.tensors} or "W_kv" in self.tensors
        return "W_qkv" in self.tensors or ("W_q" in self.tensors and has_keys)

    def shape(self, part: str) -> tuple[int, ...] | None:
        """Return the shape of `W_q`, or of another part; None where it is not there."""
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


def parts_by_owner(tensors: Mapping[str, StoredTensor]) -> dict[str, Parts]:
    """Return what may be attentions, by the path of the module that holds the projections."""
    owners: dict[str, Parts] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            _add_stacked(owners, name, tensor)
            continue
        owner, word, kind = match["owner"] or "", match["word"].casefold(), match["kind"][1]
        parts = owners.setdefault(owner, Parts(owner))
        if word in _SAID:
            parts.beside[name] = _SAID[word]
            if word in _NORMS and len(tensor.shape) == 1:
                parts.head_dim = tensor.shape[0]
            if word == "kv_a_proj_with_mqa" and kind == "w":
                parts.latent = tensor
        elif word in _WORDS:
            letters = _WORDS[word]
            parts.tensors.setdefault(f"{'W' if kind == 'w' else 'b'}_{letters}", (name, tensor))
            parts.words[letters] = "Wqkv" if match["word"] == "Wqkv" else word
    # BERT's own way: attention.self.query, and attention.output.dense.
    for parts in list(owners.values()):
        around, _, last = parts.owner.rpartition(".")
        if last in ("self", "attention") and parts.whole and "W_o" not in parts.tensors:
            output = owners.get(f"{around}.output", Parts(""))
            parts.tensors |= {part: named for part, named in output.tensors.items() if part in ("W_o", "b_o")}
    for name, tensor in tensors.items():
        _tell(owners, name, tensor.shape)
    return owners


def _tell(owners: Mapping[str, Parts], name: str, shape: tuple[int, ...]) -> None:
    """Note what a tensor beside the projections tells of the heads of its attention."""
    around, _, word = name.removesuffix(".weight").rpartition(".")
    axes, text = next(((axes, text) for words, axes, text in _TELLING if words.fullmatch(word)), ([], ""))
    sizes = next(filter(None, (_sizes(words, shape) for words in axes)), None)
    paths = (around, around.rpartition(".")[0])
    parts = next((owners[path] for path in paths if path in owners and owners[path].whole), None)
    if sizes is not None and parts is not None:
        parts.beside[name] = text
        parts.num_heads = parts.num_heads or sizes.get("heads")
        parts.head_dim = parts.head_dim or sizes.get("head_dim")


def _sizes(axes: list[str], shape: tuple[int, ...]) -> dict[str, int] | None:
    """Return the sizes of axes by name; None where the shape has others."""
    sizes = {**dict(zip(axes, shape, strict=False)), "1": 1}
    return sizes if len(axes) == len(shape) and [sizes[axis] for axis in axes] == [*shape] else None


def _add_stacked(owners: dict[str, Parts], name: str, tensor: StoredTensor) -> None:
    """Add a tensor with a matrix, or a bias, for each head."""
    match = _BY_HEAD.fullmatch(name)
    if match is None or len(tensor.shape) != (3 if match["kind"] != "b" else 1 if match["letter"] == "O" else 2):
        return
    letter = (match["letter"] or match["bare"]).casefold()
    parts = owners.setdefault(match["owner"] or "", Parts(match["owner"] or ""))
    parts.tensors[f"{match['kind'] or 'W'}_{letter}"] = name, tensor
    parts.words[letter] = "bare" if match["bare"] else "W"
    if letter == "q" and match["kind"] != "b":
        parts.num_heads = tensor.shape[1 if match["bare"] else 0]


def widths_of(parts: Parts) -> Widths | None:
    """Return the features of all heads together; None where the shapes do not tell."""
    shapes = {part: tensor.shape for part, (_, tensor) in parts.tensors.items() if part.startswith("W")}
    dimensions = 3 if parts.stacked else 2
    if any(len(shape) != dimensions or 0 in shape for shape in shapes.values()):
        return None
    if parts.stacked:
        if not {"W_q", "W_k", "W_v"} <= {*shapes}:
            return None
        widths = {
            letter: prod(shapes[f"W_{letter}"][axis] for axis in axes_of_stack(parts, letter)) for letter in "qkv"
        }
        return Widths(**widths, o=widths["q"])
    out = shapes["W_o"][0 if parts.across else 1] if "W_o" in shapes else None
    if "W_qkv" in shapes:
        total = shapes["W_qkv"][1 if parts.across else 0]
        query = total // 3 if out is None else out
        if total <= query or (total - query) % 2:
            return None
        return Widths(query, (total - query) // 2, (total - query) // 2, query)
    query = shapes["W_q"][0]
    if "W_kv" in shapes:
        total = shapes["W_kv"][0]
        if parts.latent is not None:  # what is not of the values is of the keys
            return None if out is None or not 0 < out < total else Widths(query, total - out, out, out)
        return None if total % 2 else Widths(query, total // 2, total // 2, query)
    return Widths(query, shapes["W_k"][0], shapes["W_v"][0], query if out is None else out)


def axes_of_stack(parts: Parts, letter: str) -> tuple[int, int]:
    """Return the dimensions of a matrix for each head that count the heads, and their features."""
    if parts.words.get(letter) == "bare":  # embed heads head_dim
        return 1, 2
    return (0, 1) if letter == "o" else (0, 2)

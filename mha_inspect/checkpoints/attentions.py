"""Which tensors of a checkpoint belong to which attention, by their names; and what their shapes allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..reports.params import HeadSlice, StoredAttention
from .stored import StoredTensor

_LETTERS = {
    "q": "q_proj query q wq to_q q_lin linear_q query_proj w_q q_linear query_layer q_b_proj",
    "k": "k_proj key k wk to_k k_lin linear_k key_proj w_k k_linear key_layer",
    "v": "v_proj value v wv to_v v_lin linear_v value_proj w_v v_linear value_layer",
    "o": "o_proj out_proj dense c_proj o wo to_out.0 to_out out_lin linear_out proj out w_o out_linear",
    "qkv": "in_proj c_attn qkv qkv_proj wqkv query_key_value attn_qkv to_qkv w_pack qkv_linear c_qkv",
    "kv": "kv_proj to_kv kv wkv key_value kv_b_proj",
}
_WORDS = {word: letters for letters, words in _LETTERS.items() for word in words.split()}
_SAID = {
    **dict.fromkeys(("q_norm", "q_layernorm", "q_ln"), "scales the queries after their projection"),
    **dict.fromkeys(("k_norm", "k_layernorm", "k_ln"), "scales the keys after their projection"),
    "q_a_proj": "a projection to something narrower, on the way to the queries",
    "kv_a_proj_with_mqa": "a projection to something narrower, on the way to the keys and values",
    "relative_attention_bias": "added to the scores",
}
"""What a tensor does beside the projections."""
_BY_HEAD = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon"})
"""Types of config whose query_key_value is packed head by head."""
_UNCERTAIN = frozenset({"query_key_value", "wqkv", "kv_b_proj"})
"""Words under which some pack head by head, and others not."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_NAME = re.compile(r"(?:(?P<owner>.*)\.)?(?P<word>(?:to_out\.0|[^.]+?))(?P<kind>[._]weight|[._]bias)")


@dataclass(frozen=True)
class Role:
    """What a tensor is for."""

    axes: str
    text: str
    heads: tuple[HeadSlice, ...] = ()


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
    """Where the shape of a table of positions tells it."""

    @property
    def whole(self) -> bool:
        return "W_qkv" in self.tensors or ("W_q" in self.tensors and ({"W_k", "W_v"} <= {*self.tensors} or self.mixed))

    @property
    def mixed(self) -> bool:
        return "W_kv" in self.tensors


def find_attentions(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], asked: int | None
) -> tuple[tuple[StoredAttention, ...], dict[str, Role]]:
    """Return the attentions in the order of their layers, and the role of each tensor of theirs.

    Args:
        tensors: by name.
        config: what config.json says, which may name head counts.
        asked: a number of heads that somebody has given; it stands where it fits.
    """
    found, roles = [], dict[str, Role]()
    for parts in _owners(tensors).values():
        if not parts.whole:
            continue
        widths = _widths(parts)
        if widths is None:
            continue
        fits = _fitting(parts, *widths)
        count = next((n for n in (parts.num_heads, asked, *_of_config(config)) if n in fits), None)
        count = fits[0] if count is None and len(fits) == 1 else count
        head_dim = None if count is None else widths[0] // count
        kv_heads = None if head_dim is None else widths[1] // head_dim
        own = _roles(parts, widths, count, kv_heads, str(config.get("model_type", "")))
        roles |= own
        left = () if count is not None else tuple(fits)
        found.append(StoredAttention(parts.owner, tuple(own), count, kv_heads, head_dim, left))
    return tuple(found), roles


def _of_config(config: Mapping[str, Any]) -> list[int]:
    held = [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]
    return [value for own in held for name in _HEADS if type(value := own.get(name)) is int]


def _owners(tensors: Mapping[str, StoredTensor]) -> dict[str, _Parts]:
    """Return what may be attentions, by the path of the module that holds the projections."""
    owners: dict[str, _Parts] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
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
            if _SAID[word].startswith("scales") and len(tensor.shape) == 1:
                parts.head_dim = tensor.shape[0]
            if word == "relative_attention_bias" and len(tensor.shape) == 2:
                parts.num_heads = tensor.shape[1]
        elif word in _WORDS:
            letters = _WORDS[word]
            parts.tensors.setdefault(f"{'W' if kind == 'w' else 'b'}_{letters}", (name, tensor))
            parts.words[letters] = word
    # BERT's output is sorted before its query.
    for parts in list(owners.values()):
        around, _, last = parts.owner.rpartition(".")
        if last in ("self", "attention") and parts.whole and "W_o" not in parts.tensors:
            output = owners.get(f"{around}.output")
            for part in ("W_o", "b_o"):
                if output is not None and part in output.tensors:
                    parts.tensors[part] = output.tensors[part]
    return owners


def _is_across(parts: _Parts) -> bool:
    """Return whether weights are `in out`, as in GPT-2's Conv1D."""
    if "c_attn" not in parts.words.values():
        return False
    rows, columns = parts.tensors["W_qkv"][1].shape
    return columns > rows


def _widths(parts: _Parts) -> tuple[int, int, int] | None:
    """Return the features of all heads together of queries, keys and values; None where the shapes do not tell."""
    held = {part: tensor.shape for part, (_, tensor) in parts.tensors.items() if part.startswith("W")}
    if any(len(shape) != 2 or 0 in shape for shape in held.values()):
        return None
    out = held["W_o"][0 if _is_across(parts) else 1] if "W_o" in held else None
    if "W_qkv" in held:
        total = held["W_qkv"][1 if _is_across(parts) else 0]
        query = total // 3 if out is None else out
        if total <= query or (total - query) % 2:
            return None
        return query, (total - query) // 2, (total - query) // 2
    if "W_kv" in held:
        half, odd = divmod(held["W_kv"][0], 2)
        return None if odd else (held["W_q"][0], half, half)
    return held["W_q"][0], held["W_k"][0], held["W_v"][0]


def _fitting(parts: _Parts, query: int, key: int, value: int) -> list[int]:
    """Return the numbers of heads that leave whole heads, and as many query heads to each key head.

    A norm of a head's features, where there is one, leaves one number.
    """
    fits = []
    small = [n for n in range(1, int(query**0.5) + 1) if query % n == 0] if query < 2**40 else []
    for count in sorted({*small, *(query // n for n in small)}):
        head_dim = query // count
        if key % head_dim or count % max(key // head_dim, 1) or value % (key // head_dim):
            continue
        if parts.head_dim in (None, query, head_dim):
            fits.append(count)
    return fits


def _roles(
    parts: _Parts, widths: tuple[int, int, int], heads: int | None, kv_heads: int | None, kind: str
) -> dict[str, Role]:
    """Return the role of each tensor of an attention, by its name."""
    across = _is_across(parts)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads, "o": heads}
    of_letter = dict(zip("qkv", widths, strict=True)) | {"o": widths[0]}
    roles: dict[str, Role] = {}
    for part, (name, tensor) in parts.tensors.items():
        matrix, letters = part.split("_")
        rows_are_heads = matrix == "b" or ((letters == "o") == across)
        size, words = tensor.shape[0 if rows_are_heads else -1], parts.words.get(letters, "")
        group = "kv_heads" if widths[1] != widths[0] and letters in ("k", "v", "kv") else "heads"
        if matrix == "b" and letters == "o":
            roles[name] = Role("embed", "b_o: added once, it belongs to no head")
            continue
        if size != sum(of_letter[letter] for letter in letters):
            continue
        by_head = len(letters) > 1 and (kind in _BY_HEAD or words == "kv_b_proj")
        uncertain = len(letters) > 1 and words in _UNCERTAIN and not by_head
        side = _side(letters, group, by_head, uncertain, widths)
        axes = side if matrix == "b" else f"{side} embed" if rows_are_heads else f"embed {side}"
        unit = "elements" if matrix == "b" else "rows" if rows_are_heads else "columns"
        each = [None if counts[x] is None else of_letter[x] // (counts[x] or 1) for x in letters]
        text = _text(matrix, letters, unit, [of_letter[x] for x in letters], each, by_head, uncertain)
        if group == "kv_heads" and len(letters) == 1 and heads and kv_heads:
            text += f", each for {heads // kv_heads} query heads"
        slices: list[HeadSlice] = []
        if heads and kv_heads and not uncertain:
            slices = _slices(matrix, letters, counts, of_letter, by_head, tensor.shape, rows_are_heads)
        roles[name] = Role(axes, text, tuple(slices))
    return roles | {name: Role("", text) for name, text in parts.beside.items()}


def _side(letters: str, group: str, by_head: bool, uncertain: bool, widths: tuple[int, int, int]) -> str:
    if len(letters) == 1:
        return f"({group} head_dim)"
    if uncertain or len(set(widths)) > 1:
        return "packed"
    return f"({group} {letters} head_dim)" if by_head else f"({letters} {group} head_dim)"


def _text(
    matrix: str,
    letters: str,
    unit: str,
    sizes: list[int],
    each: list[int | None],
    by_head: bool,
    uncertain: bool,
) -> str:
    listed = ", ".join(f"{matrix}_{letter}" for letter in letters)
    if len(letters) == 1:
        width = "" if each[0] is None else f", {each[0]} each"
        way = (
            "its columns are the heads side by side"
            if unit == "columns"
            else "its rows are the heads one above the other"
        )
        return listed if matrix == "b" else f"{listed}: {way}{width}"
    if uncertain:
        return f"{listed} in one: neither its name nor its shape tells whether head by head"
    if by_head:
        widths = [f"{each[0]} {unit} of {letters[0]}"]
        widths += [f"{width} of {letter}" for width, letter in zip(each[1:], letters[1:], strict=True)]
        return f"{listed} head by head" + ("" if None in each else f": {', '.join(widths)} each")
    way = {"rows": "one above the other", "columns": "side by side", "elements": "one after the other"}[unit]
    places, start = [], 0
    for size in sizes:
        places.append(f"{start}–{start + size - 1}")
        start += size
    return f"{listed} {way}: {unit} {', '.join(places)}"


def _slices(
    matrix: str,
    letters: str,
    counts: Mapping[str, int | None],
    of_letter: Mapping[str, int],
    by_head: bool,
    shape: tuple[int, ...],
    rows_are_heads: bool,
) -> list[HeadSlice]:
    found, start = [], 0
    widths = [of_letter[letter] // (counts[letter] or 1) for letter in letters]
    for place, letter in enumerate(letters):
        for head in range(counts[letter] or 0):
            first = head * sum(widths) + sum(widths[:place]) if by_head else start + head * widths[place]
            bounds = (first, first + widths[place])
            if matrix == "b":
                found.append(HeadSlice(head, f"b_{letter}", bounds, None))
            elif rows_are_heads:
                found.append(HeadSlice(head, f"W_{letter}", bounds, (0, shape[1])))
            else:
                found.append(HeadSlice(head, f"W_{letter}", (0, shape[0]), bounds))
        start += of_letter[letter]
    return found

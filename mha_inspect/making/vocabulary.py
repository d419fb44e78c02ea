"""The names that people use for arguments: of a constructor, by flag, and of a forward, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, Literal, get_args

_NAMES: dict[str, str] = {
    "embed_dim": (
        "embed_dim d_model hidden_size dim n_embd embed_size embedding_dim embedding_size emb_dim emb_size emb "
        + "model_dim dim_model hidden_dim hid_dim num_hiddens n_hidden hidden n_embed d_embed embed channels "
        + "in_channels in_dim d_in dim_in input_dim input_size in_features query_dim query_size q_dim dim_q d_hidden "
        + "n_state n_feat features width out_dim d_out dim_out output_dim output_size out_features"
    ),
    "num_heads": (
        "num_heads n_heads nhead num_attention_heads heads num_head n_attention_heads attention_heads "
        "head_num heads_num head_count n_attn_heads num_attn_heads h"
    ),
    "num_kv_heads": "num_kv_heads num_key_value_heads n_kv_heads n_kv_head kv_heads num_kv_groups n_kv",
    "head_dim": "head_dim dim_head head_size d_head head_width attention_head_size d_k d_v dim_k dim_v d_q",
    "kdim": "kdim key_dim key_size dim_key d_key context_dim cross_attention_dim encoder_dim",
    "vdim": "vdim value_dim value_size dim_value d_value",
    "bias": "bias qkv_bias attention_bias use_bias",
    "add_bias_kv": "add_bias_kv",
    "add_zero_attn": "add_zero_attn",
    "dropout": (
        "dropout attn_dropout attention_dropout attn_pdrop dropout_p p_dropout dropout_rate drop_rate dropout_prob "
        "attn_drop attention_probs_dropout_prob hidden_dropout_prob resid_pdrop embd_pdrop resid_dropout proj_drop drop"
    ),
    "batch_first": "batch_first",
    "rope": "rope use_rope rotary use_rotary",
    "causal": "causal is_causal masked use_causal_mask",
    "seq_len": (
        "seq_len block_size context_length max_seq_len max_len max_length max_seq_length context_size n_ctx "
        "n_positions max_position_embeddings seq_length sequence_length max_sequence_length"
    ),
}
ALIASES: dict[str, list[str]] = {flag: names.split() for flag, names in _NAMES.items()}
"""Flag to the names of arguments of the same meaning, the most specific first."""
VOCABULARY = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")
CHANNELS = ("channels", "in_channels", "in_chans", "num_channels")
IMAGE_SIZES = ("image_size", "img_size", "input_resolution", "resolution")
"""Names of the sizes of inputs that have no flag."""


SET_BY_NAME = ("head_dim", "rope", "kdim", "vdim", "bias", "add_bias_kv", "add_zero_attn", "dropout")
"""Arguments of a layer without an option of their own: --set gives them, as it does for a target."""
SWITCHES = {
    "need_weights": ("need_weights", "output_attentions"),
    "average_weights": ("average_weights", "average_attn_weights"),
}
"""Settings on the weights that a layer returns, with the arguments of a forward that take them."""
SET_OF_RUN = ("unbatched", "grad")
"""Settings of a run without an option of their own, for a layer as for a target."""


def argument_of_forward(setting: str, names: Iterable[str]) -> str | None:
    """Return the argument of a forward that takes a setting: of its own name, or of one that means the same."""
    for name in SWITCHES.get(setting, (setting,)):
        if name in names:
            return name
    return None


def plain(name: str) -> str:
    """Return a name without case and underscores: `nHead`, `n_head` and `NHEAD` are one."""
    return name.replace("_", "").casefold()


_FLAG_OF = {plain(alias): flag for flag, aliases in ALIASES.items() for alias in aliases}


def flag_of(name: str) -> str | None:
    """Return the flag for the argument of this name; None if there is none."""
    return _FLAG_OF.get(plain(name))


def named_for(flag: str, names: Iterable[str]) -> list[str]:
    """Return the names that a flag gives, the most specific first."""
    aliases = [plain(alias) for alias in ALIASES[flag]]
    return sorted((name for name in names if plain(name) in aliases), key=lambda name: aliases.index(plain(name)))


def dashed(flag: str) -> str:
    """Return the flag as it is typed: `--embed-dim`."""
    return f"--{flag.replace('_', '-')}"


def typed_as(setting: str) -> str:
    """Return how the user types a setting: `--batch`, or `--set unbatched` for one without an option of its own."""
    return f"--set {setting}" if setting in SET_OF_RUN else dashed(setting)


def origin_of(flag: str) -> str:
    """Return where the value of a flag comes from, as the user reads it: the option, or a default."""
    return "default" if flag in SET_BY_NAME else dashed(flag)


@dataclass(frozen=True)
class Flags:
    """The values of the flags, and which of them the user set."""

    values: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    """Flags that the user set, on the command line or by a variable."""
    typed: frozenset[str] = frozenset()
    """Flags on the command line: each must have an effect."""
    setting: str = "--set"
    """The flag that sets an argument by its name, for messages."""

    def value(self, flag: str) -> Any:
        """Return the value of a flag, or one that follows from the other flags.

        None if nothing follows.
        """
        value = self.values.get(flag)
        if value is not None:
            return value
        embed_dim, num_heads = self.values.get("embed_dim", 512), self.values.get("num_heads", 8)
        if flag in ("embed_dim", "kdim", "vdim"):
            return embed_dim
        if flag in ("num_heads", "num_kv_heads"):
            return num_heads
        if flag == "head_dim":
            return embed_dim // num_heads if num_heads and embed_dim % num_heads == 0 else None
        return {"bias": True, "dropout": 0.0, "batch_first": True, "seq_len": 12}.get(flag, False)


Kind = Literal[
    "query", "key", "value", "hidden", "other", "ids", "image", "rotation", "mask", "lengths", "setting", "unknown"
]
"""`other` is a second sequence: a context, a memory, the output of an encoder. `rotation` is complex, by position."""


_KINDS: dict[Kind, str] = {
    "query": "query q queries x_q xq query_states q_in input_q inputs_q",
    "key": "key k keys x_k xk key_states k_in input_k inputs_k inputs_kv kv key_value key_value_states",
    "value": "value v values x_v xv value_states v_in input_v",
    "hidden": (
        "x hidden_states hidden_state src input inputs hidden embeddings embeds inputs_embeds embedding emb sequence "
        + "seq tgt target features feats input_tensor inp h z x_in data states tensor trg batch "
        + "source"
    ),
    "other": (
        "memory context encoder_hidden_states encoder_output encoder_outputs enc_output enc_out enc_outputs ctx cond y "
        "encoder_states encoder_out cross_states x2 other conditioning src_output encoder_output_states"
    ),
    "ids": (
        "input_ids ids idx token_ids tokens decoder_input_ids token indices input_tokens src_tokens tgt_tokens "
        "prev_output_tokens x_ids src_ids tgt_ids"
    ),
    "rotation": "freqs_cis freqs_complex freq_cis",
    "image": "pixel_values image images img imgs pixels picture pictures pixel_values_videos video videos",
}
_KIND_OF = {plain(name): kind for kind, names in _KINDS.items() for name in names.split()}


ENCODED = ("src", "source", "inputids", "xids", "srcids")
DECODED = ("tgt", "trg", "decoderinputids", "target")
"""Plain names of the inputs of an encoder and of a decoder, where a forward takes both."""
MASKS_OF_SCORES = ("attnmask", "attentionmask", "tgtmask", "mask", "srcmask", "bias", "attnbias")
MASKS_OF_KEYS = ("srckeypaddingmask", "memorykeypaddingmask", "keypaddingmask")
"""Plain names of masks, the most specific first."""
_SIZES_OF_IMAGES = ("H", "W", "height", "width")
"""Height and width of an image whose pixels are a sequence; `h` is a hidden state."""


def kind_of(parameter: Parameter) -> Kind:
    """Return the kind of an argument by its name, or by an annotation that is not a tensor."""
    name = parameter.name.casefold()
    if "mask" in name:
        return "mask"
    kinds = [part for part in get_args(parameter.annotation) if part is not type(None)]
    if not kinds:
        kinds = [parameter.annotation]
    plain_kinds = (bool, int, float, str, "bool", "int", "float", "str")
    if all(kind in plain_kinds for kind in kinds):
        return "setting"
    if isinstance(parameter.default, (bool, int, float, str)):
        return "setting"
    if parameter.name in _SIZES_OF_IMAGES:
        return "setting"
    word = plain(name)
    if word.endswith(("lens", "lengths")) or word == "validlen":
        return "lengths"
    return _KIND_OF.get(word, "unknown")

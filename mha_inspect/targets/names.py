"""What the arguments of a forward are by their names: the words that people use for them."""

from __future__ import annotations

from inspect import Parameter
from typing import Any, Literal, get_args

from .aliases import plain

Kind = Literal["query", "key", "value", "hidden", "other", "ids", "image", "mask", "setting", "unknown"]
"""`other` is a second sequence: a context, a memory, what the encoder gave."""


def _words(text: str) -> frozenset[str]:
    return frozenset(map(plain, text.split()))


_KINDS: dict[Kind, frozenset[str]] = {
    "query": _words("query q queries x_q xq query_states q_in input_q inputs_q"),
    "key": _words("key k keys x_k xk key_states k_in input_k inputs_k inputs_kv kv key_value key_value_states"),
    "value": _words("value v values x_v xv value_states v_in input_v"),
    "hidden": _words(
        "x hidden_states hidden_state src input inputs hidden embeddings embeds inputs_embeds embedding emb sequence "
        "seq tgt target features feats input_tensor inp h z x_in data states tensor trg batch "
        "source"
    ),
    "other": _words(
        "memory context encoder_hidden_states encoder_output encoder_outputs enc_output enc_out enc_outputs ctx cond y "
        "encoder_states encoder_out cross_states x2 other conditioning src_output encoder_output_states"
    ),
    "ids": _words(
        "input_ids ids idx token_ids tokens decoder_input_ids token indices input_tokens src_tokens tgt_tokens "
        "prev_output_tokens x_ids src_ids tgt_ids"
    ),
    "image": _words("pixel_values image images img imgs pixels picture pictures pixel_values_videos video videos"),
}


def kind_of(parameter: Parameter) -> Kind:
    """What an argument is by its name, or by its annotation where that says that it is no tensor."""
    name = parameter.name.casefold()
    if "mask" in name:
        return "mask"
    if _is_plain(parameter.annotation) or isinstance(parameter.default, (bool, int, float, str)):
        return "setting"
    known = plain(name)
    return next((kind for kind, names in _KINDS.items() if known in names), "unknown")


def _is_plain(annotation: Any) -> bool:
    """Whether an annotation says a number, a text or a switch."""
    if isinstance(annotation, str):
        return annotation in ("int", "float", "bool", "str")
    parts = [part for part in get_args(annotation) if part is not type(None)]
    kinds = parts or [annotation]
    return all(kind in (int, float, bool, str) for kind in kinds)

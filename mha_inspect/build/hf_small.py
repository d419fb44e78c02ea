"""A small configuration of a Hugging Face model: fewer and narrower layers, but some of every kind.

The numbers of its full configuration are made smaller according to their names. All widths are divided by one factor,
so that equal widths stay equal. The numbers of heads and of shared keys do not change.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..layers.spec import divisors
from ..text import listed

_LAYERS, _WORDS = 2, 128
_SIDE = 64
"""Pixels along a side of an image, if its patches allow it."""
_KINDS = 4
"""Kinds of layers at most: a list by layer with more values is not about kinds."""
_FACTORS = (16, 8, 4, 2, 1)
_EVEN = 64
"""A head with a multiple of this many features can be divided by any factor."""
_LEAST = 8
"""Minimum of rotated features in a head."""

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "encoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", "emb_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_DEPTH = r"(num|n)_(?!.*_per_)(\w+_)?(layers?|blocks)|(\w+_)?layers|(\w+_)?depths?"
_MOST = {
    r"\w*vocab(_size)?|vocab_size_per_layer_input": _WORDS,
    r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num": 4,
    r"\w*experts_per_tok(en)?|moe_(topk|k)|\w*top_k_experts|experts_top_k|num_selected_experts|top_k": 2,
    r"n_group|topk_group|num_expert_group|num_nextn_predict_layers|vision_feature_layers?": 1,
    r"num_kv_shared_layers|merge_index": 0,
    r"num_queries": 8,
    r"max_source_positions|max_length": 64,
    r"attn_layer_period|num_self_attends_per_block": _LAYERS,
    r"attn_layer_offset": _LAYERS - 1,
    _DEPTH: _LAYERS,
}
"""Maximum of a number by its name: the first pattern that matches counts."""
_WORD = r"\w*(token_ids?|token_index|_idx|word_id)"
_MARKS = r"\w*(indices|indexes|idxs|_index|layers|layer_ids)"
_IMAGE = r"(pretrain_)?(image|img)_size|crop_size"
_WIDTH = (
    r"d_\w+|n_(embd|inner)|width|kv_channels|upsample_groups|backbone_channel_list|embed_dim_per_stage"
    r"|\w*(dim|dims|rank|dim_head|feedforward|pos_feats|linear_units|headdim|d_head|d_ssm)"
    r"|(\w+_)?(hidden|embed|embedding|ffn|feedforward|inner|mlp|intermediate|latent|projection|projector|proj|head"
    r"|output|hidden_per_head|fusion|neck|pooler|router|condition|codevector|query|value|key|bottleneck|coordinate"
    r"|shape)_(size|sizes|width|channels|dimension|units)"
)
_NO_WIDTH = (
    r"(?!.*hidden_size$).*(kernel|window|chunk|patch|image|vocab|conv|input|codebook(?!_dim$)|group|position_embedding)"
    r"_.*|.*_kernel_dim"
)


def small_values(whole: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the values of smaller configurations, and in words how each was made: the smallest first.

    Later ones also fill in values that the configuration leaves open, which some models cannot be built without.
    """
    full = copy.deepcopy(whole)
    chosen = listed([*dict.fromkeys(name for config in [*_configs(full)] for name in _fill(config))])
    for values, said in ((whole, ""), (full, f", {chosen} filled in" if chosen else "")):
        for factor in _FACTORS:
            if all(_divides(factor, config) for config in _configs(values)):
                yield _made_small(copy.deepcopy(values), factor), f"widths divided by {factor}{said}"


def _configs(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration, and the configurations in it."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _configs(value)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if type(config.get(name)) is int), None)


def _fill(config: dict[str, Any]) -> Iterator[str]:
    """Fill in values that a configuration leaves open, in place; yield their names."""
    hidden, heads, depth = (_first(config, names) for names in (_HIDDEN, _HEADS, _DEPTHS))
    if hidden and heads and not config.get("head_dim") and (hidden % heads or hidden // heads % _EVEN):
        name = next(name for name in _HEADS if config.get(name) == heads)
        even = [count for count in divisors(hidden) if hidden // count % _EVEN == 0] or divisors(hidden)
        as_many = [each for each in (name, "num_key_value_heads") if config.get(each) == heads]
        heads = min(even, key=lambda count: abs(count - (heads or 0)))
        config |= dict.fromkeys(as_many, heads)
        yield from as_many
    values: dict[str, Any] = {
        "head_dim": hidden // heads if hidden and heads else None,
        "num_key_value_heads": heads,
        "layer_types": ["full_attention"] * (depth or 0) or None,
        "mlp_layer_types": ["dense"] * (depth or 0) or None,
        **dict.fromkeys(_EXPERTS, 4),
        **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
        **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
        "moe_intermediate_size": hidden,
    }
    for name, value in values.items():
        if name in config and config[name] is None and value is not None:
            config[name] = value
            yield name
    if config.get("rope_parameters") == {} and isinstance(config.get("layer_types"), list):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        config["rope_parameters"] = {kind: dict(rope) for kind in config["layer_types"]}
        yield "rope_parameters"


def _made_small(values: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return a configuration's values, made smaller in place."""
    words: dict[int, int] = {}
    # A part without heads keeps its widths: the convolutions that process an image before a decoder.
    parents = [values, *(config["backbone_config"] for config in _configs(values) if config.get("backbone_config"))]
    wide = {id(c) for c in parents if "vocab_size" not in c and not any(_first(part, _HEADS) for part in _configs(c))}
    configs = [(config, _image_side(config)) for config in _configs(values)]
    for config, _ in configs:
        if config.get("num_experts_per_tok", 1) is None and _first(config, _EXPERTS):
            config["num_experts_per_tok"] = 2
        if config.get("attn_layer_indices", 1) is None:
            config["attn_layer_indices"] = [_LAYERS - 1]
        if set(map(str, config.get("layer_types") or ())) == {"linear_attention"}:
            config["layer_types"][_LAYERS - 1] = "full_attention"
        for name in ("out_features", "num_layers_per_stack"):  # other numbers determine it
            config.pop(name, None)
        _cut_layers(config)
        config |= _with_smaller_numbers(config, 1 if id(config) in wide else factor, words)
        head_dim = _head_dim(config)
        for rope in _ropes(config) if head_dim else ():  # in time, height and width
            half = (_rotated(config, rope, head_dim or 0) + 1) // 2
            rope["mrope_section"] = [half * 3 // 8, half * 3 // 8, half - 2 * (half * 3 // 8)]
    for config, before in configs:
        if "backbone_feature_sizes" in config and before:
            sizes, side = config["backbone_feature_sizes"], _image_side(config)
            config["backbone_feature_sizes"] = [[size * side // before for size in row] for row in sizes]
    return values


def _image_side(config: Mapping[str, Any]) -> int:
    """Return the side of a backbone's images in pixels; 0 if unknown."""
    size = (config.get("backbone_config") or {}).get("image_size")
    size = size[0] if isinstance(size, list) and size else size
    return size if type(size) is int else 0


def _cut_layers(config: dict[str, Any]) -> None:
    """Keep two layers, or enough for one of each kind, and the list values for them."""
    depth = _first(config, _DEPTHS)
    if depth is None or depth <= _LAYERS or isinstance(config.get("depths"), list):
        return
    keep = _LAYERS
    lists = {name: value for name, value in config.items() if isinstance(value, list) and value}
    # A list of the layers of one kind follows from the list of kinds.
    kinds_of = [value for value in lists.values() if len(value) == depth]
    of_a_kind = [[at for at, kind in enumerate(kinds) if kind == chosen] for kinds in kinds_of for chosen in kinds]
    for name, value in lists.items():
        places = len(value) < depth and all(type(place) is int and 0 <= place <= depth for place in value)
        if places and re.fullmatch(_MARKS, name) and value not in of_a_kind:
            config[name] = [rank + (min(value) > 0) for rank in range(min(len(value), _KINDS))]
            keep = max(keep, config[name][-1] + 1)
        kinds = [str(kind) for kind in value]
        if len({*kinds}) <= _KINDS and (len(value) == depth or name.endswith("_types")):
            keep = max(keep, *(kinds.index(kind) + 1 for kind in kinds))
    for name, value in config.items():
        if isinstance(value, list) and len(value) == depth:
            config[name] = value[:keep]
        elif name == "per_layer_config" and isinstance(value, dict):
            config[name] = {layer: said for layer, said in value.items() if int(layer) < keep}
        elif name in _DEPTHS and type(value) is int:
            config[name] = min(value, keep)


def _with_smaller_numbers(config: Mapping[str, Any], factor: int, words: dict[int, int]) -> dict[str, Any]:
    smaller: dict[str, Any] = {}
    depth, lengths = _first(config, _DEPTHS), [len(value) for value in config.values() if isinstance(value, list)]
    for name, value in config.items():
        numbers = value if isinstance(value, list) else [value]
        # Lists by layer were cut with the layers, and so was the number of layers.
        is_cut = name in _DEPTHS or value in lengths or (isinstance(value, list) and len(value) == depth)
        # The names of labels are numbers.
        if isinstance(name, str) and not (is_cut and re.fullmatch(_DEPTH, name) and not name.endswith("depths")):
            changed = [_smaller(name, n, config, factor, words) if type(n) is int else n for n in numbers]
            smaller[name] = changed if isinstance(value, list) else changed[0]
    return smaller


def _smaller(name: str, number: int, config: Mapping[str, Any], factor: int, words: dict[int, int]) -> int:
    """Return a number made smaller according to its name.

    `words` maps special token ids to their new ids, because the configurations in one share token ids.
    """
    if re.fullmatch(_WORD, name):
        # The last ids: drawn ids avoid them.
        return number if number < _WORDS else words.setdefault(number, _WORDS - 1 - len(words))
    most = next((most for pattern, most in _MOST.items() if re.fullmatch(pattern, name)), None)
    if most is not None:
        return min(number, most)
    if re.fullmatch(_IMAGE, name):
        patch = config.get("patch_stride", config.get("patch_size"))
        patch = next((size for size in (patch if isinstance(patch, list) else [patch]) if type(size) is int), 4)
        windows = "depths" in config and "window_size" in config  # windows must divide the image at each depth
        return number if windows else min(number, patch * max(2, _SIDE // patch))
    widths = {value for n, value in config.items() if str(n).endswith(("hidden_size", "hidden_dim", "d_model"))}
    as_wide = name.endswith("_channels") and number in widths
    if number > 4 and (as_wide or (re.fullmatch(_WIDTH, name) and not re.fullmatch(_NO_WIDTH, name))):
        # Grouped products of experts need rows that begin at multiples of sixteen bytes.
        step = 4 if name.startswith("moe_") else 1
        return max(step, number // factor // step * step)
    return number


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """Return the features of a head; None without heads, or if their total width is unknown."""
    hidden, heads = _first(config, _HIDDEN), _first(config, _HEADS)
    return _first(config, ("head_dim", "d_kv")) or (hidden // heads if hidden and heads else None)


def _ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of rotations: one, or one for each kind of layer."""
    said = config.get("rope_parameters")
    return [rope for rope in _configs(said) if "rope_theta" in rope] if isinstance(said, dict) else []


def _rotated(config: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> int:
    """Return how many features of a head a rotation affects."""
    return int(head_dim * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))


def _divides(factor: int, config: dict[str, Any]) -> bool:
    """Return whether heads keep a multiple of four features, as a rotation in two directions needs."""
    hidden, head_dim = _first(config, _HIDDEN), _head_dim(config)
    if factor == 1 or hidden is None or head_dim is None:
        return True
    least = min(_rotated(config, rope, head_dim) for rope in (*_ropes(config), {}))
    return hidden % factor == 0 and head_dim % (4 * factor) == 0 and least >= _LEAST * factor

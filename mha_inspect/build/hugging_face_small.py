"""A small configuration of a Hugging Face model: fewer layers and narrower ones, of every kind that it has.

Its own configuration is taken, and its numbers are made smaller by what their names say they are. All widths are
divided by one factor: what has to be as wide as something else still is. Heads, and keys that heads share, are as many
as before.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..layers.spec import divisors
from ..text import listed
from .hugging_face_config import make_config

_LAYERS = 2
_WORDS = 128
_SIDE = 64
"""Pixels along a side of an image, where its patches allow it."""
_KINDS = 4
"""Of layers, at most: what is listed layer by layer and has more is not about kinds."""
_MARKED = 4
"""Layers that are kept of those that a list names by their number."""
_FACTORS = (16, 8, 4, 2, 1)
_EVEN = 64
"""Features of a head that can be made fewer by any factor."""
_PLACE = 4
"""Numbers of a box, its place and its size: no width."""
_LEAST = 8
"""Features that a head has at least, of those that its rotation turns."""

_OWN_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "encoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", "emb_dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_SAID_TWICE = ("out_features", "num_layers_per_stack")
"""What other numbers of a configuration say as well."""
_DEPTH = re.compile(r"(num|n)_(?!.*_per_)(\w+_)?(layers?|blocks)|(\w+_)?layers|(\w+_)?depths?")
_MOST = (
    (re.compile(r"\w*vocab(_size)?|vocab_size_per_layer_input"), _WORDS),
    (re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts|zero_expert_num"), 4),
    (re.compile(r"\w*experts_per_tok(en)?|moe_(topk|k)|\w*top_k_experts|experts_top_k|num_selected_experts|top_k"), 2),
    (re.compile(r"n_group|topk_group|num_expert_group|num_nextn_predict_layers"), 1),
    (re.compile(r"num_kv_shared_layers|merge_index"), 0),
    (re.compile(r"vision_feature_layers?"), 1),
    (re.compile(r"num_queries"), 8),
    (re.compile(r"max_source_positions|max_length"), 64),
    (re.compile(r"num_self_attends_per_block"), _LAYERS),
    (re.compile(r"attn_layer_period"), _LAYERS),
    (re.compile(r"attn_layer_offset"), _LAYERS - 1),
    (_DEPTH, _LAYERS),
)
"""What a number is at most, by its name: the first that fits."""
_WORD = re.compile(r"\w*(token_ids?|token_index|_idx|word_id)")
_MARKS = re.compile(r"\w*(indices|indexes|idxs|_index|layers|layer_ids)")
_IMAGE = re.compile(r"(pretrain_)?(image|img)_size|crop_size")
_WIDTH = re.compile(
    r"d_(model|latents|kv|ff|inner|head|embed|proj|rel)|n_(embd|inner)|(emb_|query_|key_|value_)?dim|width|kv_channels|rotary_dim"
    r"|(\w+_)?(hidden|embed|embedding|ffn|feedforward|inner|mlp|intermediate|latent|projection|projector|proj|head"
    r"|output|hidden_per_head|fusion|neck|pooler|router|condition|codevector|query|value|key|stage|rope|nope|v|qk"
    r")_(size|sizes|dim|dims|width|channels|dimension|units)"
    r"|(\w+_)?(ffn_dim|lora_rank|dim_feedforward|pos_feats|linear_units|text_hidden_size|feature_dims)"
    r"|adapter_(rank|(in|out)(put)?_(dim|size|dims))|laurel_rank|dim_head|embed_dim_per_stage|backbone_channel_list|mamba_(headdim|d_head|d_ssm)|hidden_size_global"
    r"|(\w+_)?bottleneck_size|coordinate_size|shape_size|vit_dim|upsample_groups"
)
_NO_WIDTH = re.compile(
    r"(?!.*hidden_size$).*(kernel|window|chunk|patch|image|vocab|conv|input|codebook(?!_dim$)|group|position_embedding)_.*|.*_kernel_dim"
)


def small_values(config_class: Any, held: Mapping[str, Any], text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Return what a configuration says once it is small, and how that was made of it, in words: the smallest first.

    Last come those that also say what this one leaves open, and some models cannot be built without.

    Args:
        config_class: the class of the configuration, whose defaults stand for what `held` does not say.
        held: what the file of the configuration says; empty where there is none.
        text: as the model was named, for messages.

    Raises `InputError` where the class refuses what is held.
    """
    whole: dict[str, Any] = make_config(config_class, dict(held), text).to_dict()
    full = copy.deepcopy(whole)
    said = [words for own in [*_configs(full)] for words in _say_all(own)]
    for values, more in ((whole, []), (full, said)):
        for factor in _FACTORS:
            if all(_divides(factor, own) for own in _configs(values)):
                chosen = f", and {listed(list(dict.fromkeys(more)))} chosen so that it can be built" if more else ""
                yield _made_small(copy.deepcopy(values), factor), f"its widths divided by {factor}{chosen}"


def _say_all(own: dict[str, Any]) -> Iterator[str]:
    """Say what a configuration leaves open, in place; return the names of it."""
    hidden, heads, depth = (_first(own, names) for names in (_HIDDEN, _HEADS, _OWN_DEPTH))
    if hidden and heads and not own.get("head_dim") and (hidden % heads or hidden // heads % _EVEN):
        name = next(name for name in _HEADS if own.get(name) == heads)
        even = [count for count in divisors(hidden) if hidden // count % _EVEN == 0] or divisors(hidden)
        own[name] = heads = min(even, key=lambda count: abs(count - (heads or 0)))
        yield name
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
        if name in own and own[name] is None and value is not None:
            own[name] = value
            yield name
    if own.get("rope_parameters") == {} and isinstance(own.get("layer_types"), list):
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        own["rope_parameters"] = {kind: dict(rope) for kind in own["layer_types"]}
        yield "rope_parameters"


def _made_small(values: dict[str, Any], factor: int) -> dict[str, Any]:
    """Return the values of a configuration, made smaller in place."""
    every = [*_configs(values)]
    # What has no heads cannot be narrower by theirs: the convolutions that see an image before a decoder does.
    backbones = (own["backbone_config"] for own in every if isinstance(own.get("backbone_config"), dict))
    convolutions = [
        id(own)
        for own in (values, *backbones)
        if "vocab_size" not in own and not any(_first(held, _HEADS) for held in _configs(own))
    ]
    words: dict[int, int] = {}
    before = copy.deepcopy(every)
    for own in every:
        _let_run(own)
        for name in _SAID_TWICE:
            own.pop(name, None)
        _cut_layers(own)
        own |= _smaller(own, 1 if id(own) in convolutions else factor, words)
        _split_rotation(own)
    for own, large in zip(every, before, strict=True):
        _fit_features(own, large)
    return values


def _let_run(own: dict[str, Any]) -> None:
    """Say, in place, what a configuration can be built without, and not run: experts of a token, one attention."""
    experts = any(type(own.get(name)) is int for name in _EXPERTS)
    if experts and own.get("num_experts_per_tok", 1) is None:
        own["num_experts_per_tok"] = 2
    if own.get("attn_layer_indices", 1) is None:
        own["attn_layer_indices"] = [_LAYERS - 1]
    if own.get("default_language", 1) is None and own.get("languages"):
        own["default_language"] = own["languages"][0]
    kinds = own.get("layer_types")
    if isinstance(kinds, list) and {*kinds} == {"linear_attention"}:
        kinds[_LAYERS - 1] = "full_attention"


def _configs(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a configuration, and those in it."""
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _configs(value)


def _first(own: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((own[name] for name in names if type(own.get(name)) is int), None)


def _head_dim(own: Mapping[str, Any]) -> int | None:
    """Return the features of a head; None where there are no heads, or nobody says how wide all of them are."""
    hidden, heads = _first(own, _HIDDEN), _first(own, _HEADS)
    return _first(own, ("head_dim", "d_kv")) or (hidden // heads if hidden and heads else None)


def _ropes(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is said of rotations, of which each kind of layer may have its own."""
    said = own.get("rope_parameters")
    return [rope for rope in _configs(said) if "rope_theta" in rope] if isinstance(said, dict) else []


def _turned(own: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int) -> int:
    """Return how many features of a head are turned by a rotation."""
    return int(head_dim * (rope.get("partial_rotary_factor") or own.get("partial_rotary_factor") or 1))


def _divides(factor: int, own: dict[str, Any]) -> bool:
    """Whether each head is left with pairs of pairs, as a rotation in two directions takes them."""
    hidden, head_dim = _first(own, _HIDDEN), _head_dim(own)
    if factor == 1 or hidden is None or head_dim is None:
        return True
    least = min(_turned(own, rope, head_dim) for rope in (*_ropes(own), {}))
    return hidden % factor == 0 and head_dim % (4 * factor) == 0 and least >= _LEAST * factor


# -- numbers ----------------------------------------------------------------------------------------------------------


def _smaller(own: dict[str, Any], factor: int, words: dict[int, int]) -> dict[str, Any]:
    """Return the numbers of a configuration, made smaller.

    `words` are those that mean something, to their new numbers: configurations in one name the same.
    """
    ends = ("hidden_size", "hidden_dim", "d_model")
    widths = {own[name] for name in own if str(name).endswith(ends) and type(own[name]) is int}
    made: dict[str, Any] = {}
    for name, value in own.items():
        numbers = value if isinstance(value, list) else [value]
        if not isinstance(name, str) or not any(type(number) is int for number in numbers):
            continue  # labels have numbers for names
        change = _change(name, numbers, own, widths, factor, words)
        if change is not None:
            smaller = [change(number) if type(number) is int else number for number in numbers]
            made[name] = smaller if isinstance(value, list) else smaller[0]
    side, patches = own.get("image_size"), own.get("image_embedding_size")
    if type(side) is int and type(patches) is int:
        made["image_embedding_size"] = patches * made["image_size"] // side
    return made


def _fit_features(own: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Say how large the features of an image are at each depth, once the image is smaller than it was `before`."""
    sides = [_numbers((config.get("backbone_config") or {}).get("image_size"))[:1] for config in (before, own)]
    if "backbone_feature_sizes" in own and all(sides):
        (large,), (small,) = sides
        sizes = own["backbone_feature_sizes"]
        own["backbone_feature_sizes"] = [[side * small // large for side in one] for one in sizes]


def _numbers(said: Any) -> list[int]:
    """Return whole numbers, of which there may be one, several or none."""
    return [number for number in (said if isinstance(said, list) else [said]) if type(number) is int]


def _change(
    name: str, numbers: list[Any], own: Mapping[str, Any], widths: set[int], factor: int, words: dict[int, int]
) -> Callable[[int], int] | None:
    """Return what makes the numbers of this name smaller; None for those that stay."""
    if _WORD.fullmatch(name):
        # The last ones: what is drawn keeps clear of them.
        return lambda value: value if value < _WORDS else words.setdefault(value, _WORDS - 1 - len(words))
    most = next((most for pattern, most in _MOST if pattern.fullmatch(name)), None)
    if most is not None:
        # What is listed layer by layer is cut with the layers, and so is their number.
        cut = name in _OWN_DEPTH if type(own[name]) is int else len(numbers) == _first(own, _OWN_DEPTH)
        lengths = [len(listed) for listed in own.values() if isinstance(listed, list)]
        stays = (cut and not name.endswith("depths")) or (_DEPTH.fullmatch(name) and own[name] in lengths)
        return None if stays else lambda value: min(value, most)
    if _IMAGE.fullmatch(name):
        # Windows want to be whole ones at each depth.
        said = own.get("patch_stride", own.get("patch_size"))
        patch = next(iter(_numbers(said)), 4)
        whole = "depths" in own and "window_size" in own
        return None if whole else lambda value: min(value, patch * max(2, _SIDE // patch))
    as_wide = name.endswith("_channels") and {*numbers} <= widths
    if as_wide or (_WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name)):
        # The rows of experts are multiplied in groups, whose rows begin at whole sixteen bytes.
        step = 4 if name.startswith("moe_") else 1
        return lambda value: max(step, value // factor // step * step) if value > _PLACE else value
    return None


def _cut_layers(own: dict[str, Any]) -> None:
    """Keep two layers, or as many as have one of each kind, and what is listed for them."""
    depth = _first(own, _OWN_DEPTH)
    if depth is None or depth <= _LAYERS or isinstance(own.get("depths"), list):
        return
    keep = _LAYERS
    listed = {name: value for name, value in own.items() if isinstance(value, list) and value}
    each = {name: value for name, value in listed.items() if len(value) == depth}
    # What names the layers of one kind goes with those.
    of_a_kind = [[at for at, kind in enumerate(kinds) if kind == one] for kinds in each.values() for one in kinds]
    for name, value in listed.items():
        places = len(value) < depth and all(type(place) is int and 0 <= place <= depth for place in value)
        if _MARKS.fullmatch(name) and places and value not in of_a_kind:
            own[name] = [rank + (min(value) > 0) for rank in range(min(len(value), _MARKED))]
            keep = max(keep, own[name][-1] + 1)
    repeated = [value for name, value in listed.items() if name.endswith("_types") and len(value) < depth]
    for value in (*each.values(), *repeated):
        kinds = [str(kind) for kind in value]
        if len({*kinds}) <= _KINDS:
            keep = max(keep, *(kinds.index(kind) + 1 for kind in kinds))
    for name, value in own.items():
        if name in each:
            own[name] = value[:keep]
        elif name == "per_layer_config" and isinstance(value, dict):
            own[name] = {layer: said for layer, said in value.items() if int(layer) < keep}
        elif name in _OWN_DEPTH and type(value) is int:
            own[name] = min(value, keep)


def _split_rotation(own: dict[str, Any]) -> None:
    """Say how the rotation is split in time, height and width: some take a split for the width that they had."""
    head_dim = _head_dim(own)
    for rope in _ropes(own) if head_dim else ():
        half = (_turned(own, rope, head_dim or 0) + 1) // 2
        rope["mrope_section"] = [half * 3 // 8, half * 3 // 8, half - 2 * (half * 3 // 8)]

"""What the models of Hugging Face transformers are called with, as their configurations tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from ..layers.spec import InputSpec
from .drawing import Plan


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module is a whole model of transformers, which says itself what it takes."""
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type")


def ways_of(module: nn.Module, names: list[str], free: set[str], inputs: InputSpec) -> Iterator[dict[str, Plan]]:
    """Return what a model may be called with, the likeliest first: what runs is what it takes.

    Args:
        module: of transformers.
        names: arguments that are needed.
        free: arguments that nobody has given.
        inputs: for batch and lengths.
    """
    plans = _plans_of(module, names, free, inputs)
    yield plans
    if not plans:
        return
    more = [name for name in _SOMETIMES if name in free - set(plans)]
    every = [plans]
    for also in (*([name] for name in more), more):
        both = _masked(plans | _plans_of(module, also, free, inputs), module.config)
        if both.keys() != plans.keys():
            yield both
            every.append(both)
    for both in (every[0], every[-1]) if len(every) > 1 else every:
        for name in both:
            for other in _otherwise(name, both[name], module.config, inputs):
                yield _masked({**both, name: other}, module.config)
    if "input_values" in plans:
        yield {}  # a waveform is what it is for most: what takes something else says so when it runs


def _plans_of(module: nn.Module, names: list[str], free: set[str], inputs: InputSpec) -> dict[str, Plan]:
    """Return plans for the arguments that the configuration tells about: `names`, and what has to come with them."""
    config: Any = module.config
    wanted = [*names]
    if getattr(config, "is_encoder_decoder", False):
        wanted += [name for name in _OF_DECODERS if name in free]
    if any(name.startswith("logit_scale") for name, _ in module.named_parameters(recurse=False)):
        wanted += [name for name in _HELD_AGAINST if name in free][:1]
    if hasattr(config, "lags_sequence") or hasattr(config, "state_dim"):
        wanted += [name for name in _OF_SERIES if name in free]
    if "spatial_shapes" in free and "pixel_values" in wanted:
        wanted += ["spatial_shapes", "pixel_attention_mask"]
    in_patches = not free.isdisjoint(("spatial_shapes", "pixel_position_ids"))
    decodes = "decoder_input_ids" in wanted
    plans: dict[str, Plan] = {}
    for name in dict.fromkeys(wanted):
        grid = any(other.endswith("grid_thw") for other in wanted)
        plan = _in_grid(name, config, inputs.batch) if grid else None
        plan = plan or _plan(name, config, inputs, decodes, in_patches)
        if plan is not None:
            plans[name] = plan
    return _masked(plans, config)


def _masked(plans: dict[str, Plan], config: Any) -> dict[str, Plan]:
    """The plans, with a mask of sounds that is as long as they are: one for each frame, wherever the frames are."""
    if "input_features_mask" in plans and "input_features" in plans:
        batch, *rest = plans["input_features"].shape
        bins = _held(config, *_BINS)
        frames = next((size for size in rest if size != bins), rest[0])
        plans = {**plans, "input_features_mask": _whole("input_features_mask", (batch, frames), 2)}
    return plans


_OF_DECODERS = ("decoder_input_ids", "decoder_input_values", "future_values", "future_time_features")
"""What a decoder beside an encoder cannot do without."""
_HELD_AGAINST = ("pixel_values", "input_features", "input_values")
"""What a text is held against, where both get a place in one space."""
_SOMETIMES = (
    *("input_ids", "pixel_values", "bbox", "visual_feats", "visual_pos", "encoder_hidden_states", "query_embeds"),
    *("input_values", "past_values_padding", "input_features", "input_features_mask", "qformer_input_ids"),
)
"""What comes with a text or an image, and most models do without."""
_PAIRED = 32
"""Pixels along a side of two images that are matched, point by point."""
_PATCHES = 4
"""Patches along each side of an image that is handed over in patches."""
_OF_SERIES = (
    "past_time_features", "past_observed_mask", "static_categorical_features", "static_real_features",
    "actions", "rewards", "returns_to_go", "timesteps", "attention_mask",
)  # fmt: skip
"""What comes with each step of a time series, or of a game."""


def _plan(name: str, config: Any, inputs: InputSpec, decodes: bool, in_patches: bool) -> Plan | None:
    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    if name in ("input_ids", "decoder_input_ids"):
        length = key_len if decodes and name == "input_ids" else inputs.seq_len
        words = config.get_text_config(decoder=name == "decoder_input_ids")
        words = words if hasattr(words, "vocab_size") else getattr(config, "text_config", words)
        vocabulary = getattr(words, "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        return Plan("ids", (inputs.batch, length), "int64", vocabulary, _special(words))
    if name in ("qformer_input_ids", "task_inputs"):
        words = getattr(config, "qformer_config", config)
        known = _held(words, "vocab_size", "text_encoder_vocab_size")
        length = getattr(config, "task_seq_len", inputs.seq_len)
        return Plan("ids", (inputs.batch, length), "int64", known) if known else None
    if name in ("spatial_shapes", "pixel_position_ids", "pixel_attention_mask") or (
        name == "pixel_values" and in_patches
    ):
        patches = _patches(name, _looks(config), inputs.batch)
        if patches is not None:
            return patches
    if name == "input_features_mask":
        return _whole(name, (inputs.batch, key_len), 2)
    if name in ("bbox", "visual_feats", "visual_pos"):
        width = 4 if name == "bbox" else getattr(config, name.replace("feats", "feat") + "_dim", None)
        return None if width is None else Plan("other", (inputs.batch, inputs.seq_len, width))
    if name in ("pixel_values", "pixel_values_videos"):
        return _image(_looks(config), inputs.batch)
    if name in ("input_values", "decoder_input_values", "input_features"):
        return _sound(name, getattr(config, "audio_config", config), inputs.batch, inputs.seq_len, key_len)
    if name in ("encoder_hidden_states", "query_embeds"):
        widths = ("hidden_size",) if name == "query_embeds" else ("encoder_hidden_size", "hidden_size")
        width = _held(config, *widths)
        return None if width is None else Plan("hidden", (inputs.batch, key_len, width))
    return _series(name, config, inputs.batch, inputs.seq_len)


def _looks(config: Any) -> Any:
    """The part of a configuration that is for images: the innermost one that tells their size."""
    own = getattr(config, "vision_config", getattr(config, "image_config", config))
    inner = getattr(own, "backbone_config", None)
    return inner if hasattr(inner, "image_size") and not hasattr(own, "image_size") else own


def _patches(name: str, config: Any, batch: int) -> Plan | None:
    """An image in patches, how many there are along each side, and that all of them count."""
    channels = getattr(config, "num_channels", 3)
    if name == "pixel_values":
        return Plan("other", (batch, _PATCHES**2, channels * config.patch_size**2))
    if name == "spatial_shapes":
        return Plan("ids", (batch, 2), "int64", _PATCHES + 1, tuple(range(_PATCHES)))
    if name == "pixel_position_ids":
        places = tuple((at // _PATCHES, at % _PATCHES) for at in range(_PATCHES**2))
        return Plan("ids", (batch, _PATCHES**2, 2), "int64", rows=places)
    return _whole(name, (batch, _PATCHES**2), 2) if name == "pixel_attention_mask" else None


def _in_grid(name: str, config: Any, batch: int) -> Plan | None:
    """Images as rows of patches one after the other, and how many there are in time, height and width of each."""
    if name.endswith("grid_thw"):
        return Plan("ids", (batch, 3), "int64", rows=(1, _PATCHES, _PATCHES))
    if name == "merge_sizes":
        return Plan("ids", (batch,), "int64", rows=(1,))
    channels = next((getattr(config, n) for n in ("in_channels", "in_chans", "num_channels") if hasattr(config, n)), 3)
    size = getattr(config, "patch_size", None)
    if name not in ("hidden_states", "pixel_values") or not isinstance(size, int):
        return None
    return Plan("other", (batch * _PATCHES**2, channels * getattr(config, "temporal_patch_size", 1) * size**2))


def _sound(name: str, config: Any, batch: int, seq_len: int, key_len: int) -> Plan | None:
    """A waveform, or the spectrogram of one: frames of the length that the layers before the attention make one of."""
    bins = _held(config, "num_mel_bins")
    if name == "input_values":
        if bins is not None and hasattr(config, "max_length"):
            return Plan("other", (batch, config.max_length, bins))
        if hasattr(config, "audio_channels"):
            return Plan("other", (batch, config.audio_channels, prod(config.upsampling_ratios) * seq_len))
        return Plan("other", (batch, 400 + 320 * (seq_len - 1)))
    if name == "decoder_input_values":
        return None if bins is None else Plan("other", (batch, seq_len, bins))
    if hasattr(config, "max_source_positions") and bins is not None:
        return Plan("other", (batch, bins, 2 * config.max_source_positions))
    if hasattr(config, "spec_size") and bins is not None:
        return Plan("other", (batch, 1, config.spec_size * (config.spec_size // bins), bins))
    for field, times in zip(_BINS, (4, 1, 1), strict=True):
        if isinstance(_held(config, field), int):
            return Plan("other", (batch, times * key_len, _held(config, field)))
    return Plan("other", (batch, 4 * key_len, 128)) if name == "input_features" else None


_BINS = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
"""What a configuration calls the numbers of a frame."""


def _otherwise(name: str, plan: Plan, config: Any, inputs: InputSpec) -> Iterator[Plan]:
    """Return other layouts of a sound or of an image."""
    batch, *rest = plan.shape
    if name == "input_features" and len(rest) == 2:
        bins = min(rest) if _held(config, "num_mel_bins") is None else int(_held(config, "num_mel_bins"))
        frames = 4 * int(_held(config, "n_window") or 16)
        yield from (replace(plan, shape=(batch, *shape)) for shape in ((frames, bins), (bins, frames)))
    elif name == "input_values":
        ratios = _held(config, "upsampling_ratios", "downsampling_ratios")
        if ratios is not None:
            yield replace(plan, shape=(batch, 1, prod(ratios) * inputs.seq_len))
    elif name in ("input_ids", "decoder_input_ids") and len(rest) == 1:
        books = _held(config, "num_channels", "num_codebooks")
        if isinstance(books, int):
            yield from (replace(plan, shape=(*plan.shape, number)) for number in (books, books + 1))
    elif name == "pixel_values" and len(rest) == 3:
        yield replace(plan, shape=(batch, 1, *rest))
        yield replace(plan, shape=(batch, 2, rest[0], _PAIRED, _PAIRED))
    elif name == "pixel_values" and len(rest) == 1:
        channels = int(_held(config, "num_channels", "in_channels") or 3)
        size = int(_held(config, "patch_size"))
        times = (1, 2, 4) if rest[0] == channels * size**2 else (1,)
        yield from (replace(plan, shape=(batch, rest[0] * more)) for more in times[1:])
        yield replace(plan, shape=(batch, channels, size, size))


def _held(config: Any, *names: str) -> Any:
    """Return what a configuration, or one in it, says by the first of these names; None where none says it."""
    inner = [getattr(config, part) for part in getattr(config, "sub_configs", {}) if getattr(config, part, None)]
    values = (getattr(own, name, None) for own in (config, *inner) for name in names)
    return next((value for value in values if value is not None), None)


def _series(name: str, config: Any, batch: int, seq_len: int) -> Plan | None:
    """Values in time with what is known of each moment, or the moves of a game with what they brought."""
    if hasattr(config, "state_dim"):
        widths = {"states": config.state_dim, "actions": config.act_dim, "rewards": 1, "returns_to_go": 1}
        if name in widths:
            return Plan("other", (batch, seq_len, widths[name]))
        whole = {"timesteps": getattr(config, "max_ep_len", seq_len), "attention_mask": 2}
        return _whole(name, (batch, seq_len), whole[name]) if name in whole else None
    if hasattr(config, "num_input_channels") and name == "past_values":
        return Plan("other", (batch, config.context_length, config.num_input_channels))
    if not hasattr(config, "lags_sequence"):
        shape = (batch, getattr(config, "context_length", 0))
        if name == "past_values_padding" and shape[-1]:
            return Plan("ids", shape, "int64", rows=(0,))
        return Plan("other", shape) if name == "past_values" and shape[-1] else None
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    values = () if config.input_size == 1 else (config.input_size,)
    shapes = {
        "past_values": (batch, past, *values),
        "past_observed_mask": (batch, past, *values),
        "past_time_features": (batch, past, config.num_time_features),
        "future_values": (batch, future, *values),
        "future_time_features": (batch, future, config.num_time_features),
        "static_real_features": (batch, config.num_static_real_features),
        "static_categorical_features": (batch, config.num_static_categorical_features),
    }
    if name not in shapes or (0 in shapes[name] and name.startswith("static")):
        return None
    if name == "static_categorical_features":
        return _whole(name, shapes[name], min(config.cardinality))
    return _whole(name, shapes[name], 2) if "mask" in name else Plan("other", shapes[name])


def _whole(name: str, shape: tuple[int, ...], below: int) -> Plan:
    """Whole numbers; of a mask, ones: everything was seen."""
    return Plan("ids", shape, "int64", below, (0,) if "mask" in name else ())


def _special(config: Any) -> tuple[int, ...]:
    """Tokens that mean something of their own: a padding token would be left out, and its position counted anew."""
    special: list[int] = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special += [
            v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int) and v >= 0
        ]
    return tuple(dict.fromkeys(special))


def _image(config: Any, batch: int) -> Plan:
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    channels = next((getattr(config, n) for n in ("num_channels", "in_channels", "in_chans") if hasattr(config, n)), 3)
    if hasattr(config, "tubelet_size") or hasattr(config, "num_frames"):
        return Plan("image", (batch, getattr(config, "num_frames", 8), channels, height, width))
    return Plan("image", (batch, channels, height, width))

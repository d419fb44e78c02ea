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
    told = _Told(module, free, inputs)
    plans = told.plans(names)
    yield plans
    if not plans:
        return
    more = [name for name in _SOMETIMES if name in free - set(plans)]
    every = [plans]
    for also in (*([name] for name in more), more):
        both = told.masked(plans | told.plans(also))
        if both.keys() != plans.keys():
            yield both
            every.append(both)
    for both in (every[0], every[-1]) if len(every) > 1 else every:
        for name, plan in both.items():
            for shape in told.other_shapes(name, plan.shape):
                yield told.masked({**both, name: replace(plan, shape=shape)})
    if "input_values" in plans:
        yield {}  # a waveform is what it is for most: what takes something else says so when it runs


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


class _Told:
    """What the configuration of a model tells of its arguments."""

    def __init__(self, module: nn.Module, free: set[str], inputs: InputSpec) -> None:
        self.config: Any = module.config
        self.free, self.batch, self.seq_len, self.key_len = free, inputs.batch, inputs.seq_len, inputs.keys
        self.compares = any(name.startswith("logit_scale") for name, _ in module.named_parameters(recurse=False))
        self.in_patches = not free.isdisjoint(("spatial_shapes", "pixel_position_ids"))

    def plans(self, names: list[str]) -> dict[str, Plan]:
        """Return plans for the arguments that it tells about: of these, and what has to come with them."""
        config, wanted = self.config, [*names]
        if getattr(config, "is_encoder_decoder", False):
            wanted += [name for name in _OF_DECODERS if name in self.free]
        if self.compares:
            wanted += [name for name in _HELD_AGAINST if name in self.free][:1]
        if hasattr(config, "lags_sequence") or hasattr(config, "state_dim"):
            wanted += [name for name in _OF_SERIES if name in self.free]
        if "spatial_shapes" in self.free and "pixel_values" in wanted:
            wanted += ["spatial_shapes", "pixel_attention_mask"]
        decodes, in_grid = "decoder_input_ids" in wanted, any(name.endswith("grid_thw") for name in wanted)
        plans = {name: (self._grid(name) if in_grid else None) or self._plan(name, decodes) for name in wanted}
        return self.masked({name: plan for name, plan in plans.items() if plan is not None})

    def masked(self, plans: dict[str, Plan]) -> dict[str, Plan]:
        """Return the plans, with a mask of sounds that is as long as they are: one for each frame."""
        if "input_features_mask" in plans and "input_features" in plans:
            _, *rest = plans["input_features"].shape
            bins = self.held(*_BINS)
            frames = next((size for size in rest if size != bins), rest[0])
            plans = {**plans, "input_features_mask": self._whole("input_features_mask", frames)}
        return plans

    def held(self, *names: str, config: Any = None) -> Any:
        """Return what it, or a configuration in it, says by the first of these names; None where none says it."""
        config = self.config if config is None else config
        inner = [getattr(config, part) for part in getattr(config, "sub_configs", {}) if getattr(config, part, None)]
        values = (getattr(own, name, None) for own in (config, *inner) for name in names)
        return next((value for value in values if value is not None), None)

    def _plan(self, name: str, decodes: bool) -> Plan | None:
        config = self.config
        match name:
            case "input_ids" | "decoder_input_ids":
                words = config.get_text_config(decoder=name == "decoder_input_ids")
                words = words if hasattr(words, "vocab_size") else getattr(config, "text_config", words)
                known = getattr(words, "vocab_size", None)
                length = self.key_len if decodes and name == "input_ids" else self.seq_len
                if not isinstance(known, int):
                    return None
                return Plan("ids", (self.batch, length), "int64", known, _special(words))
            case "qformer_input_ids" | "task_inputs":
                words = getattr(config, "qformer_config", config)
                known = self.held("vocab_size", "text_encoder_vocab_size", config=words)
                return self._whole(name, getattr(config, "task_seq_len", self.seq_len), below=known) if known else None
            # An image in patches: how many there are along each side, and that all of them count.
            case "spatial_shapes":
                return Plan("ids", (self.batch, 2), "int64", _PATCHES + 1, tuple(range(_PATCHES)))
            case "pixel_position_ids":
                places = tuple((at // _PATCHES, at % _PATCHES) for at in range(_PATCHES**2))
                return Plan("ids", (self.batch, _PATCHES**2, 2), "int64", rows=places)
            case "pixel_attention_mask":
                return self._whole(name, _PATCHES**2)
            case "pixel_values" | "pixel_values_videos" if name != "pixel_values" or not self.in_patches:
                return self._image(_looks(config))
            case "pixel_values":
                looks = _looks(config)
                return self._other(_PATCHES**2, getattr(looks, "num_channels", 3) * looks.patch_size**2)
            case "bbox":
                return self._other(self.seq_len, 4)
            case "visual_feats" | "visual_pos":
                return self._wide(self.seq_len, name.replace("feats", "feat") + "_dim")
            case "input_features_mask":
                return self._whole(name, self.key_len)
            case "input_values" | "decoder_input_values" | "input_features":
                return self._sound(name, getattr(config, "audio_config", config))
            case "encoder_hidden_states":
                return self._wide(self.key_len, "encoder_hidden_size", "hidden_size")
            case "query_embeds":
                return self._wide(self.key_len, "hidden_size")
        return self._move(name) if hasattr(config, "state_dim") else self._series(name)

    def _other(self, *shape: int) -> Plan:
        return Plan("other", (self.batch, *shape))

    def _wide(self, length: int, *widths: str) -> Plan | None:
        width = self.held(*widths)
        return None if width is None else self._other(length, width)

    def _whole(self, name: str, *shape: int, below: int = 2) -> Plan:
        """Whole numbers; of a mask, ones: everything was seen."""
        return Plan("ids", (self.batch, *shape), "int64", below, (0,) if "mask" in name else ())

    def _image(self, config: Any) -> Plan:
        size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
        frames = [config.num_frames] if hasattr(config, "num_frames") else [8] * hasattr(config, "tubelet_size")
        return Plan("image", (self.batch, *frames, _channels(config), height, width))

    def _grid(self, name: str) -> Plan | None:
        """Images as rows of patches one after the other, and how many there are in time, height and width of each."""
        config, size = self.config, getattr(self.config, "patch_size", None)
        if name.endswith("grid_thw"):
            return Plan("ids", (self.batch, 3), "int64", rows=(1, _PATCHES, _PATCHES))
        if name == "merge_sizes":
            return Plan("ids", (self.batch,), "int64", rows=(1,))
        if name not in ("hidden_states", "pixel_values") or not isinstance(size, int):
            return None
        width = _channels(config) * getattr(config, "temporal_patch_size", 1) * size**2
        return Plan("other", (self.batch * _PATCHES**2, width))

    def _sound(self, name: str, config: Any) -> Plan | None:
        """A waveform, or the spectrogram of one: as long as the layers before the attention make one frame of."""
        bins = self.held("num_mel_bins", config=config)
        if name == "input_values":
            if bins is not None and hasattr(config, "max_length"):
                return self._other(config.max_length, bins)
            if hasattr(config, "audio_channels"):
                return self._other(config.audio_channels, prod(config.upsampling_ratios) * self.seq_len)
            return self._other(400 + 320 * (self.seq_len - 1))
        if name == "decoder_input_values":
            return None if bins is None else self._other(self.seq_len, bins)
        if hasattr(config, "max_source_positions") and bins is not None:
            return self._other(bins, 2 * config.max_source_positions)
        if hasattr(config, "spec_size") and bins is not None:
            return self._other(1, config.spec_size * (config.spec_size // bins), bins)
        for field, times in zip(_BINS, (4, 1, 1), strict=True):
            if isinstance(width := self.held(field, config=config), int):
                return self._other(times * self.key_len, width)
        return self._other(4 * self.key_len, 128)

    def _move(self, name: str) -> Plan | None:
        """The moves of a game, with what they brought."""
        widths = {"states": self.config.state_dim, "actions": self.config.act_dim, "rewards": 1, "returns_to_go": 1}
        if name in widths:
            return self._other(self.seq_len, widths[name])
        numbers = {"timesteps": getattr(self.config, "max_ep_len", self.seq_len), "attention_mask": 2}
        return self._whole(name, self.seq_len, below=numbers[name]) if name in numbers else None

    def _series(self, name: str) -> Plan | None:
        """Values in time, with what is known of each moment."""
        config, length = self.config, getattr(self.config, "context_length", 0)
        if not hasattr(config, "lags_sequence"):
            if name == "past_values_padding" and length:
                return Plan("ids", (self.batch, length), "int64", rows=(0,))
            inputs = [config.num_input_channels] if hasattr(config, "num_input_channels") else []
            return self._other(length, *inputs) if name == "past_values" and length else None
        values = [] if config.input_size == 1 else [config.input_size]
        past, future = length + max(config.lags_sequence), config.prediction_length
        shapes = {
            "past_values": (past, *values),
            "past_observed_mask": (past, *values),
            "past_time_features": (past, config.num_time_features),
            "future_values": (future, *values),
            "future_time_features": (future, config.num_time_features),
            "static_real_features": (config.num_static_real_features,),
            "static_categorical_features": (config.num_static_categorical_features,),
        }
        if name not in shapes or (0 in shapes[name] and name.startswith("static")):
            return None
        if name == "static_categorical_features":
            return self._whole(name, *shapes[name], below=min(config.cardinality))
        return self._whole(name, *shapes[name]) if "mask" in name else self._other(*shapes[name])

    def other_shapes(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Return other layouts of words, of a sound or of an image."""
        batch, *rest = shape
        if name == "input_features" and len(rest) == 2:
            bins = int(self.held("num_mel_bins") or min(rest))
            frames = 4 * int(self.held("n_window") or 16)
            yield from ((batch, frames, bins), (batch, bins, frames))
        elif name == "input_values":
            ratios = self.held("upsampling_ratios", "downsampling_ratios")
            if ratios is not None:
                yield batch, 1, prod(ratios) * self.seq_len
        elif name in ("input_ids", "decoder_input_ids") and len(rest) == 1:
            books = self.held("num_channels", "num_codebooks")
            if isinstance(books, int):
                yield from ((*shape, number) for number in (books, books + 1))
        elif name == "pixel_values" and len(rest) == 3:
            yield batch, 1, *rest
            yield batch, 2, rest[0], _PAIRED, _PAIRED
        elif name == "pixel_values" and len(rest) == 1:
            channels, size = int(self.held("num_channels", "in_channels") or 3), int(self.held("patch_size"))
            if rest[0] == channels * size**2:
                yield from ((batch, rest[0] * more) for more in (2, 4))
            yield batch, channels, size, size


_BINS = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
"""What a configuration calls the numbers of a frame."""


def _looks(config: Any) -> Any:
    """The part of a configuration that is for images: the innermost one that tells their size."""
    own = getattr(config, "vision_config", getattr(config, "image_config", config))
    inner = getattr(own, "backbone_config", None)
    return inner if hasattr(inner, "image_size") and not hasattr(own, "image_size") else own


def _channels(config: Any) -> int:
    names = ("num_channels", "in_channels", "in_chans")
    return next((int(getattr(config, name)) for name in names if hasattr(config, name)), 3)


def _special(config: Any) -> tuple[int, ...]:
    """Tokens that mean something of their own: a padding token would be left out, and its position counted anew."""
    said = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    numbers = [number for one in said for number in (one if isinstance(one, (list, tuple)) else [one])]
    return tuple(dict.fromkeys(number for number in numbers if isinstance(number, int) and number >= 0))

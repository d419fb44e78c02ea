"""What the models of Hugging Face transformers are called with, as their configurations tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..spec import InputSpec
from .drawing import Plan


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a module is a whole model of transformers, which says itself what it takes."""
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type")


def plans_of(module: nn.Module, names: list[str], free: set[str], inputs: InputSpec) -> dict[str, Plan]:
    """Plans for the arguments that the configuration tells about: those in `names`, and what has to come with them.

    Args:
        module: of transformers.
        names: arguments that are needed.
        free: arguments that nobody has given.
        inputs: for batch and lengths.
    """
    config: Any = module.config
    wanted = list(names)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in free:
        wanted.append("decoder_input_ids")
    if hasattr(module, "logit_scale") and "pixel_values" in free:
        wanted.append("pixel_values")  # a text and an image are held against each other
    decodes = "decoder_input_ids" in wanted
    plans = {}
    for name in dict.fromkeys(wanted):
        plan = _plan(name, config, inputs, decodes)
        if plan is not None:
            plans[name] = plan
    return plans


def _plan(name: str, config: Any, inputs: InputSpec, decodes: bool) -> Plan | None:
    batch = inputs.batch
    key_len = inputs.seq_len if inputs.key_len is None else inputs.key_len
    if name in ("input_ids", "decoder_input_ids"):
        length = key_len if decodes and name == "input_ids" else inputs.seq_len
        words = config.get_text_config(decoder=name == "decoder_input_ids")
        vocabulary = getattr(words, "vocab_size", None)
        if not isinstance(vocabulary, int):
            return None
        return Plan("ids", (batch, length), "int64", vocabulary, _special(words))
    if name in ("pixel_values", "pixel_values_videos"):
        return _image(getattr(config, "vision_config", config), batch)
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return Plan("other", (batch, config.max_length, config.num_mel_bins))
        return Plan("other", (batch, 400 + 320 * (inputs.seq_len - 1)))
    if name == "input_features":
        if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            return Plan("other", (batch, config.num_mel_bins, 2 * config.max_source_positions))
        for field, times in (("input_feat_per_channel", 4), ("feature_projection_input_dim", 1), ("num_mel_bins", 1)):
            if isinstance(getattr(config, field, None), int):
                return Plan("other", (batch, times * key_len, getattr(config, field)))
    return None


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

"""What the models of Hugging Face transformers are called with, as their configurations tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from .forward import Axis, Plan

_OF_DECODERS = ("decoder_input_ids", "decoder_input_values")
"""What a decoder beside an encoder cannot do without."""
_COMPARED_WITH = ("pixel_values", "input_features", "input_values")
"""What a text is compared with, where both get a place in one space."""


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, which says itself what it takes."""
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type")


def configured_plans(module: Any, names: list[str], free: Collection[str], seq_len: int) -> dict[str, Plan]:
    """Return plans for the arguments that a model's configuration tells about.

    Args:
        module: of transformers.
        names: arguments that are needed; what has to come with them is planned as well.
        free: arguments that nobody has given.
        seq_len: for a sound, which has its own length.
    """
    wanted = [*names]
    if getattr(module.config, "is_encoder_decoder", False):
        wanted += [name for name in _OF_DECODERS if name in free]
    if any(name.startswith("logit_scale") for name, _ in module.named_parameters(recurse=False)):
        wanted += [name for name in _COMPARED_WITH if name in free][:1]
    decodes = "decoder_input_ids" in wanted
    plans = {name: _plan(module.config, name, seq_len, decodes=decodes) for name in dict.fromkeys(wanted)}
    return {name: plan for name, plan in plans.items() if plan is not None}


def _plan(config: Any, name: str, seq_len: int, *, decodes: bool) -> Plan | None:
    if name in ("input_ids", "decoder_input_ids"):
        words = config.get_text_config(decoder=name == "decoder_input_ids")
        words = words if hasattr(words, "vocab_size") else getattr(config, "text_config", words)
        known = getattr(words, "vocab_size", None)
        length: Axis = "key" if decodes and name == "input_ids" else "query"
        return Plan("ids", ("batch", length), "int64", known, _special(words)) if isinstance(known, int) else None
    if name in ("pixel_values", "pixel_values_videos"):
        vision = getattr(config, "vision_config", getattr(config, "image_config", config))
        inner = getattr(vision, "backbone_config", None)
        return _image(inner if hasattr(inner, "image_size") and not hasattr(vision, "image_size") else vision)
    if name == "encoder_hidden_states":
        width = _first(config, "encoder_hidden_size", "hidden_size")
        return None if width is None else Plan("other", ("batch", "key", width))
    bins = _first(config, "num_mel_bins")
    longest = getattr(getattr(config, "audio_config", config), "max_source_positions", None)
    if name == "input_values" and bins is None:  # a waveform of as many frames as there are positions
        return Plan("other", ("batch", 400 + 320 * (seq_len - 1)))
    if name == "input_features" and bins is not None and longest is not None:  # the spectrogram that whisper takes
        return Plan("other", ("batch", bins, 2 * longest))
    return None


def _first(config: Any, *names: str) -> Any:
    """Return what a configuration, or one in it, says by the first of these names; None where none says it."""
    inner = [getattr(config, part) for part in getattr(config, "sub_configs", {}) if getattr(config, part, None)]
    values = (getattr(part, name, None) for part in (config, *inner) for name in names)
    return next((value for value in values if value is not None), None)


def _image(config: Any) -> Plan:
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    frames = [config.num_frames] if hasattr(config, "num_frames") else [8] * hasattr(config, "tubelet_size")
    names = ("num_channels", "in_channels", "in_chans")
    channels = next((int(getattr(config, name)) for name in names if hasattr(config, name)), 3)
    return Plan("image", ("batch", *frames, channels, height, width))


def _special(config: Any) -> tuple[int, ...]:
    """Return tokens that mean something of their own: padding would be left out, and its positions counted anew."""
    values = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    numbers = [number for value in values for number in (value if isinstance(value, (list, tuple)) else [value])]
    return tuple(dict.fromkeys(number for number in numbers if isinstance(number, int) and number >= 0))

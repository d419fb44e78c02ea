"""The arguments of a forward, guessed by their names and the target's sizes, and by one run with these guesses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter
from math import prod
from typing import Any, get_origin, is_typeddict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, SpecError
from ..layers.spec import InputSpec
from ..making.arguments import InputShape
from ..making.target import Target
from ..making.vocabulary import ALIASES, Kind, plain
from ..text import message_of
from .call import Axis, Forward, Plan
from .probe import Probed

_UNUSUAL = 37
"""An unlikely width: a forward that accepts it does not depend on the width."""
_WIDTH_NAME = re.compile("dim|hidden|width|embed|model|size|features|channels", re.IGNORECASE)
_WIDEST, _TRIES = 1 << 14, 8
"""The largest width to try, and the number of widths, where nothing shows the width."""
_VOCABULARY = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocabulary_size", "src_vocab_size")
_CHANNELS = ("channels", "in_channels", "in_chans", "num_channels")
_IMAGE_SIZES = ("image_size", "img_size", "input_resolution", "resolution")
_ENCODED = ("src", "source", "inputids", "xids", "srcids")
"""Names of the encoder's input, in a forward with a decoder."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a target's arguments, from their names, names of settings and its layers."""

    target: Target
    forward: Forward
    unbatched: bool

    def plan(self, name: str, kind: Kind | None = None, size: int | None = None, *, is_1d: bool = False) -> Plan:
        """Return the likely plan of an argument, or a plan of this kind.

        `size` is the width of the last axis, for ids the number of tokens, for an image the channels.
        """
        usual = self.forward.kind(name)
        kind = kind or usual
        if kind == "image":
            channels = size or _first_int(self.target.arguments, *_CHANNELS) or 3
            return Plan(kind, ("batch", channels, *(("query",) if is_1d else self._image_size())))
        is_encoded = self.forward.encodes_and_decodes and plain(name) in _ENCODED
        length: Axis = "key" if is_encoded or usual in ("key", "value", "other") else "query"
        places: tuple[Axis, ...] = (length,) if self.unbatched else ("batch", length)
        if kind == "ids":
            return Plan(kind, places, "int64", size or self._vocabulary())
        return Plan(kind, (*places, size or self._width(kind)))

    def given(self, name: str, shape: InputShape) -> Plan:
        """Return the plan of an argument whose shape the user gave."""
        dtype = shape.dtype or ("int64" if self.forward.kind(name) == "ids" else "")
        if dtype.startswith("int"):
            return Plan("ids", shape.shape, dtype, self._vocabulary())
        return Plan(self.forward.kind(name) if shape.dtype is None else "unknown", shape.shape, dtype)

    def lazy_note(self) -> tuple[str, ...]:
        """Return a sentence on the width of lazy layers; empty without lazy layers.

        Raises `InputError` if the width is unknown.
        """
        lazy = next((m for m in self.target.module.modules() if any(map(is_lazy, m.parameters(recurse=False)))), None)
        if lazy is None or any(self.forward.kind(name) in ("ids", "image") for name in self.forward.parameters):
            return ()
        width = self._known_width("hidden")
        if width is None:
            raise InputError(
                f"{self.target.name} has lazy layers ({type(lazy).__name__}), which take any width. Give the width: "
                f"--input-shape {next(iter(self.forward.parameters), 'x')}=2x10x512 with its own sizes."
            )
        return (f"The lazy layers take any width and were given {width}. Use --input-shape for another.",)

    def _width(self, kind: Kind) -> int:
        """Return the width of vectors of a kind, `_UNUSUAL` if unknown."""
        return self._known_width(kind) or _UNUSUAL

    def has_drawn_width(self, plan: Plan) -> bool:
        """Return whether nothing in the target shows the width of a plan."""
        is_vector = plan.kind not in ("ids", "image", "mask") and not plan.is_given
        return is_vector and plan.axes[-1] == _UNUSUAL and self._known_width(plan.kind) is None

    def possible_widths(self, error: Exception) -> list[int]:
        """Return widths that the error of a run names, e.g. 4 · 8 of a view, then those among the target's settings.

        Settings with a name of a width come first.
        """
        lists = re.findall(r"\[([-\d, ]+)\]", message_of(error))
        shapes = [tuple(int(number) for number in re.findall(r"-?\d+", each)) for each in lists]
        widths = [prod(shape[-count:]) for count in (2, 1, 3) for shape in shapes if min(shape[-count:], default=0) > 0]
        settings = [item for source in self._sources() for item in source.items() if type(item[1]) is int]
        named = sorted(settings, key=lambda item: _WIDTH_NAME.search(item[0]) is None)
        usual = [size for _, size in named if 1 < size <= _WIDEST]
        return [width for width in dict.fromkeys([*widths, *usual]) if width != _UNUSUAL][:_TRIES]

    def _known_width(self, kind: Kind) -> int | None:
        """Return the width of vectors of a kind; None if nothing in the target shows it."""
        flag = {"key": "kdim", "value": "vdim", "other": "kdim"}.get(kind, "embed_dim")
        named = (_first_int(source, *ALIASES[f]) for f in (flag, "embed_dim") for source in self._sources())
        linears = [m for m in self.target.module.modules() if isinstance(m, nn.Linear)]
        taken = [m.in_features for m in linears] + [m.out_features for m in linears]  # in_features of lazy layers is 0
        return next(filter(None, (*named, *taken)), None)

    def _vocabulary(self) -> int:
        """Return the size of the vocabulary."""
        named = (_first_int(source, *_VOCABULARY) for source in self._sources())
        tables = (m.num_embeddings for m in self.target.module.modules() if isinstance(m, nn.Embedding))
        return next(filter(None, (*named, *tables)), 2)

    def _image_size(self) -> tuple[int, int]:
        sources = (self.target.arguments, *map(vars, self.target.module.modules()))
        size = next((source[name] for source in sources for name in _IMAGE_SIZES if source.get(name)), 32)
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))

    def _sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the sources of sizes by name: arguments of the constructor, attributes, a configuration."""
        module = self.target.module
        config = getattr(module, "config", None)
        settings = config if isinstance(config, dict) else vars(config) if hasattr(config, "__dict__") else {}
        return self.target.arguments, vars(module), settings


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """Return the size in the source with the first of these names, in any spelling; None if there is none."""
    known = {plain(name): value for name, value in source.items() if type(value) is int and value > 0}
    return next((known[plain(name)] for name in names if plain(name) in known), None)


# -- which arguments, and of what kind --------------------------------------------------------------------------------


def needed(forward: Forward, target: Target, inputs: InputSpec, given: Collection[str]) -> list[str]:
    """Return the names of the tensors to draw besides the given arguments.

    Raises `InputError` if one cannot be guessed, `SpecError` if --key-len does not apply.
    """
    required = [name for name in forward.parameters if forward.is_needed(name) and name not in given]
    for name in required:
        if forward.kind(name) == "setting":
            raise InputError(f"{forward.label} needs {name}, which is not a tensor. Give --set {name}=VALUE.")
        if _is_container(forward.parameters[name].annotation):
            raise InputError(_container_message(forward, target, name))
    names = [name for name in required if forward.kind(name) != "mask"]
    if not names and not given:
        main = str(getattr(forward.module, "main_input_name", ""))
        names = [main] if main in forward.parameters else forward.tensors[:1]
        if forward.open_ended and not forward.parameters:
            raise InputError(_container_message(forward, target, "**kwargs"))
    if inputs.key_len is not None and not forward.encodes_and_decodes:
        second = [name for name in forward.parameters if forward.kind(name) in ("key", "value", "other")]
        if not second:
            listed = ", ".join(forward.parameters)
            raise SpecError(f"--key-len does not apply: {forward.label} takes one sequence ({listed}). Drop it.")
        source = [name for name in second if forward.kind(name) == "other"][:1] or second
        names += [name for name in source if name not in names and name not in given]
    return names


def guessed_plans(
    sizes: Sizes, names: Sequence[str], given: Collection[str], run: Callable[[Mapping[str, Plan], bool], Probed]
) -> dict[str, Plan]:
    """Return plans for arguments, by how the forward uses them in one run, or in more if it raises.

    Other arguments are `given`. `run` runs the forward with plans, to the end if its second argument is true.

    Raises `InputError` if an argument cannot be guessed.
    """
    forward = sizes.forward
    plans = {name: sizes.plan(name) for name in names}
    loose = [name for name, plan in plans.items() if plan.kind in ("hidden", "unknown", "query")]
    # An argument of an unknown name after others is either optional, or the user has to give it.
    later = [name for name in names if name != next(iter(forward.parameters), name) and (len(names) > 1 or given)]
    extra = [name for name in later if forward.kind(name) in ("unknown", "lengths")]
    best: tuple[int, dict[str, Plan], Probed] | None = None
    kinds: tuple[Kind | None, ...] = (None, "ids", "image") if loose else (None,)
    for kind, omitted in ((kind, omitted) for kind in kinds for omitted in ([extra, []] if extra else [[]])):
        attempt = {n: sizes.plan(n, kind if n in loose else None) for n in names if n not in omitted}
        probed = run(attempt, bool(extra))
        if probed.holder is not None:
            raise InputError(_container_message(forward, sizes.target, probed.holder))
        known = len(probed.evidence) if probed.error is not None else len(names) + 1
        best = (known, attempt, probed) if best is None or known > best[0] else best
        if known >= len(names):
            break
    assert best is not None
    _, chosen, probed = best
    # Optional arguments of a model follow from its configuration.
    is_guesswork = is_hugging_face(forward.module) and probed.error is not None
    firm = {name for name, evidence in probed.evidence.items() if evidence.firm}
    open_names = [n for n in (names if is_guesswork else extra) if n in chosen or probed.error is not None]
    unknown = [name for name in open_names if name not in firm]
    if unknown:
        lines = function_of(sizes.target, {n: None if n in unknown else plans[n] for n in names})
        raise InputError(
            f"{forward.label} needs {unknown[0]}, which cannot be guessed. Give --input-shape "
            f"{unknown[0]}=2x10x512:float32 with its own sizes, --input FILE with {unknown[0]} in it, or a function "
            f"that returns it with the module:\n{lines}"
        )
    for name in chosen.keys() & probed.evidence.keys():
        evidence = probed.evidence[name]
        kind = chosen[name].kind if evidence.kind == "width" else evidence.kind
        chosen[name] = sizes.plan(name, kind, evidence.size, is_1d=evidence.is_1d)
    return chosen if probed.error is None else _with_width_that_runs(sizes, chosen, probed.error, run)


def _with_width_that_runs(
    sizes: Sizes, plans: dict[str, Plan], error: Exception, run: Callable[[Mapping[str, Plan], bool], Probed]
) -> dict[str, Plan]:
    """Return the plans with a width with which the forward runs, in place of a drawn width; else the same plans."""
    drawn = [name for name, plan in plans.items() if sizes.has_drawn_width(plan)]
    for width in sizes.possible_widths(error) if drawn else ():
        wider = {name: replace(plans[name], axes=(*plans[name].axes[:-1], width)) for name in drawn}
        if run({**plans, **wider}, True).error is None:
            return {**plans, **wider}
    return plans


# -- the models of Hugging Face transformers, from their configurations ------------------------------------------------

_OF_DECODERS = ("decoder_input_ids", "decoder_input_values")
"""Required arguments of a decoder with an encoder."""
_BESIDE = {"input_ids": "pixel_values", "pixel_values": "input_ids"}
"""Arguments of models that may need text and images together."""
_COMPARED_WITH = ("pixel_values", "input_features", "input_values")
"""Arguments that a model compares with a text in one embedding space."""


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, whose configuration describes its inputs."""
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "model_type")


def configured_plans(module: Any, names: list[str], free: Collection[str], seq_len: int) -> dict[str, Plan]:
    """Return plans for the arguments that a model's configuration describes.

    Other arguments that the `names` require are included if they are `free`, i.e. the user did not give them.
    """
    wanted = [*names]
    if getattr(module.config, "is_encoder_decoder", False):
        wanted += [name for name in _OF_DECODERS if name in free]
    if any(name.startswith("logit_scale") for name, _ in module.named_parameters(recurse=False)):
        wanted += [name for name in _COMPARED_WITH if name in free][:1]
    decodes = "decoder_input_ids" in wanted
    plans = {name: _plan(module.config, name, seq_len, decodes=decodes) for name in dict.fromkeys(wanted)}
    return {name: plan for name, plan in plans.items() if plan is not None}


def beside(names: Collection[str], free: Collection[str]) -> list[str]:
    """Return the images that a model of text and images may need with its text, or the text with its images."""
    return [_BESIDE[name] for name in names if _BESIDE.get(name) in {*free} - {*names}]


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
    ratios = getattr(config, "upsampling_ratios", None)
    if name == "input_values" and ratios:  # the waveform of a codec, one row per channel
        return Plan("other", ("batch", getattr(config, "audio_channels", 1), prod(ratios) * seq_len))
    if name == "input_values" and bins is None:  # a waveform of as many frames as there are positions
        return Plan("other", ("batch", 400 + 320 * (seq_len - 1)))
    if name == "input_features" and bins is not None and longest is not None:  # the spectrogram of whisper
        return Plan("other", ("batch", bins, 2 * longest))
    return None


def _first(config: Any, *names: str) -> Any:
    """Return the value of the first of these names in a configuration or its parts; None if there is none."""
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
    """Return special tokens: a model may mask padding, and count positions without it."""
    values = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")]
    numbers = [number for value in values for number in (value if isinstance(value, (list, tuple)) else [value])]
    return tuple(dict.fromkeys(number for number in numbers if isinstance(number, int) and number >= 0))


# -- arguments that cannot be guessed ----------------------------------------------------------------------------------


def _is_container(annotation: Any) -> bool:
    """Return whether an annotation is a container of several tensors."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind is Parameter.empty or issubclass(kind, (str, Tensor)):
        return False
    return is_dataclass(kind) or is_typeddict(kind) or issubclass(kind, (Mapping, Sequence))


def _container_message(forward: Forward, target: Target, name: str) -> str:
    """Return the message for an argument that is a container of unknown tensors."""
    return (
        f"{forward.label} takes several tensors in {name}, which cannot be guessed. Give a function "
        f"that returns it with the module:\n{function_of(target, {name.strip('*'): None})}"
    )


def function_of(target: Target, arguments: Mapping[str, Plan | None]) -> str:
    """Return the three lines of a function that returns a module and its arguments, as far as they are known."""
    passed = ", ".join(f"{name}={value!r}" for name, value in target.passed.items())
    function = target.made_from.rpartition(":")[2]
    is_plain = function.isidentifier() and all(name.isidentifier() for name in target.passed)
    values = ", ".join(f"{name}={'...' if plan is None else plan.code}" for name, plan in arguments.items())
    module = f"{function}({passed})" if is_plain and not target.made_from.startswith("hf:") else "..."
    return f"def attention():\n    module = {module}\n    return module, (), dict({values})"


# -- which axis is the batch -------------------------------------------------------------------------------------------

_BATCH = ("b", "bs", "bsz", "batch", "batch_size", "bsize")
_UNPACKED = r"^\s*(\w+), *(\w+)(?:, *\w+)* *= *(\w+)\.(?:shape|size\(\)) *(?:#.*)?$"


def batch_axis_in_words(module: nn.Module, arguments: Collection[str]) -> tuple[int, str] | None:
    """Return the axis that the forward names as the batch when it unpacks a shape, and the words for that.

    `T, B, C = x.shape` gives axis 1. None if it unpacks the shape of none of these arguments before changing it.
    """
    try:
        code = inspect.getsource(type(module).forward)
    except (OSError, TypeError, AttributeError):  # the class of a scripted module has no forward
        return None
    for line in re.finditer(_UNPACKED, code, re.MULTILINE):
        name = line[3]
        changed_before = rf"\b{name}\b[^=\n]*(?<![=!<>])=(?!=)"
        if name not in arguments or re.search(changed_before, code[code.find(":\n") : line.start()]):
            continue
        for axis, word in enumerate(line.groups()[:2]):
            if word.lower() in _BATCH:
                return axis, f"the forward unpacks {name}.shape as {line[1]}, {line[2]}"
    return None


def said_batch_first(module: nn.Module) -> bool | None:
    """Return the `batch_first` of a module, or of a part of one of torch's; None if it has none."""
    parts = module.modules() if type(module).__module__.startswith("torch.nn.") else [module]
    return next((said for part in parts if isinstance(said := getattr(part, "batch_first", None), bool)), None)


def batch_first_of(module: nn.Module, arguments: Collection[str]) -> tuple[bool, str]:
    """Return whether the batch comes first in these arguments, and why: the end of a sentence, empty if it is plain.

    The module shows it by `batch_first`, or its forward by `B, T, C = x.shape`. Otherwise the batch is first.
    """
    if is_hugging_face(module):
        return True, ""
    if (said := said_batch_first(module)) is not None:
        return said, ""
    words = batch_axis_in_words(module, arguments)
    if words is not None:
        return words[0] == 0, "" if words[0] == 0 else f"{words[1]}. Use --batch-first for the other layout."
    inside = (type(part).__name__ for part in module.modules() if getattr(part, "batch_first", None) is False)
    if (kind := next(inside, None)) is None:
        return True, ""
    return True, f"the forward does not say, but its {kind} takes the sequence first. Use --seq-first for that layout."

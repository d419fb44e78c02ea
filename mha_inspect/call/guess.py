"""The arguments of a forward, guessed by their names and the target's sizes, and by one run with these guesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter
from typing import Any, Literal, get_args, get_origin, is_typeddict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, SpecError
from ..layers.spec import InputSpec
from ..making.settings import InputShape
from ..making.target import Target
from ..making.vocabulary import ALIASES, Kind, plain
from ..text import listed
from .call import Axis, Forward, Plan
from .probe import Evidence, Probed

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
_WIDTH_FLAGS: dict[Kind, str] = {"key": "kdim", "value": "vdim", "other": "kdim"}
"""Kind of a vector to the flag with its width, where that is not embed_dim."""


_Form = Literal["hidden", "ids", "image", "channels_last", "heads", "channels_first", "unbatched"]
"""How a forward may take an argument: `batch query embed`, ids, `batch channels height width`,
`batch height width channels`, `batch heads query head_dim`, `batch channels query`, `query embed`."""
_FORMS: tuple[_Form, ...] = get_args(_Form)
_FORMS_OF_KEYS: tuple[_Form, ...] = ("heads", "unbatched")
"""Forms of queries, keys and values that are given apart. Square images would hide a product of the wrong axes."""
_LOOSE = ("query", "key", "value", "hidden", "other", "ids", "image", "unknown")
"""Kinds of arguments that may have another form than their name says."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a target's arguments, from their names, names of settings and its layers."""

    target: Target
    forward: Forward
    unbatched: bool
    lengths: Collection[int] = ()
    """Numbers of tokens in the inputs: a width is never drawn like one, so that exchanged axes are seen."""

    def plan(self, name: str, kind: Kind | None = None, size: int | None = None, *, is_1d: bool = False) -> Plan:
        """Return the likely plan of an argument, or a plan of this kind.

        `size` is the width of the last axis, for ids the number of tokens, for an image the channels.
        """
        kind = kind or self.forward.kind(name)
        if kind == "image":
            channels = size or _first_int(self.target.arguments, *_CHANNELS) or 3
            pixels: tuple[Axis, ...] = ("query",) if is_1d else self._image_size()
            return Plan(kind, ("batch", channels, *pixels))
        if kind == "rotation":
            return self._rotation()
        length = self._length_axis(name)
        places: tuple[Axis, ...] = (length,) if self.unbatched else ("batch", length)
        if kind == "ids":
            below = size or self._vocabulary()
            return Plan(kind, places, "int64", below)
        width = size or self._width(kind)
        return Plan(kind, (*places, width))

    def plan_in_form(self, name: str, form: _Form) -> Plan:
        """Return the plan of an argument in another form than its name says."""
        if form in ("hidden", "ids", "image"):
            return self.plan(name, form)
        width = self._width("hidden")
        length = self._length_axis(name)
        if form == "channels_last":
            return Plan("image", ("batch", *self._image_size(), width))
        if form == "channels_first":
            return Plan("unknown", ("batch", width, length))
        if form == "unbatched":
            return Plan("unknown", (length, width))
        return Plan("unknown", ("batch", *self._heads_of(width, length)))

    def _heads_of(self, width: int, length: Axis) -> tuple[Axis, ...]:
        """Return the axes of a sequence that is split already, `heads length head_dim`."""
        heads = self._setting("num_heads") or 4
        head_dim = self._setting("head_dim") or max(width // heads, 1)
        return heads, length, head_dim

    def _rotation(self) -> Plan:
        """Return the plan of the complex rotations of a sequence, `query pair`: each pair of features has one."""
        width = self._width("hidden")
        heads = self._setting("num_heads") or 1
        head_dim = self._setting("head_dim") or width // heads
        return Plan("rotation", ("query", max(head_dim // 2, 1)), "complex64")

    def _setting(self, flag: str) -> int | None:
        """Return the size that the target has for a flag, by any name for it; None if it has none."""
        for source in self._sources():
            size = _first_int(source, *ALIASES[flag])
            if size is not None:
                return size
        return None

    def _length_axis(self, name: str) -> Axis:
        """Return the axis with the length of an argument: `key` for a second sequence and the input of an encoder."""
        if self.forward.encodes_and_decodes and plain(name) in _ENCODED:
            return "key"
        if self.forward.kind(name) in ("key", "value", "other"):
            return "key"
        return "query"

    def given(self, name: str, shape: InputShape) -> Plan:
        """Return the plan of an argument whose shape the user gave."""
        kind = self.forward.kind(name)
        dtype = shape.dtype
        if dtype is None:
            dtype = "int64" if kind == "ids" else ""
        if dtype.startswith("int"):
            return Plan("ids", shape.shape, dtype, self._vocabulary())
        # A dtype of the user's own shows that the name says too little.
        return Plan(kind if shape.dtype is None else "unknown", shape.shape, dtype)

    def lazy_note(self) -> tuple[str, ...]:
        """Return a sentence on the width of lazy layers; empty without lazy layers.

        Raises `InputError` if the width is unknown.
        """
        lazy = _lazy_layer(self.target.module)
        kinds = {self.forward.kind(name) for name in self.forward.parameters}
        if lazy is None or "ids" in kinds or "image" in kinds:
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
        if plan.is_given or plan.kind in ("ids", "image", "mask"):
            return False
        return plan.axes[-1] == _UNUSUAL and self._known_width(plan.kind) is None

    def recurrent_widths(self) -> list[int]:
        """Return the widths of the inputs of recurrent layers, which check them before anything is computed."""
        return [part.input_size for part in self.target.module.modules() if isinstance(part, nn.RNNBase)]

    def possible_widths(self) -> list[int]:
        """Return widths that the target's settings show: that of all heads, then those with a name of a width."""
        heads, head_dim = self._setting("num_heads"), self._setting("head_dim")
        named: list[int] = []
        if heads and head_dim:
            named.append(heads * head_dim)
        unnamed: list[int] = []
        for source in self._sources():
            for name, value in source.items():
                if type(value) is int and 1 < value <= _WIDEST:
                    group = unnamed if _WIDTH_NAME.search(name) is None else named
                    group.append(value)
        widths = dict.fromkeys([*named, *unnamed])
        for unwanted in (_UNUSUAL, *self.lengths):
            widths.pop(unwanted, None)
        return list(widths)[:_TRIES]

    def _known_width(self, kind: Kind) -> int | None:
        """Return the width of vectors of a kind; None if nothing in the target shows it."""
        width = self._setting(_WIDTH_FLAGS.get(kind, "embed_dim")) or self._setting("embed_dim")
        if width is not None:
            return width
        linears = [part for part in self.target.module.modules() if isinstance(part, nn.Linear)]
        sizes = [linear.in_features for linear in linears]  # 0 for a lazy layer
        sizes += [linear.out_features for linear in linears]
        for size in sizes:
            if size:
                return size
        return None

    def _vocabulary(self) -> int:
        """Return the size of the vocabulary."""
        for source in self._sources():
            size = _first_int(source, *_VOCABULARY)
            if size is not None:
                return size
        for part in self.target.module.modules():
            if isinstance(part, nn.Embedding) and part.num_embeddings:
                return part.num_embeddings
        return 2

    def _image_size(self) -> tuple[int, int]:
        """Return the height and width of an image."""
        for source in (self.target.arguments, *map(vars, self.target.module.modules())):
            for name in _IMAGE_SIZES:
                if source.get(name):
                    return _height_and_width(source[name])
        return 32, 32

    def _sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the sources of sizes by name: arguments of the constructor, attributes, a configuration."""
        module = self.target.module
        config = getattr(module, "config", None)
        settings: Mapping[str, Any] = {}
        if isinstance(config, dict):
            settings = config
        elif hasattr(config, "__dict__"):
            settings = vars(config)
        return self.target.arguments, vars(module), settings


def _lazy_layer(module: nn.Module) -> nn.Module | None:
    """Return the first layer whose parameters have no shape yet; None if there is none."""
    for part in module.modules():
        if any(map(is_lazy, part.parameters(recurse=False))):
            return part
    return None


def _height_and_width(size: Any) -> tuple[int, int]:
    """Return the height and width of an image that is square, or whose first and last sizes are given."""
    if isinstance(size, int):
        return size, size
    return int(size[0]), int(size[-1])


def _first_int(source: Mapping[str, Any], *names: str) -> int | None:
    """Return the size in the source with the first of these names, in any spelling; None if there is none."""
    sizes: dict[str, int] = {}
    for name, value in source.items():
        if type(value) is int and value > 0:
            sizes[plain(name)] = value
    for name in names:
        if plain(name) in sizes:
            return sizes[plain(name)]
    return None


# -- which arguments, and of what kind --------------------------------------------------------------------------------


def needed(forward: Forward, target: Target, inputs: InputSpec, given: Collection[str]) -> list[str]:
    """Return the names of the tensors to draw besides the given arguments.

    Raises `InputError` if one cannot be guessed, `SpecError` if --key-len does not apply.
    """
    required = [name for name in forward.parameters if forward.is_needed(name) and name not in given]
    _require_tensors(forward, target, required)
    names = [name for name in required if forward.kind(name) != "mask"]
    if not names and not given:
        names = _first_tensor(forward, target)
    if inputs.key_len is not None and not forward.encodes_and_decodes:
        for name in _with_keys(forward):
            if name not in names and name not in given:
                names.append(name)
    return names


def _require_tensors(forward: Forward, target: Target, required: Sequence[str]) -> None:
    """Raise `InputError` if a required argument is no tensor, but a setting or a container of tensors."""
    settings = [name for name in required if forward.kind(name) == "setting"]
    if settings:
        them = "which is not a tensor" if len(settings) == 1 else "which are not tensors"
        ways = " ".join(f"--set {name}=VALUE" for name in settings)
        raise InputError(f"{forward.label} needs {listed(settings)}, {them}. Give {ways}.")
    for name in required:
        if _is_container(forward.parameters[name].annotation):
            raise InputError(_container_message(forward, target, name))


def _first_tensor(forward: Forward, target: Target) -> list[str]:
    """Return the main input of a forward without required arguments, in a list; an empty list if it has none."""
    if forward.open_ended and not forward.parameters:
        raise InputError(_container_message(forward, target, "**kwargs"))
    main = str(getattr(forward.module, "main_input_name", ""))
    if main in forward.parameters:
        return [main]
    return forward.tensors[:1]


def _with_keys(forward: Forward) -> list[str]:
    """Return the arguments that --key-len makes longer: a context, or else key and value.

    Raises `SpecError` if there are none.
    """
    by_kind = {name: forward.kind(name) for name in forward.parameters}
    keys_and_values: list[str] = []
    for name, kind in by_kind.items():
        if kind == "other":
            return [name]
        if kind in ("key", "value"):
            keys_and_values.append(name)
    if not keys_and_values:
        listed = ", ".join(forward.parameters)
        raise SpecError(f"--key-len does not apply: {forward.label} takes one sequence ({listed}). Drop it.")
    return keys_and_values


@dataclass(frozen=True)
class _Attempt:
    """A run with plans for all arguments, or for those that may not be left out."""

    plans: Mapping[str, Plan]
    probed: Probed

    @property
    def num_shown(self) -> int:
        """How many arguments the run showed, before it raised."""
        return len(self.probed.evidence)

    @property
    def is_contradicted(self) -> bool:
        """Whether a matrix multiplies an argument that was given token ids."""
        for name, evidence in self.probed.evidence.items():
            plan = self.plans.get(name)
            if plan is not None and plan.kind == "ids" and evidence.kind != "ids":
                return True
        return False

    def is_better_than(self, attempt: _Attempt) -> bool:
        """Return whether this run got further: to its end, or else past the use of more arguments."""
        if attempt.probed.error is None or self.is_contradicted:
            return False
        return self.probed.error is None or self.num_shown > attempt.num_shown

    def is_enough(self, names: Sequence[str]) -> bool:
        """Return whether another run would show nothing more of these arguments."""
        if self.is_contradicted:
            return False
        return self.probed.error is None or self.num_shown >= len(names)


Run = Callable[[Mapping[str, Plan], bool], Probed]
"""Runs the forward with plans, to the end if its second argument is true."""


def guessed_plans(
    sizes: Sizes,
    names: Sequence[str],
    given: Collection[str],
    run: Run,
    runs: Callable[[Mapping[str, Plan]], bool],
) -> dict[str, Plan]:
    """Return plans for arguments, by how the forward uses them in one run, or in more if it raises.

    Other arguments are `given`. `runs` says whether the forward runs to its end with plans as they are.

    Raises `InputError` if an argument cannot be guessed.
    """
    optional = _perhaps_optional(sizes.forward, names, given)
    attempt = _best_attempt(sizes, names, optional, run)
    probed = attempt.probed
    plans = dict(attempt.plans)
    for name, evidence in probed.evidence.items():
        if name in plans:
            plans[name] = _plan_by_evidence(sizes, name, plans[name], evidence)
    if probed.error is not None:
        with_width = _with_width_that_runs(sizes, plans, run)
        if with_width is not None:
            return with_width
    if not attempt.is_enough(names):
        in_another_form = _form_that_runs(sizes, names, optional, runs)
        if in_another_form is not None:
            return in_another_form
    unknown = _not_shown(sizes.forward, names, optional, attempt)
    if unknown:
        raise InputError(_unknown_message(sizes, names, unknown))
    return plans


def _plan_by_evidence(sizes: Sizes, name: str, plan: Plan, evidence: Evidence) -> Plan:
    """Return the plan after a use: a matrix reads the last axis of an image, a convolution its channels."""
    is_last_axis_of_image = evidence.kind == "width" and plan.kind == "image" and not evidence.is_1d
    if is_last_axis_of_image:
        pixels = plan.axes[2:]
        return replace(plan, axes=("batch", *pixels, evidence.size))
    kind = plan.kind if evidence.kind == "width" else evidence.kind
    return sizes.plan(name, kind, evidence.size, is_1d=evidence.is_1d)


def _form_that_runs(
    sizes: Sizes, names: Sequence[str], optional: Sequence[str], runs: Callable[[Mapping[str, Plan]], bool]
) -> dict[str, Plan] | None:
    """Return plans in the first form with which the forward runs to its end; None if there is none.

    Optional arguments are left out: what they are is not known in any form.
    """
    required = [name for name in names if name not in optional]
    loose = [name for name in required if sizes.forward.kind(name) in _LOOSE]
    forms = _FORMS_OF_KEYS if _has_keys(sizes.forward, names) else _FORMS
    for form in forms if loose else ():
        plans = {name: sizes.plan(name) for name in required}
        for name in loose:
            plans[name] = sizes.plan_in_form(name, form)
        if runs(plans):
            return plans
    return None


def _has_keys(forward: Forward, names: Sequence[str]) -> bool:
    """Return whether keys or values are among these arguments."""
    return any(forward.kind(name) in ("key", "value") for name in names)


def _perhaps_optional(forward: Forward, names: Sequence[str], given: Collection[str]) -> list[str]:
    """Return the arguments of an unknown name after others: each is either optional, or the user has to give it."""
    if len(names) == 1 and not given:
        return []
    optional: list[str] = []
    for name in names:
        is_later = bool(forward.parameters) and name != next(iter(forward.parameters))
        if is_later and forward.kind(name) in ("unknown", "lengths"):
            optional.append(name)
    return optional


def _best_attempt(sizes: Sizes, names: Sequence[str], optional: Sequence[str], run: Run) -> _Attempt:
    """Return the run that got furthest: as named, without optional arguments, or with ids or images for vectors.

    Raises `InputError` if an argument is a container.
    """
    best: _Attempt | None = None
    for plans in _plans_to_try(sizes, names, optional):
        attempt = _Attempt(plans, run(plans, bool(optional)))
        if attempt.probed.holder is not None:
            raise InputError(_container_message(sizes.forward, sizes.target, attempt.probed.holder))
        if best is None or attempt.is_better_than(best):
            best = attempt
        if attempt.is_enough(names):
            break
    assert best is not None
    return best


def _plans_to_try(sizes: Sizes, names: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Plan]]:
    """Yield plans in the order of trying them: vectors first, then ids and images; without optional arguments first."""
    usual = {name: sizes.plan(name) for name in names}
    loose = [name for name, plan in usual.items() if plan.kind in ("hidden", "unknown", "query")]
    if _has_keys(sizes.forward, names):
        loose = []
    kinds: tuple[Kind | None, ...] = (None, "ids", "image") if loose else (None,)
    for kind in kinds:
        plans = dict(usual)
        for name in loose:
            plans[name] = sizes.plan(name, kind)
        if optional:
            fewer = dict(plans)
            for name in optional:
                del fewer[name]
            yield fewer
        yield plans


def _not_shown(forward: Forward, names: Sequence[str], optional: Sequence[str], attempt: _Attempt) -> list[str]:
    """Return the arguments of which a run did not show what they are."""
    raised = attempt.probed.error is not None
    # Optional arguments of a model follow from its configuration.
    doubtful = names if raised and is_hugging_face(forward.module) else optional
    unknown: list[str] = []
    for name in doubtful:
        evidence = attempt.probed.evidence.get(name)
        is_firm = evidence is not None and evidence.firm
        if not is_firm and (raised or name in attempt.plans):
            unknown.append(name)
    return unknown


def _unknown_message(sizes: Sizes, names: Sequence[str], unknown: Sequence[str]) -> str:
    """Return the message for arguments of which nothing shows what they are."""
    plans: dict[str, Plan | None] = {}
    for name in names:
        plans[name] = None if name in unknown else sizes.plan(name)
    first = unknown[0]
    code = function_of(sizes.target, plans)
    return (
        f"{sizes.forward.label} needs {first}, which cannot be guessed. Give --input-shape "
        f"{first}=SIZES:DTYPE, e.g. 2x10x512:float32, --input FILE with {first} in it, or a function "
        f"that returns it with the module:\n{code}"
    )


def _with_width_that_runs(sizes: Sizes, plans: Mapping[str, Plan], run: Run) -> dict[str, Plan] | None:
    """Return the plans with a width with which the forward runs, in place of a drawn width; None if there is none.

    Recurrent layers say which width they take.
    """
    widths = sizes.recurrent_widths()
    if widths:
        drawn = [name for name, plan in plans.items() if not plan.is_given and plan.kind not in ("ids", "image")]
    else:
        widths = sizes.possible_widths()
        drawn = [name for name, plan in plans.items() if sizes.has_drawn_width(plan)]
    if not drawn:
        return None
    for width in widths:
        wider = dict(plans)
        for name in drawn:
            wider[name] = replace(plans[name], axes=(*plans[name].axes[:-1], width))
        if run(wider, True).error is None:
            return wider
    return None


# -- the models of Hugging Face transformers, from their configurations ------------------------------------------------

_OF_DECODERS = ("decoder_input_ids", "decoder_input_values")
"""Required arguments of a decoder with an encoder."""
_BESIDE = {"input_ids": "pixel_values", "pixel_values": "input_ids"}
"""Arguments of models that may need text and images together."""
_COMPARED_WITH = ("pixel_values", "input_features", "input_values")
"""Arguments that a model compares with a text in one embedding space."""


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, whose configuration describes its inputs."""
    if not hasattr(module, "main_input_name"):
        return False
    config = getattr(module, "config", None)
    return hasattr(config, "model_type")


def configured_plans(module: Any, names: list[str], free: Collection[str], seq_len: int) -> dict[str, Plan]:
    """Return plans for the arguments that a model's configuration describes.

    Other arguments that the `names` require are included if they are `free`, i.e. the user did not give them.
    """
    wanted = [*names]
    if getattr(module.config, "is_encoder_decoder", False):
        wanted += [name for name in _OF_DECODERS if name in free]
    weights = [name for name, _ in module.named_parameters(recurse=False)]
    if any(name.startswith("logit_scale") for name in weights):
        wanted += [name for name in _COMPARED_WITH if name in free][:1]
    decodes = "decoder_input_ids" in wanted
    plans: dict[str, Plan] = {}
    for name in dict.fromkeys(wanted):
        plan = _configured_plan(module.config, name, seq_len, decodes=decodes)
        if plan is not None:
            plans[name] = plan
    return plans


def beside(names: Collection[str], free: Collection[str]) -> list[str]:
    """Return the images that a model of text and images may need with its text, or the text with its images."""
    partners: list[str] = []
    for name in names:
        partner = _BESIDE.get(name)
        if partner is not None and partner in free and partner not in names:
            partners.append(partner)
    return partners


def _configured_plan(config: Any, name: str, seq_len: int, *, decodes: bool) -> Plan | None:
    """Return the plan of an argument by its name in transformers; None if the configuration does not describe it."""
    if name == "input_ids":
        return _ids(config.get_text_config(decoder=False), config, "key" if decodes else "query")
    if name == "decoder_input_ids":
        return _ids(config.get_text_config(decoder=True), config, "query")
    if name == "pixel_values":
        return _image(_vision_config(config))
    if name == "encoder_hidden_states":
        width = _first(config, "encoder_hidden_size", "hidden_size")
        return None if width is None else Plan("other", ("batch", "key", width))
    if name == "input_values":
        return _waveform(config, seq_len)
    if name == "input_features":
        return _spectrogram(config)
    return None


def _ids(text_config: Any, config: Any, length: Axis) -> Plan | None:
    """Return the plan of tokens, `batch query` or `batch key`; None if the size of the vocabulary is unknown."""
    words = text_config if hasattr(text_config, "vocab_size") else getattr(config, "text_config", text_config)
    size = getattr(words, "vocab_size", None)
    if not isinstance(size, int):
        return None
    return Plan("ids", ("batch", length), "int64", below=size, avoid=_special(words))


def _waveform(config: Any, seq_len: int) -> Plan | None:
    """Return the plan of the samples of a sound; None where a model takes a spectrogram under that name."""
    if _first(config, "num_mel_bins") is not None:
        return None
    # A waveform of as many frames as there are positions.
    return Plan("other", ("batch", 400 + 320 * (seq_len - 1)))


def _spectrogram(config: Any) -> Plan | None:
    """Return the plan of the spectrogram of whisper, `batch bins frames`; None if its sizes are unknown."""
    bins = _first(config, "num_mel_bins")
    longest = getattr(getattr(config, "audio_config", config), "max_source_positions", None)
    if bins is None or longest is None:
        return None
    return Plan("other", ("batch", bins, 2 * longest))


def _first(config: Any, *names: str) -> Any:
    """Return the value of the first of these names in a configuration or its parts; None if there is none."""
    configs = [config]
    for part in getattr(config, "sub_configs", {}):
        if getattr(config, part, None):
            configs.append(getattr(config, part))
    for source in configs:
        for name in names:
            value = getattr(source, name, None)
            if value is not None:
                return value
    return None


def _vision_config(config: Any) -> Any:
    """Return the part of a configuration with the size of an image."""
    return getattr(config, "vision_config", config)


def _image(config: Any) -> Plan:
    """Return the plan of an image, `batch channels height width`."""
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None) or 224
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = _height_and_width(size)
    channels = 3
    for name in ("num_channels", "in_channels", "in_chans"):
        if hasattr(config, name):
            channels = int(getattr(config, name))
            break
    return Plan("image", ("batch", channels, height, width))


def _special(config: Any) -> tuple[int, ...]:
    """Return special tokens: a model may mask padding, and count positions without it."""
    tokens: dict[int, None] = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and token >= 0:
                tokens[token] = None
    return tuple(tokens)


# -- arguments that cannot be guessed ----------------------------------------------------------------------------------


def _is_container(annotation: Any) -> bool:
    """Return whether an annotation is a container of several tensors."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind is Parameter.empty:
        return False
    if issubclass(kind, (str, Tensor)):
        return False
    return is_dataclass(kind) or is_typeddict(kind) or issubclass(kind, (Mapping, Sequence))


def _container_message(forward: Forward, target: Target, name: str) -> str:
    """Return the message for an argument that is a container of unknown tensors."""
    code = function_of(target, {name.strip("*"): None})
    return (
        f"{forward.label} takes several tensors in {name}, which cannot be guessed. Give a function "
        f"that returns it with the module:\n{code}"
    )


def function_of(target: Target, arguments: Mapping[str, Plan | None]) -> str:
    """Return the three lines of a function that returns a module and its arguments, as far as they are known."""
    values: list[str] = []
    for name, plan in arguments.items():
        code = "..." if plan is None else plan.code
        values.append(f"{name}={code}")
    lines = [
        "def attention():",
        f"    module = {_constructor_call(target)}",
        f"    return module, (), dict({', '.join(values)})",
    ]
    return "\n".join(lines)


def _constructor_call(target: Target) -> str:
    """Return Python code that makes a module: `Attention(dim=64)`, or `...` where no code is that short."""
    function = target.made_from.rpartition(":")[2]
    if target.made_from.startswith("hf:"):
        return "..."
    if not function.isidentifier() or not all(name.isidentifier() for name in target.passed):
        return "..."
    passed = ", ".join(f"{name}={value!r}" for name, value in target.passed.items())
    return f"{function}({passed})"

"""The arguments of a forward, guessed by their names and the target's sizes, and by runs with these guesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter
from typing import Any, Literal, get_origin, is_typeddict

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, SpecError
from ..layers.spec import InputSpec
from ..making.settings import InputShape
from ..making.target import Target
from ..making.vocabulary import ALIASES, CHANNELS, ENCODED, IMAGE_SIZES, VOCABULARY, Kind, plain
from ..text import listed
from .call import Axis, Forward, Plan
from .probe import Probed

_UNUSUAL = 37
"""An unlikely width: a forward that accepts it does not depend on the width."""
_WIDTH_NAME = re.compile("dim|hidden|width|embed|model|size|features|channels", re.IGNORECASE)
_WIDEST, _TRIES = 1 << 14, 8
"""The largest width to try, and the number of widths, where nothing shows the width."""
_WIDTH_FLAGS: dict[Kind, str] = {"key": "kdim", "value": "vdim", "other": "kdim"}
"""Kind of a vector to the flag with its width, where that is not embed_dim."""

_Form = Literal["vectors", "ids", "image", "channels_last", "heads", "channels_first", "unbatched", "rotation"]
"""How a forward may take an argument: `batch query embed`, ids, `batch channels height width`,
`batch height width channels`, `batch heads query head_dim`, `batch channels query`, `query embed`, `query pair`."""
_FORMS: tuple[_Form, ...] = ("vectors", "channels_last", "heads", "channels_first", "unbatched")
"""Forms to try where the name and one run do not show the form."""
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

    def plan(self, name: str, form: _Form | None = None, size: int | None = None) -> Plan:
        """Return the plan of an argument in this form, or in the one that its name says.

        `size` is the width of the last axis, for ids the number of tokens, for an image the channels.
        """
        kind = self.forward.kind(name)
        if form is None:
            form = kind if kind in ("ids", "image", "rotation") else "vectors"
        length = self._length_axis(name)
        if form == "ids":
            below = size or self._first_size(VOCABULARY) or self._tokens()
            return Plan("ids", (length,) if self.unbatched else ("batch", length), "int64", below)
        if form == "image":
            channels = size or _first_int(self.target.arguments, *CHANNELS) or 3
            return Plan("image", ("batch", channels, *self._image_size()))
        if form == "rotation":
            return self._rotation()
        width = size or self._width(kind)
        if form == "vectors":
            # A name of ids or of an image says too little of vectors.
            kind = "hidden" if kind in ("ids", "image") else kind
            return Plan(kind, (length, width) if self.unbatched else ("batch", length, width))
        return self._in_further_form(form, length, width)

    def _in_further_form(self, form: _Form, length: Axis, width: int) -> Plan:
        """Return the plan of an argument in a form that no name says."""
        if form == "channels_last":
            return Plan("image", ("batch", *self._image_size(), width))
        if form == "channels_first":
            return Plan("unknown", ("batch", width, length))
        if form == "unbatched":
            return Plan("unknown", (length, width))
        heads = self._setting("num_heads") or 4
        head_dim = self._setting("head_dim") or max(width // heads, 1)
        return Plan("unknown", ("batch", heads, length, head_dim))

    def _rotation(self) -> Plan:
        """Return the plan of the complex rotations of a sequence, `query pair`: each pair of features has one."""
        heads = self._setting("num_heads") or 1
        head_dim = self._setting("head_dim") or self._width("hidden") // heads
        return Plan("rotation", ("query", max(head_dim // 2, 1)), "complex64")

    def _setting(self, flag: str) -> int | None:
        """Return the size that the target has for a flag, by any name for it; None if it has none."""
        return self._first_size(ALIASES[flag])

    def _first_size(self, names: Sequence[str]) -> int | None:
        """Return the first size that the target has under one of these names; None if it has none."""
        for source in self._sources():
            size = _first_int(source, *names)
            if size is not None:
                return size
        return None

    def _length_axis(self, name: str) -> Axis:
        """Return the axis with the length of an argument: `key` for a second sequence and the input of an encoder."""
        if self.forward.encodes_and_decodes and plain(name) in ENCODED:
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
            return Plan("ids", shape.shape, dtype, self.plan(name, "ids").below)
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

    def drawn_width(self, plans: Iterable[Plan]) -> int:
        """Return the width of the first plan whose width nothing in the target shows; 0 if there is none."""
        for plan in plans:
            if plan.is_given or plan.kind in ("ids", "image", "mask"):
                continue
            if plan.axes[-1] == _UNUSUAL and self._known_width(plan.kind) is None:
                return _UNUSUAL
        return 0

    def possible_widths(self) -> list[int]:
        """Return widths that the target's settings show: that of all heads, then those with a name of a width."""
        heads, head_dim = self._setting("num_heads"), self._setting("head_dim")
        shown: list[int] = []
        if heads and head_dim:
            shown.append(heads * head_dim)
        others: list[int] = []
        for source in self._sources():
            for name, value in source.items():
                if type(value) is int and 1 < value <= _WIDEST:
                    group = others if _WIDTH_NAME.search(name) is None else shown
                    group.append(value)
        widths = dict.fromkeys([*shown, *others])
        for unwanted in (_UNUSUAL, *self.lengths):
            widths.pop(unwanted, None)
        return list(widths)[:_TRIES]

    def _known_width(self, kind: Kind) -> int | None:
        """Return the width of vectors of a kind; None if nothing in the target shows it."""
        width = self._setting(_WIDTH_FLAGS.get(kind, "embed_dim")) or self._setting("embed_dim")
        if width is not None:
            return width
        linears = [part for part in self.target.module.modules() if isinstance(part, nn.Linear)]
        for linear in linears:
            if linear.in_features:  # 0 for a lazy layer
                return linear.in_features
        return linears[0].out_features if linears else None

    def _tokens(self) -> int:
        """Return the size of the first table of tokens."""
        for part in self.target.module.modules():
            if isinstance(part, nn.Embedding) and part.num_embeddings:
                return part.num_embeddings
        return 2

    def _image_size(self) -> tuple[int, int]:
        """Return the height and width of an image."""
        for source in (self.target.arguments, *map(vars, self.target.module.modules())):
            for name in IMAGE_SIZES:
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


def needed(forward: Forward, inputs: InputSpec, given: Collection[str]) -> list[str]:
    """Return the names of the tensors to draw besides the given arguments.

    Raises `InputError` if one cannot be guessed, `SpecError` if --key-len does not apply.
    """
    required = [name for name in forward.parameters if forward.is_needed(name) and name not in given]
    _require_tensors(forward, required)
    names = [name for name in required if forward.kind(name) != "mask"]
    if not names and not given:
        names = _first_tensor(forward)
    if inputs.key_len is not None and not forward.encodes_and_decodes:
        for name in _with_keys(forward):
            if name not in names and name not in given:
                names.append(name)
    return names


def _require_tensors(forward: Forward, required: Sequence[str]) -> None:
    """Raise `InputError` if a required argument is no tensor, but a setting or a container of tensors."""
    settings = [name for name in required if forward.kind(name) == "setting"]
    if settings:
        them = "which is not a tensor" if len(settings) == 1 else "which are not tensors"
        ways = " ".join(f"--set {name}=VALUE" for name in settings)
        raise InputError(f"{forward.label} needs {listed(settings)}, {them}. Give {ways}.")
    for name in required:
        if _is_container(forward.parameters[name].annotation):
            raise InputError(_container_message(forward, name))


def _first_tensor(forward: Forward) -> list[str]:
    """Return the main input of a forward without required arguments, in a list; an empty list if it has none."""
    if forward.open_ended and not forward.parameters:
        raise InputError(_container_message(forward, "**kwargs"))
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


Run = Callable[[Mapping[str, Plan], Collection[str], bool], Probed]
"""Runs the forward with plans, and returns the use of the arguments of these names; to its end if that is true."""


@dataclass(frozen=True)
class _Attempt:
    """A run with plans for all arguments, or for those that may not be left out."""

    plans: Mapping[str, Plan]
    probed: Probed

    @property
    def fails(self) -> bool:
        """Whether the run raised, or a matrix multiplied an argument that was given as token ids or an image."""
        if self.probed.error is not None:
            return True
        return any(self.is_misread(name) for name in self.plans)

    def is_misread(self, name: str) -> bool:
        """Return whether a matrix multiplied an argument that was given as token ids or an image."""
        evidence = self.probed.evidence.get(name)
        if evidence is None or evidence.kind != "width":
            return False
        return self.plans[name].kind in ("ids", "image")

    @property
    def num_shown(self) -> int:
        """The number of arguments of which the run showed that they are as planned, before it raised."""
        shown = [name for name in self.probed.evidence if not self.is_misread(name)]
        return len(shown)


@dataclass(frozen=True)
class Guesser:
    """Plans for arguments, by how the forward uses them in one run, or in more if it raises."""

    sizes: Sizes
    names: Sequence[str]
    """The arguments to plan."""
    given: Collection[str]
    """Other arguments."""
    run: Run

    def plans(self) -> dict[str, Plan]:
        """Return a plan for each argument. Raises `InputError` if one cannot be guessed."""
        attempt = self._best_attempt()
        plans = dict(attempt.plans)
        for name, evidence in attempt.probed.evidence.items():
            if plans[name].kind == "rotation":
                continue
            form: _Form = "vectors" if evidence.kind == "width" else evidence.kind
            plans[name] = self.sizes.plan(name, form, evidence.size)
        if attempt.fails:
            for further in self._further_plans(attempt, plans):
                probed = self.run(further, (), True)
                if probed.error is None:
                    return further
        unknown = self._not_shown(attempt)
        if unknown:
            raise InputError(_unknown_message(self.sizes.forward, unknown[0]))
        return plans

    @property
    def _optional(self) -> list[str]:
        """The arguments of an unknown name after others: each is either optional, or the user has to give it."""
        if len(self.names) == 1 and not self.given:
            return []
        forward = self.sizes.forward
        optional: list[str] = []
        for name in self.names:
            is_first = name == next(iter(forward.parameters), name)
            if not is_first and forward.kind(name) in ("unknown", "lengths"):
                optional.append(name)
        return optional

    @property
    def _has_keys(self) -> bool:
        """Whether keys or values are among the arguments."""
        return any(self.sizes.forward.kind(name) in ("key", "value") for name in self.names)

    def _best_attempt(self) -> _Attempt:
        """Return the first run to its end, or else the one that showed most.

        Raises `InputError` if an argument is a container.
        """
        best: _Attempt | None = None
        for plans in self._first_plans():
            probed = self.run(plans, plans, bool(self._optional))
            if probed.holder is not None:
                raise InputError(_container_message(self.sizes.forward, probed.holder))
            attempt = _Attempt(plans, probed)
            if not attempt.fails:
                return attempt
            if best is None or attempt.num_shown > best.num_shown:
                best = attempt
            if self._is_all_shown(attempt):
                break
        assert best is not None
        return best

    def _is_all_shown(self, attempt: _Attempt) -> bool:
        """Return whether another run would show nothing more of the arguments."""
        return attempt.num_shown >= len(self.names)

    def _first_plans(self) -> Iterator[dict[str, Plan]]:
        """Yield plans as named, then with ids and images for vectors; each without optional arguments first."""
        usual = {name: self.sizes.plan(name) for name in self.names}
        loose: list[str] = []
        if not self._has_keys:
            loose = [name for name, plan in usual.items() if plan.kind in ("hidden", "unknown", "query")]
        forms: tuple[_Form | None, ...] = (None, "ids", "image") if loose else (None,)
        for form in forms:
            plans = dict(usual)
            for name in loose:
                plans[name] = self.sizes.plan(name, form)
            if self._optional:
                yield {name: plan for name, plan in plans.items() if name not in self._optional}
            yield plans

    def _further_plans(self, attempt: _Attempt, plans: Mapping[str, Plan]) -> Iterator[dict[str, Plan]]:
        """Yield plans with other widths, then in other forms, after an attempt that fails."""
        evidence = attempt.probed.evidence
        vectors = [name for name, plan in plans.items() if plan.kind not in ("ids", "image")]
        unshown = [name for name in vectors if name not in evidence]
        if unshown:
            for width in self.sizes.possible_widths():
                yield _with_width(plans, unshown, width)
        # An attempt that showed every argument failed for another reason than their form.
        if not self._is_all_shown(attempt):
            yield from self._plans_in_forms()

    def _plans_in_forms(self) -> Iterator[dict[str, Plan]]:
        """Yield plans in each form that arguments of such names may have, without optional arguments."""
        required = [name for name in self.names if name not in self._optional]
        loose = [name for name in required if self.sizes.forward.kind(name) in _LOOSE]
        if not loose:
            return
        for form in _FORMS_OF_KEYS if self._has_keys else _FORMS:
            plans = {name: self.sizes.plan(name) for name in required}
            for name in loose:
                plans[name] = self.sizes.plan(name, form)
            yield plans

    def _not_shown(self, attempt: _Attempt) -> list[str]:
        """Return the arguments of which a run did not show what they are."""
        raised = attempt.probed.error is not None
        # Optional arguments of a model follow from its configuration.
        is_model = is_hugging_face(self.sizes.forward.module)
        doubtful = self.names if raised and is_model else self._optional
        unknown: list[str] = []
        for name in doubtful:
            if name not in attempt.probed.evidence and (raised or name in attempt.plans):
                unknown.append(name)
        return unknown


def _with_width(plans: Mapping[str, Plan], names: Sequence[str], width: int) -> dict[str, Plan]:
    """Return plans in which the last axis of these arguments has this width."""
    wider = dict(plans)
    for name in names:
        *places, _ = plans[name].axes
        wider[name] = replace(plans[name], axes=(*places, width))
    return wider


def _unknown_message(forward: Forward, name: str) -> str:
    """Return the message for an argument of which nothing shows what it is."""
    return (
        f"{forward.label} needs {name}, which cannot be guessed. Give --input-shape {name}=SIZES:DTYPE, "
        f"e.g. 2x10x512:float32, --input FILE with {name} in it, or let a function "
        "return it with the module: `mha-inspect help inputs`."
    )


# -- the models of Hugging Face transformers, from their configurations ------------------------------------------------


def is_hugging_face(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, whose configuration describes its inputs."""
    if not hasattr(module, "main_input_name"):
        return False
    config = getattr(module, "config", None)
    return hasattr(config, "model_type")


def configured_plans(config: Any, names: Collection[str], free: Collection[str]) -> dict[str, Plan]:
    """Return plans for the tokens and the image among these arguments, by the configuration of a model.

    A decoder's tokens are among them if they are `free`, i.e. the user did not give them.
    """
    plans: dict[str, Plan] = {}
    if "pixel_values" in names:
        plans["pixel_values"] = _image(getattr(config, "vision_config", config))
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    decodes = is_encoder_decoder and "decoder_input_ids" in free
    if "input_ids" in names:
        encoder = config.get_text_config(decoder=False)
        plans["input_ids"] = _ids(encoder, "key" if decodes else "query")
    if decodes:
        decoder = config.get_text_config(decoder=True)
        plans["decoder_input_ids"] = _ids(decoder, "query")
    return plans


def _ids(config: Any, length: Axis) -> Plan:
    """Return the plan of tokens, `batch query` or `batch key`, without special ones: a model may mask padding."""
    special: list[int] = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(token, int) and token >= 0:
                special.append(token)
    below = getattr(config, "vocab_size", None) or 2
    return Plan("ids", ("batch", length), "int64", below=below, avoid=tuple(special))


def _image(config: Any) -> Plan:
    """Return the plan of an image, `batch channels height width`."""
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    channels = _first_int(vars(config), *CHANNELS) or 3
    return Plan("image", ("batch", channels, *_height_and_width(size)))


# -- arguments that cannot be guessed ----------------------------------------------------------------------------------


def _is_container(annotation: Any) -> bool:
    """Return whether an annotation is a container of several tensors."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind is Parameter.empty:
        return False
    if issubclass(kind, (str, Tensor)):
        return False
    return is_dataclass(kind) or is_typeddict(kind) or issubclass(kind, (Mapping, Sequence))


def _container_message(forward: Forward, name: str) -> str:
    """Return the message for an argument that is a container of unknown tensors."""
    return (
        f"{forward.label} takes several tensors in {name}, which cannot be guessed. Let a function return it with the "
        "module: `mha-inspect help inputs`."
    )

"""The options that commands share, each declared once: the same help, default and variable everywhere."""

# No `from __future__ import annotations` here: Typer reads these annotations at run time, and compiling forty strings
# makes usage errors noticeably slower.

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import typer

from ..errors import DeviceError, SpecError
from ..layers.catalog import LAYERS
from ..making.vocabulary import ALIASES, SET_BY_NAME, SET_OF_RUN, SWITCHES, Flags, dashed
from ..text import did_you_mean, shown

if TYPE_CHECKING:
    from ..layers.spec import AttentionSpec, InputSpec, RunSpec, Show
    from ..making.in_file import ChosenTarget
    from ..reports.common import LayerArgument

N = TypeVar("N", int, float)
EXPECTED, LAYER, INPUT, RUN, OUTPUT = "Expected behaviour", "Layer", "Input", "Run", "Output"
DTYPES = ("float32", "float64", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "meta")
_OF_TORCH = {"half": "float16", "float": "float32", "double": "float64"}
"""Torch's other names for data types."""
NUMBERS = ("ops", "stats", "values")
"""Options that add numbers to a report, beyond names, shapes and axes."""
EXPECTATIONS = ("window", "mask", "padding_side", "cache", "scale")
"""Options of the commands that judge a module by the behaviour to expect."""
OUTPUTS = ("json", "export", "quiet")
"""Options of every command: where its report goes, and how."""
SET_BY_TEXT = (*SET_BY_NAME, *SWITCHES, *SET_OF_RUN)
"""Settings of a layer without an option of their own: --set gives them."""
LARGEST_SIZE = 2**40


def _reader(kind: Callable[[str], N], rule: str, largest: float = float("inf")) -> Callable[[object], N]:
    """Return a parser of numbers. It raises `typer.BadParameter` with the rule for any other text."""

    def number(typed: object) -> N:
        try:
            read = kind(str(typed))
        except ValueError:
            raise typer.BadParameter(f"{shown(typed)} is not {rule}") from None
        if read > largest:
            raise typer.BadParameter(f"{shown(typed)} is too large: sizes go up to 2**40. Try 512.")
        return read

    return number


_WHOLE = "a whole number: write digits only, e.g. 512."
_whole_number = _reader(int, _WHOLE)
size_number = _reader(int, _WHOLE, LARGEST_SIZE)
_real_number = _reader(float, "a number: write digits, e.g. 0.1.")


def word_of(words: Sequence[str]) -> Callable[[object], str]:
    """Return a parser of these words. It raises `typer.BadParameter` with the nearest one for any other text."""

    def word(typed: object) -> str:
        if str(typed) in words:
            return str(typed)
        meant = _OF_TORCH.get(str(typed), str(typed))
        raise typer.BadParameter(f"{shown(typed)} is not one of {', '.join(words)}.{did_you_mean(meant, words)}")

    return word


def completing(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completer that offers these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def counts(name: str, typed: str, example: str = "") -> tuple[int, ...]:
    """Return the numbers of a comma list such as `1,2,4`; empty for an empty text.

    Raises `SpecError` for others, with an example of the option, by default `--name 1,2,4`.
    """
    if not typed.strip():
        return ()
    try:
        numbers = tuple(int(part) for part in typed.split(","))
    except ValueError:
        raise SpecError(
            f"{name} {shown(typed)} is not a whole number or a list of them: "
            f"write digits and commas only, e.g. {example or f'{dashed(name)} 1,2,4'}."
        ) from None
    if max(numbers) > LARGEST_SIZE:
        raise SpecError(f"{name} {shown(typed)} is too large: numbers go up to 2**40. Try 8.")
    return numbers


def option(
    panel: str, help: str, default: Any = None, flags: str = "", *, words: Sequence[str] = (), **more: Any
) -> Any:
    """Declare an option: `embed_dim: int = option(LAYER, ...)` is `--embed-dim`.

    `panel` is its group in the help; `flags` replaces the flag that follows from its name, e.g. `--train/--eval`;
    `words` lists the words that it takes (empty: any).
    """
    if words:
        of_words = {"parser": word_of(words), "metavar": "|".join(words), "autocompletion": completing(words)}
        more = {**of_words, **more}
    return typer.Option(default, *flags.split(), help=help, rich_help_panel=panel, show_envvar=False, **more)


def size(panel: str, help: str, default: int | None = None, unset: str | bool = True) -> Any:
    """Declare an option that takes a whole number. `unset` is the help's word for a missing default."""
    return option(panel, help, default, metavar="N", parser=size_number, show_default=unset)


def file(panel: str, help: str, flags: str = "", unset: str | bool = True) -> Any:
    """Declare an option that takes the name of a file."""
    return option(panel, help, None, flags, metavar="FILE", show_default=unset)


TARGET = typer.Argument(
    None,
    metavar="[TARGET]",
    help="FILE[:Name], module:Name, hf:TYPE or a layer. Importing it runs its code. hf:DIRECTORY is a folder "
    "of a model. Without it, a layer is built from the options.",
    show_default=False,
    rich_help_panel="Target",
)
FAIL_IF = option(
    "Comparison",
    "Exit with code 1 on this verdict, for scripts.",
    words=("differs", "same"),
    show_default="never",
)


class Options:
    """The values of the shared options. Their defaults repeat those of `layers.spec`, which is slower to import."""

    window: int | None = size(EXPECTED, "Sliding window of N positions. The own position is one of them.")
    mask: str | None = option(
        EXPECTED, "Argument of the padding mask, and what True means.", metavar="NAME=keep|ignore"
    )
    padding_side: str | None = option(EXPECTED, "Side of the padding.", words=("left", "right"), show_default="right")
    cache: str | None = option(
        EXPECTED, "Argument that takes the cache. The forward returns the cache second.", metavar="NAME"
    )
    scale: str | None = option(EXPECTED, "The expected scale of the scores.", words=("sqrt_head_dim", "none"))

    layer: str = option(LAYER, f"Built-in layer: {', '.join(LAYERS)}.", "torch", words=tuple(LAYERS), metavar="NAME")
    embed_dim: int = size(LAYER, "Width of the query and of the output.", 512)
    num_heads: str = option(LAYER, "Number of heads. In params a list.", "8", metavar="N")
    num_kv_heads: int | None = size(LAYER, "Number of key and value heads (grouped queries).", unset="num_heads")
    head_dim: int | None = size(LAYER, "Features of one head.", unset="embed_dim / num_heads")
    rope: bool = option(LAYER, "Rotate queries and keys by their positions.", False)
    kdim: int | None = size(LAYER, "Width of the key.", unset="embed_dim")
    vdim: int | None = size(LAYER, "Width of the value.", unset="embed_dim")
    bias: bool = option(LAYER, "Whether the projections add a bias.", True)
    add_bias_kv: bool = option(LAYER, "Append one learned key and value.", False)
    add_zero_attn: bool = option(LAYER, "Append one key and value of zeros.", False)
    dropout: float = option(
        LAYER, "Dropout probability of the weights, with --train.", 0.0, parser=_real_number, metavar="P"
    )
    batch_first: bool = option(
        LAYER, "Inputs are batch seq embed, or seq batch embed.", True, "--batch-first/--seq-first"
    )
    train: bool = option(LAYER, "Training or inference mode.", False, "--train/--eval")
    settings: list[str] | None = option(
        LAYER,
        "An argument of TARGET or of the layer. Repeatable, e.g. --set bias=false.",
        flags="--set",
        metavar="NAME=VALUE",
    )

    batch: int = size(INPUT, "Number of sequences.", 1, unset="1; check and diff take 2")
    seq_len: int = size(INPUT, "Length of the query.", 12)
    key_len: int | None = size(INPUT, "Length of key and value, for cross-attention.", unset="seq_len")
    unbatched: bool = option(INPUT, "Inputs without a batch dimension.", False)
    causal: bool = option(INPUT, "No query attends to a later position.", False)
    padding: str = option(INPUT, "The last N keys are padding; a comma list has one per batch item.", "", metavar="N")
    attn_mask: Path | None = file(
        INPUT, "A .pt or .safetensors file with a boolean (True: masked out) or additive mask, 2-D or per head."
    )
    input: Path | None = file(
        INPUT,
        "A .pt or .safetensors file with the query, or with tensors named like the arguments.",
        unset="random numbers from --seed",
    )
    input_shape: list[str] | None = option(
        INPUT,
        "Shape of an argument, as x=2x10x512:float32. Repeatable.",
        metavar="NAME=SHAPE",
    )
    dtype: str = option(INPUT, "Data type of parameters and inputs.", "float32", words=DTYPES)
    seed: int = option(INPUT, "Seed of parameters and inputs.", 0, parser=_whole_number, metavar="N")

    device: str = option(
        RUN,
        "cpu, cuda, cuda:N, mps, or meta for shapes alone.",
        "cpu",
        metavar="NAME",
        autocompletion=completing(DEVICES),
    )
    grad: bool = option(RUN, "Whether gradients are recorded.", False)
    need_weights: bool = option(RUN, "Whether the layer returns its attention weights.", True)
    average_weights: bool = option(RUN, "Whether returned weights are averaged over heads.", True)

    ops: bool = option(
        OUTPUT, "List every operation that PyTorch dispatched, and what each stage takes.", False, "--cost --ops"
    )
    stats: bool = option(OUTPUT, "Add mean, std, min, max, and counts of NaN and inf.", False)
    values: bool = option(OUTPUT, "Print the tensors.", False)
    json: bool = option(OUTPUT, "Print JSON.", False)
    export: Path | None = file(
        OUTPUT,
        "Also write a .txt, .json or .html file. A .png takes the pictures of trace and compare-heads.",
        "-o --export",
    )
    quiet: bool = option(OUTPUT, "Print only errors on stderr.", False, "-q --quiet")

    def __init__(self, **values: Any) -> None:
        for name in Options.__annotations__:
            setattr(self, name, getattr(Options, name).default)
        self.__dict__.update(values)
        self.given = frozenset[str]()
        """Options that the user set, on the command line or by a variable."""
        self.typed = frozenset[str]()
        """Options that the user set on the command line."""
        self.chosen: dict[str, ChosenTarget] = {}
        """The targets that were chosen in files that were named alone, by file."""

    @property
    def ending(self) -> str:
        """The suffix of --export's file, e.g. `.html`; empty without --export."""
        return "" if self.export is None else self.export.suffix.lower()

    @classmethod
    def parsed(cls, context: typer.Context, values: dict[str, Any]) -> "Options":
        """Return the parsed options with their sources. Raises `SpecError` if two contradict each other."""
        if context.args:
            raise SpecError(_no_use_for(context))
        options = cls(**values)
        given: set[str] = set()
        typed: set[str] = set()
        for name in values:
            source = context.get_parameter_source(name)
            if source is None or source.name.startswith("DEFAULT"):
                continue
            given.add(name)
            if source.name == "COMMANDLINE":
                typed.add(name)
        options.given, options.typed = frozenset(given), frozenset(typed)
        return options

    def take_layer(self, name: str) -> None:
        """Take the layer that was named as the target. Raises `SpecError` if --layer names another one."""
        if "layer" in self.typed and self.layer != name:
            raise SpecError(f"{name} and --layer {self.layer} are two layers. Drop one.")
        self.layer = name
        self.given, self.typed = self.given | {"layer"}, self.typed | {"layer"}

    def take_settings(self, command: str) -> None:
        """Take the arguments of a layer from --set. Raises `SpecError` for other names, and for --input-shape."""
        if self.input_shape:
            raise SpecError(
                f"--input-shape {shown(self.input_shape[0])} needs a TARGET, but {command} was given none. Name one, "
                f"e.g. mha-inspect {command} path/to/file.py:Name."
            )
        for name, text in self.settings_by_name().items():
            name = name.replace("-", "_")
            if name in SHARED_NAMES:
                raise SpecError(f"--set {shown(name)}={shown(text)} has an option of its own: {dashed(name)}.")
            if name not in SET_BY_TEXT:
                raise SpecError(
                    f"--set {shown(name)} is not an argument of a layer: `mha-inspect layers {self.layer}` lists them. "
                    f"For a module of your own, name a TARGET.{did_you_mean(name, SET_BY_TEXT)}"
                )
            self.set(name, text)

    def take_settings_of_run(self) -> None:
        """Take from --set how a target is run; the other settings are arguments of its constructor or its forward."""
        for name, text in self.settings_by_name().items():
            if name in SET_OF_RUN:
                self.set(name, text)
                self.typed |= {name}
        self.settings = [text for text in self.settings or () if text.partition("=")[0].strip() not in SET_OF_RUN]

    def settings_by_name(self) -> dict[str, str]:
        """Return the values of --set by name, as text."""
        from ..making.settings import parse_settings

        return parse_settings(self.settings or [])

    def set(self, name: str, text: str, flag: str = "--set") -> None:
        """Set an option by the text of a setting. Raises `SpecError` if it is not one of its values."""
        try:
            setattr(self, name, read_setting(name, text))
        except typer.BadParameter as error:
            raise SpecError(f"{flag} {name}={shown(text)} is invalid: {error.message}") from None

    def with_settings(self, settings: Mapping[str, str], flag: str) -> "Options":
        """Return these options with others in their place, by name, as if they were typed. `flag` gave them."""
        changed = copy(self)
        for name, text in settings.items():
            changed.set(name, text, flag)
            changed.given |= {name}
            changed.typed |= {name}
        return changed

    def with_heads(self, count: int) -> "Options":
        """Return these options with one head count, set as if by a variable: a target may ignore it."""
        changed = copy(self)
        changed.num_heads = str(count)
        changed.given, changed.typed = self.given | {"num_heads"}, self.typed - {"num_heads"}
        return changed

    def head_counts(self) -> tuple[int, ...]:
        """Return the numbers of --num-heads, each once. Raises `SpecError` if empty or not whole numbers."""
        typed = counts("num_heads", self.num_heads)
        if not typed:
            raise SpecError("num_heads is empty: give the number of attention heads, e.g. --num-heads 8.")
        return tuple(dict.fromkeys(typed))

    def single_head_count(self, command: str) -> int:
        """Return the number of --num-heads. Raises `SpecError` for a list, with the commands that take one."""
        first, *more = self.head_counts()
        if more:
            raise SpecError(
                f"num_heads {self.num_heads} is a list, but {command} takes one number, e.g. --num-heads {first}. "
                f"To compare several: `mha-inspect params --num-heads {self.num_heads}` or `mha-inspect "
                f"compare-heads --heads {self.num_heads}`."
            )
        return first

    def attention_spec(self, num_heads: int) -> "AttentionSpec":
        """Return the spec of the layer, with this head count. Raises `SpecError` if its sizes contradict each other."""
        from ..layers.spec import AttentionSpec

        self.require_seed()
        settings = self._of(AttentionSpec) | {"num_heads": num_heads, "training": self.train}
        return LAYERS[self.layer].spec(**settings)

    def input_spec(self) -> "InputSpec":
        """Return the spec of the inputs. Raises `SpecError` if their sizes contradict each other."""
        from ..layers.spec import InputSpec

        return InputSpec(**self._of(InputSpec) | {"padding": counts("padding", self.padding)})

    def run_spec(self) -> "RunSpec":
        """Return how the layer is run."""
        from ..layers.spec import RunSpec

        return RunSpec(**self._of(RunSpec))

    def show(self) -> "Show":
        """Return the numbers to report beyond shapes and axes."""
        from ..layers.spec import Show

        for_a_machine = self.json or self.ending == ".json"
        return Show(**self._of(Show), full_values=self.values and for_a_machine)

    def flags(self) -> Flags:
        """Return the flags for the constructor of a target, with their sources. Raises as `single_head_count`."""
        values = {name: getattr(self, name) for name in ALIASES if name != "num_heads"}
        values["num_heads"] = self.single_head_count("a target")
        return Flags(values, self.given, self.typed)

    def _of(self, spec: type) -> dict[str, Any]:
        """Return the values of options that have the name of a spec's field."""
        names = [field.name for field in fields(spec) if hasattr(self, field.name)]
        return {name: getattr(self, name) for name in names}

    def require_seed(self) -> None:
        """Raise `SpecError` for a seed that is out of range."""
        if not 0 <= self.seed < 2**64:
            raise SpecError(f"seed {self.seed} is out of range: it must be 0 to 2**64 - 1. Try --seed 0.")

    def require_file_options(self, text: str, *used: str) -> None:
        """Raise `SpecError` if an option was typed that does not apply to a file of tensors."""
        for name in sorted(self.typed - {*used, *OUTPUTS}):
            flag = {"settings": "set", "batch_first": "seq_first"}.get(name, name)
            raise SpecError(f"{shown(text)} is a file of tensors: {dashed(flag)} does not apply to it. Drop it.")


SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=hint)
    for name, hint in Options.__annotations__.items()
    if name not in SET_BY_TEXT
]
"""The shared options as parameters of a function."""
SHARED_NAMES = frozenset(option.name for option in SHARED) - {*EXPECTATIONS}


def read_setting(name: str, text: str) -> Any:
    """Return a text as the value of the option of this name. Raises as its parser."""
    from ..making.settings import WORDS

    hint, declared = Options.__annotations__[name], getattr(Options, name)
    if text.lower() == "none" and (type(None) in get_args(hint) or name == "padding"):
        return declared.default
    if hint is bool:
        switched = {**WORDS, "1": True, "0": False}.get(text.casefold())
        if not isinstance(switched, bool):
            raise typer.BadParameter(f"{name} must be true or false.")
        return switched
    if name in ("num_heads", "padding") and len(text) < 100:
        counts(name, text)
    parser = declared.parser or (Path if Path in get_args(hint) else str)
    return parser(text)


def arguments_of(takes: Collection[str]) -> tuple["LayerArgument", ...]:
    """Return the arguments that --set gives a layer that takes these optional ones, for `mha-inspect layers NAME`."""
    every_layer = {"bias", "grad"}
    if "need_weights" in takes:
        every_layer.add("average_weights")
    return tuple(_argument(name) for name in SET_BY_TEXT if name in takes or name in every_layer)


def _argument(name: str) -> "LayerArgument":
    from ..reports.common import LayerArgument

    hint, declared = Options.__annotations__[name], getattr(Options, name)
    kind = "true or false" if hint is bool else "number" if hint is float else "whole number"
    default = declared.show_default if isinstance(declared.show_default, str) else str(declared.default).lower()
    return LayerArgument(name, kind, default, declared.help)


def require_numbers(device: str, use: str, way_out: str = "") -> None:
    """Raise `DeviceError` on meta, which has no numbers; `use` is a verb, e.g. `draw`."""
    if device == "meta":
        raise DeviceError(f"device meta has shapes and no numbers to {use}. Try --device cpu.{way_out}")


def require_ranks(ranks: int | None, **others: bool) -> None:
    """Raise `SpecError` if --ranks is below 2, or is used with one of these options that was given."""
    for name in (name for name, is_given in others.items() if is_given and ranks is not None):
        raise SpecError(f"--ranks and {dashed(name)} cannot be combined. Drop one.")
    if ranks is not None and ranks < 2:
        raise SpecError(f"ranks {ranks} is too small: it must be 2 or more. Try --ranks 2.")


def is_target(text: str) -> bool:
    """Return whether a text has the form of a target rather than a layer's name."""
    return ":" in text or text.endswith(".py")


def how_to_give_sizes(command: str) -> str:
    """Return how to give a command sizes, and a list of head counts if it takes one."""
    lists = {"params": "--num-heads", "compare-heads": "--heads"}
    commas = f", and a list with commas, e.g. {lists[command]} 1,2,4" if command in lists else ""
    return f"Give sizes as options, e.g. mha-inspect {command} --embed-dim 512{commas}"


def _no_use_for(context: typer.Context) -> str:
    """Return the message for words that a command does not take."""
    command, extra = str(context.info_name), shown(" ".join(context.args))
    file = str(context.params.get("target") or "")
    if is_target(file) and ":" not in file and extra.isidentifier():
        way_out = f" as a second word. Write {shown(file)}:{extra}"
    elif is_target(extra):
        way_out = " as another target. To compare two: mha-inspect diff LEFT RIGHT"
    elif command == "layers":
        way_out = f". For its options: {context.command_path} --help"
    else:
        way_out = f". {how_to_give_sizes(command)}."
    return f"{command} does not take {extra}{way_out}"

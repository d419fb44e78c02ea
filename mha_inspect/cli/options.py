"""The options that commands share, each declared once: the same words, defaults and variables everywhere."""

# No `from __future__ import annotations` here: Typer reads these annotations at run time, and to compile forty strings
# takes a noticeable part of a usage error.

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer._click.globals import get_current_context

from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS
from ..text import did_you_mean, shown
from . import screen
from .completion import names_in_file
from .help import GroupedCommand, examples

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "package.module:Name, path/to/file.py:Name, hf:TYPE or hf:DIRECTORY"
LAYER, INPUT, RUN, OUTPUT = "Layer", "Input", "Run", "Output"
DTYPES = ("float32", "float64", "bfloat16", "float16")
DEVICES = ("cpu", "cuda", "mps", "meta")
FORMATS = ("table", "plain", "json")
COLORS = ("auto", "always", "never")
NUMBERS = ("ops", "stats", "values", "precision", "edge_items")
"""What a report may hold beyond names, shapes and axes: for the commands that show stages or parameters."""
OUTPUTS = ("format", "json", "export", "color", "quiet")
"""Where a report goes, and how: for every command."""
VARIABLES = (
    "Every option has a default, and also reads a variable of its name, MHA_INSPECT_<NAME>: "
    "--embed-dim reads MHA_INSPECT_EMBED_DIM, and --seq-first is MHA_INSPECT_BATCH_FIRST=false."
)
LARGEST_SIZE = 2**40
"""Far above any tensor that fits anywhere, and small enough to reckon with in no time."""


def whole_number(typed: object) -> int:
    """Return a whole number.

    Raises `typer.BadParameter` otherwise.
    """
    try:
        return int(str(typed))
    except ValueError:
        raise typer.BadParameter(f"{shown(typed)} is not a whole number: write digits only, as in 512.") from None


def size_number(typed: object) -> int:
    """Return a whole number that can be the size of something.

    Raises `typer.BadParameter` otherwise.
    """
    number = whole_number(typed)
    if number > LARGEST_SIZE:
        raise typer.BadParameter(f"{shown(typed)} is more than a size can be: sizes go up to 2**40. Try 512.")
    return number


def real_number(typed: object) -> float:
    """Return a number.

    Raises `typer.BadParameter` otherwise.
    """
    try:
        return float(str(typed))
    except ValueError:
        raise typer.BadParameter(f"{shown(typed)} is not a number: write it as in 0.1.") from None


def one_of(known: Sequence[str]) -> Callable[[object], str]:
    """Return a parser that takes one of these words and no other.

    The parser raises `typer.BadParameter` with the nearest word.
    """

    def word(typed: object) -> str:
        if str(typed) in known:
            return str(typed)
        raise typer.BadParameter(f"{shown(typed)} is not known: {', '.join(known)}.{did_you_mean(str(typed), known)}")

    return word


def completing(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a completer that offers these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return complete


def counts(name: str, typed: str) -> tuple[int, ...]:
    """Return the numbers of a comma list, `1,2,4`; none of an empty text.

    Raises `SpecError` that speaks of `name` when a part of it is not a whole number.
    """
    if not typed.strip():
        return ()
    try:
        numbers = tuple(int(part) for part in typed.split(","))
        if max(numbers) <= LARGEST_SIZE:
            return numbers
        raise SpecError(f"{name} {shown(typed)} is more than a size can be: sizes go up to 2**40. Try 8.")
    except ValueError:
        raise SpecError(
            f"{name} {shown(typed)} is not a whole number or a list of them: "
            f"write digits and commas only, as in --{name.replace('_', '-')} 1,2,4."
        ) from None


def option(flags: str, panel: str, help: str, *, known: Sequence[str] = (), **settings: Any) -> Any:
    """Return an option with its variable: `--embed-dim`, or `-e --embed-dim`, also reads `MHA_INSPECT_EMBED_DIM`.

    `envvar` may name another variable.
    """
    names = flags.split()
    name = names[-1].split("/")[0].lstrip("-")
    settings = {"envvar": f"MHA_INSPECT_{name.replace('-', '_').upper()}"} | settings
    if known:
        settings = {"parser": one_of(known), "metavar": "|".join(known)} | settings
        settings["autocompletion"] = completing(known)
    return typer.Option(
        *names,
        help=help,
        rich_help_panel=panel,
        # The rule stands once at the top of the page; at each of forty options it would drown the page.
        show_envvar=False,
        **settings,
    )


def size(flag: str, panel: str, help: str, **settings: Any) -> Any:
    """Return an option that takes a whole number."""
    return option(flag, panel, help, metavar="N", **{"parser": size_number, **settings})


def _paint(asked: Literal["auto", "always", "never"]) -> str:
    screen.asked_color = asked
    return asked


TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]",
        help=f"A module of your own: {FORMS}. Importing it runs its code. "
        "Without one, a layer is built from the options.",
        show_default=False,
        rich_help_panel="Target",
        autocompletion=names_in_file,
    ),
]
FailIf = Annotated[
    str | None,
    option(
        "--fail-if",
        "Comparison",
        "Exit with code 1 when this is the verdict, for scripts.",
        known=("differs", "same"),
        show_default="never",
    ),
]


class Options:
    """What the shared options were set to.

    Not a dataclass, and the defaults are written out although `layers.spec` has them: to make one of forty fields
    and to import the specs takes longer than to answer a usage error. A test holds the two to the same defaults.
    """

    layer: Annotated[
        str,
        option(
            "--layer", LAYER, f"How attention is written: {', '.join(LAYERS)}.", known=tuple(LAYERS), metavar="NAME"
        ),
    ] = "torch"
    embed_dim: Annotated[int, size("--embed-dim", LAYER, "Width of the query and of the output.")] = 512
    num_heads: Annotated[
        str,
        option("--num-heads", LAYER, "Attention heads: a list in params, the baseline in compare-heads.", metavar="N"),
    ] = "8"
    num_kv_heads: Annotated[
        int | None,
        size("--num-kv-heads", LAYER, "Key and value heads, when heads share them.", show_default="num_heads"),
    ] = None
    head_dim: Annotated[
        int | None, size("--head-dim", LAYER, "Features of one head.", show_default="embed_dim / num_heads")
    ] = None
    rope: Annotated[bool, option("--rope", LAYER, "Rotate queries and keys by their positions.")] = False
    kdim: Annotated[int | None, size("--kdim", LAYER, "Width of the key.", show_default="embed_dim")] = None
    vdim: Annotated[int | None, size("--vdim", LAYER, "Width of the value.", show_default="embed_dim")] = None
    bias: Annotated[bool, option("--bias/--no-bias", LAYER, "Whether the projections add a bias.")] = True
    add_bias_kv: Annotated[bool, option("--add-bias-kv", LAYER, "Append one learned key and value.")] = False
    add_zero_attn: Annotated[bool, option("--add-zero-attn", LAYER, "Append one key and value of zeros.")] = False
    dropout: Annotated[
        float,
        option("--dropout", LAYER, "How likely a weight is dropped, with --train.", parser=real_number, metavar="P"),
    ] = 0.0
    batch_first: Annotated[
        bool, option("--batch-first/--seq-first", LAYER, "Inputs are batch seq embed, or seq batch embed.")
    ] = True
    train: Annotated[bool, option("--train/--eval", LAYER, "Training mode, or inference.")] = False
    settings: Annotated[
        list[str] | None,
        option("--set", LAYER, "An argument of TARGET, as in --set depth=2; again for another.", metavar="NAME=VALUE"),
    ] = None

    batch: Annotated[int, size("--batch", INPUT, "Number of sequences.")] = 1
    seq_len: Annotated[int, size("--seq-len", INPUT, "Length of the query.")] = 12
    key_len: Annotated[
        int | None,
        size("--key-len", INPUT, "Length of key and value: another makes it cross-attention.", show_default="seq_len"),
    ] = None
    unbatched: Annotated[bool, option("--unbatched", INPUT, "Inputs without a batch dimension.")] = False
    causal: Annotated[bool, option("--causal", INPUT, "A query sees keys up to its own position only.")] = False
    padding: Annotated[
        str,
        option("--padding", INPUT, "The last N keys are padding; a comma list has a number a row.", metavar="N"),
    ] = ""
    attn_mask: Annotated[
        Path | None,
        option(
            "--attn-mask",
            INPUT,
            "A .pt or .npy file with a boolean (True: not allowed) or additive mask, 2-D or per head.",
            metavar="FILE",
        ),
    ] = None
    input: Annotated[
        Path | None,
        option(
            "--input",
            INPUT,
            "A .pt, .npy or .safetensors file with the query, or tensors by the names of the arguments.",
            metavar="FILE",
            show_default="random numbers from --seed",
        ),
    ] = None
    input_shape: Annotated[
        list[str] | None,
        option(
            "--input-shape",
            INPUT,
            "Shape of one argument of TARGET's forward, as in x=2x10x512:float32; again for another.",
            metavar="NAME=SHAPE",
        ),
    ] = None
    dtype: Annotated[str, option("--dtype", INPUT, "Data type of parameters and inputs.", known=DTYPES)] = "float32"
    seed: Annotated[int, size("--seed", INPUT, "Seed of parameters and inputs.", parser=whole_number)] = 0

    device: Annotated[
        str,
        option("--device", RUN, "Where it runs.", metavar="cpu|cuda[:N]|mps|meta", autocompletion=completing(DEVICES)),
    ] = "cpu"
    grad: Annotated[bool, option("--grad/--no-grad", RUN, "Whether gradients are recorded.")] = False
    need_weights: Annotated[
        bool, option("--need-weights/--no-need-weights", RUN, "Whether the layer is asked for its attention weights.")
    ] = True
    average_weights: Annotated[
        bool,
        option(
            "--average-weights/--per-head-weights", RUN, "The weights it returns: one for all heads, or one a head."
        ),
    ] = True

    ops: Annotated[bool, option("--ops", OUTPUT, "List every operation that PyTorch dispatched.")] = False
    stats: Annotated[bool, option("--stats", OUTPUT, "Add mean, std, min, max, and counts of NaN and inf.")] = False
    values: Annotated[bool, option("--values", OUTPUT, "Print the tensors.")] = False
    precision: Annotated[int, size("--precision", OUTPUT, "Digits after the point, with --values.")] = 4
    edge_items: Annotated[int, size("--edge-items", OUTPUT, "Elements at each edge, with --values.")] = 3
    format: Annotated[
        Literal["table", "plain", "json"] | None,
        option(
            "--format", OUTPUT, "How it is printed.", known=FORMATS, show_default="table on a terminal, plain in a pipe"
        ),
    ] = None
    json: Annotated[bool, option("--json", OUTPUT, "The same as --format json.")] = False
    export: Annotated[
        Path | None,
        option(
            "-o --export",
            OUTPUT,
            "Also write it to a file that ends in .txt, .json, .svg, .html, or .png for a picture.",
            metavar="FILE",
        ),
    ] = None
    color: Annotated[
        str,
        option("--color", OUTPUT, "Whether tables are in colour.", known=COLORS, is_eager=True, callback=_paint),
    ] = "auto"
    quiet: Annotated[bool, option("-q --quiet", OUTPUT, "Say nothing on stderr but what went wrong.")] = False

    def __init__(self, **values: Any) -> None:
        self.given: frozenset[str] = frozenset()
        """Those that somebody has set."""
        self.typed: frozenset[str] = frozenset()
        """Those that somebody has set on the command line, and not by a variable."""
        self.ids: Tensor | None = None
        """Ids of the tokens of a text, `batch seq`, that is the input of a target."""
        self.__dict__.update(values)

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> "Options":
        """Return the options as they were parsed, with who has set them.

        Raises `SpecError` where two of them contradict each other.
        """
        options, context = cls(**values), get_current_context()
        sources = {name: context.get_parameter_source(name) for name in context.params}
        named = {name: source.name for name, source in sources.items() if source is not None}
        options.given = frozenset(name for name, source in named.items() if source not in ("DEFAULT", "DEFAULT_MAP"))
        options.typed = frozenset(name for name in options.given if named[name] == "COMMANDLINE")
        if options.json and options.format not in (None, "json"):
            if {"json", "format"} <= options.typed:
                raise SpecError(f"--json and --format {options.format} are two formats: drop one of them.")
            options.json = "json" in options.typed
        if options.json:
            options.format = "json"
        return options

    def require_no_target_settings(self, command: str) -> None:
        """Let it pass when nothing was set that only a target has a use for.

        Raises `SpecError` otherwise.
        """
        for name, flag in (("settings", "--set"), ("input_shape", "--input-shape")):
            if getattr(self, name):
                raise SpecError(
                    f"{flag} {shown(getattr(self, name)[0])} is for a target, and {command} was given none. Name one, "
                    "as in mha-inspect trace path/to/file.py:Name."
                )

    def require_of_use_to_a_file(self, text: str, *used: str) -> None:
        """Let it pass when nothing was typed but what a file of tensors has a use for.

        Raises `SpecError` otherwise.
        """
        unused = sorted((self.typed & {*vars(Options)}) - {*used, *OUTPUTS})
        if unused:
            flag = {"settings": "set", "batch_first": "seq-first"}.get(unused[0], unused[0].replace("_", "-"))
            raise SpecError(f"{shown(text)} is a file of tensors, which --{flag} cannot change: drop it.")


def is_target(text: str) -> bool:
    """Return whether a text has the form of a target, and not that of a layer's name."""
    return ":" in text or text.endswith(".py")


@cache
def _shared() -> dict[str, inspect.Parameter]:
    return {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=annotation
        )
        for name, annotation in get_type_hints(Options, include_extras=True).items()
    }


def command(
    *lines: str, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[[Callable[..., ExitCode]], typer.Typer]:
    """Make a command of a function that takes an `Options` first: every shared option becomes a parameter of its own.

    `lines` are its examples. Its own options come first in `--help`. It shares `only` those that are named, or all
    `without` those that it has no use for: these are at their defaults.
    """

    def made(function: Callable[..., ExitCode]) -> typer.Typer:
        # Not get_type_hints: Python 3.10 puts Optional around what has None for a default, and Typer finds no option.
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        shared = {name: p for name, p in _shared().items() if (not only or name in only) and name not in without}
        parameters = {p.name: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own} | shared

        def flat(**values: Any) -> ExitCode:
            return function(Options.parsed({name: values.pop(name) for name in shared}), **values)

        paragraphs = [*inspect.cleandoc(function.__doc__ or "").split("\n\n"), *([] if only else [VARIABLES])]
        flat.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        flat.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        signature = inspect.Signature(list(parameters.values()))
        flat.__signature__ = signature  # type: ignore[attr-defined]  # what inspect, and so Typer, asks for
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(function.__name__.replace("_", "-"), cls=GroupedCommand, epilog=examples(*lines))(flat)
        return app

    return made

"""The options that commands share, each declared once: the same words, defaults and variables everywhere."""

# No `from __future__ import annotations` here: Typer reads these annotations at run time, and to compile forty strings
# takes a noticeable part of a usage error.

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer
from typer._click.globals import get_current_context
from typer.models import OptionInfo

from ..errors import DeviceError, ExitCode, SpecError
from ..layers.catalog import LAYERS
from ..render import screen
from ..text import did_you_mean, shown
from .help import GroupedCommand, examples

if TYPE_CHECKING:
    from torch import Tensor

N = TypeVar("N", int, float)
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


def _number(kind: Callable[[str], N], rule: str) -> Callable[[object], N]:
    """Return a parser of numbers, which raises `typer.BadParameter` with the rule for what is none."""

    def number(typed: object) -> N:
        try:
            return kind(str(typed))
        except ValueError:
            raise typer.BadParameter(f"{shown(typed)} is not {rule}") from None

    return number


whole_number = _number(int, "a whole number: write digits only, as in 512.")
real_number = _number(float, "a number: write it as in 0.1.")


def size_number(typed: object) -> int:
    """Return a whole number that can be the size of something. Raises `typer.BadParameter` otherwise."""
    number = whole_number(typed)
    if number > LARGEST_SIZE:
        raise typer.BadParameter(f"{shown(typed)} is more than a size can be: sizes go up to 2**40. Try 512.")
    return number


_OF_TORCH = {"half": "float16", "float": "float32", "double": "float64"}
"""Other names that torch has for a data type."""


def one_of(known: Sequence[str]) -> Callable[[object], str]:
    """Return a parser of these words, which raises `typer.BadParameter` with the nearest one for any other."""

    def word(typed: object) -> str:
        if str(typed) in known:
            return str(typed)
        meant = _OF_TORCH.get(str(typed), str(typed))
        raise typer.BadParameter(f"{shown(typed)} is not known: {', '.join(known)}.{did_you_mean(meant, known)}")

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


def option(
    panel: str, help: str, default: Any = None, flags: str = "", *, known: Sequence[str] = (), **more: Any
) -> Any:
    """Declare an option: `embed_dim: int = option(LAYER, ...)` is `--embed-dim`, and reads `MHA_INSPECT_EMBED_DIM`.

    Args:
        panel: the group under which the help has it.
        help: what it says there.
        default: what it is where nobody sets it.
        flags: its flags where they are not as its name, as `-o --export` or `--bias/--no-bias`.
        known: the words that it takes; any where it is empty.
        **more: what else Typer has for options; `envvar` may name another variable.
    """
    if known:
        more = {"parser": one_of(known), "metavar": "|".join(known), "autocompletion": completing(known)} | more
    # The rule of the variables stands once at the top of the page; at each of forty options it would drown the page.
    return typer.Option(default, *flags.split(), help=help, rich_help_panel=panel, show_envvar=False, **more)


def size(panel: str, help: str, default: int | None = None, **more: Any) -> Any:
    """Declare an option that takes a whole number."""
    return option(panel, help, default, **{"metavar": "N", "parser": size_number, **more})


def _named(name: str, declared: Any) -> Any:
    """Return what was declared with the flag of its name, and the variable of its flag, where it has no others."""
    if isinstance(declared, OptionInfo):
        declared.param_decls = declared.param_decls or (f"--{name.replace('_', '-')}",)
        if declared.envvar is None:
            flag = declared.param_decls[-1].split("/")[0].lstrip("-")
            declared.envvar = f"MHA_INSPECT_{flag.replace('-', '_').upper()}"
    return declared


def _paint(asked: Literal["auto", "always", "never"]) -> str:
    screen.asked_color = asked
    return asked


TARGET = typer.Argument(
    None,
    metavar="[TARGET]",
    help=f"A module of your own: {FORMS}. Importing it runs its code. Without one, a layer is built from the options.",
    show_default=False,
    rich_help_panel="Target",
)
FAIL_IF = option(
    "Comparison",
    "Exit with code 1 when this is the verdict, for scripts.",
    known=("differs", "same"),
    show_default="never",
)


class Options:
    """What the shared options were set to.

    Not a dataclass, and the defaults are written out although `layers.spec` has them: to make one of forty fields
    and to import the specs takes longer than to answer a usage error. A test holds the two to the same defaults.
    """

    layer: str = option(
        LAYER, f"How attention is written: {', '.join(LAYERS)}.", "torch", known=tuple(LAYERS), metavar="NAME"
    )
    embed_dim: int = size(LAYER, "Width of the query and of the output.", 512)
    num_heads: str = option(
        LAYER, "Attention heads: a list in params, the baseline in compare-heads.", "8", metavar="N"
    )
    num_kv_heads: int | None = size(LAYER, "Key and value heads, when heads share them.", show_default="num_heads")
    head_dim: int | None = size(LAYER, "Features of one head.", show_default="embed_dim / num_heads")
    rope: bool = option(LAYER, "Rotate queries and keys by their positions.", False)
    kdim: int | None = size(LAYER, "Width of the key.", show_default="embed_dim")
    vdim: int | None = size(LAYER, "Width of the value.", show_default="embed_dim")
    bias: bool = option(LAYER, "Whether the projections add a bias.", True, "--bias/--no-bias")
    add_bias_kv: bool = option(LAYER, "Append one learned key and value.", False)
    add_zero_attn: bool = option(LAYER, "Append one key and value of zeros.", False)
    dropout: float = option(
        LAYER, "How likely a weight is dropped, with --train.", 0.0, parser=real_number, metavar="P"
    )
    batch_first: bool = option(
        LAYER, "Inputs are batch seq embed, or seq batch embed.", True, "--batch-first/--seq-first"
    )
    train: bool = option(LAYER, "Training mode, or inference.", False, "--train/--eval")
    settings: list[str] | None = option(
        LAYER, "An argument of TARGET, as in --set depth=2; again for another.", None, "--set", metavar="NAME=VALUE"
    )

    batch: int = size(INPUT, "Number of sequences.", 1)
    seq_len: int = size(INPUT, "Length of the query.", 12)
    key_len: int | None = size(
        INPUT, "Length of key and value: another makes it cross-attention.", show_default="seq_len"
    )
    unbatched: bool = option(INPUT, "Inputs without a batch dimension.", False)
    causal: bool = option(INPUT, "A query sees keys up to its own position only.", False)
    padding: str = option(INPUT, "The last N keys are padding; a comma list has a number a row.", "", metavar="N")
    attn_mask: Path | None = option(
        INPUT,
        "A .pt or .npy file with a boolean (True: not allowed) or additive mask, 2-D or per head.",
        metavar="FILE",
    )
    input: Path | None = option(
        INPUT,
        "A .pt, .npy or .safetensors file with the query, or tensors by the names of the arguments.",
        metavar="FILE",
        show_default="random numbers from --seed",
    )
    input_shape: list[str] | None = option(
        INPUT,
        "Shape of one argument of TARGET's forward, as in x=2x10x512:float32; again for another.",
        metavar="NAME=SHAPE",
    )
    dtype: str = option(INPUT, "Data type of parameters and inputs.", "float32", known=DTYPES)
    seed: int = option(INPUT, "Seed of parameters and inputs.", 0, parser=whole_number, metavar="N")

    device: str = option(
        RUN, "Where it runs.", "cpu", metavar="cpu|cuda[:N]|mps|meta", autocompletion=completing(DEVICES)
    )
    grad: bool = option(RUN, "Whether gradients are recorded.", False, "--grad/--no-grad")
    need_weights: bool = option(
        RUN, "Whether the layer is asked for its attention weights.", True, "--need-weights/--no-need-weights"
    )
    average_weights: bool = option(
        RUN, "The weights it returns: one for all heads, or one a head.", True, "--average-weights/--per-head-weights"
    )

    ops: bool = option(OUTPUT, "List every operation that PyTorch dispatched.", False)
    stats: bool = option(OUTPUT, "Add mean, std, min, max, and counts of NaN and inf.", False)
    values: bool = option(OUTPUT, "Print the tensors.", False)
    precision: int = size(OUTPUT, "Digits after the point, with --values.", 4)
    edge_items: int = size(OUTPUT, "Elements at each edge, with --values.", 3)
    format: Literal["table", "plain", "json"] | None = option(
        OUTPUT, "How it is printed.", known=FORMATS, show_default="table on a terminal, plain in a pipe"
    )
    json: bool = option(OUTPUT, "The same as --format json.", False)
    export: Path | None = option(
        OUTPUT,
        "Also write it to a file that ends in .txt, .json, .html, or .png and .svg for a picture.",
        None,
        "-o --export",
        metavar="FILE",
    )
    color: str = option(OUTPUT, "Whether tables are in colour.", "auto", known=COLORS, is_eager=True, callback=_paint)
    quiet: bool = option(OUTPUT, "Say nothing on stderr but what went wrong.", False, "-q --quiet")

    def __init__(self, **values: Any) -> None:
        self.given: frozenset[str] = frozenset()
        """Those that somebody has set."""
        self.typed: frozenset[str] = frozenset()
        """Those that somebody has set on the command line, and not by a variable."""
        self.ids: Tensor | None = None
        """Ids of the tokens of a text, `batch seq`, that is the input of a target."""
        self.has_picture = False
        """Whether the command has a picture to draw."""
        self.__dict__.update({name: declared.default for name, declared in _SHARED.items()} | values)

    @property
    def ending(self) -> str:
        """How the name of the file of --export ends, as `.html`; empty where there is none."""
        return "" if self.export is None else self.export.suffix.lower()

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> "Options":
        """Return the options as parsed, with who has set them. Raises `SpecError` where two contradict each other."""
        options, context = cls(**values), get_current_context()
        require_no_more(context)
        sources = {name: context.get_parameter_source(name) for name in values}
        named = {name: source.name for name, source in sources.items() if source is not None}
        options.given = frozenset(name for name, source in named.items() if source not in ("DEFAULT", "DEFAULT_MAP"))
        options.typed = frozenset(name for name in options.given if named[name] == "COMMANDLINE")
        options.has_picture = any(own.name == "picture" for own in context.command.params)
        if options.json and options.format not in (None, "json"):
            if {"json", "format"} <= options.typed:
                raise SpecError(f"--json and --format {options.format} are two formats: drop one of them.")
            options.json = "json" in options.typed
        if options.json:
            options.format = "json"
        return options

    def require_no_target_settings(self, command: str) -> None:
        """Let it pass when nothing was set that only a target has a use for. Raises `SpecError` otherwise."""
        for name, flag in (("settings", "--set"), ("input_shape", "--input-shape")):
            if getattr(self, name):
                raise SpecError(
                    f"{flag} {shown(getattr(self, name)[0])} is for a target, and {command} was given none. Name one, "
                    "as in mha-inspect trace path/to/file.py:Name."
                )

    def require_of_use_to_a_file(self, text: str, *used: str) -> None:
        """Let it pass when nothing was typed but what a file of tensors has a use for. Raises `SpecError` otherwise."""
        unused = sorted(self.typed - {*used, *OUTPUTS})
        if unused:
            flag = {"settings": "set", "batch_first": "seq-first"}.get(unused[0], unused[0].replace("_", "-"))
            raise SpecError(f"{shown(text)} is a file of tensors, which --{flag} cannot change: drop it.")


def numbers_go_by_name(command: str) -> str:
    """Return how a command takes sizes, and how a list of head counts where it takes one."""
    lists = {"params": "--num-heads", "compare-heads": "--heads"}
    commas = f", and a list has commas, as in {lists[command]} 1,2,4" if command in lists else ""
    return f"sizes go by name, as in mha-inspect {command} --embed-dim 512{commas}"


def require_numbers(device: str, use: str, way_out: str = "") -> None:
    """Let it pass where there are numbers for a use, as `draw`. Raises `DeviceError` where there are shapes alone."""
    if device == "meta":
        raise DeviceError(f"device meta has shapes and no numbers to {use}. Try --device cpu.{way_out}")


def is_target(text: str) -> bool:
    """Return whether a text has the form of a target, and not that of a layer's name."""
    return ":" in text or text.endswith(".py")


def require_no_more(ctx: Any) -> None:
    """Let it pass where the command line has no word that the command has no use for. Raises `SpecError` otherwise."""
    if not ctx.args:
        return
    command, extra = ctx.info_name, shown(" ".join(ctx.args))
    if is_target(extra):
        way_out = " beside another target. Two: mha-inspect diff LEFT RIGHT"
    elif any(option.name == "embed_dim" for option in ctx.command.params):
        way_out = f": {numbers_go_by_name(command)}."
    else:
        way_out = f". What it takes: {ctx.command_path} --help"
    raise SpecError(f"{command} has no use for {extra}{way_out}")


_EXPORT_OF_NO_PICTURE = option(
    OUTPUT, "Also write it to a file that ends in .txt, .json or .html.", None, "-o --export", metavar="FILE"
)
_SHARED = {name: _named(name, getattr(Options, name)) for name in Options.__annotations__}
"""The shared options as they are declared."""


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
        alone = inspect.Parameter.KEYWORD_ONLY
        shared = {
            name: inspect.Parameter(name, alone, default=declared, annotation=hint)
            for (name, declared), hint in zip(_SHARED.items(), Options.__annotations__.values(), strict=True)
            if (not only or name in only) and name not in without
        }
        if all(parameter.name != "picture" for parameter in own):
            shared["export"] = shared["export"].replace(default=_named("export", _EXPORT_OF_NO_PICTURE))
        parameters = {p.name: p.replace(kind=alone, default=_named(p.name, p.default)) for p in own} | shared

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

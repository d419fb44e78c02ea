"""The short page of each command's --help, and the manual of `mha-inspect help`.

A short page has at most twelve options and three examples, and fits on a terminal of 80 columns and 24 lines.
`--help-all` lists every option in groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PROGRAM = "mha-inspect"
TOPICS = {
    "masks": "causal, padding and other masks, and how check tests them",
    "inputs": "sizes, shapes, files, and arguments that cannot be guessed",
    "caches": "decoding with a cache: --decode, and check --cache",
    "checkpoints": "files of weights: params FILE, --like, diff of two files",
    "fixes": "fix: a patch of your file that was run, and --write",
    "ranks": "attention sharded over devices: --ranks, and torchrun",
    "pictures": "what each head attends to: --picture, html and png",
    "library": "the same in Python, in notebooks and in pytest",
    "json": "output for programs",
    "exit-codes": "the meaning of each exit code",
    "compared": "what other tools for the same questions answer, and what they cost",
    "internals": "how it works, and how to work on it",
}
"""Pages of the manual, each a file `manual/NAME.md`, and what they are about."""


@dataclass(frozen=True)
class ShortHelp:
    """The short page of one command."""

    usage: str
    summary: str
    rows: tuple[tuple[str, str], ...]
    """An argument or an option, with its value, and what it is: `("--seq-len N", "tokens of the query [12]")`."""
    examples: tuple[str, ...]
    """Command lines, without the name of the program."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The options among the rows, without their values."""
        return tuple(name.split()[0].rstrip(",") for name, _ in self.rows if name.startswith("-"))

    def text(self, bold: Callable[[str], str] = str) -> str:
        """Return the page, with its headings and names through `bold`."""
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{bold('Usage:')} {PROGRAM} {self.usage}", self.summary, ""]
        lines += [f"  {bold(name)}{' ' * (width - len(name))}  {said}" for name, said in self.rows]
        lines += ["", bold("Examples:"), *(f"  {PROGRAM} {line}" for line in self.examples)]
        return "\n".join(lines) + "\n"


_TARGET = ("TARGET", "FILE[:Name], package.module:Name, hf:TYPE or a layer")
_SIZES = (
    ("--embed-dim N", "width of the input [512]"),
    ("--num-heads N", "number of heads [8]"),
    ("--batch N", "number of sequences [1]"),
    ("--seq-len N", "number of tokens [12]"),
)
_SET = ("--set NAME=VALUE", "another argument of the layer or of TARGET")
_SHAPE = ("--input-shape NAME=SHAPE", "shape of an argument of forward, e.g. x=2x5x64")
_CAUSAL = ("--causal", "each query sees only its past")
_DEVICE = ("--device NAME", "cpu, cuda, mps, or meta for shapes alone [cpu]")
_EXPORT = ("-o, --export FILE", "also write a .txt, .json or .html file")
_ALL = ("--json, --help-all", "output for programs; every option, in groups")

SHORT = {
    "trace": ShortHelp(
        "[trace] [TARGET] [OPTIONS]",
        "Show every stage of one forward pass, and what is wrong in it.",
        (
            _TARGET,
            *_SIZES,
            _SET,
            _SHAPE,
            _CAUSAL,
            ("--decode N", "the last N tokens one by one, with a cache"),
            ("--picture STAGE", "draw a stage head by head, e.g. weights"),
            _DEVICE,
            _EXPORT,
            _ALL,
        ),
        ("my_model.py", "my_model.py:Block --batch 2 --seq-len 128", "trace --embed-dim 512 --num-heads 2"),
    ),
    "params": ShortHelp(
        "params [TARGET or CHECKPOINT] [OPTIONS]",
        "Show every parameter, its purpose, and which part belongs to which head.",
        (
            ("TARGET", "a target as in trace, or a file of weights"),
            ("--embed-dim N", "width of the input [512]"),
            ("--num-heads N,N", "number of heads; a list compares them [8]"),
            ("--per-head", "rows and columns of each head"),
            ("--like TARGET", "which tensors of a checkpoint fit this module"),
            _SET,
            _DEVICE,
            _EXPORT,
            _ALL,
        ),
        ("params my_model.py --per-head", "params model.safetensors --num-heads 8", "params --num-heads 1,2,4"),
    ),
    "compare-heads": ShortHelp(
        "compare-heads [TARGET] [OPTIONS]",
        "Show what the number of heads changes, with the same weights and input.",
        (
            _TARGET,
            ("--heads N,N,N", "head counts; the first is the baseline"),
            ("--embed-dim N", "width of the input [512]"),
            ("--seq-len N", "number of tokens [12]"),
            ("--steps N", "train each on one task; 1: the first gradient"),
            ("--focus", "what each head attends to"),
            ("--picture", "draw the weights of each head count"),
            ("--time", "measure the forward"),
            _SET,
            _CAUSAL,
            _EXPORT,
            _ALL,
        ),
        ("compare-heads my_model.py --heads 1,2,4", "compare-heads --heads 1,8 --picture", "compare-heads --steps 100"),
    ),
    "diff": ShortHelp(
        "diff [LEFT] [RIGHT] [OPTIONS]",
        "Show where two layers, modules or checkpoints differ, with the same weights.",
        (
            ("LEFT, RIGHT", "as in trace, or two files of weights [torch, per-head]"),
            ("--left-set NAME=VALUE", "a setting of the left side alone; repeatable"),
            ("--right-set NAME=VALUE", "a setting of the right side alone; repeatable"),
            ("--left-module PATH", "a module of the left model"),
            ("--right-module PATH", "a module of the right model"),
            ("--fail-if WORD", "exit with 1 if same, differs or inconclusive"),
            *_SIZES[:2],
            _SET,
            _EXPORT,
            _ALL,
        ),
        ("diff torch my_model.py:Attention", "diff torch bert", "diff torch torch --right-set dtype=bfloat16"),
    ),
    "check": ShortHelp(
        "check [TARGET] [OPTIONS]",
        "Find mistakes: change one thing at a time, and see which outputs change.",
        (
            _TARGET,
            ("--causal", "no token may see a later one"),
            ("--window N", "each token sees N tokens, its own included"),
            ("--mask NAME=keep|ignore", "padding mask, and what 1 or True means"),
            ("--cache NAME", "argument that takes the cache"),
            ("--scale sqrt_head_dim", "the scores are divided by √head_dim"),
            ("--reference TARGET", "a trusted module with the same arguments"),
            ("--only NAME, --skip NAME", "checks to run or skip; --explain all lists them"),
            ("--strict", "exit with 1 also if something may be wrong"),
            _SHAPE,
            _EXPORT,
            _ALL,
        ),
        ("check my_model.py", "check my_model.py --causal --mask mask=keep", "check hf:gpt2 --cache past_key_values"),
    ),
    "fix": ShortHelp(
        "fix TARGET [OPTIONS]",
        "Print a patch of your file that was run: the problem no longer occurs.",
        (
            _TARGET,
            ("--write", "write the patch; the old file is kept as FILE.orig"),
            ("--causal", "no token may see a later one"),
            ("--window N", "each token sees N tokens, its own included"),
            ("--mask NAME=keep|ignore", "padding mask, and what 1 or True means"),
            ("--cache NAME", "argument that takes the cache"),
            ("--scale sqrt_head_dim", "the scores are divided by √head_dim"),
            _SET,
            _SHAPE,
            _EXPORT,
            _ALL,
        ),
        ("fix my_model.py", "fix my_model.py --causal", "fix my_model.py:Attention --write"),
    ),
    "layers": ShortHelp(
        "layers [NAME] [OPTIONS]",
        "List the built-in attention layers, or the arguments of one for --set.",
        (("NAME", "a layer, e.g. grouped-query"), _EXPORT, _ALL),
        ("layers", "layers grouped-query", "layers --json"),
    ),
}
"""The short page of each command."""


COMMANDS = {
    "trace": "Show every stage of one forward pass, and what is wrong in it.",
    "params": "Show every parameter, and which part belongs to which head.",
    "compare-heads": "Show what the number of heads changes.",
    "diff": "Show where two layers, modules or checkpoints differ.",
    "check": "Find mistakes: change one thing at a time, and run it again.",
    "fix": "Print a patch of your file that was run.",
    "layers": "List the built-in attention layers, or the arguments of one.",
    "help": "Show a page of the manual, or the help of a command.",
}
"""Each command with its line in the help."""


def first_page() -> str:
    """Return the page of `mha-inspect --help`."""
    commands = "\n".join(f"  {name:{15}}{said}" for name, said in COMMANDS.items())
    return f"""Usage: {PROGRAM} [COMMAND] TARGET [OPTIONS]
See inside attention: every shape, every parameter, every head, and mistakes.
TARGET is FILE, FILE:Name, package.module:Name, hf:TYPE or a layer's name.

Commands (without one, TARGET is traced):
{commands}

Options: -V, --version  -h, --help  --install-completion  --show-completion
Each option of a command is also the variable MHA_INSPECT_<NAME>.

Examples:
  {PROGRAM} my_model.py
  {PROGRAM} trace --embed-dim 512 --num-heads 2 --seq-len 12

{PROGRAM} help PAGE: {", ".join([*TOPICS][:6])},
  {", ".join([*TOPICS][6:])}
"""


def manual(topic: str) -> str:
    """Return a page of the manual, as Markdown."""
    from importlib.resources import files  # not for the pages that are data here

    return files("mha_inspect").joinpath("manual", f"{topic}.md").read_text(encoding="utf-8")

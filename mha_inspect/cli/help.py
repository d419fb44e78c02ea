"""The short page of each command's --help, and the manual of `mha-inspect help`.

A short page has at most twelve options, each with the first sentence of its help, and three examples. It fits on a
terminal of 80 columns and 24 lines.
`--help-all` lists every option in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    shown: str
    """The arguments and options on it, by their parameters; the last row of each page is added."""
    examples: tuple[str, ...]
    """Command lines, without the name of the program."""

    def text(self, described: Mapping[str, tuple[str, str]], bold: Callable[[str], str] = str) -> str:
        """Return the page, with its headings and names through `bold`.

        `described` has the name and the help of each parameter: `("--seq-len N", "Length of the query. [12]")`.
        """
        rows = [described[parameter] for parameter in self.shown.split()]
        rows.append(("--json, --help-all", "Output for programs; every option, in groups"))
        width = max(len(name) for name, _ in rows)
        lines = [f"{bold('Usage:')} {PROGRAM} {self.usage}", self.summary, ""]
        for name, said in rows:
            padding = " " * (width - len(name))
            lines.append(f"  {bold(name)}{padding}  {said}")
        lines += ["", bold("Examples:")]
        for line in self.examples:
            lines.append(f"  {PROGRAM} {line}")
        return "\n".join(lines) + "\n"


SHORT = {
    "trace": ShortHelp(
        "[trace] [TARGET] [OPTIONS]",
        "Show every stage of one forward pass, and what is wrong in it.",
        "target embed_dim num_heads batch seq_len settings input_shape causal decode picture device export",
        ("my_model.py", "my_model.py:Block --batch 2 --seq-len 128", "trace --embed-dim 512 --num-heads 2"),
    ),
    "params": ShortHelp(
        "params [TARGET or CHECKPOINT] [OPTIONS]",
        "Show every parameter, and which part belongs to which head.",
        "target embed_dim num_heads per_head like settings device export",
        ("params my_model.py --per-head", "params model.safetensors --num-heads 8", "params --num-heads 1,2,4"),
    ),
    "compare-heads": ShortHelp(
        "compare-heads [TARGET] [OPTIONS]",
        "Show what the number of heads changes.",
        "target heads embed_dim seq_len steps focus picture time settings causal export",
        ("compare-heads my_model.py --heads 1,2,4", "compare-heads --heads 1,8 --picture", "compare-heads --steps 100"),
    ),
    "diff": ShortHelp(
        "diff [LEFT] [RIGHT] [OPTIONS]",
        "Show where two layers, modules or checkpoints differ.",
        "left right left_set right_set left_module right_module fail_if embed_dim num_heads settings export",
        ("diff torch my_model.py:Attention", "diff torch bert", "diff torch torch --right-set dtype=bfloat16"),
    ),
    "check": ShortHelp(
        "check [TARGET] [OPTIONS]",
        "Find mistakes: change one thing at a time, and run it again.",
        "target causal window mask cache scale reference only explain strict input_shape export",
        ("check my_model.py", "check my_model.py --causal --mask mask=keep", "check hf:gpt2 --cache past_key_values"),
    ),
    "fix": ShortHelp(
        "fix TARGET [OPTIONS]",
        "Print a patch of your file that was run.",
        "target write causal window mask cache scale settings input_shape export",
        ("fix my_model.py", "fix my_model.py --causal", "fix my_model.py:Attention --write"),
    ),
    "layers": ShortHelp(
        "layers [NAME] [OPTIONS]",
        "List the built-in attention layers, or the arguments of one.",
        "name export",
        ("layers", "layers grouped-query", "layers --json"),
    ),
}
"""The short page of each command."""


COMMANDS = {name: page.summary for name, page in SHORT.items()}
COMMANDS["help"] = "Show a page of the manual, or the help of a command."
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

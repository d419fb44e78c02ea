"""Errors on stderr, in a line or two (what was asked, the rule, a way out), and their exit codes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from typer._click.exceptions import BadOptionUsage, BadParameter, ClickException, NoSuchOption

from ..errors import DoesNotFitError, ExitCode, InputError, MhaInspectError, is_out_of_memory
from ..making.vocabulary import dashed, flag_of
from ..text import MESSAGE, did_you_mean, listed, message_of, printable, shown
from .help import SHORT
from .output import say, stdout_failure

_ELSEWHERE = {"output": "export", "out": "export", "save": "export", "gpu": "device", "cuda": "device"}
"""Names that other programs have for an option."""
GONE = {
    "--add-bias-kv": "write --set add_bias_kv=true.",
    "--add-zero-attn": "write --set add_zero_attn=true.",
    "--bias": "write --set bias=true.",
    "--no-bias": "write --set bias=false.",
    "--dropout": "write --set dropout=0.1.",
    "--head-dim": "write --set head_dim=64.",
    "--kdim": "write --set kdim=64.",
    "--vdim": "write --set vdim=64.",
    "--rope": "write --set rope=true.",
    "--gradients": "compare-heads --steps 1 compares the first gradient.",
    "--need-weights": "write --set need_weights=true.",
    "--no-need-weights": "write --set need_weights=false.",
    "--average-weights": "write --set average_weights=true.",
    "--per-head-weights": "write --set average_weights=false.",
    "--grad": "write --set grad=true.",
    "--no-grad": "gradients are recorded with --set grad=true alone.",
    "--unbatched": "write --set unbatched=true.",
    "--color": "set the variable FORCE_COLOR=1 or NO_COLOR=1.",
    "--plain": "a pipe gets plain text, and -o FILE.txt writes it.",
    "trace --cache": "the argument of the cache is found.",
    "trace --positions": "an argument of positions is found.",
    "trace --fail-if": "mha-inspect check exits with 1 if a check fails.",
    "trace --plan": "write --ranks N:PLAN, e.g. --ranks 2:plan.json.",
    "--head": "write --picture STAGE:HEADS, e.g. --picture weights:0,3-5.",
    "check --batch-axis": "--batch-first or --seq-first says where the batch is.",
    "check --list": "write --explain all.",
    "params --picture": "trace --picture and compare-heads --picture draw attention.",
    "--batch-row": "the library draws any batch item: stage.picture(batch_row=1) of mha_inspect.recording().",
    "--format": "give --json; a terminal gets a table, a pipe plain text.",
    "check --train": "check runs in eval, and compares training itself.",
    "--evidence-only": "mha-inspect trace judges its one run.",
    "--small": "--set num_hidden_layers=2 and other sizes make a model small.",
    "check --evidence-only": "mha-inspect trace judges its one run.",
    "--edge-items": "--values --json prints every element.",
    "--precision": "--values --json prints every digit.",
    "--text": "give its token ids: torch.save({'input_ids': ids}, FILE), then --input FILE and --tokens.",
    "trace --module": "--attention takes the path of a module too.",
    "params --module": "the library lists the tensors: mha_inspect.params(FILE).parameters.",
}
"""Options that were removed, with the way that is left. A key such as `params --module` is of one command."""


def explain(error: BaseException) -> ExitCode:
    """Print an error, and return its exit code. Only a bug of mha-inspect prints a traceback."""
    if isinstance(error, typer.Exit):
        # Typer's --show-completion exits with 1 on failure; here 1 is an answer.
        return ExitCode.USAGE if error.exit_code else ExitCode.OK
    if isinstance(error, OSError):  # from stdout, where Typer prints too, or from a user's file
        if error.filename is None or Path(__file__).parents[1] in Path(os.fsdecode(error.filename)).parents:
            error = stdout_failure(error) or error
        else:
            named = printable(error.filename, 200)
            error = InputError(f"{named} cannot be used: {error.strerror}. Give another file.")
    if is_out_of_memory(error):
        error = does_not_fit(error)
    if isinstance(error, MhaInspectError):
        if error.exit_code is not ExitCode.CLOSED_PIPE:
            say(str(error))
        return error.exit_code
    if isinstance(error, ClickException):
        say(_usage(error, getattr(error, "ctx", None)))
        return ExitCode.USAGE
    if isinstance(error, KeyboardInterrupt):
        say("interrupted.")
        return ExitCode.INTERRUPTED
    traceback.print_exception(type(error), error, error.__traceback__)
    say("this is a bug in mha-inspect. Please report it with the command and the lines above.")
    return ExitCode.BUG


def does_not_fit(error: BaseException) -> DoesNotFitError:
    """Return the refusal for a failed allocation."""
    # The message begins with the line of C++ that failed.
    asked = re.search(r"(?:(?:you )?[Tt]ried to allocate|Storage size).*?(?=\. |\.?$)", message_of(error), re.MULTILINE)
    text = asked[0] if asked else message_of(error).strip().partition("\n")[0] or "an allocation failed"
    shapes = "" if text.startswith("Storage size") else ", or --device meta for shapes"
    return DoesNotFitError(f"out of memory: {text}. Try a smaller --batch or --seq-len{shapes}.")


def _usage(error: ClickException, ctx: Any) -> str:
    """Return the message for an invalid command line."""
    if isinstance(error, NoSuchOption) and ctx is not None:
        return _no_such_option(error.option_name, ctx)
    if isinstance(error, BadOptionUsage) and ctx is not None:
        name = shown(error.option_name)
        options = [option for option in ctx.command.params if name in (*option.opts, *option.secondary_opts)]
        if not options:
            return f"{name} needs a value: write {name} VALUE. For details: {ctx.command_path} --help"
        return _misused(options[0], name, ctx)
    if isinstance(error, BadParameter) and error.param is not None and ctx is not None:
        message = shown(" ".join(error.message.split()), MESSAGE)
        return f"{_source(error.param, ctx)} {message}"
    return shown(" ".join(error.format_message().split()), MESSAGE)


def _misused(option: Any, name: str, ctx: Any) -> str:
    """Return the message for an option without its value, or a switch with one."""
    if not option.is_flag:
        return f"{name} needs a value: write {name} {option.make_metavar(ctx)}. For details: {ctx.command_path} --help"
    opposite = option.opts if name in option.secondary_opts else option.secondary_opts
    if not opposite:
        return f"{name} takes no value: write {name} alone."
    return f"{name} takes no value: write {name} alone, or {opposite[0]}."


def _source(option: Any, ctx: Any) -> str:
    """Return where the value of an option comes from: `--seed`, or the variable `MHA_INSPECT_SEED`."""
    source = ctx.get_parameter_source(option.name)
    if source is not None and source.name == "ENVIRONMENT":
        return f"{ctx.auto_envvar_prefix}_{option.name}".upper()
    return str(option.opts[-1])


def _no_such_option(asked: str, ctx: Any) -> str:
    asked = _as_typed(asked)
    name = shown(asked)
    way = GONE.get(f"{ctx.info_name} {asked}", GONE.get(asked))
    if way is not None:
        return f"{ctx.info_name} has no option {name} any more: {way}"
    near = _near_option(asked, _options(ctx.command))
    group = ctx.find_root().command
    homes: list[str] = []
    for command in group.list_commands(ctx):
        if asked in _options(group.get_command(ctx, command)):
            homes.append(f"`mha-inspect {command}`")
    if ctx.parent is not None and homes:
        return f"{ctx.info_name} has no option {name}: it belongs to {listed(homes)}.{near}"
    if ctx.parent is not None:
        whole = "--help-all" if ctx.info_name in SHORT else "--help"
        return f"{ctx.info_name} has no option {name}.{near} All options: {ctx.command_path} {whole}"
    if homes:
        return f"{name} comes before the command. Put options after it, e.g. {homes[0][1:-1]} {name}."
    return f"there is no option {name} before the command.{near} All options: mha-inspect --help"


def _as_typed(asked: str) -> str:
    """Return an option as the user typed it: of `-num-heads` the parser keeps one letter."""
    if len(asked) != 2:
        return asked
    for word in sys.argv:
        if re.match(rf"-\w*{re.escape(asked[1])}", word) and word[2:]:
            return word
    return asked


def _near_option(asked: str, options: list[str]) -> str:
    """Return ` Did you mean X?` for the option of the same meaning, or else of a similar name; empty without one."""
    word = asked.strip("-").replace("-", "_")
    flag = dashed(_ELSEWHERE.get(word) or flag_of(word) or "")
    if flag in options:
        return f" Did you mean {flag}?"
    return did_you_mean(asked, options)


def _options(command: Any) -> list[str]:
    """Return every way to write an option of a command."""
    options = ["--help"]
    for option in command.params:
        options += [*option.opts, *option.secondary_opts]
    return options

"""Say what is wrong with a command line in one or two lines: what was asked, the rule, a way out."""

from __future__ import annotations

from typing import Any

from typer._click.exceptions import BadOptionUsage, BadParameter, ClickException, NoSuchOption

from ..text import MESSAGE, did_you_mean, shown

OPTIONS_OF_ONE_COMMAND = {
    "--attention": "trace",
    "--module": "trace",
    "--picture": "trace",
    "--head": "trace",
    "--batch-row": "trace",
    "--tokens": "trace",
    "--text": "trace",
    "--per-head": "params",
    "--like": "params",
    "--heads": "compare-heads",
    "--pairwise": "compare-heads",
    "--gradients": "compare-heads",
    "--steps": "compare-heads",
    "--focus": "compare-heads",
    "--time": "compare-heads",
    "--fail-if": "compare-heads",
    "--window": "check",
    "--mask": "check",
    "--padding-side": "check",
    "--cache": "check",
    "--batch-axis": "check",
    "--scale": "check",
    "--reference": "check",
    "--only": "check",
    "--skip": "check",
    "--evidence-only": "check",
    "--list": "check",
    "--left-set": "diff",
    "--right-set": "diff",
    "--left-module": "diff",
    "--right-module": "diff",
}
"""Options that one command has and the others do not."""


def usage_message(error: ClickException) -> str:
    """The message for a command line that cannot be understood."""
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "mha-inspect"
    command = path.removeprefix("mha-inspect ")
    if isinstance(error, NoSuchOption):
        return _no_such_option(error, ctx, command)
    if isinstance(error, BadOptionUsage):
        name = shown(error.option_name)
        if "does not take" in error.message:
            return f"{name} takes no value: write {name} alone, or its opposite, as in --no-bias."
        return f"{name} was given without a value: write it as {name} VALUE; `mha-inspect COMMAND --help` says which."
    if isinstance(error, BadParameter) and error.param is not None:
        message = shown(" ".join(error.message.split()), MESSAGE)
        if " is not a valid boolean" in message:  # a flag: only a variable can say anything but yes or no
            message = (
                f"{message.partition(' is not a valid boolean')[0]} is neither true nor false: write one of the two."
            )
        return f"{_asked_by(error.param, ctx)} {message}"
    if error.message.startswith("Got unexpected extra argument"):
        extra = shown(error.message.partition(" (")[2].removesuffix(")"))
        if ctx is None or any(option.name == "embed_dim" for option in ctx.command.params):
            return f"{command} has no use for {extra}: sizes go by name, as in {path} --embed-dim 512."
        return f"{command} has no use for {extra}. What it takes: {path} --help"
    return shown(" ".join(error.format_message().split()), MESSAGE)


def _no_such_option(error: NoSuchOption, ctx: Any, command: str) -> str:
    name = shown(error.option_name)
    if ctx is not None and ctx.parent is None:
        if name in ("-V", "-v", "-version"):
            return f"there is no option {name}: the version is mha-inspect --version."
        near = _mean(error, ctx)
        if near:
            return f"there is no option {name} before the command.{near} All of them: mha-inspect --help"
        return f"{name} stands before the command: options come after it, as in mha-inspect trace {name}."
    home = OPTIONS_OF_ONE_COMMAND.get(error.option_name)
    if home is not None:
        return f"{command} has no option {name}: it belongs to `mha-inspect {home}`.{_mean(error, ctx)}"
    return f"{command} has no option {name}.{_mean(error, ctx)} All of them: mha-inspect {command} --help"


def _mean(error: NoSuchOption, ctx: Any) -> str:
    options = [] if ctx is None else [o for known in ctx.command.params for o in (*known.opts, *known.secondary_opts)]
    return did_you_mean(error.option_name, options)


def _asked_by(parameter: Any, ctx: Any) -> str:
    """The flag, or the variable where the value came out of the environment."""
    source = ctx.get_parameter_source(parameter.name) if ctx is not None else None
    if source is not None and source.name == "ENVIRONMENT":
        return str(parameter.envvar)
    return str(parameter.opts[0])

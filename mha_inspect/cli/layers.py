"""`mha-inspect layers`: the ways of writing attention that can be built by name."""

from __future__ import annotations

import typer

from ..errors import ExitCode
from .help import GroupedCommand
from .options import Options, shares_options

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect layers

mha-inspect layers --format json"""


@app.command(cls=GroupedCommand, epilog=EPILOG)
@shares_options(only=("format", "export"))
def layers(options: Options) -> ExitCode:
    """List the ways to write attention: name, parameters, how the heads are split, and where the style comes from."""
    from ..layers.listing import list_layers
    from .answer import give, prepare

    give(list_layers(), options, prepare(options, computes=False))
    return ExitCode.OK

"""`mha-inspect layers`: the ways of writing attention that can be built by name."""

from __future__ import annotations

from ..errors import ExitCode
from .options import OUTPUTS, Options, command


@command("layers", "layers --format json", only=OUTPUTS)
def layers(options: Options) -> ExitCode:
    """List the ways to write attention: name, parameters, how the heads are split, and where the style comes from."""
    from ..layers.listing import list_layers
    from .output import give, prepare

    give(list_layers(), options, prepare(options, computes=False))
    return ExitCode.OK

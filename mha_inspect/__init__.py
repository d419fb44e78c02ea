"""See inside attention layers: every shape, every parameter, and what the number of heads changes.

    import mha_inspect
    print(mha_inspect.trace(my_layer, x))

Imports are lazy: `import mha_inspect` takes no time, and the first use imports torch.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
"""A copy of `typing.TYPE_CHECKING`: importing typing would take most of the startup time before Ctrl-C is handled."""

if TYPE_CHECKING:
    from typing import Any

    from . import testing
    from .api import check, compare_heads, diff, explain, params, recording, trace
    from .checks.intent import Intent
    from .layers.spec import AttentionSpec, InputSpec, RunSpec, Show

__all__ = ["check", "compare_heads", "diff", "explain", "params", "recording", "testing", "trace"]
__all__ += ["AttentionSpec", "InputSpec", "Intent", "RunSpec", "Show"]
_HOMES = {
    **dict.fromkeys(("check", "compare_heads", "diff", "explain", "params", "recording", "trace"), "api"),
    **dict.fromkeys(("AttentionSpec", "InputSpec", "RunSpec", "Show"), "layers.spec"),
    "Intent": "checks.intent",
}
"""Public name to the module that defines it."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "testing":
        return import_module(".testing", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

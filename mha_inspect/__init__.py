"""See inside attention layers: every shape, every parameter, and what the number of heads changes.

    import mha_inspect
    print(mha_inspect.trace(my_layer, x))

Nothing is imported until it is used: `import mha_inspect` costs nothing, and its first use costs `import torch`.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
"""What `typing` calls so, whose import would be most of what starting takes before an interrupt is answered."""

if TYPE_CHECKING:
    from typing import Any

    from . import testing as testing
    from .answers.check.intent import Intent as Intent
    from .api import check as check
    from .api import compare_heads as compare_heads
    from .api import diff as diff
    from .api import params as params
    from .api import recording as recording
    from .api import trace as trace
    from .layers.spec import AttentionSpec as AttentionSpec
    from .layers.spec import InputSpec as InputSpec
    from .layers.spec import RunSpec as RunSpec
    from .layers.spec import Show as Show

_HOMES = {
    "trace": "api",
    "recording": "api",
    "params": "api",
    "compare_heads": "api",
    "diff": "api",
    "check": "api",
    "Intent": "answers.check.intent",
    "AttentionSpec": "layers.spec",
    "InputSpec": "layers.spec",
    "RunSpec": "layers.spec",
    "Show": "layers.spec",
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
    return sorted([*globals(), *_HOMES, "testing"])

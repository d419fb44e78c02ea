"""See inside attention layers: every shape, every parameter, and what the number of heads changes.

    import mha_inspect
    print(mha_inspect.trace(my_layer, x))

Nothing is imported until it is used: `import mha_inspect` costs nothing, and its first use costs `import torch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import testing as testing
    from .library import compare_heads as compare_heads
    from .library import diff as diff
    from .library import load as load
    from .library import params as params
    from .library import recording as recording
    from .library import trace as trace
    from .spec import AttentionSpec as AttentionSpec
    from .spec import InputSpec as InputSpec
    from .spec import RunSpec as RunSpec
    from .spec import Show as Show

_HOMES = {
    "trace": "library",
    "recording": "library",
    "load": "library",
    "params": "library",
    "compare_heads": "library",
    "diff": "library",
    "AttentionSpec": "spec",
    "InputSpec": "spec",
    "RunSpec": "spec",
    "Show": "spec",
}
"""Public name to the module that defines it."""


def __getattr__(name: str) -> Any:
    if name == "testing":
        return import_module(".testing", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, "testing"])

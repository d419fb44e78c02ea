"""The declared intent of a module, and the names of the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ..errors import SpecError
from ..explained import explain_fields
from ..text import did_you_mean, shown

if TYPE_CHECKING:
    from torch import nn

CHECKS = (
    *(
        "inputs",
        "heads",
        "reshape",
        "softmax",
        "masking",
        "finite",
        "grouped",
        "rotary",
        "batch",
        "mixing",
        "parameters",
    ),
    *("repeat", "training", "causal", "window", "padding", "cache", "scale", "reference"),
)
"""The names of the checks, each a file in `rules`; causes come before their consequences."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "padding_true": ("keep", "ignore"),
    "padding_side": ("left", "right"),
    "batch_axis": (0, 1),
    "scale": ("sqrt_head_dim", "none"),
}

_KINDS: dict[str, type] = {"causal": bool, "window": int, "padding": str, "cache": str}
_KIND_WORDS: dict[type, str] = {bool: "True or False", int: "a whole number", str: "the name of an argument"}


def chosen_checks(only: str | Sequence[str] = (), skip: str | Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the checks to run: `only="heads"` is one name.

    Raises `SpecError` for an unknown name, or if no check is left.
    """
    only = (only,) if isinstance(only, str) else only
    skip = (skip,) if isinstance(skip, str) else skip
    for name in (*only, *skip):
        if name not in CHECKS:
            raise SpecError(f"Unknown check {shown(name)}: use {', '.join(CHECKS)}.{did_you_mean(name, CHECKS)}")
    chosen = tuple(name for name in CHECKS if (not only or name in only) and name not in skip)
    if not chosen:
        raise SpecError("only and skip exclude every check. Drop one of the two.")
    return chosen


@dataclass(frozen=True)
class Intent:
    """The declared behaviour of a module. Each given field enables a check; None skips it."""

    causal: bool | None = None
    """True: every position attends to itself and to all positions before it, and to no other."""
    window: int | None = None
    """How many positions each position attends to, including its own: 4 means itself and the 3 before it."""
    padding: str | None = None
    """Name of the forward's argument that takes the padding mask."""
    padding_true: Literal["keep", "ignore"] | None = None
    """What True, or 1, means in the padding mask; None: either is accepted."""
    padding_side: Literal["left", "right"] | None = None
    """The side that padding tokens are on; None: right."""
    cache: str | None = None
    """Name of the forward's argument that takes the cache, which the forward returns as its second value.

    If the module keeps the cache itself: the argument that takes the positions, e.g. `start_pos`.
    """
    batch_axis: Literal[0, 1] | None = None
    """The batch axis of the inputs; None: it is found from the run."""
    scale: Literal["sqrt_head_dim", "none"] | None = None
    """`sqrt_head_dim`: the scores are q·k / √head_dim; `none`: they are q·k, as in T5."""
    reference: nn.Module | None = None
    """A trusted module that takes the same arguments and must return the same output with the same weights."""

    def __post_init__(self) -> None:
        """Raise `SpecError` for an impossible intent."""
        for name, kind in _KINDS.items():
            said = getattr(self, name)
            if said is not None and type(said) is not kind:
                raise SpecError(f"{name} has to be {_KIND_WORDS[kind]}, got {shown(repr(said))}.")
        if self.reference is not None and not hasattr(self.reference, "named_parameters"):
            raise SpecError(f"reference has to be a torch.nn.Module, got {shown(repr(self.reference))}.")
        if self.window is not None and self.window < 1:
            raise SpecError(f"window {self.window} is too small: a window includes the position itself. Use 1 or more.")
        for name, choices in _CHOICES.items():
            said = getattr(self, name)
            if said is not None and said not in choices:
                raise SpecError(f"{name} {shown(said)} is unknown. Use {' or '.join(map(str, choices))}.")

    def declared(self) -> dict[str, Any]:
        """Return the declared fields by name, as plain data."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.reference is not None:
            said["reference"] = type(self.reference).__name__
        return {name: value for name, value in said.items() if value is not None}


explain_fields(globals())

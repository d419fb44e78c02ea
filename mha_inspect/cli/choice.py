"""Which of the attentions of a trace are shown in full."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import SpecError
from ..text import did_you_mean, shown

if TYPE_CHECKING:
    from ..reports.trace import Trace


_ITSELF = "The only one is in the layer itself: leave --module out."


def choose(trace: Trace, attention: int | None, module: str | None) -> Trace:
    """The trace with those marked that are to be shown in full: the one of this number, or those of this module.

    Raises `SpecError` when there is no such attention.
    """
    if attention is None and module is None:
        return trace
    count = len(trace.attentions)
    paths = [one.module for one in trace.attentions]
    if attention is not None and not 1 <= attention <= count:
        there = "none was found" if not count else "there is only 1" if count == 1 else f"there are 1 to {count}"
        raise SpecError(f"attention {attention} is not there: {there}. Without --attention all are listed.")
    chosen = set(range(1, count + 1)) if attention is None else {attention}
    if module is not None:
        inside = {n for n, path in enumerate(paths, 1) if path == module or path.startswith(f"{module}.")}
        if not inside:
            listed = ", ".join(shown(path) for path in paths[:4] if path) + (", …" if count > 4 else "")
            where = f"Modules that have one: {listed or 'none'}." if listed or not count else _ITSELF
            raise SpecError(f"module {shown(module)} has no attention. {where}{did_you_mean(module, paths)}")
        chosen &= inside
        if not chosen:
            own = shown(paths[(attention or 1) - 1])
            raise SpecError(f"attention {attention} is in module {own}, not in {shown(module)}.")
    return replace(trace, chosen=tuple(sorted(chosen)))

"""Check that no position sees beyond a declared window, and that each sees all of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..reports.check import Finding
from .causal_masks import against_window
from .evidence import Evidence, NotPossibleError, UndeclaredError

_LONGER = "Give a longer input"


def window(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if a position attends beyond the declared window, or not to all of it.

    Some layers may attend to everything: they are no fault if every layer with a window has the declared one.
    """
    width = evidence.intent.window
    if width is None:
        raise UndeclaredError("--window N")
    if not evidence.sights:
        raise NotPossibleError("the scores do not show who sees whom")
    if all(sight.keys <= width or sight.queries < 2 for sight in evidence.sights):
        raise NotPossibleError(f"no query has more than {width} keys, so the window hides none", give=_LONGER)
    findings: list[Finding] = []
    is_any_right = is_any_global = is_window_wrong = False
    for sight in evidence.sights:
        finding = against_window(sight, width, evidence.intent.causal)
        if finding is None:
            is_any_right = True
        else:
            findings.append(finding)
        if sight.width is None:
            is_any_global = True
        elif finding is not None:
            is_window_wrong = True
    are_global_ones_meant = is_any_right and is_any_global and not is_window_wrong
    if not are_global_ones_meant:
        yield from findings[:1]

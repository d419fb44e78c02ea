"""Where Python stands when an operation is asked for: noted while it runs, told as lines and modules afterwards."""

from __future__ import annotations

from typing import Any

from .source import line_at

Site = list[Any]
"""Code and instruction of each frame from the innermost to the first call of a module, that one included, then its
`ModuleCall`; up to the boundary where no module is being called. One list stands for one place in one call."""


class ModuleCall:
    """One call of a module that is or was running."""

    __slots__ = ("above", "path", "refused_at")

    def __init__(self, path: str, above: Site) -> None:
        self.path = path
        self.above = above
        """Where it was called from."""
        self.refused_at = -1
        """Where torch's multi-head attention stood when it was last asked why it takes no fast path."""


def place_of_site(site: Site) -> tuple[str, str]:
    """Return the line that asked for an operation, and the path of the module that it ran in.

    The line is the innermost that is not torch's; one of torch where there is none, empty where there is neither.
    """
    path = site[-1].path if site and isinstance(site[-1], ModuleCall) else ""
    library = ""
    above: Site | None = site
    while above is not None:
        inner, above = above, None
        for place in range(0, len(inner) - 1, 2):
            line = line_at(inner[place], inner[place + 1])
            if not line.library:
                if line.text:
                    return line.text, path
            elif not library:
                library = line.text
        if inner and isinstance(inner[-1], ModuleCall):
            above = inner[-1].above
    return library, path

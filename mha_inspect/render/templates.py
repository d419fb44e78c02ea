"""The frames that svg and html are exported in: self-contained, nothing is fetched, no script, light and dark.

They are the files page.html, cell.html and page.svg beside this one, with the styles of page.css. What stands between
two @ in them is filled in by us, and the names in braces of the svg by Rich. Fonts are those that systems have.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_FONTS = "'JetBrains Mono','Cascadia Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
LIGHT = {"RED": "#b3261e", "GREEN": "#116329", "MAGENTA": "#8250df", "CYAN": "#0f6b73", "BLUE": "#0958b3"}
DARK = {"RED": "#ff8a80", "GREEN": "#7ec685", "MAGENTA": "#c89bf0", "CYAN": "#62c3cd", "BLUE": "#79b4fa"}
_BETWEEN = {"RED": "#d1402f", "GREEN": "#2d8549", "MAGENTA": "#9560d8", "CYAN": "#1f8089", "BLUE": "#2f76cf"}
"""Colours that can be read on white and on black alike, for a page whose ground is not known."""
GROUNDS = (("#ffffff", "#24292f"), ("#161b22", "#d0d7de"))
"""Ground and text, light and dark."""


def _filled(name: str, values: dict[str, str]) -> str:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    for mark, value in {"FONTS": _FONTS, **values}.items():
        text = text.replace(f"@{mark}@", value)
    return text


def _styles(scope: str, colours: dict[str, str]) -> str:
    return _filled("page.css", {"SCOPE": scope, **colours}).strip()


def _variables(ground: str, text: str, colours: dict[str, str]) -> str:
    return f"--ground: {ground}; --text: {text}; " + " ".join(f"--{n.lower()}: {c};" for n, c in colours.items())


@cache
def html() -> str:
    """Return the frame of a page of its own."""
    styles = _styles("body", {name: f"var(--{name.lower()})" for name in LIGHT})
    light, dark = (_variables(*both, colours) for both, colours in zip(GROUNDS, (LIGHT, DARK), strict=True))
    return _filled("page.html", {"LIGHT": light, "DARK": dark, "STYLES": styles})


@cache
def cell() -> str:
    """Return the frame in a page that is not ours, such as a notebook: it has that page's ground and text."""
    return _filled("cell.html", {"STYLES": _styles(".mha-inspect", _BETWEEN)})


@cache
def svg() -> str:
    """Return the frame of an image: light where nothing says otherwise, for what shows an svg and knows no media."""
    (ground, text), (dark_ground, dark_text) = GROUNDS
    return _filled("page.svg", {"GROUND": ground, "TEXT": text, "DARK_GROUND": dark_ground, "DARK_TEXT": dark_text})

"""Draw pictures with matplotlib, an optional dependency: as an image file, or on the axes of a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import InputError
from .grid import Picture, PictureAxis, hex_table
from .terminal import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

INSTALL = 'pip install "mha-inspect[plot]"'
_BESIDE = 4
"""The most panels in a row."""
_INCHES = 2.6
"""Width of a panel if there are several in a row."""
_TICKS = 9


def require_matplotlib(feature: str) -> None:
    """Raise `InputError` with the install command if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{feature} needs the library matplotlib, which is not installed. Install it: {INSTALL}")


def to_file(pictures: Sequence[Picture], format: Literal["png", "svg"]) -> bytes:
    """Return pictures, one below the other, as the bytes of an image; the same bytes each time."""
    import matplotlib
    from matplotlib.figure import Figure

    # Keep text as text, and the same identifiers each time.
    with matplotlib.rc_context({"svg.hashsalt": "mha-inspect", "svg.fonttype": "none"}):
        sizes = [size_of(picture) for picture in pictures]
        whole = max(width for width, _ in sizes), sum(height for _, height in sizes)
        figure = Figure(figsize=whole, layout="constrained", dpi=150)
        parts = figure.subfigures(len(pictures), 1, squeeze=False, height_ratios=[height for _, height in sizes])
        for picture, part in zip(pictures, parts[:, 0], strict=True):
            onto(picture, part)
        file = BytesIO()
        figure.savefig(file, format=format, metadata={"Date": None} if format == "svg" else {"Software": None})
    return file.getvalue()


def size_of(picture: Picture) -> tuple[float, float]:
    """Return a suitable figure size for the picture, in inches: width and height."""
    _, rows, columns = picture.shape
    high, wide = _layout(picture)
    width = 5.0 if high == wide == 1 else _INCHES
    return wide * width + 1.4, high * width * min(max(rows / columns, 0.3), 3) + 0.9


def _layout(picture: Picture) -> tuple[int, int]:
    """Return the number of panel rows, and of panels in a row."""
    count = picture.shape[0]
    wide = 1 if picture.below else min(count, _BESIDE)
    return -(-count // wide), wide


def onto(picture: Picture, figure: FigureBase) -> list[Axes]:
    """Draw the picture on an empty figure, and return the axes of each panel."""
    high, wide = _layout(picture)
    axes = [figure.add_subplot(high, wide, place + 1) for place in range(picture.shape[0])]
    images = [_panel(picture, place, panel) for place, panel in enumerate(axes)]
    span = picture.range
    label = picture.title
    if picture.signed:
        label += f" (from {number(span.least)} to {number(span.most)})"
    figure.colorbar(images[-1], ax=axes, label=_plain(label), shrink=min(0.9, 3 / high) if high > 1 else 0.9)
    signs = (("hatched: masked", span.masked), ("magenta: NaN", span.nan), ("white: inf", span.infinite))
    notes = [text for text, count in signs if count] + list(picture.notes)
    figure.supxlabel(_plain("   ".join(notes)), fontsize="small")
    return axes


def _panel(picture: Picture, place: int, axes: Axes) -> Any:
    """Draw one panel, and return its image for the colour scale."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    values = picture.values[place]
    colours = ListedColormap([f"#{colour}" for colour in hex_table(picture.signed)])
    low, high = picture.scale
    rows, columns = values.shape
    if (values == -np.inf).any():
        ground = Rectangle(
            (-0.5, -0.5), columns, rows, fill=False, hatch="////", edgecolor="0.6", linewidth=0, zorder=-1
        )
        axes.add_patch(ground)
    image = axes.imshow(
        np.ma.masked_where(~np.isfinite(values), values),
        cmap=colours,
        vmin=low,
        vmax=high if high > low else low + 1,
        interpolation="nearest",
        aspect="equal" if 0.3 <= rows / columns <= 3 else "auto",
    )
    for there, colour in ((np.isnan(values), "#ff00ff"), (values == np.inf, "#ffffff")):
        if there.any():
            axes.imshow(
                np.ma.masked_where(~there, np.zeros_like(values)),
                cmap=ListedColormap([colour]),
                aspect=axes.get_aspect(),
            )
    axes.set_title(_plain(picture.panels[place]), fontsize="medium")
    axes.set_xlabel(_plain(picture.columns.name))
    axes.set_ylabel(_plain(picture.rows.name))
    _ticks(axes.xaxis, picture.columns, columns, 90)
    _ticks(axes.yaxis, picture.rows, rows, 0)
    return image


def _ticks(axis: Any, side: PictureAxis, size: int, rotation: int) -> None:
    if side.labels:
        apart = -(-size // 40)
        names = [_plain(name[:14]) for name in side.labels[::apart]]
        axis.set_ticks(range(0, size, apart), names, rotation=rotation, fontsize="x-small")
    else:
        axis.set_ticks(range(0, size, max(-(-size // _TICKS), 1)))


def _plain(text: str) -> str:
    """Return text with its dollar signs escaped, so that matplotlib reads no formula."""
    return text.replace("$", r"\$")

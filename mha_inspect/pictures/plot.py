"""Draw pictures with matplotlib, an optional dependency: as a PNG, or on the axes of a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InputError
from .grid import Floats, Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.image import AxesImage

INSTALL = 'pip install "mha-inspect[plot]"'
_INCHES = 2.6
"""Width and height of a panel."""


def require_matplotlib(feature: str) -> None:
    """Raise `InputError` with the install command if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{feature} needs the library matplotlib, which is not installed. Install it: {INSTALL}")


def to_png(pictures: Sequence[Picture]) -> bytes:
    """Return pictures, one below the other, as the bytes of an image; the same bytes each time."""
    from matplotlib.figure import Figure

    sizes = [size_of(picture) for picture in pictures]
    widths, heights = zip(*sizes, strict=True)
    width = max(widths)
    height = sum(heights)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    parts = figure.subfigures(len(pictures), 1, squeeze=False, height_ratios=heights)
    for picture, part in zip(pictures, parts[:, 0], strict=True):
        onto(picture, part)
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def size_of(picture: Picture) -> tuple[float, float]:
    """Return a suitable figure size for the picture, in inches: width and height."""
    panels, _, _ = picture.shape
    # Beside the panels is the colour scale, and around them are the titles.
    width = panels * _INCHES + 1.4
    height = _INCHES + 0.9
    return width, height


def onto(picture: Picture, figure: FigureBase) -> list[Axes]:
    """Draw the panels of a picture on an empty figure with `imshow`, on one scale, and return their axes.

    Masked elements, NaN and infinities are blank.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a name may have dollar signs
        count, _, _ = picture.shape
        grid = figure.subplots(1, count, squeeze=False)
        panels = list(grid.flat)
        for axes, values, title in zip(panels, picture.values, picture.panels, strict=True):
            image = _draw(picture, values, axes)
            axes.set_title(title)
        figure.colorbar(image, ax=panels, label=picture.title)
        figure.supxlabel("   ".join(picture.notes), fontsize="small")
    return panels


def _draw(picture: Picture, values: Floats, axes: Axes) -> AxesImage:
    """Draw the numbers of one panel, `row column`, and return the image."""
    numbers = np.ma.masked_invalid(values)
    low, high = picture.scale
    colours = "coolwarm" if picture.signed else "viridis"
    image = axes.imshow(numbers, colours, vmin=low, vmax=high)
    rows = picture.rows
    columns = picture.columns
    axes.set(xlabel=columns.name, ylabel=rows.name)
    height, width = values.shape
    if columns.labels:
        axes.set_xticks(range(width), columns.labels, rotation=90)
    if rows.labels:
        axes.set_yticks(range(height), rows.labels)
    return image

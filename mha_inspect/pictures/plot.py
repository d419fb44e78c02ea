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
    figure = Figure(figsize=(max(widths), sum(heights)), layout="constrained", dpi=150)
    parts = figure.subfigures(len(pictures), 1, squeeze=False, height_ratios=heights)
    for picture, part in zip(pictures, parts[:, 0], strict=True):
        onto(picture, part)
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def size_of(picture: Picture) -> tuple[float, float]:
    """Return a suitable figure size for the picture, in inches: width and height."""
    return picture.shape[0] * _INCHES + 1.4, _INCHES + 0.9


def onto(picture: Picture, figure: FigureBase) -> list[Axes]:
    """Draw the panels of a picture on an empty figure with `imshow`, on one scale, and return their axes.

    Masked elements, NaN and infinities are blank.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a name may have dollar signs
        panels = list(figure.subplots(1, picture.shape[0], squeeze=False).flat)
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
    image = axes.imshow(numbers, "coolwarm" if picture.signed else "viridis", vmin=low, vmax=high)
    axes.set(xlabel=picture.columns.name, ylabel=picture.rows.name)
    if picture.columns.labels:
        axes.set_xticks(range(values.shape[1]), picture.columns.labels, rotation=90)
    if picture.rows.labels:
        axes.set_yticks(range(values.shape[0]), picture.rows.labels)
    return image

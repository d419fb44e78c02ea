"""Numbers in panels, one a head, the cells that they are reduced to where there are too many, and their colours.

Colours are viridis for what grows from nothing, blue to red around zero for what has a sign. A colour map is a table of
steps of equal width, so that a colour tells the number that it was drawn for within a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..text import printable

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Side:
    """What goes down a picture, or across it."""

    name: str
    labels: tuple[str, ...] = ()
    """What stands at each place, such as a token; empty where places are numbered. Cleaned as it enters."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(map(printable, self.labels)))


@dataclass(frozen=True)
class Range:
    """The finite numbers of an array, from least to most, and how many elements are none."""

    least: float
    most: float
    nan: int = 0
    infinite: int = 0
    masked: int = 0


@dataclass(frozen=True, eq=False)
class Picture:
    """Heat maps on one scale."""

    title: str
    panels: tuple[str, ...]
    """What each one is: `head 3`."""
    values: Floats
    """Laid out as `panel row column`. -inf is masked, NaN and +inf are what they are."""
    rows: Side
    columns: Side
    signed: bool = False
    """Whether zero is the middle of the colours, and not where they begin."""
    notes: tuple[str, ...] = ()
    below: bool = False
    """Whether panels stand below each other, to be compared column by column, and never side by side."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many panels, rows and columns there are."""
        panels, rows, columns = self.values.shape
        return panels, rows, columns

    @cached_property
    def range(self) -> Range:
        """What the elements are, all panels together; from 0 to 0 where none is finite."""
        return range_of(self.values)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """Which numbers the first and the last colour stand for."""
        if self.signed:
            size = max(abs(self.range.least), abs(self.range.most))
            return -size, size
        return self.range.least, self.range.most


def range_of(values: Floats) -> Range:
    """Return the range of an array."""
    least, most = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if np.isfinite(least) and np.isfinite(most):
        return Range(least, most)
    unmasked = values[values != -np.inf]
    finite = unmasked[np.isfinite(unmasked)]
    return Range(
        float(finite.min()) if finite.size else 0.0,
        float(finite.max()) if finite.size else 0.0,
        nan=int(np.isnan(unmasked).sum()),
        infinite=int((unmasked == np.inf).sum()),
        masked=values.size - unmasked.size,
    )


def reduced(values: Floats, rows: int, columns: int) -> tuple[Floats, tuple[int, int]]:
    """Return at most so many cells, each the largest of a block of elements, and the size of a block.

    A block is NaN where one of its elements is, and masked where all of them are. Blocks at the end may be smaller.
    """
    height, width = block(values.shape[1], rows), block(values.shape[2], columns)
    if width > 1:
        values = np.maximum.reduceat(values, np.arange(0, values.shape[2], width), axis=2)
    if height > 1:
        values = np.maximum.reduceat(values, np.arange(0, values.shape[1], height), axis=1)
    return values, (height, width)


def block(size: int, cells: int) -> int:
    """Return how many elements go into a cell, so that there are no more cells than that."""
    return max(-(-size // max(cells, 1)), 1)


def steps(values: Floats, scale: tuple[float, float], count: int) -> npt.NDArray[np.int64]:
    """Return which of `count` steps of equal width each number is in, from 0.

    What is no number is negative: -1 is masked, -2 is NaN, -3 is +inf.
    """
    low, high = scale
    with np.errstate(invalid="ignore", over="ignore"):
        # In float64: the difference of two float32 may be more than one can hold.
        part = (values.astype(np.float64) - low) / ((high - low) or 1.0) * count
        found = np.clip(np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0), 0, count - 1).astype(np.int64)
    found[values == -np.inf] = -1
    found[np.isnan(values)] = -2
    found[values == np.inf] = -3
    return found


Depth = Literal["true", "256", "none"]
"""What a terminal can show: any colour, one of 256, or none, where characters stand for steps."""

RAMP = ".:-=+*#%@"
"""Steps from the least to the most ink, where there is no colour. Masked elements are blank."""

# The table of matplotlib's viridis (van der Walt, Smith, Firing; CC0).
_VIRIDIS = (
    "44015444025645045745055946075a46085c460a5d460b5e470d60470e6147106347116447136548146748166848176948186a481a6c"
    "481b6d481c6e481d6f481f70482071482173482374482475482576482677482878482979472a7a472c7a472d7b472e7c472f7d46307e"
    "46327e46337f463480453581453781453882443983443a83443b84433d84433e85423f85424086424186414287414487404588404688"
    "3f47883f48893e49893e4a893e4c8a3d4d8a3d4e8a3c4f8a3c508b3b518b3b528b3a538b3a548c39558c39568c38588c38598c375a8c"
    "375b8d365c8d365d8d355e8d355f8d34608d34618d33628d33638d32648e32658e31668e31678e31688e30698e306a8e2f6b8e2f6c8e"
    "2e6d8e2e6e8e2e6f8e2d708e2d718e2c718e2c728e2c738e2b748e2b758e2a768e2a778e2a788e29798e297a8e297b8e287c8e287d8e"
    "277e8e277f8e27808e26818e26828e26828e25838e25848e25858e24868e24878e23888e23898e238a8d228b8d228c8d228d8d218e8d"
    "218f8d21908d21918c20928c20928c20938c1f948c1f958b1f968b1f978b1f988b1f998a1f9a8a1e9b8a1e9c891e9d891f9e891f9f88"
    "1fa0881fa1881fa1871fa28720a38620a48621a58521a68522a78522a88423a98324aa8325ab8225ac8226ad8127ad8128ae8029af7f"
    "2ab07f2cb17e2db27d2eb37c2fb47c31b57b32b67a34b67935b77937b87838b9773aba763bbb753dbc743fbc7340bd7242be7144bf70"
    "46c06f48c16e4ac16d4cc26c4ec36b50c46a52c56954c56856c66758c7655ac8645cc8635ec96260ca6063cb5f65cb5e67cc5c69cd5b"
    "6ccd5a6ece5870cf5773d05675d05477d1537ad1517cd2507fd34e81d34d84d44b86d54989d5488bd6468ed64590d74393d74195d840"
    "98d83e9bd93c9dd93ba0da39a2da37a5db36a8db34aadc32addc30b0dd2fb2dd2db5de2bb8de29bade28bddf26c0df25c2df23c5e021"
    "c8e020cae11fcde11dd0e11cd2e21bd5e21ad8e219dae319dde318dfe318e2e418e5e419e7e419eae51aece51befe51cf1e51df4e61e"
    "f6e620f8e621fbe723fde725"
)
# Moreland's diverging map ("coolwarm"), as matplotlib tabulates it.
_COOLWARM = (
    "3b4cc03c4ec23d50c33e51c53f53c64055c84257c94358cb445acc455cce465ecf485fd14961d24a63d34b64d54c66d64e68d84f69d9"
    "506bda516ddb536edd5470de5572df5673e05875e15977e35a78e45b7ae55d7ce65e7de75f7fe86180e96282ea6384eb6485ec6687ed"
    "6788ee688aef6a8bef6b8df06c8ff16e90f26f92f37093f37295f47396f57597f67699f6779af7799cf87a9df87b9ff97da0f97ea1fa"
    "80a3fa81a4fb82a6fb84a7fc85a8fc86a9fc88abfd89acfd8badfd8caffe8db0fe8fb1fe90b2fe92b4fe93b5fe94b6ff96b7ff97b8ff"
    "98b9ff9abbff9bbcff9dbdff9ebeff9fbfffa1c0ffa2c1ffa3c2fea5c3fea6c4fea7c5fea9c6fdaac7fdabc8fdadc9fdaec9fcafcafc"
    "b1cbfcb2ccfbb3cdfbb5cdfab6cefab7cff9b9d0f9bad0f8bbd1f8bcd2f7bed2f6bfd3f6c0d4f5c1d4f4c3d5f4c4d5f3c5d6f2c6d6f1"
    "c7d7f0c9d7f0cad8efcbd8eeccd9edcdd9eccedaebcfdaead1dae9d2dbe8d3dbe7d4dbe6d5dbe5d6dce4d7dce3d8dce2d9dce1dadce0"
    "dbdcdedcdddddddcdcdedcdbdfdbd9e0dbd8e1dad6e2dad5e3d9d3e4d9d2e5d8d1e6d7cfe7d7cee8d6cce9d5cbead5c9ead4c8ebd3c6"
    "ecd3c5edd2c3edd1c2eed0c0efcfbfefcebdf0cdbbf1cdbaf1ccb8f2cbb7f2cab5f2c9b4f3c8b2f3c7b1f4c6aff4c5adf5c4acf5c2aa"
    "f5c1a9f5c0a7f6bfa6f6bea4f6bda2f7bca1f7ba9ff7b99ef7b89cf7b79bf7b599f7b497f7b396f7b194f7b093f7af91f7ad90f7ac8e"
    "f7aa8cf7a98bf7a889f7a688f6a586f6a385f6a283f5a081f59f80f59d7ef59c7df49a7bf4987af39778f39577f39475f29274f29072"
    "f18f71f18d6ff08b6ef08a6cef886bee8669ee8468ed8366ec8165ec7f63eb7d62ea7b60e97a5fe9785de8765ce7745be67259e57058"
    "e46e56e36c55e36b54e26952e16751e0654fdf634ede614ddd5f4bdc5d4ada5a49d95847d85646d75445d65244d55042d44e41d24b40"
    "d1493fd0473dcf453ccd423bcc403acb3e38ca3b37c83836c73635c53334c43032c32e31c12b30c0282fbe242ebd1f2dbb1b2cba162b"
    "b8122ab70d28b50927b40426"
)
# Entries of xterm's palette that lie near to each map, in its order: lightness rises, around zero from both ends.
_VIRIDIS_256 = (53, 54, 24, 30, 36, 78, 113, 148, 184, 220)
_COOLWARM_256 = (62, 69, 111, 153, 189, 254, 224, 216, 209, 167, 124)


def hex_table(signed: bool) -> tuple[str, ...]:
    """Return the 256 colours of a map as `440154`."""
    text = _COOLWARM if signed else _VIRIDIS
    return tuple(text[place : place + 6] for place in range(0, len(text), 6))


def codes(signed: bool, depth: Literal["true", "256"]) -> tuple[str, ...]:
    """Return each step of a map as a terminal is told of it, behind `38;` for the ink and `48;` for the ground."""
    if depth == "256":
        return tuple(f"5;{entry}" for entry in (_COOLWARM_256 if signed else _VIRIDIS_256))
    return tuple("2;" + ";".join(str(int(one[i : i + 2], 16)) for i in (0, 2, 4)) for one in hex_table(signed))


NO_NUMBER = {"true": "2;255;0;255", "256": "5;201"}
"""NaN: magenta, which is in neither map."""
INFINITE = {"true": "2;255;255;255", "256": "5;231"}
"""+inf: white, which is in neither map."""


def depth_shown() -> Depth:
    """Return how many colours a terminal shows that shows any, as far as it says."""
    terminal = os.environ.get("TERM", "")
    many = os.environ.get("COLORTERM", "").casefold() in ("truecolor", "24bit") or terminal.endswith("-direct")
    many = many or os.environ.get("FORCE_COLOR") == "3" or "WT_SESSION" in os.environ
    return "true" if many else "256"

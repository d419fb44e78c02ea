"""A picture of many heads on a terminal beside numpy's means of the blocks that its cells stand for."""

from __future__ import annotations

import numpy as np
import pytest

from mha_inspect.pictures.grid import Picture, PictureAxis
from mha_inspect.pictures.terminal import draw

_HEADS, _LENGTH, _BLOCK = 32, 512, 16


@pytest.mark.parametrize("depth", ["true", "none"])
def test_draw(side_by_side, depth):
    values = np.random.default_rng(0).random((_HEADS, _LENGTH, _LENGTH), np.float32)
    names = tuple(f"head {head}" for head in range(_HEADS))
    picture = Picture("weights", names, values, PictureAxis("query"), PictureAxis("key"))
    blocks = values.reshape(_HEADS, _LENGTH // _BLOCK, _BLOCK, _LENGTH // _BLOCK, _BLOCK)
    side_by_side(
        f"{_HEADS} heads of {_LENGTH} by {_LENGTH} in colour: {depth}",
        lambda: draw(picture, width=140, depth=depth),
        "numpy's means of their blocks",
        lambda: blocks.mean(axis=(2, 4)),
        at_most=3,
    )

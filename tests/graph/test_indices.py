"""The index along a dimension, read at a view, is the one that numpy finds element by element."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mha_inspect.graph.indices import View, contiguous, counted, read_at, viewed

SHAPES = [(12,), (5, 12), (2, 5, 12), (2, 3, 4, 5), (4, 1, 6)]


def drawn_view(source: View, seed: int) -> View:
    """Return a view with steps that are, or add up to, those of the source, from any position that it fits at."""
    draw = random.Random(seed)
    left = source.end - 1
    shape, stride = [], []
    for _ in range(draw.randrange(1, 5)):
        step = draw.choice([0, 1, 2, 3, 4, *source.stride])
        size = draw.randrange(1, 5)
        if (size - 1) * step <= left:
            left -= (size - 1) * step
            shape.append(size)
            stride.append(step)
    return View(tuple(shape), tuple(stride), draw.randrange(left + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_index_is_the_one_that_each_element_has_and_of_size_one_where_it_does_not_vary(
    shape: tuple[int, ...],
) -> None:
    source = contiguous(shape)
    for seed in range(300):
        view = drawn_view(source, seed)
        for place, size in enumerate(shape):
            indices = counted(len(shape), place, size)
            expected = viewed(np.broadcast_to(indices, shape).ravel(), view)
            found = read_at(indices, source, view)
            assert (found == expected).all()
            for dim in range(found.ndim):
                varies = bool((expected != expected.take([0], dim)).any())
                assert (found.shape[dim] > 1) == varies

"""Describe an attention as the viewer draws it: each stage with its shape, axes and formula, and its rows by head.

`(heads head_dim)` of 4 heads of 16 is four bands of 16 features, one for each head. A dimension whose names do not say
which feature belongs to which head has no bands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, TypedDict

import numpy as np

from ..naming.pattern import dims_of
from ..render.page import by_axis
from ..reports.trace import AttentionReport, Stage
from ..text import printable
from ..text import shape as shape_text

_MOST_BANDS = 512
"""More bands than these, e.g. of heads whose features alternate, are not drawn."""
_FEATURES = ("embed", "kdim", "vdim")
"""Names of the features that a projection reads."""
_BY_HEAD = (["heads"], ["kv_heads"], ["kv_heads", "group"])
"""Names in a dimension that number the heads, in the order in which heads are numbered."""

Piece = tuple[str, str]
"""A part of a text, and the axis that it is about; empty for none."""


class Bands(TypedDict):
    """The features of a stage by head, in their order."""

    of: str
    """`heads` or `kv_heads`."""
    runs: list[tuple[int, int]]
    """A head, and how many features in a row are of it."""


class DrawnStage(TypedDict):
    """A stage as the viewer shows it."""

    name: str
    shape: list[Piece]
    axes: list[Piece]
    formula: str
    source: str
    width: int | None
    """Features of the whole dimension that has the heads, or of the input; None if no dimension has such a name."""
    bands: Bands | None


def flow_of(attention: AttentionReport, shared: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """Return the sizes of an attention and its stages in order.

    `shared` are the query heads that use each key head; empty if each has its own, or that is unknown.
    """
    return {
        "shared": [list(heads) for heads in shared],
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "is_self": "self" in attention.kind,
        "stages": [_drawn(stage, attention) for stage in attention.stages],
    }


def _drawn(stage: Stage, attention: AttentionReport) -> DrawnStage:
    return DrawnStage(
        name=stage.name,
        shape=[*by_axis(shape_text(stage.shape), "shape", stage.axes)],
        axes=[*by_axis(stage.axes, "axes", "")],
        formula=printable(stage.formula),
        source=printable(stage.op.source) if stage.op else "",
        width=_width(stage),
        bands=_bands(stage, attention),
    )


def _width(stage: Stage) -> int | None:
    """Return the features that a stage has in all: 64 for `batch query embed` or `batch query (heads head_dim)`."""
    dims = dims_of(stage.axes)
    if len(dims) != len(stage.shape):
        return None
    for names, size in zip(dims, stage.shape, strict=True):
        if _order_of_heads(names) or names[0] in _FEATURES:
            return size
    return None


def _order_of_heads(names: list[str]) -> list[str]:
    """Return the names that number the heads in a dimension that has also features; empty if that is not known."""
    of_heads = [name for name in names if name in ("heads", "kv_heads", "group")]
    return of_heads if "head_dim" in names and of_heads in _BY_HEAD else []


def _bands(stage: Stage, attention: AttentionReport) -> Bands | None:
    """Return the features of a stage by head; None if a dimension with features of heads is not named as such."""
    dims = dims_of(stage.axes)
    if len(dims) != len(stage.shape):
        return None
    sizes = _sizes(attention)
    for names, size in zip(dims, stage.shape, strict=True):
        order = _order_of_heads(names)
        if not order:
            continue
        heads = _head_of_each(names, order, size, sizes)
        if not heads:
            return None
        runs = []
        for head, features in groupby(heads):
            runs.append((head, len([*features])))
        if len(runs) > _MOST_BANDS:
            return None
        of = "kv_heads" if order == ["kv_heads"] else "heads"
        return Bands(of=of, runs=runs)
    return None


def _sizes(attention: AttentionReport) -> dict[str, int]:
    """Return the sizes of the axes of heads by name."""
    key_heads = max(attention.num_kv_heads, 1)
    return {
        "heads": attention.num_heads,
        "kv_heads": key_heads,
        "group": attention.num_heads // key_heads,
    }


def _head_of_each(names: list[str], order: list[str], size: int, sizes: Mapping[str, int]) -> list[int] | None:
    """Return the head of each of `size` features: 0 0 1 1 for `heads head_dim` of 2 heads of 2; None if unknown."""
    known = {name: sizes[name] for name in order}
    rest = [name for name in names if name not in known]
    count = prod(known.values())
    if len(rest) != 1 or size % count:
        return None
    known[rest[0]] = size // count
    shape = [known[name] for name in names]
    places = np.indices(shape).reshape(len(names), -1)
    head = np.zeros(size, np.int64)
    for name in order:
        head = head * known[name] + places[names.index(name)]
    numbers: list[int] = head.tolist()
    return numbers

"""Make the picture of a stage with a panel for each head, and the data of a page's viewer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from einops import rearrange

from ..errors import SpecError
from ..naming.named_run import NamedRun
from ..naming.parameters import parts_of
from ..naming.pattern import CANONICAL_AXES
from .flow import flow_of
from .grid import Floats, Picture, PictureAxis

if TYPE_CHECKING:
    from torch import Tensor

    from ..reports.trace import AttentionReport
    from .viewer import Shown, SizeOfStage

_IN_A_PAGE = ("scores", "masked_scores", "weights")
_FAR = 900.0
"""A score below -900 that was above it before the mask is masked out: masks add -inf, or -1e4 and less."""


@dataclass(frozen=True)
class Attended:
    """One attention whose stages can be drawn."""

    name: str
    """Its name among several: `attention 2 of 12 in encoder.layer.1`; empty if it is the only attention."""
    num_heads: int
    num_kv_heads: int
    contents: Callable[[], Mapping[str, Tensor]]
    """Returns its stages in `CANONICAL_AXES`, computed on each call."""
    num_windows: int = 1
    """The windows of a batch item, which count as batch items of their own."""
    report: AttentionReport | None = None
    """Its stages in words and shapes, for a page; None if only heat maps are drawn."""
    shared: tuple[tuple[int, ...], ...] = ()
    """The query heads that use each key head, as `sharing_heads` returns them; empty if each has its own."""
    count: int | None = None
    """The number of heads that was asked for, if several are compared."""

    def picture(
        self,
        stage: str,
        *,
        heads: Sequence[int] | None = None,
        batch_row: int = 0,
        labels: Sequence[str] = (),
        title: str = "",
    ) -> Picture:
        """Return the picture of a stage of one batch item, a panel for each head, by default of all heads.

        `labels` are shown along the axes query and key of the same size. The default title is the stage, with the
        attention if there are several.

        Raise `SpecError` if the stage, head or batch item does not exist, or if the labels fit no axis.
        """
        contents = self.contents()
        tensor = _drawable(contents, stage)
        items = tensor.shape[0]
        if batch_row not in range(items):
            raise SpecError(f"batch item {batch_row} does not exist: the batch has {items}, counted from 0.")
        panels = self._panels(stage, tensor[batch_row])
        num_panels, height, width = panels.shape
        names = re.findall(r"\w+", CANONICAL_AXES[stage])
        has_heads = "heads" in names or "kv_heads" in names
        chosen = list(range(num_panels))
        if has_heads and heads is not None:
            chosen = _existing(heads, stage, num_panels)
        rows = _axis("query" if "query" in names else "key", height, labels)
        columns = _axis(names[-1], width, labels)
        if labels and not rows.labels and not columns.labels:
            raise SpecError(
                f"{len(labels)} tokens fit no axis of {stage}, which has {height} of {rows.name} "
                f"and {width} of {columns.name}. Give one token for each."
            )
        if not title:
            title = f"{stage} of {self.name}" if self.name else stage
        return Picture(
            title=title,
            panels=tuple(f"head {head}" if has_heads else title for head in chosen),
            values=_numbers(panels, chosen, _masked(contents, stage, batch_row)),
            rows=rows,
            columns=columns,
            signed=stage != "weights",
            notes=(self._which(batch_row, items),) if items > 1 else (),
        )

    def _panels(self, stage: str, item: Tensor) -> Tensor:
        """Return a stage of a batch item as `head position feature` or `head query key`, a panel for each head.

        A stage without heads is one panel, and so is one whose features do not split into the heads.
        """
        is_packed = "(" in CANONICAL_AXES[stage]
        if not is_packed:
            return item[None] if item.dim() < 3 else item
        is_of_keys = stage in ("k_proj", "v_proj")
        heads = self.num_kv_heads if is_of_keys else self.num_heads
        features = item.shape[-1]
        panels = heads if features % max(heads, 1) == 0 else 1
        return rearrange(item, "position (head feature) -> head position feature", head=panels)

    def _which(self, batch_row: int, count: int) -> str:
        """Return which of the batch items is drawn, or which window of which item."""
        windows = self.num_windows
        if windows < 2 or count % windows:
            return f"Batch item {batch_row} of {count}, counted from 0."
        item, window = divmod(batch_row, windows)
        return f"Window {window} of {windows} of batch item {item} of {count // windows}, counted from 0."


def _drawable(contents: Mapping[str, Tensor], stage: str) -> Tensor:
    """Return a stage of all batch items.

    Raise `SpecError` if there is no such stage, or if only its shape is known.
    """
    if stage in contents:
        if contents[stage].is_meta:
            raise SpecError(
                f"{stage} cannot be drawn: its numbers do not fit in memory, so only its shape is known. "
                "Try a smaller --seq-len."
            )
        return contents[stage]
    instead = {"scores": "masked_scores", "masked_scores": "scores"}.get(stage, "")
    way = f"Its stages: {', '.join(contents) or 'none'}."
    if instead in contents:
        way = f"Try {instead}."
    raise SpecError(f"{stage} cannot be drawn: this attention lacks it, or its axes are unknown. {way}")


def _existing(heads: Sequence[int], stage: str, count: int) -> list[int]:
    """Return the heads. Raise `SpecError` if one of them is none of the `count` heads of a stage."""
    for head in heads:
        if head not in range(count):
            raise SpecError(f"head {head} does not exist: {stage} has {count}, counted from 0.")
    return list(heads)


def _axis(name: str, size: int, labels: Sequence[str]) -> PictureAxis:
    """Return an axis, with the labels of the tokens if it is one of positions and there are as many."""
    has_tokens = name in ("query", "key")
    if has_tokens and len(labels) == size:
        return PictureAxis(name, tuple(labels))
    return PictureAxis(name)


def sharing_heads(run: NamedRun) -> list[tuple[tuple[int, ...], ...]]:
    """Return for each attention the query heads that use each key head: 0 1 and 2 3; empty if each has its own."""
    is_grouped = any(names.num_kv_heads < names.num_heads for _, names in run.attentions)
    if not is_grouped:
        return [()] * len(run.attentions)
    shared = []
    for found in parts_of(run):
        shared.append(found.serves)
    return shared


def for_viewer(
    attended: Sequence[Attended],
    *,
    more: Sequence[str] = (),
    labels: Sequence[str] = (),
    attention: int = 0,
    stage: str = "weights",
    head: int = 0,
) -> dict[str, Any] | None:
    """Return a page's data: every attention with its stages, and heat maps of scores, weights and stages `more`.

    None if there is nothing to show. `attention`, `stage` and `head` are shown first. The heat maps are of batch item
    0; labels that fit no axis of a stage are ignored.
    """
    from .viewer import storages, viewer_data

    names = [*dict.fromkeys((*_IN_A_PAGE, *more))]
    sizes = _sizes(attended, names)
    if not sizes and all(item.report is None for item in attended):
        return None
    shown = (_shown(item, names, labels) for item in attended)
    return viewer_data(shown, storages(sizes), {"attention": attention, "stage": stage, "head": head})


def _sizes(attended: Sequence[Attended], names: Sequence[str]) -> dict[str, SizeOfStage]:
    """Return how much there is of each stage with numbers, in all attentions."""
    from .viewer import SizeOfStage

    sizes: dict[str, SizeOfStage] = {}
    for item in attended:
        for name, tensor in _filled(item, names).items():
            before = sizes.get(name, SizeOfStage(elements=0, panels=0))
            first_item = tensor[0]
            heads = len(first_item) if tensor.dim() == 4 else 1
            sizes[name] = SizeOfStage(
                elements=before.elements + first_item.numel(),
                panels=before.panels + heads,
            )
    return sizes


def _shown(item: Attended, names: Sequence[str], labels: Sequence[str]) -> Shown:
    """Return an attention as the viewer takes it."""
    from .viewer import Shown

    flow = None if item.report is None else flow_of(item.report, item.shared)
    return Shown(item.name or "attention", _pictures(item, names, labels), flow, item.count)


def _filled(attended: Attended, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the stages with these names that have numbers."""
    contents = attended.contents()
    filled = {}
    for name in names:
        if name in contents and not contents[name].is_meta and contents[name].numel():
            filled[name] = contents[name]
    return filled


def _pictures(attended: Attended, names: Iterable[str], labels: Sequence[str]) -> list[Picture]:
    """Return the pictures of an attention, titled with their stages, with the labels where they fit."""
    # Only the shapes are kept: a picture computes its stage again.
    shapes = {name: tensor.shape for name, tensor in _filled(attended, names).items()}
    pictures = []
    for name, shape in shapes.items():
        rows_and_columns = shape[-2:]
        fitting = labels if len(labels) in rows_and_columns else ()
        pictures.append(attended.picture(name, labels=fitting, title=name))
    return pictures


def _numbers(panels: Tensor, chosen: list[int], masked: Tensor | None) -> Floats:
    """Return the panels as float32, with -inf for masked elements."""
    if len(chosen) < len(panels):
        panels = panels[chosen]
        if masked is not None and len(masked) > 1:
            masked = masked[chosen]
    numbers = panels.detach().float()
    if masked is not None:
        numbers = numbers.masked_fill(masked.to(numbers.device), -float("inf"))
    array: Floats = numbers.cpu().numpy()
    return array


def _masked(contents: Mapping[str, Tensor], stage: str, batch_row: int) -> Tensor | None:
    """Return which elements are masked out, as `heads query key`; None if unknown, or for a stage before the mask.

    An element with a weight is shown, also if it is masked: a row with all keys masked has weights.
    """
    scores = contents.get("masked_scores")
    if stage not in ("masked_scores", "weights") or scores is None:
        return None
    if scores.shape[-2:] != contents[stage].shape[-2:]:
        return None
    place = batch_row if batch_row < len(scores) else 0
    masked = scores[place].detach() < -_FAR
    unmasked = contents.get("scores")
    if unmasked is not None and unmasked.shape == scores.shape:
        was_seen = unmasked[place].detach() >= -_FAR
        masked &= was_seen
    if stage == "masked_scores":
        return masked
    weights = contents[stage][batch_row].detach()
    has_no_weight = weights == 0
    return masked & has_no_weight

"""Make the picture of a stage with a panel for each head, and the data of a page's viewer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from einops import rearrange

from ..errors import SpecError
from ..naming.pattern import CANONICAL_AXES
from .grid import Floats, Picture, PictureAxis

if TYPE_CHECKING:
    from torch import Tensor

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
        if stage not in contents:
            instead = {"scores": "masked_scores", "masked_scores": "scores"}.get(stage, "")
            raise SpecError(
                f"{stage} cannot be drawn: this attention lacks it, or its axes are unknown. "
                + (f"Try {instead}." if instead in contents else f"It has {', '.join(contents) or 'none'}.")
            )
        tensor, axes = contents[stage], re.findall(r"\w+", CANONICAL_AXES[stage])
        if tensor.is_meta:
            raise SpecError(
                f"{stage} cannot be drawn: its numbers do not fit in memory, so only its shape is known. "
                "Try a smaller --seq-len."
            )
        if batch_row not in range(tensor.shape[0]):
            raise SpecError(f"batch item {batch_row} does not exist: the batch has {tensor.shape[0]}, counted from 0.")
        panels = tensor[batch_row]
        if "(" in CANONICAL_AXES[stage]:
            count = self.num_kv_heads if stage in ("k_proj", "v_proj") else self.num_heads
            split = count if panels.shape[-1] % max(count, 1) == 0 else 1
            panels = rearrange(panels, "position (head feature) -> head position feature", head=split)
        elif panels.dim() < 3:
            panels = panels[None]
        has_heads = "heads" in axes or "kv_heads" in axes
        chosen = list(heads) if has_heads and heads is not None else list(range(len(panels)))
        absent = next((head for head in chosen if head not in range(len(panels))), None)
        if absent is not None:
            raise SpecError(f"head {absent} does not exist: {stage} has {len(panels)}, counted from 0.")
        rows, columns = (
            PictureAxis(name, tuple(labels) if name in ("query", "key") and len(labels) == size else ())
            for name, size in zip(("query" if "query" in axes else "key", axes[-1]), panels.shape[1:], strict=True)
        )
        if labels and not rows.labels and not columns.labels:
            raise SpecError(
                f"{len(labels)} tokens fit no axis of {stage}: it has {panels.shape[1]} places of {rows.name} "
                f"and {panels.shape[2]} of {columns.name}. Give one token for each."
            )
        title = title or (f"{stage} of {self.name}" if self.name else stage)
        return Picture(
            title,
            tuple(f"head {head}" if has_heads else title for head in chosen),
            _numbers(panels, chosen, _masked(contents, stage, batch_row)),
            rows,
            columns,
            signed=stage != "weights",
            notes=(self._which(batch_row, tensor.shape[0]),) if tensor.shape[0] > 1 else (),
        )

    def _which(self, batch_row: int, count: int) -> str:
        """Return which of the batch items is drawn, or which window of which item."""
        windows = self.num_windows
        if windows < 2 or count % windows:
            return f"Batch item {batch_row} of {count}, counted from 0."
        item, window = divmod(batch_row, windows)
        return f"Window {window} of {windows} of batch item {item} of {count // windows}, counted from 0."


def for_viewer(
    attended: Sequence[Attended],
    *,
    more: Sequence[str] = (),
    labels: Sequence[str] = (),
    attention: int = 0,
    stage: str = "weights",
    head: int = 0,
) -> dict[str, Any] | None:
    """Return a page's data: scores, weights and stages `more` of every attention; None if no stage can be drawn.

    `attention`, `stage` and `head` are shown first. The pictures are of batch item 0; labels that fit no axis of a
    stage are ignored.
    """
    from .viewer import storages, viewer_data

    names = dict.fromkeys((*_IN_A_PAGE, *more))

    def drawable(attention: Attended) -> dict[str, Tensor]:
        contents = attention.contents()
        stages = {name: contents[name] for name in names if name in contents and not contents[name].is_meta}
        return {name: tensor for name, tensor in stages.items() if tensor.numel()}

    def pictures(attention: Attended) -> list[Picture]:
        fitting = {
            name: labels if len(labels) in tensor.shape[-2:] else () for name, tensor in drawable(attention).items()
        }
        return [attention.picture(name, labels=fit, title=name) for name, fit in fitting.items()]

    sizes: dict[str, tuple[int, int]] = {}
    for item in attended:
        for name, tensor in drawable(item).items():
            elements, panels = sizes.get(name, (0, 0))
            sizes[name] = elements + tensor[0].numel(), panels + (len(tensor[0]) if tensor.dim() == 4 else 1)
    if not sizes:
        return None
    named = ((item.name or "attention", pictures(item)) for item in attended)
    return viewer_data(named, storages(sizes), {"attention": attention, "stage": stage, "head": head})


def _numbers(panels: Tensor, chosen: list[int], masked: Tensor | None) -> Floats:
    """Return the panels as float32, with -inf for masked elements."""
    if len(chosen) < len(panels):
        panels = panels[chosen]
        masked = masked[chosen] if masked is not None and len(masked) > 1 else masked
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
    if stage not in ("masked_scores", "weights") or scores is None or scores.shape[-2:] != contents[stage].shape[-2:]:
        return None
    place = batch_row if batch_row < len(scores) else 0
    masked = scores[place].detach() < -_FAR
    free = contents.get("scores")
    if free is not None and free.shape == scores.shape:
        masked &= free[place].detach() >= -_FAR
    return masked & (contents[stage][batch_row].detach() == 0) if stage == "weights" else masked

"""Reports that print themselves, and traces that hold their tensors and draw them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import ExportError
from ..naming.canonical import canonical, contents_of, sizes_in
from ..naming.stages import STAGES
from ..naming.subject import Run, keep_stages
from ..render import Format
from ..render.export import Destination
from ..reports.trace import Attention, Stage, Trace, attention_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..pictures.grid import Picture
    from ..pictures.stages import Attended


class _Shows:
    """Shows the fields of a report as its own."""

    report: Any

    def __getattr__(self, name: str) -> Any:
        if name == "report":  # asked for before it is there, as copying does
            raise AttributeError(name)
        return getattr(self.report, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *vars(self.report)]


@dataclass(frozen=True)
class Kept:
    """What is held of an attention when its run is over."""

    stages: Mapping[str, Tensor] = field(default_factory=dict)
    turns: Mapping[str, Tensor] = field(default_factory=dict)
    """Of a loop over heads the stages with all of its turns side by side, in canonical axes; else empty."""
    laid_out: Mapping[str, tuple[str, Mapping[str, int]]] = field(default_factory=dict)
    """The axes of each stage, and the sizes of those that share a dimension."""

    def contents(self) -> dict[str, Tensor]:
        """Return the stages in canonical axes, without those of which an axis has no name."""
        if self.turns:
            return dict(self.turns)
        every = {stage: canonical(tensor, stage, *self.laid_out[stage]) for stage, tensor in self.stages.items()}
        return {stage: content for stage, content in every.items() if content is not None}


def keep_tensors(seen: Run) -> tuple[Kept, ...]:
    """Hold the tensors of each attention; the run has none of them any longer."""
    turns = [contents_of(seen, *found) if found[0].branches else {} for found in seen.attentions]
    own = [{stage: tensor.clone() for stage, tensor in contents.items()} for contents in turns]
    stages = keep_stages(seen.recording, seen.attentions)
    laid_out = [
        {stage: (names.of_stage(stage), sizes_in(found, names, stage)) for stage in found.stages}
        for found, names in seen.attentions
    ]
    return tuple(map(Kept, stages, own, laid_out))


class LiveStage(_Shows):
    """A stage of a trace: the fields of `reports.trace.Stage`, and its tensor where tensors were kept."""

    def __init__(self, stage: Stage, tensor: Tensor | None, attended: Callable[[], Attended]) -> None:
        self.report = stage
        self._tensor = tensor
        self._attended = attended

    @property
    def tensor(self) -> Tensor:
        """The content, laid out as `axes` says. Raises `ValueError` where tensors were not kept."""
        if self._tensor is None:
            raise ValueError(f"the tensor of {self.report.name} was not kept: trace with keep=True.")
        return self._tensor

    def picture(
        self,
        head: int | Sequence[int] | None = None,
        *,
        batch_row: int = 0,
        tokens: Sequence[str] = (),
        width: int | None = None,
        color: bool | None = None,
    ) -> str:
        """Return a heat map for each head as text: `print(trace.attentions[0].weights.picture(head=3))`.

        Args:
            head: one, or several; all by default.
            batch_row: which row of the batch.
            tokens: labels of the queries, or of the keys.
            width: columns to fill; those of the terminal by default, or 80 where there is none.
            color: whether in colour; by default where stdout shows any.

        Raises `ValueError` where tensors were not kept, `SpecError` where there is no such head or row.
        """
        from ..pictures.grid import depth_shown
        from ..pictures.terminal import draw
        from ..render.screen import columns, in_color

        drawn = self._picture(head, batch_row, tokens)
        shows = in_color(sys.stdout) if color is None else color
        width = columns(sys.stdout) if width is None else width
        return draw(drawn, width=width, depth=depth_shown() if shows else "none")

    def plot(
        self, head: int | Sequence[int] | None = None, *, batch_row: int = 0, tokens: Sequence[str] = ()
    ) -> Axes | list[Axes]:
        """Draw a heat map for each head by matplotlib, and return its axes; a list of them where heads are several.

        The arguments are those of `picture`. Raises as that, and `InputError` where matplotlib is missing.
        """
        from ..pictures.plot import onto, require_matplotlib, size_of

        drawn = self._picture(head, batch_row, tokens)
        require_matplotlib("plot()")
        from matplotlib import pyplot

        axes = onto(drawn, pyplot.figure(figsize=size_of(drawn), layout="constrained"))
        return axes[0] if len(axes) == 1 else axes

    def _picture(self, head: int | Sequence[int] | None, batch_row: int, tokens: Sequence[str]) -> Picture:
        assert self.tensor is not None  # or it says that tensors were not kept
        heads = (head,) if isinstance(head, int) else head
        return self._attended().picture(self.report.name, heads=heads, batch_row=batch_row, labels=tokens)

    def __repr__(self) -> str:
        stage = self.report
        return f"{stage.name} {list(stage.shape)} {stage.axes}: {stage.formula}"


class LiveAttention(_Shows):
    """An attention of a trace: the fields of `reports.trace.Attention`, and each stage by its name."""

    def __init__(self, attention: Attention, kept: Kept, name: str = "") -> None:
        self.report = attention
        self._name, self._kept = name, kept
        self.stages = tuple(LiveStage(stage, kept.stages.get(stage.name), self.attended) for stage in attention.stages)

    def __getattr__(self, name: str) -> Any:
        stages = {stage.name: stage for stage in vars(self).get("stages", ())}
        if name in STAGES and stages:
            if name not in stages:
                raise AttributeError(f"this attention has no {name}. It has {', '.join(stages)}.")
            return stages[name]
        return super().__getattr__(name)

    def attended(self) -> Attended:
        """Return it as pictures are drawn of it."""
        from ..pictures.stages import Attended

        return Attended(self._name, self.report.num_heads, self.report.num_kv_heads, self._kept.contents)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(stage.name for stage in self.stages)]

    def __repr__(self) -> str:
        head = f"attention {self.report.module}".rstrip() + f": num_heads {self.report.num_heads}"
        return "\n".join([head, *(f"  {stage!r}" for stage in self.stages)])


class LiveReport(_Shows):
    """A report that prints itself: the fields of a report of `mha_inspect.reports`, read as they are there."""

    def __init__(self, report: Any) -> None:
        self.report = report

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveReport) and self.report == other.report

    __hash__ = None  # type: ignore[assignment]  # equal reports are equal, and lists inside them cannot be hashed

    def __repr__(self) -> str:
        return self._text("plain").rstrip("\n")

    def _repr_html_(self) -> str:
        from ..render import to_cell

        return to_cell(self.report)

    def to_dict(self) -> dict[str, Any]:
        """What `--format json` prints, as Python has it."""
        read: dict[str, Any] = json.loads(self._text("json"))
        return read

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a .json, .txt or .html file; an existing file is replaced whole or not at all.

        Raises `ExportError` where that cannot be done.
        """
        target = Destination.of(Path(path))
        if target.format == "png" or target.format == "svg":
            raise ExportError(f"{path} is a picture: draw one with .plot() of a stage, and save its figure.")
        target.write(self._text(target.format))

    def _text(self, format: Format) -> str:
        from ..render import to_text

        return to_text(self.report, format)


class LiveTrace(LiveReport):
    """A trace that prints itself, and holds its tensors where they were kept."""

    def __init__(self, trace: Trace, kept: tuple[Kept, ...] = ()) -> None:
        super().__init__(trace)
        names = attention_names(trace)
        self.attentions = tuple(
            LiveAttention(attention, kept[place] if place < len(kept) else Kept(), names[place])
            for place, attention in enumerate(trace.attentions)
        )

    def _viewed(self) -> dict[str, Any] | None:
        """Return what a viewer shows; None where no tensors were kept that it could."""
        from ..pictures.stages import for_viewer

        return for_viewer([one.attended() for one in self.attentions])

    def _repr_html_(self) -> str:
        viewed = self._viewed()
        if viewed is None:
            return super()._repr_html_()
        from ..pictures.viewer import frame

        return super()._repr_html_() + frame(viewed)

    def _text(self, format: Format) -> str:
        viewed = self._viewed() if format == "html" else None
        if viewed is None:
            return super()._text(format)
        from ..pictures.viewer import with_viewer

        return with_viewer(super()._text(format), viewed)

"""Define traces whose stages are attributes, draw themselves, and have their tensors if these were kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .explained import explain_fields
from .naming.canonical import contents_of
from .pictures.grid import Picture, depth_shown
from .pictures.plot import onto, require_matplotlib, size_of
from .pictures.stages import Attended, for_viewer, sharing_heads
from .pictures.terminal import draw
from .pictures.viewer import drawn_page, frame
from .render.formats import to_cell, to_text
from .render.html import Drawn
from .render.screen import columns, in_color
from .reports.trace import AttentionReport, Stage, Trace, attention_names
from .running.subject import Run, keep_stages
from .text import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Kept:
    """The tensors of an attention's stages, by the name of the stage."""

    stages: Mapping[str, Tensor] = field(default_factory=dict)
    """In their own layouts."""
    contents: Mapping[str, Tensor] = field(default_factory=dict)
    """In canonical axes."""
    shared: tuple[tuple[int, ...], ...] = ()
    """The query heads that use each key head; empty if each has its own."""


def keep_tensors(run: Run) -> list[Kept]:
    """Return the tensors of each attention, and remove them from the run."""
    keep_stages(run)
    values = run.recording.values
    kept: list[Kept] = []
    for (attention, names), shared in zip(run.attentions, sharing_heads(run), strict=True):
        stages = {stage: values[tensor.id] for stage, tensor in attention.stages.items()}
        kept.append(Kept(stages, contents_of(run, attention, names), shared))
    values.clear()
    return kept


@dataclass(frozen=True, repr=False)
class LiveStage(Stage):
    """A stage of a trace, with its tensor and pictures if tensors were kept."""

    _tensor: Tensor | None = field(default=None, compare=False)
    _attended: Attended | None = field(default=None, compare=False)

    @property
    def tensor(self) -> Tensor:
        """The content, in the layout of `axes`. Raises `ValueError` if tensors were not kept."""
        if self._tensor is None:
            raise ValueError(f"the tensor of {self.name} was not kept. Trace with keep=True.")
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
            head: one or several heads; all by default.
            batch_row: index of the batch item.
            tokens: labels of the queries or the keys.
            width: columns to fill; by default those of the terminal, or 80 without a terminal.
            color: whether to use color; by default, if stdout shows color.

        Raises `ValueError` if tensors were not kept, `SpecError` if the head or batch item does not exist.
        """
        picture = self._picture(head, batch_row, tokens)
        shows = in_color(sys.stdout) if color is None else color
        width = columns(sys.stdout) if width is None else width
        return draw(picture, width=width, depth=depth_shown() if shows else "none")

    def plot(
        self, head: int | Sequence[int] | None = None, *, batch_row: int = 0, tokens: Sequence[str] = ()
    ) -> Axes | list[Axes]:
        """Draw a heat map for each head with matplotlib, and return its axes; a list for several heads.

        The arguments are those of `picture`. Raises the errors of `picture`, and `InputError` without matplotlib.
        """
        picture = self._picture(head, batch_row, tokens)
        require_matplotlib("plot()")
        from matplotlib import pyplot

        axes = onto(picture, pyplot.figure(figsize=size_of(picture), layout="constrained"))
        return axes[0] if len(axes) == 1 else axes

    def _picture(self, head: int | Sequence[int] | None, batch_row: int, tokens: Sequence[str]) -> Picture:
        _ = self.tensor  # raises if tensors were not kept
        assert self._attended is not None
        heads = (head,) if isinstance(head, int) else head
        return self._attended.picture(self.name, heads=heads, batch_row=batch_row, labels=tokens)

    def __repr__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.axes}: {self.formula}"


class Stages(tuple[LiveStage, ...]):
    """The stages of an attention in order, by index or name: `stages[0]`, `stages["weights"]`."""

    def __getitem__(self, key: Any) -> Any:
        """Return a stage, or a tuple of stages for a slice. Raises `KeyError` for an unknown name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        stages = {stage.name: stage for stage in self}
        if key not in stages:
            raise KeyError(f"this attention has no {key}. Its stages: {', '.join(stages)}.{did_you_mean(key, stages)}")
        return stages[key]


@dataclass(frozen=True, repr=False)
class LiveAttention(AttentionReport):
    """An attention of a trace, with each stage as an attribute: `attention.scores`."""

    stages: Stages

    def __getattr__(self, name: str) -> LiveStage:
        """Return a stage. Raises `AttributeError` with the nearest stage for `wieghts`."""
        if name.startswith("_") or name == "stages":
            raise AttributeError(name)
        try:
            stage: LiveStage = self.stages[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None
        return stage

    def __dir__(self) -> list[str]:
        names = list(super().__dir__())
        names += [stage.name for stage in self.stages]
        return names

    def __repr__(self) -> str:
        name = f"attention {self.module}".rstrip()
        return f"<{name}: num_heads {self.num_heads}, {len(self.stages)} stages>"

    def __str__(self) -> str:
        name = f"attention {self.module}".rstrip()
        lines = [f"{name}: num_heads {self.num_heads}"]
        for stage in self.stages:
            lines.append(f"  {stage!r}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class LiveTrace(Trace):
    """A trace whose attentions have their stages as attributes, and whose page shows their pictures."""

    attentions: tuple[LiveAttention, ...]
    _attended: tuple[Attended, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, trace: Trace, kept: Sequence[Kept] = ()) -> LiveTrace:
        """Return a trace with the kept tensors of each of its attentions."""
        attentions: list[LiveAttention] = []
        drawings: list[Attended] = []
        for place, (attention, name) in enumerate(zip(trace.attentions, attention_names(trace), strict=True)):
            tensors = kept[place] if kept else Kept()
            drawn = Attended(
                name,
                attention.num_heads,
                attention.num_kv_heads,
                partial(dict, tensors.contents),
                report=attention,
                shared=tensors.shared,
            )
            stages: list[LiveStage] = []
            for stage in attention.stages:
                stages.append(LiveStage(**vars(stage), _tensor=tensors.stages.get(stage.name), _attended=drawn))
            of_attention = {**vars(attention), "stages": Stages(stages)}
            attentions.append(LiveAttention(**of_attention))
            drawings.append(drawn)
        of_trace = {**vars(trace), "attentions": tuple(attentions)}
        return cls(**of_trace, _attended=tuple(drawings))

    def _repr_html_(self) -> str:
        viewed = for_viewer(self._attended)
        return to_cell(self, Drawn(frame(viewed)) if viewed else None)

    def _text(self, format: str) -> str:
        if format != "html":
            return super()._text(format)
        viewed = for_viewer(self._attended)
        return to_text(self, "html", drawn=drawn_page(viewed) if viewed else None)


explain_fields(globals())

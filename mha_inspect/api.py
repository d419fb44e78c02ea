"""The same answers in a REPL, a debugger or a notebook: traces that print themselves and hold their tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from .answers.check.intent import Intent
from .answers.trace import report, traced
from .checkpoints.stored import opened, path_name
from .cli.export import ExportFormat, Target
from .errors import ExportError, InputError, SpecError
from .graph.evaluate import Replay
from .layers.spec import Show
from .naming.canonical import contents_of, own_axes
from .naming.kind import kinds_of, mask_notes
from .naming.stages import STAGES
from .naming.subject import Run, Subject, keep_stages
from .record.arguments import copy_module, tensors_in
from .record.xray import XRay
from .reports.common import Environment, LayerInfo
from .reports.failure import Failure
from .reports.json import read_report
from .reports.trace import Attention, Stage, Trace, attention_names
from .text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .pictures.grid import Picture
    from .pictures.stages import Attended


class _Shows:
    """Shows the fields of a report as its own."""

    report: Any

    def __getattr__(self, name: str) -> Any:
        if name == "report":  # asked for before it is there, as copying does
            raise AttributeError(name)
        return getattr(self.report, name)


@dataclass(frozen=True)
class _Kept:
    """What is held of an attention when its run is over."""

    stages: dict[str, Tensor] = field(default_factory=dict)
    turns: dict[str, Tensor] = field(default_factory=dict)
    """Of a loop over heads the stages with all of its turns side by side, in canonical axes; else empty."""


def _keep(seen: Run) -> tuple[_Kept, ...]:
    """Hold the tensors of each attention; the run has none of them any longer."""
    turns = [contents_of(seen, *found) if found[0].branches else {} for found in seen.attentions]
    own = [{stage: tensor.clone() for stage, tensor in contents.items()} for contents in turns]
    return tuple(map(_Kept, keep_stages(seen.recording, seen.attentions), own))


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
        from .cli.screen import colours, columns, in_color
        from .pictures.terminal import draw

        drawn = self._picture(head, batch_row, tokens)
        shows = in_color(sys.stdout) if color is None else color
        width = columns(sys.stdout) if width is None else width
        return draw(drawn, width=width, depth=colours() if shows else "none")

    def plot(
        self, head: int | Sequence[int] | None = None, *, batch_row: int = 0, tokens: Sequence[str] = ()
    ) -> Axes | list[Axes]:
        """Draw a heat map for each head by matplotlib, and return its axes; a list of them where heads are several.

        The arguments are those of `picture`. Raises as that, and `InputError` where matplotlib is missing.
        """
        from .pictures.plot import onto, require_matplotlib, size_of

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

    def __init__(self, attention: Attention, kept: _Kept, name: str = "") -> None:
        self.report = attention
        self._name, self._turns = name, kept.turns
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
        from .pictures.stages import Attended, canonical_contents

        kept = {stage.name: (stage._tensor, stage.axes) for stage in self.stages if stage._tensor is not None}
        sizes = {"heads": self.report.num_heads, "kv_heads": self.report.num_kv_heads, "head_dim": self.report.head_dim}
        contents = (lambda: self._turns) if self._turns else partial(canonical_contents, kept, sizes)
        return Attended(self._name, self.report.num_heads, self.report.num_kv_heads, contents)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *vars(self.report), *(stage.name for stage in self.stages)]

    def __repr__(self) -> str:
        head = f"attention {self.report.module}".rstrip() + f": num_heads {self.report.num_heads}"
        return "\n".join([head, *(f"  {stage!r}" for stage in self.stages)])


class LiveReport(_Shows):
    """A report that prints itself: the fields of a report of `mha_inspect.reports`, read as they are there."""

    def __init__(self, report: Any) -> None:
        self.report = report

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *vars(self.report)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiveReport) and self.report == other.report

    __hash__ = None  # type: ignore[assignment]  # equal reports are equal, and lists inside them cannot be hashed

    def __repr__(self) -> str:
        return self._text("plain").rstrip("\n")

    def _repr_html_(self) -> str:
        from .render import to_cell

        return to_cell(self.report)

    def to_dict(self) -> dict[str, Any]:
        """What `--format json` prints, as Python has it."""
        read: dict[str, Any] = json.loads(self._text("json"))
        return read

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a .json, .txt, .svg or .html file; an existing file is replaced whole or not at all.

        Raises `ExportError` where that cannot be done.
        """
        target = Target.of(Path(path))
        if target.format == "png":
            raise ExportError(f"{path} is a picture: draw one with .plot() of a stage, and save its figure.")
        target.write(self._saved(target.format))

    def _saved(self, format: ExportFormat) -> str:
        return self._text(format)

    def _text(self, format: Any) -> str:
        from .render import to_text

        return to_text(self.report, format)


class LiveTrace(LiveReport):
    """A trace that prints itself, and holds its tensors where they were kept."""

    def __init__(self, trace: Trace, kept: tuple[_Kept, ...] = ()) -> None:
        super().__init__(trace)
        names = attention_names(trace)
        self.attentions = tuple(
            LiveAttention(attention, kept[place] if place < len(kept) else _Kept(), names[place])
            for place, attention in enumerate(trace.attentions)
        )

    def _viewed(self) -> dict[str, Any] | None:
        """Return what a viewer shows; None where no tensors were kept that it could."""
        kept = [stage._tensor for one in self.attentions for stage in one.stages if stage._tensor is not None]
        if not kept or not all(tensor.numel() for tensor in kept):  # there is nothing to see in sizes of zero
            return None
        from .pictures.stages import for_viewer

        try:
            return for_viewer([one.attended() for one in self.attentions])
        except SpecError:
            return None

    def _repr_html_(self) -> str:
        viewed = self._viewed()
        if viewed is None:
            return super()._repr_html_()
        from .pictures.viewer import frame

        return super()._repr_html_() + frame(viewed)

    def _saved(self, format: ExportFormat) -> str:
        viewed = self._viewed() if format == "html" else None
        if viewed is None:
            return super()._saved(format)
        from .pictures.viewer import with_viewer

        return with_viewer(super()._saved(format), viewed)


def load(path: str | PathLike[str]) -> LiveTrace:
    """A trace that was saved as .json, without its tensors.

    Raises `InputError` when the file is not one.
    """
    with opened(Path(path), ".json") as (file, size):
        text = file.read(size)
    name = path_name(Path(path))
    report = read_report(text, name, "trace", Trace)
    try:
        trace = LiveTrace(report)
        repr(trace)
    except Exception as error:  # types are right, and still it is none that we wrote: axes that do not fit a shape
        raise InputError(f"{name} is not whole: {type(error).__name__} where it is shown. Make it again.") from None
    return trace


def trace(module: nn.Module, *args: Any, keep: bool = False, show: Show | None = None, **kwargs: Any) -> LiveTrace:
    """Run `module(*args, **kwargs)` and report every attention in it, found by its dataflow.

    The module is run once, as it is. Where that run hides stages in fused kernels, each is opened beside its result;
    outputs, gradients, buffers and generators are as one call leaves them.

    Args:
        module: any module.
        keep: hold the tensor of each stage: `trace(...).attentions[0].scores.tensor`.
        show: what else the report holds (`mha_inspect.Show(ops=True, stats=True, values=True)`).

    An argument of the module's own that is called keep or show goes in by place, or through `functools.partial`.
    """
    _require_module(module, "trace")
    show = show or Show()
    found, seen = traced(Subject(module, args, kwargs), show, keep=keep or show.stats or show.values)
    if not keep:
        return LiveTrace(found)
    # What was returned, and the graph behind it, is no longer held: what nobody holds need not be copied.
    seen = replace(seen, returned=None)
    return LiveTrace(found, _keep(seen))


def params(
    module: nn.Module | str | PathLike[str],
    *args: Any,
    show: Show | None = None,
    per_head: bool = False,
    like: nn.Module | None = None,
    num_heads: int | None = None,
    **kwargs: Any,
) -> LiveReport:
    """Every parameter tensor of a module, or of a checkpoint by its path, in a report that prints itself.

    With arguments, `module(*args, **kwargs)` is run once and recorded, and what each parameter is for is read off that:
    W_q, W_k, W_v and W_o, however they are packed, and with `per_head` which rows and columns belong to which head.

    A checkpoint is told by the names and shapes of its tensors. `like` is the module that it belongs to: what is
    missing or does not fit is listed, and with arguments what tensors are for is read off a run of that. `num_heads` is
    the number of heads of a checkpoint, where nothing in it tells.

    Raises `InputError` where a file cannot be read, `UnsafeFileError` where that would run code.
    """
    from .answers.params import params as report_of

    if isinstance(module, (str, PathLike)):
        from .answers.checkpoint.params import params_of_checkpoint

        against = Subject(like, args, kwargs) if like is not None and (args or kwargs) else like
        found = params_of_checkpoint(Path(module), num_heads=num_heads, per_head=per_head, show=show, like=against)
        return LiveReport(found)
    _require_module(module, "params")
    if like is not None or num_heads is not None:
        raise TypeError("like and num_heads are for a checkpoint: mha_inspect.params(path, like=module).")
    own = Subject(module, args, kwargs)
    return LiveReport(report_of(own, show, per_head=per_head, called=bool(args or kwargs)))


def compare_heads(
    heads: Sequence[int],
    layer: str | Callable[..., nn.Module] = "torch",
    *args: Any,
    pairwise: bool = False,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
    time: bool = False,
    **kwargs: Any,
) -> LiveReport:
    """The same weights and the same input through several head counts, the first being the baseline.

    A layer by its name takes settings: those of `AttentionSpec`, `InputSpec` and `RunSpec`, by name.

        compare_heads((1, 2, 4), embed_dim=64, seq_len=7, causal=True)

    A class, or a function that returns a module, is called with each number of heads, and what it returns with the
    arguments that follow. Modules are run in the mode that they come in: `.eval()` those that drop weights.

        compare_heads((1, 2, 4), functools.partial(MyAttention, 64), x, gradients=True)
        compare_heads((1, 2, 4), lambda heads: MyAttention(64, heads).eval(), x, mask)

    Args:
        heads: head counts.
        layer: a layer by its name, a class or a function.
        *args: for the forward of what a class or a function returns.
        pairwise: whether every pair is compared as well.
        gradients: whether the gradient of every parameter is compared.
        steps: how many steps each head count is trained for, to compare what it has learned.
        focus: whether to measure what each head looks at; with steps before training and after it.
        time: whether to measure how long each head count takes.
        **kwargs: settings of a layer, or arguments of the forward.

    Raises:
        SpecError: a head count does not fit, there is nothing to compare, or settings contradict each other.
        InputError: it cannot be run in float64, which rounding is measured against; or there is no gradient.
        RecordingError: the weights cannot be told by head, and what heads look at was asked for.
        DoesNotFitError: it needs more memory than there is.
    """
    asked: dict[str, Any] = {"pairwise": pairwise, "gradients": gradients, "steps": steps, "focus": focus, "time": time}
    from .answers.compare_heads import compare_heads as report_of
    from .targets.head_counts import layers_by_name, modules_with_heads
    from .targets.room import Room

    if not isinstance(layer, str):
        made = modules_with_heads(layer, heads, args, kwargs)
    elif args:
        raise TypeError(f"layer {layer!r} is built with its inputs: give settings by name, as in seq_len=12.")
    else:
        few = {**asked, "steps": min(steps, 2), "time": False}  # more of them take no more memory
        room = Room(lambda: report_of(layers_by_name(layer, heads, kwargs), **few), copies=len(heads))
        made = iter(layers_by_name(layer, heads, kwargs, room))
    return LiveReport(report_of(list(made), **asked))


def diff(
    left: nn.Module | str | PathLike[str],
    right: nn.Module | str | PathLike[str],
    *args: Any,
    same_weights: bool = False,
    num_heads: int | None = None,
    **kwargs: Any,
) -> LiveReport:
    """Where two modules part ways: both run on the same arguments, and compared stage by stage in canonical axes.

    Each keeps the weights that it has, as when a port is checked. With `same_weights` those of the one are carried into
    a copy of the other, however each packs them. Neither module is changed.

    Two checkpoints, by their paths, are compared tensor by tensor and head by head; `num_heads` is their number of
    heads where nothing in them tells.

    Raises `InputError` where a side cannot be run in float64, against which rounding is measured, or a file cannot be
    read.
    """
    if isinstance(left, (str, PathLike)) and isinstance(right, (str, PathLike)):
        from .answers.checkpoint.diff import diff_of_checkpoints

        if args or kwargs or same_weights:
            raise TypeError("two checkpoints are compared without a call: mha_inspect.diff(path, path).")
        return LiveReport(diff_of_checkpoints(Path(left), Path(right), num_heads=num_heads))
    if num_heads is not None:
        raise TypeError("num_heads is for two checkpoints: mha_inspect.diff(path, path, num_heads=8).")
    _require_module(left, "diff")
    _require_module(right, "diff")
    assert isinstance(left, nn.Module)
    assert isinstance(right, nn.Module)
    from .answers.diff import diff as report_of
    from .answers.side import Side

    def run(name: Literal["left", "right"], module: nn.Module) -> Side:
        return Side(name, Subject(copy_module(module) if same_weights else module, args, kwargs, seed=0))

    return LiveReport(report_of(run("left", left), run("right", right), carry=same_weights))


def check(
    module: nn.Module,
    *args: Any,
    intent: Intent | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    evidence_only: bool = False,
    **kwargs: Any,
) -> LiveReport:
    """Whether the attention of a module is right: it is run again with one thing changed, and what moves is looked at.

    The module is run in eval, always from the same state, and left as it was.

    Args:
        module: any module with attention in it.
        *args: of its forward.
        intent: what it is meant to do, `mha_inspect.Intent(causal=True, window=4, ...)`.
        only: names of checks: no others are made.
        skip: names of checks that are not made.
        evidence_only: run it once, and tell what one recording shows.
        **kwargs: of its forward.

    Raises:
        InputError: there is no attention in it, or the intent names no argument of its forward.
        SpecError: there is no check of a name.
    """
    from .answers.check.check import check as report_of

    _require_module(module, "check")
    for name, tensor in tensors_in((args, kwargs)):
        if not tensor.numel():
            raise InputError(
                f"an argument{f' ({shown(name)})' if name else ''} has the shape {list(tensor.shape)}, and no element "
                "to change. Give sizes of 1 or more."
            )
    asked: dict[str, Any] = {"only": only, "skip": skip, "evidence_only": evidence_only}
    return LiveReport(report_of(Subject(module, args, kwargs), intent, **asked))


def _require_module(value: object, asked: str) -> None:
    """Raise `TypeError` with what to do for what is no module."""
    if not isinstance(value, nn.Module):
        way_out = (
            "Call it inside of a block instead: with mha_inspect.recording() as r."
            if callable(value) and not isinstance(value, type)
            else "Give a module, such as MyAttention(64, 8)."
        )
        raise TypeError(f"mha_inspect.{asked} takes a torch.nn.Module, and {value!r:.60} is none. {way_out}")


class recording:  # noqa: N801 - used as `with recording() as r`, like `torch.no_grad`
    """Record whatever runs in a `with` block: a training step, a generate loop, code that nobody calls from outside.

        with mha_inspect.recording() as r:
            model(x)
        print(r.trace)

    Nothing is run twice and nothing runs otherwise than without it: what a fused kernel hides is computed once more
    beside it, and compared. A block that raises raises as ever, and the trace has the failure, with its cause where the
    evidence shows one.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._recorder = XRay(keep=keep)
        self._run: Run | None = None
        self._is_over = False
        self._failed: tuple[Failure, int] | None = None
        self._kept: tuple[_Kept, ...] = ()

    def __enter__(self) -> recording:
        self._recorder.start(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, traceback)
        self._is_over = True
        if isinstance(error, Exception):
            from .answers.failure.report import describe_failure

            with suppress(Exception):  # the error that is on its way is the one that matters
                self._failed = describe_failure(error, self._seen.recording, self._recorder, in_block=True)
        if self._keep:
            with suppress(Exception) if error is not None else nullcontext():
                self._kept = _keep(self._seen)

    def __repr__(self) -> str:
        return repr(self.trace) if self._is_over else "a recording that is still under way"

    @property
    def _seen(self) -> Run:
        """What ran, worked out when it is asked for: a training step need not wait for that."""
        if self._run is None:
            self._run = Run(self._recorder.finish(), None)
        return self._run

    @property
    def trace(self) -> LiveTrace:
        """What ran in the block. Raises `ValueError` inside it."""
        if not self._is_over:
            raise ValueError("the recording is still under way: ask for its trace after the with block.")
        seen = self._seen
        import torch

        replay = Replay(seen.recording, {})
        trace = report(
            seen,
            own_axes(seen),
            Show(),
            environment=Environment(torch.__version__, "", "", None),
            layer=LayerInfo("recording", {}),
            kinds=kinds_of(seen, replay),
        )
        trace = replace(trace, notes=(*trace.notes, *mask_notes(seen, replay)))
        if self._failed is not None:
            failure, completed = self._failed
            trace = replace(trace, attentions=trace.attentions[:completed], failure=failure)
        return LiveTrace(trace, self._kept)

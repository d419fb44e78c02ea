"""The same answers in a REPL, a debugger or a notebook: traces that print themselves and hold their tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from .answers.trace import report, traced
from .cli.export import Target
from .naming.canonical import own_axes
from .naming.stages import STAGES
from .record.copying import copy_module
from .record.kept import Stages, keep_stages
from .record.run import AttemptRecorder
from .record.subject import Run, Subject
from .reports.common import Environment, LayerInfo
from .reports.failure import Failure
from .reports.json import read_report
from .reports.trace import Attention, Stage, Trace
from .targets.spec import Show


class _Shows:
    """Shows the fields of a report as its own."""

    report: Any

    def __getattr__(self, name: str) -> Any:
        if name == "report":  # asked for before it is there, as copying does
            raise AttributeError(name)
        return getattr(self.report, name)


class LiveStage(_Shows):
    """A stage of a trace: the fields of `reports.trace.Stage`, and its tensor where tensors were kept."""

    def __init__(self, stage: Stage, tensor: Tensor | None) -> None:
        self.report = stage
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """The content, laid out as `axes` says. Raises `ValueError` where tensors were not kept."""
        if self._tensor is None:
            raise ValueError(f"the tensor of {self.report.name} was not kept: trace with keep=True.")
        return self._tensor

    def __repr__(self) -> str:
        stage = self.report
        return f"{stage.name} {list(stage.shape)} {stage.axes}: {stage.formula}"


class LiveAttention(_Shows):
    """An attention of a trace: the fields of `reports.trace.Attention`, and each stage by its name."""

    def __init__(self, attention: Attention, tensors: dict[str, Tensor]) -> None:
        self.report = attention
        self.stages = tuple(LiveStage(stage, tensors.get(stage.name)) for stage in attention.stages)

    def __getattr__(self, name: str) -> Any:
        stages = {stage.name: stage for stage in vars(self).get("stages", ())}
        if name in STAGES and stages:
            if name not in stages:
                raise AttributeError(f"this attention has no {name}. It has {', '.join(stages)}.")
            return stages[name]
        return super().__getattr__(name)

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
        target.write(self._text(target.format))

    def _text(self, format: Any) -> str:
        from .render import to_text

        return to_text(self.report, format)


class LiveTrace(LiveReport):
    """A trace that prints itself, and holds its tensors where they were kept."""

    def __init__(self, trace: Trace, tensors: tuple[dict[str, Tensor], ...] = ()) -> None:
        super().__init__(trace)
        self.attentions = tuple(
            LiveAttention(attention, tensors[place] if place < len(tensors) else {})
            for place, attention in enumerate(trace.attentions)
        )


def load(path: str | PathLike[str]) -> LiveTrace:
    """A trace that was saved as .json, without its tensors.

    Raises `InputError` when the file is not one.
    """
    return LiveTrace(read_report(Path(path), "trace", Trace))


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
    recording, attentions = seen.recording, seen.attentions
    del seen  # what was returned, and the graph behind it, is no longer held: what nobody holds need not be copied
    return LiveTrace(found, keep_stages(recording, attentions))


def params(
    module: nn.Module, *args: Any, show: Show | None = None, per_head: bool = False, **kwargs: Any
) -> LiveReport:
    """Every parameter tensor of a module: `mha_inspect.answers.params.params`, in a report that prints itself.

    With arguments, `module(*args, **kwargs)` is run once and recorded, and what each parameter is for is read off that:
    W_q, W_k, W_v and W_o, however they are packed, and with `per_head` which rows and columns belong to which head.
    """
    from .answers.params import params as report_of

    _require_module(module, "params")
    own = Subject(module, args, kwargs) if args or kwargs else None
    return LiveReport(report_of(module, own=own, show=show, per_head=per_head))


def compare_heads(
    heads: Sequence[int],
    layer: str | Callable[..., nn.Module] = "torch",
    *args: Any,
    pairwise: bool = False,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
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
        focus: whether to measure what each head looks at.
        **kwargs: settings of a layer, or arguments of the forward.

    Raises:
        SpecError: a head count does not fit, there is nothing to compare, or settings contradict each other.
        InputError: it cannot be run in float64, which rounding is measured against; or there is no gradient.
        RecordingError: the weights cannot be told by head, and what heads look at was asked for.
        DoesNotFitError: it needs more memory than there is.
    """
    asked: dict[str, Any] = {"pairwise": pairwise, "gradients": gradients, "steps": steps, "focus": focus}
    from .answers.compare_heads import compare_heads as report_of
    from .answers.head_runs import Counted
    from .targets.head_counts import layers_by_name, modules_with_heads

    if not isinstance(layer, str):
        made = modules_with_heads(layer, heads, args, kwargs)
    elif args:
        raise TypeError(f"layer {layer!r} is built with its inputs: give settings by name, as in seq_len=12.")
    else:
        made = iter(layers_by_name(layer, heads, kwargs))
    counted = [Counted(count, own, is_known=isinstance(layer, str)) for count, own in made]
    return LiveReport(report_of(counted, **asked))


def diff(left: nn.Module, right: nn.Module, *args: Any, same_weights: bool = False, **kwargs: Any) -> LiveReport:
    """Where two modules part ways: both run on the same arguments, and compared stage by stage in canonical axes.

    Each keeps the weights that it has, as when a port is checked. With `same_weights` those of the one are carried into
    a copy of the other, however each packs them. Neither module is changed.

    Raises `InputError` where a side cannot be run in float64, against which rounding is measured.
    """
    _require_module(left, "diff")
    _require_module(right, "diff")
    from .answers.module_diff import diff_modules
    from .answers.sides.module_run import ModuleSide

    def side(name: Literal["left", "right"], module: nn.Module) -> ModuleSide:
        own = Subject(copy_module(module), args, kwargs)
        return ModuleSide(name, type(module).__name__, own, LayerInfo(type(module).__name__, {}), seed=0)

    return LiveReport(diff_modules(side("left", left), side("right", right), carry=same_weights))


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
        self._recorder = AttemptRecorder(keep=keep)
        self._run: Run | None = None
        self._is_over = False
        self._failed: tuple[Failure, int] | None = None
        self._stages: Stages = ()

    def __enter__(self) -> recording:
        self._recorder.__enter__()
        self._recorder.boundary = sys._getframe(1)
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
                self._stages = keep_stages(self._seen.recording, self._seen.attentions)

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

        trace = report(
            seen,
            own_axes(seen),
            Show(),
            environment=Environment(torch.__version__, "", "", None),
            layer=LayerInfo("recording", {}),
        )
        if self._failed is not None:
            failure, completed = self._failed
            trace = replace(trace, attentions=trace.attentions[:completed], failure=failure)
        return LiveTrace(trace, self._stages)

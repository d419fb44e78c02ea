"""The public functions: the answers of the command line for a REPL, a debugger, a notebook, or code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from .answers.check.intent import Intent
from .answers.trace import of_block, traced
from .errors import ForwardError, InputError
from .layers.spec import Show, require_steps
from .notebook import KeptTensors, LiveTrace, keep_tensors
from .record.arguments import copy_module, tensors_in
from .record.xray import XRay
from .reports.check import CheckReport
from .reports.compare_heads import CompareHeadsReport
from .reports.diff import CheckpointDiffReport, DiffReport
from .reports.params import ParamsReport
from .reports.trace import Failure
from .running.subject import Run, Subject
from .text import shown


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
    require_module(module, "trace")
    show = show or Show()
    try:
        report, run = traced(Subject(module, args, kwargs), show, keep=keep or show.stats or show.values)
    except ForwardError as failed:
        failed.trace = LiveTrace.of(failed.trace)
        raise
    # What was returned, and the graph behind it, is no longer held: what nobody holds need not be copied.
    run = replace(run, returned=None)
    return LiveTrace.of(report, keep_tensors(run) if keep else ())


def params(
    module: nn.Module | str | PathLike[str],
    *args: Any,
    show: Show | None = None,
    per_head: bool = False,
    like: nn.Module | None = None,
    num_heads: int | None = None,
    **kwargs: Any,
) -> ParamsReport:
    """Report every parameter tensor of a module, or of a checkpoint by its path; the report prints itself.

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
        return params_of_checkpoint(Path(module), num_heads=num_heads, per_head=per_head, show=show, like=against)
    require_module(module, "params")
    if like is not None or num_heads is not None:
        raise TypeError("like and num_heads are for a checkpoint: mha_inspect.params(path, like=module).")
    return report_of(Subject(module, args, kwargs), show, per_head=per_head, called=bool(args or kwargs))


def compare_heads(
    heads: Sequence[int],
    layer: str | Callable[..., nn.Module] = "torch",
    *args: Any,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
    time: bool = False,
    **kwargs: Any,
) -> CompareHeadsReport:
    """Run the same weights and the same input through several head counts, the first being the baseline.

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
    from .answers.compare_heads import compare_heads as report_of
    from .call.load import counts_of, layers_by_name, modules_with_heads

    if steps:
        require_steps(steps)
    heads = counts_of(heads)
    if isinstance(layer, str) and args:
        raise TypeError(f"layer {layer!r} is built with its inputs: give settings by name, as in seq_len=12.")
    if isinstance(layer, str):
        subjects = layers_by_name(layer, heads, kwargs)
    else:
        subjects = list(modules_with_heads(layer, heads, args, kwargs))
    return report_of(subjects, gradients=gradients, steps=steps, focus=focus, time=time)


def diff(
    left: nn.Module | str | PathLike[str],
    right: nn.Module | str | PathLike[str],
    *args: Any,
    same_weights: bool = False,
    num_heads: int | None = None,
    **kwargs: Any,
) -> DiffReport | CheckpointDiffReport:
    """Show where two modules part ways: both run on the same arguments, and are compared stage by stage.

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
            raise TypeError(
                f"{str(left)!r} and {str(right)!r} are paths of checkpoints, which are compared without a call: "
                "mha_inspect.diff(path, path). A module stands for itself."
            )
        return diff_of_checkpoints(Path(left), Path(right), num_heads=num_heads)
    if num_heads is not None:
        raise TypeError("num_heads is for two checkpoints: mha_inspect.diff(path, path, num_heads=8).")
    from .answers.diff import Side
    from .answers.diff import diff as report_of

    modules = [require_module(module, "diff") for module in (left, right)]
    modules = [copy_module(module) for module in modules] if same_weights else modules
    first, second = (Subject(module, args, kwargs, seed=0) for module in modules)
    return report_of(Side("left", first), Side("right", second), carry=same_weights)


def check(
    module: nn.Module,
    *args: Any,
    intent: Intent | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    evidence_only: bool = False,
    **kwargs: Any,
) -> CheckReport:
    """Check whether the attention of a module is right: run it again with one thing changed, and see what moves.

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

    require_module(module, "check")
    for name, tensor in tensors_in((args, kwargs)):
        if not tensor.numel():
            raise InputError(
                f"an argument{f' ({shown(name)})' if name else ''} has the shape {list(tensor.shape)}, and no element "
                "to change. Give sizes of 1 or more."
            )
    return report_of(Subject(module, args, kwargs), intent, only=only, skip=skip, evidence_only=evidence_only)


def require_module(value: object, asked: str) -> nn.Module:
    """Return a module as it is. Raises `TypeError` with what to do for what is none."""
    if isinstance(value, nn.Module):
        return value
    way_out = "Give a module, such as MyAttention(64, 8)."
    if callable(value) and not isinstance(value, type):
        way_out = "Call it inside of a block instead: with mha_inspect.recording() as r."
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
        self._is_over = False
        self._failed: tuple[Failure, int] | None = None
        self._kept: Sequence[KeptTensors] = ()

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
                self._failed = describe_failure(error, self._ran.recording, self._recorder, in_block=True)
        if self._keep:
            with suppress(Exception) if error is not None else nullcontext():
                self._kept = keep_tensors(self._ran)

    def __repr__(self) -> str:
        return repr(self.trace) if self._is_over else "a recording that is still under way"

    @cached_property
    def _ran(self) -> Run:
        """What ran, worked out when it is asked for: a training step need not wait for that."""
        return Run(self._recorder.finish())

    @property
    def trace(self) -> LiveTrace:
        """What ran in the block. Raises `ValueError` inside it."""
        if not self._is_over:
            raise ValueError("the recording is still under way: ask for its trace after the with block.")
        return LiveTrace.of(of_block(self._ran, self._failed), self._kept)

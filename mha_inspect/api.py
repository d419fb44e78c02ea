"""Define the public functions: the command line's answers for a REPL, a debugger, a notebook or code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from .checks.intent import Intent
from .errors import ForwardError, InputError, MhaInspectError
from .layers.spec import Show, require_steps
from .notebook import Kept, LiveTrace, keep_tensors
from .questions.decode_steps import with_steps
from .questions.trace import of_block, run_of, traced
from .record.arguments import copy_module, tensors_in
from .record.xray import XRay
from .reports.check import CheckReport
from .reports.compare_heads import CompareHeadsReport
from .reports.diff import CheckpointDiffReport, DiffReport
from .reports.params import ParamsReport
from .reports.trace import Failure
from .running.subject import Run, Subject
from .text import shown

if TYPE_CHECKING:
    from .failures.call import CallWatch


def trace(
    module: nn.Module, *args: Any, keep: bool = False, show: Show | None = None, judge: bool = True, **kwargs: Any
) -> LiveTrace:
    """Run `module(*args, **kwargs)` and return a report of every attention in it, found by its dataflow.

    The module is run once, unchanged. Fused kernels are also computed step by step to show the stages that they hide.
    Outputs, gradients, buffers and random generators are as after a single call.

    Args:
        module: any module.
        keep: keep the tensor of each stage: `trace(...).attentions[0].scores.tensor`.
        show: additional content of the report (`mha_inspect.Show(ops=True, stats=True, values=True)`).
        judge: say what is wrong. `judge=False` keeps no tensor and takes no further runs.

    Returns:
        The trace. `.verdict` is its first line, `.ok` whether nothing is surely wrong, `.findings` what is wrong, and
        `.attentions` has a stage for each attribute: `.attentions[0].scores.shape`. `print` shows the whole page.

    Example:
        >>> layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
        >>> trace = mha_inspect.trace(layer, *[torch.randn(2, 9, 16)] * 3)
        >>> trace.verdict
        'nothing wrong in this run: 1 attention, 4 heads of 4'
        >>> trace.attentions[0].scores.shape, trace.attentions[0].scores.axes
        ((2, 4, 9, 9), 'batch heads query key')

    If the module has its own argument named keep, show or judge, pass it by position or through `functools.partial`.
    """
    require_module(module, "trace")
    show = show or Show()
    try:
        is_kept = keep or show.stats or show.values
        report, run = traced(Subject(module, args, kwargs), show, keep=is_kept, judge=judge)
    except ForwardError as failed:
        failed.trace = LiveTrace.of(failed.trace)
        raise
    # Drop the result and its autograd graph: kept tensors whose memory is used by nothing else need no copy.
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
    """Return a report of every parameter tensor of a module, or of the checkpoint at a path; the report prints itself.

    With arguments, `module(*args, **kwargs)` is run once, and the recording shows the use of each parameter: W_q, W_k,
    W_v and W_o in any packing, and with `per_head` the rows and columns of each head.

    A checkpoint is read by the names and shapes of its tensors. `like` is the module that it belongs to: missing and
    wrong tensors are listed, and with arguments a run of that module shows the use of each tensor. `num_heads` is the
    number of heads, if the checkpoint does not determine it.

    Raises `InputError` if a file cannot be read, `UnsafeFileError` if reading it would run code.
    """
    from .questions.params import params as report_of

    if isinstance(module, (str, PathLike)):
        from .checkpoints.params import params_of_checkpoint

        against = Subject(like, args, kwargs) if like is not None and (args or kwargs) else like
        return params_of_checkpoint(Path(module), num_heads=num_heads, per_head=per_head, show=show, like=against)
    require_module(module, "params")
    if like is not None or num_heads is not None:
        raise TypeError("like and num_heads apply to a checkpoint. Use mha_inspect.params(path, like=module).")
    return report_of(Subject(module, args, kwargs), show, per_head=per_head, called=bool(args or kwargs))


def compare_heads(
    heads: Sequence[int],
    layer: str | Callable[..., nn.Module] = "torch",
    *args: Any,
    steps: int = 0,
    focus: bool = False,
    time: bool = False,
    **kwargs: Any,
) -> CompareHeadsReport:
    """Run the same weights and input with several head counts, and return a comparison with the first.

    A layer given by name takes the settings of `AttentionSpec`, `InputSpec` and `RunSpec` as keyword arguments.

        compare_heads((1, 2, 4), embed_dim=64, seq_len=7, causal=True)

    A class, or a function that returns a module, is called with each head count, and the module is called with the
    remaining arguments. Modules run in their current mode: call `.eval()` if they use dropout.

        compare_heads((1, 2, 4), functools.partial(MyAttention, 64), x, steps=1)
        compare_heads((1, 2, 4), lambda heads: MyAttention(64, heads).eval(), x, mask)

    Args:
        heads: the head counts; the first is the baseline.
        layer: the name of a layer, a class or a function.
        *args: arguments of the forward, for a class or a function.
        steps: number of training steps for each head count, to compare the learned weights; 1 is the first gradient.
        focus: whether to measure which keys each head attends to, with the weights as given.
        time: whether to measure the time that each head count takes.
        **kwargs: settings of a layer, or arguments of the forward.

    Raises:
        SpecError: a head count does not fit, there is nothing to compare, or settings contradict each other.
        InputError: the module cannot run in float64, which rounding is measured against, or it has no gradient.
        RecordingError: `focus` is set, and the weights cannot be separated by head.
        DoesNotFitError: it needs more memory than is free.
    """
    from .call.load import counts_of, layers_by_name, modules_with_heads
    from .questions.compare_heads import compare_heads as report_of

    if steps:
        require_steps(steps)
    heads = counts_of(heads)
    if isinstance(layer, str) and args:
        raise TypeError(f"layer {layer!r} takes no positional arguments. Give settings by name, e.g. seq_len=12.")
    if isinstance(layer, str):
        subjects = layers_by_name(layer, heads, kwargs)
    else:
        subjects = list(modules_with_heads(layer, heads, args, kwargs))
    return report_of(subjects, steps=steps, focus=focus, time=time)


def diff(
    left: nn.Module | str | PathLike[str],
    right: nn.Module | str | PathLike[str],
    *args: Any,
    same_weights: bool = True,
    num_heads: int | None = None,
    **kwargs: Any,
) -> DiffReport | CheckpointDiffReport:
    """Run two modules with the same weights and arguments, and return where they differ, stage by stage.

    As in the command, one module's weights are copied into a copy of the other, in any packing. `report.weights` says
    what was copied. The modules themselves are not changed.

    `same_weights=False` keeps each side's own weights, as needed to check a port that has its weights already.

    Two checkpoints, given by their paths, are compared tensor by tensor and head by head; `num_heads` is their number
    of heads, if the files do not determine it.

    Raises `InputError` if a module cannot run in float64, which rounding is measured against, a module cannot be
    copied, or a file cannot be read.
    """
    if isinstance(left, (str, PathLike)) and isinstance(right, (str, PathLike)):
        from .checkpoints.diff import diff_of_checkpoints

        if args or kwargs:
            raise TypeError(
                f"{str(left)!r} and {str(right)!r} are paths of checkpoints, which take no other arguments. "
                "Use mha_inspect.diff(path, path), or give the modules themselves."
            )
        return diff_of_checkpoints(Path(left), Path(right), num_heads=num_heads)
    if num_heads is not None:
        raise TypeError("num_heads applies to two checkpoints. Use mha_inspect.diff(path, path, num_heads=8).")
    from .compare.diff import Side
    from .compare.diff import diff as report_of

    modules = [require_module(module, "diff") for module in (left, right)]
    lazy = next((name for module in modules for name, p in module.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise InputError(f"parameter {lazy!r} is lazy: it has no shape before the first call. Run the module once.")
    if same_weights:
        modules = [_copied(module) for module in modules]
    first, second = (Subject(module, args, kwargs, seed=0) for module in modules)
    return report_of(Side("left", first), Side("right", second), same_weights=same_weights)


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a side of `diff`. Raises `InputError` with the way out for a module that cannot be copied."""
    try:
        return copy_module(module)
    except InputError as error:
        raise InputError(f"{error} Or compare it with its own weights: same_weights=False.") from error


def check(
    module: nn.Module,
    *args: Any,
    intent: Intent | None = None,
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    **kwargs: Any,
) -> CheckReport:
    """Check whether the attention of a module is right: change one input at a time, and see which outputs change.

    The module is run in eval mode, always from the same state, and is unchanged afterwards.

    Args:
        module: any module with attention.
        *args: arguments of its forward.
        intent: its intended behavior: `mha_inspect.Intent(causal=True, window=4, ...)`.
        only: name or names of the checks to run, e.g. `only="heads"`; all others are skipped.
        skip: name or names of the checks to skip.
        **kwargs: arguments of its forward.

    Raises:
        InputError: the module has no attention, or the intent names an argument that its forward does not have.
        SpecError: a check name is unknown.
        ForwardError: the forward raised on these arguments; its `trace` says where, and the cause if one was found.
        TypeError: an argument belongs into the intent: `causal=True`, and the forward has no such argument.
    """
    from .checks.check import check as report_of

    require_module(module, "check")
    _require_intent(intent)
    for name, tensor in tensors_in((args, kwargs)):
        if not tensor.numel():
            raise InputError(
                f"an argument{f' ({shown(name)})' if name else ''} has the shape {list(tensor.shape)}, which has no "
                "elements to change. Give sizes of 1 or more."
            )
    subject = Subject(module, args, kwargs)
    try:
        return report_of(subject, intent, only=only, skip=skip)
    except MhaInspectError:
        raise
    except Exception:
        _raise_failure_of(subject)
        raise


def _require_intent(value: object) -> None:
    """Raise `TypeError` with a way out for an intent that is none, e.g. a dict."""
    if value is None or isinstance(value, Intent):
        return
    way_out = "Give mha_inspect.Intent(causal=True)."
    if isinstance(value, dict) and value:
        settings = ", ".join(f"{name}={setting!r:.20}" for name, setting in value.items())
        way_out = f"Give mha_inspect.Intent({settings})."
    raise TypeError(f"intent has to be a mha_inspect.Intent, got {value!r:.60}. {way_out}")


def _raise_failure_of(subject: Subject) -> None:
    """Raise `ForwardError`, with the cause if one is found, if the forward raises in eval on its own arguments."""
    before = subject.state()
    try:
        subject.module.eval()
        with subject.settings():
            run_of(replace(subject, grad=False), Show(), keep=False, before=subject.state())
    except ForwardError:
        raise
    except Exception:  # the forward is not to blame: the first error says more
        return
    finally:
        before.restore()


def require_module(value: object, asked: str) -> nn.Module:
    """Return a module unchanged. Raises `TypeError` with a way out for anything else."""
    if isinstance(value, nn.Module):
        return value
    way_out = "Give a module, e.g. MyAttention(64, 8)."
    if callable(value) and not isinstance(value, type):
        way_out = "Call it in a block instead: with mha_inspect.recording() as r."
    raise TypeError(f"mha_inspect.{asked} expects a torch.nn.Module, got {value!r:.60}. {way_out}")


def _add_cause(error: Exception, failure: Failure) -> None:
    """Add the cause of a failure to its error, or else what was called: Python prints it below the traceback."""
    said = [] if failure.cause is None else [failure.cause.explanation, failure.cause.fix]
    if failure.cause is None:
        for operand in failure.operands:
            said.append(f"{operand.name} {list(operand.shape)} is {operand.axes}.")
    if said:
        error.add_note(f"mha-inspect: {' '.join(filter(None, said))}")


class recording:  # noqa: N801 - used as `with recording() as r`, like `torch.no_grad`
    """Record the code in a `with` block: e.g. a training step, a generate loop, or a function deep inside a program.

        with mha_inspect.recording() as r:
            model(x)
        print(r.trace)

    The code runs once, with the same results as without the recording. Each fused kernel is also computed step by step
    and compared. If the block raises, the error passes through with its cause as a note, if the evidence shows one, and
    the trace describes the failure.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._recorder = XRay(keep=keep)
        self._is_over = False
        self._failed: tuple[Failure, int] | None = None
        self._watch: CallWatch | None = None
        """Knows the torch call that raised; None where the block runs as it is."""
        self._kept: Sequence[Kept] = ()

    def __enter__(self) -> recording:
        self._recorder.start(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, traceback)
        self._is_over = True
        if isinstance(error, Exception):
            from .failures.report import describe_failure

            with suppress(Exception):  # the block's own error matters more
                ran = self._ran.recording
                self._failed = describe_failure(error, ran, self._recorder, watch=self._watch, in_block=True)
                _add_cause(error, self._failed[0])
        if self._keep:
            with suppress(Exception) if error is not None else nullcontext():
                self._kept = keep_tensors(self._ran)

    def __repr__(self) -> str:
        return repr(self.trace) if self._is_over else "a recording that is still running"

    def __str__(self) -> str:
        return str(self.trace) if self._is_over else repr(self)

    @cached_property
    def _ran(self) -> Run:
        """The recorded run, built on first use, so that a training step does not wait for it."""
        return Run(self._recorder.finish())

    @property
    def trace(self) -> LiveTrace:
        """The trace of the block. Raises `ValueError` inside the block."""
        if not self._is_over:
            raise ValueError("the recording is still running. Read its trace after the with block.")
        return LiveTrace.of(with_steps(of_block(self._ran, self._failed, self._recorder.called())), self._kept)


class explain(recording):  # noqa: N801 - used as `with explain()`
    """Say why the code in a `with` block raised: the cause, if one is found, stands below the error's traceback.

        with mha_inspect.explain():
            model(x)

    The error is the block's own, and without one nothing is said. The block runs once. While torch's calls are watched,
    torch does not take its fast path for whole layers.
    """

    def __enter__(self) -> explain:
        from .failures.call import CallWatch

        self._recorder.start(sys._getframe(1))
        self._watch = CallWatch()
        self._watching = ExitStack()
        self._watching.enter_context(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watching.close()
        super().__exit__(kind, error, traceback)

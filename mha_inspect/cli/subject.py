"""From options to a subject: a layer of the catalog or a target, its inputs, and how it is run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import ForwardError, MhaInspectError, SpecError, is_out_of_memory
from ..files.memory import free_memory, limited_to_what_is_free
from ..layers.catalog import LAYERS
from ..layers.spec import Show
from ..making.vocabulary import Flags, flag_of
from ..render.screen import Tick, progress
from ..text import byte_size, did_you_mean, first_few, shown
from .messages import does_not_fit
from .options import Options, how_to_give_sizes, is_target
from .output import print_and_export, say
from .process import import_torch, resume_collection
from .ranks import place

if TYPE_CHECKING:
    from ..call.call import Call, TargetFailedError
    from ..making.target import Target
    from ..reports.trace import Trace
    from ..running.subject import Subject


def require_open_head_count(options: Options, heads: Sequence[int], way: str) -> None:
    """Raise `SpecError` if --set fixes the head count, or one of `heads` is below 1. `way` is the way out."""

    for name in options.settings_by_name():
        if flag_of(name.rpartition(".")[2]) == "num_heads":
            raise SpecError(f"--set {name} fixes the number of heads. Drop it: {way}")
    if min(heads) < 1:
        raise SpecError(f"heads {min(heads)} is not a number of heads: each must be 1 or more. Try --heads 1,2.")


def require_head_count(target: Target, command: str) -> None:
    """Raise `SpecError` if no argument of the target is a number of heads."""
    flags = [flag_of(name) for name in target.arguments]
    if "num_heads" not in flags:
        public = [name for name in target.arguments if not name.startswith("_")]
        names = first_few(public, 12) or "none"
        raise SpecError(
            f"{target.name} takes no number of heads (its arguments: {names}), so {command} cannot vary it. "
            "Name a class or a function that takes one, e.g. as num_heads, n_head or nhead."
        )


def check(text: str | None, options: Options, command: str) -> None:
    """Check a layer or a target as far as possible before torch is imported."""
    if text is not None:
        check_target(text, options, command)
        return
    options.take_settings(command)
    check_layer(options, [options.single_head_count(command)])


def check_layer(options: Options, counts: Sequence[int]) -> None:
    """Check a layer with each of these head counts as far as possible."""
    for count in counts:
        LAYERS[options.layer].check(options.attention_spec(count), options.input_spec(), options.run_spec())


def check_target(
    text: str, options: Options, command: str, *, beside_layer: bool = False, many_heads: bool = False
) -> None:
    """Check a target as far as possible before it is imported.

    With `beside_layer` --layer names another side; with `many_heads` --num-heads may be a list.
    """
    from ..making.importing import require_file
    from ..making.settings import parse_shapes

    if not is_target(text):
        raise SpecError(_not_a_target(text, command))
    require_file(text)
    if "layer" in options.typed and not beside_layer:
        raise SpecError(f"--layer {options.layer} and {shown(text)} are two layers. Drop one.")
    options.require_seed()
    options.take_settings_of_run()
    parse_shapes(options.input_shape or [])
    if not many_heads:
        options.flags()


def _not_a_target(text: str, command: str) -> str:
    """Return the message for a text that does not have the form of a target."""
    from ..files.checkpoint import is_checkpoint
    from ..making.importing import FORMS

    if is_checkpoint(text):
        if not Path(text).exists():
            return f"{shown(text)} was not found. Give the path of an existing file."
        way = f"`mha-inspect params {shown(text)}`"
        return f"{shown(text)} is a checkpoint: it has tensors, but no forward to run. Use {way}."
    if Path(text).is_file():
        return (
            f"{shown(text)} is not a supported file. Give Python, e.g. path/to/file.py:Name, or a "
            "checkpoint (.safetensors, .pt, .pth, .bin)."
        )
    if "." in text and all(part.isidentifier() for part in text.split(".")):
        return f"{shown(text)} is missing the name of a class. Write {text}:Name."
    near = did_you_mean(text, LAYERS)
    way = how_to_give_sizes(command)
    return f"{shown(text)} is not a target: write {FORMS}, or the name of a layer.{near} {way}."


@contextmanager
def waiting(options: Options, words: str) -> Iterator[Tick]:
    """Show `words` and every tick at a terminal while the block runs."""
    with progress(words, quiet=options.quiet) as tick, _fitting(options):
        yield tick


@contextmanager
def running(options: Options, words: str) -> Iterator[Tick]:
    """Build and run subjects in the block, as `waiting`. Their output goes to stderr; gradients are as asked.

    If a forward raises, stdout gets what `trace` shows of that run, and the error its cause.
    """
    _say_what_scores_take(options)
    try:
        with _building(options, words) as tick:
            yield tick
    except MhaInspectError as error:
        failed = getattr(error, "subject", None)
        trace = None if failed is None or place() is not None else _failed_trace(failed, options)
        if trace is None or trace.failure is None:
            raise
        print_and_export(trace, options, None)
        cause = trace.failure.cause
        if cause is None:
            raise
        raise cast("TargetFailedError", error).with_way(cause.explanation, cause.fix) from error


def _say_what_scores_take(options: Options) -> None:
    """Say before anything runs that the scores of one head alone, `query key`, may take more memory than is free."""
    free = free_memory()
    queries, keys = options.seq_len, options.key_len or options.seq_len
    size = 4 * queries * keys
    if free is None or size <= free or options.device != "cpu":
        return
    note = (
        f"Where scores are written out, those of one head, {queries} × {keys}, take {byte_size(size)}, and "
        f"{byte_size(free)} are free. For shapes alone: --device meta."
    )
    print_notes([note], options)


def _failed_trace(failed: Subject, options: Options) -> Trace | None:
    """Return the trace of a forward that raised, as `trace` shows it; None if it does not raise again."""
    from ..questions.trace import traced

    try:
        with _building(options, f"tracing {failed.label}"):
            traced(failed, Show(), keep=False)
    except ForwardError as error:
        return error.trace
    except Exception:  # its arguments do not fit, or memory ran out: the first error says so
        return None
    return None


@contextmanager
def _building(options: Options, words: str) -> Iterator[Tick]:
    with progress(words, quiet=options.quiet) as tick:
        import_torch()
        import torch

        from ..making.importing import stdout_for_the_answer

        with _fitting(options), stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
            yield tick


@contextmanager
def _fitting(options: Options) -> Iterator[None]:
    """Raise `DoesNotFitError` if the block needs more memory than is free."""
    resume_collection()  # before torch is imported: the objects so far are permanent
    try:
        with limited_to_what_is_free(options.device):
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise does_not_fit(error) from None
        raise


def load(text: str | None, options: Options, tick: Tick = lambda words: None) -> Subject:
    """Build a layer or a target, and make its inputs; `tick` is called with whose code is run.

    An error of the forward is ignored here: it is raised again when the forward is recorded.
    """
    from ..call.load import load_layer, subject_of

    if text is None:
        spec = options.attention_spec(options.single_head_count("trace"))
        return load_layer(spec, options.input_spec(), options.run_spec(), options.layer)
    tick("importing and building it")
    target = load_target(text, options)
    tick("its forward")
    return subject_of(target, call_of(target, options, may_fail=True), options.seed, options.grad)


def load_target(
    text: str,
    options: Options,
    side_settings: Mapping[str, str] | None = None,
    sizes: Mapping[str, Any] | None = None,
    elsewhere: Collection[str] = (),
    flag: str = "--set",
) -> Target:
    """Build a target from the options, and from a side's settings of this flag, which override those of --set.

    `sizes` replace options that the user did not set. Options in `elsewhere` apply to the other side.
    """
    from ..making.importing import is_file_alone
    from ..making.in_file import choose_in_file
    from ..making.target import TargetSpec
    from ..making.target import load_target as build

    asked_flags = options.flags()
    values = dict(asked_flags.values)
    for name, size in (sizes or {}).items():
        if name not in options.given:
            values[name] = size
    spec = TargetSpec(
        flags=Flags(values, options.given, options.typed - frozenset(elsewhere), flag),
        dtype=options.dtype if "dtype" in options.given else None,
        device=options.device,
        training=options.train,
        seed=options.seed,
    )
    settings = options.settings_by_name() | dict(side_settings or {})
    if not is_file_alone(text):
        return build(text, settings, spec)
    if text not in options.chosen:

        def attends(target: Target) -> bool | None:
            return _attends(target, options)

        options.chosen[text] = choose_in_file(text, lambda name: build(name, settings, spec), attends)
    chosen = options.chosen[text]
    target = build(chosen.target, settings, spec)
    return replace(target, notes=(*filter(None, [chosen.note]), *target.notes))


def _attends(target: Target, options: Options) -> bool | None:
    """Return whether a run of a target has an attention; None if it raises."""
    from ..call.load import subject_of

    try:
        subject = subject_of(target, call_of(target, options), options.seed, options.grad)
        return bool(subject.fresh().recorded().attentions)
    except Exception as error:  # code of the user may raise anything
        if is_out_of_memory(error):
            raise
        return None


def call_of(target: Target, options: Options, like: Call | None = None, *, may_fail: bool = False) -> Call:
    """Make the arguments of a target's forward from the options, as `call.load.call_target` does."""
    from ..call.inputs import Asked
    from ..call.load import call_target
    from ..making.settings import parse_shapes

    shapes = parse_shapes(options.input_shape or [])
    asked = Asked(options.input_spec(), options.flags(), shapes, options.seed)
    return call_target(target, asked, like=like, may_fail=may_fail)


def print_notes(notes: Iterable[str], options: Options) -> None:
    """Print notes on stderr, unless --quiet."""
    for note in () if options.quiet else notes:
        say(note)

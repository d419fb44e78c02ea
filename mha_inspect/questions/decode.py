"""Decode: a prompt, then one token at a time with a cache, beside one forward over all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..checks.arguments import CACHES, Arguments, Source, masks_by_item, second_output, sources_of
from ..checks.intent import Intent
from ..compare.calls import reason_of
from ..compare.calls.pair import Continued
from ..compare.comparable_run import difference_of, measured_in
from ..compare.pair import Why
from ..errors import ForwardError, InputError
from ..layers.spec import Show
from ..measure.ranks import require_alone
from ..measure.run_report import drops_at_random, environment_of, layer_of, report
from ..naming.visibility import kinds_of
from ..record.arguments import first_tensor
from ..record.rounding import beside, rounding_error
from ..reports.trace import DecodeProof, Step, Trace
from ..running.subject import Run, Subject
from ..text import listed, plural, small
from .decode_steps import cache_bytes_of, jumps, step_of
from .trace import run_of, traced

_NO_CACHE = re.compile(r"mask|pos|label|target|^use_|^output_|^return_", re.IGNORECASE)
"""Optional arguments of these names do not take the cache."""


def decoded(subject: Subject, show: Show, steps: int) -> tuple[Trace, Run]:
    """Run a prompt, then `steps` single tokens with a cache; return the trace of the last call, and its run.

    The trace also has a row for each call, and compares the last position of each with one forward over all tokens.
    The subject is unchanged afterwards.

    Raises `InputError` if no prompt is left or no cache is found, and `ForwardError` if a call raises; its trace has
    the rows of the calls before.
    """
    require_alone(subject, "--decode")
    loop = _Loop(subject, show, steps)
    outcome = loop.outcome()
    trouble = _trouble(outcome)
    if trouble:
        repaired = _with_positions(loop, trouble)
        if repaired is not None:
            return repaired.trace, repaired.run
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.trace, outcome.run


@dataclass(frozen=True)
class _Decoded:
    """The trace of the last call, with the rows of all calls, and its run."""

    trace: Trace
    run: Run


def _trouble(outcome: _Decoded | ForwardError | InputError) -> str:
    """Return how the calls do not give the output of one forward: `a call differs by 0.1`; empty if they do."""
    if isinstance(outcome, InputError):
        return "no cache is found"
    if isinstance(outcome, ForwardError):
        return "a call raises"
    proof = outcome.trace.decode
    if proof is None or proof.verdict != "differs" or not proof.max_abs_difference:
        return ""
    return f"a call differs by {small(proof.max_abs_difference)}"


def _with_positions(loop: _Loop, trouble: str) -> _Decoded | None:
    """Return the loop with the first argument of positions that mends its trouble; None if there is none."""
    for name in Arguments(loop.subject).unset_positions():
        outcome = replace(loop, positions=name).outcome()
        if isinstance(outcome, Exception):
            continue
        trace = outcome.trace
        if trace.decode is not None and trace.decode.verdict == "same":
            note = f"{name} was given and advanced: without it, {trouble}."
            return replace(outcome, trace=replace(trace, notes=(note, *trace.notes)))
    return None


# -- the loop ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loop:
    """A prompt, then single tokens with a cache."""

    subject: Subject
    show: Show
    """The content of the trace of the last call."""
    steps: int
    positions: str | None = None
    """A further argument to advance."""

    def outcome(self) -> _Decoded | ForwardError | InputError:
        """Return the decoded trace, or the error of a call."""
        try:
            return self._decoded()
        except (ForwardError, InputError) as error:
            return error

    def _decoded(self) -> _Decoded:
        """Run one forward over all tokens and the calls, and compare them."""
        with self.subject.apart() as fresh, _naming_call("The forward over all tokens raised.", ()):
            _, run = _recorded(fresh)
            whole = _Whole.of(run)
        with self.subject.apart() as fresh:
            arguments = Arguments(fresh)
            source = _source(fresh, arguments, whole.output, self.steps)
            pieces = _Pieces(fresh, arguments, source, whole.by_item, self.positions)
            calls = self._run(pieces)
        proof = self._proof(whole, source, calls)
        rows = calls.rows()
        notes = (*jumps(rows, may_drop=False), *calls.trace.notes)
        trace = replace(calls.trace, steps=tuple(rows), decode=proof, notes=notes)
        return _Decoded(trace, calls.run)

    def _run(self, pieces: _Pieces) -> _Calls:
        """Run each call after the other. Raises `InputError` if a call sees no key of an earlier call."""
        cache: str | None = None
        past = None
        calls: list[_Call] = []
        for step, (start, stop) in enumerate(pairwise(self._places(pieces.source))):
            changes = pieces.changes(start, stop)
            if past is not None and not cache:
                cache = _cache_argument(pieces, changes, past)
            if past is not None and cache:
                changes[cache] = past
            called = pieces.with_changes(changes)
            with _naming_call(self._raised(step, start), [call.row for call in calls]):
                trace, run = traced(called, self.show, keep=True) if step == self.steps else _recorded(called)
            takes_past = bool(cache) and past is not None
            row = step_of(trace.attentions, start, continued=takes_past)
            if step and not row.past:
                raise _no_cache(pieces.arguments, cache)
            past = second_output(run.returned)
            output = first_tensor(run.returned).detach().clone()  # the next call may overwrite it
            calls.append(_Call(stop, row, cache_bytes_of(past), output))
        return _Calls(calls, cache, trace, run)

    def _places(self, source: Source) -> list[int]:
        """Return where the calls begin and end: `[0, 5, 6, 7]` for a prompt of 5 tokens and two steps."""
        return [0, *range(source.length - self.steps, source.length + 1)]

    def _raised(self, step: int, start: int) -> str:
        """Return the sentence on a call that raises."""
        if step == 0:
            return "The prompt raised."
        return f"Step {step} of {self.steps} raised: 1 token after {start}."

    # -- the proof ----------------------------------------------------------------------------------------------------

    def _proof(self, whole: _Whole, source: Source, calls: _Calls) -> DecodeProof:
        """Compare the calls with one forward; if an output differs, say why."""
        proof = _compared(self.subject, whole.output, calls)
        if proof.verdict != "differs":
            return proof
        if not any("causal" in kind for kind in kinds_of(whole.run)):
            note = "no attention is causal: in the forward over all tokens, earlier tokens attend to later tokens"
            return _not_compared(source.length, note)
        stop = _first_different(whole.output, calls.outputs(), proof.noise_floor or 0.0)
        reason = None
        with suppress(ForwardError):  # a call may raise when it is repeated
            reason = self._reason(source, calls.cache, stop)
        return proof if reason is None else replace(proof, reason=reason.sentence, fix=reason.fix)

    def _reason(self, source: Source, cache: str | None, last: int) -> Why | None:
        """Return what the call up to a place has unlike one forward, from a repetition of the calls; None if unknown.

        Raises `ForwardError` if a call raises now.
        """
        with self.subject.apart() as fresh:
            narrow = _recorded(fresh, keep=True)[1]
            whole = narrow.beside(fresh.wider_run(narrow))
            leaves = fresh.leaves(whole.recording)
        with self.subject.apart() as fresh:
            pieces = _Pieces(fresh, Arguments(fresh), source, masks_by_item(whole), self.positions)
            past = None
            for start, stop in pairwise(self._places(source)):
                changes = pieces.changes(start, stop)
                if past is not None and cache is not None:
                    changes[cache] = past
                called = pieces.with_changes(changes)
                run = _recorded(called, keep=stop == last)[1]
                if stop == last:
                    return reason_of(
                        Continued(
                            whole=whole,
                            call=run,
                            start=start,
                            stop=stop,
                            whole_leaves=leaves,
                            call_leaves=called.leaves(run.recording),
                            subject=self.subject,
                        )
                    )
                past = second_output(run.returned)
        return None


@dataclass(frozen=True)
class _Whole:
    """One forward over all tokens."""

    run: Run
    output: Tensor
    by_item: Collection[str]
    """The masks that are `batch key`."""

    @classmethod
    def of(cls, run: Run) -> _Whole:
        return cls(run, first_tensor(run.returned).detach(), masks_by_item(run))


@dataclass(frozen=True)
class _Call:
    """One call that has run. The cache that it returned is not kept."""

    stop: int
    """The number of tokens so far."""
    row: Step
    cache_bytes: int
    """Bytes of the cache that it returned."""
    output: Tensor


@dataclass(frozen=True)
class _Calls:
    """All calls that have run."""

    calls: Sequence[_Call]
    cache: str | None
    """The argument that took the cache; None if the subject keeps its cache itself."""
    trace: Trace
    """The trace of the last call."""
    run: Run
    """The run of the last call."""

    def rows(self) -> list[Step]:
        """Return the row of each call, with the size of the cache that it returned."""
        if not self.cache:
            return [call.row for call in self.calls]
        return [replace(call.row, cache_bytes=call.cache_bytes or call.row.cache_bytes) for call in self.calls]

    def outputs(self) -> dict[int, Tensor]:
        """Return the output of each call, by the number of tokens so far."""
        return {call.stop: call.output for call in self.calls}


@dataclass(frozen=True)
class _Pieces:
    """The arguments of calls with some of the tokens."""

    subject: Subject
    arguments: Arguments
    source: Source
    by_item: Collection[str]
    """The masks that are `batch key`."""
    positions: str | None
    """A further argument to advance."""

    def changes(self, start: int, stop: int) -> dict[str, Any]:
        """Return the arguments of a call with the tokens from `start` to `stop`, without a cache."""
        return self.arguments.piece(self.source, start, stop, by_item=self.by_item, positions=self.positions)

    def with_changes(self, changes: Mapping[str, Any]) -> Subject:
        """Return the subject with changed arguments."""
        args, kwargs = self.arguments.call(changes)
        return replace(self.subject, args=args, kwargs=kwargs, without_ones=None)


def _recorded(subject: Subject, *, keep: bool = False) -> tuple[Trace, Run]:
    """Return the trace of a recorded run, without notes, and the run. Raises `ForwardError` if it raises."""
    with subject.settings():
        run = run_of(subject, Show(), keep=keep, before=subject.state())
    trace = report(
        run,
        Show(),
        environment=environment_of(subject),
        layer=layer_of(subject),
        leaves=subject.leaves(run.recording),
    )
    return trace, run


def _source(subject: Subject, arguments: Arguments, whole: Tensor, steps: int) -> Source:
    """Return the argument with the tokens. Raises `InputError` if no prompt is left beside the steps."""
    sources = sources_of(subject, arguments.values, Intent(), lambda _: whole.dim() == 2)
    length = sources[0].length if sources else 0
    if 0 < steps < length:
        return sources[0]
    why = "leaves no prompt" if steps > 0 else "has no step"
    most = ""
    if length > 1:
        most = f"--decode 1 to {length - 1}, or "
    tokens = plural(length, "token")
    raise InputError(f"decode {steps} {why}: the input has {tokens}. Use {most}more tokens.")


@contextmanager
def _naming_call(where: str, rows: Sequence[Step]) -> Iterator[None]:
    """Add to a `ForwardError` of the body which call raised, and the rows of the calls before."""
    try:
        yield
    except ForwardError as error:
        error.trace = replace(error.trace, notes=(where, *error.trace.notes), steps=tuple(rows) or None)
        raise


# -- the cache --------------------------------------------------------------------------------------------------------


def _may_take_cache(arguments: Arguments) -> list[str]:
    """Return the arguments that may take the cache, those of a usual name first."""
    usual: list[str] = []
    further: list[str] = []
    for name in arguments.parameters:
        if not arguments.is_free(name) or _NO_CACHE.search(name):
            continue
        if name in CACHES:
            usual.append(name)
        else:
            further.append(name)
    return [*sorted(usual, key=CACHES.index), *further]


def _cache_argument(pieces: _Pieces, changes: Mapping[str, Any], past: Any) -> str | None:
    """Return the argument that takes the cache: one of a usual name, else the first with which a step runs."""
    for name in _may_take_cache(pieces.arguments):
        if name in CACHES:
            return name
        with suppress(Exception):  # user code may raise anything on a value that is not meant for it
            with pieces.with_changes({**changes, name: past}).apart() as attempt:
                attempt.plain()
            return name
    return None


def _no_cache(arguments: Arguments, cache: str | None) -> InputError:
    """Return the error for a step that sees no earlier token, given the argument that took a cache."""
    candidates = _may_take_cache(arguments)
    if not candidates:
        way_out = (
            "the forward neither takes nor keeps a cache. Trace it without --decode, or see mha-inspect help caches."
        )
    elif cache:
        way_out = f"with {cache}, a step sees no earlier token. Use it in the forward."
    else:
        way_out = f"the forward returns nothing that it takes ({listed(candidates)}). Return it second."
    return InputError(f"no cache was found: {way_out}")


# -- the proof --------------------------------------------------------------------------------------------------------


def _compared(subject: Subject, whole: Tensor, calls: _Calls) -> DecodeProof:
    """Compare the last position of each call with that of one forward."""
    outputs = calls.outputs()
    length = max(outputs)
    if whole.is_meta:
        return _not_compared(length, "device meta has shapes and no numbers")
    if drops_at_random(calls.run):
        return _not_compared(length, "the forward draws random numbers")
    positions = _last_positions(whole, outputs)
    if not positions:
        returned = list(outputs[length].shape)
        note = f"a step returns {returned}, and the forward over all tokens {list(whole.shape)}"
        return _not_compared(length, note)
    of_whole = torch.cat([ours.flatten() for ours, _ in positions.values()])
    of_calls = torch.cat([theirs.flatten() for _, theirs in positions.values()])
    difference = difference_of(of_whole, of_calls, None)
    if difference.max_abs_difference:
        difference = difference_of(of_whole, of_calls, rounding_of(subject, whole))
    return DecodeProof(**vars(difference), tokens=length)


def _not_compared(tokens: int, note: str) -> DecodeProof:
    """Return the proof that says why nothing was compared."""
    return DecodeProof(None, None, None, None, None, tokens, note)


def _last_positions(whole: Tensor, outputs: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the last position of each call in one forward and in the call, by the number of tokens so far.

    The prompt's other positions are not compared: at padding, they may see anything.
    """
    length = max(outputs)
    positions: dict[int, tuple[Tensor, Tensor]] = {}
    for stop in sorted(outputs):
        output = outputs[stop]
        if stop == length and whole.shape == output.shape:
            positions[stop] = whole, output
        for axis, size in enumerate(whole.shape):
            if output.dim() != whole.dim() or size != length or not output.shape[axis]:
                continue
            position = whole.narrow(axis, stop - 1, 1), output.narrow(axis, -1, 1)
            if position[0].shape == position[1].shape:
                positions[stop] = position
                break
    return positions


def _first_different(whole: Tensor, outputs: Mapping[int, Tensor], floor: float) -> int:
    """Return the number of tokens so far in the first call whose last position differs from that of one forward."""
    for stop, position in _last_positions(whole, outputs).items():
        if difference_of(*position, floor).verdict == "differs":
            return stop
    return max(outputs)


def rounding_of(subject: Subject, whole: Tensor, pick: Callable[[Any], Tensor] = first_tensor) -> float:
    """Return the rounding error of a result of the forward, measured against float64, or by half a digit."""
    dtype, unit = beside(whole.dtype)
    with torch.no_grad(), subject.apart() as fresh, subject.apart() as shaken:
        try:
            exact = measured_in(subject.name, fresh.copied, dtype, lambda copy: pick(copy.plain()))
        except InputError:
            exact, unit = pick(shaken.shaken().plain()), 1.0  # a cache of the first has another dtype
    return rounding_error(whole, exact) * unit

"""Decode: a prompt, then one token at a time with a cache, beside one forward over all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ForwardError, InputError
from ..layers.spec import Show
from ..naming.visibility import kinds_of
from ..record.arguments import first_tensor, parts_of
from ..record.rounding import beside, distances, judge, rounding_error
from ..reports.trace import AttentionReport, DecodeProof, Position, Stage, Step, Trace
from ..running.subject import Run, Subject
from ..text import listed, plural, small, spans
from .check.arguments import CACHES, Arguments, Source, masks_by_item, second_output, sources_of
from .check.intent import Intent
from .comparable_run import measured_in
from .continuation import Continued, Reason, reason_of
from .ranks import require_alone
from .run_report import drops_at_random, environment_of, layer_of, report
from .trace import run_of, traced

_NO_CACHE = re.compile(r"mask|pos|label|target|^use_|^output_|^return_", re.IGNORECASE)
"""Optional arguments of these names do not take the cache."""
_SCORES = ("scores", "masked_scores", "weights")


def decoded(
    subject: Subject, show: Show, steps: int, cache: str | None = None, positions: str | None = None
) -> tuple[Trace, Run]:
    """Run a prompt, then `steps` single tokens with a cache; return the trace of the last call, and its run.

    The trace also has a row for each call, and compares the last position of each with one forward over all tokens.
    `positions` is a further argument to advance. The subject is unchanged afterwards.

    Raises `InputError` if no prompt is left, no cache is found, or the forward has no such argument, and `ForwardError`
    if a call raises; its trace has the rows of the calls before.
    """
    require_alone(subject, "--decode")
    failed: ForwardError | InputError | None = None
    try:
        trace, run = _decoded(subject, show, steps, cache, positions)
        apart = (trace.decode and trace.decode.verdict == "differs" and trace.decode.max_abs_difference) or 0.0
        without = f"a call differs by {small(apart)}"
    except (ForwardError, InputError) as error:
        failed, apart = error, 1.0
        without = "no cache is found" if isinstance(error, InputError) else "a call raises"
    for name in Arguments(subject).positions(unset=True) if apart and positions is None else ():
        with suppress(ForwardError, InputError):
            again, run_again = _decoded(subject, show, steps, cache, name)
            if again.decode is not None and again.decode.verdict == "same":
                said = f"{name} was given and advanced: without it, {without}."
                return replace(again, notes=(said, *again.notes)), run_again
    if failed is not None:
        raise failed
    if apart and len(Arguments(subject).parameters) > 2:
        trace = replace(trace, notes=("If an argument takes the positions, give --positions NAME.", *trace.notes))
    return trace, run


def _decoded(subject: Subject, show: Show, steps: int, cache: str | None, positions: str | None) -> tuple[Trace, Run]:
    """Return what `decoded` does, without trying further positions."""
    rows: list[Step] = []
    with subject.apart() as fresh, _saying("The forward over all tokens raised.", rows):
        ran = _recorded(fresh)[1]
        whole, by_item = first_tensor(ran.returned).detach(), masks_by_item(ran)
    with subject.apart() as fresh:
        arguments = Arguments(fresh)
        for name in filter(None, (cache, positions)):
            arguments.require(name)
        source = _source(fresh, arguments, whole, steps)
        past, sizes, ends = None, list[int](), dict[int, Tensor]()
        for step, (start, stop) in enumerate(pairwise([0, *range(source.length - steps, source.length + 1)])):
            changes = arguments.piece(source, start, stop, by_item=by_item, positions=positions)
            if past is not None:
                cache = cache or _cache_argument(fresh, arguments, changes, past)
                changes |= {cache: past} if cache else {}
            called = _with(fresh, arguments, changes)
            where = f"Step {step} of {steps} raised: 1 token after {start}." if step else "The prompt raised."
            with _saying(where, rows):
                trace, run = traced(called, show, keep=True) if step == steps else _recorded(called)
            rows.append(step_of(trace.attentions, start, continued=bool(cache and past is not None)))
            if step and not rows[-1].past:
                takes = listed(_may_take_cache(arguments))
                why = f"the forward returns nothing that it takes ({takes})"
                why = f"with {cache}, a step sees no earlier token" if cache else why
                none = "the forward takes no cache, and keeps no earlier key. Trace it without --decode."
                raise InputError(f"no cache was found: {f'{why}. Give --cache NAME.' if takes else none}")
            past = second_output(run.returned)
            sizes.append(cache_bytes_of(past))
            ends[stop] = first_tensor(run.returned).detach().clone()  # the next call may overwrite it
    if cache:
        rows = [replace(row, cache_bytes=size or row.cache_bytes) for row, size in zip(rows, sizes, strict=True)]
    proof = _proof(subject, whole, ends, run)
    if proof.verdict == "differs" and not any("causal" in kind for kind in kinds_of(ran)):
        note = "no attention is causal: in the forward over all tokens, earlier tokens attend to later tokens"
        proof = DecodeProof(None, None, None, None, None, source.length, note)
    if proof.verdict == "differs":
        stop = _first_different(whole, ends, proof.noise_floor or 0.0)
        with suppress(ForwardError):  # a call may raise when it is repeated
            reason = _reason(subject, source, [0, *sorted(ends)], stop, cache, positions)
            proof = proof if reason is None else replace(proof, reason=reason.sentence, fix=reason.fix)
    notes = (*jumps(rows, may_drop=False), *trace.notes)
    return replace(trace, steps=tuple(rows), decode=proof, notes=notes), run


def _first_different(whole: Tensor, ends: dict[int, Tensor], floor: float) -> int:
    """Return the number of tokens so far in the first call whose last position differs from that of one forward."""
    for stop in sorted(ends):
        pair = _last_of(whole, ends[stop], stop, max(ends))
        if pair is not None and judge(distances(*pair)[0], floor)[1] == "differs":
            return stop
    return max(ends)


def _reason(
    subject: Subject, source: Source, places: list[int], last: int, cache: str | None, positions: str | None
) -> Reason | None:
    """Return what the call up to a place has unlike one forward, from a repetition of the calls; None if unknown.

    Raises `ForwardError` if a call raises now.
    """
    with subject.apart() as fresh:
        whole = _recorded(fresh, keep=True)[1]
        whole, leaves = whole.beside(fresh.wider_run(whole)), fresh.leaves(whole.recording)
    with subject.apart() as fresh:
        arguments, past = Arguments(fresh), None
        for start, stop in pairwise(places):
            changes = arguments.piece(source, start, stop, by_item=masks_by_item(whole), positions=positions)
            called = _with(fresh, arguments, changes if past is None or cache is None else {**changes, cache: past})
            run = _recorded(called, keep=stop == last)[1]
            if stop == last:
                return reason_of(Continued(whole, run, start, stop, leaves, called.leaves(run.recording)))
            past = second_output(run.returned)
    return None


def _recorded(subject: Subject, *, keep: bool = False) -> tuple[Trace, Run]:
    """Return the trace of a recorded run, without notes, and the run. Raises `ForwardError` if it raises."""
    with subject.settings():
        run = run_of(subject, Show(), keep=keep, before=subject.state())
    environment, leaves = environment_of(subject), subject.leaves(run.recording)
    return report(run, Show(), environment=environment, layer=layer_of(subject), leaves=leaves), run


def _with(subject: Subject, arguments: Arguments, changes: dict[str, Any]) -> Subject:
    args, kwargs = arguments.call(changes)
    return replace(subject, args=args, kwargs=kwargs, without_ones=None)


def _source(subject: Subject, arguments: Arguments, whole: Tensor, steps: int) -> Source:
    """Return the argument with the tokens. Raises `InputError` if no prompt is left beside the steps."""
    sources = sources_of(subject, arguments.values, Intent(), lambda _: whole.dim() == 2)
    length = sources[0].length if sources else 0
    if not 0 < steps < length:
        why = "leaves no prompt" if steps > 0 else "has no step"
        most = f"--decode 1 to {length - 1}, or " if length > 1 else ""
        tokens = plural(length, "token")
        raise InputError(f"decode {steps} {why}: the input has {tokens}. Use {most}more tokens.")
    return sources[0]


def _may_take_cache(arguments: Arguments) -> list[str]:
    """Return the arguments that may take the cache, those of a usual name first."""
    free = [name for name in arguments.parameters if arguments.is_free(name) and not _NO_CACHE.search(name)]
    return sorted(free, key=lambda name: CACHES.index(name) if name in CACHES else len(CACHES))


def _cache_argument(subject: Subject, arguments: Arguments, changes: dict[str, Any], past: Any) -> str | None:
    """Return the argument that takes the cache: one of a usual name, else the first with which a step runs."""
    for name in _may_take_cache(arguments):
        with suppress(Exception):  # user code may raise anything on a value that is not meant for it
            if name not in CACHES:
                with _with(subject, arguments, {**changes, name: past}).apart() as tried:
                    tried.plain()
            return name
    return None


@contextmanager
def _saying(where: str, rows: Sequence[Step]) -> Iterator[None]:
    """Add to a `ForwardError` of the body which call raised, and the rows of the calls before."""
    try:
        yield
    except ForwardError as failed:
        failed.trace = replace(failed.trace, notes=(where, *failed.trace.notes), steps=tuple(rows) or None)
        raise


def step_of(attentions: Sequence[AttentionReport], before: int, *, continued: bool = False) -> Step:
    """Return the row of a call with these attentions, after calls with `before` tokens.

    Keys beside those of its own tokens are of earlier calls if the call is `continued` or a cache is seen.

    Raises `InputError` without attentions.
    """
    if not attentions:
        raise InputError("no attention was found: nothing here computes softmax(QKᵀ)V. Check the target.")
    continued = continued or any(attention.cache for attention in attentions)
    # The scores may have a group of heads in place of the queries.
    asked = [_size(attention, "query", ("query", "q_proj", "output", *_SCORES)) for attention in attentions]
    queries = min(asked)
    of_tokens = [attention for attention, number in zip(attentions, asked, strict=True) if number == queries]
    widest = max(of_tokens, key=lambda attention: _size(attention, "key", _SCORES))
    keys = _size(widest, "key", _SCORES)
    rotated = _rotated(of_tokens)
    return Step(
        queries=queries,
        # Empty slots of a static cache may not be known.
        past=min(before, max(keys - queries, 0)) if continued else 0,
        new=queries,
        scores=next((stage.shape for stage in widest.stages if stage.name in _SCORES), ()),
        cache_bytes=sum(map(_read_bytes, attentions)),
        flops=sum(stage.flops for attention in attentions for stage in attention.stages),
        query_offset=None if rotated is None else rotated.query_offset,
        key_offset=None if rotated is None else rotated.key_offset,
    )


def _rotated(attentions: Sequence[AttentionReport]) -> Position | None:
    """Return the rotary position of a call; None if nothing is rotated, or attentions have several."""
    positions = [each.position for each in attentions if each.position is not None and each.position.kind == "rotary"]
    offsets = {(position.query_offset, position.key_offset) for position in positions}
    return positions[0] if len(offsets) == 1 else None


def jumps(steps: Sequence[Step], *, may_drop: bool) -> list[str]:
    """Return a sentence if a call does not go on at the position after that of the call before it; else nothing.

    With `may_drop`, a call may go on behind the keys that are kept: tokens that were drafted and rejected are no more.
    """
    for before, step in pairwise(steps):
        expected = _next_position(before, step)
        if expected is None or step.query_offset == expected or (may_drop and step.query_offset == step.past):
            continue
        return [f"The positions jump: {_positions(before)}, then {_positions(step)}; {expected} was expected."]
    return []


def _next_position(before: Step, step: Step) -> int | None:
    """Return the position of the first query of a call that continues another one; None if it is unknown."""
    if before.query_offset is None or step.query_offset is None or not step.past:
        return None
    if step.key_offset in (None, step.query_offset):
        return before.query_offset + before.queries
    return step.key_offset + step.past  # cached keys are rotated anew, by their rows


def _positions(step: Step) -> str:
    """Return the positions of a call as a range, `0–5`; empty if they are unknown."""
    if step.query_offset is None:
        return ""
    return spans(range(step.query_offset, step.query_offset + step.queries))


def _size(attention: AttentionReport, axis: str, names: Sequence[str]) -> int:
    """Return the size of an axis in the first of these stages that names it; 1 if none does."""
    stages = {stage.name: stage for stage in attention.stages}
    named = (_sizes(stages[name]) for name in names if name in stages)
    return next((sizes[axis] for sizes in named if axis in sizes), 1)


def _sizes(stage: Stage) -> dict[str, int]:
    return dict(zip(re.findall(r"\([^)]*\)|\S+", stage.axes), stage.shape, strict=False))


def _read_bytes(attention: AttentionReport) -> int:
    """Return the bytes of the keys and values, in as many heads as are projected."""
    total = 0
    for stage in attention.stages:
        if stage.name in ("k_heads", "v_heads"):
            sizes = _sizes(stage)
            merged = attention.num_kv_heads if "kv_heads" in stage.axes else attention.num_heads
            heads = sizes.get("kv_heads", sizes.get("heads", merged))
            total += stage.nbytes * min(attention.num_kv_heads, heads) // heads
    return total


def cache_bytes_of(cache: Any) -> int:
    """Return the bytes of the tensors in a cache: nested containers, or an object with them as attributes.

    Counters and lengths do not count: they have fewer than two dimensions.
    """
    tensors, queue, seen = list[Tensor](), [cache], set[int]()
    while queue:
        value = queue.pop()
        if id(value) not in seen and not isinstance(value, (nn.Module, type)):
            seen.add(id(value))
            tensors += [value] if isinstance(value, Tensor) else []
            queue += [part for _, part in parts_of(value)] or getattr(value, "__dict__", {}).values()
    return sum(tensor.nbytes for tensor in tensors if tensor.dim() > 1)


def with_steps(trace: Trace) -> Trace:
    """Return the trace of a block, with a row for each call if it is a loop that attends to a cache token by token."""
    modules = [attention.module for attention in trace.attentions]
    for size in range(1, len(modules) // 2 + 1 if trace.failure is None else 0):
        # A call may run a module several times.
        if modules[size:] != modules[:-size] or len(modules) % size:
            continue
        rows: list[Step] = []
        for start in range(0, len(modules), size):
            rows.append(step_of(trace.attentions[start : start + size], sum(row.new for row in rows)))
        if all(row.queries == 1 and row.past for row in rows[1:]):
            return replace(trace, steps=tuple(rows), notes=(*jumps(rows, may_drop=True), *trace.notes))
    return trace


def _proof(subject: Subject, whole: Tensor, ends: dict[int, Tensor], run: Run) -> DecodeProof:
    """Compare the last position of each call with that of one forward; `ends` maps the tokens so far to the output."""
    length, note = max(ends), ""
    pairs = [pair for stop, output in ends.items() if (pair := _last_of(whole, output, stop, length)) is not None]
    if whole.is_meta:
        note = "device meta has shapes and no numbers"
    elif drops_at_random(run):
        note = "the forward draws random numbers"
    elif not pairs:
        note = f"a step returns {list(ends[length].shape)}, and the forward over all tokens {list(whole.shape)}"
    if note:
        return DecodeProof(None, None, None, None, None, length, note)
    there, here = (torch.cat([side.flatten() for side in sides]) for sides in zip(*pairs, strict=True))
    largest, relative = distances(there, here)
    floor = rounding_of(subject, whole) if largest else None
    return DecodeProof(largest, relative, floor, *judge(largest, floor or 0.0), length)


def _last_of(whole: Tensor, output: Tensor, stop: int, length: int) -> tuple[Tensor, Tensor] | None:
    """Return position `stop - 1` of an output of all tokens, and the last of an output; None if shapes differ.

    The prompt's other positions are not compared: at padding, they may see anything.
    """
    for axis, size in enumerate(whole.shape if output.dim() == whole.dim() else ()):
        if size == length and output.shape[axis]:
            there, here = whole.narrow(axis, stop - 1, 1), output.narrow(axis, -1, 1)
            if there.shape == here.shape:
                return there, here
    return (whole, output) if stop == length and whole.shape == output.shape else None


def rounding_of(subject: Subject, whole: Tensor, pick: Callable[[Any], Tensor] = first_tensor) -> float:
    """Return the rounding error of a result of the forward, measured against float64, or by half a digit."""
    dtype, unit = beside(whole.dtype)
    with torch.no_grad(), subject.apart() as fresh, subject.apart() as other:
        try:
            exact = measured_in(subject.name, fresh.copied, dtype, lambda copy: pick(copy.plain()))
        except InputError:
            exact, unit = pick(other.shaken().plain()), 1.0  # a cache of the first has another dtype
    return rounding_error(whole, exact) * unit

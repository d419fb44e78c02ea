"""What masks among the arguments do: which keys they mask for whom, and whether padding moves real outputs.

Each mask is changed at some keys, and what the scores show then is compared with what they showed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...reports.check import Fact, Finding, SkippedCheck
from ...text import shortened, spans
from .arguments import Source
from .evidence import OTHER_SIZES, Evidence, NotPossibleError, UndeclaredError, remembered
from .scores import masks_everything, softmax, weak_masks
from .sight import SeenKeys

_MOST = 2
"""Mask arguments that are looked at."""
_KEYS_FIX = "the mask belongs to the keys: mask[:, None, None, :] beside batch heads query key."


@dataclass(frozen=True)
class Masked:
    """A run in which a mask argument has another value at some keys."""

    name: str
    value: Tensor
    """What it has elsewhere."""
    other: Tensor
    """What it has there."""
    keys: Tensor
    """`batch key`: True where it is the other value."""
    source: Source
    """The tokens that are the keys."""
    pairs: tuple[tuple[SeenKeys, SeenKeys], ...]
    """What each attention whose keys these are sees with the mask as it was given, and with this one."""
    hides: bool
    """Whether any attention sees less."""
    opens: bool
    """Whether any attention sees more."""
    output: Tensor
    faults: list[Finding]
    """What is wrong with its weights."""
    meaning: tuple[Tensor, Tensor]
    """The value that keeps a key, and the one that ignores it."""
    places: str
    """The keys of the first row at which it is the other value."""
    line: str
    """The line of the mask; empty where no attention has these keys."""


@remembered
def masked_runs(evidence: Evidence) -> list[Masked | Fact]:
    """Return a run for each mask argument, or a fact where the forward does not take another value.

    The declared padding mask is among them where it was not given: it is run for that, and keeps all.
    """
    values, name = evidence.values, evidence.intent.padding
    masks = {n: v for n, v in values.items() if isinstance(v, Tensor) and ("mask" in n or v.dtype == torch.bool)}
    runs: list[Masked | Fact] = []
    if name is not None and values.get(name) is None and any(s.positions is not None for s in evidence.sources):
        source = _padded_source(evidence, name)
        ones = torch.ones(source.rows, source.length, dtype=torch.bool) & (evidence.intent.padding_true != "ignore")
        run = _masked_run(evidence, name, ones)
        runs += filter(None, [_masked_run(evidence, name, ones.long()) if isinstance(run, Fact) else run])
    for name, value in masks.items():
        runs += filter(None, [_masked_run(evidence, name, value) if value.dim() > 1 and len(runs) < _MOST else None])
    return runs


def _masked_run(evidence: Evidence, name: str, given: Tensor) -> Masked | Fact | None:
    """Return a run with another value in a mask; None where its keys are not known, or it has several values there."""
    source = next((s for s in evidence.sources if s.positions is not None and s.length == given.shape[-1]), None)
    if source is None or source.length < 4 or name in source.names:
        return None
    keys = torch.zeros(source.rows, source.length, dtype=torch.bool)
    count = max(2, source.length // 4)
    causal = any(not bool(sight.seen[:, 0, 1:].any()) for sight in evidence.sights)
    # Behind a causal mask nobody sees the last keys; the first one is left, so that each query has a key.
    keys[:, slice(1, 1 + count) if causal else slice(source.length - count, None)] = True
    by_row = given.shape[0] == source.rows > 1 and (given.dim() > 2 or given.shape[0] != given.shape[1])
    if by_row:
        keys[1::2] = False
    value = given[..., keys[0]].flatten()[0]
    if not bool((given[..., keys[0]] == value).all()):
        return None
    additive = given.is_floating_point() and bool((given <= 0).all()) and (given.dim() > 2 or bool(given.any()))
    other = ((-1e9 if value == 0 else 0.0) * torch.ones(()) if additive else 1 - value.long()).to(given)
    changed = given.clone()
    changed[slice(None, None, 2) if by_row else slice(None), ..., keys[0]] = other
    try:
        masked = evidence.with_arguments({name: changed})
        output, faults = masked.output, [] if any(map(masks_everything, masked.sights)) else list(weak_masks(masked))
    except NotPossibleError as error:
        return Fact("mask", f"{name}: the forward does not take another value ({error})")
    with suppress(NotPossibleError):
        faults += softmax(masked)
    pairs = tuple(
        (before, after)
        for before, after in zip(evidence.sights, masked.sights, strict=False)
        if before.seen.shape == after.seen.shape and before.seen.shape[::2] == keys.shape
    )
    hides = any(bool((before.seen & ~after.seen).any()) for before, after in pairs)
    opens = any(bool((after.seen & ~before.seen).any()) for before, after in pairs)
    meaning, line = (value, other) if hides else (other, value), pairs[0][1].line if pairs else ""
    places = f"keys {_places(keys[0])} of row 0"
    return Masked(name, value, other, keys, source, pairs, hides, opens, output, faults, meaning, places, line)


def _padded_source(evidence: Evidence, name: str) -> Source:
    given = evidence.values.get(name)
    sources = [source for source in evidence.sources if source.positions is not None]
    fitting = [source for source in sources if isinstance(given, Tensor) and given.shape[-1] == source.length]
    if not fitting and any(word in name for word in ("encoder", "memory", "key", "src", "context")):
        fitting = sources[1:2]
    return (fitting or sources)[0]


def mask_facts(evidence: Evidence) -> Iterator[Fact]:
    """Yield which value of each mask argument keeps a key."""
    for run in masked_runs(evidence):
        if isinstance(run, Fact):
            yield run
        elif run.hides != run.opens:
            kept, ignored = run.meaning
            yield Fact("mask", f"{run.name}: {_word(kept)} keeps a key, {_word(ignored)} ignores it")
        elif run.pairs and not run.hides:
            place = int(run.keys[0].nonzero()[0])
            yield Fact("mask", f"{run.name} bars nothing here: key {place} is seen alike with either value")


def _word(value: Tensor) -> str:
    return f"{value.item():.3g}" if value.is_floating_point() else str(value.item())


def _places(marks: Tensor) -> str:
    return shortened(spans(int(place) for place in marks.nonzero().flatten()), 40)


def padding(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """Yield where padding moves real outputs, or its mask means the opposite of what was declared."""
    name, findings = evidence.intent.padding, list[Finding]()
    for run in masked_runs(evidence):
        if isinstance(run, Masked):
            proof = f"With {run.name} {_word(run.other)} at some keys."
            findings += [
                *_misplaced(run, declared=run.name == name),
                *(_of_declared(evidence, run) if run.name == name else ()),
                *_nan(evidence, run),
                *(replace(fault, evidence=f"{proof} {fault.evidence}") for fault in run.faults if fault.sure),
            ]
    yield from findings
    if name is None and not findings:
        raise UndeclaredError("--mask NAME=keep")
    if name is None or any(finding.sure for finding in findings):
        return
    if not evidence.follows or evidence.source.batch is None:
        raise NotPossibleError("the output has no place for each token of each row")
    source = _padded_source(evidence, name)
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens: give more")
    for result in _of_padding(evidence, name, source):
        yield replace(result, source=evidence.mask_line) if isinstance(result, Finding) else result


def _misplaced(run: Masked, *, declared: bool) -> Iterator[Finding]:
    """Yield the first attention that masks queries for keys, or keys of another row of the batch."""
    kept, ignored = run.meaning
    keys, rows = run.keys, run.keys.any(1)
    for before, after in run.pairs if run.hides != run.opens else ():
        changed = before.seen != after.seen
        # What padding's own queries see is of no account.
        real = changed & ~keys[:, :, None] if before.queries == before.keys else changed
        by_key, sure, fix = real.any(1), True, ""
        proof = f"With {run.name} {_word(run.other)} at {run.places}"
        if bool(changed[~rows].any()):
            sentence = "The mask of one row bars keys of another row."
            other = int((~rows).nonzero()[0])
            proof += f" and {_word(run.value)} in row {other}, the scores of that row are masked otherwise as well."
            fix = (
                "repeat the mask in the order in which batch and heads are folded: repeat_interleave(heads, 0) for "
                "(batch heads)."
            )
        elif run.hides and bool(changed.any()) and not bool(real.any()):
            if bool(after.seen[0, keys[0]].any()):
                continue
            sentence = "The mask bars queries, not keys: what it marks is seen by all others."
            proof += ", these queries see nothing, and the others see what they saw."
            fix = _KEYS_FIX
        elif bool((by_key & ~keys).any()):
            sentence = f"The mask bars other keys than those where {run.name} is {_word(ignored)}."
            proof += f", the scores of keys {_places(by_key[0])} are masked otherwise; {_word(kept)} keeps."
            sure = declared
        else:
            continue
        yield Finding("padding", sentence, proof, sure, after.line, after.module, fix)
        return


def _of_declared(evidence: Evidence, run: Masked) -> Iterator[Finding]:
    """Yield a declared mask that moves nothing, or means the opposite of what was declared."""
    name, means, (kept, ignored) = run.name, evidence.intent.padding_true, run.meaning
    if not run.hides and not run.opens and torch.equal(run.output, evidence.output):
        sentence = f"{name} changes nothing: no score and no output hangs on it."
        proof = f"With {_word(run.other)} at {run.places} the output is the same to the bit."
        yield Finding("padding", sentence, proof, source=run.line, fix="apply it to the scores before the softmax.")
    if run.hides != run.opens and means and {float(kept), float(ignored)} == {0, 1} and bool(kept) != (means == "keep"):
        sentence = f"The mask works the other way round: what {name} keeps is barred."
        proof = (
            f"With {_word(ignored)} at {run.places} they are not seen, and {name} was said to {means} where it is True "
            "or 1."
        )
        fix = f"turn the mask round where it is applied (~{name}), or say what it means otherwise."
        yield Finding("padding", sentence, proof, source=run.line, fix=fix)


def _nan(evidence: Evidence, run: Masked) -> Iterator[Finding]:
    """Yield a mask under which a query is left no key, and becomes NaN."""
    nan = run.output.isnan()
    if not evidence.follows or bool(evidence.output.isnan().any()) or not bool(nan.any()):
        return
    marked = run.keys if run.source is evidence.source and run.hides else torch.zeros_like(run.keys)
    rows = evidence.moved(nan.float(), torch.zeros_like(evidence.output), times=0) > 0
    real = marked.shape != rows.shape or bool((rows & ~marked).any())
    yield Finding(
        "finite",
        f"With {run.name} some queries are left no key, and give NaN"
        + ("." if real else ": padding's own rows, which a next layer may spread."),
        f"{run.name} was {_word(run.other)} at {run.places}, and the output is NaN at {int(rows.sum())} tokens"
        + ("." if real else ", all of them padding."),
        sure=real,
        source=run.line,
        fix="bar with a large negative number instead of -inf, or leave each query itself.",
    )


def _of_padding(evidence: Evidence, name: str, source: Source) -> Iterator[Finding | SkippedCheck]:
    """Yield what is wrong where every other row of the batch, the first among them, has padding at one end."""
    side, means = evidence.intent.padding_side or "right", evidence.intent.padding_true
    count = max(min(2, source.length - 2), source.length // 4)
    start, stop = (0, source.length - count) if side == "right" else (count, source.length)
    real, pads = slice(start, stop), slice(stop, None) if side == "right" else slice(0, start)
    mask = {name: _padding_mask(evidence, name, source, pads)}
    ends = f"he {'last' if side == 'right' else 'first'} {count} tokens of row 0 were padded"
    base = evidence.output_with(mask)
    # Keys of another source leave every output real.
    places = real if source is evidence.source else slice(None)
    row = evidence.source.at(slice(0, 1), places)[: base.dim()]
    if bool(base[row].isnan().any()):
        yield Finding("padding", "Padding gives NaN at real tokens.", f"T{ends} with {name}.")
        return
    padded = evidence.output_with({**mask, **source.others(pads, by=6.0)})
    leaks = float(evidence.moved(padded, base)[0, places].max())
    if leaks:
        sentence = "The content of padding moves real outputs"
        proof = (
            f"With {name} True or 1 for {means or 'keep'}, t{ends} and changed, and a real output moved by {leaks:.3g}"
        )
        more = "." if means else ", whichever value of the mask ignores."
        yield Finding("padding", sentence + more, f"{proof}.", fix=_KEYS_FIX)
        return
    try:
        short = evidence.output_with(_first_row_without(evidence, mask, source, real))
        apart = evidence.apart(short, base[row], times=OTHER_SIZES)
    except NotPossibleError as error:
        yield SkippedCheck("padding", f"its length: the forward does not take the row without it ({error})")
        return
    if apart:
        yield Finding(
            "padding",
            f"The {'side' if side == 'left' else 'length'} of the padding moves real outputs, by {apart:.3g}.",
            f"Row 0 with {count} tokens of padding on the {side} gives something else at tokens {start}–{stop - 1} "
            "than without it; the padding's content moves nothing.",
            fix="count positions from the first real token: position_ids = mask.cumsum(-1) - 1." * (side == "left"),
        )


def _padding_mask(evidence: Evidence, name: str, source: Source, pads: slice) -> Tensor:
    padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
    padded[0::2, pads] = True
    like, keeps = evidence.values.get(name), evidence.intent.padding_true != "ignore"
    for run in masked_runs(evidence):
        if isinstance(run, Masked) and run.name == name:
            like = run.value.new_zeros(padded.shape) if like is None else like
            keeps = bool(run.meaning[0]) if run.hides != run.opens else keeps
    mask = padded != keeps
    if not isinstance(like, Tensor):
        return mask
    if like.is_floating_point() and like.dim() > 2 and bool((like <= 0).all()):
        mask = torch.zeros(padded.shape).masked_fill(padded, torch.finfo(like.dtype).min)
    if like.dim() > 2:
        mask = mask.reshape(len(mask), *(1 for _ in like.shape[1:-1]), -1).expand(-1, *like.shape[1:-1], -1)
    return mask.to(like).contiguous()


def _first_row_without(evidence: Evidence, mask: dict[str, Tensor], source: Source, real: slice) -> dict[str, Tensor]:
    """Return the arguments of row 0 alone, without the padding of a source."""
    length, changes = source.length, dict[str, Tensor]()
    given = {name: value for name, value in evidence.values.items() if isinstance(value, Tensor)}
    for name, value in {**given, **mask}.items():
        index = [slice(None)] * value.dim()
        same = next((other for other in evidence.sources if name in other.names), None)
        pairs = name not in mask and [*value.shape] == [length, length]
        if same is not None:
            index = list(same.at(slice(0, 1), real if same is source else slice(None)))
        elif value.dim() > 1 and value.shape[0] == source.rows and not pairs:
            index[0] = slice(0, 1)
        if same is None and (source is evidence.source or name in mask):
            for place in range(max(value.dim() - 2, 0), value.dim()):
                if value.shape[place] == length and (place > 0 or pairs):
                    index[place] = real
        changes[name] = value[tuple(index)]
    return changes

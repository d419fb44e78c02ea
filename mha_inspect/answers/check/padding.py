"""The effect of mask arguments: which keys they mask out, and whether padding changes real outputs.

Each mask is changed at some keys, and the visible keys before and after are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...reports.check import Fact, Finding, SkippedCheck
from ...text import shortened, spans
from .arguments import Source
from .evidence import OF_OUTPUTS, OTHER_SIZES, Evidence, NotPossibleError, RaisedError, UndeclaredError
from .idle_masks import idle_masks
from .masking import masks_everything, weak_masks
from .scores import softmax
from .seen_keys import SeenKeys

_MOST = 2
"""The largest number of mask arguments to examine."""
_FURTHER = ("encoder", "memory", "key", "src", "context")
"""Words in the name of a mask of the keys of another sequence."""
_PLACES = {
    "batch heads query key": "mask[:, None, None, :] for scores of batch heads query key",
    "batch query key": "mask[:, None, :] for scores of batch query key",
    "(batch heads) query key": "mask.repeat_interleave(heads, 0)[:, None, :] for scores of (batch heads) query key",
    "(heads batch) query key": "mask.repeat(heads, 1)[:, None, :] for scores of (heads batch) query key",
}
"""How a mask of `batch key` is laid over scores, by their axes."""


@dataclass(frozen=True)
class Masked:
    """A run with a mask argument changed at some keys."""

    name: str
    given: Tensor
    """The original mask."""
    other: Tensor
    """The new value at the changed keys."""
    keys: Tensor
    """`batch key`: True at the changed keys."""
    source: Source
    """The tokens of the keys."""
    pairs: tuple[tuple[SeenKeys, SeenKeys], ...]
    """For each attention with these keys: the visible keys before and after the change."""
    hides: bool
    """Whether the change masks out a key anywhere."""
    opens: bool
    """Whether the change unmasks a key anywhere."""
    base: Tensor
    """The output with the original mask."""
    output: Tensor
    faults: list[Finding]
    """Faults of the weights in this run."""
    meaning: tuple[Tensor, Tensor]
    """The values that keep and ignore a key."""
    places: str
    """The changed keys of the first batch item, in words."""
    line: str
    """The line of the mask; empty if no attention has these keys."""
    losing: tuple[Tensor, ...] = ()
    """For each attention with a query that loses a key by the change, whatever its keys: `query`, True if it does."""

    @property
    def is_meaning_known(self) -> bool:
        """Whether the change masks the keys out, or is undone by doing so, and not for some queries alone.

        A mask of segments, `mask[:, :, None] == mask[:, None]`, has no value that keeps a key.
        """
        if self.hides == self.opens:
            return False
        masked = [after if self.hides else before for before, after in self.pairs]
        return any(_hides_keys(sight, self.keys) for sight in masked)


def _hides_keys(sight: SeenKeys, keys: Tensor) -> bool:
    """Return whether no query sees these keys, `batch key`, but queries of which each sees all or its own."""
    seen = sight.seen & keys[:, None] & ~sight.seen.all(-1, keepdim=True)
    if sight.queries == sight.keys:
        seen &= sight.distance != 0
    return not bool(seen.any())


def masked_runs(evidence: Evidence) -> list[Masked | Fact]:
    """Return a run for each mask argument, or a fact if the forward rejects another value.

    A declared padding mask that was not given is included: its base run keeps every key.
    """
    if evidence.masked_runs:
        return evidence.masked_runs
    values, name = evidence.values, evidence.intent.padding
    masks = {n: v for n, v in values.items() if isinstance(v, Tensor) and ("mask" in n or v.dtype == torch.bool)}
    runs: list[Masked | Fact] = []
    if name is not None and values.get(name) is None:
        tried: list[Masked | Fact] = []
        for form in _whole_masks(evidence, name):
            tried += filter(None, [_masked_run(evidence, name, form)])
            if tried and isinstance(tried[-1], Masked):
                evidence.notes.append(_which_form(name, form, tried[:-1]))
                break
        runs += [run for run in tried if isinstance(run, Masked)] or tried[:1]
    for name, value in masks.items():
        runs += filter(None, [_masked_run(evidence, name, value) if value.dim() > 1 and len(runs) < _MOST else None])
    evidence.masked_runs.extend(runs)
    return runs


def _which_form(name: str, form: Tensor, rejected: Sequence[Masked | Fact]) -> str:
    """Return a sentence with the form of a declared mask that ran, and why the first form did not."""
    ran = f"{name} ran as {_form(form)}"
    facts = [fact for fact in rejected if isinstance(fact, Fact)]
    return f"{ran}. {facts[0].sentence}." if facts else f"{ran}."


def _form(mask: Tensor) -> str:
    return f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"


def _whole_masks(evidence: Evidence, name: str) -> Iterator[Tensor]:
    """Yield masks that keep every key, in the forms that forwards take, for each number of keys."""
    for source in {source.length: source for source in reversed(padded_sources(evidence, name))}.values():
        ones = torch.ones(source.rows, source.length, dtype=torch.bool) & (evidence.intent.padding_true != "ignore")
        yield from (ones, ones.long(), ones[:, None, None], ones.long()[:, None, None], ones[:, None], ones.float())


def _masked_run(evidence: Evidence, name: str, given: Tensor, *, added: bool = False) -> Masked | Fact | None:
    """Return a run with a mask changed; None if its keys are unknown, or have several values in the mask.

    A mask of zeros is taken as one that is added to the scores if `added` is set, or if a one masks out no key.
    """
    fitting = [s for s in evidence.sources if s.positions is not None and s.length == given.shape[-1]]
    source = next(iter(fitting), None)
    if source is None or source.length < 4 or name in source.names:
        return None
    keys = torch.zeros(source.rows, source.length, dtype=torch.bool)
    count = max(2, source.length // 4)
    causal = any(not bool(sight.seen[:, 0, 1:].any()) for sight in evidence.sights)
    # Few queries see the last keys under a causal mask. The first key stays, so that every query has a key.
    keys[:, slice(1, 1 + count) if causal else slice(source.length - count, None)] = True
    is_by_item = given.dim() > 2 or given.shape[0] != given.shape[1] or name in evidence.by_item
    by_row = given.shape[0] == source.rows > 1 and is_by_item
    if by_row:
        keys[1:] = False
    given_there = given[slice(0, 1) if by_row else slice(None), ..., keys[0]]
    value = given_there.flatten()[0]
    if not bool((given_there == value).all()):
        return None
    may_add = given.is_floating_point() and bool((given <= 0).all())
    additive = may_add and (added or given.dim() > 2 or bool(given.any()))
    other = ((-1e9 if value == 0 else 0.0) * torch.ones(()) if additive else 1 - value.long()).to(given)
    changed = given.clone()
    changed[slice(0, 1) if by_row else slice(None), ..., keys[0]] = other
    try:
        whole = evidence if evidence.values.get(name) is given else evidence.with_arguments({name: given})
        masked = evidence.with_arguments({name: changed})
        outputs = whole.output, masked.output
        faults = [] if masks_everything(masked) else list(weak_masks(masked))
    except NotPossibleError as error:
        return Fact("mask", f"{name}: the forward rejects {_form(given)} ({error})")
    with suppress(NotPossibleError):
        faults += softmax(masked)
    pairs = tuple(
        (before, after)
        for before, after in zip(whole.sights, masked.sights, strict=False)
        if before.seen.shape == after.seen.shape and before.seen.shape[::2] == keys.shape
    )
    origins = [after.origins for before, after in pairs if not torch.equal(before.seen, after.seen)]
    source = next((s for s in fitting if all(each.intersection(s.names) for each in origins)), source)
    hides = any(bool((before.seen & ~after.seen).any()) for before, after in pairs)
    opens = any(bool((after.seen & ~before.seen).any()) for before, after in pairs)
    if may_add and not additive and not hides:
        otherwise = _masked_run(evidence, name, given, added=True)
        if isinstance(otherwise, Masked) and otherwise.hides:
            return otherwise
    meaning, line = (value, other) if hides else (other, value), pairs[0][1].line if pairs else ""
    places = f"keys {_places(keys[0])} of batch item 0"
    losing = tuple(_queries_that_lose_keys(whole.sights, masked.sights))
    return Masked(
        name, given, other, keys, source, pairs, hides, opens, *outputs, faults, meaning, places, line, losing
    )


def _queries_that_lose_keys(before: Sequence[SeenKeys], after: Sequence[SeenKeys]) -> Iterator[Tensor]:
    """Yield for each attention with fewer visible keys in another run the queries that lose some: `query`."""
    for whole, masked in zip(before, after, strict=False):
        if whole.seen.shape != masked.seen.shape:
            continue
        losing = (whole.seen & ~masked.seen).any(-1).any(0)
        if bool(losing.any()):
            yield losing


def padded_sources(evidence: Evidence, name: str) -> list[Source]:
    """Return the arguments with tokens, the most likely ones of a mask's keys first."""
    sources = [source for source in evidence.sources if source.positions is not None]
    given, is_further = evidence.values.get(name), any(word in name for word in _FURTHER)
    if isinstance(given, Tensor):
        return sorted(sources, key=lambda source: source.length != given.shape[-1])
    return [*sources[1:2], *sources[:1], *sources[2:]] if is_further else sources


def mask_facts(evidence: Evidence) -> Iterator[Fact]:
    """Yield a fact for each mask argument: which value keeps a key."""
    for run in masked_runs(evidence):
        if isinstance(run, Fact):
            yield run
        elif run.is_meaning_known:
            kept, ignored = run.meaning
            yield Fact("mask", f"{run.name}: {_word(kept)} keeps a key, {_word(ignored)} ignores it")
        elif run.pairs and not run.hides and torch.equal(run.output, run.base):
            place = int(run.keys[0].nonzero()[0])
            yield Fact("mask", f"{run.name} has no effect on key {place}: it is equally visible with either value")


def _word(value: Tensor) -> str:
    return f"{value.item():.3g}" if value.is_floating_point() else str(value.item())


def _places(marks: Tensor) -> str:
    return shortened(spans(int(place) for place in marks.nonzero().flatten()), 40)


def padding(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """Yield a fault if padding changes real outputs, or its mask means the opposite of the declaration."""
    name, findings = evidence.intent.padding, list[Finding]()
    if not masks_everything(evidence):
        evidence.require_passed("masking")
    for run in masked_runs(evidence):
        if isinstance(run, Masked):
            proof = f"With {run.name} {_word(run.other)} at some keys."
            faults = [replace(fault, evidence=f"{proof} {fault.evidence}") for fault in run.faults if fault.sure]
            misplaced = list(_misplaced(run, declared=run.name == name))
            found = faults or [*misplaced, *(_of_declared(evidence, run) if run.name == name else ())]
            findings += found or list(_nan(evidence, run)) or _joined(evidence, run)
    findings += idle_masks(evidence)
    yield from findings
    if name is None and not findings:
        raise UndeclaredError("--mask NAME=keep")
    if name is None or any(finding.sure for finding in findings):
        return
    evidence.require_passed(*OF_OUTPUTS)
    if evidence.source.batch is None or not (evidence.follows or _is_by_item(evidence)):
        raise NotPossibleError("the output has no entry for each token of each batch item")
    tried = (run.source for run in masked_runs(evidence) if isinstance(run, Masked) and run.name == name)
    source = next(tried, None) or padded_sources(evidence, name)[0]
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens; give at least 3")
    of_padding = _of_padding if evidence.follows else _of_pooled
    for result in of_padding(evidence, name, source):
        yield replace(result, source=evidence.mask_line) if isinstance(result, Finding) else result


def _is_by_item(evidence: Evidence) -> bool:
    """Return whether the first axis of the output is the batch: it is pooled, or made by queries of another source."""
    return evidence.output.dim() > 1 and evidence.output.shape[0] == evidence.source.rows


def _fix(sentence: str, layout: str) -> str:
    """Return how a mask of `batch key` is laid over scores of these axes; empty for other axes than the usual."""
    return f"{sentence}: {_PLACES[layout]}." if layout in _PLACES else ""


def _misplaced(run: Masked, *, declared: bool) -> Iterator[Finding]:
    """Yield the first attention that masks queries, or the wrong keys, or keys of another batch item."""
    kept, ignored = run.meaning
    keys, rows = run.keys, run.keys.any(1)
    for before, after in run.pairs if run.hides != run.opens else ():
        changed = before.seen != after.seen
        # Queries of padding do not matter.
        is_self = before.queries == before.keys
        real = changed & ~keys[:, :, None] if is_self else changed
        by_key, sure, fix = real.any(1), True, ""
        proof = f"With {run.name} {_word(run.other)} at {run.places}"
        if bool(changed[~rows].any()):
            yield _of_other_items(run)
            return
        if run.hides and bool(changed.any()) and not bool(real.any()):
            if bool((after.seen & (after.distance != 0))[0, keys[0]].any()):
                continue
            # Padding sees these keys neither before nor after.
            if not bool((before.seen & after.seen)[0, ~keys[0]][:, keys[0]].any() if is_self else True):
                continue
            sentence = (
                "The mask is applied to queries instead of keys: the other queries still attend to the masked tokens."
            )
            proof += ", these queries see no other key, and the other queries see the same keys as before."
            fix = _fix("Apply the mask to the keys", after.layout)
        elif bool((by_key & ~keys).any()):
            sentence = f"The mask masks out the wrong keys; expected the keys where {run.name} is {_word(ignored)}."
            proof += f", the masking of keys {_places(by_key[0])} changes. {_word(kept)} keeps a key."
            sure = declared
        else:
            continue
        yield Finding("padding", sentence, proof, sure, after.line, after.module, fix)
        return


def _joined(evidence: Evidence, run: Masked) -> list[Finding]:
    """Return a fault if the mask of one item changes the output of another item, e.g. in some of its heads."""
    others = ~run.keys.any(1)
    fails = evidence.failed.intersection(OF_OUTPUTS)
    if fails or not evidence.follows or run.source is not evidence.source or not bool(others.any()):
        return []
    moved = bool(evidence.differences(run.output, run.base, times=OTHER_SIZES)[others].any())
    return [_of_other_items(run)] if moved else []


def _of_other_items(run: Masked) -> Finding:
    other = int((~run.keys.any(1)).nonzero()[0])
    layout = run.pairs[0][1].layout if run.pairs else ""
    is_joined = layout.startswith("(")
    if not is_joined and any(_is_by_head(run, before, after) for before, after in run.pairs):
        return Finding(
            "padding",
            f"The batch axis of {run.name} is aligned with the heads of the scores: head 0 of every item "
            "gets the mask of item 0.",
            f"With {run.name} {_word(run.other)} at {run.places} alone, head 0 of batch item {other} changes too.",
            source=run.line,
            fix=_fix("Align the batch axis of the mask with that of the scores", layout),
        )
    return Finding(
        "padding",
        "The mask of one batch item masks out keys of another item.",
        f"With {run.name} {_word(run.other)} at {run.places} alone, batch item {other} changes too.",
        source=run.line,
        fix=_fix("Repeat the mask in the order of the joined dimension", layout) if is_joined else "",
    )


def _is_by_head(run: Masked, before: SeenKeys, after: SeenKeys) -> bool:
    """Return whether a change in the mask of some batch items changed the heads of the same numbers, in every item.

    So it is where the mask's batch axis lies on the heads, of which there are as many as items.
    """
    rows = run.keys.any(1)
    if before.zeros.shape != after.zeros.shape or before.zeros.shape[1] != len(rows):
        return False
    changed = (before.zeros != after.zeros).flatten(2).any(2)  # batch heads
    return torch.equal(changed, rows[None].expand_as(changed))


def _of_declared(evidence: Evidence, run: Masked) -> Iterator[Finding]:
    """Yield a fault if a declared mask has no effect, or means the opposite of the declaration."""
    name, means, (kept, ignored) = run.name, evidence.intent.padding_true, run.meaning
    were_seen = not run.pairs or any(not before.masks_out(run.keys) for before, _ in run.pairs)
    if were_seen and not run.hides and not run.opens and torch.equal(run.output, run.base):
        yield _without_effect(run)
    if run.is_meaning_known and means and {float(kept), float(ignored)} == {0, 1} and bool(kept) != (means == "keep"):
        sentence = f"The mask is inverted: the keys that {name} keeps are masked out."
        proof = (
            f"With {_word(ignored)} at {run.places}, no query sees these keys. "
            f"Declared: True or 1 in {name} means {means}."
        )
        fix = f"Invert the mask where it is applied (~{name}), or declare the other meaning."
        yield Finding("padding", sentence, proof, source=run.line, fix=fix)


def _without_effect(run: Masked) -> Finding:
    """Return the fault of a mask that leaves the output as it is, although it may mask out keys of some queries."""
    proof = f"With {_word(run.other)} at {run.places}, the output is the same bit for bit."
    spared = [~losing for losing in run.losing if not bool(losing.all())]
    if not run.losing:
        sentence = f"{run.name} has no effect on any score or output."
        fix = "Apply the mask to the scores before the softmax."
    elif spared:
        sentence = (
            f"{run.name} has no effect on the output: query {_places(spared[-1])} sees the same keys with any mask."
        )
        proof += f" Queries {_places(~spared[-1])} lose keys, but the output does not depend on these queries."
        fix = f"Apply {run.name} to the keys of every query, also of a class token."
    else:
        sentence = f"{run.name} has no effect on the output, although every query loses keys."
        fix = "Use the result of the attention in the output."
    return Finding("padding", sentence, proof, source=run.line, fix=fix)


def _nan(evidence: Evidence, run: Masked) -> Iterator[Finding]:
    """Yield a fault if a mask leaves a query without keys, so that its output is NaN."""
    nan = run.output.isnan()
    if not evidence.follows or bool(run.base.isnan().any()) or not bool(nan.any()):
        return
    marked = run.keys if run.source is evidence.source and run.hides else torch.zeros_like(run.keys)
    rows = evidence.differences_with_padding(nan.float(), torch.zeros_like(evidence.output), times=0) > 0
    real = marked.shape != rows.shape or bool((rows & ~marked).any())
    yield Finding(
        "finite",
        f"{run.name} leaves some queries without keys, so their outputs are NaN."
        + ("" if real else " These queries are padding, but the next layer may spread the NaN."),
        f"With {run.name} {_word(run.other)} at {run.places}, the output is NaN at {int(rows.sum())} tokens"
        + ("." if real else ", all of them padding."),
        sure=real,
        source=run.line,
        fix="Mask with a large negative number instead of -inf, or let each query attend to itself.",
    )


def _of_padding(evidence: Evidence, name: str, source: Source) -> Iterator[Finding | SkippedCheck]:
    """Yield the faults of a run in which every second batch item, from the first on, has padding at one end."""
    side, means = evidence.intent.padding_side or "right", evidence.intent.padding_true
    count = max(min(2, source.length - 2), source.length // 4)
    start, stop = (0, source.length - count) if side == "right" else (count, source.length)
    real, pads = slice(start, stop), slice(stop, None) if side == "right" else slice(0, start)
    mask = {name: padding_mask(evidence, name, source, pads)}
    ends = f"the {'last' if side == 'right' else 'first'} {count} tokens of batch item 0 padded"
    run = evidence.with_arguments(mask)
    base = run.output
    # Padding in another source makes no output padding.
    places = real if source is evidence.source else slice(None)
    row = evidence.source.at(slice(0, 1), places)[: base.dim()]
    if bool(base[row].isnan().any()):
        yield Finding("padding", "Padding makes the outputs of real tokens NaN.", f"With {ends} by {name}.")
        return
    padded = evidence.output_with({**mask, **source.others(pads, by=6.0)})
    leaks = float(run.differences(padded)[0, places].max())
    if leaks:
        more = "" if means else ", whichever value of the mask means ignore"
        fix = _fix("Apply the mask to the keys", run.sights[0].layout if run.sights else "")
        lengths = evidence.source.length, source.length
        seen = [each.seen[0, places] for each in run.sights if each.seen.shape[1:] == lengths]
        if any(not bool(each.any(-1).all()) for each in seen):
            more += ", since a query with every key masked out has uniform weights"
            fix = "Leave each query a key, or set the weights of fully masked queries to zero."
        elif seen and not any(bool(each[:, pads].any()) for each in seen):
            more += ", although it has no attention weight: another operation mixes positions"
            fix = "Check norms, convolutions and means over the positions, and the split of the heads."
        proof = f"With {ends} ({name}: True or 1 means {means or 'keep'}), changing them changes a real output by "
        yield Finding("padding", f"The content of padding changes real outputs{more}.", f"{proof}{leaks:.3g}.", fix=fix)
        return
    try:
        alone = run.piece(source, start, stop, first=start)
        short = evidence.output_with(alone)[evidence.source.at(slice(0, 1), slice(None))[: base.dim()]]
        apart = evidence.apart(short, base[row], times=OTHER_SIZES)
    except NotPossibleError as error:
        yield SkippedCheck("padding", f"length of the padding: the forward rejects an unpadded item ({error})")
        return
    if apart:
        yield Finding(
            "padding",
            f"The {'side' if side == 'left' else 'length'} of the padding changes real outputs by {apart:.3g}.",
            f"With {count} padding tokens on the {side}, the outputs of batch item 0 at tokens {start}–{stop - 1} "
            "differ from those without padding. The content of the padding has no effect.",
            fix="Count positions from the first real token: position_ids = mask.cumsum(-1) - 1." * (side == "left"),
        )


def _of_pooled(evidence: Evidence, name: str, source: Source) -> Iterator[Finding | SkippedCheck]:
    """Yield the faults of the same run where the output has entries for each batch item, and none for its tokens.

    Entries whose number changes with that of the tokens may belong to tokens, of which some are padding.
    """
    side, means = evidence.intent.padding_side or "right", evidence.intent.padding_true
    count = max(min(2, source.length - 2), source.length // 4)
    start, stop = (0, source.length - count) if side == "right" else (count, source.length)
    pads = slice(stop, None) if side == "right" else slice(0, start)
    mask = {name: padding_mask(evidence, name, source, pads)}
    run = evidence.with_arguments(mask)
    try:
        short = evidence.output_with(run.piece(source, start, stop, first=start))
    except RaisedError as error:
        raise NotPossibleError(
            f"the output has no entry for each token, and fewer tokens are rejected ({error})"
        ) from error
    if short.shape != run.output.shape:
        raise NotPossibleError("the output has no entry for each token, and its size changes with their number")
    ends = f"the {'last' if side == 'right' else 'first'} {count} tokens of batch item 0 padded"
    if bool(run.output[:1].isnan().any()):
        yield Finding("padding", "Padding makes the output of its batch item NaN.", f"With {ends} by {name}.")
        return
    padded = evidence.output_with({**mask, **source.others(pads, by=6.0)})
    if leak := float(run.differences(padded)[0].max()):
        proof = (
            f"With {ends} ({name}: True or 1 means {means or 'keep'}), changing them changes the output by {leak:.3g}."
        )
        yield _of_pooled_content(run, source, pads, proof)
        return
    apart = evidence.apart(short[:1], run.output[:1], times=OTHER_SIZES)
    if apart:
        yield Finding(
            "padding",
            f"The number of padding tokens changes the output of their batch item by {apart:.3g}.",
            f"With {count} padding tokens on the {side}, the output of batch item 0 differs from that without padding. "
            "The content of the padding has no effect.",
            fix="Divide means by the number of real tokens, and count positions from the first real token.",
        )


def _of_pooled_content(run: Evidence, source: Source, pads: slice, proof: str) -> Finding:
    """Return the fault of padding whose content changes the output of its batch item."""
    real = torch.ones(source.length, dtype=torch.bool)
    real[pads] = False
    seen = [sight.seen[0] for sight in run.sights if sight.keys == source.length]
    of_real = [each[real] if len(each) == source.length else each for each in seen]
    if seen and not any(bool(each[:, pads].any()) for each in of_real):
        return Finding(
            "padding",
            "The content of padding changes the output of its batch item, although no real query attends to it.",
            proof,
            fix="Pool over the real tokens alone, e.g. (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).",
        )
    return Finding(
        "padding",
        "The content of padding changes the output of its batch item.",
        proof,
        fix=_fix("Apply the mask to the keys", run.sights[0].layout if run.sights else ""),
    )


def padding_mask(evidence: Evidence, name: str, source: Source, pads: slice) -> Tensor:
    """Return a mask in the form that runs, with padding at these positions of every second item, from the first on."""
    padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
    padded[0::2, pads] = True
    like, ignored = evidence.values.get(name), torch.tensor(evidence.intent.padding_true == "ignore")
    kept = ~ignored
    if isinstance(like, Tensor) and like.is_floating_point() and float(like.max()) <= 0 > float(like.min()):
        kept, ignored = torch.tensor(0.0), like.min()
    for run in masked_runs(evidence):
        if isinstance(run, Masked) and run.name == name:
            like = run.given if like is None else like
            kept, ignored = run.meaning if run.is_meaning_known else (kept, ignored)
    mask = torch.where(padded, ignored.cpu(), kept.cpu())
    if not isinstance(like, Tensor):
        return mask
    if like.dim() > 2:
        mask = mask.reshape(len(mask), *(1 for _ in like.shape[1:-1]), -1).expand(-1, *like.shape[1:-1], -1)
    return mask.to(like).contiguous()

"""Runs with a mask argument changed at some keys, and which keys the change masks out.

The visible keys of every attention are compared before and after the change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from ..record.arguments import tensors_in
from ..reports.check import Fact, Finding
from ..text import shortened, spans
from .arguments import Source
from .evidence import Evidence
from .lab import NotPossibleError
from .rules.masking import masks_everything, weak_masks
from .rules.softmax import softmax
from .seen_keys import SeenKeys

_MOST = 2
"""The largest number of mask arguments to examine."""
_FEWEST_KEYS = 4
"""With fewer keys, most of them would change."""
_FORMS = 3
"""The largest number of forms of a mask to try for an argument that was not given."""
_NO_MASK = re.compile(r"cache|past|position|_ids?$|label|output|return|use_|embed|state|cos|sin|freqs|head_mask|need")
"""Optional arguments of these names take no mask of tokens."""
_FURTHER = ("encoder", "memory", "key", "src", "context")
"""Words in the name of a mask of the keys of another sequence."""
_Pair = tuple[SeenKeys, SeenKeys]
"""The visible keys of an attention before and after a change."""


@dataclass(frozen=True)
class MaskedRun:
    """A run with a mask argument changed at some keys."""

    name: str
    mask: Tensor
    """The original mask."""
    value: Tensor
    """The new value at the changed keys."""
    keys: Tensor
    """`batch key`: True at the changed keys."""
    source: Source
    """The tokens of the keys."""
    pairs: tuple[_Pair, ...]
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
    kept: Tensor
    """The value that keeps a key."""
    ignored: Tensor
    """The value that ignores a key."""
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
        if self.hides == self.opens or self.hides_queries:
            return False
        if not self.pairs:
            return True  # shown by outputs: no other token depends on these
        masked = [after if self.hides else before for before, after in self.pairs]
        return any(_hides_keys(sight, self.keys) for sight in masked)

    @property
    def hides_queries(self) -> bool:
        """Whether the change takes keys from the queries at the changed places alone, in every attention it changes."""
        changed = self.keys.any(0)
        # A group of tokens that see only each other loses keys there too: another query must still see them.
        for before, after in self.pairs:
            if before.queries != before.keys:
                continue
            still_seen = (before.seen & after.seen)[0, ~changed][:, changed]
            if not bool(still_seen.any()):
                return False
        if not self.losing:
            return False
        return all(len(losing) == len(changed) and not bool((losing & ~changed).any()) for losing in self.losing)

    @property
    def has_no_effect(self) -> bool:
        """Whether the change masks and unmasks no key, and the output is the same bit for bit."""
        return not self.hides and not self.opens and torch.equal(self.output, self.base)

    @property
    def other_items(self) -> Tensor:
        """`batch`: True for the items whose mask is not changed."""
        return ~self.keys.any(1)

    @property
    def change(self) -> str:
        """The changed argument and its new value: `mask False`."""
        return f"{self.name} {word_of(self.value)}"


def word_of(value: Tensor) -> str:
    """Return a value of a mask in words: `False`, `0.5`."""
    return f"{value.item():.3g}" if value.is_floating_point() else str(value.item())


def places_of(marks: Tensor) -> str:
    """Return the places of the marks in words: `3, 5–7`."""
    return shortened(spans(int(place) for place in marks.nonzero().flatten()), 40)


def _hides_keys(sight: SeenKeys, keys: Tensor) -> bool:
    """Return whether no query sees these keys, `batch key`, but queries of which each sees all or its own."""
    seen = sight.seen & keys[:, None] & ~sight.seen.all(-1, keepdim=True)
    if sight.queries == sight.keys:
        seen &= sight.distance != 0
    return not bool(seen.any())


# -- which masks ------------------------------------------------------------------------------------------------------


def masked_runs(evidence: Evidence) -> list[MaskedRun | Fact]:
    """Return a run for each mask argument, or a fact if the forward rejects another value.

    A declared padding mask that was not given is included: its base run keeps every key.
    """
    if evidence.masked_runs:
        return evidence.masked_runs
    runs = _runs_of_missing_mask(evidence)
    for name, value in evidence.values.items():
        if len(runs) >= _MOST or not _is_mask(name, value):
            continue
        run = _masked_run(evidence, name, value)
        if run is not None:
            runs.append(run)
    evidence.masked_runs.extend(runs)
    return runs


def _is_mask(name: str, value: object) -> bool:
    """Return whether an argument may be a mask of keys, by its name or its type."""
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    return "mask" in name or value.dtype == torch.bool


def _runs_of_missing_mask(evidence: Evidence) -> list[MaskedRun | Fact]:
    """Return the run of a declared padding mask that was not given, in the first form that runs.

    If none runs, the fact that the first form was rejected.
    """
    name = evidence.intent.padding
    if name is None or evidence.values.get(name) is not None:
        return []
    rejected: list[MaskedRun | Fact] = []
    for form in _whole_masks(evidence, name, keeps=evidence.intent.padding_true != "ignore"):
        run = _masked_run(evidence, name, form)
        if isinstance(run, MaskedRun):
            evidence.notes.append(_which_form(name, form, rejected))
            return [run]
        if run is not None:
            rejected.append(run)
    return rejected[:1]


def _which_form(name: str, form: Tensor, rejected: Iterable[MaskedRun | Fact]) -> str:
    """Return a sentence with the form of a declared mask that ran, and why the first form did not."""
    ran = f"{name} ran as {_form(form)}."
    for fact in rejected:
        if isinstance(fact, Fact):
            return f"{ran} {fact.sentence}."
    return ran


def _form(mask: Tensor) -> str:
    return f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"


def _whole_masks(evidence: Evidence, name: str, *, keeps: bool) -> Iterator[Tensor]:
    """Yield masks of one value, in the forms that forwards take, for each number of keys."""
    by_length: dict[int, Source] = {}
    for source in reversed(padded_sources(evidence, name)):
        by_length[source.length] = source
    for source in by_length.values():
        by_key = torch.full((source.rows, source.length), keeps)
        by_query_and_key = by_key[:, None]
        by_head = by_key[:, None, None]
        yield by_key
        yield by_key.long()
        yield by_head
        yield by_head.long()
        yield by_query_and_key
        yield by_key.float()


# -- arguments that were not given ------------------------------------------------------------------------------------


def facts_of_missing(evidence: Evidence) -> Iterator[Fact]:
    """Yield what optional arguments that stayed None do, if they take a mask: they are part of the module too."""
    if not evidence.sources or evidence.sources[0].positions is None:
        return
    names = [name for name in evidence.arguments.parameters if _may_take_a_mask(evidence, name)]
    for name in names[:_MOST]:
        run = _run_of_missing(evidence, name)
        if run is None:
            continue
        does = ""
        if run.hides_queries:
            does = f"{word_of(run.value)} masks out a query, not a key"
        elif run.is_meaning_known:
            does = f"{word_of(run.ignored)} masks out a key"
        elif run.has_no_effect:
            does = f"{word_of(run.value)} or {word_of(run.ignored)} has no effect"
        if does:
            yield Fact("mask", f"{name} was not given. Tried: {does}; --mask {name}=keep or ignore says what 1 means")


def _may_take_a_mask(evidence: Evidence, name: str) -> bool:
    """Return whether an argument is None by default, and no cache, position, label or choice of outputs by its name."""
    parameter = evidence.arguments.parameters[name]
    if parameter.default is not None or not evidence.arguments.is_free(name):
        return False
    return name != evidence.intent.padding and _NO_MASK.search(name) is None


def _run_of_missing(evidence: Evidence, name: str) -> MaskedRun | None:
    """Return a run with some keys of an argument changed that was not given, in the first form that runs.

    The rest of it has the value that masks out nothing.
    """
    forms = zip(*(_whole_masks(evidence, name, keeps=keeps) for keeps in (True, False)), strict=True)
    for pair in islice(forms, _FORMS):
        for form in pair:
            try:
                whole = evidence.with_arguments({name: form})
            except NotPossibleError:
                break
            if _shapes_of(whole) != _shapes_of(evidence):
                return None  # a mask adds no output: the targets of a loss do
            if any(sight.masked and sight.has_blind_query for sight in whole.sights):
                continue
            run = _masked_run(evidence, name, form, whole)
            if isinstance(run, MaskedRun):
                return run
    return None


def _shapes_of(evidence: Evidence) -> list[torch.Size]:
    """Return the sizes of all tensors that a run returned."""
    return [tensor.shape for _, tensor in tensors_in(evidence.run.returned)]


def padded_sources(evidence: Evidence, name: str) -> list[Source]:
    """Return the arguments with tokens, the most likely ones of a mask's keys first."""
    sources = [source for source in evidence.sources if source.positions is not None]
    mask = evidence.values.get(name)
    if isinstance(mask, Tensor):
        keys = mask.shape[-1]
        return sorted(sources, key=lambda source: source.length != keys)
    is_further = any(word in name for word in _FURTHER)
    return [*sources[1:2], *sources[:1], *sources[2:]] if is_further else sources


# -- the change of a mask ---------------------------------------------------------------------------------------------


def _masked_run(evidence: Evidence, name: str, mask: Tensor, whole: Evidence | None = None) -> MaskedRun | Fact | None:
    """Return a run with a mask changed; None if its keys are unknown, or have several values in the mask.

    A mask of zeros may be added to the scores, or say by a one which keys it masks out. If a one masks out no key, it
    is taken as one that is added.
    """
    sources = [s for s in evidence.sources if s.positions is not None and s.length == mask.shape[-1]]
    if not sources or sources[0].length < _FEWEST_KEYS or name in sources[0].names:
        return None
    change = _change_of(evidence, name, mask, sources[0])
    if change is None:
        return None
    run = _run_with(evidence, change, sources, whole)
    may_be_added = _may_be_added(mask) and not change.is_additive
    if not may_be_added or isinstance(run, Fact) or run.hides:
        return run
    added = _run_with(evidence, replace(change, is_additive=True), sources)
    return added if isinstance(added, MaskedRun) and added.hides else run


@dataclass(frozen=True)
class _Change:
    """Another value at some keys of a mask."""

    name: str
    mask: Tensor
    """The original mask, `... key`."""
    keys: Tensor
    """`batch key`: True at the changed keys."""
    items: slice
    """The part of the first dimension of the mask that is changed."""
    before: Tensor
    """The original value at the changed keys."""
    is_additive: bool
    """Whether the mask is added to the scores, so that a large negative number masks out a key."""

    @property
    def value(self) -> Tensor:
        """The new value: 0 or -1e9 in a mask that is added, else 0 for 1, 1 for 0."""
        if not self.is_additive:
            return (1 - self.before.long()).to(self.mask)
        return torch.tensor(-1e9 if self.before == 0 else 0.0).to(self.mask)

    @property
    def changed(self) -> Tensor:
        """The mask with the new value, in the shape of the original one."""
        mask = self.mask.clone()
        mask[self.items, ..., self.keys[0]] = self.value
        return mask


def _change_of(evidence: Evidence, name: str, mask: Tensor, source: Source) -> _Change | None:
    """Return the change of a quarter of the keys; None if they have several values in the mask.

    Only the first item is changed if the mask has one part for each item.
    """
    items = slice(0, 1) if _has_items(evidence, name, mask, source.rows) else slice(None)
    keys = torch.zeros(source.rows, source.length, dtype=torch.bool)
    keys[items, _keys_to_change(evidence, source.length)] = True
    values = mask[items, ..., keys[0]].flatten()
    if not bool((values == values[0]).all()):
        return None
    # A matrix of zeros may be a boolean mask in numbers.
    is_additive = _may_be_added(mask) and (mask.dim() > 2 or bool(mask.any()))
    return _Change(name, mask, keys, items, values[0], is_additive)


def _keys_to_change(evidence: Evidence, length: int) -> slice:
    """Return a quarter of the keys: the last ones, or those after the first if an attention is causal.

    Few queries see the last keys under a causal mask. The first key stays, so that every query has a key.
    """
    count = max(2, length // 4)
    is_causal = any(not bool(sight.seen[:, 0, 1:].any()) for sight in evidence.sights)
    return slice(1, 1 + count) if is_causal else slice(length - count, None)


def _has_items(evidence: Evidence, name: str, mask: Tensor, rows: int) -> bool:
    """Return whether the first dimension of a mask is the batch: `batch ... key`, and not `query key`."""
    if not mask.shape[0] == rows > 1:
        return False
    may_be_queries = mask.dim() == 2 and mask.shape[0] == mask.shape[1]
    return not may_be_queries or name in evidence.by_item


def _may_be_added(mask: Tensor) -> bool:
    """Return whether a mask may be added to the scores: floating-point numbers of which none is positive."""
    return mask.is_floating_point() and bool((mask <= 0).all())


# -- a run with it ----------------------------------------------------------------------------------------------------


def _run_with(
    evidence: Evidence, change: _Change, sources: Sequence[Source], whole: Evidence | None = None
) -> MaskedRun | Fact:
    """Return the runs with the original mask and the changed one, compared; a fact if the forward rejects it.

    `sources` are the arguments with as many tokens as the mask has keys, and `whole` is the run with the original mask.
    """
    name, mask = change.name, change.mask
    try:
        if whole is None:
            is_given = evidence.values.get(name) is mask
            whole = evidence if is_given else evidence.with_arguments({name: mask})
        masked = evidence.with_arguments({name: change.changed})
        base, output = whole.output, masked.output
        faults = [] if masks_everything(masked) else list(weak_masks(masked))
    except NotPossibleError as error:
        return Fact("mask", f"{name}: the forward rejects {_form(mask)} ({error})")
    with suppress(NotPossibleError):
        faults += softmax(masked)
    pairs = _comparable(whole.sights, masked.sights, change.keys)
    hides = any(bool((before.seen & ~after.seen).any()) for before, after in pairs)
    opens = any(bool((after.seen & ~before.seen).any()) for before, after in pairs)
    if not whole.run.attentions:
        before, after = (_moves_others(run, change.keys, sources[0]) for run in (whole, masked))
        hides, opens = before and not after, after and not before
    return MaskedRun(
        name=name,
        mask=mask,
        value=change.value,
        keys=change.keys,
        source=_source_of_changed(pairs, sources),
        pairs=pairs,
        hides=hides,
        opens=opens,
        base=base,
        output=output,
        faults=faults,
        kept=change.before if hides else change.value,
        ignored=change.value if hides else change.before,
        places=f"{'keys' if pairs else 'tokens'} {places_of(change.keys[0])} of batch item 0",
        line=pairs[0][1].line if pairs else "",
        losing=tuple(_queries_that_lose_keys(whole.sights, masked.sights)),
    )


def _moves_others(evidence: Evidence, keys: Tensor, source: Source) -> bool:
    """Return whether tokens of item 0 change outputs of its other tokens: keys are `batch key`. False if unknown."""
    if not evidence.follows or source.names != evidence.source.names:
        return False
    places = keys[0].nonzero().flatten()
    span = slice(int(places[0]), int(places[-1]) + 1)
    with suppress(NotPossibleError):
        moved = evidence.differences(evidence.output_with(source.others(span, by=6.0)))
        return bool(moved[0, ~keys[0]].any())
    return False


def _comparable(before: Iterable[SeenKeys], after: Iterable[SeenKeys], keys: Tensor) -> tuple[_Pair, ...]:
    """Return the sights of each attention with these keys in two runs: `batch query key` for keys of `batch key`."""
    pairs = []
    for whole, masked in zip(before, after, strict=False):
        if whole.seen.shape == masked.seen.shape and whole.seen.shape[::2] == keys.shape:
            pairs.append((whole, masked))
    return tuple(pairs)


def _source_of_changed(pairs: Iterable[_Pair], sources: Sequence[Source]) -> Source:
    """Return the tokens on which the keys of every changed attention depend; the first ones if none are."""
    changed = [after.origins for before, after in pairs if not torch.equal(before.seen, after.seen)]
    for source in sources:
        if all(origins.intersection(source.names) for origins in changed):
            return source
    return sources[0]


def _queries_that_lose_keys(before: Iterable[SeenKeys], after: Iterable[SeenKeys]) -> Iterator[Tensor]:
    """Yield for each attention with fewer visible keys in another run the queries that lose some: `query`."""
    for whole, masked in zip(before, after, strict=False):
        if whole.seen.shape != masked.seen.shape:
            continue
        losing = (whole.seen & ~masked.seen).any(-1).any(0)
        if bool(losing.any()):
            yield losing


# -- read by others ---------------------------------------------------------------------------------------------------


def mask_facts(evidence: Evidence) -> Iterator[Fact]:
    """Yield a fact for each mask argument: which value keeps a key."""
    for run in masked_runs(evidence):
        if isinstance(run, Fact):
            yield run
        elif run.is_meaning_known:
            kept, ignored = word_of(run.kept), word_of(run.ignored)
            yield Fact("mask", f"{run.name}: {kept} keeps a key, {ignored} ignores it")
        elif run.hides_queries:
            yield Fact("mask", f"{run.name}: {word_of(run.value)} masks out a query, not a key")
        elif run.pairs and not run.hides and torch.equal(run.output, run.base):
            place = int(run.keys[0].nonzero()[0])
            yield Fact("mask", f"{run.name} has no effect on key {place}: it is equally visible with either value")
    yield from facts_of_missing(evidence)


def padding_mask(evidence: Evidence, name: str, source: Source, pads: slice) -> Tensor:
    """Return a mask in the form that runs, with padding at these positions of every second item, from the first on."""
    padded = torch.zeros(source.rows, source.length, dtype=torch.bool)
    padded[0::2, pads] = True
    form = evidence.values.get(name)
    ignored = torch.tensor(evidence.intent.padding_true == "ignore")
    kept = ~ignored
    if isinstance(form, Tensor) and form.is_floating_point() and float(form.max()) <= 0 > float(form.min()):
        kept, ignored = torch.tensor(0.0), form.min()
    for run in masked_runs(evidence):
        if not isinstance(run, MaskedRun) or run.name != name:
            continue
        if form is None:
            form = run.mask
        if run.is_meaning_known:
            kept, ignored = run.kept, run.ignored
    mask = torch.where(padded, ignored.cpu(), kept.cpu())
    if not isinstance(form, Tensor):
        return mask
    if form.dim() > 2:
        between = form.shape[1:-1]
        mask = mask.reshape(len(mask), *[1] * len(between), -1).expand(-1, *between, -1)
    return mask.to(form).contiguous()

"""What mask arguments do, read off the scores of a run in which some of a mask's values are others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...reports.check import Fact, Finding
from ...text import shortened, spans
from .bench import Bench, remembered
from .runner import NotPossibleError, RaisedError
from .sight import SeenKeys
from .softmax import masks_everything, softmax, weak_masks
from .sources import Source

_MOST = 2
"""Mask arguments that are looked at."""


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
    bench: Bench
    """The run."""
    pairs: tuple[tuple[SeenKeys, SeenKeys], ...]
    """What each attention whose keys these are sees with the mask as it was given, and with this one."""

    @property
    def bars(self) -> bool:
        """Whether any attention sees less."""
        return any(bool((was.seen & ~now.seen).any()) for was, now in self.pairs)

    @property
    def opens(self) -> bool:
        """Whether any attention sees more."""
        return any(bool((now.seen & ~was.seen).any()) for was, now in self.pairs)

    @property
    def meaning(self) -> tuple[Tensor, Tensor]:
        """The value that keeps a key, and the one that ignores it."""
        return (self.value, self.other) if self.bars else (self.other, self.value)


@remembered
def masked_runs(bench: Bench) -> list[Masked | Fact]:
    """Return a run for each mask argument, or a fact where the forward does not take another value.

    The declared padding mask is among them where it was not given: it is run for that, and keeps all.
    """
    given = {n: v for n, v in bench.values.items() if isinstance(v, Tensor) and ("mask" in n or v.dtype == torch.bool)}
    runs: list[Masked | Fact] = []
    name = bench.intent.padding
    if name is not None and bench.values.get(name) is None and bench.sources and bench.sources[0].positions is not None:
        source = padded_source(bench, name)
        ones = torch.ones(source.rows, source.length, dtype=torch.bool) & (bench.intent.padding_true != "ignore")
        run = _masked_run(bench, name, ones)
        runs += filter(None, [_masked_run(bench, name, ones.long()) if isinstance(run, Fact) else run])
    for name, value in given.items():
        run = _masked_run(bench, name, value) if value.dim() > 1 and len(runs) < _MOST else None
        runs += [] if run is None else [run]
    return runs


def _masked_run(bench: Bench, name: str, given: Tensor) -> Masked | Fact | None:
    """Return a run with another value in a mask; None where its keys are not known, or it has several values there."""
    source = next((s for s in bench.sources if s.positions is not None and s.length == given.shape[-1]), None)
    if source is None or source.length < 4 or name in source.names:
        return None
    keys = torch.zeros(source.rows, source.length, dtype=torch.bool)
    count = max(2, source.length // 4)
    causal = any(not bool(sight.seen[:, 0, 1:].any()) for sight in bench.sights)
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
        masked = bench.with_arguments({name: changed})
        pairs = tuple(_pairs(bench.sights, masked.sights, source))
    except (RaisedError, NotPossibleError) as error:
        return Fact("mask", f"{name}: the forward does not take another value ({error})")
    return Masked(name, value, other, keys, source, masked, pairs)


def padded_source(bench: Bench, name: str) -> Source:
    """Return the tokens that the declared padding mask is of."""
    given = bench.values.get(name)
    sources = [source for source in bench.sources if source.positions is not None]
    fitting = [source for source in sources if isinstance(given, Tensor) and given.shape[-1] == source.length]
    if not fitting and any(word in name for word in ("encoder", "memory", "key", "src", "context")):
        fitting = sources[1:2]
    return (fitting or sources)[0]


def _pairs(
    before: tuple[SeenKeys, ...], after: tuple[SeenKeys, ...], source: Source
) -> Iterator[tuple[SeenKeys, SeenKeys]]:
    if len(before) == len(after):
        for was, now in zip(before, after, strict=True):
            if was.seen.shape == now.seen.shape and was.keys == source.length and len(was.seen) == source.rows:
                yield was, now


def mask_facts(bench: Bench) -> Iterator[Fact]:
    """Yield which value of each mask argument keeps a key."""
    for run in masked_runs(bench):
        if isinstance(run, Fact):
            yield run
        elif run.bars != run.opens:
            kept, ignored = run.meaning
            yield Fact("mask", f"{run.name}: {_word(kept)} keeps a key, {_word(ignored)} ignores it")
        elif run.pairs and not run.bars:
            place = int(run.keys[0].nonzero()[0])
            yield Fact("mask", f"{run.name} bars nothing here: key {place} is seen alike with either value")


def _word(value: Tensor) -> str:
    return str(value.item()) if value.dtype == torch.bool or not value.is_floating_point() else f"{value.item():.3g}"


def mask_faults(bench: Bench) -> Iterator[Finding]:
    """Yield masks that bar other keys than those that they mark, whatever their values mean, or bar by no score."""
    for run in masked_runs(bench):
        if isinstance(run, Fact):
            continue
        declared = run.name == bench.intent.padding
        yield from _misplaced(run, declared=declared)
        if declared:
            yield from _of_declared(bench, run)
        yield from _nan(bench, run)
        yield from _of_weights(bench, run)
        run.bench.base.release()


def _of_weights(bench: Bench, run: Masked) -> Iterator[Finding]:
    """Yield what is wrong with the weights of a run with a mask, and was not without it."""
    findings: list[Finding] = []
    if "masking" not in bench.failed and not any(map(masks_everything, run.bench.sights)):
        findings += weak_masks(run.bench)
    with suppress(NotPossibleError):
        findings += () if "softmax" in bench.failed else softmax(run.bench)
    for finding in findings:
        if finding.sure:
            evidence = f"With {run.name} {_word(run.other)} at some keys. {finding.evidence}"
            yield replace(finding, evidence=evidence)


def _of_declared(bench: Bench, run: Masked) -> Iterator[Finding]:
    """Yield a declared mask that moves nothing, or means the opposite of what was declared."""
    name, means, keys = run.name, bench.intent.padding_true, f"at keys {_places(run.keys[0])} of row 0"
    line = run.pairs[0][1].line if run.pairs else ""
    if not run.bars and not run.opens and torch.equal(run.bench.output, bench.output):
        sentence = f"{name} changes nothing: no score and no output hangs on it."
        evidence = f"With {_word(run.other)} {keys} the output is the same to the bit."
        yield Finding("padding", sentence, evidence, source=line, fix="apply it to the scores before the softmax.")
    kept, ignored = run.meaning
    if run.bars != run.opens and means and {float(kept), float(ignored)} == {0, 1} and bool(kept) != (means == "keep"):
        sentence = f"The mask works the other way round: what {name} keeps is barred."
        evidence = (
            f"With {_word(ignored)} {keys} they are not seen, and {name} was said to {means} where it is True or 1."
        )
        fix = f"turn the mask round where it is applied (~{name}), or say what it means otherwise."
        yield Finding("padding", sentence, evidence, source=line, fix=fix)


def _nan(bench: Bench, run: Masked) -> Iterator[Finding]:
    """Yield a mask under which a query is left no key, and becomes NaN."""
    nan = run.bench.output.isnan()
    if not bench.follows or bool(bench.output.isnan().any()) or not bool(nan.any()):
        return
    marked = run.keys if run.source is bench.sources[0] and run.bars else torch.zeros_like(run.keys)
    rows = bench.apart(nan.float(), torch.zeros_like(bench.output)) > 0
    real = marked.shape != rows.shape or bool((rows & ~marked).any())
    yield Finding(
        "finite",
        f"With {run.name} some queries are left no key, and give NaN"
        + ("." if real else ": padding's own rows, which a next layer may spread."),
        f"{run.name} was {_word(run.other)} at keys {_places(run.keys[0])} of row 0, and the output is NaN at "
        f"{int(rows.sum())} tokens" + ("." if real else ", all of them padding."),
        sure=real,
        source=run.pairs[0][1].line if run.pairs else "",
        fix="bar with a large negative number instead of -inf, or leave each query itself.",
    )


def _misplaced(run: Masked, *, declared: bool) -> Iterator[Finding]:
    """Yield an attention that bars queries for keys, or keys of another row of the batch."""
    if run.bars == run.opens:
        return
    kept, ignored = run.meaning
    keys, rows = run.keys, run.keys.any(1)
    for was, now in run.pairs:
        changed = was.seen != now.seen
        # What padding's own queries see is of no account.
        real = changed & ~keys[:, :, None] if was.queries == was.keys else changed
        by_key, sure, fix = real.any(1), True, ""
        evidence = f"With {run.name} {_word(run.other)} at keys {_places(keys[0])} of row 0"
        if bool(changed[~rows].any()):
            sentence = "The mask of one row bars keys of another row."
            other = int((~rows).nonzero()[0])
            evidence += f" and {_word(run.value)} in row {other}, the scores of that row are masked otherwise as well."
            fix = (
                "repeat the mask in the order in which batch and heads are folded: repeat_interleave(heads, 0) for "
                "(batch heads)."
            )
        elif run.bars and bool(changed.any()) and not bool(real.any()):
            if bool(now.seen[0, keys[0]].any()):
                continue
            sentence = "The mask bars queries, not keys: what it marks is seen by all others."
            evidence += ", these queries see nothing, and the others see what they saw."
            fix = "the mask belongs to the keys: mask[:, None, None, :] beside batch heads query key."
        elif bool((by_key & ~keys).any()):
            sentence = f"The mask bars other keys than those where {run.name} is {_word(ignored)}."
            evidence += f", the scores of keys {_places(by_key[0])} are masked otherwise; {_word(kept)} keeps."
            sure = declared
        else:
            continue
        yield Finding("padding", sentence, evidence, sure, now.line, now.module, fix)
        return


def _places(marks: Tensor) -> str:
    return shortened(spans(int(place) for place in marks.nonzero().flatten()), 40)

"""The effect of mask arguments: which keys they mask out, and whether padding changes real outputs.

Each mask is changed at some keys (`masked_runs.py`); then some tokens are made padding (`padded_runs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...reports.check import Finding, SkippedCheck
from ..arguments import Source
from ..evidence import OF_OUTPUTS, OTHER_SIZES, Evidence
from ..lab import NotPossibleError, UndeclaredError
from ..laid_over import MASK_THE_KEYS, laid_over
from ..masked_runs import MaskedRun, masked_runs, padded_sources, places_of, word_of
from ..padded_runs import of_pooled_output, of_real_outputs
from ..registry import rule
from ..seen_keys import SeenKeys
from .masking import masks_everything


@rule(
    runs=True,
    confirm="--mask NAME=keep",
    by_position=True,
    of_outputs="padding does not change the outputs of real tokens",
)
def padding(evidence: Evidence) -> Iterator[Finding | SkippedCheck]:
    """Padding does not change the outputs of real tokens.

    `--mask NAME=keep` declares the mask and the meaning of 1 or True in it. Padding is added to one
    batch item, its content and length are changed, and the outputs of the real tokens are compared. If
    the output is pooled, e.g. a class, the whole output of the item is compared. The outputs must stay
    the same. Otherwise the answer to a sentence depends on the longest sentence in its batch. Here
    padding is set to zero, but its keys still get weight.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --mask mask=keep
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x, mask):
            q, k, v = self.qkv(x * mask[..., None]).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        weights = (q @ k.mT / 8**0.5).softmax(-1)
    +        scores = q @ k.mT / 8**0.5
    +        scores = scores.masked_fill(mask[:, None, None] == 0, float("-inf"))
    +        weights = scores.softmax(-1)
    ```
    """
    name = evidence.intent.padding
    if not masks_everything(evidence):
        evidence.require_passed("masking")
    findings: list[Finding] = []
    for run in masked_runs(evidence):
        if isinstance(run, MaskedRun):
            findings += _of_run(evidence, run)
    yield from findings
    if name is None:
        if not findings:
            raise UndeclaredError("--mask NAME=keep")
        return
    if any(finding.sure for finding in findings):
        return
    for result in _of_padded_tokens(evidence, name):
        yield replace(result, source=evidence.mask_line) if isinstance(result, Finding) else result


def _of_padded_tokens(evidence: Evidence, name: str) -> Iterator[Finding | SkippedCheck]:
    """Yield the faults of a run in which some tokens are padding by a declared mask."""
    evidence.require_passed(*OF_OUTPUTS)
    if evidence.source.batch is None or not (evidence.follows or _is_by_item(evidence)):
        raise NotPossibleError("the output has no entry for each token of each batch item")
    source = _source_of_mask(evidence, name)
    if source.length < 3:
        raise NotPossibleError("there are fewer than 3 tokens; give at least 3")
    if evidence.follows:
        yield from of_real_outputs(evidence, name, source)
    else:
        yield from of_pooled_output(evidence, name, source)


def _source_of_mask(evidence: Evidence, name: str) -> Source:
    """Return the tokens of the keys of a declared mask; the most likely ones if no run shows them."""
    for run in masked_runs(evidence):
        if isinstance(run, MaskedRun) and run.name == name:
            return run.source
    return padded_sources(evidence, name)[0]


def _is_by_item(evidence: Evidence) -> bool:
    """Return whether the first axis of the output is the batch: it is pooled, or made by queries of another source."""
    return evidence.output.dim() > 1 and evidence.output.shape[0] == evidence.source.rows


def _of_run(evidence: Evidence, run: MaskedRun) -> list[Finding]:
    """Return the faults of a run with a changed mask: causes, and only without one what follows from them."""
    is_declared = run.name == evidence.intent.padding
    findings = _of_weights(run)
    if findings:
        return findings
    misplaced = _misplaced(run, is_declared=is_declared)
    if misplaced is not None:
        findings.append(misplaced)
    if is_declared:
        findings += _of_declared(evidence, run)
    if findings:
        return findings
    without_keys = _without_keys(evidence, run)
    if without_keys is not None:
        return [without_keys]
    return [_of_other_items(run)] if _changes_other_items(evidence, run) else []


def _of_weights(run: MaskedRun) -> list[Finding]:
    """Return the sure faults of the weights in a run, with the change that shows them."""
    findings = []
    for fault in run.faults:
        if fault.sure:
            findings.append(replace(fault, evidence=f"With {run.change} at some keys. {fault.evidence}"))
    return findings


# -- a mask in the wrong place ----------------------------------------------------------------------------------------


def _misplaced(run: MaskedRun, *, is_declared: bool) -> Finding | None:
    """Return the fault of the first attention that masks queries, or the wrong keys, or keys of another batch item."""
    if run.hides == run.opens:
        return None
    for before, after in run.pairs:
        finding = _misplaced_in(run, before, after, is_declared=is_declared)
        if finding is not None:
            return finding
    return None


def _misplaced_in(run: MaskedRun, before: SeenKeys, after: SeenKeys, *, is_declared: bool) -> Finding | None:
    """Return the same for one attention."""
    changed = before.seen != after.seen  # batch query key
    if bool(changed[run.other_items].any()):
        return _of_other_items(run)
    changed_of_real = changed
    if before.queries == before.keys:
        changed_of_real = changed & ~run.keys[:, :, None]  # queries of padding do not matter
    if bool(changed.any()) and not bool(changed_of_real.any()):
        return _of_queries(run, after) if run.hides and _is_of_queries(run, before, after) else None
    changed_keys = changed_of_real.any(1)  # batch key
    if bool((changed_keys & ~run.keys).any()):
        return _of_wrong_keys(run, after, changed_keys, is_declared=is_declared)
    return None


def _is_of_queries(run: MaskedRun, before: SeenKeys, after: SeenKeys) -> bool:
    """Return whether queries at the masked places lost their keys, and the other queries still see the masked keys."""
    masked = run.keys[0]
    others_of_masked = (after.seen & (after.distance != 0))[0, masked]
    if bool(others_of_masked.any()):
        return False
    # Else padding sees these keys neither before nor after.
    return bool((before.seen & after.seen)[0, ~masked][:, masked].any())


def _of_queries(run: MaskedRun, after: SeenKeys) -> Finding:
    return Finding(
        "padding",
        "The mask is applied to queries instead of keys: the other queries still attend to the masked tokens.",
        f"With {run.change} at {run.places}, these queries see no other key, and the other queries see the same keys "
        "as before.",
        source=after.line,
        module=after.module,
        fix=laid_over(MASK_THE_KEYS, after.layout),
    )


def _of_wrong_keys(run: MaskedRun, after: SeenKeys, changed: Tensor, *, is_declared: bool) -> Finding:
    """Return the fault of a mask that changes other keys than its own; `changed` are these keys, `batch key`."""
    return Finding(
        "padding",
        f"The mask masks out the wrong keys; expected the keys where {run.name} is {word_of(run.ignored)}.",
        f"With {run.change} at {run.places}, the masking of keys {places_of(changed[0])} changes. "
        f"{word_of(run.kept)} keeps a key.",
        sure=is_declared,
        source=after.line,
        module=after.module,
    )


# -- a mask of other items --------------------------------------------------------------------------------------------


def _changes_other_items(evidence: Evidence, run: MaskedRun) -> bool:
    """Return whether the mask of one item changes the output of another item, e.g. in some of its heads."""
    if evidence.failed.intersection(OF_OUTPUTS):
        return False
    others = run.other_items
    if not evidence.follows or run.source is not evidence.source or not bool(others.any()):
        return False
    return bool(evidence.differences(run.output, run.base, times=OTHER_SIZES)[others].any())


def _of_other_items(run: MaskedRun) -> Finding:
    """Return the fault of a mask of one batch item that reaches another: where its batch axis lies."""
    item = int(run.other_items.nonzero()[0])
    layout = run.pairs[0][1].layout if run.pairs else ""
    is_joined = layout.startswith("(")
    if not is_joined and any(_is_by_head(run, before, after) for before, after in run.pairs):
        return Finding(
            "padding",
            f"The batch axis of {run.name} is aligned with the heads of the scores: head 0 of every item "
            "gets the mask of item 0.",
            f"With {run.change} at {run.places} alone, head 0 of batch item {item} changes too.",
            source=run.line,
            fix=laid_over("Align the batch axis of the mask with that of the scores", layout),
        )
    return Finding(
        "padding",
        "The mask of one batch item masks out keys of another item.",
        f"With {run.change} at {run.places} alone, batch item {item} changes too.",
        source=run.line,
        fix=laid_over("Repeat the mask in the order of the joined dimension", layout) if is_joined else "",
    )


def _is_by_head(run: MaskedRun, before: SeenKeys, after: SeenKeys) -> bool:
    """Return whether a change in the mask of some batch items changed the heads of the same numbers, in every item.

    So it is where the mask's batch axis lies on the heads, of which there are as many as items.
    """
    items = run.keys.any(1)
    if before.zeros.shape != after.zeros.shape or before.zeros.shape[1] != len(items):
        return False
    changed = (before.zeros != after.zeros).flatten(2).any(2)  # batch heads
    return torch.equal(changed, items[None].expand_as(changed))


# -- a declared mask --------------------------------------------------------------------------------------------------


def _of_declared(evidence: Evidence, run: MaskedRun) -> Iterator[Finding]:
    """Yield a fault if a declared mask has no effect, or means the opposite of the declaration."""
    were_seen = not run.pairs or any(not before.masks_out(run.keys) for before, _ in run.pairs)
    if were_seen and run.has_no_effect:
        yield _without_effect(run)
    means = evidence.intent.padding_true
    if means and _is_inverted(run, means):
        yield Finding(
            "padding",
            f"The mask is inverted: the keys that {run.name} keeps are masked out.",
            f"With {word_of(run.ignored)} at {run.places}, no query sees these keys. "
            f"Declared: True or 1 in {run.name} means {means}.",
            source=run.line,
            fix=f"Invert the mask where it is applied (~{run.name}), or declare the other meaning.",
        )


def _is_inverted(run: MaskedRun, means: str) -> bool:
    """Return whether True or 1 means the opposite of what was declared: `keep` or `ignore`."""
    if not run.is_meaning_known or {float(run.kept), float(run.ignored)} != {0, 1}:
        return False
    return bool(run.kept) != (means == "keep")


def _without_effect(run: MaskedRun) -> Finding:
    """Return the fault of a mask that leaves the output as it is, although it may mask out keys of some queries."""
    proof = f"With {word_of(run.value)} at {run.places}, the output is the same bit for bit."
    spared = [~losing for losing in run.losing if not bool(losing.all())]
    if not run.losing:
        sentence = f"{run.name} has no effect on any score or output."
        fix = "Apply the mask to the scores before the softmax."
    elif spared:
        sentence = (
            f"{run.name} has no effect on the output: query {places_of(spared[-1])} sees the same keys with any mask."
        )
        proof += f" Queries {places_of(~spared[-1])} lose keys, but the output does not depend on these queries."
        fix = f"Apply {run.name} to the keys of every query, also of a class token."
    else:
        sentence = f"{run.name} has no effect on the output, although every query loses keys."
        fix = "Use the result of the attention in the output."
    return Finding("padding", sentence, proof, source=run.line, fix=fix)


# -- a mask that leaves no key ----------------------------------------------------------------------------------------


def _without_keys(evidence: Evidence, run: MaskedRun) -> Finding | None:
    """Return a fault if a mask leaves a query without keys, so that its output is NaN."""
    is_nan = run.output.isnan()
    if not evidence.follows or bool(run.base.isnan().any()) or not bool(is_nan.any()):
        return None
    zeros = torch.zeros_like(evidence.output)
    tokens = evidence.differences_with_padding(is_nan.float(), zeros, times=0) > 0  # batch position
    padding = run.keys if run.source is evidence.source and run.hides else torch.zeros_like(run.keys)
    is_real = padding.shape != tokens.shape or bool((tokens & ~padding).any())
    sentence = f"{run.name} leaves some queries without keys, so their outputs are NaN."
    proof = f"With {run.change} at {run.places}, the output is NaN at {int(tokens.sum())} tokens"
    return Finding(
        "finite",
        sentence if is_real else f"{sentence} These queries are padding, but the next layer may spread the NaN.",
        f"{proof}." if is_real else f"{proof}, all of them padding.",
        sure=is_real,
        source=run.line,
        fix="Mask with a large negative number instead of -inf, or let each query attend to itself.",
    )

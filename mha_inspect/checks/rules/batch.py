"""Check that batch items are independent: a token of item 0 is changed, and the outputs of other items compared.

Then all tokens of the last item are changed: an item may change those before it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import floordiv, mod

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...graph.attention import Attention
from ...graph.axis import resolve, size_of, wide
from ...naming.visibility import kinds_of
from ...record.arguments import tensors_in
from ...reports.check import Finding
from ...text import plural
from ..arguments import Source, batch_axis_of
from ..evidence import OTHER_SIZES, Evidence
from ..exchanged_axes import way_out
from ..given import of_other_items
from ..lab import NotPossibleError, RaisedError
from ..registry import rule

_MIXED = "Changing one batch item changes the output of another."
_KEEP_SEPARATE = "Keep the batch separate: check each view, repeat and mask that joins it with heads or positions."


@dataclass(frozen=True, eq=False)
class _Leak:
    """A token of batch item 0 that changes other items change."""

    source: Source
    """The argument with the token."""
    token: int
    changed: Tensor
    """`batch position`: how much each output changes."""

    @property
    def item(self) -> int:
        """The first other item that changes."""
        return 1 + int((self.changed[1:] > 0).nonzero()[0][0])

    @property
    def position(self) -> int:
        """The first position of this item that changes."""
        return int((self.changed[1:] > 0).nonzero()[0][1])

    @property
    def proof(self) -> str:
        """The first change in words, and how many items change."""
        change = float(self.changed[self.item, self.position])
        items = int((self.changed[1:].amax(1) > 0).sum())
        return (
            f"Changing token {self.token} of batch item 0 of {self.source.names[0]} changes item {self.item} "
            f"at position {self.position} by {change:.3g}. "
            f"In all, {items} of the {len(self.changed) - 1} other items change."
        )


@rule(
    runs=True,
    after=("heads", "softmax"),
    confirm="--batch-first or --seq-first",
    of_outputs="changing one batch item does not affect the others",
)
def batch(evidence: Evidence) -> Iterator[Finding]:
    """Changing one batch item does not affect the others.

    A token of one batch item is changed, and the outputs of the other items are compared with those
    before. The outputs must stay the same. Otherwise training mixes unrelated sequences, and an output
    depends on the sequences that happen to be in the same batch. The usual cause is a layer that
    expects the tokens first.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x):
            batch, tokens, features = x.shape
            return self.attention(x, x, x, need_weights=False)[0]
    ```

    ## Right

    ```diff
    -        self.attention = nn.MultiheadAttention(16, 2)
    +        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
    ```
    """
    source = evidence.source
    if source.batch is None:
        raise NotPossibleError("the input has no batch")
    if evidence.output.dim() <= source.batch or evidence.output.shape[source.batch] != source.rows:
        raise NotPossibleError("the output has no entry for each batch item")
    if source.rows < 2:
        raise NotPossibleError("the batch has one item; give a batch of 2")
    finding = _of_tokens(evidence, evidence.reach, source)
    findings = list(_of_further_sources(evidence)) if finding is None else [finding]
    if not findings:
        findings = list(_of_last_item(evidence))
    yield from findings
    if not findings:
        findings = list(of_other_items(evidence))
        yield from findings
    if not findings:
        yield from _of_equal_items(evidence)


def _of_equal_items(evidence: Evidence) -> Iterator[Finding]:
    """Yield the fault of items that have equal inputs and other outputs, e.g. by positions that run along the batch."""
    source = evidence.source
    ops = evidence.run.recording.ops
    if source.batch is None or _compares_items(evidence) or any(op.does("draws") for op in ops):
        return
    returned = [tensor for _, tensor in tensors_in(evidence.run.returned)]
    if not all(_is_dense(tensor) for tensor in (*returned, *evidence.values.values()) if isinstance(tensor, Tensor)):
        return  # each item may have a length of its own
    if _has_state_of_items(evidence, source):
        return
    equal = {}
    for name, value in evidence.values.items():
        if any(tensors_in(value)):
            equal[name] = tree_map_only(Tensor, partial(_with_item_0_alone, source), value)
    output = evidence.output_with(equal)
    first = output.narrow(source.batch, 0, 1).expand_as(output)
    apart = evidence.differences(output, first, times=OTHER_SIZES)
    if not bool((apart > 0).any()):
        return
    item, position = (apart > 0).nonzero()[0].tolist()
    yield Finding(
        "batch",
        "Batch items with the same input have different outputs: something is added or chosen by the item's place.",
        f"With the input of item 0 in every item, item {item} differs from item 0 at position {position} by "
        f"{float(apart[item, position]):.3g}.",
        sure=False,
        fix="Cut and add tables of positions along the tokens: pe[:x.size(0)] is cut along the batch.",
        confirm="--batch-first or --seq-first",
    )


def _with_item_0_alone(source: Source, value: Tensor) -> Tensor:
    """Return a tensor with the entry of item 0 for every item, if it has one for each."""
    if source.batch is None or value.dim() <= source.batch or value.shape[source.batch] != source.rows:
        return value
    return value.narrow(source.batch, 0, 1).expand_as(value).clone()


def _has_state_of_items(evidence: Evidence, source: Source) -> bool:
    """Return whether the run reads a tensor with an entry for each item that is no argument, e.g. a cache."""
    recording = evidence.run.recording
    given = {named.tensor.id for named in recording.inputs}
    for op in recording.ops:
        for tensor in op.inputs:
            if tensor.id in given or recording.producer(tensor) is not None or len(tensor.shape) < 3:
                continue
            if tensor.shape[source.batch or 0] == source.rows:
                return True
    return False


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _of_further_sources(evidence: Evidence) -> Iterator[Finding]:
    """Yield the faults of the middle tokens of other arguments, e.g. of an encoder's."""
    for place, changed in evidence.reach_of_others.items():
        source = evidence.sources[place]
        if source.rows != evidence.source.rows:
            continue  # of a table of pairs, the first dimension is no batch
        finding = _of_tokens(evidence, {source.length // 2: changed}, source)
        if finding is not None:
            yield finding


def _of_last_item(evidence: Evidence) -> Iterator[Finding]:
    """Yield the fault of the last batch item, all of whose tokens are changed, if it changes an item before it."""
    source, last = evidence.source, evidence.source.rows - 1
    if source.positions is None or _compares_items(evidence):
        return
    output = evidence.output_with(source.others(slice(None), row=slice(last, None)))
    changed = evidence.differences(output, times=OTHER_SIZES)[:last]
    if not bool((changed > 0).any()):
        return
    item, position = (changed > 0).nonzero()[0].tolist()
    why = _why_correct(evidence, evidence.reach, source)
    yield Finding(
        "batch",
        _MIXED + (f" The module is correct if {why}." if why else ""),
        f"Changing batch item {last} of {source.names[0]} changes item {item} at position {position} "
        f"by {float(changed[item, position]):.3g}.",
        sure=not why,
        source=evidence.scores_line,
        fix=_KEEP_SEPARATE,
    )


def _of_tokens(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> Finding | None:
    """Return a fault if tokens of item 0 change other items; `reach` maps a token to the outputs that it changes."""
    leak = _first_leak(evidence, reach, source)
    if leak is None:
        return None
    if not evidence.follows or not _stay_in_place(reach, leak):
        attention = _attention_over_items(evidence, source)
        if attention is not None:
            return _attends_over_items(evidence, leak, attention)
        return _of_mixed_items(evidence, reach, leak)
    _, is_known = batch_axis_of(evidence.subject, evidence.values, evidence.intent)
    return _runs_over_the_batch(evidence, leak) if is_known else _may_run_over_the_batch(evidence, leak)


def _first_leak(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> _Leak | None:
    """Return the first token of item 0 that changes another item; None if none does."""
    compares_items = _compares_items(evidence)
    for token, changed in reach.items():
        if not bool((changed[1:] > 0).any()):
            continue
        if not compares_items or _changes_other_pairs(evidence, source, token):
            return _Leak(source, token, changed)
    return None


def _compares_items(evidence: Evidence) -> bool:
    """Return whether the output has a number for each pair of batch items, as contrastive similarities have."""
    rows = evidence.source.rows
    return evidence.output.shape == (rows, rows) and not evidence.follows


def _changes_other_pairs(evidence: Evidence, source: Source, token: int) -> bool:
    """Return whether a token of item 0 changes a number of two other items: 0 is a column of every item."""
    output = evidence.output.clone()
    output[1:, 1:] = evidence.output_with(source.others(token))[1:, 1:]
    return bool((evidence.differences(output, times=OTHER_SIZES) > 0).any())


def _stay_in_place(reach: Mapping[int, Tensor], leak: _Leak) -> bool:
    """Return whether tokens change outputs at their own positions alone, in every item."""
    if changes_beside(leak.changed[:1], leak.token):
        return False
    return not any(changes_beside(changed, token) for token, changed in reach.items() if token < changed.shape[1])


def changes_beside(changed: Tensor, token: int) -> bool:
    """Return whether outputs at other positions than that of a token change: `batch position`."""
    is_other = torch.arange(changed.shape[1]) != token
    return bool((changed[:, is_other] > 0).any())


# -- attention over the batch -----------------------------------------------------------------------------------------


def _runs_over_the_batch(evidence: Evidence, leak: _Leak) -> Finding:
    fix = way_out(evidence, leak.source, leak.token)
    if fix and evidence.intent.batch_axis is None and evidence.subject.batch_first is not None:
        fix += " If the input is [seq, batch, embed], add --seq-first."
    return Finding(
        "batch",
        f"{_mixer(evidence)} runs over the batch instead of the positions: batch items affect each other, and the "
        "tokens of one item do not.",
        leak.proof,
        source=evidence.scores_line,
        fix=fix,
    )


def _mixer(evidence: Evidence) -> str:
    """Return what mixes tokens."""
    return "Attention" if evidence.run.attentions else "The module"


def _may_run_over_the_batch(evidence: Evidence, leak: _Leak) -> Finding:
    axis, _ = batch_axis_of(evidence.subject, evidence.values, evidence.intent)
    return Finding(
        "batch",
        f"{_mixer(evidence)} may run over the batch: it mixes dimension {axis} of the input and not dimension "
        f"{1 - axis}. If the sequence comes first, this is correct: set batch_axis.",
        leak.proof,
        sure=False,
        source=evidence.scores_line,
    )


def _attention_over_items(evidence: Evidence, source: Source) -> Attention | None:
    """Return the first attention whose queries and keys are the items of the batch; None if there is none.

    The axis of its queries is the dimension of the input that has the items, and that of the positions is not.
    """
    graph = evidence.run.graph
    tensors = [named.tensor for named in graph.recording.inputs if named.name in source.names]
    if source.batch is None or source.positions is None or not tensors:
        return None
    dims = graph.dimensions.of(tensors[0])
    if max(source.batch, source.positions) >= len(dims):
        return None
    items = set(wide(resolve(dims[source.batch])))
    positions = set(wide(resolve(dims[source.positions])))
    if not items or not positions or items & positions:
        return None
    for attention, _ in evidence.run.attentions:
        axes = attention.score_product.axes(graph.dimensions)
        queries = set(wide(resolve(axes.columns if attention.key_first else axes.rows)))
        if items <= queries and not positions & queries:
            return attention
    return None


def _attends_over_items(evidence: Evidence, leak: _Leak, attention: Attention) -> Finding:
    """Return the fault of an attention that takes the items of the batch as its positions.

    The output has an entry for each item and none for each position, so the items are the batch; or the layout of the
    input is known. Otherwise the sequence may come first.
    """
    source = leak.source
    path = attention.module or "The attention"
    layer = evidence.subject.module.get_submodule(attention.module) if attention.module else evidence.subject.module
    has_setting = getattr(layer, "batch_first", None) is False
    setting = " has batch_first=False:" if has_setting else ":"
    is_pooled = evidence.output.shape[0] == source.rows and source.length not in evidence.output.shape[1:]
    _, is_known = batch_axis_of(evidence.subject, evidence.values, evidence.intent)
    name = source.names[0]
    sentence = (
        f"{path}{setting} it takes dimension {source.batch} of {name}, {plural(source.rows, 'item')}, as "
        "positions, so each item attends to the others."
    )
    sure = is_pooled or is_known
    if not sure:
        sentence += " If the sequence comes first, this is correct: set batch_axis."
    return Finding(
        "batch",
        sentence,
        f"Changing token {leak.token} of batch item 0 of {name} changes item {leak.item} by "
        f"{float(leak.changed[leak.item].max()):.3g}. The scores have {source.rows} queries for {source.rows} keys.",
        sure=sure,
        source=evidence.scores_line,
        module=attention.module,
        fix=way_out(evidence, source, leak.token),
    )


# -- items that are mixed in another way ------------------------------------------------------------------------------


def _of_mixed_items(evidence: Evidence, reach: Mapping[int, Tensor], leak: _Leak) -> Finding:
    """Return the fault of items that affect each other, which is sure if no reason makes it correct."""
    sentence = _MIXED
    line = ""
    why = _why_correct(evidence, reach, leak.source)
    _, is_known = batch_axis_of(evidence.subject, evidence.values, evidence.intent)
    if not why and not is_known and not evidence.run.attentions:
        why = f"dimension {leak.source.batch} is not the batch"
    if not why and _is_first(evidence, leak.source):
        line = _line_of_mixed_items(evidence, leak.token)
    if why:
        sentence += f" The module is correct if {why}."
    return Finding(
        "batch",
        sentence,
        leak.proof,
        sure=not why,
        source=line or evidence.scores_line,
        fix=_KEEP_SEPARATE,
    )


def _line_of_mixed_items(evidence: Evidence, place: int) -> str:
    """Return the line from which on every result has an item changed by token `place` of another one; else empty.

    Results with as many rows as the batch has items are compared. A dimension of keys and values may have as many, but
    later results do not have it.
    """
    source, line = evidence.source, ""
    if source.batch != 0 or source.rows < 2:
        return ""
    with suppress(RaisedError):
        first = evidence.run.recording
        second = evidence.with_arguments(source.others(place)).run.recording
        if [op.name for op in first.ops] != [op.name for op in second.ops]:
            return ""
        for op, repeated in zip(first.ops, second.ops, strict=True):
            before = first.values.get(op.output.id) if op.outputs else None
            after = second.values.get(repeated.output.id) if op.outputs else None
            if before is None or after is None or not _is_by_item(before, after, source.rows):
                continue
            if not _has_changed(before[1:], after[1:]):
                line = ""
            elif not line:
                line = op.source
    return line


def _is_by_item(before: Tensor, after: Tensor, rows: int) -> bool:
    """Return whether a result is `batch ...` numbers in both runs. Nested tensors have no sizes to compare."""
    if before.is_nested or after.is_nested or not before.is_floating_point() or before.dim() < 2:
        return False
    return before.shape == after.shape and len(before) == rows and before.numel() > 0


def _has_changed(before: Tensor, after: Tensor) -> bool:
    """Return whether two results differ by more than rounding; numbers that are not finite do not count."""
    apart = (before.double() - after.double()).abs().nan_to_num(0.0)
    largest = max(float(before.double().nan_to_num(0.0, 0.0, 0.0).abs().max()), 1e-6)
    return float(apart.max()) > OTHER_SIZES * torch.finfo(before.dtype).eps * largest


def _is_first(evidence: Evidence, source: Source) -> bool:
    """Return whether these are the tokens that the output follows."""
    return source.names == evidence.source.names


def _why_correct(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> str:
    """Return a condition on which batch items may affect each other; empty if nothing hints at one."""
    if _have_extra_keys(evidence, source) or _are_compared_in_pairs(evidence, source):
        return "the items share a memory of extra keys"
    if _is_table_of_pairs(evidence, source) or _is_image_without_batch(evidence, source):
        return f"dimension {source.batch} is not the batch"
    return _groups(evidence, reach, source)


def _have_extra_keys(evidence: Evidence, source: Source) -> bool:
    """Return whether an attention has more keys than the tokens that the output follows."""
    length = evidence.source.length
    return _is_first(evidence, source) and any(sight.queries == length < sight.keys for sight in evidence.sights)


def _are_compared_in_pairs(evidence: Evidence, source: Source) -> bool:
    """Return whether the queries or keys of a cross-attention are batch items, e.g. in pairs of videos and texts."""
    for kind, (_, names) in zip(kinds_of(evidence.run), evidence.run.attentions, strict=True):
        if "cross" in kind and source.rows in names.lengths:
            return True
    return False


def _is_table_of_pairs(evidence: Evidence, source: Source) -> bool:
    """Return whether the input may be a table of pairs, with a bias that is made of it and added to the scores."""
    if source.rows != source.length:
        return False
    return any(_has_added_mask(attention) for attention, _ in evidence.run.attentions)


def _has_added_mask(attention: Attention) -> bool:
    return any(not op.does("fills") for op in attention.masks)


def _is_image_without_batch(evidence: Evidence, source: Source) -> bool:
    """Return whether an attention reads the first dimension of an image as something else than the batch."""
    if source.positions is not None:
        return False
    for shape, dims in evidence.queries:
        if shape == source.value.shape and not dims[source.batch or 0][0].startswith("batch"):
            return True
    return False


def _groups(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> str:
    """Return which groups of items a view divides the batch into, if only items of one group have an effect on another.

    Empty without such a view. Frames of a video and rows of an alignment are folded into the batch like that.
    """
    recording, dims_of = evidence.run.recording, evidence.run.graph.dimensions.of
    batches = []
    for named in recording.inputs:
        if named.name in source.names:
            batches.append(wide(resolve(dims_of(named.tensor)[source.batch or 0])))
    changed = _changed_items(reach)
    for op in recording.ops:
        if op.base_name not in ("view", "_unsafe_view"):
            continue
        for groups, items in pairwise(dims_of(op.output)):
            size = size_of(items)
            if size < 2 or wide(resolve(groups), resolve(items)) not in batches:
                continue
            if _are_of_one_group(changed, size):
                line = f" ({op.source})" if op.source else ""
                return (
                    f"dimension {source.batch} has {plural(size_of(groups), 'group')} of {size} items, as a view "
                    f"divides it{line}"
                )
    return ""


def _changed_items(reach: Mapping[int, Tensor]) -> set[int]:
    """Return the batch items that any token changes: `reach` has `batch position` for each token."""
    items: set[int] = set()
    for changed in reach.values():
        items.update(changed.amax(1).nonzero().flatten().tolist())
    return items


def _are_of_one_group(items: set[int], size: int) -> bool:
    """Return whether items are neighbours in one group of this size, or at one place of several groups.

    >>> _are_of_one_group({2, 3}, 2), _are_of_one_group({0, 2}, 2), _are_of_one_group({1, 2}, 2)
    (True, True, False)
    """
    return any(len({part(item, size) for item in items}) == 1 for part in (floordiv, mod))

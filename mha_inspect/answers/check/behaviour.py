"""Faults found by running the module with one argument, batch item or token changed, and comparing outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from math import prod
from operator import floordiv, mod

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.axis import resolve, size_of, wide
from ...graph.rerun import between
from ...naming.axes import AxisNames
from ...naming.visibility import kinds_of
from ...record.arguments import argument_names, tensors_in
from ...record.ops import Op
from ...reports.check import Finding
from ...text import listed, plural
from .arguments import Source, batch_axis_of
from .causal_masks import against_causal, against_window
from .evidence import Evidence, NotPossibleError, UndeclaredError
from .exchanged_axes import way_out
from .item_masks import masks_of_other_items
from .mixed_items import line_of_mixed_items
from .replay import SIDES, Factor, LostError, factors_of
from .seen_keys import SeenKeys
from .slots import slots


def inputs(evidence: Evidence) -> Iterator[Finding]:
    """Yield arguments that the forward wrote into."""
    recording, module = evidence.run.recording, evidence.subject.module
    before = dict(tensors_in(argument_names(module, *evidence.arguments.of_call({}))))
    reported = set[int]()
    for name, tensor in tensors_in(argument_names(module, *evidence.arguments_after)):
        same = tensor.shape != before[name].shape or torch.equal(tensor.nan_to_num(), before[name].nan_to_num())
        if same or id(tensor) in reported or name.split(".")[0] == evidence.intent.cache:
            continue
        reported.add(id(tensor))
        storages = {named.tensor.storage for named in recording.inputs if named.name == name}
        writes = [op for op in evidence.writes if op.inputs[0].storage in storages]
        if _fill_a_cache(evidence, writes):
            continue
        yield Finding(
            "inputs",
            f"The forward writes into its argument {name}.",
            f"The run changes {int((tensor != before[name]).sum())} of its {tensor.numel()} numbers.",
            sure=tensor.is_floating_point() and "mask" not in name and "cache" not in name,
            source=next((op.source for op in writes), ""),
            fix="Write into a copy: x = x + ... instead of x += ....",
        )


def _fill_a_cache(evidence: Evidence, writes: list[Op]) -> bool:
    """Return whether an attention projects what one of these operations writes, and reads it as keys or values."""
    recording = evidence.run.recording
    written = [tensor for op in writes for tensor in op.inputs[1:]]
    return any(
        between(recording, {stage.id}, tensor) and between(recording, {tensor.id}, factor)
        for attention, _ in evidence.run.attentions
        for side, factor in factors_of(attention).items()
        if (stage := attention.stages.get(f"{side[0]}_proj")) is not None
        for tensor in written
    )


def batch(evidence: Evidence) -> Iterator[Finding]:
    """Yield batch items whose tokens or masks change the outputs of other items."""
    source = evidence.source
    if source.batch is None:
        raise NotPossibleError("the input has no batch")
    if evidence.output.dim() <= source.batch or evidence.output.shape[source.batch] != source.rows:
        raise NotPossibleError("the output has no entry for each batch item")
    if source.rows < 2:
        raise NotPossibleError("the batch has one item; give a batch of 2")
    findings = list(_leaks(evidence, evidence.reach, source))
    yield from findings
    for place, changed in evidence.reach_of_others.items() if not findings else ():
        further = evidence.sources[place]
        same = further.rows == source.rows  # of a table of pairs, the first dimension is no batch
        leaks = list(_leaks(evidence, {further.length // 2: changed}, further)) if same else []
        findings += leaks
        yield from leaks
    if not findings:
        yield from masks_of_other_items(evidence)


def _leaks(evidence: Evidence, reach: Mapping[int, Tensor], source: Source) -> Iterator[Finding]:
    """Yield a fault if tokens of item 0 change other items; `reach` maps a token to the outputs that it changes."""
    leaks = {place: changed for place, changed in reach.items() if bool((changed[1:] > 0).any())}
    if not leaks:
        return
    place, changed = next(iter(leaks.items()))
    row, position = (int(number) for number in (changed[1:] > 0).nonzero()[0])
    alone = not _changes_beside(changed[:1], place)
    mixes = not any(_changes_beside(changed, at) for at, changed in reach.items() if at < changed.shape[1])
    others = int((changed[1:].amax(1) > 0).sum())
    is_first = source.names == evidence.source.names
    fix = "Keep the batch separate: check each view, repeat and mask that joins it with heads or positions."
    axis, sure = batch_axis_of(evidence.subject, evidence.values, evidence.intent)
    line = evidence.scores_line
    over = _over_the_batch(evidence, source)
    if over is not None and not (mixes and alone and evidence.follows):
        yield _attends_over_items(evidence, source, over, place, (row, changed))
        return
    if not (mixes and alone and evidence.follows):
        shares = is_first and any(s.queries == evidence.source.length < s.keys for s in evidence.sights)
        named = zip(kinds_of(evidence.run), evidence.run.attentions, strict=True)  # e.g. pairs of videos and texts
        shares |= any("cross" in kind and source.rows in names.lengths for kind, (_, names) in named)
        axes = [dims[source.batch or 0] for shape, dims in evidence.queries if shape == source.value.shape]
        added = any(not op.does("fills") for attention, _ in evidence.run.attentions for op in attention.masks)
        pairs = added and source.rows == source.length  # a table with a bias that is made of it
        elsewhere = pairs or (source.positions is None and not all(names[0].startswith("batch") for names in axes))
        why = f"dimension {source.batch} is not the batch" if elsewhere else _groups(evidence, source, reach)
        why = "the items share a memory of extra keys" if shares else why
        sure, sentence = not why, "Changing one batch item changes the output of another."
        sentence += f" The module is correct if {why}." if why else ""
        line = (line_of_mixed_items(evidence, place) if is_first and sure else "") or line
    elif sure:
        sentence = (
            "Attention runs over the batch instead of the positions: batch items affect each other, and the tokens of "
            "one item do not."
        )
        fix = way_out(evidence, source, place)
        if fix and evidence.intent.batch_axis is None and evidence.subject.batch_first is not None:
            fix += " If the input is [seq, batch, embed], add --seq-first."
    else:
        sentence = (
            f"Attention may run over the batch: it mixes dimension {axis} of the input and not dimension {1 - axis}. "
            "If the sequence comes first, this is correct: set batch_axis."
        )
        fix = ""
    proof = (
        f"Changing token {place} of batch item 0 of {source.names[0]} changes item {row + 1} at position {position} "
        f"by {float(changed[row + 1, position]):.3g}. In all, {others} of the {len(changed) - 1} other items change."
    )
    yield Finding("batch", sentence, proof, sure, line, fix=fix)


def _over_the_batch(evidence: Evidence, source: Source) -> Attention | None:
    """Return the first attention whose queries and keys are the items of the batch; None if there is none.

    The axis of its queries is the dimension of the input that has the items, and that of the positions is not.
    """
    graph = evidence.run.graph
    given = [named.tensor for named in graph.recording.inputs if named.name in source.names]
    if source.batch is None or source.positions is None or not given:
        return None
    dims = graph.dimensions.of(given[0])
    if max(source.batch, source.positions) >= len(dims):
        return None
    items, positions = (set(wide(resolve(dims[place]))) for place in (source.batch, source.positions))
    if not items or not positions or items & positions:
        return None
    for attention, _ in evidence.run.attentions:
        axes = attention.score_product.axes(graph.dimensions)
        queries = set(wide(resolve(axes.columns if attention.key_first else axes.rows)))
        if items <= queries and not positions & queries:
            return attention
    return None


def _attends_over_items(
    evidence: Evidence, source: Source, attention: Attention, place: int, leak: tuple[int, Tensor]
) -> Finding:
    """Return the fault of an attention that takes the items of the batch as its positions.

    The output has an entry for each item and none for each position, so the items are the batch; or the layout of the
    input is known. Otherwise the sequence may come first.
    """
    row, changed = leak
    path = attention.module or "The attention"
    layer = evidence.subject.module.get_submodule(attention.module) if attention.module else evidence.subject.module
    has_setting = getattr(layer, "batch_first", None) is False
    setting = " has batch_first=False:" if has_setting else ""
    is_pooled = evidence.output.shape[0] == source.rows and source.length not in evidence.output.shape[1:]
    sure = is_pooled or batch_axis_of(evidence.subject, evidence.values, evidence.intent)[1]
    name = source.names[0]
    sentence = (
        f"{path}{setting or ':'} it takes dimension {source.batch} of {name}, {plural(source.rows, 'item')}, as "
        "positions, so each item attends to the others."
    )
    if not sure:
        sentence += " If the sequence comes first, this is correct: set batch_axis."
    proof = (
        f"Changing token {place} of batch item 0 of {name} changes item {row + 1} by "
        f"{float(changed[row + 1].max()):.3g}. The scores have {source.rows} queries for {source.rows} keys."
    )
    fix = way_out(evidence, source, place)
    return Finding("batch", sentence, proof, sure, evidence.scores_line, module=attention.module, fix=fix)


def _groups(evidence: Evidence, source: Source, reach: Mapping[int, Tensor]) -> str:
    """Return which groups of items a view divides the batch into, if only items of one group have an effect on another.

    Empty without such a view. Frames of a video and rows of an alignment are folded into the batch like that.
    """
    recording, dims_of = evidence.run.recording, evidence.run.graph.dimensions.of
    given = [dims_of(named.tensor)[source.batch or 0] for named in recording.inputs if named.name in source.names]
    changed = {int(item) for each in reach.values() for item in each.amax(1).nonzero()}
    for op in recording.ops:
        for groups, items in pairwise(dims_of(op.output)) if op.base_name in ("view", "_unsafe_view") else ():
            size = size_of(items)
            divides = size > 1 and any(wide(resolve(groups), resolve(items)) == wide(resolve(dim)) for dim in given)
            if divides and any(len({part(item, size) for item in changed}) == 1 for part in (floordiv, mod)):
                has = f"has {plural(size_of(groups), 'group')} of {size} items"
                return f"dimension {source.batch} {has}, as a view divides it{f' ({op.source})' * bool(op.source)}"
    return ""


def _changes_beside(changed: Tensor, place: int) -> bool:
    return bool((changed[:, torch.arange(changed.shape[1]) != place] > 0).any())


def mixing(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if tokens have no effect on each other although no mask separates them."""
    if not evidence.follows or evidence.source.length < 2:
        raise NotPossibleError("the output has no entry for each token")
    source, sights, reach = evidence.source, evidence.sights, evidence.reach_in_bits
    if all(attention.is_over_memory for attention, _ in evidence.run.attentions):
        raise NotPossibleError("the keys are parameters, so no token attends to another")
    if evidence.padded is not None and int((~evidence.padded[0]).sum()) < 2:
        raise NotPossibleError("batch item 0 has one real token: all others are padding")
    if not any(_changes_beside(changed[:1], place) for place, changed in reach.items()):
        if any(bool((changed[1:] > 0).any()) for changed in reach.values()):
            return  # the check `batch` reports this
        others = evidence.reach_of_others.values()
        cross = all("cross" in kind for kind in kinds_of(evidence.run))
        if cross or any(bool((changed[0] > 0).any()) for changed in others):
            return  # the keys come from another source
        if any(sight.is_top_left for sight in sights):
            raise NotPossibleError("the mask hides the keys of all tokens of this call")
        if _is_muted(evidence):
            raise NotPossibleError("the result is multiplied by zeros, e.g. by a new W_o or gate")
        tried = [place for place in reach if place in evidence.seen_by_others] or list(reach)
        yield Finding(
            "mixing",
            "No token has an effect on another: attention runs over heads or features instead of positions, or its "
            "result is unused.",
            f"Changing token {' or '.join(map(str, tried))} of {source.names[0]} leaves every other output position "
            "unchanged, bit for bit.",
            sure=not all(sight.alone for sight in sights),
            source=evidence.scores_line,
            fix="Use transpose(1, 2) after splitting the heads: positions are the second-to-last dimension of q, k, v.",
        )
        return
    if not sights or not all(sight.open and sight.queries == source.length == sight.keys for sight in sights):
        return
    # A weight close to zero changes no output: the softmax is saturated.
    counts = torch.stack([sight.heavy for sight in sights]).all(0)
    if evidence.padded is not None:
        counts &= ~evidence.padded[0][:, None]
    unchanged = [(p, int(i)) for p, changed in reach.items() for i in (~(changed[0] > 0) & counts[:, p]).nonzero()]
    if unchanged:
        place, position = unchanged[0]
        yield Finding(
            "mixing",
            f"Token {place} has no effect on position {position}, although no mask separates them.",
            f"Changing token {place} leaves {sum(p == place for p, _ in unchanged)} of {source.length} positions "
            "unchanged, bit for bit. No score is masked.",
            source=evidence.scores_line,
            fix="Split heads with view(batch, positions, heads, head_dim), then transpose(1, 2).",
        )


def _is_muted(evidence: Evidence) -> bool:
    """Return whether the result of attention is multiplied by a parameter or gate of zeros on the way to the output."""
    recording = evidence.run.recording
    contexts = {attention.value_product.op.output.id for attention, _ in evidence.run.attentions}
    path = [op for named in recording.outputs for op in between(recording, contexts, named.tensor)]
    made = contexts.union(output.id for op in path for output in op.outputs)
    factors = (tensor for op in path if op.does("product") or op.does("scales") for tensor in op.inputs)
    values = (evidence.content(tensor) for tensor in factors if tensor.id not in made and tensor.numel > 1)
    return any(value is not None and not bool(value.any()) for value in values)


def causal(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if a causal module attends to the future, or not to all of its past."""
    if evidence.intent.causal is False:
        return
    if any(sight.queries < sight.keys for sight in evidence.sights):
        evidence.require_passed("heads")  # a token of the projections shows which key is a query's own
    judged = (against_causal(sight, evidence.intent.window) for sight in _sights_in_order(evidence))
    if evidence.intent.causal is None:
        findings = chain(
            _not_as_called(evidence), _almost_causal(evidence), _in_other_order(evidence), _beside_attention(evidence)
        )
        finding = next(findings, None)
        if finding is None:
            raise UndeclaredError("--causal")
    elif not evidence.sights and (evidence.once or not evidence.follows):
        raise NotPossibleError("the output and the scores do not show who sees whom")
    else:
        finding = next(filter(None, judged), None) or _by_outputs(evidence)
    yield from [finding] if finding else []


def _sights_in_order(evidence: Evidence) -> Sequence[SeenKeys]:
    """Return the attentions that a declared order is about: those over the sequence that the output follows.

    An encoder sees its whole source, and so does the attention of a decoder to it. All attentions if the output follows
    none of several sequences, or no attention is over the one that it follows.
    """
    if len(evidence.sources) < 2 or not evidence.follows:
        return evidence.sights
    names = evidence.source.names
    return [sight for sight in evidence.sights if sight.origins.intersection(names)] or evidence.sights


def _by_outputs(evidence: Evidence) -> Finding | None:
    """Return a finding if a future token changes an output although its weight is zero."""
    for place, changed in evidence.reach.items() if evidence.follows else ():
        before = changed[0, :place] > 0
        if evidence.padded is not None:
            before &= ~evidence.padded[0, :place]  # padding may see anything
        early = before.nonzero().flatten().tolist()
        if not early:
            continue
        evidence.require_passed("heads")
        if _has_faulty_slots(evidence):
            evidence.failed.add("cache")
        evidence.require_passed("cache")
        if any(attention.divided for attention, _ in evidence.run.attentions):
            return _by_the_sum(evidence, place, early, changed)
        ordered = _other_order(evidence)
        if ordered is not None:
            return ordered
        change = (
            f"Changing token {place} changes the output at position {early[-1]} by "
            f"{float(changed[0, early[-1]]):.3g}, and at {len(early) - 1} more before it."
        )
        if not any(sight.is_causal for sight in evidence.sights):
            return _from_the_future(change)
        return _beside_weights(change) if _are_in_order(evidence) else _beside_weights_or_in_other_order(change)
    return None


def _has_faulty_slots(evidence: Evidence) -> bool:
    """Return whether slots of a cache are wrong: the check `cache` reports them, and other findings follow from it."""
    with suppress(NotPossibleError):  # without a cache
        return bool(list(slots(evidence)))
    return False


def _from_the_future(change: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token.",
        change,
        fix="Check the mask, the order of the keys, and norms, convolutions and means over the positions.",
    )


def _beside_weights(change: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token that has no attention weight: another operation mixes positions.",
        change,
        fix="Check norms, convolutions and means over the positions.",
    )


def _beside_weights_or_in_other_order(change: str) -> Finding:
    return Finding(
        "causal",
        "An output depends on a future token that has no attention weight.",
        change,
        fix="Check the order of the keys, and norms, convolutions and means over the positions.",
    )


def _other_order(evidence: Evidence) -> Finding | None:
    """Return a finding if queries, keys and values of a causal attention are the same tokens in different orders."""
    for sight, rows in _rows_of_last_tokens(evidence):
        if rows is None or len({*rows.values()}) == 1:
            continue
        places = listed([f"{side} {row}" for side, row in rows.items()])
        return sight.finding(
            "causal",
            "Queries, keys and values are in different orders: the causal mask does not hide the future tokens.",
            f"The last token is {places}.",
            "Put queries, keys and values in the order of the tokens before the mask.",
        )
    return None


def _are_in_order(evidence: Evidence) -> bool:
    """Return whether queries, keys and values are known to be in one order in every causal attention."""
    every = [rows for _, rows in _rows_of_last_tokens(evidence)]
    return all(rows is not None and len({*rows.values()}) == 1 for rows in every)


def _rows_of_last_tokens(evidence: Evidence) -> Iterator[tuple[SeenKeys, dict[str, int] | None]]:
    """Yield for each causal attention which query, key and value its last token is; None if it is unknown."""
    causal = {id(sight.attention): sight for sight in evidence.sights if sight.is_causal}
    for attention, names, _ in evidence.kinds:
        sight = causal.get(id(attention))
        if sight is not None:
            yield sight, _rows_of_last_token(evidence, attention, names)


def _rows_of_last_token(evidence: Evidence, attention: Attention, names: AxisNames) -> dict[str, int] | None:
    """Return which query, key and value the last token is in self-attention; None if it is several, or unknown."""
    queries, keys = names.lengths
    if queries != keys or len({attention.stages.get(side) for side in SIDES}) != 1:
        return None
    rows: dict[str, int] = {}
    for side in SIDES:
        try:
            factor = Factor(evidence, attention, names, side, from_first=True)
            changed = {row for _, row in factor.changed(factor.token(prod(factor.tokens) - 1))}
        except LostError:
            return None
        # With a single key head, the queries of all heads are rows of one product.
        if len(changed) != 1 or factor.target.shape[factor.rows] != keys:
            return None
        rows[side] = changed.pop()
    return rows


def _by_the_sum(evidence: Evidence, place: int, early: list[int], changed: Tensor) -> Finding:
    """Return the finding for weights that the code divides by a sum of its own, which may count masked keys."""
    return Finding(
        "causal",
        "An output depends on a future token that has no weight itself: the sum that divides the weights, or another "
        "operation, reads it.",
        f"Changing token {place} changes the output at position {early[-1]} by "
        f"{float(changed[0, early[-1]]):.3g}, and at {len(early) - 1} more before it.",
        source=evidence.scores_line,
        fix="Mask before the sum over the keys is taken; then check norms and means over the positions.",
    )


def _not_as_called(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention that is not causal although its class, argument or flag says so."""
    words = ("is_causal", "causal")
    arguments = [f"{name} is True" for name in words if evidence.values.get(name) is True]
    parts = dict(evidence.subject.module.named_modules(remove_duplicate=False))
    causal = {type(parts[sight.module]) for sight in evidence.sights if sight.is_causal}
    for sight in evidence.sights:
        part = parts[sight.module]
        called = type(part).__name__
        flags = [f"{called}.{name} is True" for name in reversed(words) if vars(part).get(name) is True]
        is_named = re.search("^causal|(?<!Non)(?<!Not)Causal", called) is not None
        is_named = is_named and type(part) not in causal  # else it is causal where it is meant to be
        reasons = [*([called] if is_named else []), *arguments, *flags]
        finding = against_causal(sight, evidence.intent.window or sight.width) if reasons else None
        later = evidence.reach.items() if finding is not None and evidence.follows else ()
        if finding is None or (later and not any(bool((changed[0, :place] > 0).any()) for place, changed in later)):
            continue  # e.g. keys that are no tokens, made of earlier tokens
        sure = bool(arguments) or is_named  # an attribute may be for another kernel
        yield replace(finding, evidence=f"{finding.evidence} A causal mask is expected: {reasons[0]}.", sure=sure)


def _almost_causal(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention that would be causal if its mask were moved by one diagonal, turned, or on another axis."""
    for sight in evidence.sights:
        given = (value for name, value in tensors_in(evidence.values) if name in sight.lengths)
        given = (value for value in given if value.dim() and len(value) == len(sight.seen))
        is_over = sight.over == "heads" or (sight.over and not any(bool((value != value[:1]).any()) for value in given))
        finding = against_causal(sight, sight.width) if sight.almost_causal or is_over else None
        if finding is not None and not sight.over and not (sight.is_top_left and sight.queries > 1):
            window = f"like a causal window of {sight.width}" if sight.width and sight.width > 1 else "causal"
            finding = replace(finding, sentence=f"The mask looks {window}, {sight.almost_causal}.", sure=False)
        yield from [finding] if finding else []


def _in_other_order(evidence: Evidence) -> Iterator[Finding]:
    """Yield attention that would be causal if its queries and keys were in one order."""
    finding = _other_order(evidence)
    if finding is not None and not _has_faulty_slots(evidence):
        yield replace(finding, sure=False)


def _beside_attention(evidence: Evidence) -> Iterator[Finding]:
    """Yield an output that depends on a future token although every attention is causal."""
    if len(evidence.sights) < len(evidence.run.attentions) or not all(each.is_causal for each in evidence.sights):
        return
    with suppress(NotPossibleError):
        finding = _by_outputs(evidence)
        yield from [replace(finding, sure=False)] if finding else []


def window(evidence: Evidence) -> Iterator[Finding]:
    """Yield a fault if a position attends beyond the declared window, or not to all of it."""
    width, sights = evidence.intent.window, evidence.sights
    if width is None:
        raise UndeclaredError("--window N")
    if not sights:
        raise NotPossibleError("the scores do not show who sees whom")
    findings = [against_window(sight, width, evidence.intent.causal) for sight in sights]
    local = [finding for sight, finding in zip(sights, findings, strict=True) if sight.width is not None]
    if None not in findings or len(local) == len(findings) or any(local):  # some layers may attend to everything
        yield from list(filter(None, findings))[:1]

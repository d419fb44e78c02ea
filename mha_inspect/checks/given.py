"""What each tensor that a caller gives does, as tried: it is changed, and the outputs are compared.

    same = (segments == segments)[:, None, None]        # expected: segments[:, :, None] == segments[:, None]

Nobody passes an argument for nothing: one that changes no output bit for bit is worth a word. What belongs to one item
of a batch may change this item alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from ..record.arguments import dense, tensors_in
from ..record.ops import Op
from ..reports.check import Finding
from .arguments import CACHES, exchanged_ids, random_numbers
from .evidence import OTHER_SIZES, Evidence
from .lab import RaisedError
from .muted import is_muted


def _is_tried(evidence: Evidence, name: str, value: object) -> bool:
    """Return whether an argument is a tensor of numbers beside the tokens and the cache."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return False
    if not value.numel() or value.is_meta or value.is_complex():
        return False
    if name in CACHES or name in (evidence.intent.cache, evidence.intent.padding):
        return False  # a declared mask and a cache have checks of their own
    return not evidence.sources or name not in evidence.sources[0].names


# -- no effect --------------------------------------------------------------------------------------------------------


def without_effect(evidence: Evidence) -> Iterator[Finding]:
    """Yield the arguments that change no output, bit for bit, whatever they are changed to."""
    if evidence.once or not _are_finite(evidence.run.returned):
        return
    if evidence.sights and all(sight.keys == 1 for sight in evidence.sights):
        return  # the weight of a single key is 1 with any mask
    if is_muted(evidence):
        return  # nothing has an effect before it learned
    for name, value in evidence.values.items():
        if _is_tried(evidence, name, value) and _is_idle(evidence, name, value):
            yield _no_effect(evidence, name)


def _are_finite(returned: object) -> bool:
    """Return whether there are outputs, and all are finite: a NaN would be the same for any argument."""
    outputs = [dense(tensor) for _, tensor in tensors_in(returned) if tensor.is_floating_point()]
    return bool(outputs) and all(bool(tensor.isfinite().all()) for tensor in outputs)


def _is_idle(evidence: Evidence, name: str, value: Tensor) -> bool:
    """Return whether every other value of an argument that runs gives the same outputs, and one runs."""
    has_run = False
    for other in _other_values(value):
        try:
            returned = evidence.returned({name: other})
        except RaisedError:
            continue
        has_run = True
        if not _is_same(evidence.run.returned, returned):
            return False
    return has_run


def _other_values(value: Tensor) -> Iterator[Tensor]:
    """Yield an argument with other numbers: a mask with the opposite, and with that of a half; else drawn numbers."""
    opposite = _opposite(value)
    if opposite is not None:
        yield opposite
        # Segments that are compared with each other stay the same where all are exchanged.
        half = torch.arange(value.shape[-1]) < value.shape[-1] // 2 if value.dim() else torch.tensor(True)
        yield torch.where(half.to(value.device), opposite, value)
    if value.is_floating_point():
        yield random_numbers(value, float(value.float().nan_to_num(0, 0, 0).std()) or 1.0, 2.0)
    elif opposite is None:
        yield value.flip(-1) if value.dim() else value
        yield exchanged_ids(value, torch.unique(value))


def _opposite(value: Tensor) -> Tensor | None:
    """Return a mask with the opposite of every value; None if it has no values of a mask."""
    if value.dtype == torch.bool:
        return ~value
    is_zero = value == 0
    if bool((is_zero | (value == 1)).all()):
        return 1 - value
    if value.is_floating_point() and bool((value <= 0).all()):  # added to the scores
        return torch.where(is_zero, value.min(), torch.zeros_like(value))
    return None


def _is_same(before: object, after: object) -> bool:
    left = [dense(tensor.detach()) for _, tensor in tensors_in(before)]
    right = [dense(tensor.detach()) for _, tensor in tensors_in(after)]
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _no_effect(evidence: Evidence, name: str) -> Finding:
    reader = _reader_of(evidence, name)
    more = ""
    proof = f"With other values in {name}, the output is the same bit for bit"
    if reader is None:
        proof += ": no operation reads it"
    elif _masks_nothing(evidence, name):
        more = ": the mask that is made of it masks out no key"
    return Finding(
        "inputs",
        f"{name} is given and has no effect on the output{more}.",
        f"{proof}.",
        sure=False,
        source="" if reader is None else reader.source,
        fix=f"Apply {name} to the scores before the softmax, or leave it out of the call.",
    )


def _reader_of(evidence: Evidence, name: str) -> Op | None:
    """Return the first operation that computes with an argument; None if none reads it."""
    given = {named.tensor.storage for named in evidence.run.recording.inputs if named.name == name}
    for op in evidence.run.recording.ops:
        if op.kind != "view" and any(tensor.storage in given for tensor in op.inputs):
            return op
    return None


def _masks_nothing(evidence: Evidence, name: str) -> bool:
    """Return whether a mask depends on an argument, and all such masks leave every key visible."""
    graph = evidence.run.graph
    given = {named.tensor.id for named in evidence.run.recording.inputs if named.name == name}
    masked = []
    for sight in evidence.sights:
        inputs = [graph.inputs_of(tensor) for op in sight.attention.masks for tensor in op.inputs[1:]]
        if any(given & of_mask for of_mask in inputs):
            masked.append(sight)
    return bool(masked) and all(sight.open for sight in masked)


# -- other items ------------------------------------------------------------------------------------------------------


def of_other_items(evidence: Evidence) -> Iterator[Finding]:
    """Yield the first argument whose entry for batch item 0 changes the output of another item.

    Only arguments that differ between the items are tried: one mask for all items is right wherever it is read.
    """
    for name, value in evidence.values.items():
        if not _is_by_item(evidence, name, value):
            continue
        unlike = [item for item in range(1, len(value)) if not torch.equal(value[item], value[0])]
        if not unlike:
            continue
        changed = value.clone()
        changed[0] = value[unlike[0]]
        with suppress(RaisedError):
            moved = evidence.differences(evidence.output_with({name: changed}), times=OTHER_SIZES)[1:].amax(1)
            if bool(moved.any()):
                yield _of_another_item(evidence, name, unlike[0], moved)
                return


def _is_by_item(evidence: Evidence, name: str, value: object) -> bool:
    """Return whether an argument is `batch query key` or `batch heads query key`, by its sizes.

    With as many heads as items, the three dimensions of a mask may be `heads query key`.
    """
    if not isinstance(value, Tensor) or not _is_tried(evidence, name, value) or value.dim() not in (3, 4):
        return False
    if any(name in source.names for source in evidence.sources) or len(value) != evidence.source.rows:
        return False
    heads = {count for _, names in evidence.run.attentions for count in (names.num_heads, names.num_kv_heads)}
    if value.dim() == 3 and len(value) in heads:
        return False
    return any(value.shape[-1] == sight.keys > 1 and value.shape[-2] in (1, sight.queries) for sight in evidence.sights)


def _of_another_item(evidence: Evidence, name: str, item: int, moved: Tensor) -> Finding:
    """Return the fault; `moved` is the change of the output by item, from item 1 on."""
    items = moved.nonzero().flatten()
    repeated = [op for op in evidence.run.recording.ops if op.base_name == "repeat" and _is_of(evidence, op, name)]
    return Finding(
        "batch",
        f"The {name} of one batch item changes the output of another.",
        f"With the {name} of item {item} given to item 0 too, the output of item {int(items[0]) + 1} changes by "
        f"{float(moved[items[0]]):.3g}. In all, {len(items)} of the {len(moved)} other items change.",
        source=repeated[0].source if repeated else evidence.mask_line,
        fix=f"Use {name}.repeat_interleave(heads, 0): the heads of one item are neighbours." if repeated else "",
    )


def _is_of(evidence: Evidence, op: Op, name: str) -> bool:
    """Return whether an operation reads an argument, moved at most."""
    given = {named.tensor.id for named in evidence.run.recording.inputs if named.name == name}
    return evidence.run.graph.before_moves(op.inputs[0]).id in given

"""The recorded base run, and of its tensors those alone that a check reads.

To keep every tensor of a deep model takes many times what its forward takes. So it is run twice: once to see what
there is, holding nothing, and once more to hold what was chosen of it. The second run goes on from where the first one
ended and draws other random numbers, so that it also tells whether two runs give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...graph.dataflow import made_of
from ...naming.axes import AxisNames
from ...naming.stages import STAGES
from ...naming.subject import Run, Subject
from ...record.arguments import argument_names
from ...record.ops import Op, Recording, TensorRef
from ...record.xray import XRay

BARRED = -1e4
"""A masked score of this or less leaves no weight."""
_HEAVY = 1e-3
"""A weight above this moves what it is multiplied with by more than rounding."""

MOST_HEADS = 64
"""Heads of which it is said what hangs on them."""

Keep = Callable[[Tensor], Any]


class _OtherRunError(Exception):
    """A run does something else than the outlined one."""


class _Slot:
    """Stands where a tensor would be held: the number of the look at it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def clone(self) -> _Slot:
        """What the recorder asks of a tensor before its memory is written."""
        return self


class _Sieve:
    """Holds of the tensors that a recorder looks at what `wanted` makes of them, by the number of the look."""

    def __init__(self, wanted: Mapping[int, Keep]) -> None:
        self._wanted = wanted
        self._numbers = count()
        self.held: dict[int, list[Any]] = {}

    def __call__(self, tensor: Tensor) -> list[Any]:
        """Return a place with what is held of a tensor."""
        number = next(self._numbers)
        keep = self._wanted.get(number)
        held = self.held[number] = [_Slot(number) if keep is None else keep(tensor.detach())]
        return held

    def looks(self) -> int:
        """Return how many looks there were; asked once, at the end."""
        return next(self._numbers)


def _recorded(own: Subject, sieve: _Sieve) -> tuple[XRay, Any]:
    """Run it, and return what recorded it and what it returned."""
    recorder = XRay(own.module, keep=sieve)
    recorder.take_inputs(argument_names(own.module, own.args, own.kwargs))
    with own.settings(), recorder:
        return recorder, own.module(*own.args, **own.kwargs)


@dataclass(frozen=True)
class Evidence:
    """A base run with what is held of it."""

    run: Run
    unfinite: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """TensorRef id of a stage to how many of its numbers are NaN and how many infinite, where some are."""
    again: Any = None
    """What a second run returned, which went on from the first one and drew other numbers."""


@dataclass(frozen=True)
class Outline:
    """A run of which nothing is held."""

    run: Run
    numbers: Mapping[int, int]
    """TensorRef id to the number of the look at it."""
    looks: int
    """How many there were."""


def outlined(own: Subject) -> Outline:
    """Run it once and record it, holding nothing."""
    sieve = _Sieve({})
    recorder, returned = _recorded(own, sieve)
    recording = recorder.finish(returned)
    numbers = {key: slot.number for key, slot in recording.values.items() if isinstance(slot, _Slot)}
    recording.values.clear()
    return Outline(Run(recording, returned), numbers, sieve.looks())


def held(own: Subject, outline: Outline, *, stages: bool = False) -> Evidence | None:
    """Run it again, maybe with other numbers, and hold what checks read; with `stages` every stage of every attention.

    None where it does something else than in the outlined run. Raises what the forward raises.
    """
    seen, numbers, looks = outline.run, outline.numbers, outline.looks
    plan = _Plan(seen, whole_stages=stages)
    sieve = _Sieve(plan.keeps(numbers))
    try:
        _, returned = _recorded(own, sieve)
    except _OtherRunError:
        return None
    if sieve.looks() != looks:
        return None
    values = {key: sieve.held[numbers[key]][0] for key in plan.held if key in numbers}
    recording = replace(seen.recording, values=values)
    return Evidence(of_same_ops(seen, recording=recording, returned=returned), plan.unfinite)


def of_same_ops(seen: Run, **changes: Any) -> Run:
    """Return a run with something else in it, in which the same operations ran."""
    made = replace(seen, **changes)
    vars(made).update(graph=seen.graph, attentions=seen.attentions)
    return made


class _Plan:
    """What is held of each tensor: all of it, how much weight there is in it, whether it is finite."""

    def __init__(self, seen: Run, *, whole_stages: bool) -> None:
        self.unfinite: dict[int, tuple[int, int]] = {}
        recording = seen.recording
        turns = [turn for found, _ in seen.attentions for turn in found.branches or (found,)]
        self._stages = {tensor.id for turn in turns for tensor in turn.stages.values()}
        self._levels, self._bars = (
            {turn.stages[stage].id for turn in turns if stage in turn.stages} for stage in ("weights", "masked_scores")
        )
        leaves = {named.tensor.id for named in (*recording.parameters, *recording.buffers)}
        around = (_around(recording, found) for found, _, _ in kinds(seen))
        whole = set[int]().union(*around, _behind_contexts(seen), self._stages if whole_stages else ())
        self._whole = whole - leaves
        self._shapes = {t.id: t.shape for op in recording.ops for t in (*op.inputs, *op.outputs)}

    @property
    def held(self) -> set[int]:
        """Ids of what the recording has then."""
        return self._whole | self._levels | self._bars

    def keeps(self, numbers: Mapping[int, int]) -> dict[int, Keep]:
        """Return what is made of each tensor that is looked at, by the number of the look, which several may share."""
        shared: dict[int, set[int]] = {}
        for key in (self.held | self._stages) & numbers.keys():
            shared.setdefault(numbers[key], set()).add(key)
        return {number: partial(self._keep, keys) for number, keys in shared.items()}

    def _keep(self, keys: set[int], tensor: Tensor) -> Any:
        if any(key in self._shapes and tuple(tensor.shape) != self._shapes[key] for key in keys):
            raise _OtherRunError
        stages = keys & self._stages
        counts = _unfinite(tensor) if stages else (0, 0)
        if any(counts):
            self.unfinite.update(dict.fromkeys(stages, counts))
        if keys & self._whole:  # what is a small part of some memory does not hold all of it
            return tensor.clone() if tensor.untyped_storage().nbytes() > 1.5 * tensor.nbytes else tensor
        return weight_levels(tensor) if keys & self._levels else tensor > BARRED if keys & self._bars else _Slot(-1)


def _behind_contexts(seen: Run) -> set[int]:
    """Ids of what the output of each attention hangs on behind its context, of as many as have `MOST_HEADS` heads."""
    heads, found_ids = 0, set[int]()
    for found, names in seen.attentions:
        heads += names.num_heads
        end = found.stages.get("output") or found.stages.get("concat")
        if end is not None and heads <= MOST_HEADS:
            context = found.stages["context"]
            hangs = between(seen.recording, {context.id}, end)
            made = {tensor.id for op in hangs for tensor in op.outputs}
            found_ids |= {context.id} | ({tensor.id for op in hangs for tensor in op.inputs} - made)
    return found_ids


def _unfinite(tensor: Tensor) -> tuple[int, int]:
    """Return how many numbers are NaN, and how many infinite."""
    if not tensor.is_floating_point() or bool(tensor.sum().isfinite()):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def whole(own: Subject, widened: Callable[[Run], Run]) -> Evidence:
    """Run it once and hold every tensor: of a module that runs only once, or never the same."""
    seen = widened(own.recorded(keep=True))
    stages = {t.id for found, _ in seen.attentions for turn in (found, *found.branches) for t in turn.stages.values()}
    values = seen.recording.values
    counts = {key: _unfinite(values[key]) for key in stages if key in values}
    return Evidence(seen, {key: count for key, count in counts.items() if any(count)})


def weight_levels(weights: Tensor) -> Tensor:
    """Return for each weight 0 where it is none, 2 where it is one that counts, else 1."""
    return (weights != 0).to(torch.uint8) + (weights > _HEAVY).to(torch.uint8)


def kinds(seen: Run) -> list[tuple[Attention, AxisNames, int]]:
    """Return each kind of attention once, by its lines and shapes, with how many there are."""
    found: dict[tuple[object, ...], list[tuple[Attention, AxisNames]]] = {}
    for attention, names in seen.attentions:
        ops = (attention.score_product.op, attention.value_product.op)
        sign = (*((op.source, op.output.shape, op.name) for op in ops), attention.scale, len(attention.masks))
        found.setdefault(sign, []).append((attention, names))
    return [(*group[0], len(group)) for group in found.values()]


def _around(recording: Recording, found: Attention) -> set[int]:
    """Ids of what the operations from the first stage of an attention to its last one read and make."""
    turns = found.branches or (found,)
    ends: list[Op | None] = [turn.value_product.op for turn in turns]
    ends += [recording.producer(turn.stages[stage]) for turn in turns for stage in STAGES if stage in turn.stages]
    places = [op.index for op in ends if op is not None]
    ops = recording.ops[min(places) : max(places) + 1]
    return {tensor.id for op in ops for tensor in (*op.inputs, *op.outputs)}


def between(recording: Recording, sources: Iterable[int], target: TensorRef) -> list[Op]:
    """Return the operations that a tensor hangs on and that hang on one of the sources, in order."""
    needed: dict[int, Op] = {}
    reached = set(sources)
    queue = [target]
    while queue:
        tensor = queue.pop()
        op = recording.producer(tensor)
        if tensor.id in reached or op is None or op.index in needed:
            continue
        needed[op.index] = op
        queue += op.inputs
    ordered = [needed[index] for index in sorted(needed)]
    made = made_of(reached, ordered)
    return [op for op in ordered if any(tensor.id in made for tensor in op.inputs)] if target.id in made else []

"""The same weights for two sides: one state dict, drawn for two layers, or read off one and written into the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..call.load import Layer
from ..errors import WeightsError
from ..layers.spec import AttentionSpec
from ..measure.weights import PARTS, Carried, LeftOut, Numbers, Weights, carry, draw
from ..record.arguments import copy_module
from ..record.rounding import same_bits
from ..reports.diff import SharedWeights, SideName
from ..text import first_few, listed
from .side import Side

_BIASES = ("b_q", "b_k", "b_v", "b_o")
_OF_INPUT = ("W_q", "W_k", "W_v")


@dataclass(frozen=True)
class Sliced:
    """A side whose heads read slices of the features that come in."""

    name: SideName
    features: int
    width: int
    """How many of them a head reads."""


@dataclass(frozen=True)
class Shared:
    """How both sides came to their weights, and what the answer needs to know of it."""

    report: SharedWeights
    are_carried: bool = True
    """Whether any numbers are the same on both sides by our doing."""
    are_drawn: bool = False
    """Whether both have what they can hold of numbers that were drawn for them."""
    poorer: tuple[SideName, ...] = ()
    """The sides that had no place for some numbers."""
    sliced: Sliced | None = None
    """The one side, if it is one alone, whose heads read slices."""


AS_THEY_ARE = Shared(
    SharedWeights(False, "not carried: each side has the weights that it came with.", (), None), are_carried=False
)


def share(left: Side, right: Side) -> Shared:
    """Give both sides the same weights as far as that can be done, and say how it was done.

    Two layers get weights that are drawn for both. Of any others, where names and shapes agree, it is one state dict;
    else the weights of each attention are carried by head: into a layer as far as it has a place for them; between
    modules whole, in the direction in which that can be done, or else as far as they fit.

    Raises `WeightsError` where two layers have no weights that both could compute with.
    """
    # The coarser of two dtypes rounds the numbers: the finer one can hold them.
    source, other = sorted((left, right), key=lambda run: -torch.finfo(getattr(torch, run.dtype)).eps)
    if isinstance(left.own, Layer) and isinstance(right.own, Layer):
        return _drawn(left, right, left.own.spec, right.own.spec, getattr(torch, other.dtype))
    if _agree(source.own.module, other.own.module):
        with _changing(other):
            other.own.module.load_state_dict(source.own.module.state_dict())
        return Shared(SharedWeights(True, "one state dict in both: names and shapes agree.", (), None))
    if isinstance(source.own, Layer):
        source, other = other, source
    try:
        return _carried(source, other)
    except WeightsError as error:
        sentence = f"not carried: each side has its own weights, as it was built from seed {left.own.seed}."
        return Shared(SharedWeights(False, sentence, (str(error),), None), are_carried=False)


def _carried(source: Side, other: Side) -> Shared:
    given, own = _readable(source), _readable(other)
    if len(given) != len(own):
        holds = "holds one" if isinstance(other.own, Layer) else f"has {len(own)}"
        raise WeightsError(f"{source.label} has {len(given)} attentions, and {other.label} {holds}.")
    whole = _all_or_none(given, own, other)
    if isinstance(whole, list):
        return _told(source, other, whole)
    is_layer = isinstance(other.own, Layer)
    if not is_layer or _has_other_sizes(own, whole):
        # What has no place for some numbers can still give its own to what has a place for all.
        back = _all_or_none(own, given, source)
        if isinstance(back, list):
            return _told(other, source, back)
    if _has_other_sizes(own, whole):
        raise WeightsError(_why_not(whole, other.label, source.label))
    with _changing(other):
        found = [carry(one, into) for one, into in zip(given, own, strict=True)]
    return _told(source, other, found)


def _readable(run: Side) -> tuple[Weights, ...]:
    """The weights of each attention. Raises `WeightsError` that says what cannot be told."""
    label = run.label
    if not run.weights:
        raise WeightsError(f"{label}: no attention was found in it.")
    for one in run.weights:
        if one.missing:
            raise WeightsError(f"{label}: {one.missing[0]}")
        if not one.projections:
            raise WeightsError(f"{label}: its attention has no projections.")
    return run.weights


def _all_or_none(given: Sequence[Weights], own: Sequence[Weights], run: Side) -> list[Carried] | LeftOut:
    """Carry all weights of all attentions into a side; where one has no place, none, and what that is."""
    found: list[Carried] = []
    with _changing(run) as before:
        for one, into in zip(given, own, strict=True):
            found.append(carry(one, into, partly=False))
            if not found[-1].whole:
                run.own.module.load_state_dict(before)
                return found[-1].left_out[0]
    return found


def _why_not(one: LeftOut, label: str, source: str) -> str:
    """Why a part could not be carried, in a sentence."""
    given, becomes, wanted = one.reason.partition(" becomes ")
    if becomes:
        return f"{one.part} is {given} in {source} and {wanted} in {label}."
    if one.reason.startswith("the other side"):
        return f"{label} has {one.part}, and {one.reason}."
    return f"{label}: of {one.part} {one.reason}."


def _has_other_sizes(own: Sequence[Weights], left_out: LeftOut) -> bool:
    """Whether what was left out has a place of other sizes, and not none, or one for a part of it."""
    return not left_out.partly and any(left_out.part in one.projections for one in own)


@contextmanager
def _changing(run: Side) -> Iterator[dict[str, Tensor]]:
    """Change the weights of a side in the body, which gets what they were; what was run with the same ones stays."""
    before = {name: tensor.detach().clone() for name, tensor in run.own.module.state_dict().items()}
    yield before
    if any(not same_bits(tensor, before[name]) for name, tensor in run.own.module.state_dict().items()):
        run.forget()


def _agree(left: nn.Module, right: nn.Module) -> bool:
    mine, theirs = ({name: tensor.shape for name, tensor in one.state_dict().items()} for one in (left, right))
    return bool(mine) and mine == theirs


def _told(source: Side, other: Side, found: Sequence[Carried]) -> Shared:
    """What was carried from one side into the other, in words."""
    is_layer = isinstance(other.own, Layer)
    lacking, sliced = _without_place(other, found, source.label)
    left_out = (*lacking, *_rest(source), *(() if is_layer else _rest(other)))
    filled = {part for one in found for part in one.filled}
    where = f"loaded into {other.label}" if is_layer else f"written into the parameters of {other.label}"
    how = f"read off the products of {source.label} and {where}"
    how += ", the identity for W_o" if "W_o" in filled else ""
    how += ", zeros for the biases" if filled & {*_BIASES} else ""
    if is_layer:
        how += ", as far as it holds them" if left_out else ""
    else:
        how += ", as far as they fit" if lacking else ""
    report = SharedWeights(not left_out, f"{how}.", left_out, None)
    return Shared(report, poorer=(other.name,) if lacking else (), sliced=sliced)


def _without_place(run: Side, found: Sequence[Carried], source: str) -> tuple[tuple[str, ...], Sliced | None]:
    """A sentence for each thing that a side has no place for, and how it is sliced, if it is."""
    pairs = list(zip(run.weights, found, strict=True))
    lacking = dict.fromkeys(sentence for pair in pairs for sentence in _lacks(*pair, run, source))
    return tuple(lacking), next(filter(None, (_slices(*pair, run) for pair in pairs)), None)


def _lacks(own: Weights, found: Carried, run: Side, source: str) -> Iterator[str]:
    """A sentence for each thing that an attention has no place for."""
    label = run.label
    out = {one.part: one for one in found.left_out}
    lost = [part for part in PARTS if part in out and part not in own.projections]
    told: set[str] = set()
    if "W_o" in lost:
        what = "W_o and b_o are" if "b_o" in lost else "W_o is"
        yield f"{label} has no output projection: {what} left out there."
        told |= {"W_o", "b_o"}
    sliced = _slices(own, found, run)
    if sliced is not None:
        parts = [part for part in _OF_INPUT if part in out and out[part].partly]
        heads, head_dim = own.projections[parts[0]].shape[:2]
        yield (
            f"{label} gives head 0 the features 0–{sliced.width - 1} of the embedding and no others, and so on: of "
            f"{listed(parts)} only {heads} blocks of {[head_dim, sliced.width]} have a place there, 1/{heads} of "
            "each; the rest is left out."
        )
        told |= set(parts)
    biases = [part for part in _BIASES if part in lost and part not in told]
    if biases:
        has_none = not any(part in own.projections for part in _BIASES)
        out_there = listed(biases) if "b_o" in biases else ", ".join(biases)
        none = "no biases" if has_none else f"no {' or '.join(biases)}"
        yield f"{label} has {none}: {out_there} {'are' if len(biases) > 1 else 'is'} left out there."
    appended = [part for part in ("bias_k", "bias_v") if part in lost]
    if appended:
        yield f"{label} appends no learned key and value: {listed(appended)} are left out there."
    told |= {*biases, *appended}
    yield from (_why_not(one, label, source) for part, one in out.items() if part not in told)


def _slices(own: Weights, found: Carried, run: Side) -> Sliced | None:
    """Return how many features each head reads, where that is a part of them."""
    partly = [own.projections[one.part] for one in found.left_out if one.partly and one.part in _OF_INPUT]
    inner, features = (partly[0].parts[0].inner, partly[0].shape[-1]) if partly else (None, 0)
    return None if inner is None or inner[0] >= features else Sliced(run.name, features, inner[0])


def _rest(run: Side) -> tuple[str, ...]:
    """A sentence where a module has parameters that belong to no projection of an attention."""
    held = {name for one in run.weights for own in one.projections.values() for name in own.parameters}
    others = {name: p.numel() for name, p in run.own.module.named_parameters() if name not in held}
    if not others:
        return ()
    said = f"{first_few(list(others), 1)}, {sum(others.values()):,} numbers that project nothing for an attention"
    return (f"{run.label}: {said}, stay as they were built.",)


def _drawn(left: Side, right: Side, spec: AttentionSpec, other: AttentionSpec, dtype: torch.dtype) -> Shared:
    """Draw weights for two layers, all that one or the other has a place for, and give each what it can hold.

    Key and value heads are as many as both can repeat from. Raises `WeightsError` where key/value heads are shared and
    the head counts differ.
    """
    is_shared = any(one.kv_heads != one.num_heads for one in (spec, other))
    kv_heads = math.gcd(spec.kv_heads, other.kv_heads) if is_shared else spec.num_heads
    if kv_heads != spec.num_heads and spec.num_heads != other.num_heads:
        raise WeightsError(
            f"num_kv_heads {kv_heads} is below num_heads {spec.num_heads}: the rows of W_k and W_v belong to groups of "
            "heads, and another head count is another layer. Take weights with one key/value head a head."
        )
    heads, width = (spec.num_heads, int(spec.head_dim)), spec.embed_dim
    shapes: dict[str, tuple[int, ...]] = {
        "W_q": (*heads, width),
        "W_k": (kv_heads, heads[1], spec.key_width),
        "W_v": (kv_heads, heads[1], spec.value_width),
        "W_o": (*heads, width),
    }
    if spec.bias or other.bias:
        shapes |= {"b_q": heads, "b_k": (kv_heads, heads[1]), "b_v": (kv_heads, heads[1]), "b_o": (width,)}
    if spec.add_bias_kv or other.add_bias_kv:
        shapes |= {"bias_k": heads, "bias_v": heads}
    numbers = draw(shapes, spec.seed, dtype)
    every: dict[str, None] = {}
    poorer: list[SideName] = []
    slices: list[Sliced] = []
    for run in (left, right):
        found = _load(run, numbers, Weights(run.own.module, {}, heads[0], kv_heads))
        lacking, sliced = _without_place(run, [found], "the drawn weights")
        every |= dict.fromkeys(lacking)
        poorer += [run.name] if lacking else []
        slices += [sliced] if sliced else []
    if not every:
        return Shared(SharedWeights(True, "every number of the one is in the other.", (), None), are_drawn=True)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    report = SharedWeights(False, sentence, tuple(every), None)
    return Shared(report, are_drawn=True, poorer=tuple(poorer), sliced=slices[0] if len(slices) == 1 else None)


def _load(run: Side, numbers: Numbers, source: Weights) -> Carried:
    """Give a layer what it can hold of these numbers, in its own dtype and in the finer one of both."""
    (own,) = run.weights
    with _changing(run):
        found = carry(source, own, numbers)
    if run.finer is not None:
        carry(source, replace(own, module=run.finer.module), numbers)
    return found


def in_the_fuller(shared: Shared, left: Side, right: Side) -> tuple[Side, Side, Side] | None:
    """Return the side with no place for some numbers, the other one, and a copy of that with all that the first has.

    None where no side is that one, or both are, or its numbers cannot be written there.
    """
    if len(shared.poorer) != 1:
        return None
    poorer, fuller = (left, right) if shared.poorer[0] == "left" else (right, left)
    copied = copy_module(fuller.own.module)
    if len(poorer.weights) != len(fuller.weights):
        return None
    for one, into in zip(poorer.weights, fuller.weights, strict=True):
        if not carry(one, replace(into, module=copied), partly=False).whole:
            return None
    return poorer, fuller, fuller.with_module(copied)

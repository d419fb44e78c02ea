"""The same weights for two sides: one state dict, drawn for two layers, or read off one side and written into the other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..measure.compare import same_bits
from ..measure.weights import PARTS, Carried, LeftOut, Numbers, Weights, as_matrix, carry, draw
from ..naming.parameters import Projection, indices_of, runs_of
from ..record.copying import copy_module
from ..reports.diff import ParameterPair, ParameterPlace, SharedWeights, SideName
from ..targets.layer_sides import LayerSide
from ..targets.load import Layer
from .side import SideRun

_IN_ORDER = ("W_q", "b_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o", "bias_k", "bias_v")
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


AS_THEY_ARE = Shared(
    SharedWeights(False, "not carried: each side has the weights that it came with.", (), None), are_carried=False
)


def share(left: SideRun, right: SideRun) -> Shared:
    """Give both sides the same weights as far as that can be done, and say how it was done.

    Where names and shapes agree it is one state dict. Otherwise the weights of each attention are carried by head: into
    a layer as far as it has a place for them; between modules whole, in the direction in which that can be done, or
    else as far as they fit.
    """
    # The coarser of two dtypes rounds the numbers: the finer one can hold them.
    source, other = sorted((left, right), key=lambda run: -torch.finfo(getattr(torch, run.side.dtype)).eps)
    if _agree(source.side.own.module, other.side.own.module):
        _write(other, partial(other.side.own.module.load_state_dict, source.side.own.module.state_dict()))
        return Shared(SharedWeights(True, "one state dict in both: names and shapes agree.", (), None))
    if isinstance(source.side.own, Layer):
        source, other = other, source
    try:
        return _carried(source, other)
    except WeightsError as error:
        sentence = f"not carried: each side has its own weights, as it was built from seed {left.side.own.seed}."
        return Shared(SharedWeights(False, sentence, (str(error),), None), are_carried=False)


def _carried(source: SideRun, other: SideRun) -> Shared:
    given, own = _readable(source), _readable(other)
    if len(given) != len(own):
        holds = "holds one" if isinstance(other.side.own, Layer) else f"has {len(own)}"
        raise WeightsError(f"{source.side.label} has {len(given)} attentions, and {other.side.label} {holds}.")
    whole = _all_or_none(given, own, other)
    if isinstance(whole, list):
        return _told(source, other, whole)
    is_layer = isinstance(other.side.own, Layer)
    if not is_layer or _has_other_sizes(own, whole):
        # What has no place for some numbers can still give its own to what has a place for all.
        back = _all_or_none(own, given, source)
        if isinstance(back, list):
            return _told(other, source, back)
    if _has_other_sizes(own, whole):
        raise WeightsError(f"{other.side.label}: {whole.part} {whole.reason}.")
    found: list[Carried] = []
    _write(other, lambda: found.extend(carry(one, into) for one, into in zip(given, own, strict=True)))
    return _told(source, other, found)


def _readable(run: SideRun) -> tuple[Weights, ...]:
    """The weights of each attention. Raises `WeightsError` that says what cannot be told."""
    label = run.side.label
    if not run.weights:
        raise WeightsError(f"{label}: no attention was found in it.")
    for one in run.weights:
        if one.missing:
            raise WeightsError(f"{label}: {one.missing[0]}")
        if not one.projections:
            raise WeightsError(f"{label}: its attention has no projections.")
    return run.weights


def _all_or_none(given: Sequence[Weights], own: Sequence[Weights], run: SideRun) -> list[Carried] | LeftOut:
    """Carry all weights of all attentions into a side; where one has no place, none, and what that is."""
    before = _copies(run.side.own.module)
    found: list[Carried] = []
    for one, into in zip(given, own, strict=True):
        found.append(carry(one, into, partly=False))
        if not found[-1].whole:
            _restore(run.side.own.module, before)
            return found[-1].left_out[0]
    if _differ(run.side.own.module, before):
        run.forget()
    return found


def _has_other_sizes(own: Sequence[Weights], left_out: LeftOut) -> bool:
    """Whether what was left out has a place of other sizes, and not none, or one for a part of it."""
    return not left_out.partly and any(left_out.part in one.projections for one in own)


def _write(run: SideRun, write: object) -> None:
    """Change the weights of a side; what was run with the same ones before stays."""
    before = _copies(run.side.own.module)
    assert callable(write)
    write()
    if _differ(run.side.own.module, before):
        run.forget()


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _differ(module: nn.Module, before: Mapping[str, Tensor]) -> bool:
    return any(not same_bits(tensor, before[name]) for name, tensor in module.state_dict().items())


def _restore(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    module.load_state_dict(dict(before))


def _agree(left: nn.Module, right: nn.Module) -> bool:
    mine, theirs = left.state_dict(), right.state_dict()
    return bool(mine) and {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in theirs.items()}


def _told(source: SideRun, other: SideRun, found: Sequence[Carried]) -> Shared:
    """What was carried from one side into the other, in words."""
    is_layer = isinstance(other.side.own, Layer)
    lacking = tuple(dict.fromkeys(s for one, own in zip(found, other.weights, strict=True) for s in _lacks(own, one, other.side.label)))  # fmt: skip
    rest = (*_rest(source), *(() if is_layer else _rest(other)))
    left_out = (*lacking, *rest)
    if is_layer:
        how = f"read off the products of {source.side.label} and loaded into {other.side.label}"
        how += ", as far as it holds them" if left_out else ""
    else:
        how = f"read off the products of {source.side.label} and written into the parameters of {other.side.label}"
        how += ", the identity for W_o" if any("W_o" in one.filled for one in found) else ""
        how += ", as far as they fit" if lacking else ""
    report = SharedWeights(not left_out, f"{how}.", left_out, None)
    sliced = next((s for one, own in zip(found, other.weights, strict=True) if (s := _slices(own, one, other))), None)
    return Shared(report, poorer=(other.side.name,) if lacking else (), sliced=sliced)


def _lacks(own: Weights, found: Carried, label: str) -> Iterator[str]:
    """A sentence for each thing that an attention has no place for."""
    out = {one.part: one for one in found.left_out}
    lost = [part for part in PARTS if part in out and part not in own.projections]
    if "W_o" in lost:
        what = "W_o and b_o are" if "b_o" in lost else "W_o is"
        yield f"{label} has no output projection: {what} left out there."
    partly = [part for part in _OF_INPUT if part in out and out[part].partly]
    widths = {_width_of(own.projections[part]) for part in partly}
    if len(widths) == 1 and None not in widths:
        (width,) = widths
        heads, head_dim = own.projections[partly[0]].shape[:2]
        yield (
            f"{label} gives head 0 the features 0–{(width or 1) - 1} of the embedding and no others, and so on: of "
            f"{_listed(partly)} only {heads} blocks of {[head_dim, width]} have a place there, 1/{heads} of each; the "
            "rest is left out."
        )
        partly_told = set(partly)
    else:
        partly_told = set()
    biases = [part for part in _BIASES if part in lost and not (part == "b_o" and "W_o" in lost)]
    if biases:
        none = "no biases" if not any(part in own.projections for part in _BIASES) else f"no {_listed(biases, 'or')}"
        yield f"{label} has {none}: {_listed(biases)} {'are' if len(biases) > 1 else 'is'} left out there."
    appended = [part for part in ("bias_k", "bias_v") if part in lost]
    if appended:
        yield f"{label} appends no learned key and value: {_listed(appended)} are left out there."
    told = {"W_o", "b_o", *biases, *appended} if "W_o" in lost else {*biases, *appended}
    for part, one in out.items():
        if part not in told | partly_told:
            yield f"{label}: {part} {one.reason}."


def _listed(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _width_of(projection: Projection) -> int | None:
    """How many features each head reads, where that is a part of them."""
    inner = projection.pieces[0].inner
    return inner[0] if inner is not None and inner[0] < projection.shape[-1] else None


def _slices(own: Weights, found: Carried, run: SideRun) -> Sliced | None:
    partly = [one.part for one in found.left_out if one.partly and one.part in _OF_INPUT]
    width = _width_of(own.projections[partly[0]]) if partly else None
    return None if width is None else Sliced(run.side.name, own.projections[partly[0]].shape[-1], width)


def _rest(run: SideRun) -> tuple[str, ...]:
    """A sentence where a module has parameters that belong to no projection of an attention."""
    held = {name for one in run.weights for own in one.projections.values() for name in own.parameters}
    others = [(name, p.numel()) for name, p in run.side.own.module.named_parameters() if name not in held]
    if not others:
        return ()
    first = others[0][0] + (f" and {len(others) - 1} more" if len(others) > 1 else "")
    total = sum(numel for _, numel in others)
    label = run.side.label
    return (f"{label}: {first}, {total:,} numbers that project nothing for an attention, stay as they were built.",)


def share_drawn(left: SideRun, right: SideRun, planned: tuple[LayerSide, LayerSide], finer: str) -> Shared:
    """Draw weights for two layers, all that one or the other has a place for, and give each what it can hold.

    Key and value heads are as many as both can repeat from. Raises `WeightsError` where key/value heads are shared and
    the head counts differ.
    """
    spec, other = (side.spec for side in planned)
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
    numbers = draw(shapes, spec.seed, getattr(torch, finer))
    left_out: list[str] = []
    poorer: list[SideName] = []
    sliced: Sliced | None = None
    for run in (left, right):
        found = _load(run, numbers, Weights(run.side.own.module, {}, heads[0], kv_heads))
        lacking = tuple(_lacks(run.weights[0], found, run.side.label))
        left_out += [sentence for sentence in lacking if sentence not in left_out]
        poorer += [run.side.name] if lacking else []
        sliced = sliced or _slices(run.weights[0], found, run)
    if not left_out:
        return Shared(SharedWeights(True, "every number of the one is in the other.", (), None), are_drawn=True)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    report = SharedWeights(False, sentence, tuple(left_out), None)
    return Shared(report, are_drawn=True, poorer=tuple(poorer), sliced=sliced)


def _load(run: SideRun, numbers: Numbers, source: Weights) -> Carried:
    """Give a layer what it can hold of these numbers, in its own dtype and in the finer one of both."""
    (own,) = run.weights
    found: list[Carried] = []
    _write(run, lambda: found.append(carry(source, own, numbers)))
    if run.side.finer is not None:
        carry(source, replace(own, module=run.side.finer.module), numbers)
    return found[0]


def in_the_fuller(shared: Shared, left: SideRun, right: SideRun) -> tuple[SideRun, SideRun, SideRun] | None:
    """Return the side that has no place for some numbers, the other one, and a copy of that with all that the first has.

    None where no side is that one, or both are, or its numbers cannot be written there.
    """
    if len(shared.poorer) != 1:
        return None
    poorer, fuller = (left, right) if shared.poorer[0] == "left" else (right, left)
    own = fuller.side.own
    copied = replace(own, module=copy_module(own.module))
    if len(poorer.weights) != len(fuller.weights):
        return None
    for one, into in zip(poorer.weights, fuller.weights, strict=True):
        if not carry(one, replace(into, module=copied.module), partly=False).whole:
            return None
    return poorer, fuller, SideRun(replace(fuller.side, own=copied), fuller.run.wider)


@dataclass(frozen=True)
class _Held:
    """A matrix or bias of all heads, as one side keeps it."""

    place: ParameterPlace
    heads: int
    inner: int
    """Numbers of a row of a head; one for a bias."""
    rows_of_head: int
    matrix: Tensor
    in_one_piece: bool
    """Whether the parameters hold it in rows and columns that follow each other."""
    is_matrix: bool


def pairs(left: SideRun, right: SideRun) -> tuple[ParameterPair, ...]:
    """Return where each side keeps each matrix and bias, and how the one maps onto the other, in the order of the formula.

    Empty for sides of several attentions, and where it cannot be told.
    """
    both = [run.weights for run in (left, right)]
    if any(len(weights) != 1 or weights[0].missing for weights in both):
        return ()
    ours, theirs = (_held(weights[0]) for weights in both)
    return tuple(
        ParameterPair(
            part,
            None if part not in ours else ours[part].place,
            None if part not in theirs else theirs[part].place,
            _mapping(part, ours.get(part), theirs.get(part)),
        )
        for part in _IN_ORDER
        if part in ours or part in theirs
    )


def _held(weights: Weights) -> dict[str, _Held]:
    numbers = weights.read()
    found = {}
    for part, own in weights.projections.items():
        shape, which, in_one_piece = _extent(own, weights.module)
        names = own.parameters
        where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        numel = sum((piece.features[1] - piece.features[0]) * (piece.inner or (1,))[0] for piece in own.pieces)
        place = ParameterPlace(names, shape, f"{where} {which}".rstrip() if in_one_piece else f"a part of {where}", numel)
        heads = 1 if part == "b_o" else own.shape[0]
        inner = own.pieces[0].inner
        found[part] = _Held(
            place,
            heads,
            1 if inner is None else inner[0],
            own.shape[0] if part == "b_o" else own.shape[1],
            as_matrix(part, numbers[part]),
            in_one_piece,
            part.startswith("W"),
        )
    return found


def _extent(own: Projection, module: nn.Module) -> tuple[tuple[int, ...], str, bool]:
    """The shape of what the first parameter holds of it, which rows these are, and whether they are in one piece."""
    part = own.parts[0]
    tensor = module.get_parameter(own.parameters[0])
    places = [torch.cat([of[head] for head in sorted(of)]) for of in (indices_of(part, dim) for dim in range(tensor.dim()))]
    runs = [runs_of(own_places) for own_places in places]
    numel = sum(
        (piece.features[1] - piece.features[0]) * (piece.inner or (1,))[0]
        for piece in own.pieces
        if piece.parameter == own.parameters[0]
    )
    lengths = [stop - start for (start, stop), *_ in runs]
    if any(len(run) != 1 for run in runs) or math.prod(lengths) != numel:
        return as_matrix(own.part, torch.empty(own.shape, device="meta")).shape, "", numel == tensor.numel()
    partly = [dim for dim, length in enumerate(lengths) if length < tensor.shape[dim]]
    shape = tuple(length for length in lengths if length > 1 or tensor.dim() < 3) or (1,)
    if not partly:
        return shape, "", True
    if tensor.dim() > 2 or len(partly) > 1:
        return shape, "", False
    unit = "elements" if tensor.dim() == 1 else ("rows", "columns")[partly[0]]
    start, stop = runs[partly[0]][0]
    return shape, f"{unit} {start}–{stop - 1}", True


def _mapping(part: str, left: _Held | None, right: _Held | None) -> str:
    if left is None or right is None:
        missing = "left" if left is None else "right"
        return f"the {missing} has none: as if it were the identity" if part == "W_o" else f"the {missing} has none"
    ours, theirs = left.place, right.place
    if ours.numel == theirs.numel and left.matrix.shape == right.matrix.shape:
        if not _are_equal(left.matrix, right.matrix):
            return "other numbers"
        one_each = sorted((left, right), key=lambda held: len(held.place.names))
        if len(one_each[0].place.names) == 1 < len(one_each[1].place.names) and one_each[0].in_one_piece:
            return _one_for_each_head(one_each[1], one_each[0])
        if left.heads != right.heads:
            return f"the same numbers, cut into {left.heads} heads and into {right.heads}"
        return "the same numbers"
    if len(ours.names) == len(theirs.names) > 1 and left.rows_of_head == right.rows_of_head:
        few = min(left.inner, right.inner)
        return f"of head h, columns {_run(few)} are in both; the other columns are in one only"
    many, one = (left, right) if len(ours.names) > len(theirs.names) else (right, left)
    if len(many.place.names) == many.heads > len(one.place.names) == 1 and one.heads == many.heads and one.in_one_piece:
        return _one_for_each_head(many, one)
    if left.heads != right.heads and left.rows_of_head == right.rows_of_head and left.inner == right.inner:
        fewer, more = sorted((left, right), key=lambda held: held.heads)
        if more.heads % fewer.heads == 0:
            each = more.heads // fewer.heads
            return f"{fewer.heads} key/value heads, each of them standing {each} times in the other"
    return f"{ours.numel:,} numbers against {theirs.numel:,}"


def _are_equal(left: Tensor, right: Tensor) -> bool:
    """Whether both hold the same numbers, as far as the coarser dtype holds them."""
    coarser = max((left.dtype, right.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.equal(left.to(coarser).cpu(), right.to(coarser).cpu())


def _one_for_each_head(many: _Held, one: _Held) -> str:
    """How one tensor for all heads is made of one for each."""
    rows = _run(one.rows_of_head)
    each = re.sub(r"(?<![A-Za-z0-9])0(?![A-Za-z0-9])", "h", many.place.names[0])
    unit = "rows" if one.is_matrix else "elements"
    if one.place.numel == many.place.numel:
        return f"{unit} {rows} are all of {each}"
    return f"{unit} {rows}, columns {_run(many.inner)} are all of {each}; the other columns are not there"


def _run(step: int) -> str:
    """`64h to 64h+63`."""
    return f"{step}h to {step}h+{step - 1}" if step > 1 else "h"

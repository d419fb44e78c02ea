"""The same weights for two sides of which one at least is a module of the user's own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...errors import WeightsError
from ...layers.weights import AttentionWeights, read_weights
from ...record.copying import copy_module
from ...reports.diff import ParameterPair, ParameterPlace, SharedWeights
from ...targets.load import Layer
from .found_weights import FoundWeights, find_weights
from .module_run import ModuleRun, ModuleSide
from .shared_weights import load_what_fits


def share(left: ModuleSide, right: ModuleSide) -> SharedWeights:
    """Give both sides the same weights as far as that can be done, and say how it was done.

    Where names and shapes agree it is one state dict. Otherwise the weights of each attention go through the canonical
    ones: read off a target and loaded into a layer, or written into the parameters of another target.
    """
    # The coarser of two dtypes rounds the numbers: the finer one can hold them.
    source, other = sorted((left, right), key=lambda side: -torch.finfo(getattr(torch, side.dtype)).eps)
    if _agree(source.own.module, other.own.module):
        other.own.module.load_state_dict(source.own.module.state_dict())
        return SharedWeights(True, "one state dict in both: names and shapes agree.", (), None)
    if isinstance(source.own, Layer):
        source, other = other, source
    try:
        try:
            if isinstance(other.own, Layer):
                return _into_layer(source, other, other.own)
            return _into_target(source, other)
        except WeightsError:
            # What has no place for some numbers can still give its own to what has a place for all.
            with suppress(WeightsError):
                return _into_target(other, source)
            raise
    except WeightsError as error:
        sentence = f"not carried: each side has its own weights, as it was built from seed {left.seed}."
        return SharedWeights(False, sentence, (str(error),), None)


def in_the_fuller(layer: ModuleSide, fuller: ModuleSide) -> ModuleSide | None:
    """A copy of a target with the numbers of a layer that has a place for fewer; None where it has a place for all.

    None as well where the layer's numbers cannot be written there.
    """
    if not isinstance(layer.own, Layer) or isinstance(fuller.own, Layer):
        return None
    copied = replace(fuller, own=replace(fuller.own, module=copy_module(fuller.own.module)))
    try:
        (found,) = _weights_of(copied)
        numbers = found.completed(read_weights(layer.own.module))
        if _equal(found.read(), numbers):
            return None
        found.write(numbers)
    except (WeightsError, ValueError):  # more than one attention
        return None
    return copied


def carried(weights: SharedWeights) -> bool:
    """Whether any numbers went from one side to the other."""
    return weights.whole or not weights.sentence.startswith("not carried")


def _agree(left: nn.Module, right: nn.Module) -> bool:
    mine, theirs = left.state_dict(), right.state_dict()
    return bool(mine) and {n: t.shape for n, t in mine.items()} == {n: t.shape for n, t in theirs.items()}


def _weights_of(side: ModuleSide) -> list[FoundWeights]:
    """Where the weights of each attention are. Raises `WeightsError` that says what cannot be told."""
    seen = ModuleRun(side).opened
    if not seen.attentions:
        raise WeightsError(f"{side.label}: no attention was found in it.")
    try:
        return [find_weights(side.own.module, seen, *attention) for attention in seen.attentions]
    except WeightsError as error:
        raise WeightsError(f"{side.label}: {error}") from None


def _into_layer(source: ModuleSide, other: ModuleSide, layer: Layer) -> SharedWeights:
    found = _weights_of(source)
    if len(found) > 1:
        raise WeightsError(f"{source.label} has {len(found)} attentions, and {other.label} holds one.")
    weights = found[0].read()
    if weights.num_heads != layer.spec.num_heads:
        weights = weights.with_heads(layer.spec.num_heads)
    left_out = load_what_fits(layer.module, weights, other.label)
    left_out += _rest(source, found)
    how = f"read off the products of {source.label} and loaded into {other.label}"
    return SharedWeights(not left_out, f"{how}{', as far as it holds them' if left_out else ''}.", left_out, None)


def _into_target(source: ModuleSide, other: ModuleSide) -> SharedWeights:
    given, own = _weights_of(source), _weights_of(other)
    if len(given) != len(own):
        raise WeightsError(f"{source.label} has {len(given)} attentions, and {other.label} has {len(own)}.")
    before = {name: parameter.detach().clone() for name, parameter in other.own.module.named_parameters()}
    try:
        numbers = [mine.completed(theirs.read()) for mine, theirs in zip(own, given, strict=True)]
        for mine, theirs in zip(own, numbers, strict=True):
            mine.write(theirs)
        if not all(_equal(a.read(), b) for a, b in zip(own, numbers, strict=True)):
            raise WeightsError(f"{other.label}: one parameter serves several of its projections.")
    except WeightsError:
        with torch.no_grad():
            for name, parameter in other.own.module.named_parameters():
                parameter.copy_(before[name])
        raise
    left_out = (*_rest(source, given), *_rest(other, own))
    how = f"read off the products of {source.label} and written into the parameters of {other.label}"
    if any(one.output is None for one in given) and any(one.output is not None for one in own):
        how += ", the identity for W_o"
    return SharedWeights(not left_out, f"{how}.", left_out, None)


def _equal(left: AttentionWeights, right: AttentionWeights) -> bool:
    mine, theirs = left.tensors(), right.tensors()
    for name in mine.keys() | theirs.keys():
        one, other = mine.get(name), theirs.get(name)
        if one is None or other is None:
            present = one if one is not None else other
            if present is not None and bool(present.count_nonzero()):
                return False
        elif not torch.equal(one.flatten().double(), other.flatten().double()):
            return False
    return True


def _rest(side: ModuleSide, found: list[FoundWeights]) -> tuple[str, ...]:
    """A sentence where a module has parameters that belong to no projection of an attention."""
    held = {name for one in found for matrix in one.matrices for name in (*matrix.names, *matrix.bias_names)}
    others = [(name, p.numel()) for name, p in side.own.module.named_parameters() if name not in held]
    if not others:
        return ()
    first = others[0][0] + (f" and {len(others) - 1} more" if len(others) > 1 else "")
    total = sum(numel for _, numel in others)
    return (
        f"{side.label}: {first}, {total:,} numbers that project nothing for an attention, stay as they were built.",
    )


def pairs(left: ModuleSide, right: ModuleSide) -> tuple[ParameterPair, ...]:
    """Where each side keeps each matrix and bias, for sides of one attention; nothing where that cannot be told."""
    try:
        both = [_weights_of(side) for side in (left, right)]
    except WeightsError:
        return ()
    if any(len(found) != 1 for found in both):
        return ()
    ours, theirs = (_places(side, found[0]) for side, found in zip((left, right), both, strict=True))
    found = []
    for part in ("W_q", "b_q", "W_k", "b_k", "W_v", "b_v", "W_o", "b_o"):
        if part in ours or part in theirs:
            one, other = ours.get(part), theirs.get(part)
            places = [None if held is None else held[0] for held in (one, other)]
            found.append(ParameterPair(part, places[0], places[1], _mapping(one, other)))
    return tuple(found)


def _places(side: ModuleSide, found: FoundWeights) -> dict[str, tuple[ParameterPlace, Tensor]]:
    """Each matrix and bias, where it is, and its numbers."""
    places = {}
    parameters = dict(side.own.module.named_parameters())
    for matrix in found.matrices:
        for part, names, content in (
            (f"W_{matrix.label}", matrix.names, matrix.matrix),
            (f"b_{matrix.label}", matrix.bias_names, matrix.bias),
        ):
            if content is None or not names:
                continue
            shape = tuple(content.T.shape) if part == "W_o" else tuple(content.shape)
            whole = sum(parameters[name].numel() for name in names) == content.numel()
            if len(names) > 1:
                shape = tuple(parameters[names[0]].shape)
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            place = ParameterPlace(names, shape, where if whole else f"a part of {where}", content.numel())
            places[part] = (place, content.double())
    return places


def _mapping(left: tuple[ParameterPlace, Tensor] | None, right: tuple[ParameterPlace, Tensor] | None) -> str:
    if left is None or right is None:
        return f"the {'left' if left is None else 'right'} has none"
    (ours, mine), (theirs, others) = left, right
    if mine.shape == others.shape:
        return "the same numbers" if torch.equal(mine, others) else "other numbers"
    return f"{ours.numel:,} numbers against {theirs.numel:,}"

"""Compare equal layers of a stack: one that is scaled, masked or rotated unlike the others is a suspicion.

    layers = [Layer(dim, scale=dim ** -0.5) for _ in range(5)] + [Layer(dim)]      # the last one is not scaled

Equal layers are modules of one class and of equal parts at one place of a stack, with heads of one size. Layers that
differ on purpose say so: in their attributes (`is_local`, `layer_type`, `sliding_window`), in a list of the model
(`layer_types`), by a pattern that repeats, or by a number that is another one in every layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass

import torch
from torch import nn

from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..reports.check import Finding
from ..text import first_few, plural, small
from .evidence import Evidence
from .seen_keys import SeenKeys

_DIGITS = 4
"""Significant digits to which measured numbers of equal layers agree."""
_DECLARES = (bool, int, str, tuple, list, type(None))
"""Types of attributes that may declare how a layer differs."""
_OF_TORCH = ("training", "_is_full_backward_hook")
"""Attributes that every module has."""
_FEWEST = 3
"""The smallest number of layers of which one may be the odd one out."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """An attention of a stack."""

    attention: Attention
    names: AxisNames
    place: int
    """Its number among all attentions."""

    @property
    def path(self) -> str:
        """The path of its module."""
        return self.attention.module


def unlike_scales(evidence: Evidence) -> Iterator[Finding]:
    """Yield equal layers with another measured scale than the others."""
    for stack in _stacks(evidence):
        scales = _scales_of(stack)
        if scales is None:
            continue
        odd = _odd_ones(evidence, stack, [_rounded(scale) for scale in scales], of_numbers=False)
        if odd is None:
            odd = _half_wrong(stack, scales)
        if odd is not None:
            yield _unlike_scale(odd, stack)


def _scales_of(stack: Sequence[_Layer]) -> list[float] | None:
    """Return the scale of each layer; None if one is unknown: where a mask takes every score, no product is left."""
    scales = []
    for layer in stack:
        if not layer.attention.scale:
            return None
        scales.append(layer.attention.scale)
    return scales


def _unlike_scale(odd: Sequence[_Layer], stack: Sequence[_Layer]) -> Finding:
    even = stack[_first_even(stack, odd)]
    scale = small(odd[0].attention.scale or 0.0)
    usual = small(even.attention.scale or 0.0)
    head_dim = even.names.head_dim
    return _finding(
        "scale",
        odd,
        stack,
        f"scaled by {scale}, the others by {usual}",
        f"The scale is the recorded factor between q·kᵀ and the softmax. head_dim is {head_dim} in all of them.",
    )


def unlike_masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield one of equal layers in which tokens see other tokens than in the others."""
    for stack in _stacks(evidence):
        sights = _sights_of(evidence, stack)
        if sights is None:
            continue
        seen = [sight.seen.any(0).numpy().tobytes() for sight in sights]
        odd = _odd_ones(evidence, stack, seen, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        here = sights[stack.index(odd[0])]
        there = sights[_first_even(stack, odd)]
        if here.origins and there.origins and here.origins.isdisjoint(there.origins):
            continue  # its keys are of another sequence
        proof = "A key is visible if it gets weight, or if no mask lowers its score."
        yield _finding("masking", odd, stack, _unlike_words(here, there), proof)


def _sights_of(evidence: Evidence, stack: Sequence[_Layer]) -> list[SeenKeys] | None:
    """Return the visible keys of each layer; None if some are unknown, or their numbers differ."""
    sights = []
    for layer in stack:
        sight = evidence.sight_of(layer.attention)
        if sight is None:
            return None
        sights.append(sight)
    shape = sights[0].seen.shape
    if any(sight.seen.shape != shape for sight in sights):
        return None
    return sights


def _first_even(stack: Sequence[_Layer], odd: Sequence[_Layer]) -> int:
    """Return the place of the first layer of a stack that is not an odd one."""
    places = [place for place, layer in enumerate(stack) if layer not in odd]
    return places[0]


def _unlike_words(here: SeenKeys, there: SeenKeys) -> str:
    """Return how the visible keys of a layer differ from those of another one."""
    if here.words() == there.words():
        count = int((here.seen.any(0) != there.seen.any(0)).sum())
        return f"masked differently from the others, in {plural(count, 'pair')} of a query and a key"
    return f"masked differently: {here.words()}; in the others, {there.words()}"


def unlike_rotations(evidence: Evidence) -> Iterator[Finding]:
    """Yield one of equal layers whose rotation has other frequencies than that of the others."""
    for stack in _stacks(evidence):
        ladders = _frequencies_of(evidence, stack)
        rounded = [tuple(map(_rounded, frequencies)) for frequencies in ladders]
        odd = _odd_ones(evidence, stack, rounded, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        here = ladders[stack.index(odd[0])]
        there = ladders[_first_even(stack, odd)]
        if not here or not there:
            continue  # layers without positions are usual beside layers with them
        pair = _first_unlike(here, there)
        yield _finding(
            "rotary",
            odd,
            stack,
            f"rotated by {small(here[pair])} a position in pair {pair}, the others by {small(there[pair])}",
            "The frequencies are measured from the angles between neighbours.",
        )


def _frequencies_of(evidence: Evidence, stack: Sequence[_Layer]) -> list[Sequence[float]]:
    """Return the frequencies of the rotation of each layer; of a layer without rotation none."""
    ladders: list[Sequence[float]] = []
    for layer in stack:
        steps = evidence.inner_of(layer.attention, layer.names)
        ladders.append(steps.frequencies or ())
    return ladders


def _first_unlike(here: Sequence[float], there: Sequence[float]) -> int:
    """Return the first place at which two ladders have different numbers; 0 if they have the same.

    >>> _first_unlike([1.0, 0.1], [1.0, 0.2])
    1
    """
    for place, (left, right) in enumerate(zip(here, there, strict=False)):
        if _differ(left, right):
            return place
    return 0


def _finding(check: str, odd: Sequence[_Layer], stack: Sequence[_Layer], difference: str, proof: str) -> Finding:
    paths = first_few([layer.path for layer in odd], 3)
    verb = "is" if len(odd) == 1 else "are"
    return Finding(
        check,
        f"{paths} {verb} {difference}: {len(odd)} of {len(stack)} equal layers.",
        f"{proof} No attribute of the modules explains the difference.",
        sure=False,
        source=odd[0].attention.score_product.op.source,
        module=odd[0].path,
    )


def _stacks(evidence: Evidence) -> Iterator[list[_Layer]]:
    """Yield the attentions at one place of several layers: modules of one class and of one size of heads."""
    if len(evidence.kinds) < 2:
        return  # equal code computes the same
    stacks: dict[Hashable, list[_Layer]] = defaultdict(list)
    for place, (attention, names) in enumerate(evidence.run.attentions):
        layer = _Layer(attention, names, place)
        stacks[_kind_of(evidence, layer)].append(layer)
    for stack in stacks.values():
        paths = {layer.path for layer in stack}
        if 1 < len(stack) == len(paths):
            yield stack


def _kind_of(evidence: Evidence, layer: _Layer) -> Hashable:
    """Return what equal layers agree in: the place in a layer, the class, the classes of the parts, and sizes."""
    names = layer.names
    place_in_layer = re.sub(r"\d+", "*", layer.path)
    sizes = (names.num_heads, names.num_kv_heads, names.head_dim, names.lengths)
    if not layer.path:
        return place_in_layer, None, (), sizes
    module = evidence.subject.module.get_submodule(layer.path)
    parts = tuple((name, type(part)) for name, part in module.named_children())
    return place_in_layer, type(module), parts, sizes


def _odd_ones(
    evidence: Evidence, stack: Sequence[_Layer], measured: Sequence[Hashable], *, of_numbers: bool
) -> list[_Layer] | None:
    """Return the layers with another measurement than most; None if all agree, or they differ on purpose.

    With `of_numbers`, a fractional number among the attributes declares a difference too: a base, a size of a window.
    """
    groups: dict[Hashable, list[_Layer]] = defaultdict(list)
    for layer, measurement in zip(stack, measured, strict=True):
        groups[measurement].append(layer)
    if not 1 < len(groups) < len(stack) or len(stack) < _FEWEST:
        return None
    if _repeats(measured) or _is_declared(evidence, stack, measured, of_numbers=of_numbers):
        return None
    *smaller, largest = sorted(groups.values(), key=len)
    if len(largest) <= len(stack) - len(largest):
        return None  # no measurement is that of most
    odd = []
    for group in smaller:
        odd += group
    return odd


def _half_wrong(stack: Sequence[_Layer], scales: Sequence[float]) -> list[_Layer] | None:
    """Return the layers that are not scaled at all beside layers that are scaled by 1/√head_dim; None if others are."""
    right = []
    unscaled = []
    for layer, scale in zip(stack, scales, strict=True):
        is_right = abs(scale * layer.names.head_dim**0.5 - 1) < 1e-3
        is_unscaled = abs(scale - 1) < 1e-3
        if is_right == is_unscaled:
            return None  # a layer is scaled in a third way, or both ways are one
        right.append(is_right)
        if is_unscaled:
            unscaled.append(layer)
    if not any(right) or not unscaled or _repeats(right):
        return None
    return unscaled


def _repeats(measured: Sequence[Hashable]) -> bool:
    """Return whether the measurements are a pattern that repeats at least twice: local, local, global, local, …."""
    count = len(measured)
    for period in range(2, count // 2 + 1):
        if all(measured[place] == measured[place - period] for place in range(period, count)):
            return True
    return False


def _is_declared(
    evidence: Evidence, stack: Sequence[_Layer], measured: Sequence[Hashable], *, of_numbers: bool
) -> bool:
    """Return whether an attribute of the modules around each attention differs as the measurements do."""
    module = evidence.subject.module
    declared = [_attributes(module, layer.path, of_numbers=of_numbers) for layer in stack]
    for name in set.intersection(*map(set, declared)):
        values = [attributes[name] for attributes in declared]
        if _agree(values, measured):
            return True
    return any(_agree(values, measured) for values in _listed_above(module, stack))


def _agree(values: Sequence[Hashable], measured: Sequence[Hashable]) -> bool:
    """Return whether each value has one measurement; not if it is the same in all layers, or a number of the layer."""
    count = len(set(values))
    if count < 2 or count == len(values):
        return False
    pairs = set(zip(values, measured, strict=True))
    return len(pairs) == count


def _listed_above(module: nn.Module, stack: Sequence[_Layer]) -> Iterator[list[Hashable]]:
    """Yield what lists in the modules that contain the stack, or in their settings, say of each layer.

    A list has an entry for each layer, `["local", "local", "global"]`, or the numbers of some layers, `[2, 5]`.
    """
    parts = stack[0].path.split(".")
    number = _place_of_number(parts) or 0
    for place in range(number + 1):
        around = module.get_submodule(".".join(parts[:place]))
        for attributes in (vars(around), *_settings_in(around)):
            for value in attributes.values():
                yield from _of_layers(value, len(stack))


def _place_of_number(parts: Sequence[str]) -> int | None:
    """Return the first part of a path that has the number of a layer; None without a number.

    >>> _place_of_number(["model", "layers", "3", "attention"])
    2
    """
    for place, part in enumerate(parts):
        if re.search(r"\d", part):
            return place
    return None


def _settings_in(module: nn.Module) -> Iterator[Mapping[str, object]]:
    """Yield the attributes of the settings that are attributes of a module, e.g. of its `config`."""
    for value in vars(module).values():
        is_settings = hasattr(value, "to_dict") or is_dataclass(value)
        if is_settings and hasattr(value, "__dict__"):
            yield vars(value)


def _of_layers(value: object, count: int) -> Iterator[list[Hashable]]:
    """Yield what a list says of each of `count` layers; nothing if it is no list of layers."""
    if isinstance(value, (str, list, tuple)) and len(value) == count:
        yield [repr(entry) for entry in value]
    if not isinstance(value, (list, tuple, set, frozenset)):
        return
    if all(type(number) is int for number in value):
        yield [layer in value for layer in range(count)]


def _attributes(module: nn.Module, path: str, *, of_numbers: bool) -> Mapping[str, Hashable]:
    """Return the plain attributes of the modules on a path from a layer of a stack inwards, by name.

    Modules inside the attention count too, e.g. one that makes the rotation.
    """
    kinds = (*_DECLARES, float) if of_numbers else _DECLARES
    attributes: dict[str, Hashable] = {}
    for name, part in _modules_inwards(module, path):
        for attribute, value in vars(part).items():
            if attribute == "_parameters":
                attributes[f"{name}.{attribute}"] = repr(sorted(value))
            elif attribute not in _OF_TORCH and isinstance(value, kinds):
                attributes[f"{name}.{attribute}"] = repr(value)
    return attributes


def _modules_inwards(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules on a path from its first number inwards, and those inside the last.

    Their names are equal in all layers: `0`, `1`, … on the path and the path from the last one inside it.
    """
    parts = path.split(".")
    first = _place_of_number(parts)
    if first is None:
        first = len(parts) - 1
    inner = module
    for stop in range(first, len(parts)):
        inner = module.get_submodule(".".join(parts[: stop + 1]))
        yield str(stop - first), inner
    for name, part in inner.named_modules():
        if name:
            yield name, part


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _differ(left: float, right: float) -> bool:
    return not torch.isclose(torch.tensor(left), torch.tensor(right), rtol=10.0**-_DIGITS, atol=0)

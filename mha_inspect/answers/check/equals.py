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

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...reports.check import Finding
from ...text import first_few, plural, small
from .evidence import Evidence
from .seen_keys import SeenKeys

_DIGITS = 4
"""Significant digits to which measured numbers of equal layers agree."""
_DECLARES = (bool, int, str, tuple, list, type(None))
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
        scales = [layer.attention.scale for layer in stack]
        if not all(scales):
            continue  # unknown: where a mask takes every score, none of the product is left
        odd = _odd_ones(evidence, stack, [_rounded(scale or 0.0) for scale in scales], of_numbers=False)
        if odd is None:
            odd = _half_wrong(stack, [scale or 0.0 for scale in scales])
        if odd is None:
            continue
        others = stack[_first_even(stack, odd)]
        head_dim = others.names.head_dim
        yield _finding(
            "scale",
            odd,
            stack,
            f"scaled by {small(odd[0].attention.scale or 0.0)}, the others by {small(others.attention.scale or 0.0)}",
            f"The scale is the recorded factor between q·kᵀ and the softmax. head_dim is {head_dim} in all of them.",
        )


def unlike_masks(evidence: Evidence) -> Iterator[Finding]:
    """Yield one of equal layers in which tokens see other tokens than in the others."""
    sights = {id(sight.attention): sight for sight in evidence.sights}
    for stack in _stacks(evidence):
        of_layers = [sights[id(layer.attention)] for layer in stack if id(layer.attention) in sights]
        if len(of_layers) < len(stack) or len({sight.seen.shape for sight in of_layers}) > 1:
            continue
        seen = [sight.seen.any(0).numpy().tobytes() for sight in of_layers]
        odd = _odd_ones(evidence, stack, seen, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        here, there = of_layers[stack.index(odd[0])], of_layers[_first_even(stack, odd)]
        if here.origins and there.origins and not here.origins & there.origins:
            continue  # its keys are of another sequence
        proof = "A key is visible if it gets weight, or if no mask lowers its score."
        yield _finding("masking", odd, stack, _unlike_words(here, there), proof)


def _first_even(stack: Sequence[_Layer], odd: Sequence[_Layer]) -> int:
    """Return the place of the first layer of a stack that is not an odd one."""
    return next(place for place, layer in enumerate(stack) if layer not in odd)


def _unlike_words(here: SeenKeys, there: SeenKeys) -> str:
    """Return how the visible keys of a layer differ from those of another one."""
    if here.words() == there.words():
        count = int((here.seen.any(0) != there.seen.any(0)).sum())
        return f"masked differently from the others, in {plural(count, 'pair')} of a query and a key"
    return f"masked differently: {here.words()}; in the others, {there.words()}"


def unlike_rotations(evidence: Evidence) -> Iterator[Finding]:
    """Yield one of equal layers whose rotation has other frequencies than that of the others."""
    for stack in _stacks(evidence):
        ladders = [evidence.inner.of(layer.attention, layer.names).frequencies or () for layer in stack]
        rounded = [tuple(map(_rounded, frequencies)) for frequencies in ladders]
        odd = _odd_ones(evidence, stack, rounded, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        mine, theirs = ladders[stack.index(odd[0])], ladders[_first_even(stack, odd)]
        if not mine or not theirs:
            continue  # layers without positions are usual beside layers with them
        place = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if _differ(*pair)), 0)
        what = f"rotated by {small(mine[place])} a position in pair {place}, the others by {small(theirs[place])}"
        yield _finding("rotary", odd, stack, what, "The frequencies are measured from the angles between neighbours.")


def _finding(check: str, odd: Sequence[_Layer], stack: Sequence[_Layer], what: str, proof: str) -> Finding:
    paths = first_few([layer.path for layer in odd], 3)
    verb = "is" if len(odd) == 1 else "are"
    return Finding(
        check,
        f"{paths} {verb} {what}: {len(odd)} of {len(stack)} equal layers.",
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
        module = evidence.subject.module.get_submodule(attention.module) if attention.module else None
        where = re.sub(r"\d+", "*", attention.module)
        sizes = names.num_heads, names.num_kv_heads, names.head_dim, names.lengths
        parts = () if module is None else tuple((name, type(part)) for name, part in module.named_children())
        stacks[where, type(module), parts, sizes].append(_Layer(attention, names, place))
    for stack in stacks.values():
        paths = {layer.path for layer in stack}
        if 1 < len(stack) == len(paths):
            yield stack


def _odd_ones(
    evidence: Evidence, stack: Sequence[_Layer], measured: Sequence[Hashable], *, of_numbers: bool
) -> list[_Layer] | None:
    """Return the layers with another measurement than most; None if all agree, or they differ on purpose.

    With `of_numbers`, a fractional number among the attributes declares a difference too: a base, a size of a window.
    """
    groups: dict[Hashable, list[_Layer]] = defaultdict(list)
    for layer, value in zip(stack, measured, strict=True):
        groups[value].append(layer)
    if not 1 < len(groups) < len(stack) or len(stack) < _FEWEST:
        return None
    if _repeats(measured) or _is_declared(evidence, stack, measured, of_numbers=of_numbers):
        return None
    ordered = sorted(groups.values(), key=len)
    if len(ordered[-1]) <= len(stack) - len(ordered[-1]):
        return None  # no measurement is that of most
    return [layer for group in ordered[:-1] for layer in group]


def _half_wrong(stack: Sequence[_Layer], scales: Sequence[float]) -> list[_Layer] | None:
    """Return the layers that are not scaled at all beside layers that are scaled by 1/√head_dim; None if others are."""
    right = [abs(scale * layer.names.head_dim**0.5 - 1) < 1e-3 for layer, scale in zip(stack, scales, strict=True)]
    plain = [abs(scale - 1) < 1e-3 for scale in scales]
    if not any(right) or not any(plain) or _repeats(right):
        return None
    if any(is_right == is_plain for is_right, is_plain in zip(right, plain, strict=True)):
        return None  # a layer is scaled in a third way, or both ways are one
    return [layer for layer, is_plain in zip(stack, plain, strict=True) if is_plain]


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
    declared = [_attributes(evidence.subject.module, layer.path, of_numbers=of_numbers) for layer in stack]
    for name in set.intersection(*map(set, declared)):
        if _agree([attributes[name] for attributes in declared], measured):
            return True
    return any(_agree(values, measured) for values in _listed_above(evidence.subject.module, stack))


def _agree(values: Sequence[Hashable], measured: Sequence[Hashable]) -> bool:
    """Return whether each value has one measurement; not if it is the same in all layers, or a number of the layer."""
    if len(set(values)) < 2 or len(set(values)) == len(values):
        return False
    return len(set(zip(values, measured, strict=True))) == len(set(values))


def _listed_above(module: nn.Module, stack: Sequence[_Layer]) -> Iterator[list[Hashable]]:
    """Yield what lists in the modules that contain the stack, or in their settings, say of each layer.

    A list has an entry for each layer, `["local", "local", "global"]`, or the numbers of some layers, `[2, 5]`.
    """
    parts = stack[0].path.split(".")
    first = next((place for place, part in enumerate(parts) if re.search(r"\d", part)), 0)
    for place in range(first + 1):
        attributes = vars(module.get_submodule(".".join(parts[:place])))
        settings = [value for value in attributes.values() if hasattr(value, "to_dict") or is_dataclass(value)]
        for holder in (attributes, *(vars(each) for each in settings if hasattr(each, "__dict__"))):
            for value in holder.values():
                yield from _of_each_layer(value, len(stack))


def _of_each_layer(value: object, count: int) -> Iterator[list[Hashable]]:
    """Yield what a list says of each of `count` layers; nothing if it is no list of layers."""
    if isinstance(value, (str, list, tuple)) and len(value) == count:
        yield [repr(each) for each in value]
    is_of_numbers = isinstance(value, (list, tuple, set, frozenset)) and all(type(each) is int for each in value)
    if is_of_numbers and isinstance(value, (list, tuple, set, frozenset)):
        yield [layer in value for layer in range(count)]


def _attributes(module: nn.Module, path: str, *, of_numbers: bool) -> Mapping[str, Hashable]:
    """Return the plain attributes of the modules on a path from a layer of a stack inwards, by name.

    Modules inside the attention count too, e.g. one that makes the rotation.
    """
    parts = path.split(".")
    first = next((place for place, part in enumerate(parts) if re.search(r"\d", part)), len(parts) - 1)
    around = [".".join(parts[: place + 1]) for place in range(first, len(parts))]
    modules = [(at, module.get_submodule(name)) for at, name in enumerate(around)]
    if modules:
        _, attention = modules[-1]
        modules += [(name, inner) for name, inner in attention.named_modules() if name]
    kinds = (*_DECLARES, float) if of_numbers else _DECLARES
    attributes: dict[str, Hashable] = {}
    for at, part in modules:
        for name, value in vars(part).items():
            if name not in ("training", "_is_full_backward_hook") and isinstance(value, kinds):
                attributes[f"{at}.{name}"] = repr(value)
            if name == "_parameters":
                attributes[f"{at}.{name}"] = repr(sorted(value))
    return attributes


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _differ(left: float, right: float) -> bool:
    return not torch.isclose(torch.tensor(left), torch.tensor(right), rtol=10.0**-_DIGITS, atol=0)

"""Compare equal layers of a stack: one that is scaled, masked or rotated unlike the others is a suspicion.

    layers = [Layer(dim, scale=dim ** -0.5) for _ in range(5)] + [Layer(dim)]      # the last one is not scaled

Equal layers are modules of one class at one place of a stack, with heads of one size. Layers that differ on purpose say
so: in their attributes (`is_local`, `layer_type`, `sliding_window`), by a pattern that repeats, or by a number that is
another one in every layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...graph.attention import Attention
from ...naming.axes import AxisNames
from ...reports.check import Finding
from ...text import first_few, plural, small
from .evidence import Evidence

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
        others = next(layer for layer in stack if layer not in odd)
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
        known = [sights.get(id(layer.attention)) for layer in stack]
        if any(sight is None for sight in known) or len({sight.seen.shape for sight in known if sight}) > 1:
            continue
        seen = [sight.seen.any(0).numpy().tobytes() for sight in known if sight is not None]
        odd = _odd_ones(evidence, stack, seen, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        others = next(place for place, layer in enumerate(stack) if layer not in odd)
        here, there = known[stack.index(odd[0])], known[others]
        assert here is not None
        assert there is not None
        if here.words() == there.words():
            count = int((here.seen.any(0) != there.seen.any(0)).sum())
            what = f"masked differently from the others, in {plural(count, 'pair')} of a query and a key"
        else:
            what = f"masked differently: {here.words()}; in the others, {there.words()}"
        yield _finding(
            "masking", odd, stack, what, "A key is visible if it gets weight, or if no mask lowers its score."
        )


def unlike_rotations(evidence: Evidence) -> Iterator[Finding]:
    """Yield one of equal layers whose rotation has other frequencies than that of the others."""
    for stack in _stacks(evidence):
        known = [evidence.inner.of(layer.attention, layer.names).frequencies for layer in stack]
        rounded = [tuple(_rounded(number) for number in frequencies or ()) for frequencies in known]
        odd = _odd_ones(evidence, stack, rounded, of_numbers=True)
        if odd is None or len(odd) > 1:
            continue
        mine = known[stack.index(odd[0])]
        theirs = next(known[place] for place, layer in enumerate(stack) if layer not in odd)
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
        stacks[where, type(module), sizes].append(_Layer(attention, names, place))
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
    each = [is_right != is_plain for is_right, is_plain in zip(right, plain, strict=True)]
    if not any(right) or not any(plain) or not all(each) or _repeats(right):
        return None
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
    for name in set.intersection(*(set(each) for each in declared)):
        values = [each[name] for each in declared]
        if len(set(values)) < 2 or len(set(values)) == len(stack):
            continue  # equal in all, or a number of the layer
        pairs = set(zip(values, measured, strict=True))
        if len(pairs) == len(set(values)):
            return True
    return False


def _attributes(module: nn.Module, path: str, *, of_numbers: bool) -> Mapping[str, Hashable]:
    """Return the plain attributes of the modules on a path from a layer of a stack inwards, by name.

    Modules inside the attention count too, e.g. one that makes the rotation.
    """
    parts = path.split(".")
    first = next((place for place, part in enumerate(parts) if re.search(r"\d", part)), len(parts) - 1)
    around = [".".join(parts[: place + 1]) for place in range(first, len(parts))]
    modules = [(at, module.get_submodule(name)) for at, name in enumerate(around)]
    modules += [(name, each) for name, each in modules[-1][1].named_modules() if name] if modules else []
    kinds = (*_DECLARES, float) if of_numbers else _DECLARES
    found: dict[str, Hashable] = {}
    for at, each in modules:
        for name, value in vars(each).items():
            if name not in ("training", "_is_full_backward_hook") and isinstance(value, kinds):
                found[f"{at}.{name}"] = repr(value)
            if name == "_parameters":
                found[f"{at}.{name}"] = repr(sorted(value))
    return found


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _differ(left: float, right: float) -> bool:
    return not torch.isclose(torch.tensor(left), torch.tensor(right), rtol=10.0**-_DIGITS, atol=0)

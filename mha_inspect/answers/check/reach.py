"""What moves when a token of the input is another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bench import Bench, remembered
from .runner import NotPossibleError
from .sources import Source

Reach = dict[int, Tensor]
"""Position of a token to how far each output moves when that token is another: `batch position`."""


def other_tokens(bench: Bench, source: Source, index: tuple[Any, ...], *, by: float = 2.0) -> dict[str, Tensor]:
    """Return the arguments with other tokens at an index: other numbers of the same kind, or ids that occur."""
    changed = source.value.detach().clone()
    old = changed[index]
    if changed.is_floating_point():
        spread = float(source.value.detach().float().std()) or 1.0
        drawn = torch.randn(old.shape, generator=bench.draw) * spread * by
        changed[index] = drawn.to(old)
    else:
        known = torch.unique(source.value)
        known = torch.cat([known, known.new_tensor([int(known.max()) - 1])]) if len(known) < 2 else known
        place = torch.searchsorted(known, old.contiguous())
        step = torch.randint(1, len(known), old.shape, generator=bench.draw).to(old.device)
        changed[index] = known[(place + step) % len(known)]
    return dict.fromkeys(source.names, changed)


@remembered
def reach_in_bits(bench: Bench) -> Reach:
    """Return what moves, by one bit or more, when a token of the first row is another.

    Raises `NotPossibleError` where no token can be changed, `RaisedError` where the forward raises then. Empty where
    the module is run once alone.
    """
    if bench.once:
        return {}
    if not bench.sources:
        raise NotPossibleError("no argument holds tokens that could be changed")
    source = bench.sources[0]
    places = {place: source.at(0, place) for place in sorted({source.length // 2, source.length - 1})}
    if source.positions is None:
        places = {0: (0, slice(None), slice(0, 2), slice(0, 2))[: source.value.dim()]}
    outputs = {place: bench.run(other_tokens(bench, source, index)) for place, index in places.items()}
    return {place: bench.apart(output, bench.output) for place, output in outputs.items()}


def reach_of_tokens(bench: Bench) -> Reach:
    """Return what `reach_in_bits` does, 0 within rounding."""
    return {place: bench.beyond_rounding(apart) for place, apart in reach_in_bits(bench).items()}


@remembered
def reach_of_others(bench: Bench) -> Reach:
    """Return for each further source, by its place, what moves when its middle token is another, in the first row."""
    reach = {}
    for place, source in enumerate(bench.sources[1:], 1):
        if source.batch is not None and source.positions is not None:
            reach[place] = bench.moved(bench.run(other_tokens(bench, source, source.at(0, source.length // 2))))
    return reach

"""What a run may change, kept and put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class State:
    """What a run may change, at one moment: generators, buffers, modes, and what modules hold by name."""

    cpu: torch.Tensor
    gpus: dict[int, torch.Tensor]
    contents: list[tuple[torch.Tensor, torch.Tensor]]
    """Each buffer with a copy of its content."""
    held: list[tuple[Any, Any]]
    """What each module holds, with a copy of it; one that is scripted holds its own out of reach."""
    modes: list[tuple[nn.Module, bool]]
    """Whether each module is in training mode."""

    def restore(self) -> None:
        """Put everything back to this moment."""
        torch.set_rng_state(self.cpu)
        for gpu, numbers in self.gpus.items():
            torch.cuda.set_rng_state(numbers, gpu)
        with torch.no_grad():
            for buffer, content in self.contents:
                buffer.copy_(content)
        for names, held in self.held:
            _put_back(names, held)
        for part, mode in self.modes:
            if part.training != mode:
                part.training = mode


def held_by(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield what a module holds by name, and each list or dict of its own that a run may add to, with a copy of it."""
    yield vars(module), dict(vars(module))
    yield module._buffers, dict(module._buffers)
    for name, value in vars(module).items():
        if type(value) in (list, dict, set) and name not in _OF_EVERY_MODULE:
            yield value, copy.copy(value)


def _put_back(now: Any, before: Any) -> None:
    """Make a list, dict or set what it was. One that is so is not touched: another thread may be reading it."""
    if isinstance(now, dict):
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update({name: value for name, value in before.items() if name not in now or now[name] is not value})
    elif isinstance(now, list) and [*map(id, now)] != [*map(id, before)]:
        now[:] = before
    elif isinstance(now, set) and {*map(id, now)} != {*map(id, before)}:
        now.clear()
        now.update(before)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def seed_everything(seed: int) -> None:
    """Seed every generator that a module may draw from: torch's, Python's and numpy's."""
    # For a device that may yet come torch would write down the stack each time: a tenth of what a check takes.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

"""The tensors of the stages, kept so that what is done after the run does not change them.

While a run is recorded, a kept tensor is copied before its memory is written. Afterwards nobody looks, and the memory
may be anybody's: an output that was returned, an input, a parameter, a cache. So what somebody else holds is copied
once, when the run is over; all else is kept as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..graph.attention import Attention
from ..naming.axes import AxisNames
from .ops import Recording
from .storage import identity

Stages = tuple[dict[str, torch.Tensor], ...]
"""For each attention, stage name to tensor."""


def keep_stages(recording: Recording, attentions: Sequence[tuple[Attention, AxisNames]]) -> Stages:
    """The tensors of each attention's stages, in memory of their own. Of the recording nothing is kept any longer."""
    stages = tuple(
        {stage: recording.values[tensor.id] for stage, tensor in found.stages.items()} for found, _ in attentions
    )
    recording.values.clear()
    return unshared(stages)


def unshared(stages: Stages) -> Stages:
    """The same tensors, those copied whose memory is held by somebody else too."""
    every = {id(tensor): tensor for held in stages for tensor in held.values()}
    own = Counter(identity(tensor)[0] for tensor in every.values())
    kept = {
        number: tensor.clone() if _holders(tensor) > own[identity(tensor)[0]] else tensor
        for number, tensor in every.items()
    }
    return tuple({stage: kept[id(tensor)] for stage, tensor in held.items()} for held in stages)


def _holders(tensor: torch.Tensor) -> float:
    """How many tensors look at this one's memory, itself included; as many as you like where torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # no storage to ask, as in `storages.identity`: it is copied
        return float("inf")
    return float("inf") if count is None else int(count(storage._cdata)) - 1  # `storage` is one more

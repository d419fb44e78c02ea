"""The same with other arguments: keys of another input, no batch, one head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from . import packed, separate, weighing  # noqa: F401  what is varied here
from .entry import ENTRIES, Arguments, E, add


def with_another_input(batch: int, length: int) -> Arguments:
    """Return queries and what keys and values are made of, one token longer."""
    return (torch.randn(batch, length, E), torch.randn(batch, length + 1, E)), {}


for name in ("Base", "PackedKeyValue", "FoldHeadsBatch"):
    truth = replace(ENTRIES[name].attentions[0], kind=("cross",), lengths={"key": 13})
    add(
        replace(
            ENTRIES[name],
            name=f"{name}OfAnotherInput",
            given=with_another_input,
            attentions=(truth,),
            sizes=((7, 12),),
            twin=ENTRIES[name].twin and "BaseOfAnotherInput",
        )
    )


def without_batch(batch: int, length: int) -> Arguments:
    """Return `query embed`."""
    return (torch.randn(length, E),), {}


WITHOUT_BATCH = {
    "projected": "token (heads head_dim)",
    "split": "heads token head_dim",
    "pairs": "heads query key",
    "axes": {
        "query": "query embed",
        "key": "key embed",
        "value": "key embed",
        "concat": "query (heads head_dim)",
        "output": "query embed",
    },
}
for name in ("Base", "MaskedFill"):
    truth = replace(ENTRIES[name].attentions[0], **WITHOUT_BATCH)
    add(replace(ENTRIES[name], name=f"{name}WithoutBatch", given=without_batch, attentions=(truth,), twin=""))

for name in ("Base", "KeyFirst"):
    truth = replace(ENTRIES[name].attentions[0], heads=1)
    make = partial(ENTRIES[name].make, heads=1)
    add(replace(ENTRIES[name], name=f"{name}OfOneHead", make=make, attentions=(truth,), twin=""))

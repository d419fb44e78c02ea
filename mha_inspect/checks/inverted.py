"""A padding mask that is the wrong way round: it hides the real tokens and shows the padding.

    encoder(embed(tokens), src_key_padding_mask=tokens != 0)        # torch hides where it is True

An embedding with a `padding_idx` says which tokens are padding, and the weights which keys are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reports.check import Finding
from .evidence import Evidence


@dataclass(frozen=True, eq=False)
class _Padding:
    """Which tokens of a run are padding."""

    tokens: Tensor
    """`batch token`: True where the token is padding."""
    number: int
    """The id of a padding token."""
    embedding: str
    """The path of the embedding that has this `padding_idx`."""


def inverted_padding(evidence: Evidence) -> Iterator[Finding]:
    """Yield a mask that leaves exactly the padding visible, in every batch item that has any."""
    padding = _padding_of(evidence)
    if padding is None:
        return
    items = padding.tokens.any(1) & ~padding.tokens.all(1)
    for sight in evidence.sights:
        seen = sight.seen.any(1)  # batch key
        if not sight.masked or seen.shape != padding.tokens.shape or not bool(items.any()):
            continue
        if torch.equal(seen[items], padding.tokens[items]):
            yield sight.finding(
                "masking",
                f"The padding mask is inverted: the visible keys are exactly the tokens with id {padding.number}, the "
                f"padding_idx of {padding.embedding}.",
                f"In {int(items.sum())} of {len(items)} batch items with padding, no query sees a real token.",
                "Invert the mask where it is passed.",
            )
            return


def _padding_of(evidence: Evidence) -> _Padding | None:
    """Return the padding among the token ids of the run; None without ids, or without an embedding that names it."""
    source, recording = evidence.source, evidence.run.recording
    if source.value.is_floating_point() or source.value.dim() != 2 or source.value.is_meta:
        return None
    given = {named.tensor.id for named in recording.inputs if named.name in source.names}
    for op in recording.ops:
        if op.base_name != "embedding" or evidence.run.graph.before_moves(op.inputs[1]).id not in given:
            continue
        path = recording.parameter_names.get(op.inputs[0].id, "").rpartition(".")[0]
        number = getattr(evidence.subject.module.get_submodule(path), "padding_idx", None)
        if number is not None:
            return _Padding((source.value == number).cpu(), number, path)
    return None

"""Try the way out of an attention that takes the batch as positions: the same call with batch_first=True."""

from __future__ import annotations

from torch import nn

from .arguments import Source
from .evidence import Evidence
from .lab import NotPossibleError


def way_out(evidence: Evidence, source: Source, token: int) -> str:
    """Return what makes batch items independent, as a sentence; empty if it was tried and does not.

    `token` is the place of a token that changes other items.
    """
    try:
        with evidence.lab.changed_by(_set_batch_first):
            base = evidence.output_with({})
            output = evidence.output_with(source.others(token))
            is_changed = evidence.differences(output, base) > 0  # batch position
    except NotPossibleError:
        return ""
    is_apart = len(is_changed) == source.rows and bool(is_changed[0].any()) and not bool(is_changed[1:].any())
    return "Create the layer with batch_first=True." if is_apart else ""


def _set_batch_first(module: nn.Module) -> None:
    for part in module.modules():
        if getattr(part, "batch_first", None) is False:
            part.batch_first = True  # type: ignore[assignment]  # mypy takes attributes of a module for tensors or modules

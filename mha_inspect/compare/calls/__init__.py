"""Find why a call that continues from a cache differs from one call over all tokens: the first thing that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...naming.visibility import kinds_of
from ..pair import Why
from .bias import bias
from .entered import entered
from .operands import operands
from .output import output
from .pair import CallPair, Continued
from .rotated import rotated
from .rows import future, missing, other_sequence, slots
from .seen import seen

CallReason = Callable[[CallPair], Why | None]

BEFORE_THE_MASK: tuple[CallReason, ...] = (entered, future, slots, missing, rotated, operands)
"""Asked in this order; of the line that computes the scores."""
OF_THE_MASK: tuple[CallReason, ...] = (seen, bias)
"""Asked after them; of the line of the mask."""
OF_OTHER_SEQUENCES: tuple[CallReason, ...] = (entered, other_sequence)
"""Asked of an attention whose keys are not of the call's tokens."""


def reason_of(continued: Continued) -> Why | None:
    """Return the first thing that differs; None if the runs cannot be compared."""
    count = len(continued.whole.attentions)
    if count != len(continued.call.attentions) or not continued.named_call.attentions:
        return None
    kinds = kinds_of(continued.whole)
    for place in range(count):
        pair = CallPair.of(continued, place)
        if pair.is_of_other_tokens:
            continue  # e.g. of an encoder, which every call runs again
        if not pair.is_comparable:
            return None
        reason = _first(pair, is_cross="cross" in kinds[place])
        if reason is not None:
            return reason
    attention = "The attention" if count == 1 else "Every attention"
    return Why("call", f"{attention} of this call equals that of one call: an operation after it makes the difference.")


def _first(pair: CallPair, *, is_cross: bool) -> Why | None:
    """Return the first thing that differs in an attention, with the line that makes it."""
    attention = pair.right.attention
    line = attention.score_product.op.source
    line_of_mask = attention.masks[-1].source if attention.masks else line
    asked = [(reason, line) for reason in (OF_OTHER_SEQUENCES if is_cross else BEFORE_THE_MASK)]
    if not is_cross:
        asked += [(reason, line_of_mask) for reason in OF_THE_MASK]
    for reason, source in asked:
        found = reason(pair)
        if found is not None:
            return replace(found, source=source, module=attention.module)
    return output(pair)

"""Which stages before it a stage is computed from."""

from __future__ import annotations

from ..pair import Pair

MADE_OF = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "q_heads": ("q_proj", "query"),
    "k_heads": ("k_proj", "key"),
    "v_heads": ("v_proj", "value"),
    "scores": ("q_heads", "k_heads"),
    "masked_scores": ("scores",),
    "weights": ("masked_scores", "scores"),
    "context": ("weights", "v_heads"),
    "concat": ("context",),
    "output": ("concat", "context"),
}
"""Stage to the stages that it is computed from; of alternatives, the nearest first."""


def behind(stage: str) -> set[str]:
    """Return all stages that one is computed from, without the inputs of the attention."""
    found: set[str] = set()
    queue = [*MADE_OF.get(stage, ())]
    while queue:
        name = queue.pop()
        if name in MADE_OF and name not in found:
            found.add(name)
            queue += MADE_OF[name]
    return found


def equal_stages(pair: Pair, stage: str) -> list[str]:
    """Return the stages that one is computed from; the first stage that differs has equal ones before it."""
    both = pair.left.attention.stages.keys() & pair.right.attention.stages.keys()
    names = [name for name in MADE_OF.get(stage, ()) if name in both]
    joins_two = stage in ("scores", "context")
    return names if joins_two else names[:1]

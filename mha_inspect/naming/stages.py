"""The steps of attention as a textbook names them, and the axes in which two implementations are compared."""

from __future__ import annotations

CANONICAL_AXES: dict[str, str] = {
    "query": "batch query embed",
    "key": "batch key embed",
    "value": "batch key embed",
    "q_proj": "batch query (heads head_dim)",
    "k_proj": "batch key (kv_heads head_dim)",
    "v_proj": "batch key (kv_heads head_dim)",
    "q_heads": "batch heads query head_dim",
    "k_heads": "batch heads key head_dim",
    "v_heads": "batch heads key head_dim",
    "scores": "batch heads query key",
    "masked_scores": "batch heads query key",
    "weights": "batch heads query key",
    "context": "batch heads query head_dim",
    "concat": "batch query (heads head_dim)",
    "output": "batch query embed",
}
"""Stage name to its canonical axes, in the order in which they are computed."""

STAGES: tuple[str, ...] = tuple(CANONICAL_AXES)
"""The names alone. An attention has those that its implementation has; nothing is invented for the rest."""

"""Check that no position sees beyond a declared window, and that each sees all of it."""

from __future__ import annotations

from collections.abc import Iterator

from ...reports.check import Finding
from ..causal_masks import against_window
from ..evidence import Evidence
from ..lab import NotPossibleError, UndeclaredError
from ..registry import rule

_LONGER = "Give a longer input"


@rule(after=("softmax", "masking", "causal"), confirm="--window N", by_position=True)
def window(evidence: Evidence) -> Iterator[Finding]:
    """No position sees beyond its window.

    `--window N` declares that each position sees N positions, its own included. Nothing is changed: the
    keys that get weight from each query are counted. A checkpoint that was trained with another window
    gives other outputs, and a cache of N positions then lacks a key that training had.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --causal --window 4
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            ahead = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
            hidden = (ahead > 0) | (ahead < -4)
            scores = (q @ k.mT / 8**0.5).masked_fill(hidden, float("-inf"))
            weights = scores.softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        hidden = (ahead > 0) | (ahead < -4)
    +        hidden = (ahead > 0) | (ahead <= -4)
    ```
    """
    width = evidence.intent.window
    if width is None:
        raise UndeclaredError("--window N")
    if not evidence.sights:
        raise NotPossibleError("the scores do not show who sees whom")
    if all(sight.keys <= width or sight.queries < 2 for sight in evidence.sights):
        raise NotPossibleError(f"no query has more than {width} keys, so the window hides none", give=_LONGER)
    findings: list[Finding] = []
    is_any_right = is_any_global = is_window_wrong = False
    for sight in evidence.sights:
        finding = against_window(sight, width, evidence.intent.causal)
        if finding is None:
            is_any_right = True
        else:
            findings.append(finding)
        if sight.width is None:
            is_any_global = True
        elif finding is not None:
            is_window_wrong = True
    are_global_ones_meant = is_any_right and is_any_global and not is_window_wrong
    if not are_global_ones_meant:
        yield from findings[:1]

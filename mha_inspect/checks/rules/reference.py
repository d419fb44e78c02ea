"""Check that compares outputs: see `same`."""

from __future__ import annotations

from collections.abc import Iterator

from ...reports.check import Finding
from .. import same
from ..evidence import Evidence
from ..registry import rule


@rule(of_outputs="the output equals the reference's")
def reference(evidence: Evidence) -> Iterator[Finding]:
    """The output equals the reference's.

    `--reference TARGET` declares a trusted module. Both get the same inputs and the same weights, and
    their outputs are compared, then their stages, to name the first that differs. Use it after a
    rewrite: old checkpoints must still work. Here the features are split into heads in another order,
    which no other check can call wrong.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention --reference wrong.py:Trusted
    from torch import nn


    class Trusted(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))


    class Attention(Trusted):
        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            parts = (t.unflatten(-1, (8, 2)) for t in (q, k, v))
            q, k, v = (t.permute(0, 3, 1, 2) for t in parts)
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        parts = (t.unflatten(-1, (8, 2)) for t in (q, k, v))
    -        q, k, v = (t.permute(0, 3, 1, 2) for t in parts)
    +        parts = (t.unflatten(-1, (2, 8)) for t in (q, k, v))
    +        q, k, v = (t.permute(0, 2, 1, 3) for t in parts)
    ```
    """
    yield from same.reference(evidence)

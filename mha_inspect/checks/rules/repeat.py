"""Check that compares outputs: see `same`."""

from __future__ import annotations

from collections.abc import Iterator

from ...reports.check import Finding
from .. import same
from ..evidence import Evidence
from ..registry import rule


@rule(runs=True, after=("finite",), of_outputs="two runs in eval mode give the same output")
def repeat(evidence: Evidence) -> Iterator[Finding]:
    """Two runs in eval mode give the same output.

    The same input is given twice in eval mode, with different seeds, and the outputs are compared. The
    outputs must be equal. A dropout that ignores the mode stays on after training: each validation and
    each generated text is then random. The other cause is state that one call leaves for the next.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    import torch.nn.functional as F
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            weights = (q @ k.mT / 8**0.5).softmax(-1)
            weights = F.dropout(weights, 0.1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        weights = F.dropout(weights, 0.1)
    +        weights = F.dropout(weights, 0.1, self.training)
    ```
    """
    yield from same.repeat(evidence)

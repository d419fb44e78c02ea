"""Check that compares outputs: see `same`."""

from __future__ import annotations

from collections.abc import Iterator

from ...reports.check import Finding
from .. import same
from ..evidence import Evidence
from ..registry import rule


@rule(runs=True, after=("finite", "repeat"), of_outputs="with dropout off, train and eval give the same output")
def training(evidence: Evidence) -> Iterator[Finding]:
    """With dropout off, train and eval give the same output.

    The same input is given in train and in eval mode, with every dropout an identity, and the outputs are
    compared. If they differ, the evaluated model is not the model that was trained. Here the mask is
    causal in training alone: in eval each token sees later ones, which the model never learned to use.
    The report names the first stage that differs, and the cause if a change of this stage makes both
    the same.

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
            attend = F.scaled_dot_product_attention
            out = attend(q, k, v, is_causal=self.training)
            return self.out(out.transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        out = attend(q, k, v, is_causal=self.training)
    +        out = attend(q, k, v, is_causal=True)
    ```
    """
    yield from same.training(evidence)

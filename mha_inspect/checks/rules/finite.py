"""Find numbers that are not finite, and scores that would not be in float16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...graph.attention import Attention
from ...measure.run_report import in_heads
from ...naming.axes import AxisNames
from ...naming.pattern import STAGES
from ...naming.visibility import visibility
from ...record.arguments import tensors_in
from ...record.ops import TensorRef
from ...reports.check import Finding
from ..each_kind import of_each_kind
from ..evidence import Evidence
from ..lab import NotPossibleError
from ..registry import rule

_SMALLER_SCORES = "Scale the queries before the product, or compute the scores in float32."


@rule(after=("softmax",), of_outputs="the output is finite")
def finite(evidence: Evidence) -> Iterator[Finding]:
    """Every stage is finite.

    Nothing is changed: all stages of one run on finite inputs are searched for NaN and infinity, and
    the first is named. One NaN reaches every parameter through the gradients, and the training run is
    lost at that step. Here each visible key gets 0 · -inf, which is NaN.

    ## Wrong

    ```python
    # mha-inspect check wrong.py:Attention
    import torch
    from torch import nn


    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            future = torch.ones(x.shape[1], x.shape[1]).triu(1)
            scores = q @ k.mT / 8**0.5 + future * float("-inf")
            weights = scores.softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
    ```

    ## Right

    ```diff
    -        scores = q @ k.mT / 8**0.5 + future * float("-inf")
    +        scores = q @ k.mT / 8**0.5
    +        scores = scores.masked_fill(future.bool(), float("-inf"))
    ```
    """
    for name, tensor in tensors_in(evidence.values):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} contains NaN")
    stage = _first_unfinite_stage(evidence)
    if stage is not None:
        yield _unfinite(evidence, stage)
        return
    yield from _too_large_for_half(evidence)
    count = int((~evidence.output.isfinite()).sum())
    if count:
        proof = f"{count} of {evidence.output.numel()} numbers are NaN or infinite."
        more = ", although every stage of the attention is" if evidence.run.attentions else ""
        yield Finding("finite", f"The output is not finite{more}.", proof)


# -- stages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _UnfiniteStage:
    """A stage of an attention with numbers that are not finite."""

    attention: Attention
    names: AxisNames
    name: str
    tensor: TensorRef
    nan: int
    """Number of elements that are NaN."""
    infinite: int
    """Number of elements that are infinite; masked scores may be."""


def _first_unfinite_stage(evidence: Evidence) -> _UnfiniteStage | None:
    """Return the first stage with NaN or infinity; None without one."""
    for attention, names in evidence.run.attentions:
        for name, tensor in attention.stages.items():
            value = evidence.content(tensor)
            if value is None or not value.is_floating_point() or bool(value.sum().isfinite()):
                continue
            nan = int(value.isnan().sum())
            infinite = 0 if name == "masked_scores" else int(value.isinf().sum())
            if nan or infinite:
                return _UnfiniteStage(attention, names, name, tensor, nan, infinite)
    return None


def _unfinite(evidence: Evidence, stage: _UnfiniteStage) -> Finding:
    """Return why a stage is not finite, if it is known."""
    blind = _of_blind_queries(evidence, stage)
    if blind is not None:
        return blind
    tensor = stage.tensor
    if stage.infinite and tensor.dtype in ("float16", "bfloat16") and stage.name == "scores":
        largest = torch.finfo(getattr(torch, tensor.dtype)).max
        return _finding(
            evidence,
            stage,
            f"The {stage.name} overflow in {tensor.dtype}: {stage.infinite} of {tensor.numel} are infinite.",
            f"The largest number of this dtype is {largest:.3g}.",
            _SMALLER_SCORES,
        )
    return _finding(
        evidence,
        stage,
        f"{stage.name} is the first stage that is not finite: {stage.nan} of {tensor.numel} are NaN, "
        f"{stage.infinite} infinite.",
        "Every argument is finite.",
        "",
    )


def _of_blind_queries(evidence: Evidence, stage: _UnfiniteStage) -> Finding | None:
    """Return the fault that queries with every key masked out give the NaN; None if none do.

    Raises `NotPossibleError` where a causal mask that begins in the wrong place leaves the first query without keys.
    """
    is_after_scores = stage.name in STAGES[STAGES.index("scores") + 1 :]
    if not stage.nan or not is_after_scores:
        return None
    sight = visibility(evidence.run.graph, stage.attention, stage.names)
    if sight is None or not sight.blind:
        return None
    item, query = sight.blind[0]
    are_first_queries = all(position == 0 for _, position in sight.blind)
    is_causal_off = any(seen_keys.almost_causal for seen_keys in evidence.sights)
    if evidence.intent.causal and are_first_queries and is_causal_off:
        raise NotPossibleError("cannot be judged until causal passes", "until causal passes")
    more = f" (and {len(sight.blind) - 1} more)" if len(sight.blind) > 1 else ""
    heads = in_heads(sight.blind_heads)
    return _finding(
        evidence,
        stage,
        f"A query with every key masked out gives NaN, first in {stage.name}.",
        f"Query {query} of item {item}{more} has every key masked out{heads}; "
        f"{stage.nan} of {stage.tensor.numel} numbers are NaN.",
        "Leave each query a key, or give its scores a finite number before the softmax.",
    )


def _finding(evidence: Evidence, stage: _UnfiniteStage, sentence: str, proof: str, fix: str) -> Finding:
    """Return a finding about a stage; it is a suspicion if the context does not have the numbers any more."""
    is_replaced = stage.name == "weights" and _is_finite(evidence.content(stage.attention.stages["context"]))
    if is_replaced:
        proof += " The weights are replaced before the context."
    return Finding(
        "finite",
        sentence,
        proof,
        sure=not is_replaced,
        source=evidence.line_of(stage.tensor),
        module=stage.attention.module,
        fix=fix,
    )


def _is_finite(value: Tensor | None) -> bool:
    return value is not None and bool(value.isfinite().all())


# -- half precision ---------------------------------------------------------------------------------------------------


@partial(of_each_kind, "")
def _too_large_for_half(evidence: Evidence, attention: Attention, _: AxisNames) -> Iterator[Finding]:
    """Yield products of queries and keys that are too large for float16."""
    op, largest = attention.score_product.op, torch.finfo(torch.float16).max
    value = evidence.content(op.output)
    if value is None or value.dtype not in (torch.float32, torch.float64) or not value.numel():
        return
    size = float(value.abs().max())
    if largest < size < math.inf:
        yield Finding(
            "finite",
            f"In float16 the scores would overflow: the largest product of a query and a key is {size:.3g}.",
            f"The largest number of float16 is {largest:.3g}; in {op.output.dtype} the product is finite.",
            sure=False,
            source=op.source,
            fix=_SMALLER_SCORES,
        )

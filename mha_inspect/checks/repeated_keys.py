"""Check that no key is there several times: a sequence that was repeated in the place of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..compare.replay import content_of
from ..graph.attention import Attention
from ..measure.repeats import row_of_each
from ..naming.axes import AxisNames
from ..naming.pattern import dims_of
from ..reports.check import Finding
from .each_kind import of_each_kind
from .evidence import Evidence


@partial(of_each_kind, "")
def repeated_keys(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if each key and its value are there several times, bit for bit, `batch kv_heads (key 4) head_dim`.

    It is sure if the number of times is that of the query heads that share a key head.
    """
    projected = attention.stages.get("k_proj")
    keys = _along_keys(evidence, attention, names, "k_heads")
    values = _along_keys(evidence, attention, names, "v_heads")
    if projected is None or keys is None or values is None:
        return
    count = names.lengths[1]
    for tokens in dict.fromkeys(projected.shape[:-1]):
        times, rest = divmod(count, max(tokens, 1))
        if rest or times < 2:
            continue
        if keys.is_repeated(times) and values.is_repeated(times):
            proof = f"{count} keys and values are {tokens} tokens of k_proj, each repeated {times} times, bit for bit."
            if times == names.num_heads // names.num_kv_heads:
                yield _instead_of_heads(attention, times, proof)
            else:
                yield _along_sequence(attention, times, proof)
            return


def _instead_of_heads(attention: Attention, times: int, proof: str) -> Finding:
    return Finding(
        "grouped",
        f"Each key occurs {times} times: the sequence was repeated instead of the heads.",
        proof,
        source=attention.score_product.op.source,
        fix="Use .transpose(1, 2) before the heads are repeated, so that dimension 1 is the heads.",
    )


def _along_sequence(attention: Attention, times: int, proof: str) -> Finding:
    return Finding(
        "grouped",
        f"Each key occurs {times} times.",
        proof,
        sure=False,
        source=attention.score_product.op.source,
        fix="Remove the repeat of the keys and values along the sequence.",
    )


@dataclass(frozen=True, eq=False)
class _Heads:
    """The keys or values in heads."""

    content: Tensor
    axis: int
    """The dimension of their tokens."""

    def is_repeated(self, times: int) -> bool:
        """Return whether each token is there so many times."""
        return row_of_each(self.content, self.axis, times) is not None


def _along_keys(evidence: Evidence, attention: Attention, names: AxisNames, stage: str) -> _Heads | None:
    """Return the keys or values in heads; None if there is no such stage, or not one dimension of its tokens."""
    tensor = attention.stages.get(stage)
    if tensor is None:
        return None
    axes = [axis for axis, words in enumerate(dims_of(names.of_stage(stage))) if "key" in words]
    if len(axes) != 1 or tensor.shape[axes[0]] != names.lengths[1]:
        return None
    return _Heads(content_of(evidence, tensor), axes[0])

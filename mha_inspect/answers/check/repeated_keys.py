"""Check that no key is there several times: a sequence that was repeated in the place of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ...graph.attention import Attention
from ...measure.repeats import row_of_each
from ...naming.axes import AxisNames
from ...naming.pattern import dims_of
from ...reports.check import Finding
from .each_kind import of_each_kind
from .evidence import Evidence
from .replay import content_of


@partial(of_each_kind, "")
def repeated_keys(evidence: Evidence, attention: Attention, names: AxisNames) -> Iterator[Finding]:
    """Yield a fault if each key and its value are there several times, bit for bit, `batch kv_heads (key 4) head_dim`.

    It is sure if the number of times is that of the query heads that share a key head.
    """
    projected = attention.stages.get("k_proj")
    sides = [_along_keys(evidence, attention, names, stage) for stage in ("k_heads", "v_heads")]
    if projected is None or None in sides:
        return
    keys = names.lengths[1]
    for tokens in dict.fromkeys(projected.shape[:-1]):
        times, rest = divmod(keys, max(tokens, 1))
        if rest or times < 2 or any(side is None or row_of_each(*side, times) is None for side in sides):
            continue
        is_group = times == names.num_heads // names.num_kv_heads
        instead = ": the sequence was repeated instead of the heads" if is_group else ""
        transpose = "Use .transpose(1, 2) before the heads are repeated, so that dimension 1 is the heads."
        yield Finding(
            "grouped",
            f"Each key occurs {times} times{instead}.",
            f"{keys} keys and values are {tokens} tokens of k_proj, each repeated {times} times, bit for bit.",
            sure=is_group,
            source=attention.score_product.op.source,
            fix=transpose if is_group else "Remove the repeat of the keys and values along the sequence.",
        )
        return


def _along_keys(evidence: Evidence, attention: Attention, names: AxisNames, stage: str) -> tuple[Tensor, int] | None:
    """Return the keys or values in heads, and the dimension of their tokens; None if there is no such stage."""
    tensor = attention.stages.get(stage)
    if tensor is None:
        return None
    places = [at for at, dim in enumerate(dims_of(names.of_stage(stage))) if "key" in dim]
    if len(places) != 1 or tensor.shape[places[0]] != names.lengths[1]:
        return None
    return content_of(evidence, tensor), places[0]

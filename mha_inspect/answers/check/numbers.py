"""Stages that are not finite, and scores that would not be in half precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...naming.visibility import visibility
from ...record.arguments import tensors_in
from ...reports.check import Finding
from .bench import Bench, each_kind
from .runner import NotPossibleError
from .tokens import Tokens

_SMALLER_SCORES = "scale the queries before the product, or compute the scores in float32."


def finite(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage that is not finite."""
    for name, tensor in tensors_in(bench.values):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} has NaN in it")
    finding = next(_unfinite(bench), None)
    if finding is not None:
        yield finding
        return
    yield from _too_large_for_half(bench)
    unfinite = int((~bench.output.isfinite()).sum())
    if unfinite:
        evidence = f"{unfinite} of {bench.output.numel()} numbers."
        yield Finding("finite", "The output is not finite, and every stage of attention is.", evidence)


def _unfinite(bench: Bench) -> Iterator[Finding]:
    """Yield stages that are not finite, in order."""
    run = bench.recorded
    for attention, names in run.attentions:
        for stage, ref in attention.stages.items():
            value = run.recording.values.get(ref.id)
            if value is None or not value.is_floating_point() or bool(value.sum().isfinite()):
                continue
            nan = int(value.isnan().sum())
            infinite = 0 if stage == "masked_scores" else int(value.isinf().sum())
            if not nan and not infinite:
                continue
            known = visibility(run.graph, attention, names) if nan else None
            if known is not None and known.blind:
                row, query = known.blind[0]
                sentence = f"A query to which no key is left gives NaN, first in {stage}."
                more = f", and to {len(known.blind) - 1} more" if len(known.blind) > 1 else ""
                evidence = (
                    f"Every key is barred to query {query} of row {row}{more}; {nan} of {ref.numel} numbers are NaN."
                )
                fix = "leave each query a key, or set the weights of such rows to zero."
            elif infinite and ref.dtype in ("float16", "bfloat16") and stage == "scores":
                sentence = f"The {stage} overflow in {ref.dtype}: {infinite} of {ref.numel} are infinite."
                largest = torch.finfo(value.dtype).max
                evidence, fix = f"The largest number of this dtype is {largest:.3g}.", _SMALLER_SCORES
            else:
                sentence = (
                    f"{stage} is the first stage that is not finite: {nan} NaN and {infinite} infinite of {ref.numel}."
                )
                evidence, fix = "Every argument is finite.", ""
            op = run.recording.producer(ref)
            yield Finding(
                "finite", sentence, evidence, source=op.source if op else "", module=attention.module, fix=fix
            )


@each_kind()
def _too_large_for_half(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield products of queries and keys that float16 has no number for."""
    largest, op = torch.finfo(torch.float16).max, tokens.attention.score_product.op
    value = bench.recorded.recording.values.get(op.output.id)
    if value is None or value.dtype not in (torch.float32, torch.float64) or not value.numel():
        return
    size = float(value.abs().max())
    if largest < size < float("inf"):
        yield Finding(
            "finite",
            f"In float16 the scores would overflow: the largest product of a query and a key is {size:.3g}.",
            f"The largest number of float16 is {largest:.3g}; in {op.output.dtype} the product is finite.",
            sure=False,
            source=op.source,
            fix=_SMALLER_SCORES,
        )

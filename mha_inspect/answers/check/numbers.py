"""Faults of the numbers: stages that are not finite, and kernels that give something else than their steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...graph.evaluate import Replay
from ...record.arguments import tensors_in
from ...reports.check import Finding
from ..masked_rows import fully_masked_rows
from .bench import Bench, NotPossibleError, each_kind
from .tokens import Tokens

_SMALLER_SCORES = "scale the queries before the product, or compute the scores in float32."


def finite(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage that is not finite."""
    for name, tensor in tensors_in(bench.values):
        if tensor.is_floating_point() and "mask" not in name and bool(tensor.isnan().any()):
            raise NotPossibleError(f"the argument {name} has NaN in it")
    found = next(_unfinite(bench), None)
    if found is not None:
        yield found
        return
    yield from each_kind(bench, _too_large_for_half)
    unfinite = int((~bench.output.isfinite()).sum())
    if unfinite:
        evidence = f"{unfinite} of {bench.output.numel()} numbers."
        yield Finding("finite", "The output is not finite, and every stage of attention is.", evidence)


def _unfinite(bench: Bench) -> Iterator[Finding]:
    """Yield stages that are not finite, in order."""
    recording = bench.seen.recording
    rows = fully_masked_rows(bench.seen, Replay(recording, bench.own.leaves(recording)))
    for (found, _), masked in zip(bench.seen.attentions, rows, strict=True):
        for stage, made in found.stages.items():
            nan, infinite = bench.evidence.unfinite.get(made.id, (0, 0))
            infinite = 0 if stage == "masked_scores" else infinite
            if not nan and not infinite:
                continue
            overflows = infinite and made.dtype in ("float16", "bfloat16") and stage in ("scores", "masked_scores")
            if nan and masked:
                row, query = masked[0]
                sentence = f"A query to which no key is left gives NaN, first in {stage}."
                more = f", and to {len(masked) - 1} more" if len(masked) > 1 else ""
                evidence = (
                    f"Every key is barred to query {query} of row {row}{more}; {nan} of {made.numel} numbers are NaN."
                )
                fix = "leave each query a key, or set the weights of such rows to zero."
            elif overflows:
                sentence = f"The {stage} overflow in {made.dtype}: {infinite} of {made.numel} are infinite."
                largest = torch.finfo(getattr(torch, made.dtype)).max
                evidence, fix = f"The largest number of this dtype is {largest:.3g}.", _SMALLER_SCORES
            else:
                sentence = (
                    f"{stage} is the first stage that is not finite: {nan} NaN and {infinite} infinite of {made.numel}."
                )
                evidence, fix = "Every argument is finite.", ""
            op = recording.producer(made)
            source = op.source if op else ""
            yield Finding("finite", sentence, evidence, source=source, module=found.module, fix=fix)


def _too_large_for_half(bench: Bench, tokens: Tokens) -> Iterator[Finding]:
    """Yield products of queries and keys that float16 has no number for."""
    largest, op = torch.finfo(torch.float16).max, tokens.found.score_product.op
    value = bench.seen.recording.values.get(op.output.id)
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


def kernels(bench: Bench) -> Iterator[Finding]:
    """Yield fused kernels whose own steps give something else."""
    recording = bench.seen.recording
    if not recording.kernels:
        raise NotPossibleError("no fused kernel ran")
    for place, kernel in enumerate(recording.kernels):
        check = kernel.check
        if check is not None and check.verdict == "differs" and check.difference > 1e-3:
            op = next((op for op in recording.ops if op.kernel == place), None)
            yield Finding(
                "kernels",
                f"{kernel.title} gives something else than its own steps: {check.difference:.3g} apart.",
                f"That is {check.times:.3g} times its rounding error.",
                sure=False,
                source=op.source if op else "",
                module=op.module if op else "",
            )

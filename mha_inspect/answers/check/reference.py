"""What a reference shows: the first stage at which a trusted module computes something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...naming.canonical import contents_of
from ...naming.stages import STAGES
from ...naming.subject import Run
from ...reports.check import Finding
from .bench import LOOSE, Bench
from .outputs import NotPossibleError, difference


def reference(bench: Bench) -> Iterator[Finding]:
    """Yield the first stage at which a trusted module computes something else, and what would make it the same."""
    trusted = bench.intent.reference
    if trusted is None:
        raise NotPossibleError("not declared: reference")
    args, kwargs = bench.given.of_call({})
    own = replace(bench.subject, module=trusted, args=args, kwargs=kwargs, without_ones=None)
    try:
        with own.replaying(own.state()):
            trusted.eval()
            other = own.recorded(keep=True)
    except Exception as error:  # whatever somebody's code may raise
        raise NotPossibleError(f"the reference raises on these arguments: {type(error).__name__}") from error
    theirs = bench.output_of(other.returned)
    if theirs.shape != bench.output.shape:
        yield Finding(
            "reference",
            f"The output is {list(bench.output.shape)}, and the reference's is {list(theirs.shape)}.",
            "Both were run on the same arguments.",
        )
        return
    apart = float(difference(bench.output, theirs).max())
    if apart <= LOOSE * bench.limit:
        return
    where, line, module, fix = next(_parting(bench.recorded, other), ("the output", "", "", ""))
    yield Finding(
        "reference",
        f"The reference gives something else, by {apart:.3g}: the first that differs is {where}.",
        "Both were run on the same arguments, and their stages compared in canonical axes.",
        source=line,
        module=module,
        fix=fix,
    )


def _parting(mine: Run, theirs: Run) -> Iterator[tuple[str, str, str, str]]:
    """Yield the stage of each attention that differs first, its line and module, and what would make it the same."""
    if len(mine.attentions) != len(theirs.attentions):
        return
    for place, (own, other) in enumerate(zip(mine.attentions, theirs.attentions, strict=True), 1):
        ours, held = contents_of(mine, *own), contents_of(theirs, *other)
        for stage in STAGES:
            if stage in ours and stage in held and _differs(ours[stage], held[stage]):
                op, fix = mine.recording.producer(own[0].stages[stage]), _same_if(stage, ours, held)
                yield f"{stage} of attention {place}", op.source if op else "", own[0].module, fix
                break


def _differs(mine: Tensor, yours: Tensor) -> bool:
    if mine.shape != yours.shape or not mine.numel():
        return mine.shape != yours.shape
    mine, yours = mine.double(), yours.double()
    near = (mine - yours).abs() <= 1e-4 * yours[yours.isfinite()].abs().max().clamp(min=1e-6)
    low = (mine < -1e4) & (yours < -1e4)
    return not bool((near | low | (mine == yours)).all())


def _same_if(stage: str, ours: dict[str, Tensor], held: dict[str, Tensor]) -> str:
    """What would make a stage the same as the reference's; empty where nothing that was tried does."""
    if stage in ("masked_scores", "weights"):
        return "the scores are the same: the masks differ."
    mine, yours = ours[stage], held[stage]
    if stage.endswith(("_proj", "_heads")):
        others = [f"{letter}{stage[1:]}" for letter in "qkv" if letter != stage[0]]
        same = next((other for other in others if other in held and not _differs(mine, held[other])), "")
        if same:
            return f"it is the same as the reference's {same}: take query, key and value in another order."
    if mine.shape != yours.shape:
        return ""
    if stage == "scores":
        known = yours.abs() > 1e-3 * yours.abs().max()
        ratio = (mine[known] / yours[known]).double()
        if ratio.numel() and float(ratio.std() if ratio.numel() > 1 else 0) < 1e-3 * abs(float(ratio.mean())):
            return f"they are {float(ratio.mean()):.4g} times the reference's: another scale."
    if stage.endswith(("_heads", "_proj", "concat", "context")):
        head_dim = ours["q_heads"].shape[-1] if "q_heads" in ours else 0
        ways = (name for name, order in _orders(mine, head_dim) if not _differs(order, yours))
        return next((f"it would be the same with {name}." for name in ways), "")
    return ""


def _orders(value: Tensor, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """A stage with its heads or features in other orders."""
    if value.dim() == 4:
        yield "the heads in reverse", value.flip(1)
        if value.shape[-1] % 2 == 0:
            yield "rotary halves instead of pairs", torch.cat([value[..., ::2], value[..., 1::2]], -1)
            yield "rotary pairs instead of halves", torch.stack(value.chunk(2, -1), -1).flatten(-2)
    elif head_dim and value.shape[-1] % head_dim == 0:
        split, turned = (value.reshape(*value.shape[:-1], *sizes) for sizes in ((-1, head_dim), (head_dim, -1)))
        yield "features as (head_dim heads), not (heads head_dim)", split.mT.flatten(-2)
        yield "features as (heads head_dim), not (head_dim heads)", turned.mT.flatten(-2)
        yield "the heads in reverse", split.flip(-2).flatten(-2)

"""Prove that the opened stages compute what the plain forward computes, beside the rounding error measured here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ..reports.trace import Proof
from ..targets.memory import is_out_of_memory
from .arguments import tensors_in
from .kernels import fused_kernels
from .ops import Op
from .recorder import opened as opening
from .rounding import first_tensor, float64_output, judge, max_difference, noise_floor, rounding_error
from .subject import Forward, Run, Subject

_ON_META = Proof(None, None, None, "device meta has shapes and no numbers")


def nothing_hidden(plain: Run) -> Proof:
    """What there is to say where the stages were read off the plain run itself."""
    if any(tensor.is_meta for _, tensor in tensors_in(plain.returned)):
        return _ON_META
    return Proof(0.0, None, True, "nothing was hidden: the stages shown are the plain run's")


def prove(forward: Subject, plain: Run, opened: Run, *, drops: bool, rows: Sequence[tuple[int, int]] = ()) -> Proof:
    """Compare the first output of the two runs.

    Args:
        forward: what was run.
        plain: the run as it is.
        opened: the run that the stages were read off.
        drops: whether dropout may be at work. Its numbers are the same in both runs unless a fused kernel draws them;
            the noise floor is measured without it.
        rows: (batch, query) of the fully masked rows, which two paths treat differently.
    """
    try:
        output, other = first_tensor(opened.returned).detach(), first_tensor(plain.returned).detach()
    except InputError:
        return Proof(None, None, None, "the module returned no tensor")
    if output.is_meta:
        return _ON_META
    drops = drops and any(map(draws, plain.recording.ops))
    if drops and any(map(draws, fused_kernels(plain.recording))):
        return Proof(None, None, None, "a fused kernel draws its dropout in another order: nothing to compare")
    difference = max_difference(other, output)
    try:
        # Opened as well: measured against the other path's, an error of the opened one would pass for its rounding.
        with opening():
            exact = float64_output(forward.module, forward.args, forward.kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # a module that cannot run in float64
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = "there is no room for that" if is_out_of_memory(error) else reason
        return Proof(difference, None, True if difference == 0 else None, f"it does not run in float64: {reason}")
    notes = []
    if output.dtype == torch.float64 or forward.module.training:
        with opening():
            floor = noise_floor(forward.module, forward.args, forward.kwargs, exact)
        notes += ["noise floor measured without dropout"] if drops else []
    else:
        floor = rounding_error(output, exact)
    _, verdict = judge(difference, floor)
    if floor == 0 and output.numel() and not bool(output.isfinite().any()):
        notes.append("no number in either is finite")
    if verdict == "differs" and rows and isinstance(forward, Forward):
        rest = _without(forward, rows, output.shape)
        if judge(max_difference(other[rest], output[rest]), floor)[1] != "differs":
            notes.append("only the fully masked rows differ")
    if verdict == "differs" and any(op.base_name == "to_padded_tensor" for op in plain.recording.ops):
        rest = other.ne(0).any(dim=-1)
        if judge(max_difference(other[rest], output[rest]), floor)[1] != "differs":
            notes.append("only padding differs: the plain run packs the rows without it and leaves zeros there")
    return Proof(difference, floor, verdict != "differs", "; ".join(notes))


def draws(op: Op) -> bool:
    """Whether an operation drops elements at random: a dropout, or a fused kernel that was given a probability."""
    return op.does("draws") or (
        op.base_name.startswith("_scaled_dot_product") and any(isinstance(arg, float) and arg > 0 for arg in op.args)
    )


def _without(forward: Forward, rows: Sequence[tuple[int, int]], shape: torch.Size) -> torch.Tensor:
    """Where an output `batch query embed`, in the layout that it has, is not in one of the rows."""
    keep = torch.ones(forward.inputs.batch, forward.inputs.query_len, dtype=torch.bool)
    for batch, query in rows:
        keep[batch, query] = False
    if len(shape) == 2:
        keep = keep[0]
    elif not forward.spec.batch_first:
        keep = keep.T
    return keep
